//! Row 36: `try_lock` with a failed compare wrote a wrong owner.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Vm, cpu, for_both_locks, id, run_as, unlock};

for_both_locks! {
    row_36_a_failing_try_lock_changes_nothing
    row_36_a_failing_try_lock_beside_a_halted_waiter_changes_nothing
}

/// Every field of the lock.
fn fields<L: Lock>(lock: &L) -> String {
    format!("{lock:?}")
}

fn row_36_a_failing_try_lock_changes_nothing<L: Lock>() {
    for vm in [Vm::new(), Vm::halting(3)] {
        let lock = L::INIT;
        run_as(vm, Some(0));
        let token = lock.lock();
        let before = fields(&lock);
        for vcpu in [Some(1), Some(2), None, Some(0)] {
            run_as(vm, vcpu);
            cpu(|cpu| cpu.trace.replace(Some(Vec::new())));
            assert!(lock.try_lock().is_none());
            assert_eq!(fields(&lock), before, "vCPU {vcpu:?}");
            assert!(cpu(|cpu| cpu.trace.take()).unwrap().is_empty(), "nobody is kicked, nothing is disabled");
            assert!(lock.is_locked());
        }
        unlock(&lock, token);
        assert!(!lock.is_locked());
        run_as(vm, Some(1));
        assert!(lock.try_lock().is_some(), "no ticket was drawn");
    }
}

fn row_36_a_failing_try_lock_beside_a_halted_waiter_changes_nothing<L: Lock>() {
    let vm = Vm::halting(3);
    let lock = &L::INIT;
    run_as(vm, Some(0));
    let token = lock.lock();
    assert!(lock.try_lock().is_none());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            run_as(vm, Some(1));
            unlock(lock, lock.lock());
        });
        vm.until_halted(1);
        let before = fields(lock);
        let record = vm.guest.as_ref().region().record(id(1)).unwrap();
        let waits = || record.slots.each_ref().map(|slot| slot.read());
        let published = waits();
        assert_eq!(published[0].unwrap().holder, Some(id(0)));
        assert_eq!(published[0].unwrap().ticket, L::FIRST_WAITER, "no ticket was drawn by who failed before");
        run_as(vm, Some(2));
        assert!(lock.try_lock().is_none());
        assert_eq!(fields(lock), before);
        assert_eq!(waits(), published);
        run_as(vm, Some(0));
        unlock(lock, token);
    });
    assert!(!lock.is_locked());
}
