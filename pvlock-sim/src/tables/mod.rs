//! The published tables: what was measured, what the simulation says, and how many of the published orderings it shows.
//!
//! Units of work differ (MB, records, seconds), so each column is scaled by one cell, its base: what is compared are ratios.

mod contenders;
mod published;
pub mod report;

pub use published::{ALL, table};

use crate::outcome::Outcome;
use crate::params::Params;
use crate::scenario::{Contender, Scenario, VmSpec};

/// A published figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// As printed.
    pub value: f64,
    /// Its deviation, if one was published; in the same unit.
    pub deviation: Option<f64>,
}

/// What a table shows in its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// More is better.
    Rate(&'static str),
    /// Less is better.
    Seconds,
    /// Change of the rate against the base, in percent.
    Change,
    /// Change of the time against the base, in percent; negative is slower.
    ChangeOfTime,
}

/// Whose row it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Published.
    Published,
    /// This project's.
    Ours,
    /// No policy that can be had.
    Bound,
}

/// One row: a contender, and in each column the published figure, if there is one.
#[derive(Clone, Debug)]
pub struct TableRow {
    /// What is tried.
    pub contender: Contender,
    /// Whose it is.
    pub origin: Origin,
    /// Column by column.
    pub published: Vec<Option<Figure>>,
    /// Takes the place of the column's VMs, where the row changes them (such as by pinning).
    pub vms: Option<Vec<VmSpec>>,
}

/// One column: a load.
#[derive(Clone, Debug)]
pub struct Column {
    /// Its heading.
    pub name: String,
    /// The host's CPUs.
    pub cpus: usize,
    /// What runs.
    pub vms: Vec<VmSpec>,
    /// Only this VM's work counts.
    pub counted: Option<usize>,
    /// What is printed in it.
    pub unit: Unit,
    /// Simulated before measuring and measured, in ns.
    pub times_ns: (u64, u64),
}

/// One table.
#[derive(Clone, Debug)]
pub struct Table {
    /// Such as `T4`.
    pub name: &'static str,
    /// What it compares.
    pub title: &'static str,
    /// Loads.
    pub columns: Vec<Column>,
    /// Contenders.
    pub rows: Vec<TableRow>,
    /// The row whose published figure scales each column.
    pub base: usize,
    /// Whether its orderings count.
    pub counts: bool,
    /// What is known of rows that do not come out as published.
    pub notes: &'static str,
}

/// Mean and standard deviation over seeds of what a cell's VMs did, in pieces of work a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Simulated {
    /// Mean.
    pub rate: f64,
    /// Standard deviation.
    pub deviation: f64,
}

impl Simulated {
    fn of(rates: &[f64]) -> Self {
        let n = rates.len().max(1) as f64;
        let rate = rates.iter().sum::<f64>() / n;
        let variance = rates.iter().map(|one| (one - rate).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        Self { rate, deviation: variance.sqrt() }
    }
}

impl Table {
    /// The published rows alone, and runs of a fraction of their lengths: enough to see most orderings.
    pub fn brief(mut self, fraction: u64) -> Self {
        self.rows.retain(|row| row.origin == Origin::Published);
        for column in &mut self.columns {
            column.times_ns = (column.times_ns.0 / fraction, column.times_ns.1 / fraction);
        }
        self
    }

    /// The scenario of one cell.
    pub fn scenario(&self, row: usize, column: usize, seed: u64, params: Params) -> Scenario {
        let (row, column) = (&self.rows[row], &self.columns[column]);
        Scenario {
            cpus: column.cpus,
            vms: row.vms.clone().unwrap_or_else(|| column.vms.clone()),
            others: 0,
            contender: row.contender.clone(),
            warm_up_ns: column.times_ns.0,
            run_ns: column.times_ns.1,
            seed,
            params,
            record_ns: None,
        }
    }

    /// What counts of an outcome in this column.
    fn rate(&self, column: usize, outcome: &Outcome) -> f64 {
        self.columns[column].counted.map_or_else(|| outcome.rate(), |vm| outcome.rate_of(vm))
    }

    /// All cells, row by row, as jobs for [`Table::results`].
    pub fn scenarios(&self, seeds: u64, params: Params) -> Vec<Scenario> {
        let cells = (0..self.rows.len()).flat_map(|row| (0..self.columns.len()).map(move |column| (row, column)));
        cells.flat_map(|(row, column)| (0..seeds).map(move |seed| self.scenario(row, column, seed, params))).collect()
    }

    /// What those jobs have shown, cell by cell; `None` if they were not all finished.
    pub fn results(&self, seeds: u64, outcomes: &[Option<Outcome>]) -> Option<Vec<Vec<Simulated>>> {
        let mut outcomes = outcomes.iter();
        let mut cell = |column: usize| {
            let finished = outcomes.by_ref().take(seeds as usize);
            let rates: Option<Vec<f64>> = finished.map(|outcome| Some(self.rate(column, outcome.as_ref()?))).collect();
            rates.map(|rates| Simulated::of(&rates))
        };
        (0..self.rows.len()).map(|_| (0..self.columns.len()).map(&mut cell).collect()).collect()
    }
}
