//! The atomics of this crate: `core`'s, or loom's in a model (`--cfg pvlock_loom`).

#[cfg(not(pvlock_loom))]
pub use core::sync::atomic::{AtomicU64, fence};
#[cfg(pvlock_loom)]
pub use loom::sync::atomic::{AtomicU64, fence};

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
