//! What a person, or a program, reads at the end.

use super::sweep::{Report, Row, Sweep};
use crate::report::{percent, right, si, time};
use comfy_table::{Cell, Table, presets};
use pvlock_sim::picture::Look;
use pvlock_sim::picture::chart::{Axis, Chart, Line, Panel};
use pvlock_sim::workload::Workload;
use serde::Serialize;
use std::path::PathBuf;

/// The name of the rows that others are measured by.
pub(super) const BOUND: &str = "bound";

#[derive(Serialize)]
struct Json<'a> {
    cpus: usize,
    vms: usize,
    seconds: f64,
    seed: u64,
    seeds: usize,
    rows: &'a [Row],
    files: &'a [PathBuf],
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    interrupted: bool,
}

/// One JSON object; `files` have been written.
pub(super) fn json(sweep: &Sweep, report: &Report, files: &[PathBuf]) -> String {
    let scenario = &sweep.scenarios[0];
    let object = Json {
        cpus: scenario.cpus,
        vms: scenario.vms.len(),
        seconds: scenario.run_ns as f64 / 1e9,
        seed: scenario.seed,
        seeds: sweep.seeds,
        rows: &report.rows,
        files,
        interrupted: report.interrupted,
    };
    // Strings, numbers and vectors of them always serialise.
    serde_json::to_string_pretty(&object).unwrap_or_default()
}

/// With at most two digits after the point.
pub(super) fn rounded(value: f64) -> f64 {
    (100.0 * value).round() / 100.0
}

/// One line about what is simulated.
pub(super) fn heading(sweep: &Sweep) -> String {
    format!("pvlock sim: {}", machine(sweep))
}

fn machine(sweep: &Sweep) -> String {
    let scenario = &sweep.scenarios[0];
    let vms = scenario.vms.len();
    let last = scenario.seed.wrapping_add(sweep.seeds as u64 - 1);
    format!(
        "{} CPUs, {vms} VM{}, {}; {} s simulated, seed{} {}",
        scenario.cpus,
        if vms == 1 { "" } else { "s" },
        work(&scenario.vms[0].workload),
        scenario.run_ns as f64 / 1e9,
        if sweep.seeds == 1 { "" } else { "s" },
        if sweep.seeds == 1 { last.to_string() } else { format!("{} to {last}", scenario.seed) },
    )
}

fn work(workload: &Workload) -> String {
    match *workload {
        Workload::Micro { locks, inside_ns, outside_ns } => {
            let us = |ns: u64| ns as f64 / 1000.0;
            let lock = if locks == 1 { "a lock".to_owned() } else { format!("one of {locks} locks") };
            format!("{lock} for {} us every {} us", us(inside_ns), us(inside_ns + outside_ns))
        }
        named => Workload::NAMED.iter().find(|(_, known)| *known == named).map_or("?", |(name, _)| name).to_owned(),
    }
}

/// All rows.
pub(super) fn table(sweep: &Sweep, report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let mut head = vec!["lock", "vCPUs", "over", "bound"];
    head.extend((sweep.seeds > 1).then_some("stdev"));
    head.extend(["acq./s", "wait p99", "worst", "PL exits/s", "parks/s", "spin", "host"]);
    table.set_header(head);
    let mut vcpus = None;
    for row in &report.rows {
        if vcpus.is_some_and(|vcpus| vcpus != row.vcpus) {
            table.add_row(vec![""]);
        }
        vcpus = Some(row.vcpus);
        let mut cells = vec![
            Cell::new(&row.lock),
            right(row.vcpus.to_string()),
            right(format!("{}x", rounded(row.overcommit))),
            right(row.share_of_bound.map_or("-".into(), share)),
        ];
        cells.extend((sweep.seeds > 1).then(|| right(format!("{:.1} %", 100.0 * row.work_deviation))));
        cells.extend([
            right(si(row.acquisitions_per_s)),
            right(time(row.wait_p99_us)),
            right(time(row.wait_max_us)),
            right(si(row.pause_loops_per_s)),
            right(si(row.parks_per_s)),
            right(percent(row.spin_share)),
            right(percent(row.host_share)),
        ]);
        table.add_row(cells);
    }
    table.to_string()
}

/// As [`percent`], with a digit more where that says something.
fn share(share: f64) -> String {
    if share < 0.0995 { format!("{:.1} %", 100.0 * share) } else { percent(share) }
}

/// What the columns mean.
pub(super) const LEGEND: &str = "bound = work in relation to that of a lock whose waiters sleep and wake at no cost, under a scheduler that knows holders and\n\
    next waiters (first rows); wait p99 is rounded up to a power of two in cycles; PL exits = pause-loop exits; spin, host = share\n\
    of the CPUs' time spent spinning, and in exits and switches";

/// Share of the bound over overcommit.
pub(super) fn chart(sweep: &Sweep, report: &Report) -> Chart {
    let rows = || report.rows.iter().filter(|row| row.lock != BOUND);
    let shares = rows().filter_map(|row| row.share_of_bound).filter(|&share| share > 0.0);
    let (least, most) = shares.fold((0.1, 1.0), |(least, most): (f64, f64), share| (least.min(share), most.max(share)));
    let mut names: Vec<&str> = Vec::new();
    for row in rows() {
        if !names.contains(&row.lock.as_str()) {
            names.push(&row.lock);
        }
    }
    let line = |(place, name): (usize, &&str)| {
        let share = |row: &Row| Some((row.overcommit.log2(), row.share_of_bound?.max(f64::MIN_POSITIVE).log10()));
        let points: Vec<_> = rows().filter(|row| row.lock == **name).filter_map(share).collect();
        Line { name: (*name).to_owned(), look: Look::of(name, place), markers: points.clone(), points }
    };
    let mut policies: Vec<&str> = rows().map(|row| row.policy.as_str()).collect();
    policies.dedup();
    let policy = if let [policy] = policies[..] { format!(", policy {policy}") } else { String::new() };
    let stopped = if report.interrupted { ", interrupted" } else { "" };
    Chart {
        title: "Work under overcommit, simulated".into(),
        subtitle: format!("{}{policy}{stopped}", machine(sweep)),
        panels: vec![Panel {
            title: "bound = waiting costs nothing, and the scheduler knows holders and next waiters".into(),
            x: Axis::overcommit(report.rows.iter().map(|row| row.overcommit)),
            y: Axis::percent("work, share of the bound", least, most * 1.2, true),
            lines: names.iter().enumerate().map(line).collect(),
        }],
        size: (900, 600),
    }
}
