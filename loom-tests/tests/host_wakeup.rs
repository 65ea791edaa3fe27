//! The engine alone: whatever may end a sleep meets a vCPU that halts. There is no deadline, so who is not woken sleeps for
//! good.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use pvlock_host::protocol::offset::record;
    use pvlock_host::{Config, Queue, Resume, Verdict, hypercalls::Doorbell};
    use pvlock_loom_tests::{Model, Vm, vcpu};
    use std::sync::atomic::Ordering;

    fn vm<const N: usize>(queue: Queue) -> &'static Vm {
        Vm::new::<N>(Config { queue, ..Config::default() })
    }

    fn is_park(verdict: Verdict) -> bool {
        matches!(verdict, Verdict::Park(_))
    }

    /// A kick meets a halt.
    fn kick() {
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 1, 1);
        let kicker = vm.spawn(1, move || vm.kick(1, 0));
        vm.halt(0, 0, false);
        kicker.join().unwrap();
        // Row 18: the latch of the slot that halted is consumed, once; those of the others are not.
        assert_eq!(vm.try_halt(0, 1, false), Verdict::Resume(Resume::Latched));
        assert!(is_park(vm.try_halt(0, 0, false)), "a latch is consumed once");
        assert!(!vm.woken(0), "one wake for one kick");
    }

    /// An interrupt meets a halt that takes interrupts.
    fn interrupt() {
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 1, 1);
        let device = vm.spawn(1, move || vm.engine().interrupt(vcpu(0), vm));
        vm.halt(0, 0, true);
        device.join().unwrap();
        assert!(is_park(vm.try_halt(0, 0, true)), "an interrupt is consumed once");
    }

    /// An interrupt and a kick meet a halt with interrupts off: only the kick ends it, and the interrupt stays.
    fn interrupt_with_interrupts_off() {
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 1, 1);
        let device = vm.spawn(1, move || {
            vm.engine().interrupt(vcpu(0), vm);
            vm.kick(1, 0);
        });
        vm.halt(0, 0, false);
        assert_eq!(vm.engine().vcpu_statistics(vcpu(0)).interrupted, 0);
        device.join().unwrap();
        assert_eq!(vm.try_halt(0, 0, true), Verdict::Resume(Resume::Interrupt));
    }

    /// The VM is paused while a vCPU halts.
    fn pause() {
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 1, 1);
        let operator = vm.spawn(1, move || vm.engine().pause(vm));
        vm.halt(0, 0, false);
        operator.join().unwrap();
        assert_eq!(vm.try_halt(0, 0, false), Verdict::Resume(Resume::NotParking));
        vm.engine().resume();
        assert!(is_park(vm.try_halt(0, 0, false)));
    }

    /// The guest unregisters the region while a vCPU halts, and uses its memory for something else.
    fn unregister() {
        const ELSE: u64 = 77;
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 1, 1);
        let host_written = [record::RUN_STATE, record::KICKS, record::PARKS, record::PARKED_NS];
        let words = host_written.map(|word| vm.guest().region().records[0].word(word).unwrap());
        let other = vm.spawn(1, move || {
            let _: Verdict = vm.ring(1, Doorbell::Unregister);
            words.iter().for_each(|word| word.store(ELSE, Ordering::Relaxed));
        });
        vm.halt(0, 0, false);
        other.join().unwrap();
        for word in words {
            assert_eq!(word.load(Ordering::Relaxed), ELSE, "the host wrote to memory that is not its any more");
        }
        assert_eq!(vm.queued(), 0);
    }

    /// A vCPU is reset while it halts, or while another one halts on its queue.
    fn reset(which: usize) {
        let vm = vm::<2>(Queue::Previous);
        vm.wait(0, 1, 1);
        let operator = vm.spawn(1, move || {
            vm.engine().reset(vcpu(which), vm);
            if which == 1 {
                // The one that sleeps is not woken if it halted on nobody's queue, which is what a kick is for.
                vm.kick(1, 0);
            }
        });
        vm.halt(0, 0, false);
        operator.join().unwrap();
        assert_eq!(vm.queued(), 0, "nobody sleeps on a vCPU that was reset");
        if which == 0 {
            assert_eq!(vm.try_halt(0, 0, false), Verdict::Resume(Resume::NotParking), "offline until it says otherwise");
        }
    }

    const KICK: Model = Model::exhaustive("kick against halt");
    const INTERRUPT: Model = Model::exhaustive("interrupt against halt");
    const INTERRUPTS_OFF: Model = Model::exhaustive("interrupt and kick against halt with interrupts off");
    const PAUSE: Model = Model::exhaustive("pause against halt");
    // Both take every queue's lock one after the other: without a bound that is a million executions, which hold,
    // but take two minutes.
    const UNREGISTER: Model = Model::bounded("unregister against halt", 3);
    const RESET: Model = Model::exhaustive("reset against halt");

    #[test]
    fn kick_against_halt() {
        KICK.holds(kick);
    }

    #[test]
    fn interrupt_against_halt() {
        INTERRUPT.holds(interrupt);
        INTERRUPTS_OFF.holds(interrupt_with_interrupts_off);
    }

    #[test]
    fn row_35_pause_against_halt() {
        PAUSE.holds(pause);
    }

    #[test]
    fn unregister_against_halt() {
        UNREGISTER.holds(unregister);
    }

    #[test]
    fn row_06_reset_against_halt() {
        for which in [0, 1] {
            RESET.holds(move || reset(which));
        }
    }
}
