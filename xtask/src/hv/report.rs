//! What the hypervisor said: read, stored, shown, judged.

use pvlock_sim::picture::map::Map;
use pvlock_sim::schedule::Schedule;
use std::fmt;
use std::fs;
use std::path::Path;

use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Deserialize;
use serde_json::Value;

/// A line of the hypervisor.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Run(Box<Run>),
    Trial(Trial),
    Report(Misdeed),
}

/// One cell.
#[derive(Deserialize)]
struct Run {
    lock: String,
    policy: String,
    wake_ahead: u32,
    halting: bool,
    adapting: bool,
    overcommit: u32,
    ns: u64,
    acquired: u64,
    acquired_in_all: u64,
    hand_over_ns: u64,
    hand_over_p99_ns: u64,
    pause_loops: u64,
    holder_preempted: u64,
    parks: u64,
    wakes: u64,
    before_previous: u64,
    before_earlier: u64,
    not_drained: u64,
    halts: u64,
    forced: u64,
    refused: u64,
    exact: bool,
    in_sequence: bool,
    stopped: bool,
}

/// A guest that misbehaves: its name, and at the end what became of the other guest.
#[derive(Deserialize)]
struct Trial {
    name: String,
    #[serde(flatten)]
    end: Option<TrialEnd>,
}

#[derive(Deserialize)]
struct TrialEnd {
    other_sections: u64,
    other_expected: u64,
    other_exact: bool,
    other_stopped: bool,
    other_forced: u64,
}

/// Which vCPU did what.
#[derive(Deserialize)]
struct Misdeed {
    vm: u32,
    vcpu: Option<u32>,
    what: String,
}

/// What must be reported of each trial's guest.
const EXPECTED: [(&str, &str); 7] = [
    ("triple-fault", "triple fault"),
    ("unknown-hypercall", "vmmcall 0xdead is unknown"),
    ("nonsense-registration", "the region must lie in guest RAM"),
    ("never-yields", "never ended"),
    ("only-pauses", "never ended"),
    ("unknown-msr", "MSR 0x1234"),
    ("halts-for-ever", "nothing can wake it"),
];

/// Lines of a schedule, by policy.
type Schedules = std::collections::BTreeMap<String, Vec<String>>;

/// All of it.
#[derive(Default)]
pub(super) struct Report {
    raw: Vec<String>,
    runs: Vec<Run>,
    trials: Vec<(Trial, Vec<Misdeed>)>,
    /// Reports outside a trial.
    misdeeds: Vec<Misdeed>,
    schedules: Schedules,
    unread: Vec<String>,
    done: bool,
    /// Whether every cell was run, so that none may be missing.
    whole: bool,
    /// Whether guests that misbehave were run.
    tried: bool,
}

impl Report {
    pub(super) fn read(lines: &[String], whole: bool, tried: bool) -> Self {
        let mut report = Self { whole, tried, ..Self::default() };
        for line in lines {
            report.take(line);
        }
        report
    }

    fn take(&mut self, line: &str) {
        let Ok(mut value) = serde_json::from_str::<Value>(line) else {
            self.unread.push(line.to_owned());
            return;
        };
        if let Some(Value::String(of)) = value.as_object_mut().and_then(|object| object.remove("of")) {
            self.schedules.entry(of).or_default().push(value.to_string());
            return;
        }
        self.raw.push(line.to_owned());
        if value.get("boot").is_some() || value.get("sleeper").is_some() {
            return;
        }
        if value.get("done").is_some() {
            self.done = true;
            return;
        }
        match serde_json::from_value(value) {
            Ok(Line::Run(run)) => self.runs.push(*run),
            Ok(Line::Trial(Trial { end: None, name })) => self.trials.push((Trial { name, end: None }, Vec::new())),
            Ok(Line::Trial(trial)) => match self.trials.last_mut() {
                Some((last, _)) if last.name == trial.name => last.end = trial.end,
                _ => self.unread.push(line.to_owned()),
            },
            Ok(Line::Report(misdeed)) => match self.trials.last_mut() {
                Some((_, misdeeds)) if self.runs.is_empty() => misdeeds.push(misdeed),
                _ => self.misdeeds.push(misdeed),
            },
            Err(_) => self.unread.push(line.to_owned()),
        }
    }

