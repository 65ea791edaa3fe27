//! What simulating costs: lock operations per second of wall time on one thread, by lock, number of vCPUs and vCPUs per CPU.
//! Medians of five runs.

use pvlock_host::{PauseLoop, Policy, Queue};
use pvlock_sim::locks::LockKind;
use pvlock_sim::params::Params;
use pvlock_sim::run;
use pvlock_sim::scenario::{Contender, Pins, Scenario, VmSpec};
use pvlock_sim::workload::Workload;
use std::time::Instant;

fn main() {
    println!(
        "{:>15} {:>6} {:>5} {:>14} {:>14} {:>24}",
        "lock", "vCPUs", "over", "operations", "M operations/s", "ns an operation (spread)"
    );
    for lock in [LockKind::PlainTicket, LockKind::Ticket, LockKind::Preemptable] {
        for (vcpus, over) in [(8, 1), (2, 4), (8, 4), (32, 4), (128, 4), (256, 4)] {
            let policy = Policy { pause_loop: PauseLoop::ParkOnPrevious, ..Policy::default() };
            let contender = Contender { queue: Queue::Previous, ..Contender::new(lock.name(), lock).policy(policy) };
            // As many locks as CPUs, so that the work grows with the machine.
            let locks = (vcpus / over).max(1);
            let scenario = Scenario {
                cpus: locks,
                vms: vec![VmSpec {
                    vcpus,
                    pins: Pins::Free,
                    workload: Workload::Micro { locks, inside_ns: 200, outside_ns: 2000 },
                }],
                others: 0,
                contender,
                warm_up_ns: 1_000_000,
                run_ns: 400_000_000 / locks as u64,
                seed: 1,
                params: Params::default(),
                record_ns: None,
            };
            let mut costs: Vec<_> = (0..5)
                .map(|_| {
                    let begin = Instant::now();
                    let operations = run(&scenario).expect("it can be simulated").operations;
                    (begin.elapsed().as_nanos() as f64 / operations as f64, operations)
                })
                .collect();
            costs.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (cost, operations) = costs[2];
            println!(
                "{:>15} {vcpus:>6} {over:>4}x {operations:>14} {:>14.2} {cost:>10.0} ({:.0} to {:.0})",
                lock.name(),
                1000.0 / cost,
                costs[0].0,
                costs[4].0
            );
        }
    }
}
