//! `pvlock sim table`: what was published beside what the simulation says.

use super::options;
use super::{Ended, SimError};
use crate::progress;
use clap::Args;
use pvlock_sim::tables::{self, Table, report};
use std::sync::atomic::AtomicBool;

#[derive(Clone, Debug, Args)]
pub(super) struct Options {
    /// T1 to T5, or all
    #[arg(value_parser = names())]
    name: String,
    /// Runs of each cell
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    #[command(flatten)]
    machine: options::MachineOptions,
}

fn names() -> clap::builder::PossibleValuesParser {
    clap::builder::PossibleValuesParser::new(tables::ALL.into_iter().chain(["all"]))
}

/// Simulates and prints one after the other.
pub(super) fn print(options: &Options, interrupt: &AtomicBool) -> Result<Ended, SimError> {
    let params = options.machine.params()?;
    let wanted: Vec<Table> = match options.name.as_str() {
        "all" => tables::ALL.into_iter().filter_map(tables::table).collect(),
        name => tables::table(name).into_iter().collect(),
    };
    let jobs: Vec<_> = wanted.iter().map(|table| table.scenarios(options.seeds, params)).collect();
    let bar = progress::bar(jobs.iter().map(|jobs| jobs.len() as u64).sum());
    let (mut before, mut orderings) = (0, Vec::new());
    for (table, jobs) in wanted.iter().zip(&jobs) {
        bar.set_message(format!("{}: {} runs", table.name, jobs.len()));
        let threads = options.machine.threads();
        let outcomes = pvlock_sim::parallel::run_all(jobs, threads, interrupt, |over| bar.set_position(before + over as u64));
        before += jobs.len() as u64;
        let Some(results) = table.results(options.seeds, &outcomes?) else {
            bar.finish_and_clear();
            println!("Interrupted in {}.", table.name);
            return Ok(Ended::Interrupted);
        };
        bar.suspend(|| println!("{}", table.text(&results)));
        if table.counts {
            orderings.extend(table.orderings(&results));
        }
    }
    bar.finish_and_clear();
    println!("{}", report::LEGEND);
    if !orderings.is_empty() {
        println!("\n{}", report::summary(&orderings));
    }
    Ok(Ended::Done)
}
