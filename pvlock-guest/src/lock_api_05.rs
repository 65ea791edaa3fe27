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

    /// The owner stays on its vCPU: what the scope saved is that vCPU's.
    type Guard = (<Self as RawLock>::Token, lock_api::GuardNoSend);

    #[inline]
    fn lock(&self) -> Self::Guard {
        (RawLock::lock(self), lock_api::GuardNoSend::new())
    }

    #[inline]
    fn try_lock(&self) -> Option<Self::Guard> {
        RawLock::try_lock(self).map(|token| (token, lock_api::GuardNoSend::new()))
    }

    #[inline]
    unsafe fn unlock(&self, (token, _): Self::Guard) {
        // SAFETY: the caller's contract.
        unsafe { RawLock::unlock(self, token) }
    }

    fn is_locked(&self) -> bool {
        RawLock::is_locked(self)
    }
}

// SAFETY: as above.
unsafe impl<L: RawLock, S: Scope> lock_api::RawMutexFair for Scoped<L, S> {
    #[inline]
    unsafe fn unlock_fair(&self, (token, _): Self::Guard) {
        // SAFETY: the caller's contract.
        unsafe { RawLock::unlock_fair(self, token) }
    }
}

/// Guards stay on their vCPU; mutexes are shared like `std`'s.
#[cfg(test)]
mod proof {
    use super::*;
    use crate::{GuestRef, Platform};
    use pvlock_protocol::{SlotIndex, VcpuId};
    use static_assertions::{assert_impl_all, assert_not_impl_any};

    enum Anywhere {}

    impl Platform for Anywhere {
        fn guest() -> GuestRef<'static> {
            static GUEST: crate::Guest<1> = crate::Guest::new();
            GUEST.as_ref()
        }

        fn current() -> Option<VcpuId> {
            None
        }

        fn ticks() -> u64 {
            0
        }

        fn halt(_: SlotIndex, _: bool) {}

        fn kick(_: VcpuId) {}
    }

    assert_impl_all!(TicketMutex<u32, Anywhere>: Send, Sync);
    assert_impl_all!(IrqPreemptableTicketMutex<u32, Anywhere>: Send, Sync);
    assert_not_impl_any!(lock_api::MutexGuard<'static, Scoped<TicketLock<Anywhere>>, u32>: Send);
    assert_not_impl_any!(lock_api::MutexGuard<'static, Scoped<PreemptableTicketLock<Anywhere>, InterruptsOff>, u32>: Send);
}
