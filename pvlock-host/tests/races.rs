//! Queues under events from many threads at once. Whether a race shows up is luck; the models in `loom-tests` are exhaustive
//! on few threads, this is for many.
#![cfg(not(pvlock_loom))]

mod common;
use common::*;
use pvlock_host::hypercalls::Doorbell;
use pvlock_host::protocol::{Features, Region, Wait, WaitState};
use pvlock_host::{Config, Decision, Engine, Nested, PauseLoop, Policy, Queue, Sleep, Unpark, Verdict};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const VCPUS: usize = 6;
const ROUNDS: u64 = 300;

type Vm = Engine<Nested, parking_lot::RawMutex>;

fn wake(_: pvlock_host::protocol::VcpuId) {}

/// Halts with random hints, kicks and returns, many times; parked at the end of each round.
fn run_vcpu(vm: &Vm, region: &Region<VCPUS>, id: usize, round: &Barrier) {
    let mut seed = id as u64 + 1;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    for _ in 0..ROUNDS {
        for step in 0..20 {
            let owner = Some(vcpu(random(VCPUS as u64) as usize));
            let spins = random(3) == 0;
            let state = if spins { WaitState::Spinning } else { WaitState::Halting };
            let wait = Wait { holder: owner, predecessor: owner, state, ..waits(random(2) + 1, random(8) as u32) };
            region.as_ref().records[id].slot(slot(0)).publish(&wait);
            let halt = Doorbell::Halt { slot: slot(0), interrupts: random(2) == 0 };
            let doorbell = if spins { Doorbell::PauseLoop } else { halt };
            let verdict = vm.doorbell(vcpu(id), doorbell.encode(), 0, &wake);
            if step == 19 {
                // Kicks come from this round still: what they do to queues belongs to it.
                round.wait();
                round.wait();
            }
            if matches!(verdict, Verdict::Park(_)) {
                vm.unparked(vcpu(id), Unpark::Woken, 0, &wake);
            }
            if step < 18 {
                let target = vcpu(random(VCPUS as u64) as usize);
                let _: Verdict = vm.doorbell(vcpu(id), Doorbell::Kick(target).encode(), 0, &wake);
            }
        }
    }
}

#[test]
fn row_11_row_14_queues_agree_at_every_moment_and_have_no_circle_when_all_sleep() {
    for (queue, pause_loop) in [(Queue::Holder, PauseLoop::ParkOnHolder), (Queue::Previous, PauseLoop::ParkOnPrevious)] {
        within_hang_timeout("queues", || sleep_and_kick(queue, pause_loop));
    }
}

fn sleep_and_kick(queue: Queue, pause_loop: PauseLoop) {
    let region: &Region<VCPUS> = Box::leak(Box::new(Region::new(Features::HALT)));
    let policy = Policy { pause_loop, ..Policy::default() };
    let config = Config { queue, wake_ahead: 1, policy, ..Config::default() };
    let vm = Vm::new(config, VCPUS, Nested(region.as_ref())).unwrap();
    let _: Verdict = vm.doorbell(vcpu(0), Doorbell::Register { low: 0 }.encode(), 0, &wake);
    let online = |id| vm.doorbell(vcpu(0), Doorbell::Online(vcpu(id)).encode(), 0, &wake);
    (0..VCPUS).for_each(|id| assert!(matches!(online(id), Verdict::Resume(_))));
    let (round, done) = (Barrier::new(VCPUS + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for id in 0..VCPUS {
            let (vm, round) = (&vm, &round);
            scope.spawn(move || run_vcpu(vm, region, id, round));
        }
        // Looks on while they run, and resets who may be on or about to go on a queue.
        let (vm, done) = (&vm, &done);
        scope.spawn(move || {
            let mut id = 0;
            while !done.load(SeqCst) {
                vm.check_queues().unwrap();
                id = (id + 1) % VCPUS;
                vm.reset(vcpu(id), &wake);
                let queues = vm.check_queues().unwrap();
                assert!(queues[id].is_empty(), "nobody sleeps on a vCPU that is offline");
                let _: Verdict = vm.doorbell(vcpu(id), Doorbell::Online(vcpu(id)).encode(), 0, &wake);
                std::thread::yield_now();
            }
        });
        for _ in 0..ROUNDS {
            round.wait();
            let queues = vm.check_queues().unwrap();
            let owner = |id| queues.iter().position(|queue| queue.contains(&vcpu(id)));
            for id in 0..VCPUS {
                let mut chain = std::iter::successors(owner(id), |&at| owner(at));
                assert!(chain.nth(VCPUS).is_none(), "{queue:?}: vCPU {id} is in a circle of {queues:?}");
            }
            round.wait();
        }
        done.store(true, SeqCst);
    });
    assert!(vm.check_queues().unwrap().concat().is_empty(), "nobody is left on a queue");
    let park = if queue == Queue::Holder { Sleep::OnHolder } else { Sleep::OnPrevious };
    assert!(vm.statistics().decided(Decision::Park(park)) > 0, "some spun");
    assert_eq!(vm.dump(0).count(), 0);
}
