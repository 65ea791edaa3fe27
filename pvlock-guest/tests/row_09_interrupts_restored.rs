//! Row 9: waiting restored interrupts wrongly. Row 37: a ticket was drawn before interrupts were disabled.

#![cfg(not(pvlock_loom))]

mod common;

use common::{InterruptKick, Kick, Lock, SlotLatches, Threads, VcpuLatch, Vm, cpu, for_both_locks, run_as, unlock};
use pvlock_guest::{
    DEFAULT_SPIN_BUDGET, InterruptsOff, KickKind, Platform, PreemptableTicketLock, PreemptionOff, RawLock, Scope, Scoped,
    TicketLock,
};
use std::fmt::Debug;
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

fn ends<L: Lock>() -> [End; 5] {
    // `relax` takes 1024 ticks here.
    let longest = L::before_the_halt(DEFAULT_SPIN_BUDGET) / 1024 - 2;
    [End::AtOnce, End::Spinning(1), End::Spinning(20), End::Spinning(longest), End::Halted]
}

/// Takes `lock`, owned by somebody else in the beginning unless the wait ends at once; interrupts are as at the start then,
/// or disabled if the lock's scope does so, and again as at the start after the release.
fn take_and_release<L: Lock, S: Scope + 'static>(enabled: bool, end: End) {
    let kind = <L::Platform as Platform>::KICK;
    let vm = Vm::halting(2);
    run_as(vm, Some(1));
    let lock = Arc::new(L::INIT);
    let owner = (!matches!(end, End::AtOnce)).then(|| lock.lock());
    cpu(|cpu| cpu.interrupts.set(enabled));
    // What the waiter has when it waits: its scope disables interrupts or not.
    let saved = S::enter::<L::Platform>();
    let waiting = cpu(|cpu| cpu.interrupts.get());
    let release = {
        let lock = lock.clone();
        let mut owner = owner;
        move || {
            if let Some(owner) = owner.take() {
                unlock(&*lock, owner);
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
                    assert_eq!(now, waiting && kind == KickKind::SlotLatch, "no interrupt between check and halt");
                    release();
                })))
            });
            if kind == KickKind::Interrupt && !waiting {
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
    let token = lock.lock();
    assert_eq!(cpu(|cpu| cpu.interrupts.get()), waiting, "on return: {enabled} {end:?}");
    assert_eq!(cpu(|cpu| cpu.halts.get()) > 0, matches!(end, End::Halted) && (waiting || kind != KickKind::Interrupt));
    unlock(&*lock, token);
    S::leave::<L::Platform>(saved);
    assert_eq!(cpu(|cpu| cpu.interrupts.get()), enabled, "after the release: {enabled} {end:?}");
}

fn in_every_branch<K: Kick + Debug>() {
    in_every_branch_of::<TicketLock<Threads<K>>>();
    in_every_branch_of::<PreemptableTicketLock<Threads<K>>>();
}

fn in_every_branch_of<L: Lock>() {
    for end in ends::<L>() {
        for enabled in [false, true] {
            take_and_release::<L, PreemptionOff>(enabled, end);
            take_and_release::<L, InterruptsOff>(enabled, end);
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

for_both_locks! {
    row_37_a_waiter_has_interrupts_off_from_before_its_draw_until_after_its_release
}

fn row_37_a_waiter_has_interrupts_off_from_before_its_draw_until_after_its_release<L: Lock>() {
    run_as(Vm::halting(2), Some(1));
    let lock = Arc::new(Scoped::<L, InterruptsOff>::new(L::INIT));
    // Somebody else's: taken without a trace, and without interrupts off here.
    let mut owner = Some(lock.lock());
    cpu(|cpu| cpu.interrupts.set(true));
    let before = format!("{lock:?}");
    assert_eq!(traced(|| assert!(lock.try_lock().is_none())), ["disable interrupts", "enable interrupts"]);
    assert_eq!(format!("{lock:?}"), before);
    cpu(|cpu| {
        cpu.on_relax.replace(Some(Box::new(|| assert!(!common::cpu(|cpu| cpu.interrupts.get())))));
        let lock = lock.clone();
        cpu.on_halt.replace(Some(Box::new(move |_, _| {
            unlock(&*lock, owner.take().expect("halts once"));
            // The other vCPU's were its own.
            common::cpu(|cpu| cpu.interrupts.set(false));
        })))
    });
    // The kick and the interrupts that follow are the other vCPU's.
    let waited = traced(|| unlock(&*lock, lock.lock()));
    assert_eq!(waited, ["disable interrupts", "halt", "kick", "enable interrupts", "enable interrupts"]);
}

macro_rules! wrapper {
    ($feature:literal, $module:ident, $($test:ident: $plain:ident, $irq:ident;)*) => {
        #[cfg(feature = $feature)]
        mod $module {
            use super::common::{Threads, Vm, cpu, run_as};
            use pvlock_guest::$module::{$($plain, $irq,)* lock_api};

            $(
                #[test]
                fn $test() {
                    let irq = $irq::<_, Threads>::new(0);
                    let plain = $plain::<_, Threads>::new(0);
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
                            lock_api::MutexGuard::unlock_fair(guard);
                            assert_eq!(interrupts(), enabled);
                            assert_eq!(cpu(|cpu| cpu.preemption_disabled.get()), 0);
                            assert!(!irq.is_locked() && !plain.is_locked());
                        }
                    }
                    assert_eq!(*irq.lock(), 4);
                }
            )*
        }
    };
}

wrapper! {
    "lock_api_05", lock_api_05,
    row_09_the_strict_mutex_restores_interrupts: TicketMutex, IrqTicketMutex;
    row_09_the_preemptable_mutex_restores_interrupts: PreemptableTicketMutex, IrqPreemptableTicketMutex;
}
wrapper! {
    "lock_api_04", lock_api_04,
    row_09_the_strict_mutex_restores_interrupts: TicketMutex, IrqTicketMutex;
    row_09_the_preemptable_mutex_restores_interrupts: PreemptableTicketMutex, IrqPreemptableTicketMutex;
}
