//! Kicks that guests only count, and the poller that looks for them.
#![cfg(not(pvlock_loom))]

mod common;
use common::*;
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::offset::{header, record};
use pvlock_host::protocol::{Features, HostFlags, RECORD_STRIDE, Region};
use pvlock_host::{Config, Engine, Nested, Policy, Poller, Resume, Unpark, Verdict};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};

fn counting() -> Config {
    Config { policy: Policy { poller: Some(Poller::default()), ..Policy::default() }, ..Config::default() }
}

fn rig(config: Config, features: Features) -> Rig {
    let rig = Rig::bare(config, 3);
    rig.ram.word(header::FEATURES).store(features.bits(), SeqCst);
    assert_eq!(rig.register(), Status::Ok);
    for id in 0..3 {
        assert_eq!(rig.call(0, Doorbell::Online(vcpu(id))), Status::Ok);
    }
    rig
}

#[test]
fn each_change_of_a_kick_word_is_one_kick_and_no_more() {
    let rig = rig(counting(), Features::HALT.union(Features::KICK_WORD));
    let word = |id: usize| rig.ram.word((id + 1) * RECORD_STRIDE + record::KICK_WORD);
    let flags = || HostFlags::from_bits(rig.ram.word(header::FLAGS).load(SeqCst));
    assert!(rig.engine.poller_wakes());
    assert_eq!(flags(), HostFlags::POLLER);
    rig.engine.set_flags(HostFlags::default(), &rig.waker());
    assert_eq!(flags(), HostFlags::POLLER, "settings do not change whether somebody polls");
    rig.sleep(0, waits(1, 1), None);
    assert_eq!(rig.engine.poll(&rig.waker()), 0);
    word(0).fetch_add(5, SeqCst);
    word(2).fetch_add(1, SeqCst);
    assert_eq!(rig.engine.poll(&rig.waker()), 2);
    assert_eq!(rig.woken(), [0]);
    rig.unparked(0, Unpark::Woken);
    assert_eq!(rig.engine.poll(&rig.waker()), 0);
    assert_eq!(rig.halt(2, 0, false), Verdict::Resume(Resume::Latched), "one that runs keeps it");
    rig.sleep(0, waits(1, 2), None);
    // Counted before the guest sees that the poller is gone.
    word(0).store(u64::MAX, SeqCst);
    rig.engine.poller_sleeps(&rig.waker());
    assert_eq!((flags(), rig.woken()), (HostFlags::default(), vec![0]));
    rig.engine.set_flags(HostFlags::POLLER.union(HostFlags::OFF), &rig.waker());
    assert_eq!(flags(), HostFlags::OFF);
    let counts = rig.engine.statistics();
    assert_eq!((counts.polled, counts.kicks, counts.kicks_sent), (3, 3, 0));
}

#[test]
fn nobody_polls_for_a_guest_that_does_not_count() {
    let none = Features::HALT;
    let both = none.union(Features::KICK_WORD);
    for (config, features, accepted) in [(counting(), none, 1), (Config::default(), both, 1), (counting(), both, 5)] {
        let rig = rig(config, features);
        assert_eq!(rig.ram.word(header::ACCEPTED).load(SeqCst), accepted);
        assert_eq!(rig.engine.poller_wakes(), accepted == 5);
        assert_eq!(rig.call(0, Doorbell::Unregister), Status::Ok);
        assert_eq!(rig.register(), Status::Ok);
        assert_eq!(rig.ram.word(header::FLAGS).load(SeqCst), 0, "the next guest rings until the poller says otherwise");
        assert_eq!(rig.call(0, Doorbell::Unregister), Status::Ok);
        assert!(!rig.engine.poller_wakes());
        assert_eq!(rig.engine.poll(&rig.waker()), 0);
    }
}

/// The guest after a reset or a kexec counts from 0 again. What its poller saw of the guest before must not hide its kicks.
#[test]
fn row_06_what_was_counted_before_a_reset_hides_no_kick_afterwards() {
    let rig = rig(counting(), Features::HALT.union(Features::KICK_WORD));
    let word = rig.ram.word(RECORD_STRIDE + record::KICK_WORD);
    assert!(rig.engine.poller_wakes());
    word.store(3, SeqCst);
    assert_eq!(rig.engine.poll(&rig.waker()), 1);
    rig.engine.poller_sleeps(&rig.waker());
    rig.engine.reset_vm(&rig.waker());
    word.store(0, SeqCst);
    assert_eq!(rig.register(), Status::Ok);
    assert_eq!(rig.call(0, Doorbell::Online(vcpu(0))), Status::Ok);
    rig.sleep(0, waits(1, 1), None);
    assert!(rig.engine.poller_wakes());
    // As many kicks, before the poller's first look.
    word.store(3, SeqCst);
    rig.engine.poll(&rig.waker());
    assert_eq!(rig.woken(), [0]);
}

#[test]
fn no_counted_kick_is_lost_while_a_poller_comes_and_goes() {
    within_hang_timeout("poller", || {
        const KICKS: u64 = 20_000;
        let region: &Region<1> = Box::leak(Box::new(Region::new(Features::HALT.union(Features::KICK_WORD))));
        let vm: Engine<Nested, parking_lot::RawMutex> = Engine::new(counting(), 1, Nested(region.as_ref())).unwrap();
        let wakes = AtomicU64::new(0);
        let waker = |_| {
            wakes.fetch_add(1, SeqCst);
        };
        for doorbell in [Doorbell::Register { low: 0 }, Doorbell::Online(vcpu(0))] {
            let _: Verdict = vm.doorbell(vcpu(0), doorbell.encode(), 0, &waker);
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(SeqCst) {
                    vm.poller_wakes();
                    for _ in 0..10 {
                        vm.poll(&waker);
                    }
                    vm.poller_sleeps(&waker);
                }
            });
            // One kick at a time: each must end its sleep, by whichever way.
            let mut rung = 0;
            for n in 1..=KICKS {
                if let Verdict::Park(_) = vm.halt(vcpu(0), slot(0), false, 0) {
                    let before = wakes.load(SeqCst);
                    if region.as_ref().announce_kick(vcpu(0)) {
                        rung += 1;
                        let _: Verdict = vm.kick(vcpu(0), vcpu(0), &waker);
                    }
                    while wakes.load(SeqCst) == before && !vm.dump(0).any(|sleeper| sleeper.woken) {
                        std::thread::yield_now();
                    }
                    vm.unparked(vcpu(0), Unpark::Woken, 0, &waker);
                }
                if n == KICKS {
                    done.store(true, SeqCst);
                }
            }
            assert!(rung <= KICKS);
        });
        assert_eq!(vm.statistics().forced, 0);
    });
}
