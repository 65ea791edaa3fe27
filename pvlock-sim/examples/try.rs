use pvlock_host::{Policy, Queue};
use pvlock_sim::{locks::LockKind, params::Params, scenario::*, workload::Workload};
fn main() {
    let n: usize = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(8);
    let cpus: usize = std::env::args().nth(2).and_then(|a| a.parse().ok()).unwrap_or(2);
    for (name, lock) in LockKind::ALL {
        let mut contender = Contender::new(name, lock).policy(Policy::named("ignore").unwrap());
        contender.queue = Queue::Previous;
        if lock == LockKind::Oracle {
            contender.rule = RuleKind::Clairvoyant;
        }
        let scenario = Scenario {
            cpus,
            vms: vec![VmSpec {
                vcpus: n,
                pins: Pins::Free,
                workload: Workload::Micro { locks: 1, inside_ns: 200, outside_ns: 2000 },
            }],
            others: 0,
            contender,
            warm_up_ns: 100_000_000,
            run_ns: 1_000_000_000,
            seed: 1,
            params: Params::default(),
            record_ns: None,
        };
        let t = std::time::Instant::now();
        let outcome = pvlock_sim::run(&scenario).unwrap();
        let s = t.elapsed().as_secs_f64();
        let total = outcome.total();
        let spent = outcome.spent();
        println!(
            "{name:15} {:10.0}/s  wall {s:.2} s  {:.2} Mops/s wall  spin {:.2} host {:.2} comp {:.2} parks {} switches {} forced {} p99 {} max {}",
            outcome.rate(),
            outcome.operations as f64 / s / 1e6,
            spent.spinning as f64 / 2.4e9,
            spent.host as f64 / 2.4e9,
            spent.computing as f64 / 2.4e9,
            total.parks,
            total.switches,
            outcome.vms[0].host.forced,
            total.wait_quantile(0.99),
            total.longest_wait
        );
    }
}
