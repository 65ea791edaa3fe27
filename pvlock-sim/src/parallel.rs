//! Many runs on several threads of this machine.

use crate::outcome::Outcome;
use crate::run::run_until;
use crate::scenario::{Scenario, ScenarioError};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// Simulates all of these; outcomes are in the order of the scenarios, whatever the number of threads. None: not finished when
/// `interrupt` was set. `finished` is told after each run how many are over.
///
/// # Errors
///
/// The first scenario, in their order, that cannot be simulated; then nothing is.
pub fn run_all(
    scenarios: &[Scenario],
    threads: usize,
    interrupt: &AtomicBool,
    mut finished: impl FnMut(usize),
) -> Result<Vec<Option<Outcome>>, ScenarioError> {
    scenarios.iter().try_for_each(Scenario::check)?;
    let mut outcomes: Vec<Result<Option<Outcome>, ScenarioError>> = scenarios.iter().map(|_| Ok(None)).collect();
    let job = |index| run_until(&scenarios[index], interrupt);
    let mut over = 0;
    each(scenarios.len(), threads, interrupt, job, |index, outcome| {
        outcomes[index] = outcome;
        over += 1;
        finished(over);
    });
    outcomes.into_iter().collect()
}

/// Does so many jobs, by number, on so many threads, until `interrupt` is set; `finished` gets each result as it comes.
pub(crate) fn each<T: Send>(
    jobs: usize,
    threads: usize,
    interrupt: &AtomicBool,
    job: impl Fn(usize) -> T + Sync,
    mut finished: impl FnMut(usize, T),
) {
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.max(1)) {
            let (sender, next, job) = (sender.clone(), &next, &job);
            scope.spawn(move || {
                while !interrupt.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= jobs {
                        break;
                    }
                    // The receiver outlives this scope.
                    let _ = sender.send((index, job(index)));
                }
            });
        }
        drop(sender);
        results.into_iter().for_each(|(index, result)| finished(index, result));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::LockKind;
    use crate::params::Params;
    use crate::scenario::{Contender, Pins, VmSpec};
    use crate::workload::Workload;

    fn scenarios() -> Vec<Scenario> {
        let scenario = |seed| Scenario {
            cpus: 2,
            vms: vec![VmSpec {
                vcpus: 2 + seed as usize % 3,
                pins: Pins::Free,
                workload: Workload::Micro { locks: 1, inside_ns: 500, outside_ns: 5000 },
            }],
            others: 0,
            contender: Contender::new("ticket", LockKind::Ticket),
            warm_up_ns: 100_000,
            run_ns: 1_000_000,
            seed,
            params: Params::default(),
            record_ns: None,
        };
        (0..9).map(scenario).collect()
    }

    #[test]
    fn outcomes_are_in_order_and_the_same_on_any_number_of_threads() {
        let scenarios = scenarios();
        let run = |threads| {
            let mut told = Vec::new();
            let outcomes = run_all(&scenarios, threads, &AtomicBool::new(false), |n| told.push(n)).unwrap();
            assert_eq!(told, (1..=9).collect::<Vec<_>>());
            outcomes
        };
        let outcomes = run(1);
        assert_eq!(outcomes, run(3));
        for (scenario, outcome) in scenarios.iter().zip(outcomes) {
            assert_eq!(outcome, crate::run(scenario).map(Some).unwrap());
        }
    }

    #[test]
    fn an_interrupt_leaves_what_is_not_finished_out() {
        let interrupt = AtomicBool::new(false);
        let mut scenarios = scenarios();
        scenarios[5].run_ns = u64::MAX / 10_000;
        let outcomes = run_all(&scenarios, 1, &interrupt, |n| interrupt.store(n >= 4, Ordering::Relaxed)).unwrap();
        let finished = outcomes.iter().take_while(|outcome| outcome.is_some()).count();
        assert!((4..=5).contains(&finished), "{finished}: the fifth may have begun, and be short");
        assert_eq!(outcomes[finished..].iter().flatten().count(), 0);
    }

    #[test]
    fn what_cannot_be_simulated_is_an_error_before_anything_is() {
        let mut scenarios = scenarios();
        scenarios[8].cpus = 0;
        let nothing = |_| panic!("nothing is simulated");
        assert_eq!(run_all(&scenarios, 2, &AtomicBool::new(false), nothing), Err(ScenarioError::Cpus(0)));
    }
}
