//! Row 9: waiting restored interrupts wrongly. Row 37: a ticket was drawn before interrupts were disabled.

#![cfg(not(pvlock_loom))]

mod common;

use common::{InterruptKick, Kick, SlotLatches, Threads, VcpuLatch, Vm, cpu, run_as};
use pvlock_guest::{InterruptsOff, KickKind, Platform, PreemptionOff, RawLock, Scope, Scoped, TicketLock};
use std::marker::PhantomData;
use std::sync::Arc;

/// How a wait ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The lock is free.
    AtOnce,
    /// The owner releases it while the waiter spins for the given number of times.
    Spinning(u64),
    /// The owner releases it while the waiter is halted.
    Halted,
}

const ENDS: [End; 4] = [End::AtOnce, End::Spinning(1), End::Spinning(20), End::Halted];

/// Takes `lock`, owned by somebody else in the beginning unless the wait ends at once; interrupts are as at the start then,
/// or disabled if the lock's scope does so, and again as at the start after the release.
fn take_and_release<K: Kick, S: Scope + 'static>(enabled: bool, end: End) {
    let vm = Vm::halting(2);
    run_as(vm, Some(1));
    let lock = Arc::new(TicketLock::<Threads<K>>::new());
    let owner = (!matches!(end, End::AtOnce)).then(|| lock.lock());
    cpu(|cpu| cpu.interrupts.set(enabled));
    // What the waiter has when it waits: its scope disables interrupts or not.
    let saved = S::enter::<Threads<K>>();
    let waiting = cpu(|cpu| cpu.interrupts.get());
    let release = {
        let lock = lock.clone();
        let mut owner = owner;
        move || {
            if let Some(ticket) = owner.take() {
                // SAFETY: the "other vCPU" owns the lock with this ticket.
                unsafe { lock.unlock(ticket) };
            }
        }
    };
    match end {
        End::AtOnce => {}
        End::Spinning(times) => {
            let (mut release, mut left) = (release, times);
            cpu(|cpu| {
                cpu.on_relax.replace(Some(Box::new(move || {
                    left -= 1;
                    if left == 0 {
                        release();
                    }
                })))
            });
        }
        End::Halted => {
            let mut release = release;
            cpu(|cpu| {
                cpu.on_halt.replace(Some(Box::new(move |_, interrupts| {
                    assert_eq!(interrupts, waiting, "the halt is told what interrupts were");
                    let now = common::cpu(|cpu| cpu.interrupts.get());
                    assert_eq!(now, waiting && K::KIND == KickKind::SlotLatch, "no interrupt between check and halt");
                    release();
                })))
            });
            if K::KIND == KickKind::Interrupt && !waiting {
                // Such a waiter does not halt: end its spin instead.
                cpu(|cpu| {
                    let mut halt = cpu.on_halt.take().unwrap();
                    let slot = pvlock_guest::protocol::SlotIndex::new(0).unwrap();
                    let mut left = 100;
                    cpu.on_relax.replace(Some(Box::new(move || {
                        left -= 1;
                        if left == 0 {
                            halt(slot, false);
                        }
                    })))
                });
            }
        }
    }
    let ticket = lock.lock();
    assert_eq!(cpu(|cpu| cpu.interrupts.get()), waiting, "on return: {enabled} {end:?}");
    assert_eq!(cpu(|cpu| cpu.halts.get()) > 0, matches!(end, End::Halted) && (waiting || K::KIND != KickKind::Interrupt));
    // SAFETY: this thread owns the lock.
    unsafe { lock.unlock(ticket) };
    S::leave::<Threads<K>>(saved);
    assert_eq!(cpu(|cpu| cpu.interrupts.get()), enabled, "after the release: {enabled} {end:?}");
}

fn in_every_branch<K: Kick>() {
    for end in ENDS {
        for enabled in [false, true] {
            take_and_release::<K, PreemptionOff>(enabled, end);
            take_and_release::<K, InterruptsOff>(enabled, end);
        }
    }
}

#[test]
fn row_09_interrupts_are_as_before_with_a_latch_for_each_slot() {
    in_every_branch::<SlotLatches>();
}

#[test]
fn row_09_interrupts_are_as_before_with_a_latch_for_the_vcpu() {
    in_every_branch::<VcpuLatch>();
}

#[test]
fn row_09_interrupts_are_as_before_with_kicks_that_are_interrupts() {
    in_every_branch::<InterruptKick>();
}

/// A lock whose calls leave a trace.
struct Probe {
    free: bool,
    platform: PhantomData<fn() -> Threads>,
}

fn trace(call: &'static str) {
    cpu(|cpu| cpu.trace.borrow_mut().as_mut().unwrap().push(call));
}

fn traced(f: impl FnOnce()) -> Vec<&'static str> {
    cpu(|cpu| cpu.trace.replace(Some(Vec::new())));
    f();
    cpu(|cpu| cpu.trace.take()).unwrap()
}

// SAFETY: not a lock; nothing relies on its exclusion.
unsafe impl RawLock for Probe {
    type Platform = Threads;
    type Token = ();
    #[allow(clippy::declare_interior_mutable_const, reason = "it has none")]
    const INIT: Self = Self { free: false, platform: PhantomData };

    fn lock(&self) {
        trace("draw");
    }

    fn try_lock(&self) -> Option<()> {
        trace("try");
        self.free.then_some(())
    }

