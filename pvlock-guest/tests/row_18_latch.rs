//! Row 18: the latch stayed set after a wake by another cause, and the next halt did not halt.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Vm, cpu, for_both_locks, run_as, unlock};

for_both_locks! {
    row_18_a_stale_kick_ends_one_halt_and_the_next_one_sleeps
    row_18_a_kick_that_comes_before_the_halt_is_not_lost
}

/// vCPU 1 waits for vCPU 0, with so many kicks for nothing beforehand. Its halts, and the kicks by vCPU 0.
fn halts_after<L: Lock>(stale: usize) -> (u64, u64) {
    let vm = Vm::halting(2);
    vm.budget(1);
    let lock = &L::INIT;
    run_as(vm, Some(0));
    let owner = lock.lock();
    (0..stale).for_each(|_| vm.kick(1));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            run_as(vm, Some(1));
            unlock(lock, lock.lock());
            cpu(|cpu| cpu.halts.get())
        });
        // Not seen halted in a halt that the latch ends at once.
        vm.until_halted(1);
        unlock(lock, owner);
        (waiter.join().unwrap(), cpu(|cpu| cpu.kicks.get()))
    })
}

fn row_18_a_stale_kick_ends_one_halt_and_the_next_one_sleeps<L: Lock>() {
    assert_eq!(halts_after::<L>(0), (1, 1));
    assert_eq!(halts_after::<L>(1), (2, 1), "a kick ends one halt");
    assert_eq!(halts_after::<L>(2), (2, 1), "a latch has one bit");
}

fn row_18_a_kick_that_comes_before_the_halt_is_not_lost<L: Lock>() {
    let vm = Vm::halting(2);
    vm.budget(1);
    for _ in 0..3 {
        run_as(vm, Some(1));
        let lock = std::sync::Arc::new(L::INIT);
        let mut owner = Some(lock.lock());
        cpu(|cpu| {
            let lock = lock.clone();
            // Between the last check and the halt.
            cpu.on_halt.replace(Some(Box::new(move |slot, _| {
                unlock(&*lock, owner.take().expect("halts once"));
                vm.halt(1, slot);
            })))
        });
        unlock(&*lock, lock.lock());
        assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (1, 1));
    }
}
