//! `pvlock sim fuzz`: scenarios in which things go wrong, by seed.

use super::{Ended, SimError};
use crate::progress;
use clap::Args;
use pvlock_sim::fuzz::{Report, fuzz, replay};
use pvlock_sim::run::Ending;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Lines of what happened that are shown of a seed that failed.
const SHOWN: usize = 60;
/// Lines that are kept for a trace.
const TRACED: usize = 1_000_000;

/// Options of `pvlock sim fuzz`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// How many seeds
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    first: u64,
    /// Run this seed alone, and show the last of what happened
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seeds", "first"])]
    replay: Option<u64>,
    /// Write everything that happened to a file (with --replay)
    #[arg(long, value_name = "FILE", requires = "replay")]
    trace: Option<PathBuf>,
}

/// `pvlock sim fuzz`.
pub(super) fn run(options: &Options, interrupt: &AtomicBool) -> Result<Ended, SimError> {
    let bar = progress::bar(options.seeds());
    bar.set_message("seeds");
    let shown = options.run(interrupt, |done| bar.set_position(done));
    bar.finish_and_clear();
    shown
}

impl Options {
    /// Seeds to run.
    fn seeds(&self) -> u64 {
        self.replay.map_or(self.seeds, |_| 1)
    }

    /// Runs and prints. `progress` is told how many seeds are done.
    ///
    /// # Errors
    ///
    /// A trace that cannot be written.
    fn run(&self, interrupt: &AtomicBool, progress: impl Fn(u64) + Sync) -> Result<Ended, SimError> {
        if let Some(seed) = self.replay {
            return self.replay(seed);
        }
        let report = fuzz(self.first..self.first.saturating_add(self.seeds), |done| {
            progress(done);
            !interrupt.load(Ordering::Relaxed)
        });
        let Report { seeds, failures, operations, faults, ns } = &report;
        println!(
            "{seeds} seeds from {}: {operations} lock operations, {faults} faults, {} s simulated",
            self.first,
            ns / 1_000_000_000
        );
        if let Some(first) = failures.first() {
            println!("{} failed; the first is seed {}: {}", failures.len(), first.seed, first.violation);
            println!("replay: pvlock sim fuzz --replay {} --trace {}.txt", first.seed, first.seed);
            return Ok(Ended::Failed);
        }
        Ok(if *seeds < self.seeds { Ended::Interrupted } else { Ended::Done })
    }

    fn replay(&self, seed: u64) -> Result<Ended, SimError> {
        let kept = if self.trace.is_some() { TRACED } else { SHOWN };
        let (scenario, trials, Ending { violation, log, ns, .. }) = replay(seed, kept);
        let heading = format!("seed {seed}: {scenario:#?}\n{:#?}\n", trials.faults);
        if let Some(path) = &self.trace {
            let text = format!("{heading}{}\n", log.join("\n"));
            std::fs::write(path, text).map_err(|source| SimError::Write { path: path.clone(), source })?;
            println!("{} lines in {}", log.len(), path.display());
        } else {
            println!("{heading}{}", log.join("\n"));
        }
        Ok(match violation {
            Some(violation) => {
                println!("seed {seed} fails after {} us: {violation}", ns / 1000);
                Ended::Failed
            }
            None => {
                println!("seed {seed}: everything holds, {} us simulated", ns / 1000);
                Ended::Done
            }
        })
    }
}
