//! Row 23: a paravirtual lock was slower than a plain one on dedicated CPUs. (What the fast path is made of is counted in
//! its disassembly, elsewhere.)

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, VCPUS, Vm, cpu, for_both_locks, run_as, unlock};
use pvlock_guest::Mode;
use pvlock_guest::protocol::HostFlags;
use std::sync::atomic::Ordering::Relaxed;

for_both_locks! {
    row_23_where_the_host_says_dedicated_nobody_halts_or_kicks
    row_23_a_host_that_says_dedicated_or_off_later_ends_the_halting
}

fn set(vm: &Vm, flags: HostFlags) {
    vm.guest.as_ref().region().header.flags.store(flags.bits(), Relaxed);
}

/// vCPU 1 waits until it has spun so often, however small its budget is, and takes the lock then. Halts and kicks of both.
fn halts_and_kicks<L: Lock>(vm: &'static Vm, spins: u64) -> (u64, u64) {
    let lock = std::sync::Arc::new(L::INIT);
    run_as(vm, Some(1));
    let mut owner = Some(lock.lock());
    cpu(|cpu| {
        let lock = lock.clone();
        cpu.on_halt.replace(Some(Box::new(|_, _| {})));
        cpu.on_relax.replace(Some(Box::new(move || {
            if common::cpu(|cpu| cpu.relaxes.get()) == spins {
                unlock(&*lock, owner.take().expect("owned"));
            }
        })));
    });
    unlock(&*lock, lock.lock());
    assert!(!lock.is_locked());
    cpu(|cpu| (cpu.halts.get(), cpu.kicks.get()))
}

fn row_23_where_the_host_says_dedicated_nobody_halts_or_kicks<L: Lock>() {
    let vm = Vm::new();
    set(vm, HostFlags::DEDICATED);
    vm.register(VCPUS);
    (0..VCPUS).for_each(|vcpu| vm.online(vcpu));
    vm.budget(1);
    assert_eq!(vm.guest.as_ref().mode(), Mode::Native);
    assert_eq!(halts_and_kicks::<L>(vm, 10_000), (0, 0));
    // Contended by everybody.
    let lock = &L::INIT;
    std::thread::scope(|scope| {
        for vcpu in 0..VCPUS {
            scope.spawn(move || {
                run_as(vm, Some(vcpu));
                (0..200).for_each(|_| unlock(lock, lock.lock()));
                assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (0, 0));
            });
        }
    });
}

fn row_23_a_host_that_says_dedicated_or_off_later_ends_the_halting<L: Lock>() {
    let vm = Vm::halting(2);
    vm.budget(1);
    for flags in [HostFlags::DEDICATED, HostFlags::OFF] {
        set(vm, HostFlags::from_bits(0));
        assert!(halts_and_kicks::<L>(vm, 20).0 > 0, "it halts where it may");
        set(vm, flags);
        assert_eq!(halts_and_kicks::<L>(vm, 10_000), (0, 0));
    }
}
