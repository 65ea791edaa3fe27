//! Tables as text, and how many of the published orderings hold.

use super::{Figure, Origin, Simulated, Table, Unit};
use std::fmt::Write;

/// A published ordering of two rows in one column, and whether the simulation shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ordering {
    /// `T4`, and so on.
    pub table: &'static str,
    /// Heading of the column.
    pub column: String,
    /// The better row.
    pub better: String,
    /// The worse one.
    pub worse: String,
    /// Whether it comes out like this.
    pub holds: bool,
}

/// Without a published deviation, rows that differ by less than this count as equal.
const NOISE: f64 = 0.03;

impl Table {
    /// A simulated rate in the unit of its column.
    pub fn value(&self, results: &[Vec<Simulated>], row: usize, column: usize) -> f64 {
        let ratio = results[row][column].rate / results[self.base][column].rate;
        let base = self.rows[self.base].published[column].map_or(1.0, |figure| figure.value);
        match self.columns[column].unit {
            Unit::Rate(_) => base * ratio,
            Unit::Seconds => base / ratio,
            Unit::Change => (ratio - 1.0) * 100.0,
            Unit::ChangeOfTime => (1.0 - 1.0 / ratio) * 100.0,
        }
    }

    /// A published figure as a speed: more is better, and the base's is 1.
    fn speed(&self, column: usize, figure: Figure) -> f64 {
        let base = self.rows[self.base].published[column].map_or(1.0, |figure| figure.value);
        match self.columns[column].unit {
            Unit::Rate(_) => figure.value / base,
            Unit::Seconds => base / figure.value,
            Unit::Change => 1.0 + figure.value / 100.0,
            Unit::ChangeOfTime => 1.0 / (1.0 - figure.value / 100.0),
        }
    }

    /// Whether two figures differ by more than noise; and if so, whether the first is the better one.
    fn differ(&self, column: usize, one: Figure, other: Figure) -> Option<bool> {
        let (a, b) = (self.speed(column, one), self.speed(column, other));
        let differ = match (one.deviation, other.deviation) {
            (Some(one_by), Some(other_by)) => (one.value - other.value).abs() > one_by + other_by,
            _ => (a - b).abs() >= NOISE * a.max(b).min(1.0),
        };
        differ.then_some(a > b)
    }

    /// All published orderings that are more than noise.
    pub fn orderings(&self, results: &[Vec<Simulated>]) -> Vec<Ordering> {
        let mut orderings = Vec::new();
        for (column, load) in self.columns.iter().enumerate() {
            for (one, first) in self.rows.iter().enumerate() {
                for (other, second) in self.rows.iter().enumerate().skip(one + 1) {
                    let (Some(a), Some(b)) = (first.published[column], second.published[column]) else { continue };
                    let Some(first_better) = self.differ(column, a, b) else { continue };
                    let (better, worse) = if first_better { (one, other) } else { (other, one) };
                    orderings.push(Ordering {
                        table: self.name,
                        column: load.name.clone(),
                        better: self.rows[better].contender.name.clone(),
                        worse: self.rows[worse].contender.name.clone(),
                        holds: results[better][column].rate > results[worse][column].rate,
                    });
                }
            }
        }
        orderings
    }

    /// The whole table as text.
    pub fn text(&self, results: &[Vec<Simulated>]) -> String {
        let mut text = format!("{}: {}\n", self.name, self.title);
        let width = self.rows.iter().map(|row| row.contender.name.len()).max().unwrap_or(0);
        for (column, heading) in self.columns.iter().enumerate() {
            let unit = match heading.unit {
                Unit::Rate(unit) => unit,
                Unit::Seconds => "seconds",
                Unit::Change | Unit::ChangeOfTime => "% change",
            };
            let _ = writeln!(text, "\n  {} ({unit})", heading.name);
            let _ = writeln!(
                text,
                "  {:width$} {:>11} {:>11} {:>8} {:>9} {:>7}",
                "", "published", "simulated", "stdev", "change", "error"
            );
            for (number, row) in self.rows.iter().enumerate() {
                let cell = results[number][column];
                let published = row.published[column];
                let value = self.value(results, number, column);
                let change = (cell.rate / results[self.base][column].rate - 1.0) * 100.0;
                let error = published.map(|figure| {
                    let ratio = cell.rate / results[self.base][column].rate;
                    format!("{:.2}", ratio / self.speed(column, figure))
                });
                let deviation = if cell.rate > 0.0 { cell.deviation / cell.rate * 100.0 } else { 0.0 };
                let mark = match row.origin {
                    Origin::Published => ' ',
                    Origin::Ours => '+',
                    Origin::Bound => '=',
                };
                let _ = writeln!(
                    text,
                    "{mark} {:width$} {:>11} {value:>11.1} {deviation:>7.1}% {change:>+8.1}% {:>7}",
                    row.contender.name,
                    published.map_or_else(|| "-".to_owned(), |figure| format!("{}", figure.value)),
                    error.unwrap_or_else(|| "-".to_owned()),
                );
            }
        }
        if !self.notes.is_empty() {
            let _ = writeln!(text, "\n{}", self.notes);
        }
        text
    }
}

/// How many of these orderings hold, and which do not.
pub fn summary(orderings: &[Ordering]) -> String {
    let held = orderings.iter().filter(|ordering| ordering.holds).count();
    let all = orderings.len();
    let mut text = format!("{held} of {all} published orderings hold ({:.1} %).", held as f64 / all.max(1) as f64 * 100.0);
    for Ordering { table, column, better, worse, .. } in orderings.iter().filter(|ordering| !ordering.holds) {
        let _ = write!(text, "\n  not so: {table}, {column}: {better} better than {worse}");
    }
    text
}

/// What the columns of the text mean.
pub const LEGEND: &str = "\
simulated: in the unit of the published figures, scaled so that the first row that was published with one (T4: gang
scheduling) is the same; stdev: over seeds; change: against that row; error: simulated ratio to published ratio.
+ this project's   = a bound: no scheduler can know what it knows";
