//! Both locks on the engine: nobody sleeps for good, nobody is inside with another one, tickets are served in their order.

pvlock_shuttle_tests::models_only_under_shuttle!();

#[cfg(pvlock_shuttle)]
mod models {
    use pvlock_guest::mutation::Mutation as GuestMutation;
    use pvlock_guest::{Platform, PreemptableTicketLock, TicketLock};
    use pvlock_host::mutation::Mutation as HostMutation;
    use pvlock_host::protocol::{HostFlags, SlotIndex};
    use pvlock_host::{Config, Policy, Queue};
    use pvlock_shuttle_tests::{Model, OnVm, Vm, Work, choose};
    use std::sync::Arc;

    /// A model for each lock.
    macro_rules! both {
        ($name:ident, $new:expr) => {
            /// Each of `N` vCPUs takes the lock `times` times, while `host` happens.
            fn $name<const N: usize>(config: Config, times: usize, host: fn(&Vm)) {
                let work = Arc::new(Work::new($new));
                let everybody = {
                    let work = work.clone();
                    move |_| (0..times).for_each(|_| work.once())
                };
                Vm::run::<N>(config, everybody, host);
                work.finish(N * times);
            }
        };
    }
    both!(ticket, TicketLock::<OnVm>::new());
    both!(preemptable, PreemptableTicketLock::<OnVm>::new());

    const QUEUES: [Queue; 3] = [Queue::None, Queue::Holder, Queue::Previous];

    fn config(queue: Queue, wake_ahead: u32) -> Config {
        Config { queue, wake_ahead, ..Config::default() }
    }

    fn nothing(_: &Vm) {}

    const FOUR: Model = Model { name: "4 vCPUs", schedules: 10_000 };
    const EIGHT: Model = Model { name: "8 vCPUs", schedules: 3_000 };
    const SIXTEEN: Model = Model { name: "16 vCPUs", schedules: 1_000 };

    #[test]
    fn ticket_lock_with_4_8_and_16_vcpus() {
        for (queue, wake_ahead) in QUEUES.into_iter().zip([0, 2, 1]) {
            FOUR.holds(move || ticket::<4>(config(queue, wake_ahead), 3, nothing));
            EIGHT.holds(move || ticket::<8>(config(queue, wake_ahead), 2, nothing));
            SIXTEEN.holds(move || ticket::<16>(config(queue, wake_ahead), 2, nothing));
        }
    }

    #[test]
    fn preemptable_lock_with_4_8_and_16_vcpus() {
        for (queue, wake_ahead) in QUEUES.into_iter().zip([0, 2, 1]) {
            FOUR.holds(move || preemptable::<4>(config(queue, wake_ahead), 3, nothing));
            EIGHT.holds(move || preemptable::<8>(config(queue, wake_ahead), 2, nothing));
            SIXTEEN.holds(move || preemptable::<16>(config(queue, wake_ahead), 2, nothing));
        }
    }

    /// The host interrupts, pauses, and changes its mind. In the end halting is allowed again.
    fn meddle(vm: &Vm) {
        let engine = vm.engine();
        for _ in 0..6 {
            match choose(4) {
                0 => engine.interrupt(vm.some_vcpu(), vm),
                1 => {
                    engine.pause(vm);
                    engine.resume();
                }
                2 => {
                    engine.set_flags(HostFlags::OFF, vm);
                    engine.set_flags(HostFlags::default(), vm);
                }
                _ => engine.kicked(vm.some_vcpu(), vm),
            }
        }
    }

    #[test]
    fn row_28_and_35_the_host_meddles() {
        FOUR.holds(|| ticket::<4>(config(Queue::Previous, 1), 3, meddle));
        FOUR.holds(|| preemptable::<4>(config(Queue::Holder, 1), 3, meddle));
        EIGHT.holds(|| ticket::<8>(config(Queue::Holder, 2), 2, meddle));
        EIGHT.holds(|| preemptable::<8>(config(Queue::Previous, 1), 2, meddle));
    }

    /// Everybody halts, and nobody kicks: the host ends it.
    fn halts<const N: usize>() {
        let halt = |_| (0..3).for_each(|slot| OnVm::halt(SlotIndex::new(slot).expect("a slot"), false));
        let end = |vm: &Vm| match choose(3) {
            0 => vm.engine().pause(vm),
            1 => vm.engine().shut_down(vm),
            _ => vm.engine().reset_vm(vm),
        };
        Vm::run::<N>(config(Queue::Previous, 1), halt, end);
    }

    #[test]
    fn row_35_pause_shutdown_and_reset_end_every_sleep() {
        FOUR.holds(halts::<4>);
        SIXTEEN.holds(halts::<16>);
    }

    fn parking(name: &str, queue: Queue) -> Config {
        Config { policy: Policy::named(name).expect("a policy"), ..config(queue, 1) }
    }

    /// Waiters that spin are parked behind those that sleep, on whomever these sleep.
    #[test]
    fn row_33_spinners_are_parked_and_nobody_stays_asleep() {
        for queue in QUEUES {
            FOUR.holds(move || ticket::<4>(parking("park-on-previous", queue), 3, nothing));
            FOUR.holds(move || preemptable::<4>(parking("park-on-previous", queue), 3, meddle));
            EIGHT.holds(move || ticket::<8>(parking("park-on-previous", queue), 2, meddle));
            EIGHT.holds(move || preemptable::<8>(parking("park-on-holder", queue), 2, nothing));
            SIXTEEN.holds(move || ticket::<16>(parking("park-on-previous", queue), 2, nothing));
        }
    }

    // Most of them fail within the first few dozen schedules. Those that weaken an ordering, or need two preemptions in a row
    // between neighbouring steps, are loom's.

    #[test]
    fn mutations_of_the_ticket_lock() {
        for mutation in [
            GuestMutation::ReleaseByStore,
            GuestMutation::HaltThoughNotNoted,
            GuestMutation::NextNotNoted,
            GuestMutation::EveryHalterNotes,
            GuestMutation::NoSuccessorLookup,
            GuestMutation::NoKick,
        ] {
            println!("{mutation:?}");
            mutation.with(|| FOUR.fails("deadlock", || ticket::<4>(config(Queue::Previous, 0), 3, nothing)));
        }
    }

    #[test]
    fn mutations_of_the_preemptable_lock() {
        for mutation in [GuestMutation::ReleaseByStore, GuestMutation::HeadHaltsOnFree, GuestMutation::NoKick] {
            println!("{mutation:?}");
            mutation.with(|| FOUR.fails("deadlock", || preemptable::<4>(config(Queue::Previous, 0), 3, nothing)));
        }
        GuestMutation::QueuedBypasses
            .with(|| FOUR.fails("served out of turn", || preemptable::<4>(config(Queue::Previous, 0), 3, nothing)));
    }

    #[test]
    fn mutations_of_the_engine() {
        HostMutation::VcpuWordByStore.with(|| FOUR.fails("deadlock", || ticket::<4>(config(Queue::Previous, 0), 3, nothing)));
        HostMutation::VcpuWordByStore.with(|| FOUR.fails("deadlock", || preemptable::<4>(config(Queue::Previous, 0), 3, nothing)));
        HostMutation::StoppedCheckedFirst.with(|| FOUR.fails("deadlock", halts::<4>));
        let parked = || ticket::<4>(parking("park-on-previous", Queue::Holder), 5, nothing);
        HostMutation::OffQueueAsleep.with(|| FOUR.fails("deadlock", parked));
    }
}
