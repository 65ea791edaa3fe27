//! The atomics of this crate: `core`'s, or loom's in a model (`--cfg pvlock_loom`). Nothing else in the crate knows.

#[cfg(not(pvlock_loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(pvlock_loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};

pub(crate) use core::sync::atomic::{Ordering, compiler_fence};

pub(crate) use pvlock_protocol::{array, const_unless_loom};

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
