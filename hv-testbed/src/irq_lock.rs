//! The lock that the hypervisor uses for itself and gives to the engine: interrupts off, then test-and-set.
//!
//! Its holders are never preempted, and hold it for a few instructions: the one place where a plain spinlock is right.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, Ordering};
use lock_api::RawMutex;

pub(crate) struct IrqLock(AtomicBool);

/// Whether interrupts were on before the lock was taken, on this CPU.
pub(crate) struct Interrupts(bool, PhantomData<*mut ()>);

// SAFETY: the flag is set by one owner at a time, from `lock` or `try_lock` until `unlock`.
unsafe impl RawMutex for IrqLock {
    type Guard = Interrupts;

    #[allow(clippy::declare_interior_mutable_const, reason = "an initial value, copied into each lock")]
    const INIT: Self = Self(AtomicBool::new(false));

    fn lock(&self) -> Interrupts {
        loop {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            core::hint::spin_loop();
        }
    }

    fn try_lock(&self) -> Option<Interrupts> {
        let were_on = crate::cpu::interrupts_off();
        // Acquire: pairs with `unlock`.
        if self.0.swap(true, Ordering::Acquire) {
            crate::cpu::interrupts_on_if(were_on);
            return None;
        }
        Some(Interrupts(were_on, PhantomData))
    }

    unsafe fn unlock(&self, Interrupts(were_on, _): Interrupts) {
        // Release: pairs with `try_lock`.
        self.0.store(false, Ordering::Release);
        crate::cpu::interrupts_on_if(were_on);
    }

    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
