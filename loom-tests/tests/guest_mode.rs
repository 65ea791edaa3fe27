//! A host appears while locks are in use: nobody halts where a native release could erase the note of it.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use loom::sync::atomic::{AtomicBool, Ordering};
    use pvlock_guest::Mode;
    use pvlock_guest::protocol::VcpuId;
    use pvlock_loom_tests::{Config, Kick, Machine, Model, SlotLatches, Start, VcpuLatch, Wait, WorkOn};
    use std::rc::Rc;

    fn registered_while_owned<const N: usize>() {
        switched_while_owned::<SlotLatches, N>(|machine| machine.register((0..N).filter_map(VcpuId::new)));
    }

    /// As stock KVM's PV_UNHALT: one latch for each vCPU, and nobody to register with.
    fn switched_over_while_owned<const N: usize>() {
        switched_while_owned::<VcpuLatch, N>(|machine| machine.switch_over((0..N).filter_map(VcpuId::new)));
    }

    /// vCPU 0 owns a native lock while vCPU 1 switches the locks over, comes online and waits for the lock.
    ///
    /// With three vCPUs, the third one comes online at the same time: it has just been started. vCPU 0 does not.
    fn switched_while_owned<K: Kick, const N: usize>(switch: fn(&'static Machine)) {
        let machine = Machine::new::<N>(Config { start: Start::Native, spin: Wait::Poll, looks: 1, ..Config::default() });
        let work = WorkOn::<K>::new();
        // As a kernel tells its other vCPUs to come online.
        let registered = Rc::new(AtomicBool::new(false));
        work.begin();
        let first = {
            let (work, registered) = (work.clone(), registered.clone());
            machine.spawn(1, move || {
                switch(machine);
                registered.store(true, Ordering::Relaxed);
                machine.online(1);
                work.once();
            })
        };
        let third = (N == 3).then(|| machine.spawn(2, move || machine.online(2)));
        work.end();
        if N == 2 {
            while !registered.load(Ordering::Relaxed) {
                loom::thread::yield_now();
            }
            machine.online(0);
        }
        first.join().unwrap();
        if let Some(third) = third {
            third.join().unwrap();
            assert_eq!(machine.guest().mode(), Mode::Paravirtual, "vCPU 0 has not come online");
        } else {
            assert_eq!(machine.guest().mode(), Mode::Halting, "everybody has come online");
        }
        work.finish(2);
    }

    /// vCPU 0 owns a native lock, for which vCPU 2, just started, comes to wait while vCPU 1 registers the region.
    fn registered_while_awaited() {
        let machine = Machine::new::<3>(Config { start: Start::Native, spin: Wait::Poll, looks: 1, ..Config::default() });
        let work = WorkOn::<SlotLatches>::new();
        work.begin();
        let registrar = machine.spawn(1, move || machine.register((0..2).filter_map(VcpuId::new)));
        let waiter = {
            let work = work.clone();
            machine.spawn(2, move || work.once())
        };
        work.end();
        registrar.join().unwrap();
        waiter.join().unwrap();
        work.finish(2);
    }

    // Without a bound most executions are turns of polling.
    const SWITCH_2: Model = Model::bounded("row 28: registered while a lock is owned, 2 vCPUs", 3);
    const SWITCH_3: Model = Model::bounded("row 28: registered while a lock is owned, 3 vCPUs", 2);
    const AWAITED: Model = Model::bounded("row 28: registered while a lock is awaited, 3 vCPUs", 2);

    #[test]
    fn row_28_registered_while_awaited() {
        AWAITED.holds(registered_while_awaited);
    }

    #[test]
    fn row_28_switch_2() {
        SWITCH_2.holds(registered_while_owned::<2>);
    }

    #[test]
    fn row_28_switch_3() {
        SWITCH_3.holds(registered_while_owned::<3>);
    }

    const SWITCH_2_ALONE: Model = Model::bounded("row 28: switched over without a host while a lock is owned, 2 vCPUs", 3);
    const SWITCH_3_ALONE: Model = Model::bounded("row 28: switched over without a host while a lock is owned, 3 vCPUs", 2);

    #[test]
    fn row_28_switch_2_without_a_host() {
        SWITCH_2_ALONE.holds(switched_over_while_owned::<2>);
    }

    #[test]
    fn row_28_switch_3_without_a_host() {
        SWITCH_3_ALONE.holds(switched_over_while_owned::<3>);
    }
}
