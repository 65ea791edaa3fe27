//! From runs to rows.

use super::options::Cell;
use pvlock_sim::outcome::{Counts, Outcome};
use pvlock_sim::picture::map::Map;
use pvlock_sim::scenario::Scenario;
use pvlock_sim::schedule::Schedule;
use serde::Serialize;

/// All runs of one command.
#[derive(Clone, Debug)]
pub(super) struct Sweep {
    /// What is compared: the rows.
    pub cells: Vec<Cell>,
    /// One for each seed of each row.
    pub scenarios: Vec<Scenario>,
    /// Runs of each row.
    pub seeds: usize,
    /// Which run is recorded.
    pub recorded: Option<usize>,
}

/// One row; counts are sums, and rates means, over the seeds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// The contender, or the bound.
    pub lock: String,
    /// What the host does at pause-loop exits.
    pub policy: String,
    /// vCPUs of each VM.
    pub vcpus: usize,
    /// vCPUs per CPU.
    pub overcommit: f64,
    /// Work in relation to the bound's on as many vCPUs.
    pub share_of_bound: Option<f64>,
    /// Pieces of work a second.
    pub work_per_s: f64,
    /// Standard deviation of that over the seeds, in relation to it.
    pub work_deviation: f64,
    /// Acquisitions a second.
    pub acquisitions_per_s: f64,
    /// The wait that 99 % did not exceed, rounded up to a power of two in cycles.
    pub wait_p99_us: f64,
    /// The longest wait.
    pub wait_max_us: f64,
    /// Pause-loop exits a second.
    pub pause_loops_per_s: f64,
    /// Sleeps a second.
    pub parks_per_s: f64,
    /// Of the time of all CPUs, what was spun away.
    pub spin_share: f64,
    /// Of the time of all CPUs, what went into exits and switches.
    pub host_share: f64,
}

/// Everything that came of it.
#[derive(Clone, Debug)]
pub(super) struct Report {
    /// In the order of the cells, as far as all their runs were finished.
    pub rows: Vec<Row>,
    /// A part of the last row's first run, if it was asked for and finished.
    pub recorded: Option<Map>,
    /// Whether some runs were not.
    pub interrupted: bool,
}

impl Sweep {
    /// What these outcomes of the scenarios show.
    pub(super) fn read(&self, mut outcomes: Vec<Option<Outcome>>) -> Report {
        let interrupted = outcomes.iter().any(Option::is_none);
        let recorded = self.recorded.and_then(|index| self.map(index, outcomes[index].as_mut()?));
        let runs = outcomes.chunks(self.seeds).zip(self.scenarios.chunks(self.seeds)).zip(&self.cells);
        let mut rows: Vec<Row> = runs
            .filter_map(|((outcomes, scenarios), cell)| {
                let outcomes: Option<Vec<&Outcome>> = outcomes.iter().map(Option::as_ref).collect();
                Some(row(cell, scenarios.first()?, &outcomes?))
            })
            .collect();
        let bounds: Vec<_> =
            rows.iter().filter(|row| row.lock == super::report::BOUND).map(|row| (row.vcpus, row.work_per_s)).collect();
        for row in &mut rows {
            let bound = bounds.iter().find(|(vcpus, work)| *vcpus == row.vcpus && *work > 0.0);
            row.share_of_bound = bound.map(|(_, work)| row.work_per_s / work);
        }
        Report { rows, recorded, interrupted }
    }

    fn map(&self, index: usize, outcome: &mut Outcome) -> Option<Map> {
        let (scenario, cell) = (&self.scenarios[index], &self.cells[index / self.seeds]);
        let ((from, to), recording) = (scenario.record_ns?, outcome.recording.take()?);
        let Scenario { cpus, vms, seed, params, .. } = scenario;
        let vm = if vms.len() == 1 { "1 VM".to_owned() } else { format!("{} VMs", vms.len()) };
        Some(Map {
            title: format!("Who ran where: {} at {}x overcommit", cell.contender.name, super::report::rounded(cell.overcommit)),
            subtitle: format!("simulated: {cpus} CPUs, {vm} of {} vCPUs, policy {}, seed {seed}", cell.vcpus, cell.policy),
            schedule: Schedule::of(&recording, params, from),
            cpus: *cpus,
            from,
            to,
        })
    }
}

fn row(cell: &Cell, scenario: &Scenario, outcomes: &[&Outcome]) -> Row {
    let total = outcomes.iter().fold(Counts::default(), |sum, outcome| sum.plus(&outcome.total()));
    let seconds = outcomes.iter().map(|outcome| outcome.measured_ns as f64 / 1e9).sum::<f64>();
    let rates: Vec<f64> = outcomes.iter().map(|outcome| outcome.rate()).collect();
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    let squares = rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>();
    let deviation = if rates.len() > 1 { (squares / (rates.len() - 1) as f64).sqrt() } else { 0.0 };
    let us = |cycles| scenario.params.ns(cycles) as f64 / 1000.0;
    let cycles = seconds * 1e6 * scenario.params.mhz as f64 * scenario.cpus as f64;
    let spent = |part: fn(&Outcome) -> u64| outcomes.iter().map(|outcome| part(outcome)).sum::<u64>() as f64 / cycles;
    Row {
        lock: cell.contender.name.clone(),
        policy: cell.policy.clone(),
        vcpus: cell.vcpus,
        overcommit: cell.overcommit,
        share_of_bound: None,
        work_per_s: mean,
        work_deviation: if mean > 0.0 { deviation / mean } else { 0.0 },
        acquisitions_per_s: total.acquisitions as f64 / seconds,
        wait_p99_us: us(total.wait_quantile(0.99).min(total.longest_wait)),
        wait_max_us: us(total.longest_wait),
        pause_loops_per_s: total.pause_loops as f64 / seconds,
        parks_per_s: total.parks as f64 / seconds,
        spin_share: spent(|outcome| outcome.spent().spinning),
        host_share: spent(|outcome| outcome.spent().host),
    }
}
