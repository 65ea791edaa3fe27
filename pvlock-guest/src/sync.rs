//! The atomics of this crate: `core`'s, or loom's in a model (`--cfg pvlock_loom`). Nothing else in the crate knows.

#[cfg(not(pvlock_loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(pvlock_loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};

pub(crate) use core::sync::atomic::{Ordering, compiler_fence};

/// A `const fn` outside loom, whose atomics cannot be made at compile time.
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
pub(crate) use const_unless_loom;

/// An array of equal elements, made at compile time outside loom.
macro_rules! array {
    ($element:expr) => {{
        #[cfg(not(pvlock_loom))]
        let array = [const { $element }; _];
        #[cfg(pvlock_loom)]
        let array = core::array::from_fn(|_| $element);
        array
    }};
}
pub(crate) use array;

/// Whether this thread unwinds from a failed model, whose atomics are gone.
#[cfg(pvlock_loom)]
pub(crate) fn model_failed() -> bool {
    loom::thread::panicking()
}

/// Only models fail.
#[cfg(not(pvlock_loom))]
#[inline(always)]
pub(crate) const fn model_failed() -> bool {
    false
}
