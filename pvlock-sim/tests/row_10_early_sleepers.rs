//! Row 10 of the known failures: one early sleeper made all later waiters sleep, and throughput fell eightfold.
//!
//! Three vCPUs per CPU; simulated time, so that acquisitions are exact.
//!
//! Three VMs of one vCPU a CPU and nothing else on the host are no case here: all their schedulers decide at the same ticks, so
//! that spinning VMs run as gangs, by chance and for ever. Another task on the host ends that.

use pvlock_host::{PauseLoop, Policy, Queue};
use pvlock_sim::locks::LockKind;
use pvlock_sim::params::Params;
use pvlock_sim::run;
use pvlock_sim::scenario::{Contender, Pins, Scenario, VmSpec};
use pvlock_sim::workload::Workload;

const MS: u64 = 1_000_000;

/// From where runs begin decides which vCPUs come to run side by side, for long.
const SEEDS: u64 = 4;

/// Acquisitions at 3x, and the forced wakes, of all seeds.
fn acquisitions(contender: &Contender, (vms, others): Host) -> (u64, u64) {
    let workload = Workload::Micro { locks: 1, inside_ns: 500, outside_ns: 2_000 };
    let one = |seed| {
        let outcome = run(&Scenario {
            cpus: 4,
            vms: vec![VmSpec { vcpus: 12 / vms, pins: Pins::Free, workload }; vms],
            others,
            contender: contender.clone(),
            warm_up_ns: 50 * MS,
            run_ns: 150 * MS,
            seed,
            params: Params::default(),
            record_ns: None,
        });
        let outcome = outcome.unwrap();
        (outcome.total().acquisitions, outcome.vms.iter().map(|vm| vm.host.forced).sum::<u64>())
    };
    (1..=SEEDS).map(one).fold((0, 0), |sum, more| (sum.0 + more.0, sum.1 + more.1))
}

/// VMs of the same size, 12 vCPUs in all, and other tasks on the 4 CPUs.
type Host = (usize, usize);

/// Those of `lock` with these policies, its waiters on either queue, against `baselines`, which only spin.
fn never_below(lock: LockKind, baselines: &[LockKind], hosts: &[Host], with: impl Fn(Policy) -> bool) {
    let mut bad = Vec::new();
    let policies: Vec<_> = Policy::NAMED.iter().filter_map(|&(name, ..)| Some((name, Policy::named(name)?))).collect();
    for &host in hosts {
        let spinning = baselines.iter().map(|&lock| acquisitions(&Contender::new("spins", lock), host).0).max();
        for (queue, wake_ahead) in [(Queue::None, 0), (Queue::Holder, 1), (Queue::Previous, 0), (Queue::Previous, 1)] {
            for &(name, policy) in policies.iter().filter(|(_, policy)| with(*policy)) {
                let mut contender = Contender::new(name, lock).policy(policy);
                (contender.queue, contender.wake_ahead) = (queue, wake_ahead);
                let (parking, forced) = acquisitions(&contender, host);
                if Some(parking) < spinning || forced > 0 {
                    bad.push(format!("{host:?} {queue:?} {wake_ahead} {name}: {parking} of {spinning:?}, {forced} forced"));
                }
            }
        }
    }
    assert!(bad.is_empty(), "below the baseline, or with forced wakes:\n{}", bad.join("\n"));
}

/// Beside two other tasks not with every policy: parked on the holder's queue, one woken ahead, it makes 7 % less than a
/// test-and-set lock does in the same VMs (and three times what a plain ticket lock does).
#[test]
fn row_10_preemptable_with_any_policy_never_falls_below_what_spins() {
    let spin = [LockKind::PlainTicket, LockKind::TestAndSet];
    never_below(LockKind::Preemptable, &spin, &[(1, 0), (2, 0), (3, 1)], |_| true);
    let not_on_holder = |policy: Policy| policy.pause_loop != PauseLoop::ParkOnHolder;
    never_below(LockKind::Preemptable, &spin, &[(3, 2)], not_on_holder);
    never_below(LockKind::Preemptable, &spin[..1], &[(3, 2)], |_| true);
}

#[test]
fn row_10_ticket_with_any_policy_never_falls_below_the_plain_ticket_lock_in_one_vm() {
    never_below(LockKind::Ticket, &[LockKind::PlainTicket], &[(1, 0), (2, 0)], |_| true);
}

/// Not so with every policy: with several VMs of few vCPUs, halts alone (`ignore`) or with directed yields lose up to two thirds
/// against spinning, which happens to keep the vCPUs of a VM running at the same time. Strict order wants the pause-loop parks,
/// or the preemptable lock.
#[test]
fn row_10_ticket_parked_at_pause_loops_never_falls_below_the_plain_ticket_lock() {
    let parks = |policy: Policy| matches!(policy.pause_loop, PauseLoop::ParkOnHolder | PauseLoop::ParkOnPrevious);
    never_below(LockKind::Ticket, &[LockKind::PlainTicket], &[(3, 1), (3, 2)], parks);
}
