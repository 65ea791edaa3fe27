//! The atomics of this crate: `core`'s, or in a model loom's (`--cfg pvlock_loom`), or shuttle's (`--cfg pvlock_shuttle` as well).
//! Nothing else in the crate knows.

#[cfg(not(pvlock_loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(all(pvlock_loom, not(pvlock_shuttle)))]
use loom as model;
#[cfg(all(pvlock_loom, pvlock_shuttle))]
use shuttle as model;

#[cfg(pvlock_loom)]
pub(crate) use model::sync::atomic::{AtomicU32, AtomicU64};

pub(crate) use core::sync::atomic::{Ordering, compiler_fence};

pub(crate) use pvlock_protocol::{array, const_unless_loom};

/// Whether this thread unwinds from a failed model, whose atomics are gone.
#[cfg(pvlock_loom)]
pub(crate) fn model_failed() -> bool {
    model::thread::panicking()
}

/// Only models fail.
#[cfg(not(pvlock_loom))]
#[inline(always)]
pub(crate) const fn model_failed() -> bool {
    false
}
