//! What a release and a failing `try_lock` leave alone.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_loom_tests::{Config, Lock, Machine, Model, SlotLatches, WorkOn};

    /// The next owner frees the lock as soon as it has it; the last one may still be on its way out of `unlock`.
    fn freed_by_the_next_owner() {
        let machine = Machine::new::<2>(Config::default());
        let lock: *mut Lock<SlotLatches> = Box::into_raw(Box::new(Lock::new()));
        // SAFETY: the lock lives until the end of this function.
        let ticket = unsafe { &*lock }.lock();
        let next = machine.spawn(1, move || {
            // SAFETY: as above. `retire` only tells loom that the memory belongs to this thread alone now.
            unsafe {
                // Never released.
                let _ = (*lock).lock();
                (*lock).retire();
            }
        });
        // SAFETY: as above; this thread owns the lock.
        unsafe { (*lock).unlock(ticket) };
        next.join().unwrap();
        // SAFETY: nobody uses it any more.
        drop(unsafe { Box::from_raw(lock) });
    }

    const FREED: Model = Model::exhaustive("row 1: freed by the next owner, 2 vCPUs");

    #[test]
    fn row_01_nothing_touches_the_lock_after_the_release() {
        FREED.holds(freed_by_the_next_owner);
    }

    /// A vCPU tries, while another one owns, releases and takes the lock again.
    fn try_lock_beside_an_owner() {
        let machine = Machine::new::<2>(Config::default());
        let work = WorkOn::<SlotLatches>::new();
        work.begin();
        let other = {
            let work = work.clone();
            machine.spawn(1, move || {
                work.try_once();
            })
        };
        work.end();
        work.once();
        other.join().unwrap();
        // No ticket is missing, and the lock is free.
        work.finish(work.times());
    }

    const TRY_LOCK: Model = Model::bounded("row 36: try_lock, 2 vCPUs", 5);

    #[test]
    fn row_36_a_failing_try_lock_changes_nothing() {
        TRY_LOCK.holds(try_lock_beside_an_owner);
    }
}
