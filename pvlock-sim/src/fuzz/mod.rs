//! Scenarios with faults by the thousand: the first in which something does not hold that has to, and its replay.
//!
//! ```
//! let report = pvlock_sim::fuzz::fuzz(0..20, |_| true);
//! assert_eq!(report.failures, []);
//! ```

mod mix;

pub use mix::scenario;

use crate::run::{Ending, Trials, run_with_faults};
use crate::scenario::Scenario;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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

    fn plus(mut self, mut other: Self) -> Self {
        self.failures.append(&mut other.failures);
        self.failures.sort_by_key(|failure| failure.seed);
        self.seeds += other.seeds;
        self.operations += other.operations;
        self.faults += other.faults;
        self.ns = self.ns.saturating_add(other.ns);
        self
    }
}

/// Runs the standard mix with these seeds, on all CPUs, until `go_on`, which is told how many are done, says no. What is found
/// does not depend on the number of threads, if all are run.
pub fn fuzz(seeds: Range<u64>, go_on: impl Fn(u64) -> bool + Sync) -> Report {
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let one = |seed| {
        if stop.load(Ordering::Relaxed) {
            return Report::default();
        }
        let ending = run(seed, 0);
        if !go_on(done.fetch_add(1, Ordering::Relaxed) + 1) {
            stop.store(true, Ordering::Relaxed);
        }
        Report::of(seed, ending)
    };
    seeds.into_par_iter().map(one).reduce(Report::default, Report::plus)
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
