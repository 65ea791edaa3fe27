//! Row 2: a wait for "head == tail" missed a wrap and never ended.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Threads, Vm, cpu, run_as, unlock};
use pvlock_guest::{PreemptableTicketLock, RawLock, TicketLock};
use std::cell::UnsafeCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

struct Counter<L> {
    lock: L,
    count: UnsafeCell<u64>,
    tried: AtomicU64,
    done: AtomicBool,
}

// SAFETY: `count` is touched only by the lock's owner.
unsafe impl<L: Sync> Sync for Counter<L> {}

/// All `workers` together take the lock so often that 8-bit tickets wrap three times even if the observers never get it.
fn three_wraps(vm: &'static Vm, workers: usize, observers: usize) {
    let times = (3 * 256u64).div_ceil(workers as u64) + 7;
    contend(vm, TicketLock::<Threads, 8>::new(), workers, observers, times);
}

/// Each worker takes the lock so many `times`, observers look and try meanwhile.
fn contend<L: RawLock + Send + Sync>(vm: &'static Vm, lock: L, workers: usize, observers: usize, times: u64) {
    let counter = Counter { lock, count: UnsafeCell::new(0), tried: AtomicU64::new(0), done: AtomicBool::new(false) };
    let counter = &counter;
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers)
            .map(|vcpu| {
                scope.spawn(move || {
                    run_as(vm, Some(vcpu));
                    for _ in 0..times {
                        let ticket = counter.lock.lock();
                        // SAFETY: this thread owns the lock.
                        unsafe { *counter.count.get() += 1 };
                        assert!(counter.lock.is_locked());
                        // SAFETY: as above.
                        unsafe { counter.lock.unlock(ticket) };
                    }
                })
            })
            .collect();
        for vcpu in workers..workers + observers {
            scope.spawn(move || {
                run_as(vm, Some(vcpu));
                let mut seen = [0u64; 2];
                while !counter.done.load(Relaxed) {
                    seen[usize::from(counter.lock.is_locked())] += 1;
                    if let Some(ticket) = counter.lock.try_lock() {
                        // SAFETY: this thread owns the lock.
                        unsafe {
                            *counter.count.get() += 1;
                            counter.lock.unlock(ticket);
                        }
                        counter.tried.fetch_add(1, Relaxed);
                    }
                }
            });
        }
        let results: Vec<_> = handles.into_iter().map(|handle| handle.join()).collect();
        counter.done.store(true, Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    assert!(!counter.lock.is_locked());
    // SAFETY: all threads have ended.
    assert_eq!(unsafe { *counter.count.get() }, workers as u64 * times + counter.tried.load(Relaxed));
}

#[test]
fn row_02_three_wraps_in_native_mode() {
    three_wraps(Vm::new(), 3, 2);
}

#[test]
fn row_02_three_wraps_with_halting_waiters() {
    three_wraps(Vm::halting(5), 3, 2);
}

#[test]
fn row_02_one_vcpu_wraps_alone() {
    three_wraps(Vm::halting(1), 1, 0);
}

/// Three wraps and some.
const TIMES: u32 = 3 * 256 + 7;

#[test]
fn row_02_a_free_lock_looks_free_and_can_be_tried_at_every_ticket() {
    for vm in [Vm::new(), Vm::halting(1)] {
        run_as(vm, Some(0));
        let lock = TicketLock::<Threads, 8>::new();
        for i in 0..TIMES {
            assert!(!lock.is_locked(), "ticket {i}");
            let ticket = if i % 3 == 0 { lock.lock() } else { lock.try_lock().expect("free") };
            assert_eq!(ticket.number(), i % 256);
            assert!(lock.is_locked(), "ticket {i}");
            assert!(lock.try_lock().is_none(), "ticket {i}");
            // SAFETY: this thread owns the lock.
            unsafe { lock.unlock(ticket) };
        }
    }
}

#[test]
fn row_02_the_next_waiter_halts_and_is_kicked_at_every_ticket() {
    let vm = Vm::halting(2);
    let lock = Rc::new(TicketLock::<Threads, 8>::new());
    for i in 0..TIMES {
        run_as(vm, Some(0));
        let owner = lock.lock();
        run_as(vm, Some(1));
        cpu(|cpu| {
            let lock = lock.clone();
            cpu.on_halt.replace(Some(Box::new(move |_, _| {
                // SAFETY: "vCPU 0" owns the lock with this ticket.
                unsafe { lock.unlock(owner) };
            })))
        });
        let ticket = lock.lock();
        assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (1, 1), "ticket {i}");
        // SAFETY: this thread owns the lock.
        unsafe { lock.unlock(ticket) };
    }
}

#[test]
fn row_02_a_waiter_that_is_not_next_halts_and_is_kicked_around_the_wrap() {
    let vm = Vm::halting(3);
    let lock = &TicketLock::<Threads, 8>::new();
    for before in 250..262 {
        run_as(vm, Some(0));
        // The owner's ticket is `before`, the waiters' follow.
        loop {
            let ticket = lock.lock();
            unlock(lock, ticket);
            if ticket.number() == (before - 1) % 256 {
                break;
            }
        }
        let owner = lock.lock();
        std::thread::scope(|scope| {
            for vcpu in 1..3 {
                scope.spawn(move || {
                    run_as(vm, Some(vcpu));
                    unlock(lock, lock.lock());
                    assert_eq!(cpu(|cpu| cpu.halts.get()), 1);
                });
                vm.until_halted(vcpu);
            }
            unlock(lock, owner);
        });
        assert!(!lock.is_locked());
    }
}

