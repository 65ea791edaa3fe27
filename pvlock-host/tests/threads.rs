//! The `threads` driver with real threads.
#![cfg(not(pvlock_loom))]

mod common;
use common::{behind, slot, vcpu, waits, within_hang_timeout};
use pvlock_host::driver::threads::{Threads, threads};
use pvlock_host::hypercalls::{Doorbell, Ring, Status};
use pvlock_host::protocol::offset::header;
use pvlock_host::protocol::{Features, HostFlags, Region, Wait, WaitState};
use pvlock_host::{Config, Decision, Placement, Policy, Queue, Resume, Sleep, SleepKind, Yield};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

/// Something that wakes all sleepers, and its name.
type Way = (&'static str, fn(&Threads));

/// Nothing but a wake ends a sleep within the hang timeout.
fn endless(queue: Queue) -> Config {
    Config { deadline_ns: 3_600_000_000_000, queue, wake_ahead: 0, ..Config::default() }
}

fn vm<const N: usize>(config: Config) -> (&'static Threads, &'static Region<N>) {
    let region: &Region<N> = Box::leak(Box::new(Region::new(Features::HALT)));
    let vm: &Threads = Box::leak(Box::new(threads(config, region.as_ref(), N).unwrap()));
    assert_eq!(vm.doorbell(vcpu(0)).call(Doorbell::Register { low: 0 }), Status::Ok);
    for id in 0..N {
        assert_eq!(vm.doorbell(vcpu(id)).call(Doorbell::Online(vcpu(id))), Status::Ok);
    }
    (vm, region)
}

#[test]
fn row_35_all_254_sleeping_vcpus_leave_their_park() {
    const VCPUS: usize = 254;
    let ways: [Way; 4] = [
        ("pause", Threads::pause),
        ("shut_down", Threads::shut_down),
        ("interrupt", |vm| (0..VCPUS).for_each(|id| vm.interrupt(vcpu(id)))),
        ("reset_vm", Threads::reset_vm),
    ];
    for (name, end) in ways {
        within_hang_timeout(name, || {
            let (vm, region) = vm::<VCPUS>(endless(Queue::Previous));
            std::thread::scope(|scope| {
                for id in 0..VCPUS {
                    std::thread::Builder::new()
                        .stack_size(64 << 10)
                        .spawn_scoped(scope, move || {
                            let wait = if id == 0 { waits(1, 0) } else { behind(1, id as u32, id - 1) };
                            region.as_ref().records[id].slot(slot(0)).publish(&wait);
                            vm.doorbell(vcpu(id)).ring(Doorbell::Halt { slot: slot(0), interrupts: true }.encode());
                        })
                        .unwrap();
                }
                while vm.dump().count() < VCPUS {
                    std::thread::yield_now();
                }
                assert!(vm.dump().all(|sleeper| !sleeper.woken));
                end(vm);
            });
            assert_eq!(vm.dump().count(), 0, "{name}");
            let counts = vm.statistics();
            let expected = if name == "interrupt" { (0, VCPUS as u64) } else { (VCPUS as u64, 0) };
            assert_eq!((counts.woken, counts.interrupted), expected, "{name}");
            assert_eq!((counts.parks, counts.forced), (VCPUS as u64, 0), "{name}");
        });
    }
}

/// Tokens go round a ring of vCPUs. Each hop is a kick, so a lost one stops a token for good.
fn ring_of_kicks(config: Config, interrupts: bool) {
    const VCPUS: usize = 5;
    const TOKENS: u64 = 2;
    const HOPS: u64 = 4_000;
    let (vm, region) = vm::<VCPUS>(config);
    let tokens: [AtomicU64; VCPUS] = std::array::from_fn(|_| AtomicU64::new(0));
    let hops = AtomicU64::new(0);
    let finished = AtomicUsize::new(0);
    let start = Barrier::new(VCPUS);
    tokens[0].store(TOKENS, SeqCst);
    let (tokens, hops, finished, start) = (&tokens, &hops, &finished, &start);
    std::thread::scope(|scope| {
        for id in 0..VCPUS {
            scope.spawn(move || {
                let doorbell = vm.doorbell(vcpu(id));
                let next = (id + 1) % VCPUS;
                let previous = (id + VCPUS - 1) % VCPUS;
                start.wait();
                let mut seen = 0;
                loop {
                    while tokens[id].fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok() {
                        hops.fetch_add(1, SeqCst);
                        seen += 1;
                        tokens[next].fetch_add(1, SeqCst);
                        doorbell.ring(Doorbell::Kick(vcpu(next)).encode());
                    }
                    if hops.load(SeqCst) >= HOPS {
                        break;
                    }
                    let level = slot(seen % 4);
                    let mut wait = behind(1, seen as u32, previous);
                    wait.holder = wait.predecessor;
                    region.as_ref().records[id].slot(level).publish(&wait);
                    doorbell.ring(Doorbell::Halt { slot: level, interrupts }.encode());
                }
                // The end goes round the ring as the tokens do.
                finished.fetch_add(1, SeqCst);
                doorbell.ring(Doorbell::Kick(vcpu(next)).encode());
            });
        }
        if interrupts {
            // Interrupts and pauses from outside end halts at any point; nothing may come of it but a spurious return.
            while finished.load(SeqCst) < VCPUS {
                for id in 0..VCPUS {
                    vm.interrupt(vcpu(id));
                }
                vm.pause();
                vm.resume();
                std::thread::yield_now();
            }
        }
    });
    let counts = vm.statistics();
    let left: u64 = tokens.iter().map(|tokens| tokens.load(SeqCst)).sum();
    assert_eq!(left, TOKENS, "no token is lost or made");
    assert!(hops.load(SeqCst) >= HOPS);
    assert_eq!(counts.kicks, hops.load(SeqCst) + VCPUS as u64);
    assert_eq!((counts.kicks_sent, counts.refused, counts.forced), (counts.kicks, 0, 0));
    assert_eq!(counts.parks, counts.kicked + counts.woken + counts.interrupted + counts.spurious);
    if !interrupts {
        assert_eq!((counts.halts, counts.spurious), (counts.parks + counts.latched, 0), "every return has its kick");
        assert!(counts.kicked + counts.latched <= counts.kicks * 4, "a kick ends at most one halt per slot");
    }
    vm.check_queues().unwrap();
    assert_eq!(vm.dump().count(), 0);
}

#[test]
fn no_kick_is_lost_in_a_ring_of_vcpus() {
    for queue in [Queue::None, Queue::Previous, Queue::Holder] {
        within_hang_timeout("ring", || ring_of_kicks(endless(queue), false));
    }
}

#[test]
fn no_kick_is_lost_between_interrupts_pauses_and_wakes_ahead() {
    for queue in [Queue::Previous, Queue::Holder] {
        within_hang_timeout("ring", || ring_of_kicks(Config { wake_ahead: 2, ..endless(queue) }, true));
    }
}

fn spinning(policy: &str) -> Config {
    Config { policy: Policy::named(policy).unwrap(), ..endless(Queue::Previous) }
}

#[test]
fn a_vcpu_that_reports_its_spinning_sleeps_until_the_one_before_it_is_back() {
    within_hang_timeout("spinner", || {
        let (vm, region) = vm::<3>(spinning("park-on-previous"));
        let asleep = |kind| vm.dump().any(|sleeper| sleeper.kind == kind);
        std::thread::scope(|scope| {
            region.as_ref().records[1].slot(slot(0)).publish(&waits(1, 4));
            scope.spawn(|| vm.doorbell(vcpu(1)).ring(Doorbell::Halt { slot: slot(0), interrupts: false }.encode()));
            while !asleep(SleepKind::Halted) {
                std::thread::yield_now();
            }
            let spinner = scope.spawn(|| {
                region.as_ref().records[0].slot(slot(0)).publish(&Wait { state: WaitState::Spinning, ..behind(1, 5, 1) });
                vm.doorbell(vcpu(0)).ring(Doorbell::PauseLoop.encode());
            });
            while !asleep(SleepKind::Spun) {
                assert!(!spinner.is_finished());
                std::thread::yield_now();
            }
            vm.doorbell(vcpu(2)).ring(Doorbell::Kick(vcpu(1)).encode());
        });
        let counts = vm.statistics();
        assert_eq!((counts.drained, counts.kicked, counts.woken, counts.forced), (1, 1, 1, 0));
        assert_eq!(counts.decided(Decision::Park(Sleep::OnPrevious)), 1);
        // Awake, it may run or not: nobody is parked on a guess.
        assert_eq!(vm.pause_loop(vcpu(0)), pvlock_host::driver::Outcome::Resume);
        assert_eq!(vm.statistics().decided(Decision::Yield(Yield::Unknown)), 1);
    });
}

#[test]
fn what_the_steal_time_record_says_serves_to_yield_and_not_to_park() {
    for (policy, placement, decision) in [
        ("park-on-holder", Placement::Preempted, Decision::Yield(Yield::Unknown)),
        ("park-on-holder", Placement::Running, Decision::Resume(Resume::HolderRunning)),
        ("directed", Placement::Preempted, Decision::Yield(Yield::NotDirected)),
        ("directed", Placement::Running, Decision::Resume(Resume::HolderRunning)),
        ("yield", Placement::Running, Decision::Yield(Yield::Policy)),
        ("ignore", Placement::Preempted, Decision::Resume(Resume::Ignored)),
    ] {
        let region: &Region<2> = Box::leak(Box::new(Region::new(Features::HALT)));
        let vm = threads(spinning(policy), region.as_ref(), 2).unwrap().with_placement(move |_| placement);
        assert_eq!(vm.doorbell(vcpu(0)).call(Doorbell::Register { low: 0 }), Status::Ok);
        for id in 0..2 {
            assert_eq!(vm.doorbell(vcpu(id)).call(Doorbell::Online(vcpu(id))), Status::Ok);
        }
        let wait = Wait { state: WaitState::Spinning, holder: Some(vcpu(1)), ..waits(1, 5) };
        region.as_ref().records[0].slot(slot(0)).publish(&wait);
        vm.doorbell(vcpu(0)).ring(Doorbell::PauseLoop.encode());
        assert_eq!(vm.statistics().decided(decision), 1, "{policy}, {placement:?}");
    }
}

#[test]
fn row_28_new_flags_end_all_sleeps() {
    within_hang_timeout("flags", || {
        let (vm, region) = vm::<2>(endless(Queue::None));
        std::thread::scope(|scope| {
            scope.spawn(|| vm.doorbell(vcpu(0)).ring(Doorbell::Halt { slot: slot(0), interrupts: false }.encode()));
            while vm.dump().count() == 0 {
                std::thread::yield_now();
            }
            vm.set_flags(HostFlags::OFF);
        });
        assert_eq!(region.as_ref().word(header::FLAGS).unwrap().load(SeqCst), HostFlags::OFF.bits());
        assert_eq!(vm.statistics().woken, 1);
    });
}
