//! Mutexes over `lock_api` 0.4, whose guards carry nothing: the owner keeps its ticket and what the scope saved in the lock.

use crate::{InterruptsOff, PreemptableTicketLock, PreemptionOff, RawLock, Scope, Scoped, TicketLock};
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
pub use lock_api_04 as lock_api;

/// A preemptable ticket lock around a `T`, the one to use unless order is all that counts; preemption is disabled while it is
/// held.
pub type PreemptableTicketMutex<T, P> = lock_api::Mutex<Owned<PreemptableTicketLock<P>>, T>;
/// A preemptable ticket lock around a `T`; interrupts are disabled while it is held.
pub type IrqPreemptableTicketMutex<T, P> = lock_api::Mutex<Owned<PreemptableTicketLock<P>, InterruptsOff>, T>;
/// A strict ticket lock around a `T`; preemption is disabled while it is held.
pub type TicketMutex<T, P> = lock_api::Mutex<Owned<TicketLock<P>>, T>;
/// A strict ticket lock around a `T`; interrupts are disabled while it is held.
pub type IrqTicketMutex<T, P> = lock_api::Mutex<Owned<TicketLock<P>, InterruptsOff>, T>;

/// A scoped lock that remembers its owner's token.
pub struct Owned<L: RawLock, S: Scope = PreemptionOff> {
    lock: Scoped<L, S>,
    token: UnsafeCell<MaybeUninit<<Scoped<L, S> as RawLock>::Token>>,
}

// SAFETY: only the owner of the lock touches `token`, from the return of `lock` until just before `unlock`.
unsafe impl<L: RawLock + Sync, S: Scope> Sync for Owned<L, S> {}

// SAFETY: `RawLock`'s contract is this trait's.
unsafe impl<L: RawLock, S: Scope> lock_api::RawMutex for Owned<L, S> {
    const INIT: Self = Self { lock: RawLock::INIT, token: UnsafeCell::new(MaybeUninit::uninit()) };

    /// The owner stays on its vCPU.
    type GuardMarker = lock_api::GuardNoSend;

    #[inline]
    fn lock(&self) {
        let token = self.lock.lock();
        // SAFETY: the lock is ours, and so is the cell.
        unsafe { (*self.token.get()).write(token) };
    }

    #[inline]
    fn try_lock(&self) -> bool {
        let Some(token) = self.lock.try_lock() else { return false };
        // SAFETY: the lock is ours, and so is the cell.
        unsafe { (*self.token.get()).write(token) };
        true
    }

    #[inline]
    unsafe fn unlock(&self) {
        // SAFETY: the caller owns the lock, so its `lock` or `try_lock` has filled the cell, and nobody else touches it.
        // It is read before the release; afterwards the next owner may fill it.
        let token = unsafe { (*self.token.get()).assume_init_read() };
        // SAFETY: the caller's contract.
        unsafe { self.lock.unlock(token) };
    }

    fn is_locked(&self) -> bool {
        self.lock.is_locked()
    }
}

// SAFETY: as above.
unsafe impl<L: RawLock, S: Scope> lock_api::RawMutexFair for Owned<L, S> {
    #[inline]
    unsafe fn unlock_fair(&self) {
        // SAFETY: as in `unlock`.
        let token = unsafe { (*self.token.get()).assume_init_read() };
        // SAFETY: the caller's contract.
        unsafe { self.lock.unlock_fair(token) };
    }
}
