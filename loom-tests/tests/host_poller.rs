//! A model of the race between a guest that skips a doorbell and a poller that goes to sleep.

pvlock_loom_tests::models_only_under_loom!();

#[cfg(pvlock_loom)]
mod models {
    use loom::thread;
    use pvlock_host::hypercalls::Doorbell;
    use pvlock_host::protocol::{Features, Region, SlotIndex, VcpuId};
    use pvlock_host::{Config, Engine, Nested, Policy, Poller, Verdict};
    use pvlock_loom_tests::Model;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    const POLLER: Model = Model::bounded("a kick is counted while the poller goes to sleep", 4);

    #[test]
    fn a_kick_is_rung_or_seen_by_the_last_look() {
        POLLER.holds(|| {
            let sleeper = VcpuId::new(0).unwrap();
            let region: &'static Region<1> = Box::leak(Box::new(Region::new(Features::HALT.union(Features::KICK_WORD))));
            let policy = Policy { poller: Some(Poller::default()), ..Policy::default() };
            let vm: Engine<_, parking_lot::RawMutex> =
                Engine::new(Config { policy, ..Config::default() }, 1, Nested(region.as_ref())).unwrap();
            let vm = Arc::new(vm);
            let wakes = Arc::new(AtomicU64::new(0));
            let waker = |wakes: &Arc<AtomicU64>| {
                let wakes = Arc::clone(wakes);
                move |_| {
                    wakes.fetch_add(1, SeqCst);
                }
            };
            for doorbell in [Doorbell::Register { low: 0 }, Doorbell::Online(sleeper)] {
                let _: Verdict = vm.doorbell(sleeper, doorbell.encode(), 0, &waker(&wakes));
            }
            assert!(vm.poller_wakes());
            assert!(matches!(vm.halt(sleeper, SlotIndex::new(0).unwrap(), false, 0), Verdict::Park(_)));
            let poller = {
                let (vm, waker) = (Arc::clone(&vm), waker(&wakes));
                thread::spawn(move || vm.poller_sleeps(&waker))
            };
            if region.as_ref().announce_kick(sleeper) {
                let _: Verdict = vm.kick(sleeper, sleeper, &waker(&wakes));
            }
            poller.join().unwrap();
            assert_eq!(wakes.load(SeqCst), 1, "it was kicked, and nobody was told");
        });
    }
}
