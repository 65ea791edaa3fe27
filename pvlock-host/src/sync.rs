//! Atomics and the engine's own lock: `core`'s and `lock_api`'s, or in a model loom's (`--cfg pvlock_loom`), or shuttle's
//! (`--cfg pvlock_shuttle` as well).

#[cfg(all(pvlock_loom, not(pvlock_shuttle)))]
use loom as model;
#[cfg(all(pvlock_loom, pvlock_shuttle))]
use shuttle as model;

#[cfg(not(pvlock_loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(pvlock_loom)]
pub(crate) use model::sync::atomic::{AtomicU32, AtomicU64, fence};
#[cfg(all(pvlock_loom, feature = "std"))]
pub(crate) use model::sync::{Condvar, Mutex};

pub(crate) use core::sync::atomic::Ordering;

/// The lock around one vCPU's queue. `R` is the host's choice: a futex lock in user space, an interrupt-safe one in a
/// hypervisor; never a plain spinlock where the holder can be preempted.
#[cfg(not(pvlock_loom))]
pub(crate) type Lock<R, T> = lock_api::Mutex<R, T>;

#[cfg(pvlock_loom)]
pub(crate) struct Lock<R, T>(model::sync::Mutex<T>, core::marker::PhantomData<fn() -> R>);

#[cfg(pvlock_loom)]
impl<R, T> Lock<R, T> {
    pub(crate) fn new(value: T) -> Self {
        Self(model::sync::Mutex::new(value), core::marker::PhantomData)
    }

    pub(crate) fn lock(&self) -> model::sync::MutexGuard<'_, T> {
        // A panic in a model ends the model.
        self.0.lock().unwrap()
    }
}
