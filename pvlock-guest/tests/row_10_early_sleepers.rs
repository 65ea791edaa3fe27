//! Row 10: one early sleeper made all later waiters sleep.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Threads, VCPUS, Vm, cpu, for_both_locks, run_as, unlock};
use pvlock_guest::PreemptableTicketLock;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Mutex, mpsc};

for_both_locks! {
    row_10_a_queue_of_sleepers_wakes_one_at_a_time_and_in_order
}

fn row_10_a_queue_of_sleepers_wakes_one_at_a_time_and_in_order<L: Lock>() {
    let vm = Vm::halting(VCPUS);
    let lock = &L::INIT;
    run_as(vm, Some(0));
    let owner = lock.lock();
    let (served, order) = mpsc::channel();
    std::thread::scope(|scope| {
        let sleepers: Vec<_> = (1..VCPUS)
            .map(|vcpu| {
                let served = served.clone();
                let (go, gone) = mpsc::channel::<()>();
                let sleeper = scope.spawn(move || {
                    run_as(vm, Some(vcpu));
                    let token = lock.lock();
                    served.send(vcpu).unwrap();
                    gone.recv().unwrap();
                    unlock(lock, token);
                    cpu(|cpu| (cpu.halts.get(), cpu.kicks.get()))
                });
                vm.until_halted(vcpu);
                (go, sleeper)
            })
            .collect();
        unlock(lock, owner);
        assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (0, 1));
        for (expected, (go, sleeper)) in (1..).zip(sleepers) {
            assert_eq!(order.recv(), Ok(expected));
            for other in expected + 1..VCPUS {
                assert!(vm.is_halted(other), "{expected} is served and {other} sleeps on");
            }
            go.send(()).unwrap();
            let (halts, kicks) = sleeper.join().unwrap();
            assert_eq!((halts, kicks), (1, u64::from(expected + 1 < VCPUS)), "of {expected}");
        }
    });
    assert!(!lock.is_locked());
}

/// A lock whose head of the queue, vCPU 1, sleeps until `f` has returned, while vCPU 0 owns the lock in the beginning.
/// Halts and kicks of vCPU 1 in the end.
fn with_a_sleeping_head(vm: &'static Vm, f: impl FnOnce(&'static PreemptableTicketLock<Threads>)) -> (u64, u64) {
    let lock = &*Box::leak(Box::new(PreemptableTicketLock::new()));
    run_as(vm, Some(0));
    let owner = lock.lock();
    let (halted, sleeps) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let head = scope.spawn(move || {
            run_as(vm, Some(1));
            let gone = Mutex::new(gone);
            cpu(|cpu| {
                cpu.on_halt.replace(Some(Box::new(move |_, _| {
                    halted.send(()).unwrap();
                    gone.lock().unwrap().recv().unwrap();
                })))
            });
            let mut drawn = Vec::new();
            let token = lock.lock_with(|ticket| drawn.push(ticket));
            assert_eq!(drawn, [0]);
            unlock(lock, token);
            cpu(|cpu| (cpu.halts.get(), cpu.kicks.get()))
        });
        // Dropped here if something fails, so that the head is not waited for in vain.
        let go = go;
        sleeps.recv().unwrap();
        unlock(lock, owner);
        assert_eq!(cpu(|cpu| cpu.kicks.get()), 1, "the head is kicked");
        f(lock);
        go.send(()).unwrap();
        head.join().unwrap()
    })
}

#[test]
fn row_10_newcomers_take_a_free_lock_past_a_sleeping_head_at_once_and_without_a_ticket() {
    let vm = Vm::halting(VCPUS);
    let head = with_a_sleeping_head(vm, |lock| {
        for round in 0..10 {
            for vcpu in 2..VCPUS {
                run_as(vm, Some(vcpu));
                let token = match round % 2 {
                    0 => lock.lock_with(|ticket| panic!("drew {ticket}")),
                    _ => lock.try_lock().expect("open"),
                };
                assert!(lock.is_locked());
                unlock(lock, token);
                let counts = cpu(|cpu| (cpu.relaxes.get(), cpu.halts.get(), cpu.kicks.get()));
                assert_eq!(counts, (0, 0, 0), "spins, halts and kicks of {vcpu}");
            }
        }
    });
    assert_eq!(head, (1, 0));
}

#[test]
fn row_10_newcomers_spin_for_a_held_lock_as_if_nobody_slept() {
    let vm = Vm::halting(VCPUS);
    let head = with_a_sleeping_head(vm, |lock| {
        for vcpu in 2..VCPUS {
            run_as(vm, Some(vcpu));
            let owner = Rc::new(Cell::new(lock.try_lock()));
            let mut spins = 0;
            cpu(|cpu| {
                cpu.on_relax.replace(Some(Box::new(move || {
                    spins += 1;
                    if spins == 10 {
                        unlock(lock, owner.take().expect("owned"));
                    }
                })))
            });
            unlock(lock, lock.lock_with(|ticket| panic!("drew {ticket}")));
            let counts = cpu(|cpu| (cpu.relaxes.get(), cpu.halts.get(), cpu.kicks.get()));
            assert_eq!(counts, (10, 0, 0), "spins, halts and kicks of {vcpu}");
        }
    });
    assert_eq!(head, (1, 0));
}
