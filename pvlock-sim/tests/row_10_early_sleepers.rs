//! Row 10 of the known failures: one early sleeper made all later waiters sleep, and throughput fell eightfold.
//!
//! Three vCPUs per CPU; simulated time, so that acquisitions are exact.

use pvlock_host::{Policy, Queue};
use pvlock_sim::locks::LockKind;
use pvlock_sim::params::Params;
use pvlock_sim::run;
use pvlock_sim::scenario::{Contender, Pins, Scenario, VmSpec};
use pvlock_sim::workload::Workload;

const MS: u64 = 1_000_000;

/// Acquisitions at 3x, and the forced wakes.
fn acquisitions(contender: Contender, vms: usize, inside_ns: u64, outside_ns: u64) -> (u64, u64) {
    let workload = Workload::Micro { locks: 1, inside_ns, outside_ns };
    let outcome = run(&Scenario {
        cpus: 4,
        vms: vec![VmSpec { vcpus: 12 / vms, pins: Pins::Free, workload }; vms],
        others: 0,
        contender,
        warm_up_ns: 50 * MS,
        run_ns: 150 * MS,
        seed: 1,
        params: Params::default(),
        record_ns: None,
    });
    let outcome = outcome.unwrap();
    (outcome.total().acquisitions, outcome.vms.iter().map(|vm| vm.host.forced).sum())
}

/// Those of `lock` with every policy, its waiters on either queue, against `baselines`, which only spin.
fn never_below(lock: LockKind, baselines: &[LockKind]) {
    let mut bad = Vec::new();
    for (vms, inside_ns, outside_ns) in [(1, 500, 2_000), (3, 500, 2_000), (1, 5_000, 20_000)] {
        let spinning = baselines.iter().map(|&lock| acquisitions(Contender::new("spins", lock), vms, inside_ns, outside_ns).0).max();
        for (queue, wake_ahead) in [(Queue::None, 0), (Queue::Holder, 1), (Queue::Previous, 0), (Queue::Previous, 1)] {
            for (name, ..) in Policy::NAMED {
                let mut contender = Contender::new(name, lock).policy(Policy::named(name).unwrap());
                (contender.queue, contender.wake_ahead) = (queue, wake_ahead);
                let (parking, forced) = acquisitions(contender, vms, inside_ns, outside_ns);
                if Some(parking) < spinning || forced > 0 {
                    bad.push(format!("{vms} VMs {inside_ns} {outside_ns} {queue:?} {wake_ahead} {name}: {parking} of {spinning:?}, {forced} forced"));
                }
            }
        }
    }
    assert!(bad.is_empty(), "below the baseline, or with forced wakes:\n{}", bad.join("\n"));
}

#[test]
fn row_10_ticket_never_falls_below_the_spinning_ticket_lock() {
    never_below(LockKind::Ticket, &[LockKind::PlainTicket]);
}

#[test]
fn row_10_preemptable_never_falls_below_the_spinning_locks() {
    never_below(LockKind::Preemptable, &[LockKind::PlainTicket, LockKind::TestAndSet]);
}