    unsafe fn unlock(&self, (): ()) {
        trace("release");
    }

    unsafe fn unlock_fair(&self, (): ()) {
        trace("release");
    }

    fn is_locked(&self) -> bool {
        false
    }
}

fn scoped<S: Scope>(free: bool) -> Scoped<Probe, S> {
    Scoped::new(Probe { free, platform: PhantomData })
}

#[test]
fn row_37_interrupts_are_disabled_before_the_draw_and_restored_after_the_release() {
    run_as(Vm::new(), Some(0));
    let (free, taken) = (scoped::<InterruptsOff>(true), scoped::<InterruptsOff>(false));
    let take = || {
        let token = free.lock();
        // SAFETY: this thread owns the lock.
        unsafe { free.unlock(token) };
    };
    let attempt = |fair: bool| {
        let token = free.try_lock().unwrap();
        // SAFETY: this thread owns the lock.
        unsafe { if fair { free.unlock_fair(token) } else { free.unlock(token) } };
    };
    assert_eq!(traced(take), ["disable interrupts", "draw", "release", "enable interrupts"]);
    assert_eq!(traced(|| attempt(false)), ["disable interrupts", "try", "release", "enable interrupts"]);
    assert_eq!(traced(|| attempt(true)), ["disable interrupts", "try", "release", "enable interrupts"]);
    assert_eq!(traced(|| assert!(taken.try_lock().is_none())), ["disable interrupts", "try", "enable interrupts"]);
    // Who has them disabled already keeps them so.
    Threads::<SlotLatches>::disable_interrupts();
    assert_eq!(traced(take), ["draw", "release"]);
    assert_eq!(traced(|| assert!(taken.try_lock().is_none())), ["try"]);
}

#[test]
fn row_37_preemption_is_disabled_before_the_draw_and_restored_after_the_release() {
    run_as(Vm::new(), Some(0));
    let (free, taken) = (scoped::<PreemptionOff>(true), scoped::<PreemptionOff>(false));
    let take = || {
        let token = free.lock();
        // SAFETY: this thread owns the lock.
        unsafe { free.unlock(token) };
    };
    assert_eq!(traced(take), ["disable preemption", "draw", "release", "enable preemption"]);
    assert_eq!(traced(|| assert!(taken.try_lock().is_none())), ["disable preemption", "try", "enable preemption"]);
    assert_eq!(cpu(|cpu| cpu.preemption_disabled.get()), 0);
}

macro_rules! wrapper {
    ($feature:literal, $module:ident, $test:ident) => {
        #[cfg(feature = $feature)]
        #[test]
        fn $test() {
            use pvlock_guest::$module::{IrqTicketMutex, TicketMutex};
            let irq = IrqTicketMutex::<_, Threads>::new(0);
            let plain = TicketMutex::<_, Threads>::new(0);
            for vm in [Vm::new(), Vm::halting(2)] {
                for enabled in [false, true] {
                    run_as(vm, Some(0));
                    cpu(|cpu| cpu.interrupts.set(enabled));
                    let interrupts = || cpu(|cpu| cpu.interrupts.get());
                    {
                        let mut guard = irq.lock();
                        *guard += 1;
                        assert!(!interrupts());
                        assert!(irq.try_lock().is_none());
                        assert!(!interrupts(), "the failed try_lock does not restore the owner's");
                        let nested = plain.lock();
                        assert_eq!(cpu(|cpu| cpu.preemption_disabled.get()), 1);
                        assert!(plain.try_lock().is_none());
                        assert_eq!(cpu(|cpu| cpu.preemption_disabled.get()), 1);
                        drop(nested);
                        assert!(!interrupts());
                    }
                    assert_eq!(interrupts(), enabled);
                    let guard = irq.try_lock().unwrap();
                    assert!(!interrupts());
                    $module::fair(guard);
                    assert_eq!(interrupts(), enabled);
                    assert_eq!(cpu(|cpu| cpu.preemption_disabled.get()), 0);
                    assert!(!irq.is_locked() && !plain.is_locked());
                }
            }
            assert_eq!(*irq.lock(), 4);
        }
    };
}

#[cfg(feature = "lock_api_05")]
mod lock_api_05 {
    use super::Threads;
    use pvlock_guest::lock_api_05::{IrqTicketMutex, lock_api};
    use pvlock_guest::{InterruptsOff, Scoped, TicketLock};

    type Guard<'a> = lock_api::MutexGuard<'a, Scoped<TicketLock<Threads>, InterruptsOff>, i32>;

    pub(super) fn fair(guard: Guard<'_>) {
        let _: fn() -> IrqTicketMutex<i32, Threads> = || IrqTicketMutex::new(0);
        lock_api::MutexGuard::unlock_fair(guard);
    }
}

#[cfg(feature = "lock_api_04")]
mod lock_api_04 {
    use super::Threads;
    use pvlock_guest::lock_api_04::{Owned, lock_api};
    use pvlock_guest::{InterruptsOff, TicketLock};

    pub(super) fn fair(guard: lock_api::MutexGuard<'_, Owned<TicketLock<Threads>, InterruptsOff>, i32>) {
        lock_api::MutexGuard::unlock_fair(guard);
    }
}

wrapper!("lock_api_05", lock_api_05, row_09_lock_api_05_restores_interrupts);
wrapper!("lock_api_04", lock_api_04, row_09_lock_api_04_restores_interrupts);
