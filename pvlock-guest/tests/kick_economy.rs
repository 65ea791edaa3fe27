//! One kick for each sleep, after the release and never before, and what a fair release promises.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Threads, Vm, cpu, for_both_locks, run_as, unlock};
use pvlock_guest::{CLAIM, PreemptableTicketLock};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};

for_both_locks! {
    the_kick_follows_the_release_and_nothing_follows_the_kick
    a_waiter_that_polls_is_not_kicked
}

fn the_kick_follows_the_release_and_nothing_follows_the_kick<L: Lock>() {
    for fair in [false, true] {
        let vm = Vm::halting(2);
        run_as(vm, Some(1));
        let lock = Arc::new(L::INIT);
        let mut owner = Some(lock.lock());
        let states = Rc::new(RefCell::new(Vec::new()));
        cpu(|cpu| {
            let (kicked, seen) = (lock.clone(), states.clone());
            cpu.on_kick.replace(Some(Box::new(move || seen.borrow_mut().push(format!("{kicked:?}")))));
            let (lock, states) = (lock.clone(), states.clone());
            cpu.on_halt.replace(Some(Box::new(move |_, _| {
                states.borrow_mut().push(format!("{lock:?}"));
                let owner = owner.take().expect("halts once");
                // SAFETY: the "other vCPU" owns the lock by this token.
                unsafe { if fair { lock.unlock_fair(owner) } else { lock.unlock(owner) } };
                states.borrow_mut().push(format!("{lock:?}"));
            })));
        });
        let token = lock.lock();
        let states = states.take();
        let [held, kicked, released] = &states[..] else { panic!("one halt, one kick: {states:?}") };
        assert_eq!(kicked, released, "released before the kick, and not touched after it");
        assert_ne!(kicked, held);
        unlock(&*lock, token);
        assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (1, 1));
    }
}

fn a_waiter_that_polls_is_not_kicked<L: Lock>() {
    for spins in [1, 5, L::before_the_halt(pvlock_guest::DEFAULT_SPIN_BUDGET) / 1024 - 2] {
        run_as(Vm::halting(2), Some(1));
        let lock = Arc::new(L::INIT);
        let mut owner = Some(lock.lock());
        cpu(|cpu| {
            let lock = lock.clone();
            cpu.on_relax.replace(Some(Box::new(move || {
                if common::cpu(|cpu| cpu.relaxes.get()) == spins {
                    unlock(&*lock, owner.take().expect("owned"));
                }
            })));
        });
        unlock(&*lock, lock.lock());
        assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (0, 0), "after {spins} spins");
    }
}

/// What the head of the queue finds when it comes back from each of its halts, one after the other: how often newcomers have
/// taken and released the lock, and whether one of them owns it still.
#[test]
fn a_head_is_kicked_once_for_each_sleep_however_often_the_lock_is_released_meanwhile() {
    let vm = Vm::halting(3);
    vm.budget(1);
    run_as(vm, Some(1));
    let lock = Arc::new(PreemptableTicketLock::<Threads>::new());
    let owner = Rc::new(Cell::new(Some(lock.lock())));
    let sleeps = Rc::new(Cell::new(0));
    cpu(|cpu| {
        let (lock, sleeps) = (lock.clone(), sleeps.clone());
        cpu.on_halt.replace(Some(Box::new(move |_, _| {
            sleeps.set(sleeps.get() + 1);
            let kicks = || common::cpu(|cpu| cpu.kicks.get());
            assert_eq!(kicks(), sleeps.get() - 1);
            unlock(&*lock, owner.take().expect("owned"));
            assert_eq!(kicks(), sleeps.get(), "kicked by the first release");
            for _ in 0..5 {
                unlock(&*lock, lock.try_lock().expect("the head is away"));
                assert_eq!(kicks(), sleeps.get(), "and by no other one");
            }
            if sleeps.get() < 4 {
                owner.set(lock.try_lock());
            }
        })));
    });
    let token = lock.lock();
    assert_eq!(sleeps.get(), 4);
    unlock(&*lock, token);
    assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (4, 4));
}

#[test]
fn after_a_fair_release_nobody_takes_the_lock_before_its_sleeping_head_however_long_that_takes() {
    let vm = Vm::halting(3);
    let lock = &*Box::leak(Box::new(PreemptableTicketLock::<Threads>::new()));
    run_as(vm, Some(0));
    let owner = lock.lock();
    let (halted, sleeps) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let order = &Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            run_as(vm, Some(1));
            cpu(|cpu| {
                cpu.on_halt.replace(Some(Box::new(move |_, _| {
                    halted.send(()).unwrap();
                    gone.recv().unwrap();
                })))
            });
            let token = lock.lock();
            order.lock().unwrap().push(1);
            unlock(lock, token);
        });
        sleeps.recv().unwrap();
        // SAFETY: this thread owns the lock by this token.
        unsafe { lock.unlock_fair(owner) };
        assert_eq!(cpu(|cpu| cpu.kicks.get()), 1);
        run_as(vm, Some(2));
        assert!(lock.try_lock().is_none());
        let mut go = Some(go);
        cpu(|cpu| {
            cpu.relax_ticks.set(CLAIM / 8);
            cpu.on_relax.replace(Some(Box::new(move || {
                let waited = common::cpu(|cpu| cpu.ticks.get());
                if let Some(sender) = &go {
                    assert!(!lock.is_locked() && lock.try_lock().is_none(), "after {waited} ticks");
                    if waited > 8 * CLAIM {
                        sender.send(()).unwrap();
                        go = None;
                    }
                }
            })));
        });
        let token = lock.lock();
        // With its sender: a head that has not been let go by now fails.
        cpu(|cpu| cpu.on_relax.replace(None));
        order.lock().unwrap().push(2);
        unlock(lock, token);
    });
    assert_eq!(*order.lock().unwrap(), [1, 2]);
    run_as(vm, Some(0));
    unlock(lock, lock.try_lock().expect("a fair release ends with the head's turn"));
}

#[test]
fn a_fair_release_of_a_lock_that_nobody_waits_for_is_like_any_other() {
    run_as(Vm::halting(1), Some(0));
    let lock = PreemptableTicketLock::<Threads>::new();
    for _ in 0..3 {
        let token = lock.try_lock().expect("free");
        // SAFETY: this thread owns the lock by this token.
        unsafe { lock.unlock_fair(token) };
        assert!(!lock.is_locked());
    }
}
