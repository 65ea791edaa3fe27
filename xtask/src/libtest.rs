//! What test programs say about themselves.

use std::ops::AddAssign;

/// Tests of one or more test programs, as libtest counts them: a test that skipped itself counts as passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) ignored: usize,
}

impl Counts {
    /// From `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`; any other
    /// line gives nothing.
    pub(crate) fn of_line(line: &str) -> Option<Self> {
        let (verdict, counts) = line.trim_start().strip_prefix("test result: ")?.split_once(". ")?;
        // The verdict may be coloured.
        if !verdict.contains("ok") && !verdict.contains("FAILED") {
            return None;
        }
        let mut found = Self::default();
        let mut seen = 0;
        for part in counts.split(';') {
            let Some((number, what)) = part.trim().split_once(' ') else { continue };
            let field = match what {
                "passed" => &mut found.passed,
                "failed" => &mut found.failed,
                "ignored" => &mut found.ignored,
                _ => continue,
            };
            *field = number.parse().ok()?;
            seen += 1;
        }
        (seen == 3).then_some(found)
    }

    /// Whether no test ran at all. Ignored ones did not run.
    pub(crate) fn ran_none(self) -> bool {
        self.passed + self.failed == 0
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

/// The entries of a skip log, one for each test that could not run. Tests write at the same time, so a line may begin inside
/// another; no entry is lost by that.
pub(crate) fn skips(log: &str) -> Vec<String> {
    log.split("SKIPPED:").skip(1).map(|entry| entry.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(passed: usize, failed: usize, ignored: usize) -> Option<Counts> {
        Some(Counts { passed, failed, ignored })
    }

    #[test]
    fn result_lines_are_read() {
        let ok = "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 7 filtered out; finished in 0.04s";
        assert_eq!(Counts::of_line(ok), counts(12, 0, 3));
        let failed = "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s";
        assert_eq!(Counts::of_line(failed), counts(1, 2, 0));
        let coloured = "test result: \u{1b}[32mok\u{1b}(B\u{1b}[m. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(Counts::of_line(coloured), counts(5, 0, 0));
    }

    #[test]
    fn other_lines_are_not() {
        for line in [
            "",
            "running 3 tests",
            "test a_test ... ok",
            "test result: ",
            "test result: ok.",
            "test result: ok. many passed; 0 failed; 0 ignored",
            "test result: ok. 3 passed",
            "the test result: ok. 3 passed; 0 failed; 0 ignored",
        ] {
            assert_eq!(Counts::of_line(line), None, "{line:?}");
        }
    }

    #[test]
    fn counts_add_up() {
        let mut sum = Counts::default();
        assert!(sum.ran_none());
        sum += Counts { ignored: 4, ..Counts::default() };
        assert!(sum.ran_none(), "an ignored test did not run");
        sum += Counts { passed: 2, failed: 1, ignored: 1 };
        assert_eq!(sum, Counts { passed: 2, failed: 1, ignored: 5 });
        assert!(!sum.ran_none());
    }

    #[test]
    fn each_entry_of_the_log_is_a_skip() {
        assert!(skips("").is_empty());
        assert_eq!(skips("SKIPPED: boot: no KVM\nSKIPPED: other: why\n  so\n"), ["boot: no KVM", "other: why so"]);
        assert_eq!(skips("SKIPPED: boot: no KVMSKIPPED: other: why\n\n"), ["boot: no KVM", "other: why"]);
    }
}
