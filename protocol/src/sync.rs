//! The atomics of this crate: `core`'s, or in a model loom's (`--cfg pvlock_loom`), or shuttle's (`--cfg pvlock_shuttle` as well).

#[cfg(not(pvlock_loom))]
pub use core::sync::atomic::{AtomicU64, fence};
#[cfg(all(pvlock_loom, not(pvlock_shuttle)))]
pub use loom::sync::atomic::{AtomicU64, fence};
#[cfg(all(pvlock_loom, pvlock_shuttle))]
pub use shuttle::sync::atomic::{AtomicU64, fence};

#[cfg(all(pvlock_shuttle, not(pvlock_loom)))]
compile_error!("shuttle takes loom's place in a model: RUSTFLAGS=\"--cfg pvlock_loom --cfg pvlock_shuttle\"");

pub use core::sync::atomic::Ordering;

/// A `const fn` outside loom, whose atomics cannot be made at compile time.
#[doc(hidden)]
#[macro_export]
macro_rules! const_unless_loom {
    ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => {
        #[cfg(not(pvlock_loom))]
        $(#[$meta])*
        $vis const fn $($rest)*
        #[cfg(pvlock_loom)]
        $(#[$meta])*
        $vis fn $($rest)*
    };
}

/// An array of equal elements, made at compile time outside loom.
#[doc(hidden)]
#[macro_export]
macro_rules! array {
    ($element:expr) => {{
        #[cfg(not(pvlock_loom))]
        let array = [const { $element }; _];
        #[cfg(pvlock_loom)]
        let array = core::array::from_fn(|_| $element);
        array
    }};
}