/// One-bit tickets: two acquisitions between two loads of a `try_lock` bring back what the first load saw.
#[test]
fn row_02_try_lock_does_not_take_a_lock_that_was_taken_again_meanwhile() {
    let vm = Vm::new();
    let lock = &TicketLock::<Threads, 1>::new();
    let inside = &AtomicBool::new(false);
    let done = &AtomicBool::new(false);
    static BOTH: AtomicU64 = AtomicU64::new(0);
    let work = |ticket| {
        if inside.swap(true, Relaxed) {
            BOTH.fetch_add(1, Relaxed);
        }
        std::hint::spin_loop();
        inside.store(false, Relaxed);
        // SAFETY: the caller owns the lock.
        unsafe { lock.unlock(ticket) };
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            run_as(vm, Some(1));
            while !done.load(Relaxed) && BOTH.load(Relaxed) == 0 {
                if let Some(ticket) = lock.try_lock() {
                    work(ticket);
                }
            }
        });
        run_as(vm, Some(0));
        // A lock that has had two owners may never be free again.
        cpu(|cpu| cpu.on_relax.replace(Some(Box::new(|| assert_eq!(BOTH.load(Relaxed), 0, "two owners at a time")))));
        for _ in 0..300_000 {
            work(lock.lock());
        }
        done.store(true, Relaxed);
    });
    assert_eq!(BOTH.load(Relaxed), 0, "two owners at a time");
}

type Preemptable = PreemptableTicketLock<Threads>;

/// vCPU 1 draws a ticket, halts with it as the head of the queue, and is kicked by vCPU 0, whom it waits for.
fn one_ticket(vm: &'static Vm, lock: &Rc<Preemptable>, expected: u32) {
    run_as(vm, Some(1));
    let mut owner = lock.try_lock();
    assert!(owner.is_some(), "ticket {expected}: a free lock looks free");
    cpu(|cpu| {
        let lock = lock.clone();
        cpu.on_halt.replace(Some(Box::new(move |slot, _| {
            assert!(lock.is_locked() && lock.try_lock().is_none());
            unlock(&*lock, owner.take().expect("halts once"));
            assert!(!lock.is_locked());
            vm.halt(1, slot);
        })))
    });
    let mut drawn = None;
    let token = lock.lock_with(|ticket| drawn = Some(ticket));
    assert_eq!(drawn, Some(expected));
    assert!(lock.is_locked() && lock.try_lock().is_none(), "ticket {expected}");
    assert_eq!(cpu(|cpu| (cpu.halts.get(), cpu.kicks.get())), (1, 1), "ticket {expected}");
    unlock(&**lock, token);
    assert!(!lock.is_locked(), "ticket {expected}");
}

/// A lock whose next ticket is `ticket`.
fn with_tickets_drawn(vm: &'static Vm, ticket: u32) -> Rc<Preemptable> {
    let lock = Rc::new(Preemptable::new());
    (0..ticket).for_each(|ticket| one_ticket(vm, &lock, ticket));
    lock
}

/// 16-bit tickets, which only waiters draw.
#[test]
fn row_02_preemptable_three_wraps_of_the_tickets_each_halted_and_kicked() {
    let vm = Vm::halting(2);
    vm.budget(1);
    let lock = with_tickets_drawn(vm, 0);
    for i in 0..3 * (1 << 16) + 7 {
        one_ticket(vm, &lock, i % (1 << 16));
    }
}

/// A counter of 14 bits, at the top of the word.
#[test]
fn row_02_preemptable_three_wraps_of_the_acquisitions() {
    for vm in [Vm::new(), Vm::halting(1)] {
        run_as(vm, Some(0));
        let lock = Preemptable::new();
        for i in 0..3 * (1 << 14) + 7 {
            assert!(!lock.is_locked(), "acquisition {i}");
            let token = if i % 3 == 0 { lock.lock() } else { lock.try_lock().expect("free") };
            assert!(lock.is_locked() && lock.try_lock().is_none(), "acquisition {i}");
            unlock(&lock, token);
        }
        assert_eq!(cpu(|cpu| cpu.relaxes.get()), 0);
    }
}

#[test]
fn row_02_preemptable_a_queue_halts_and_is_served_in_order_around_the_wrap() {
    let vm = Vm::halting(4);
    vm.budget(1);
    let lock = with_tickets_drawn(vm, (1 << 16) - 7);
    run_as(vm, Some(0));
    let lock = &Rc::into_inner(lock).expect("no hook is left");
    let served = &std::sync::Mutex::new(Vec::new());
    // Three tickets a round: the queue is on both sides of the wrap in two of them.
    for _ in 0..5 {
        run_as(vm, Some(0));
        let owner = lock.lock();
        served.lock().unwrap().clear();
        std::thread::scope(|scope| {
            for vcpu in 1..4 {
                scope.spawn(move || {
                    run_as(vm, Some(vcpu));
                    let token = lock.lock();
                    served.lock().unwrap().push(vcpu);
                    unlock(lock, token);
                    assert_eq!(cpu(|cpu| cpu.halts.get()), 1);
                });
                vm.until_halted(vcpu);
            }
            unlock(lock, owner);
        });
        assert_eq!(*served.lock().unwrap(), [1, 2, 3]);
        assert!(!lock.is_locked());
    }
}

#[test]
fn row_02_preemptable_contended_around_the_wrap() {
    let vm = Vm::halting(5);
    vm.budget(1);
    let lock = with_tickets_drawn(vm, (1 << 16) - 20);
    run_as(vm, Some(0));
    contend(vm, Rc::into_inner(lock).expect("no hook is left"), 3, 2, 500);
}
