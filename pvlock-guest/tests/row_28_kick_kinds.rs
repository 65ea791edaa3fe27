//! Row 28: a halt with interrupts off that only a maskable interrupt could end; a live mode switch that stranded sleepers.

#![cfg(not(pvlock_loom))]

mod common;

use common::{InterruptKick, Kick, Lock, SlotLatches, Threads, VcpuLatch, Vm, cpu, for_both_locks, run_as, unlock, until};
use pvlock_guest::{KickKind, Mode, Platform, PreemptableTicketLock, TicketLock};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

for_both_locks! {
    row_28_a_mode_switch_wakes_the_sleepers_and_they_spin_from_then_on
}

/// How often a waiter halts that spins ten thousand times unless it is released in a halt; and with interrupts as `enabled`
/// in each of them.
fn halts<L: Lock>(enabled: bool) -> u64 {
    let vm = Vm::halting(2);
    vm.budget(1);
    run_as(vm, Some(1));
    let lock = std::sync::Arc::new(L::INIT);
    let owner = std::rc::Rc::new(std::cell::Cell::new(Some(lock.lock())));
    cpu(|cpu| {
        cpu.interrupts.set(enabled);
        let release = {
            let lock = lock.clone();
            move || unlock(&*lock, owner.take().expect("owned"))
        };
        let in_time = release.clone();
        cpu.on_halt.replace(Some(Box::new(move |_, interrupts| {
            assert_eq!(interrupts, enabled);
            if <L::Platform as Platform>::KICK != KickKind::SlotLatch {
                assert!(!common::cpu(|cpu| cpu.interrupts.get()), "an interrupt could come between the check and the halt");
            }
            in_time();
        })));
        cpu.on_relax.replace(Some(Box::new(move || {
            if common::cpu(|cpu| cpu.relaxes.get()) == 10_000 {
                release();
            }
        })));
    });
    unlock(&*lock, lock.lock());
    assert_eq!(cpu(|cpu| cpu.interrupts.get()), enabled);
    cpu(|cpu| cpu.halts.get())
}

fn of_both<K: Kick + Debug>(enabled: bool) -> [u64; 2] {
    [halts::<TicketLock<Threads<K>>>(enabled), halts::<PreemptableTicketLock<Threads<K>>>(enabled)]
}

#[test]
fn row_28_who_has_interrupts_off_never_halts_where_a_kick_is_an_interrupt() {
    assert_eq!(of_both::<InterruptKick>(false), [0, 0]);
    assert_eq!(of_both::<InterruptKick>(true), [1, 1]);
}

#[test]
fn row_28_a_latched_kick_ends_a_halt_with_interrupts_off() {
    for enabled in [false, true] {
        assert_eq!(of_both::<VcpuLatch>(enabled), [1, 1]);
        assert_eq!(of_both::<SlotLatches>(enabled), [1, 1]);
    }
}

fn row_28_a_mode_switch_wakes_the_sleepers_and_they_spin_from_then_on<L: Lock>() {
    let vm = Vm::halting(4);
    vm.budget(1);
    let lock = &L::INIT;
    run_as(vm, Some(0));
    let owner = lock.lock();
    let spins = &*Box::leak(Box::new([const { AtomicU64::new(0) }; 4]));
    std::thread::scope(|scope| {
        let sleepers: Vec<_> = (1..4)
            .map(|vcpu| {
                let sleeper = scope.spawn(move || {
                    run_as(vm, Some(vcpu));
                    cpu(|cpu| cpu.on_relax.replace(Some(Box::new(move || _ = spins[vcpu].fetch_add(1, Relaxed)))));
                    unlock(lock, lock.lock());
                    cpu(|cpu| cpu.halts.get())
                });
                vm.until_halted(vcpu);
                sleeper
            })
            .collect();
        vm.unregister();
        assert_eq!(vm.guest.as_ref().mode(), Mode::Paravirtual);
        let woken = || spins.iter().map(|spins| spins.load(Relaxed)).collect::<Vec<_>>();
        let before = woken();
        // Far more than a budget of one tick.
        until(|| (1..4).all(|vcpu| woken()[vcpu] > before[vcpu] + 1_000));
        unlock(lock, owner);
        assert_eq!(sleepers.into_iter().map(|sleeper| sleeper.join().unwrap()).collect::<Vec<_>>(), [1, 1, 1]);
    });
    assert!(!lock.is_locked());
}
