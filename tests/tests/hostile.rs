//! Guests that break the rules, in a VM beside another one in the same process: the other makes exact progress, and both can be
//! paused, saved, resumed and ended. That either takes too long shows as a hang.

use pvlock::backend::{Backend, Spec};
use pvlock::hostile::{ALLOWANCE, Pair, Trial};
use pvlock_guest_image::job::Workload;
use pvlock_host::{Config, Limits, Policy, Poller, Queue, Rate};
use pvlock_tests::{kvm, turn};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const TIME: Duration = Duration::from_millis(200);

/// Two vCPUs of each VM make four on a machine with two CPUs.
fn pair(attack: Workload, host: Config, vcpus: usize) -> Option<Pair> {
    let Backend::Kvm { cpl, .. } = kvm()? else { return None };
    Some(Pair::new(attack, host, vcpus, cpl, TIME))
}

fn run(pair: &Pair) -> Trial {
    let _turn = turn();
    let trial = match pair.run(&AtomicBool::new(false)) {
        Ok(trial) => trial,
        Err(failure) => panic!("{:?} {:?}: {failure}", pair.hostile.workload, pair.hostile.host),
    };
    let context = format!("{:?} {:?}: {trial:?}", pair.hostile.workload, pair.hostile.host);
    assert!(trial.exact && trial.acquisitions > 0, "{context}");
    assert_eq!((trial.neighbour.forced, trial.neighbour.refused), (0, 0), "{context}");
    trial
}

#[test]
fn no_attack_disturbs_the_neighbour_whatever_the_policy() {
    let poller = Some(Poller { enter: 1, patience: 1, keep: u32::MAX, own_cpu: true });
    for attack in Workload::HOSTILE {
        for ((name, ..), queue) in Policy::NAMED.into_iter().zip([Queue::Previous, Queue::Holder].into_iter().cycle()) {
            let policy = Policy::named(name).unwrap();
            // Each policy with something else.
            let policy = match name {
                "ignore" | "park-on-holder" => Policy { limits: ALLOWANCE, ..policy },
                "yield" | "park-on-previous" => Policy { poller, ..policy },
                _ => policy,
            };
            let Some(pair) = pair(attack, Config { policy, queue, wake_ahead: 1, ..Config::default() }, 2) else { return };
            run(&pair);
        }
    }
}

#[test]
fn kicks_through_eventfds_are_no_way_in() {
    for attack in Workload::HOSTILE {
        let Some(mut pair) = pair(attack, Config::default(), 2) else { return };
        pair.hostile = Spec { ioeventfd: true, ..pair.hostile };
        run(&pair);
    }
}

#[test]
fn eight_hostile_vcpus_do_not_keep_two_from_their_work() {
    for attack in Workload::HOSTILE {
        let Some(mut pair) = pair(attack, Config::default(), 2) else { return };
        pair.hostile = Spec { vcpus: 8, ..pair.hostile };
        run(&pair);
    }
}

/// What each attack is about really reaches the host.
#[test]
fn the_attacks_attack() {
    let host = Config { deadline_ns: 1_000_000, policy: Policy::named("park-on-previous").unwrap(), ..Config::default() };
    for attack in Workload::HOSTILE {
        let Some(pair) = pair(attack, host, 2) else { return };
        let host = run(&pair).hostile;
        let seen = match attack {
            Workload::Scribble => true,
            Workload::DoorbellStorm => host.refused > 0 && host.halts > 0,
            Workload::KickAll => host.kicks_sent > 1000,
            Workload::RegisterTwice => host.refused > 0 && host.kicks_sent > 0,
            Workload::LieCycles => host.cycles > 0 && host.pause_loops > 0,
            Workload::HaltForever => host.forced > 0 && host.kicks == 0,
            _ => false,
        };
        assert!(seen, "{attack:?}: {host:?}");
    }
}

#[test]
fn row_21_a_storm_is_slowed_down_only_where_it_is_limited() {
    let host = |limits| Config { policy: Policy { limits, ..Policy::default() }, ..Config::default() };
    let Some(free) = pair(Workload::KickAll, host(Limits::default()), 2) else { return };
    assert_eq!(run(&free).hostile.throttled, 0);
    let rate = Some(Rate { per_second: 100, burst: 1 });
    let Some(limited) = pair(Workload::KickAll, host(Limits { kicks: rate, ..Limits::default() }), 2) else { return };
    assert!(run(&limited).hostile.throttled > 0);
}
