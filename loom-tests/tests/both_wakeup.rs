//! The real locks on the real engine. Every waiter halts, there is no deadline, and who is not kicked sleeps for good.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_guest::mutation::Mutation as GuestMutation;
    use pvlock_guest::{PreemptableTicketLock, RawLock, TicketLock};
    use pvlock_host::mutation::Mutation as HostMutation;
    use pvlock_host::{Config, Queue};
    use pvlock_loom_tests::{Model, OnEngine, Vm, Work};

    type Ticket = TicketLock<OnEngine>;
    type Preemptable = PreemptableTicketLock<OnEngine>;

    /// vCPU 0 owns the lock when the other one comes, releases it, and wants it again.
    fn wake<L: RawLock + 'static>(lock: fn() -> L, queue: Queue, wake_ahead: u32) {
        let vm = Vm::new::<2>(Config { queue, wake_ahead, ..Config::default() });
        let work = Work::shared(lock());
        let owner = work.begin();
        let other = {
            let work = work.clone();
            vm.spawn(1, move || work.once())
        };
        work.end(owner);
        work.once();
        other.join().unwrap();
        assert_eq!(work.visits(), 3);
        assert!(!work.lock().is_locked());
        assert_eq!(vm.queued(), 0, "left on a queue");
        assert_eq!(vm.engine().statistics().forced, 0);
    }

    fn ticket() {
        wake(Ticket::new, Queue::Previous, 1);
    }

    fn preemptable() {
        wake(Preemptable::new, Queue::Previous, 1);
    }

    // Two preemptions: one between a look and a halt, one on the way back. Three hold as well, but take minutes: 300 000
    // executions.
    const TICKET: Model = Model::bounded("engine and ticket lock, 2 vCPUs", 2);
    const PREEMPTABLE: Model = Model::bounded("engine and preemptable lock, 2 vCPUs", 2);

    #[test]
    fn ticket_lock() {
        TICKET.holds(ticket);
        TICKET.holds(|| wake(Ticket::new, Queue::Holder, 0));
    }

    #[test]
    fn preemptable_lock() {
        PREEMPTABLE.holds(preemptable);
        PREEMPTABLE.holds(|| wake(Preemptable::new, Queue::Holder, 0));
    }

    #[test]
    fn mutations_of_the_guest() {
        for mutation in [GuestMutation::ReleaseByStore, GuestMutation::NextNotNoted, GuestMutation::HaltThoughNotNoted] {
            println!("{mutation:?}");
            mutation.with(|| TICKET.fails("deadlock", ticket));
        }
        for mutation in [GuestMutation::ReleaseByStore, GuestMutation::HeadHaltsOnFree] {
            println!("{mutation:?}");
            mutation.with(|| PREEMPTABLE.fails("deadlock", preemptable));
        }
    }

    #[test]
    fn mutations_of_the_host() {
        HostMutation::VcpuWordByStore.with(|| TICKET.fails("deadlock", ticket));
        HostMutation::VcpuWordByStore.with(|| PREEMPTABLE.fails("deadlock", preemptable));
    }
}
