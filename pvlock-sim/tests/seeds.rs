//! The standard mix of scenarios and faults; and the kinds of faults and scenarios that it has to have.

use pvlock_sim::fuzz::{fuzz, replay, scenario};
use pvlock_sim::locks::LockKind;
use pvlock_sim::workload::Workload;

/// Seeds of each of the two tests.
const SEEDS: u64 = 2_000;

fn holds(first: u64) {
    let report = fuzz(first..first + SEEDS, |_| true);
    assert_eq!(report.failures, [], "see `pvlock sim fuzz --replay SEED`");
    assert_eq!(report.seeds, SEEDS);
    println!("{} lock operations, {} faults, {} ms simulated", report.operations, report.faults, report.ns / 1_000_000);
}

#[test]
fn everything_holds_with_the_first_seeds() {
    holds(0);
}

#[test]
fn everything_holds_with_seeds_that_depend_on_nothing_but_their_number() {
    holds(1 << 40);
}

#[test]
fn a_seed_is_one_run() {
    for seed in [3, 5, 8] {
        let (.., first) = replay(seed, 10_000);
        let (.., second) = replay(seed, 10_000);
        assert_eq!(first, second);
        assert!(first.log.len() > 100 && first.faults > 0 && first.violation.is_none());
        let (.., short) = replay(seed, 10);
        assert!(short.log.len() < first.log.len() && first.log.ends_with(&short.log), "the last of what happened");
    }
    assert_ne!(scenario(3), scenario(4));
}

#[test]
fn the_mix_has_everything() {
    let all: Vec<_> = (0..2_000).map(scenario).collect();
    for lock in [LockKind::Ticket, LockKind::Preemptable, LockKind::ClassicTicket, LockKind::Queued] {
        assert!(all.iter().any(|(scenario, _)| scenario.contender.lock == lock), "{lock:?}");
    }
    for (name, ..) in pvlock_host::Policy::NAMED {
        let wanted = pvlock_host::Policy::named(name).unwrap();
        let has = |policy: &pvlock_host::Policy| {
            let same = (policy.pause_loop, policy.pivot, policy.directed_period_ns);
            same == (wanted.pause_loop, wanted.pivot, wanted.directed_period_ns)
        };
        assert!(all.iter().any(|(scenario, _)| scenario.contender.policy.as_ref().is_some_and(has)), "{name}");
    }
    let hostile = |workload: &Workload| format!("{workload:?}").contains("Hostile");
    assert!(all.iter().any(|(scenario, _)| scenario.vms.iter().any(|vm| hostile(&vm.workload))));
    for overcommit in [1, 2, 4] {
        assert!(all.iter().any(|(scenario, _)| scenario.overcommit() >= f64::from(overcommit)));
    }
    let faults: Vec<_> = all.iter().map(|(_, trials)| trials.faults).collect();
    let kinds: [fn(&pvlock_sim::faults::Faults) -> u32; 9] = [
        |faults| faults.stall,
        |faults| faults.interrupt,
        |faults| faults.kick_late,
        |faults| faults.kick_twice,
        |faults| faults.wake_for_nothing,
        |faults| faults.exit_lost,
        |faults| faults.pause_every_ns as u32,
        |faults| faults.reset,
        |faults| faults.register,
    ];
    for (kind, chance) in kinds.iter().enumerate() {
        assert!(faults.iter().any(|faults| chance(faults) > 0) && faults.iter().any(|faults| chance(faults) == 0), "{kind}");
    }
}
