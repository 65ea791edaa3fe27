//! The preemptable lock: one owner at a time, tickets in their order, no lost wake-up, and bypass only where the contract
//! allows it.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_guest::PreemptableTicketLock;
    use pvlock_loom_tests::{Config, Machine, Model, OnClock, Pace, PollFrom, QueueWork, Visit, pace};
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Runs `code` with a reference to the work of its own.
    fn with(work: &Rc<QueueWork>, code: impl FnOnce(&QueueWork) + 'static) -> impl FnOnce() + 'static {
        let work = work.clone();
        move || code(&work)
    }

    // ---- exclusion and wake-up -----------------------------------------------------------------------------------------

    /// Each vCPU takes the lock; who has to wait halts.
    fn contend<const N: usize>() {
        let (machine, work) = QueueWork::new::<N>();
        let others: Vec<_> = (1..N).map(|vcpu| machine.spawn(vcpu, with(&work, QueueWork::once))).collect();
        work.once();
        others.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        assert_eq!(work.finish().len(), N);
    }

    /// vCPU 0 owns the lock when the others begin to wait for it, and releases it.
    fn wake<const N: usize>() {
        let (machine, work) = QueueWork::new::<N>();
        let held = work.begin();
        let waiters: Vec<_> = (1..N).map(|vcpu| machine.spawn(vcpu, with(&work, QueueWork::once))).collect();
        work.end(held);
        waiters.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        assert_eq!(work.finish().len(), N);
    }

    /// Row 7: released, taken by somebody else before the halted head is back, and released again.
    fn steal() {
        let (machine, work) = QueueWork::new::<3>();
        let held = work.begin();
        let waiter = machine.spawn(1, with(&work, QueueWork::once));
        let thief = machine.spawn(2, with(&work, QueueWork::try_once));
        work.end(held);
        work.try_once();
        waiter.join().unwrap();
        thief.join().unwrap();
        work.finish();
    }

    const CONTEND_2: Model = Model::exhaustive("preemptable, exclusion: 2 vCPUs");
    // `WAKE_3` has one more, and one release less.
    const CONTEND_3: Model = Model::bounded("preemptable, exclusion: 3 vCPUs", 1);
    const WAKE_2: Model = Model::exhaustive("preemptable, wake-up: 2 vCPUs");
    // Two preemptions: one before a halt, one for who does not see it. All mutations fail with them; three take minutes.
    const WAKE_3: Model = Model::bounded("preemptable, wake-up: 3 vCPUs", 2);
    const STEAL: Model = Model::bounded("row 7: release, steal, release: 3 vCPUs", 2);

    #[test]
    fn exclusion() {
        CONTEND_2.holds(contend::<2>);
        CONTEND_3.holds(contend::<3>);
    }

    #[test]
    fn row_03_wake_2() {
        WAKE_2.holds(wake::<2>);
    }

    #[test]
    fn wake_3() {
        WAKE_3.holds(wake::<3>);
    }

    #[test]
    fn row_07_release_steal_release() {
        STEAL.holds(steal);
    }

    // ---- bypass ----------------------------------------------------------------------------------------------------

    fn bypasses(visits: &[Visit]) -> impl Iterator<Item = &Visit> {
        visits.iter().filter(|visit| !visit.bypassed.is_empty())
    }

    /// The head polls all along, and nobody watches long enough to say that it does not: nobody bypasses it.
    fn polling_head() {
        let (machine, work) = QueueWork::new::<2>();
        let held = work.begin();
        let head = machine.spawn(
            1,
            with(&work, |work| {
                QueueWork::poll_from(PollFrom::Draw);
                work.once();
            }),
        );
        work.end(held);
        work.try_once();
        head.join().unwrap();
        assert_eq!(bypasses(&work.finish()).next(), None, "a head that polls is not bypassed");
    }

    /// The head is known to nobody as away, but may leave the free lock alone for `CLAIM`.
    fn silent_head(bypassed: &AtomicBool) {
        let (machine, work) = QueueWork::new::<2>();
        let held = work.begin();
        let head = machine.spawn(
            1,
            with(&work, |work| {
                QueueWork::poll_from(PollFrom::Draw);
                work.once();
            }),
        );
        work.end(held);
        pace(Pace::Watching);
        work.once();
        head.join().unwrap();
        if bypasses(&work.finish()).next().is_some() {
            bypassed.store(true, Ordering::Relaxed);
        }
    }

    /// The head halts once; when it is back, it polls and says so.
    fn returning_head<const N: usize>() {
        let (machine, work) = QueueWork::new::<N>();
        let held = work.begin();
        let head = machine.spawn(
            1,
            with(&work, |work| {
                QueueWork::poll_from(PollFrom::Halt);
                work.once();
            }),
        );
        let third = (N == 3).then(|| machine.spawn(2, with(&work, QueueWork::try_once)));
        work.end(held);
        if let Some(held) = work.try_begin() {
            work.end(held);
            work.try_once();
        }
        head.join().unwrap();
        third.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        let visits = work.finish();
        assert!(visits.iter().all(|visit| visit.present.is_empty()), "a head that is back is not bypassed by who comes later");
    }

    /// A fair release while the head has halted: nobody bypasses it before it has claimed, however long that takes.
    fn fair() {
        let (machine, work) = QueueWork::new::<2>();
        let held = work.begin();
        let head = machine.spawn(1, with(&work, QueueWork::once));
        work.end_fair(held);
        pace(Pace::Watching);
        let held = work.begin();
        work.end_fair(held);
        head.join().unwrap();
        assert_eq!(bypasses(&work.finish()).next(), None, "bypassed after a fair release");
    }

    // A look that is repeated, and each old value that it may return, multiplies the executions: bounds at which the
    // mutations fail and a model takes seconds.
    const POLLING_HEAD: Model = Model::bounded("preemptable, polling head: 2 vCPUs", 2);
    const SILENT_HEAD: Model = Model::bounded("preemptable, silent head: 2 vCPUs", 2);
    const RETURNING_HEAD_2: Model = Model::bounded("preemptable, returning head: 2 vCPUs", 3);
    const RETURNING_HEAD_3: Model = Model::bounded("preemptable, returning head: 3 vCPUs", 1);
    const FAIR: Model = Model::bounded("preemptable, fair release: 2 vCPUs", 2);

    #[test]
    fn a_polling_head_is_not_bypassed() {
        POLLING_HEAD.holds(polling_head);
    }

    #[test]
    fn a_silent_head_is_bypassed_after_claim() {
        let bypassed = Arc::new(AtomicBool::new(false));
        let seen = bypassed.clone();
        SILENT_HEAD.holds(move || silent_head(&seen));
        assert!(bypassed.load(Ordering::Relaxed), "the clock lets CLAIM pass in some execution");
    }

    #[test]
    fn a_head_that_is_back_is_not_bypassed_again() {
        RETURNING_HEAD_2.holds(returning_head::<2>);
        RETURNING_HEAD_3.holds(returning_head::<3>);
    }

    #[test]
    fn a_fair_release_forbids_bypass() {
        FAIR.holds(fair);
    }

    // ---- what is left alone ------------------------------------------------------------------------------------------

    type Lock = PreemptableTicketLock<OnClock>;

    /// The next owner frees the lock as soon as it has it; the last one may still be on its way out of `unlock`.
    fn freed_by_the_next_owner() {
        let machine = Machine::new::<2>(Config::default());
        let lock: *mut Lock = Box::into_raw(Box::new(Lock::new()));
        // SAFETY: the lock lives until the end of this function.
        let held = unsafe { &*lock }.lock();
        let next = machine.spawn(1, move || {
            // SAFETY: as above. `retire` only tells loom that the memory belongs to this thread alone now.
            unsafe {
                let _held = (*lock).lock();
                (*lock).retire();
            }
        });
        // SAFETY: as above; this thread owns the lock.
        unsafe { (*lock).unlock(held) };
        next.join().unwrap();
        // SAFETY: nobody uses it any more.
        drop(unsafe { Box::from_raw(lock) });
    }

    /// A vCPU tries, while another one owns, releases and takes the lock again.
    fn try_lock_beside_an_owner() {
        let (machine, work) = QueueWork::new::<2>();
        let held = work.begin();
        let other = machine.spawn(1, with(&work, QueueWork::try_once));
        work.end(held);
        work.once();
        other.join().unwrap();
        work.finish();
    }

    const FREED: Model = Model::exhaustive("row 1: preemptable, freed by the next owner, 2 vCPUs");
    const TRY_LOCK: Model = Model::exhaustive("row 36: preemptable, try_lock, 2 vCPUs");

    #[test]
    fn row_01_nothing_touches_the_lock_after_the_release() {
        FREED.holds(freed_by_the_next_owner);
    }

    #[test]
    fn row_36_a_failing_try_lock_changes_nothing() {
        TRY_LOCK.holds(try_lock_beside_an_owner);
    }
}
