//! What a person, or a program, reads at the end.

use crate::backend::Backend;
use crate::measure::Row;
use crate::run::{Plan, Report};
use crate::sweep::{Sections, Sweep};
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

#[derive(Serialize)]
struct Json<'a> {
    backend: &'static str,
    kvm_kind: Option<&'static str>,
    pcpus: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    sweep: Option<JsonSweep>,
    rows: &'a [Row],
    #[serde(skip_serializing_if = "<[PathBuf]>::is_empty")]
    pictures: &'a [PathBuf],
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    interrupted: bool,
}

#[derive(Serialize)]
struct JsonSweep {
    ns_per_iteration: f64,
    long_inside: u64,
}

/// One JSON object; `pictures` have been drawn.
pub fn json(plan: &Plan, report: &Report, pictures: &[PathBuf]) -> String {
    let kvm_kind = match plan.backend {
        Backend::Kvm { kind, .. } => Some(kind.name()),
        Backend::Threads => None,
    };
    let object = Json {
        backend: plan.backend.name(),
        kvm_kind,
        pcpus: plan.pcpus,
        sweep: plan.sweep.map(|sweep| JsonSweep { ns_per_iteration: sweep.ns_per_iteration, long_inside: sweep.long }),
        rows: &report.rows,
        pictures,
        interrupted: report.interrupted,
    };
    // Strings, numbers and vectors of them always serialise (NaN becomes null).
    serde_json::to_string_pretty(&object).unwrap_or_default()
}

/// Where this runs.
pub fn place(plan: &Plan) -> String {
    match plan.backend {
        Backend::Kvm { kind, cpl } => format!("{kind} KVM, guest in CPL {cpl}"),
        Backend::Threads => "threads as vCPUs, no VM".to_owned(),
    }
}

/// One line about where this runs and why, and one about the work of a sweep.
pub fn heading(plan: &Plan) -> String {
    let mut text = format!("pvlock on {} CPUs: {} ({})", plan.pcpus, place(plan), plan.why);
    if let Some(sweep) = &plan.sweep {
        // Writing to a String does not fail.
        let _ = write!(
            text,
            "\nan iteration of work takes {:.3} ns here: long sections have {} iterations inside the lock",
            sweep.ns_per_iteration, sweep.long
        );
    }
    text
}

/// A table for each length of sections.
pub fn tables(plan: &Plan, report: &Report) -> String {
    let Some(sweep) = &plan.sweep else { return table(&report.rows.iter().collect::<Vec<_>>()) };
    let mut text = String::new();
    for sections in sweep.sections() {
        let rows: Vec<_> = report.rows.iter().filter(|row| row.inside == sections.inside).collect();
        if !rows.is_empty() {
            let _ = writeln!(text, "{}:\n{}", title(sweep, &sections), table(&rows));
        }
    }
    text
}

/// What the sections of one table of a sweep are like.
pub fn title(sweep: &Sweep, sections: &Sections) -> String {
    let Sections { name, inside, outside } = sections;
    format!("{name} sections: {:.2} us of work inside the lock ({inside} iterations), {outside} outside", sweep.inside_us(sections))
}

