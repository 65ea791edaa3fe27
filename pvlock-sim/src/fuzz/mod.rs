//! Scenarios with faults by the thousand: the first in which something does not hold that has to, and its replay.
//!
//! ```
//! let report = pvlock_sim::fuzz::fuzz(0..20, |_| true);
//! assert_eq!(report.failures, []);
//! ```

mod mix;

pub use mix::scenario;

use crate::parallel;
use crate::run::{Ending, Trials, run_with_faults};
use crate::scenario::Scenario;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// A seed with which something did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which.
    pub seed: u64,
    /// What.
    pub violation: String,
}

/// What many seeds have shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How many were run.
    pub seeds: u64,
    /// With which something did not hold, in order.
    pub failures: Vec<Failure>,
    /// Lock operations.
    pub operations: u64,
    /// Things that went wrong.
    pub faults: u64,
    /// Simulated time, in ns.
    pub ns: u64,
}

impl Report {
    fn of(seed: u64, ending: Ending) -> Self {
        let failures = ending.violation.map(|violation| Failure { seed, violation }).into_iter().collect();
        Self { seeds: 1, failures, operations: ending.operations, faults: ending.faults, ns: ending.ns }
    }

    fn add(&mut self, mut more: Self) {
        self.failures.append(&mut more.failures);
        self.seeds += more.seeds;
        self.operations += more.operations;
        self.faults += more.faults;
        self.ns = self.ns.saturating_add(more.ns);
    }
}

/// Runs the standard mix with these seeds, on all CPUs, until `go_on`, which is told how many are done, says no. What is found
/// does not depend on the number of threads, if all are run.
pub fn fuzz(seeds: Range<u64>, mut go_on: impl FnMut(u64) -> bool) -> Report {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (stop, first) = (AtomicBool::new(false), seeds.start);
    let seed = |index: usize| first + index as u64;
    let jobs = usize::try_from(seeds.end.saturating_sub(first)).unwrap_or(usize::MAX);
    let one = |index| Report::of(seed(index), run(seed(index), 0));
    let mut report = Report::default();
    parallel::each(jobs, threads, &stop, one, |_, more| {
        report.add(more);
        if !go_on(report.seeds) {
            stop.store(true, Ordering::Relaxed);
        }
    });
    report.failures.sort_by_key(|failure| failure.seed);
    report
}

/// Runs one seed again, and keeps this many of the last lines of what happened.
pub fn replay(seed: u64, lines: usize) -> (Scenario, Trials, Ending) {
    let (scenario, trials) = scenario(seed);
    (scenario, trials, run(seed, lines))
}

fn run(seed: u64, lines: usize) -> Ending {
    let (scenario, trials) = scenario(seed);
    let ending = run_with_faults(&scenario, &Trials { log: lines, ..trials });
    ending.unwrap_or_else(|error| Ending { violation: Some(format!("the mix is wrong: {error}")), ..Ending::default() })
}
