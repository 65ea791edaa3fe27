//! The end of a run: faults, skips, one row for each step, and the last line.

use std::fmt;

use crate::libtest::Counts;
use crate::run::Outcome;

/// What became of all steps.
pub(crate) struct Summary {
    /// Whether a skipped test is a failure.
    strict: bool,
    rows: Vec<Row>,
}

struct Row {
    name: &'static str,
    seconds: Option<f64>,
    counts: Option<Counts>,
    skips: Vec<String>,
    notes: Vec<String>,
    faults: Vec<String>,
}

impl Summary {
    pub(crate) fn new(strict: bool) -> Self {
        Self { strict, rows: Vec::new() }
    }

    /// Judges a step that ran.
    pub(crate) fn add(&mut self, outcome: Outcome) {
        let Outcome { name, time, counts, skips, notes, mut faults } = outcome;
        if counts.is_some_and(Counts::ran_none) {
            faults.push("ran no test".into());
        }
        if counts.is_some_and(|counts| counts.failed > 0) && faults.is_empty() {
            faults.push("tests failed, yet the command succeeded".into());
        }
        let row = Row { name, seconds: Some(time.as_secs_f64()), counts, skips, notes, faults };
        self.rows.push(match row.skipped() {
            skipped if self.strict && skipped > 0 => {
                let fault = format!("{skipped} skipped, and with CI=true nothing may be that this machine should have");
                Row { faults: [row.faults, vec![fault]].concat(), ..row }
            }
            _ => row,
        });
    }

    /// Notes a step that was not even begun.
    pub(crate) fn not_run(&mut self, name: &'static str) {
        self.rows.push(Row {
            name,
            seconds: None,
            counts: None,
            skips: Vec::new(),
            notes: Vec::new(),
            faults: vec!["not run".into()],
        });
    }

    /// Whether something ran, and nothing failed.
    pub(crate) fn is_success(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(|row| row.faults.is_empty())
    }
}

impl Row {
    fn skipped(&self) -> usize {
        self.counts.map_or(0, |counts| counts.ignored) + self.skips.len()
    }

    /// libtest counts a test that skipped itself as passed.
    fn passed(&self) -> usize {
        self.counts.map_or(0, |counts| counts.passed.saturating_sub(self.skips.len()))
    }

    /// A step that fails without a failing test is one failure.
    fn failed(&self) -> usize {
        self.counts.map_or(0, |counts| counts.failed).max(usize::from(!self.faults.is_empty()))
    }

    fn result(&self) -> &'static str {
        match self.seconds {
            None => "not run",
            Some(_) if self.faults.is_empty() => "ok",
            Some(_) => "FAILED",
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            row.skips.iter().try_for_each(|skip| writeln!(f, "SKIPPED: {}: {skip}", row.name))?;
        }
        for row in &self.rows {
            row.notes.iter().try_for_each(|note| writeln!(f, "{note}"))?;
        }
        for row in self.rows.iter().filter(|row| row.seconds.is_some()) {
            row.faults.iter().try_for_each(|fault| writeln!(f, "FAILED: {}: {fault}", row.name))?;
        }
        writeln!(f, "\n{:<12} {:<8} {:>8} {:>8} {:>8}", "step", "result", "seconds", "passed", "skipped")?;
        for row in &self.rows {
            let seconds = row.seconds.map_or("-".into(), |seconds| format!("{seconds:.1}"));
            let tests = |number: usize| row.counts.map_or("-".into(), |_| number.to_string());
            let (passed, skipped) = (tests(row.passed()), tests(row.skipped()));
            writeln!(f, "{:<12} {:<8} {seconds:>8} {passed:>8} {skipped:>8}", row.name, row.result())?;
        }
        let sum = |count: fn(&Row) -> usize| self.rows.iter().map(count).sum::<usize>();
        writeln!(f, "\n{} passed, {} failed, {} skipped", sum(Row::passed), sum(Row::failed), sum(Row::skipped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn outcome(counts: Option<Counts>, skips: &[&str], faults: &[&str]) -> Outcome {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Outcome {
            name: "step",
            time: Duration::from_millis(1500),
            counts,
            skips: owned(skips),
            notes: Vec::new(),
            faults: owned(faults),
        }
    }

    fn tests(passed: usize, failed: usize, ignored: usize) -> Option<Counts> {
        Some(Counts { passed, failed, ignored })
    }

    /// Success and the last line.
    fn verdict(strict: bool, outcomes: impl IntoIterator<Item = Outcome>) -> (bool, String) {
        let mut summary = Summary::new(strict);
        outcomes.into_iter().for_each(|outcome| summary.add(outcome));
        let last = summary.to_string().lines().last().expect("a last line").to_owned();
        (summary.is_success(), last)
    }

    #[test]
    fn steps_are_summed() {
        let outcomes = [outcome(None, &[], &[]), outcome(tests(3, 0, 0), &[], &[]), outcome(tests(4, 0, 0), &[], &[])];
        assert_eq!(verdict(true, outcomes), (true, "7 passed, 0 failed, 0 skipped".into()));
    }

    #[test]
    fn nothing_at_all_is_no_success() {
        assert_eq!(verdict(false, []), (false, "0 passed, 0 failed, 0 skipped".into()));
    }

    #[test]
    fn a_step_that_should_test_and_ran_none_fails() {
        assert_eq!(verdict(false, [outcome(tests(0, 0, 0), &[], &[])]), (false, "0 passed, 1 failed, 0 skipped".into()));
        assert_eq!(verdict(false, [outcome(tests(0, 0, 2), &[], &[])]), (false, "0 passed, 1 failed, 2 skipped".into()));
    }

    #[test]
    fn a_skip_is_no_pass_and_fails_only_where_kvm_must_work() {
        let all_skipped = || [outcome(tests(2, 0, 1), &["a: no KVM", "b: no KVM"], &[])];
        assert_eq!(verdict(false, all_skipped()), (true, "0 passed, 0 failed, 3 skipped".into()));
        assert_eq!(verdict(true, all_skipped()), (false, "0 passed, 1 failed, 3 skipped".into()));
        assert_eq!(verdict(true, [outcome(tests(2, 0, 1), &[], &[])]), (false, "2 passed, 1 failed, 1 skipped".into()));
    }

    #[test]
    fn failures_count_by_test_or_else_by_step() {
        let outcomes = [outcome(None, &[], &["exit status: 1"]), outcome(tests(5, 2, 0), &[], &["exit status: 101"])];
        assert_eq!(verdict(false, outcomes), (false, "5 passed, 3 failed, 0 skipped".into()));
        assert_eq!(verdict(false, [outcome(tests(5, 2, 0), &[], &[])]), (false, "5 passed, 2 failed, 0 skipped".into()));
    }

    #[test]
    fn an_interrupted_run_is_no_success_and_shows_what_did_not_run() {
        let mut summary = Summary::new(false);
        summary.add(outcome(tests(1, 0, 0), &[], &[]));
        summary.not_run("later");
        assert!(!summary.is_success());
        assert!(summary.to_string().contains("later        not run"));
    }

    #[test]
    fn reasons_come_before_the_table() {
        let mut summary = Summary::new(false);
        summary.add(outcome(tests(1, 0, 0), &["boot: no KVM"], &["exit status: 101: cargo test"]));
        let text = summary.to_string();
        assert!(text.starts_with("SKIPPED: step: boot: no KVM\nFAILED: step: exit status: 101: cargo test\n"), "{text}");
    }
}
