//! Mutexes over `lock_api` 0.5, whose guards carry the ticket and what the scope saved.

use crate::{InterruptsOff, PreemptableTicketLock, RawLock, Scope, Scoped, TicketLock};
pub use lock_api_05 as lock_api;

/// A preemptable ticket lock around a `T`, the one to use unless order is all that counts; preemption is disabled while it is
/// held.
pub type PreemptableTicketMutex<T, P> = lock_api::Mutex<Scoped<PreemptableTicketLock<P>>, T>;
/// A preemptable ticket lock around a `T`; interrupts are disabled while it is held.
pub type IrqPreemptableTicketMutex<T, P> = lock_api::Mutex<Scoped<PreemptableTicketLock<P>, InterruptsOff>, T>;
/// A strict ticket lock around a `T`; preemption is disabled while it is held.
pub type TicketMutex<T, P> = lock_api::Mutex<Scoped<TicketLock<P>>, T>;
/// A strict ticket lock around a `T`; interrupts are disabled while it is held.
pub type IrqTicketMutex<T, P> = lock_api::Mutex<Scoped<TicketLock<P>, InterruptsOff>, T>;

// SAFETY: `RawLock`'s contract is this trait's.
unsafe impl<L: RawLock, S: Scope> lock_api::RawMutex for Scoped<L, S> {
    const INIT: Self = <Self as RawLock>::INIT;

    type Guard = <Self as RawLock>::Token;

    #[inline]
    fn lock(&self) -> Self::Guard {
        RawLock::lock(self)
    }

    #[inline]
    fn try_lock(&self) -> Option<Self::Guard> {
        RawLock::try_lock(self)
    }

    #[inline]
    unsafe fn unlock(&self, guard: Self::Guard) {
        // SAFETY: the caller's contract.
        unsafe { RawLock::unlock(self, guard) }
    }

    fn is_locked(&self) -> bool {
        RawLock::is_locked(self)
    }
}

// SAFETY: as above.
unsafe impl<L: RawLock, S: Scope> lock_api::RawMutexFair for Scoped<L, S> {
    #[inline]
    unsafe fn unlock_fair(&self, guard: Self::Guard) {
        // SAFETY: the caller's contract.
        unsafe { RawLock::unlock_fair(self, guard) }
    }
}
