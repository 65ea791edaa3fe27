//! No wake-up is lost: every waiter halts, there is no deadline, and a vCPU that nobody kicks sleeps for good.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_guest::KickKind;
    use pvlock_guest::mutation::Mutation;
    use pvlock_loom_tests::{Config, InterruptKick, Kick, Machine, Model, SlotLatches, VcpuLatch, WorkOn};

    /// vCPU 0 owns the lock when the others begin to wait for it, and releases it.
    fn wake<K: Kick, const N: usize>(interrupts: bool) {
        let machine = Machine::new::<N>(Config { blind: N == 3, interrupts, ..Config::default() });
        let work = WorkOn::<K>::new();
        work.begin();
        let waiters: Vec<_> = (1..N)
            .map(|vcpu| {
                let work = work.clone();
                machine.spawn(vcpu, move || work.once())
            })
            .collect();
        work.end();
        waiters.into_iter().for_each(|vcpu| vcpu.join().unwrap());
        work.finish(N as u32);
        assert!(interrupts || K::KIND != KickKind::Interrupt || machine.halts() == 0, "nobody halts who could not be woken");
    }

    const WAKE_2: Model = Model::exhaustive("wake-up: 2 vCPUs");
    const WAKE_3: Model = Model::bounded("wake-up: 3 vCPUs", 2);

    #[test]
    fn row_03_wake_2() {
        WAKE_2.holds(|| wake::<SlotLatches, 2>(true));
    }

    #[test]
    fn wake_3() {
        WAKE_3.holds(|| wake::<SlotLatches, 3>(true));
    }

    #[test]
    fn row_08_latch_for_the_vcpu() {
        for interrupts in [false, true] {
            WAKE_2.holds(move || wake::<VcpuLatch, 2>(interrupts));
        }
    }

    #[test]
    fn row_28_kick_is_an_interrupt() {
        for interrupts in [false, true] {
            WAKE_2.holds(move || wake::<InterruptKick, 2>(interrupts));
        }
    }

    /// Row 7: released, taken again by somebody else or by the same vCPU before the halted waiter is back, and released again.
    fn retake() {
        let machine = Machine::new::<3>(Config { blind: true, ..Config::default() });
        let work = WorkOn::<SlotLatches>::new();
        work.begin();
        let waiter = machine.spawn(1, {
            let work = work.clone();
            move || work.once()
        });
        let other = machine.spawn(2, {
            let work = work.clone();
            move || _ = work.try_once()
        });
        work.end();
        work.once();
        waiter.join().unwrap();
        other.join().unwrap();
        work.finish(work.times());
    }

    #[test]
    fn row_07_release_retake_release() {
        const RETAKE: Model = Model::bounded("row 7: release, retake, release, 3 vCPUs", 2);
        RETAKE.holds(retake);
    }

    /// Waiters that find no room in the table spin until they are next.
    #[test]
    fn a_full_table_delays_halts_and_loses_nobody() {
        Mutation::TableFull.with(|| {
            WAKE_3.holds(|| wake::<SlotLatches, 3>(true));
        });
    }
}
