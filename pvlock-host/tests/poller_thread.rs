//! The poller's thread of the `threads` driver: when it is there, and when it is not.
#![cfg(not(pvlock_loom))]

mod common;
use common::{slot, vcpu, waits, within_hang_timeout};
use pvlock_host::driver::threads::{Threads, threads};
use pvlock_host::hypercalls::{Doorbell, Ring, Status};
use pvlock_host::protocol::{Features, HostFlags, Region};
use pvlock_host::{Config, Policy, Poller};
use std::sync::atomic::Ordering::SeqCst;

const AWAKE_FOR_EVER: Poller = Poller { enter: 1, patience: u32::MAX, keep: 0, own_cpu: true };

fn vm(poller: Option<Poller>) -> (Threads, &'static Region<2>) {
    let region: &Region<2> = Box::leak(Box::new(Region::new(Features::HALT.union(Features::KICK_WORD))));
    // Nothing but a kick ends a sleep within the hang timeout.
    let config = Config { deadline_ns: 3_600_000_000_000, policy: Policy { poller, ..Policy::default() }, ..Config::default() };
    let vm = threads(config, region.as_ref(), 2).unwrap();
    assert_eq!(vm.doorbell(vcpu(0)).call(Doorbell::Register { low: 0 }), Status::Ok);
    for id in 0..2 {
        assert_eq!(vm.doorbell(vcpu(id)).call(Doorbell::Online(vcpu(id))), Status::Ok);
    }
    (vm, region)
}

fn polls(region: &Region<2>) -> bool {
    HostFlags::from_bits(region.as_ref().header.flags.load(SeqCst)).contains(HostFlags::POLLER)
}

fn ring_until_it_polls(vm: &Threads, region: &Region<2>) {
    while !polls(region) {
        vm.doorbell(vcpu(0)).ring(Doorbell::Kick(vcpu(0)).encode());
        std::thread::yield_now();
    }
}

#[test]
fn a_doorbell_wakes_the_poller_which_then_needs_none() {
    within_hang_timeout("poller", || {
        let (vm, region) = vm(Some(AWAKE_FOR_EVER));
        // By then it blocks, most likely.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!polls(region), "nobody has kicked yet");
        ring_until_it_polls(&vm, region);
        let before = vm.statistics();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                region.as_ref().records[1].slot(slot(0)).publish(&waits(1, 0));
                vm.doorbell(vcpu(1)).ring(Doorbell::Halt { slot: slot(0), interrupts: false }.encode());
            });
            while vm.dump().count() == 0 {
                std::thread::yield_now();
            }
            assert!(!region.as_ref().announce_kick(vcpu(1)), "no doorbell");
        });
        let after = vm.statistics();
        assert_eq!((after.polled - before.polled, after.kicks_sent, after.kicked), (1, before.kicks_sent, 1));
    });
}

#[test]
fn the_poller_ends_with_a_pause_and_with_the_vm_and_resumes() {
    within_hang_timeout("poller", || {
        let (vm, region) = vm(Some(AWAKE_FOR_EVER));
        for _ in 0..3 {
            ring_until_it_polls(&vm, region);
            vm.pause();
            assert!(!polls(region), "the region is being saved");
            assert!(region.as_ref().announce_kick(vcpu(1)));
            vm.resume();
        }
        ring_until_it_polls(&vm, region);
        vm.shut_down();
        assert!(!polls(region));
        // Also one that blocks, or is awake, when its VM is dropped.
        drop(vm);
        for _ in 0..100 {
            let (blocks, _) = self::vm(Some(AWAKE_FOR_EVER));
            drop(blocks);
        }
        let (awake, region) = self::vm(Some(AWAKE_FOR_EVER));
        ring_until_it_polls(&awake, region);
        drop(awake);
        assert!(!polls(region));
    });
}

#[test]
fn a_poller_without_kicks_goes_to_sleep_and_one_not_asked_for_is_not_there() {
    within_hang_timeout("poller", || {
        let (vm, region) = vm(Some(Poller { patience: 2, keep: 1, ..AWAKE_FOR_EVER }));
        ring_until_it_polls(&vm, region);
        while polls(region) {
            std::thread::yield_now();
        }
        let (vm, region) = self::vm(None);
        for _ in 0..1000 {
            vm.doorbell(vcpu(0)).ring(Doorbell::Kick(vcpu(0)).encode());
        }
        assert!(!polls(region));
    });
}
