//! Row 30: logging took a lock inside the lock. Whoever logs or formats allocates sooner or later.

#![cfg(not(pvlock_loom))]

mod common;

use common::{Lock, Vm, cpu, for_both_locks, run_as};
use pvlock_guest::{InterruptsOff, RawLock, Scoped};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts what is allocated or freed inside; it cannot panic itself, an allocator must not unwind.
struct Watchful;

static INSIDE: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static IN_LOCK: Cell<bool> = const { Cell::new(false) };
}

impl Watchful {
    fn watch(&self) {
        if IN_LOCK.try_with(Cell::get).unwrap_or(false) {
            INSIDE.fetch_add(1, Relaxed);
        }
    }
}

// SAFETY: all work is the system allocator's.
unsafe impl GlobalAlloc for Watchful {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.watch();
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        self.watch();
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watchful = Watchful;

fn inside<R>(f: impl FnOnce() -> R) -> R {
    IN_LOCK.set(true);
    let result = f();
    IN_LOCK.set(false);
    result
}

for_both_locks! {
    row_30_no_path_of_a_lock_allocates
}

fn work(lock: &impl RawLock) {
    let token = inside(|| lock.lock());
    // SAFETY: this thread owns the lock.
    inside(|| unsafe { lock.unlock(token) });
}

fn row_30_no_path_of_a_lock_allocates<L: Lock>() {
    let halts = AtomicU64::new(0);
    let kicks = AtomicU64::new(0);
    for vm in [Vm::new(), Vm::halting(4)] {
        let lock = &Scoped::<L, InterruptsOff>::new(L::INIT);
        // vCPU 0 owns the lock until the other three have halted (one as the next in line), then all contend.
        run_as(vm, Some(0));
        let token = inside(|| lock.lock());
        assert!(inside(|| lock.try_lock()).is_none());
        std::thread::scope(|scope| {
            for vcpu in 1..4 {
                let (halts, kicks) = (&halts, &kicks);
                scope.spawn(move || {
                    run_as(vm, Some(vcpu));
                    (0..100).for_each(|_| work(lock));
                    halts.fetch_add(cpu(|cpu| cpu.halts.get()), Relaxed);
                    kicks.fetch_add(cpu(|cpu| cpu.kicks.get()), Relaxed);
                });
            }
            if vm.guest.as_ref().mode() == pvlock_guest::Mode::Halting {
                (1..4).for_each(|vcpu| vm.until_halted(vcpu));
            }
            // SAFETY: this thread owns the lock.
            inside(|| unsafe { lock.unlock(token) });
            (0..100).for_each(|_| work(lock));
        });
    }
    assert!(halts.load(Relaxed) >= 3 && kicks.load(Relaxed) >= 2, "the slow paths were taken");
    assert_eq!(INSIDE.load(Relaxed), 0, "allocations and deallocations inside");
}
