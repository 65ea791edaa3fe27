//! Row 5: a CPU halted before it could receive kicks.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Vm, cpu, for_both_locks, id, run_as, unlock, until};
use pvlock_guest::Mode;
use pvlock_guest::hypercalls::NoHost;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

for_both_locks! {
    row_05_a_vcpu_that_is_not_set_up_spins_and_halts_once_it_is
    row_05_nobody_halts_before_registration_nor_before_everybody_is_online
    row_05_without_a_host_too_nobody_halts_before_everybody_is_online
    row_05_a_vcpu_that_the_region_has_no_record_for_spins
    row_05_an_nmi_spins
}

/// Has `vcpu` wait for a lock until `enough`, which is given the number of its spins, then releases the lock and returns how
/// often the waiter has halted.
fn halts_of_a_waiter<L: Lock>(vm: &'static Vm, vcpu: Option<usize>, nmi: bool, enough: impl Fn(u64) -> bool) -> u64 {
    let lock = &L::INIT;
    let spins = &*Box::leak(Box::new(AtomicU64::new(0)));
    run_as(vm, Some(0));
    let token = lock.lock();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            run_as(vm, vcpu);
            cpu(|cpu| {
                cpu.nmi.set(nmi);
                cpu.on_relax.replace(Some(Box::new(move || _ = spins.fetch_add(1, Relaxed))));
            });
            unlock(lock, lock.lock());
            cpu(|cpu| cpu.halts.get())
        });
        until(|| enough(spins.load(Relaxed)));
        unlock(lock, token);
        waiter.join().unwrap()
    })
}

/// More than fifteen spin budgets.
fn patient(spins: u64) -> bool {
    spins > 1000
}

fn row_05_a_vcpu_that_is_not_set_up_spins_and_halts_once_it_is<L: Lock>() {
    let vm = Vm::halting(2);
    assert_eq!(halts_of_a_waiter::<L>(vm, None, false, patient), 0);
    let halted = |_| {
        vm.until_halted(1);
        true
    };
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, halted), 1);
}

fn row_05_nobody_halts_before_registration_nor_before_everybody_is_online<L: Lock>() {
    let vm = Vm::new();
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, patient), 0);
    vm.register(2);
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, patient), 0, "nobody is online");
    vm.online(0);
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, patient), 0, "vCPU 1 is not online");
    vm.online(1);
    let halted = |_| {
        vm.until_halted(1);
        true
    };
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, halted), 1);
    vm.unregister();
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, patient), 0, "unregistered");
}

/// A machine that halts and kicks by itself, as KVM does with PV_UNHALT.
fn row_05_without_a_host_too_nobody_halts_before_everybody_is_online<L: Lock>() {
    let vm = Vm::new();
    let guest = vm.guest.as_ref();
    guest.switch_over((0..2).map(id));
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, patient), 0, "nobody is online");
    guest.online(&NoHost, id(1)).unwrap();
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, patient), 0, "vCPU 0 is not online");
    guest.offline(&NoHost, id(0)).unwrap();
    let halted = |_| {
        vm.until_halted(1);
        true
    };
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, halted), 1, "nobody has to come online any more");
    guest.unregister(&NoHost).unwrap();
    assert_eq!(guest.mode(), Mode::Paravirtual);
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), false, patient), 0, "unregistered");
}

fn row_05_a_vcpu_that_the_region_has_no_record_for_spins<L: Lock>() {
    let vm = Vm::halting(2);
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(common::VCPUS + 1), false, patient), 0);
}

fn row_05_an_nmi_spins<L: Lock>() {
    let vm = Vm::halting(2);
    assert_eq!(halts_of_a_waiter::<L>(vm, Some(1), true, patient), 0);
}

#[test]
fn row_05_coming_online_late_does_not_reopen_an_ended_registration() {
    let vm = Vm::new();
    vm.register(2);
    vm.online(0);
    vm.unregister();
    vm.online(1);
    assert_eq!(vm.guest.as_ref().mode(), Mode::Paravirtual);
    vm.register(1);
    assert_eq!(vm.guest.as_ref().mode(), Mode::Paravirtual, "vCPU 0 has to come online again");
    vm.online(0);
    assert_eq!(vm.guest.as_ref().mode(), Mode::Halting);
}

#[test]
fn row_05_listing_a_vcpu_twice_counts_it_once() {
    let vm = Vm::new();
    vm.register(2);
    vm.register(2);
    vm.online(0);
    assert_eq!(vm.guest.as_ref().mode(), Mode::Paravirtual);
    vm.online(1);
    assert_eq!(vm.guest.as_ref().mode(), Mode::Halting);
}