    /// Everything but the schedules in one file, and each schedule in its own, with a map of it.
    pub(super) fn store(&self, directory: &Path) -> Result<(), String> {
        let write = |name: &str, lines: &[String]| {
            let path = directory.join(name);
            fs::write(&path, lines.join("\n") + "\n").map_err(|error| format!("cannot write {}: {error}", path.display()))
        };
        write("results.jsonl", &self.raw)?;
        self.schedules.iter().try_for_each(|(policy, lines)| {
            write(&format!("{policy}.schedule.jsonl"), lines)?;
            draw(policy, lines, &directory.join(format!("{policy}.png")))
        })
    }

    /// What is not as it must be. Counts, order and exactness: nothing here depends on how fast anything is.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults: Vec<_> = self.unread.iter().map(|line| format!("says {line}")).collect();
        if !self.done {
            faults.push("its last line is missing".into());
        }
        if self.whole && self.runs.len() < 100 {
            faults.push(format!("ran {} cells only", self.runs.len()));
        }
        faults.extend(self.misdeeds.iter().map(|misdeed| format!("VM {} {}", misdeed.vm, misdeed.what)));
        faults.extend(self.runs.iter().flat_map(Run::faults));
        for (name, expected) in EXPECTED.into_iter().filter(|_| self.tried) {
            match self.trials.iter().find(|(trial, _)| trial.name == name) {
                None => faults.push(format!("{name}: was not tried")),
                Some((trial, misdeeds)) => faults.extend(trial.faults(misdeeds, expected)),
            }
        }
        faults
    }
}

impl Trial {
    fn faults(&self, misdeeds: &[Misdeed], expected: &str) -> Vec<String> {
        let name = &self.name;
        let mut faults = Vec::new();
        let mut check = |holds: bool, what: String| {
            if !holds {
                faults.push(format!("{name}: {what}"));
            }
        };
        let named = misdeeds.iter().any(|misdeed| misdeed.vm == 1 && misdeed.vcpu.is_some() && misdeed.what.contains(expected));
        check(named, format!("no vCPU of VM 1 is reported with `{expected}`"));
        check(misdeeds.iter().all(|misdeed| misdeed.vm == 1), "the other VM is reported as well".into());
        match &self.end {
            None => check(false, "has no end".into()),
            Some(end) => {
                check(!end.other_stopped && end.other_exact, "the other VM did not come to its right end".into());
                let (sections, expected) = (end.other_sections, end.other_expected);
                check(sections == expected, format!("the other VM did {sections} sections of {expected}"));
                check(end.other_forced == 0, format!("{} sleeps of the other VM lasted to the deadline", end.other_forced));
            }
        }
        faults
    }
}

impl Run {
    fn name(&self) -> String {
        let Self { lock, overcommit, .. } = self;
        format!("{lock} {overcommit}x {}", self.host())
    }

    fn host(&self) -> String {
        let ahead = if self.wake_ahead > 0 { format!(" +{}", self.wake_ahead) } else { String::new() };
        let window = if self.adapting { " ~" } else { "" };
        format!("{}{ahead}{window}", self.policy)
    }

    fn faults(&self) -> Vec<String> {
        let checks = [
            (self.exact, "lost a critical section"),
            (!self.stopped, "did not come to its end"),
            (self.forced == 0, "slept to the deadline"),
            (self.not_drained == 0, "left a sleeper asleep when the vCPU it waits for got a CPU"),
            (self.refused == 0, "was refused a doorbell"),
            (self.lock != "ticket" || self.in_sequence, "served tickets out of order"),
            (self.policy != "park-on-previous" || self.before_previous == 0, "woke a waiter before the one with the ticket before"),
            (self.overcommit > 1 || self.parks + self.halts == 0, "slept with a CPU for each vCPU"),
        ];
        checks.into_iter().filter(|(holds, _)| !holds).map(|(_, what)| format!("{}: {what}", self.name())).collect()
    }

    fn per_acquisition(&self, count: u64) -> f64 {
        count as f64 / self.acquired_in_all.max(1) as f64
    }

