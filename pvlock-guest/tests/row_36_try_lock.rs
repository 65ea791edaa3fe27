//! Row 36: `try_lock` with a failed compare wrote a wrong owner.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Threads, Vm, cpu, id, run_as};
use pvlock_guest::TicketLock;

/// Every field of the lock.
fn fields(lock: &TicketLock<Threads>) -> String {
    format!("{lock:?}")
}

#[test]
fn row_36_a_failing_try_lock_changes_nothing() {
    for vm in [Vm::new(), Vm::halting(3)] {
        let lock = TicketLock::<Threads>::new();
        run_as(vm, Some(0));
        let ticket = lock.lock();
        let before = fields(&lock);
        for vcpu in [Some(1), Some(2), None, Some(0)] {
            run_as(vm, vcpu);
            cpu(|cpu| cpu.trace.replace(Some(Vec::new())));
            assert!(lock.try_lock().is_none());
            assert_eq!(fields(&lock), before, "vCPU {vcpu:?}");
            assert!(cpu(|cpu| cpu.trace.take()).unwrap().is_empty(), "nobody is kicked, nothing is disabled");
            assert!(lock.is_locked());
        }
        // SAFETY: vCPU 0 owns the lock with this ticket.
        unsafe { lock.unlock(ticket) };
        assert!(!lock.is_locked());
        run_as(vm, Some(1));
        assert_eq!(lock.try_lock().map(|ticket| ticket.number()), Some(1), "no ticket was drawn");
    }
}

#[test]
fn row_36_a_failing_try_lock_beside_a_halted_waiter_changes_nothing() {
    let vm = Vm::halting(3);
    let lock = &TicketLock::<Threads>::new();
    run_as(vm, Some(0));
    let ticket = lock.lock();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            run_as(vm, Some(1));
            let ticket = lock.lock();
            // SAFETY: this thread owns the lock.
            unsafe { lock.unlock(ticket) };
        });
        vm.until_halted(1);
        let before = fields(lock);
        let record = vm.guest.as_ref().region().record(id(1)).unwrap();
        let waits = || record.slots.each_ref().map(|slot| slot.read());
        let published = waits();
        assert_eq!(published[0].unwrap().holder, Some(id(0)));
        run_as(vm, Some(2));
        assert!(lock.try_lock().is_none());
        assert_eq!(fields(lock), before);
        assert_eq!(waits(), published);
        run_as(vm, Some(0));
        // SAFETY: vCPU 0 owns the lock with this ticket.
        unsafe { lock.unlock(ticket) };
    });
    assert!(!lock.is_locked());
}
