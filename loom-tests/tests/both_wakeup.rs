//! The real locks on the real engine. Every waiter halts, there is no deadline, and who is not kicked sleeps for good.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_guest::{PreemptableTicketLock, RawLock, TicketLock};
    use pvlock_host::protocol::HostFlags;
    use pvlock_host::{Config, Policy, Poller, Queue};
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

    // ---- the host changes its mind --------------------------------------------------------------------------------------

    /// vCPU 0 owns the lock when vCPU 1 comes, and releases it, while `meanwhile` happens on vCPU 2, which uses no lock.
    fn wake_while<L: RawLock + 'static>(lock: fn() -> L, config: Config, before: fn(&Vm), meanwhile: fn(&'static Vm)) {
        let vm = Vm::new::<3>(config);
        before(vm);
        let work = Work::shared(lock());
        let owner = work.begin();
        let waiter = {
            let work = work.clone();
            vm.spawn(1, move || work.once())
        };
        let host = vm.spawn(2, move || meanwhile(vm));
        work.end(owner);
        waiter.join().unwrap();
        host.join().unwrap();
        assert_eq!(work.visits(), 2);
        assert_eq!(vm.queued(), 0, "left on a queue");
        assert_eq!(vm.engine().statistics().forced, 0);
    }

    fn previous() -> Config {
        Config { queue: Queue::Previous, ..Config::default() }
    }

    /// Halting is forbidden, and allowed again.
    fn switch(vm: &'static Vm) {
        vm.engine().set_flags(HostFlags::OFF, vm);
        vm.engine().set_flags(HostFlags::default(), vm);
    }

    /// The guest ends its registration: nobody halts any more, and who has is woken.
    fn unregister(vm: &'static Vm) {
        vm.guest().unregister(&vm.doorbell(2)).unwrap();
    }

    const SWITCH: Model = Model::bounded("engine and lock, the host's flags change, 2 vCPUs", 2);
    const UNREGISTER: Model = Model::bounded("engine and lock, the guest unregisters, 2 vCPUs", 2);

    #[test]
    fn row_28_a_mode_switch_strands_nobody() {
        SWITCH.holds(|| wake_while(Ticket::new, previous(), |_| (), switch));
        SWITCH.holds(|| wake_while(Preemptable::new, previous(), |_| (), switch));
        UNREGISTER.holds(|| wake_while(Ticket::new, previous(), |_| (), unregister));
        UNREGISTER.holds(|| wake_while(Preemptable::new, previous(), |_| (), unregister));
    }

    /// Kicks are counted, not rung, until the poller has gone to sleep.
    fn poller() -> Config {
        Config { policy: Policy { poller: Some(Poller::default()), ..Policy::default() }, ..previous() }
    }

    const POLLER: Model = Model::bounded("engine and lock, the poller goes to sleep, 2 vCPUs", 3);

    #[test]
    fn a_counted_kick_is_delivered_though_the_poller_goes_to_sleep() {
        let awake = |vm: &Vm| assert!(vm.engine().poller_wakes());
        POLLER.holds(move || wake_while(Ticket::new, poller(), awake, |vm| vm.engine().poller_sleeps(vm)));
        POLLER.holds(move || wake_while(Preemptable::new, poller(), awake, |vm| vm.engine().poller_sleeps(vm)));
    }
}