    fn order(&self) -> String {
        match (self.wakes, self.before_previous) {
            (0, _) => "-".into(),
            (_, 0) => "yes".into(),
            (wakes, wrong) => format!("{:.0} %", 100.0 * (wakes - wrong) as f64 / wakes as f64),
        }
    }

    fn first(&self) -> String {
        match self.wakes {
            0 => "-".into(),
            wakes => format!("{:.0} %", 100.0 * (wakes - self.before_earlier) as f64 / wakes as f64),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header([
            "lock",
            "over",
            "waiters",
            "policy",
            "acq/ms",
            "hand-over",
            "p99",
            "exits/acq",
            "parks",
            "wakes",
            "in order",
            "first",
            "holder off",
            "forced",
        ]);
        for run in &self.runs {
            let us = |ns: u64| format!("{:.1} us", ns as f64 / 1e3);
            let cells = [
                run.lock.clone(),
                format!("{}x", run.overcommit),
                if run.halting { "halt" } else { "spin" }.into(),
                run.host(),
                format!("{:.1}", run.acquired as f64 * 1e6 / run.ns.max(1) as f64),
                us(run.hand_over_ns),
                us(run.hand_over_p99_ns),
                format!("{:.2}", run.per_acquisition(run.pause_loops)),
                run.parks.to_string(),
                run.wakes.to_string(),
                run.order(),
                run.first(),
                run.holder_preempted.to_string(),
                run.forced.to_string(),
            ];
            let right =
                |(column, text)| Cell::new(text).set_alignment(if column < 4 { CellAlignment::Left } else { CellAlignment::Right });
            table.add_row(cells.into_iter().enumerate().map(right));
        }
        writeln!(f, "{table}")?;
        writeln!(
            f,
            "times are virtual: an emulated instruction of any CPU is a nanosecond. acq/ms: acquisitions per ms; hand-over: from"
        )?;
        writeln!(
            f,
            "release to next acquisition; in order: woken behind the waiter before; first: no earlier ticket was asleep then;"
        )?;
        writeln!(
            f,
            "holder off: pause-loop exits whose lock's holder was off its CPU; +1: wakes one sleeper early; ~: adaptive window"
        )?;
        self.compare(f)?;
        for (trial, misdeeds) in &self.trials {
            let first = misdeeds.first().map_or("nothing", |misdeed| &misdeed.what);
            let well = trial.end.as_ref().is_some_and(|end| end.other_exact && !end.other_stopped);
            writeln!(f, "{}: {first}; the other VM {}", trial.name, if well { "went on" } else { "DID NOT go on" })?;
        }
        Ok(())
    }
}

impl Report {
    /// Parking against the others, where it matters most. Shown, not judged.
    fn compare(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for halting in [false, true] {
            let find = |policy: &str| {
                self.runs.iter().find(|run| {
                    run.lock == "ticket"
                        && run.overcommit == 4
                        && run.halting == halting
                        && run.policy == policy
                        && run.wake_ahead == 0
                        && !run.adapting
                })
            };
            let Some(parked) = find("park-on-previous") else { continue };
            for other in ["ignore", "yield", "directed", "directed-last-boosted", "park-on-holder"].into_iter().filter_map(find) {
                let times = |a: f64, b: f64| if b > 0.0 { a / b } else { f64::NAN };
                writeln!(
                    f,
                    "ticket 4x, waiters {}: {} hands over in {:.1} times the time of park-on-previous, with {:.1} times the exits",
                    if halting { "halt" } else { "spin" },
                    other.host(),
                    times(other.hand_over_ns as f64, parked.hand_over_ns as f64),
                    times(other.per_acquisition(other.pause_loops), parked.per_acquisition(parked.pause_loops)),
                )?;
            }
        }
        Ok(())
    }
}

/// The map of who ran where under a policy.
fn draw(policy: &str, lines: &[String], picture: &Path) -> Result<(), String> {
    let schedule = Schedule::read(&lines.join("\n")).map_err(|error| format!("the schedule of {policy}: {error}"))?;
    let Some((from, to)) = schedule.extent() else { return Ok(()) };
    // More than that is too much to see.
    let to = to.min(from + 1_500_000);
    let cpus = schedule.cpus();
    let title = format!("Who ran where: {policy}");
    let map = Map { title, subtitle: "hv-testbed under emulation, virtual time".into(), schedule, cpus, from, to };
    pvlock_sim::picture::save(picture, &map).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(extra: &[&str]) -> Vec<String> {
        let mut lines = vec![r#"{"boot":{"cpus":2,"tsc_hz":1000000000}}"#.to_owned()];
        for (name, what) in EXPECTED {
            lines.push(format!(r#"{{"trial":{{"name":"{name}","begins":true}}}}"#));
            lines.push(format!(r#"{{"report":{{"vm":1,"vcpu":0,"rip":"0x1","what":"{what}"}}}}"#));
            lines.push(format!(
                r#"{{"trial":{{"name":"{name}","reports":1,"other_sections":8,"other_expected":8,"other_exact":true,"other_stopped":false,"other_forced":0}}}}"#
            ));
        }
        lines.extend(extra.iter().map(|line| (*line).to_owned()));
        lines.push(r#"{"done":true}"#.to_owned());
        lines
    }

    const RUN: &str = r#"{"run":{"lock":"ticket","policy":"park-on-previous","wake_ahead":0,"halting":false,"adapting":false,"overcommit":4,"ns":1000000,"acquired":10,"acquired_in_all":20,"hand_over_ns":3,"hand_over_p99_ns":4,"pause_loops":5,"holder_preempted":6,"parks":7,"wakes":7,"before_previous":0,"before_earlier":1,"not_drained":0,"halts":0,"forced":0,"refused":0,"exact":true,"in_sequence":true,"stopped":false}}"#;

    fn faults(lines: &[String]) -> Vec<String> {
        Report::read(lines, false, true).faults()
    }

    #[test]
    fn a_healthy_boot_has_no_faults_and_is_shown() {
        let lines = lines(&[RUN, r#"{"of":"yield","span":{"cpu":0,"start":1,"end":2,"vm":0,"vcpu":3}}"#]);
        assert_eq!(faults(&lines), Vec::<String>::new());
        let report = Report::read(&lines, false, true);
        assert!(report.to_string().contains("park-on-previous"));
        assert_eq!(report.schedules["yield"], [r#"{"span":{"cpu":0,"end":2,"start":1,"vcpu":3,"vm":0}}"#]);
    }

    #[test]
    fn each_thing_that_must_not_be_is_a_fault() {
        let broken = [
            (r#""exact":true"#, r#""exact":false"#),
            (r#""stopped":false"#, r#""stopped":true"#),
            (r#""forced":0"#, r#""forced":1"#),
            (r#""not_drained":0"#, r#""not_drained":1"#),
            (r#""refused":0"#, r#""refused":2"#),
            (r#""in_sequence":true"#, r#""in_sequence":false"#),
            (r#""before_previous":0"#, r#""before_previous":1"#),
            (r#""overcommit":4"#, r#""overcommit":1"#),
        ];
        for (good, bad) in broken {
            let run = RUN.replace(good, bad);
            assert_ne!(run, RUN);
            assert_eq!(faults(&lines(&[&run])).len(), 1, "{bad}");
        }
    }

    #[test]
    fn a_boot_that_says_too_little_or_something_strange_fails() {
        let good = lines(&[RUN]);
        assert_eq!(faults(&good[..good.len() - 1]), ["its last line is missing"]);
        assert_eq!(faults(&lines(&["hypervisor: exception 13"])), ["says hypervisor: exception 13"]);
        assert_eq!(Report::read(&good, true, true).faults(), ["ran 1 cells only"]);
        let without: Vec<_> = good.iter().filter(|line| !line.contains("triple fault")).cloned().collect();
        assert_eq!(faults(&without), ["triple-fault: no vCPU of VM 1 is reported with `triple fault`"]);
        let other: Vec<_> = good.iter().map(|line| line.replacen(r#""other_sections":8"#, r#""other_sections":7"#, 1)).collect();
        assert_eq!(faults(&other).len(), EXPECTED.len());
    }
}
