//! Models of a vCPU that is parked while it spins, against everything that ends the absence of the one it waits for.
//!
//! Nobody kicks such a sleeper. So whatever the interleaving, it either does not sleep or is woken.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use loom::thread;
    use pvlock_host::hypercalls::Doorbell;
    use pvlock_host::protocol::offset::record;
    use pvlock_host::protocol::{Features, Header, LockId, RECORD_STRIDE, SlotIndex, VcpuId, Wait, WaitState, region_size};
    use pvlock_host::{Config, Engine, GuestMemory, PauseLoop, Policy, Queue, RunStates, SleepKind, Unpark, Verdict, Waker};
    use pvlock_loom_tests::Model;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    /// Guest memory that is no part of the model: the guest's words do not change in it while the model runs.
    struct Memory(Vec<AtomicU64>);

    impl GuestMemory for &'static Memory {
        fn contains(&self, address: u64, length: u64) -> bool {
            address.checked_add(length).is_some_and(|end| end <= self.0.len() as u64 * 8)
        }

        fn load(&self, address: u64) -> u64 {
            self.0[address as usize / 8].load(SeqCst)
        }

        fn store(&self, address: u64, value: u64) {
            self.0[address as usize / 8].store(value, SeqCst);
        }
    }

    type Vm = Engine<&'static Memory, parking_lot::RawMutex>;

    /// A VM, and who was woken in it. The wakes are tokens: they are counted, not waited for.
    struct Rig {
        vm: Vm,
        memory: &'static Memory,
        wakes: Vec<AtomicU64>,
    }

    impl Waker for &Rig {
        fn wake(&self, vcpu: VcpuId) {
            self.wakes[vcpu.index()].fetch_add(1, SeqCst);
        }
    }

    fn vcpu(id: usize) -> VcpuId {
        VcpuId::new(id).unwrap()
    }

    fn slot() -> SlotIndex {
        SlotIndex::new(0).unwrap()
    }

    impl Rig {
        /// Registered and online, everybody running.
        fn new(vcpus: usize, queue: Queue) -> Arc<Self> {
            let memory =
                &*Box::leak(Box::new(Memory((0..region_size(vcpus, RECORD_STRIDE) / 8).map(|_| AtomicU64::new(0)).collect())));
            let header = Header::new(vcpus, Features::HALT);
            for (n, word) in [&header.magic, &header.version, &header.stride, &header.features].into_iter().enumerate() {
                memory.0[n].store(word.load(SeqCst), SeqCst);
            }
            let pause_loop = if queue == Queue::Holder { PauseLoop::ParkOnHolder } else { PauseLoop::ParkOnPrevious };
            let policy = Policy { pause_loop, ..Policy::default() };
            let config = Config { queue, policy, run_states: RunStates::Exact, ..Config::default() };
            let rig = Arc::new(Self {
                vm: Engine::new(config, vcpus, memory).unwrap(),
                memory,
                wakes: (0..vcpus).map(|_| AtomicU64::new(0)).collect(),
            });
            rig.ring(0, Doorbell::Register { low: 0 });
            for id in 0..vcpus {
                rig.ring(0, Doorbell::Online(vcpu(id)));
                rig.vm.scheduled_in(vcpu(id), &&*rig);
            }
            rig
        }

        fn ring(&self, id: usize, doorbell: Doorbell) {
            let verdict = self.vm.doorbell(vcpu(id), doorbell.encode(), 0, &self);
            assert!(matches!(verdict, Verdict::Resume(_)));
        }

        fn waits(&self, id: usize, ticket: u32, on: usize, state: WaitState) {
            let hint = Some(vcpu(on));
            let wait = Wait { lock: LockId::new(8).unwrap(), ticket, state, predecessor: hint, holder: hint };
            let record = (id + 1) * RECORD_STRIDE;
            self.memory.store((record + record::slot_word(slot())) as u64, wait.word());
            self.memory.store((record + record::slot_id(slot())) as u64, wait.lock.get());
        }

        /// `id` has spun; whether it is to sleep.
        fn spin(&self, id: usize) -> bool {
            matches!(self.vm.pause_loop(vcpu(id), 0, &self), Verdict::Park(_))
        }

        fn halt(&self, id: usize) -> bool {
            matches!(self.vm.halt(vcpu(id), slot(), false, 0), Verdict::Park(_))
        }

        fn was_woken(&self, id: usize) -> bool {
            self.wakes[id].load(SeqCst) > 0
        }
    }

    /// Three preemptions: more than any of the faults needs.
    fn model(name: &'static str, test: impl Fn() + Sync + Send + 'static) {
        Model::bounded(name, 3).holds(test);
    }

    /// vCPU 0 spins, waiting for vCPU 1, which is off-CPU, while `end` happens in another thread.
    fn spinner_against(name: &'static str, end: fn(&Rig)) {
        for queue in [Queue::Holder, Queue::Previous] {
            model(name, move || {
                let rig = Rig::new(2, queue);
                rig.waits(0, 1, 1, WaitState::Spinning);
                rig.vm.scheduled_out(vcpu(1));
                let other = Arc::clone(&rig);
                let ending = thread::spawn(move || end(&other));
                let sleeps = rig.spin(0);
                ending.join().unwrap();
                assert!(!sleeps || rig.was_woken(0), "it sleeps, and nobody will wake it");
                if sleeps {
                    rig.vm.unparked(vcpu(0), Unpark::Woken, 0, &&*rig);
                }
                assert!(rig.vm.check_queues().unwrap().concat().is_empty());
                assert_eq!(rig.vm.dump(0).count(), 0);
            });
        }
    }

    #[test]
    fn the_owner_is_scheduled_in() {
        spinner_against("a spinner, the owner is scheduled in", |rig| rig.vm.scheduled_in(vcpu(1), &rig));
    }

    #[test]
    fn the_owner_is_scheduled_in_and_out_again() {
        spinner_against("a spinner, the owner is scheduled in and out again", |rig| {
            rig.vm.scheduled_in(vcpu(1), &rig);
            rig.vm.scheduled_out(vcpu(1));
            rig.vm.scheduled_in(vcpu(1), &rig);
        });
    }

    #[test]
    fn the_owner_is_reset() {
        spinner_against("a spinner, the owner is reset", |rig| rig.vm.reset(vcpu(1), &rig));
    }

    #[test]
    fn the_vm_is_paused() {
        spinner_against("a spinner, the VM is paused", |rig| rig.vm.pause(&rig));
    }

    #[test]
    fn the_region_is_unregistered() {
        spinner_against("a spinner, the region is unregistered", |rig| rig.ring(1, Doorbell::Unregister));
    }

    #[test]
    fn the_spinner_is_kicked_or_interrupted_while_the_owner_stays_away() {
        model("a spinner is interrupted", || {
            let rig = Rig::new(2, Queue::Holder);
            rig.waits(0, 1, 1, WaitState::Spinning);
            rig.vm.scheduled_out(vcpu(1));
            let other = Arc::clone(&rig);
            let interrupt = thread::spawn(move || other.vm.interrupt(vcpu(0), &&*other));
            let sleeps = rig.spin(0);
            interrupt.join().unwrap();
            assert!(!sleeps || rig.was_woken(0));
        });
    }

    #[test]
    fn row_14_one_that_halts_and_one_that_spins_do_not_sleep_on_each_other() {
        for queue in [Queue::Holder, Queue::Previous] {
            model("one that halts and one that spins", move || {
                let rig = Rig::new(2, queue);
                rig.waits(0, 2, 1, WaitState::Spinning);
                rig.waits(1, 1, 0, WaitState::Halting);
                // Its scheduler is slow to say that it runs; so vCPU 0 may think that it does not.
                rig.vm.scheduled_out(vcpu(1));
                let other = Arc::clone(&rig);
                let halting = thread::spawn(move || other.halt(1));
                rig.spin(0);
                halting.join().unwrap();
                let queues = rig.vm.check_queues().unwrap();
                assert!(queues.iter().filter(|queue| !queue.is_empty()).count() <= 1, "{queues:?}");
            });
        }
    }

    /// A hint that goes stale: the one before the spinner is served, and halts again, behind the spinner.
    #[test]
    fn the_one_before_is_served_and_halts_again_behind_the_spinner() {
        model("a spinner, the one before is served and halts again", || {
            let rig = Rig::new(2, Queue::None);
            rig.waits(0, 5, 1, WaitState::Spinning);
            rig.waits(1, 4, 1, WaitState::Halting);
            assert!(rig.halt(1));
            let other = Arc::clone(&rig);
            let served = thread::spawn(move || {
                other.ring(1, Doorbell::Kick(vcpu(1)));
                other.vm.unparked(vcpu(1), Unpark::Woken, 0, &&*other);
                other.waits(1, 6, 0, WaitState::Halting);
                // The kick's latch was used up.
                assert!(other.halt(1));
            });
            let sleeps = rig.spin(0);
            served.join().unwrap();
            assert!(!sleeps || rig.was_woken(0), "it sleeps until who waits for it runs");
        });
    }

    /// Two VMs, each with its owner: what ends one owner's absence wakes its own VM's spinner and not the other's.
    #[test]
    fn two_owners_in_two_vms_wake_their_own() {
        model("two owners in two VMs", || {
            let vms = [Rig::new(2, Queue::Holder), Rig::new(2, Queue::Holder)];
            for rig in &vms {
                rig.waits(0, 1, 1, WaitState::Spinning);
                rig.vm.scheduled_out(vcpu(1));
            }
            let ends = [vms.clone(), vms.clone()];
            let [first, second] = ends;
            // The first owner runs again; the second never does.
            let owner = thread::spawn(move || first[0].vm.scheduled_in(vcpu(1), &&*first[0]));
            let spinner = thread::spawn(move || second[1].spin(0));
            let sleeps = vms[0].spin(0);
            owner.join().unwrap();
            assert!(spinner.join().unwrap(), "its owner is off-CPU");
            assert!(!sleeps || vms[0].was_woken(0));
            assert!(!vms[1].was_woken(0));
        });
    }

    /// A spinner that goes from one owner's queue to another's.
    #[test]
    fn two_owners_of_one_vm() {
        model("two owners of one VM", || {
            let rig = Rig::new(3, Queue::Holder);
            rig.waits(0, 1, 1, WaitState::Spinning);
            rig.vm.scheduled_out(vcpu(1));
            rig.vm.scheduled_out(vcpu(2));
            let other = Arc::clone(&rig);
            let owners = thread::spawn(move || {
                other.vm.scheduled_in(vcpu(1), &&*other);
                other.vm.reset(vcpu(2), &&*other);
            });
            if rig.spin(0) {
                // Something else ends that sleep.
                rig.vm.unparked(vcpu(0), Unpark::Signal, 0, &&*rig);
            }
            let before = rig.wakes[0].load(SeqCst);
            rig.waits(0, 2, 2, WaitState::Spinning);
            let sleeps = rig.spin(0);
            owners.join().unwrap();
            assert!(!sleeps || rig.vm.dump(0).all(|sleeper| sleeper.woken) && rig.wakes[0].load(SeqCst) >= before);
        });
    }

    /// Somebody who spun sleeps, is on no queue, and was not woken.
    fn stranded(rig: &Rig) -> bool {
        rig.vm.dump(0).any(|sleeper| sleeper.kind == SleepKind::Spun && !sleeper.woken && sleeper.queue.is_none())
    }

    /// vCPU 0 hands its lock and its queue to vCPU 1, which is back meanwhile, waits again, and is parked behind vCPU 2, which is
    /// on that queue.
    #[test]
    fn row_14_the_new_holder_is_parked_again_before_the_queue_is_its_own() {
        model("a hand-over to a vCPU that is back and spins", || {
            let rig = Rig::new(3, Queue::Holder);
            for (id, ticket) in [(1, 1), (2, 2)] {
                rig.waits(id, ticket, 0, WaitState::Halting);
                assert!(rig.halt(id));
            }
            let other = Arc::clone(&rig);
            let holder = thread::spawn(move || other.ring(0, Doorbell::Kick(vcpu(1))));
            rig.vm.unparked(vcpu(1), Unpark::Woken, 0, &&*rig);
            rig.waits(1, 3, 2, WaitState::Spinning);
            rig.spin(1);
            holder.join().unwrap();
            rig.vm.check_queues().unwrap();
            assert!(!stranded(&rig), "it sleeps, and nobody will wake it");
        });
    }

    /// vCPU 0 is interrupted in its wait, behind vCPU 1, which sleeps. From then on it may spin in the handler, for what it does not
    /// publish.
    #[test]
    fn an_interrupt_comes_and_its_handler_spins() {
        model("an interrupt in the wait of who is parked behind a sleeper", || {
            let rig = Rig::new(2, Queue::Previous);
            rig.waits(1, 1, 1, WaitState::Halting);
            assert!(rig.halt(1));
            rig.waits(0, 2, 1, WaitState::Spinning);
            let other = Arc::clone(&rig);
            let interrupt = thread::spawn(move || other.vm.interrupt(vcpu(0), &&*other));
            for _ in 0..2 {
                if rig.spin(0) {
                    break;
                }
            }
            interrupt.join().unwrap();
            if rig.vm.dump(0).any(|sleeper| sleeper.vcpu == vcpu(0)) {
                assert!(rig.was_woken(0), "it sleeps in its handler");
                rig.vm.unparked(vcpu(0), Unpark::Woken, 0, &&*rig);
            }
            assert!((0..3).all(|_| !rig.spin(0)), "it sleeps in its handler");
        });
    }

    /// vCPU 2 brings vCPU 0 online, which is parked, comes back, and is parked again meanwhile.
    #[test]
    fn row_06_a_spinner_is_parked_again_while_it_comes_online() {
        model("a spinner comes online and is parked again", || {
            let rig = Rig::new(3, Queue::Holder);
            rig.waits(0, 1, 1, WaitState::Spinning);
            rig.vm.scheduled_out(vcpu(1));
            assert!(rig.spin(0));
            let other = Arc::clone(&rig);
            let online = thread::spawn(move || other.ring(2, Doorbell::Online(vcpu(0))));
            rig.vm.unparked(vcpu(0), Unpark::Signal, 0, &&*rig);
            rig.spin(0);
            online.join().unwrap();
            rig.vm.check_queues().unwrap();
            assert!(!stranded(&rig), "it sleeps, and nobody will wake it");
        });
    }
}
