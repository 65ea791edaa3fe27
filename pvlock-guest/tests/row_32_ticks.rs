//! Row 32: a spin threshold was counted in iterations, and became ten times longer when PAUSE took 140 cycles.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Vm, cpu, for_both_locks, id, run_as, unlock};
use pvlock_guest::DEFAULT_SPIN_BUDGET;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

for_both_locks! {
    row_32_the_default_budget_is_ticks
    row_32_the_hosts_budgets_are_ticks_and_the_vcpus_own_comes_first
    row_32_a_tick_counter_that_overflows_is_a_counter_like_any_other
}

/// Spins, and ticks that passed, before a waiter halts where one `relax` takes `relax_ticks`.
fn before_the_halt<L: Lock>(vm: &'static Vm, relax_ticks: u64) -> (u64, u64) {
    run_as(vm, Some(1));
    cpu(|cpu| cpu.relax_ticks.set(relax_ticks));
    let lock = Rc::new(L::INIT);
    let mut owner = Some(lock.lock());
    let seen = Rc::new(std::cell::Cell::new((0, 0)));
    cpu(|cpu| {
        let (lock, seen) = (lock.clone(), seen.clone());
        cpu.on_halt.replace(Some(Box::new(move |_, _| {
            seen.set(common::cpu(|cpu| (cpu.relaxes.get(), cpu.ticks.get())));
            unlock(&*lock, owner.take().expect("halts once"));
        })))
    });
    unlock(&*lock, lock.lock());
    seen.get()
}

/// `vm` is asked for each measurement: a budget that the host does not give may adapt to the waits of a vCPU.
fn the_halt_comes_after<L: Lock>(vm: impl Fn() -> &'static Vm, budget: u64) {
    let mut spins = Vec::new();
    for relax_ticks in [10, 140] {
        let (relaxes, ticks) = before_the_halt::<L>(vm(), relax_ticks);
        assert_eq!(ticks, relaxes * relax_ticks);
        // Each of the two spins ends with the first look after its time.
        let time = L::before_the_halt(budget);
        assert!((time..time + 2 * relax_ticks).contains(&ticks), "{ticks} ticks at {relax_ticks} each, for {time}");
        spins.push(relaxes);
    }
    assert!(spins[0].abs_diff(14 * spins[1]) <= 2 * 14, "spins in the inverse ratio of their cost: {spins:?}");
}

fn row_32_the_default_budget_is_ticks<L: Lock>() {
    the_halt_comes_after::<L>(|| Vm::halting(2), DEFAULT_SPIN_BUDGET);
}

fn row_32_the_hosts_budgets_are_ticks_and_the_vcpus_own_comes_first<L: Lock>() {
    let vm = Vm::halting(2);
    let region = vm.guest.as_ref().region();
    region.header.spin_budget.store(50_000, Relaxed);
    the_halt_comes_after::<L>(|| vm, 50_000);
    region.record(id(1)).unwrap().spin_budget.store(7_000, Relaxed);
    the_halt_comes_after::<L>(|| vm, 7_000);
    region.record(id(0)).unwrap().spin_budget.store(1_000, Relaxed);
    the_halt_comes_after::<L>(|| vm, 7_000);
}

fn row_32_a_tick_counter_that_overflows_is_a_counter_like_any_other<L: Lock>() {
    for start in [u64::MAX - 500, u64::MAX - 5_000, u64::MAX / 2 - 5_000] {
        run_as(Vm::halting(2), Some(1));
        let lock = Rc::new(L::INIT);
        let mut owner = Some(lock.lock());
        let halted = Rc::new(std::cell::Cell::new(0));
        cpu(|cpu| {
            cpu.ticks.set(start);
            cpu.relax_ticks.set(10);
            let (lock, halted) = (lock.clone(), halted.clone());
            cpu.on_halt.replace(Some(Box::new(move |_, _| {
                halted.set(common::cpu(|cpu| cpu.ticks.get().wrapping_sub(start)));
                unlock(&*lock, owner.take().expect("halts once"));
            })))
        });
        unlock(&*lock, lock.lock());
        let time = L::before_the_halt(DEFAULT_SPIN_BUDGET);
        assert!((time..time + 20).contains(&halted.get()), "from {start}: {}", halted.get());
    }
}