fn table(rows: &[&Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let spread = rows.iter().any(|row| row.repeats.len() > 1);
    let order = rows.iter().any(|row| row.order.is_some());
    let mut head = vec!["lock", "vCPUs", "over", "ops/s"];
    head.extend(spread.then_some("spread"));
    head.extend([
        "bound", "idle", "Jain", "wait p50", "p99.9", "worst", "PAUSE/op", "halts", "kicks", "spur.", "forced", "CPU s", "exact",
    ]);
    head.extend(order.then_some("order"));
    table.set_header(head);
    let mut vcpus = 0;
    for row in rows {
        if vcpus != row.vcpus && vcpus != 0 {
            table.add_row(vec![""]);
        }
        vcpus = row.vcpus;
        table.add_row(cells(row, spread, order));
    }
    table.to_string()
}

fn cells(row: &Row, spread: bool, order: bool) -> Vec<Cell> {
    let mut cells = vec![
        Cell::new(row.lock),
        right(row.vcpus.to_string()),
        right(format!("{}x", (10.0 * row.overcommit).round() / 10.0)),
        right(si(row.ops_per_s)),
    ];
    if spread {
        let least = row.repeats.iter().copied().fold(f64::INFINITY, f64::min);
        let most = row.repeats.iter().copied().fold(0.0, f64::max);
        cells.push(right(format!("{}..{}", si(least), si(most))));
    }
    cells.extend([
        right(row.share_of_bound.map_or("-".into(), percent)),
        right(percent(row.cpu_idle)),
        right(format!("{:.2}", row.jain)),
        right(time(row.wait_us.p50)),
        right(time(row.wait_us.p999)),
        right(time(row.wait_us.max)),
        right(row.pauses_per_op.map_or("-".into(), few)),
        right(si(row.halts as f64)),
        right(si(row.kicks as f64)),
        right(si(row.spurious as f64)),
        right(row.forced.to_string()),
        right(format!("{:.1}", row.cpu_s)),
        Cell::new(if row.exact { "true" } else { "FALSE" }),
    ]);
    if order {
        cells.push(Cell::new(match row.order {
            None => "-".to_owned(),
            Some(order) if order.is_strict() && order.unlogged == 0 => format!("strict ({})", si(order.checked as f64)),
            Some(order) if order.is_strict() => format!("strict (the first {})", si(order.checked as f64)),
            Some(order) => format!("{} OVERTAKEN, {} out of sequence", order.overtaken, order.out_of_sequence),
        }));
    }
    cells
}

/// The lines below the table.
pub fn summary(plan: &Plan, report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    if let Some(exits) = &report.exits {
        let kinds: Vec<_> =
            exits.iter().filter(|(_, count)| *count > 0).map(|(kind, count)| format!("{} {count}", kind.name())).collect();
        let _ = writeln!(text, "exits from the guest: {}", if kinds.is_empty() { "none".into() } else { kinds.join(", ") });
    }
    let host = &report.host;
    let _ = writeln!(
        text,
        "host: {} halts ({} found their kick waiting, {} slept), {} kicks, {} sleeps ended by a kick, {} otherwise, {} spurious, {} forced",
        host.halts,
        host.latched,
        host.parks,
        host.kicks_sent,
        host.kicked,
        host.woken + host.interrupted,
        host.spurious,
        host.forced
    );
    // Of those that came through an eventfd, or were seen by a poller, nobody is the sender.
    if host.kicks > host.kicks_sent {
        let _ = writeln!(
            text,
            "host: {} kicks without an exit or call ({} seen by the poller)",
            host.kicks - host.kicks_sent,
            host.polled
        );
    }
    if host.pause_loops > 0 {
        let decisions: Vec<_> = host.decisions().map(|(decision, n)| format!("{decision} {n}")).collect();
        let _ = writeln!(text, "host: {} reports of spinning; decisions: {}", host.pause_loops, decisions.join(", "));
    }
    let _ = writeln!(
        text,
        "bound = best lock at one vCPU per CPU in this run; waits from request to acquisition; exact = no update lost;\n\
         PAUSE/op = PAUSEs per acquisition"
    );
    // The same sections as the first row's.
    let same = |row: &&Row| report.rows.first().is_some_and(|first| row.inside == first.inside);
    let most = report.rows.iter().filter(same).map(|row| row.vcpus).max().unwrap_or(0);
    let best = |names: &[&str]| {
        let candidates = report.rows.iter().filter(same).filter(|row| row.vcpus == most && names.contains(&row.lock));
        candidates.max_by(|a, b| a.ops_per_s.total_cmp(&b.ops_per_s))
    };
    if let (Some(plain), Some(ours)) = (best(&["spin-ticket"]), best(&["ticket", "preemptable"]))
        && most > plan.pcpus
        && plain.ops_per_s > 0.0
    {
        let _ = writeln!(
            text,
            "At {}x overcommit `{}` makes {} times the acquisitions of `spin-ticket`: its waiters halt instead of spinning\n\
             while the vCPU whose turn it is waits for a CPU.",
            ours.overcommit,
            ours.lock,
            few(ours.ops_per_s / plain.ops_per_s)
        );
    }
    if report.interrupted {
        let _ = writeln!(text, "Interrupted: the table holds what was finished.");
    }
    text
}

/// A cell with a number.
pub(crate) fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// A share.
pub(crate) fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.0} %", 100.0 * share) } else { "-".into() }
}

/// A number.
pub(crate) fn si(value: f64) -> String {
    match value {
        v if v >= 9_999_500.0 => format!("{:.1} M", v / 1e6),
        v if v >= 999_500.0 => format!("{:.2} M", v / 1e6),
        v if v >= 9_999.5 => format!("{:.0} k", v / 1e3),
        v if v >= 999.5 => format!("{:.1} k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// A number of which the first digit after the point matters while it is small.
fn few(value: f64) -> String {
    if value < 99.95 { format!("{value:.1}") } else { si(value) }
}

/// A time in µs.
pub(crate) fn time(us: f64) -> String {
    match us {
        v if !v.is_finite() => "-".into(),
        v if v >= 10_000_000.0 => format!("{:.0} s", v / 1e6),
        v if v >= 10_000.0 => format!("{:.0} ms", v / 1e3),
        v if v >= 1_000.0 => format!("{:.1} ms", v / 1e3),
        v if v >= 10.0 => format!("{v:.0} us"),
        v => format!("{v:.1} us"),
    }
}
