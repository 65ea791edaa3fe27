//! The engine alone: sleepers move between queues while others come and go.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_host::hypercalls::Doorbell;
    use pvlock_host::{Config, Queue, Unpark, Verdict};
    use pvlock_loom_tests::{Model, Vm, vcpu};

    fn vm<const N: usize>(queue: Queue) -> &'static Vm {
        Vm::new::<N>(Config { queue, ..Config::default() })
    }

    /// Two vCPUs name each other when they halt.
    fn circle() {
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 0, 1);
        vm.wait(1, 1, 0);
        let other = vm.spawn(1, move || {
            let _: Verdict = vm.try_halt(1, 0, false);
        });
        let _: Verdict = vm.try_halt(0, 0, false);
        other.join().unwrap();
        assert!(vm.queued() < 2, "each sleeps on the other");
    }

    /// The same, and each is kicked: nobody sleeps for good.
    fn circle_kicked() {
        let vm = vm::<3>(Queue::Previous);
        vm.wait(0, 0, 1);
        vm.wait(1, 1, 0);
        let other = vm.spawn(1, move || {
            vm.halt(1, 0, false);
        });
        let kicker = vm.spawn(2, move || {
            vm.kick(2, 0);
            vm.kick(2, 1);
        });
        vm.halt(0, 0, false);
        other.join().unwrap();
        kicker.join().unwrap();
        assert_eq!(vm.queued(), 0, "left on a queue");
    }

    const CIRCLE: Model = Model::exhaustive("two vCPUs halt on each other");
    // With the kicks it is the walks along the queues that multiply; `CIRCLE` explores those without a bound.
    const CIRCLE_KICKED: Model = Model::bounded("two vCPUs halt on each other and are kicked", 2);

    #[test]
    fn row_14_a_circle_is_not_closed() {
        CIRCLE.holds(circle);
        CIRCLE_KICKED.holds(circle_kicked);
    }

    /// vCPU 1 hands its lock to vCPU 2 and so moves the sleeper 0 to another queue, just when 0 wakes up.
    fn hand_over() {
        let vm = vm::<3>(Queue::Holder);
        for (sleeper, ticket) in [(2, 1), (0, 2)] {
            vm.wait(sleeper, ticket, 1);
            let _: Verdict = vm.try_halt(sleeper, 0, false);
        }
        assert_eq!(vm.queued(), 2);
        let holder = vm.spawn(1, move || vm.kick(1, 2));
        vm.engine().unparked(vcpu(0), Unpark::Signal, 0, vm);
        holder.join().unwrap();
        vm.engine().unparked(vcpu(2), Unpark::Woken, 0, vm);
        assert_eq!(vm.queued(), 0, "left on a queue");
    }

    const HAND_OVER: Model = Model::exhaustive("a sleeper wakes while it is moved");

    #[test]
    fn row_11_a_sleeper_that_is_moved_has_an_owner_all_along() {
        HAND_OVER.holds(hand_over);
    }

    /// vCPU 1 hands its lock to vCPU 2 and so moves the sleeper 0 to 2's queue, just when 2 wakes up and halts on 0.
    fn hand_over_to_one_that_waits() {
        let vm = vm::<3>(Queue::Holder);
        for (sleeper, ticket) in [(2, 1), (0, 2)] {
            vm.wait(sleeper, ticket, 1);
            let _: Verdict = vm.try_halt(sleeper, 0, false);
        }
        let holder = vm.spawn(1, move || vm.kick(1, 2));
        vm.engine().unparked(vcpu(2), Unpark::Signal, 0, vm);
        vm.wait(2, 9, 0);
        let _: Verdict = vm.try_halt(2, 0, false);
        holder.join().unwrap();
        assert!(vm.queued() < 2, "each sleeps on the other");
    }

    const HAND_OVER_CIRCLE: Model = Model::exhaustive("a hand-over meets a halt that would close a circle");

    #[test]
    fn row_14_a_hand_over_closes_no_circle() {
        HAND_OVER_CIRCLE.holds(hand_over_to_one_that_waits);
    }

    /// A vCPU goes offline while another one halts on its queue.
    fn offline() {
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 1, 1);
        let leaver = vm.spawn(1, move || {
            let _: Verdict = vm.ring(1, Doorbell::Offline(vcpu(1)));
        });
        let _: Verdict = vm.try_halt(0, 0, false);
        leaver.join().unwrap();
        assert_eq!(vm.queued(), 0, "on the queue of a vCPU that is offline");
    }

    const OFFLINE: Model = Model::exhaustive("a vCPU goes offline while another one halts on it");

    #[test]
    fn row_06_nobody_stands_on_the_queue_of_a_vcpu_that_is_offline() {
        OFFLINE.holds(offline);
    }

    /// A kick wakes vCPU 1, which wakes vCPU 2 on its queue, while one of them is reset.
    fn reset_in_a_chain(which: usize) {
        let vm = Vm::new::<3>(Config { queue: Queue::Previous, wake_ahead: 1, ..Config::default() });
        for (sleeper, ticket) in [(1, 1), (2, 2)] {
            vm.wait(sleeper, ticket, sleeper - 1);
            let _: Verdict = vm.try_halt(sleeper, 0, false);
        }
        assert_eq!(vm.queued(), 2);
        let next = vm.spawn(1, move || vm.sleep(1));
        let operator = vm.spawn(2, move || vm.engine().reset(vcpu(which), vm));
        vm.kick(0, 1);
        next.join().unwrap();
        operator.join().unwrap();
        assert!(vm.woken(2), "the chain was broken");
        assert_eq!(vm.queued(), 0, "left on a queue");
    }

    const CHAIN: Model = Model::bounded("a vCPU is reset while a chain of sleepers wakes", 3);

    #[test]
    fn row_06_a_reset_breaks_no_chain_of_wakes() {
        for which in [1, 2] {
            CHAIN.holds(move || reset_in_a_chain(which));
        }
    }
}
