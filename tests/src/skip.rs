//! Tests that find out that they cannot run here.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::{env, thread};

/// Says that the calling test cannot run on this machine. Call it once in a test and from the test's own thread, then return.
///
/// `cargo xtask test` counts the test as skipped and prints the reason.
///
/// # Panics
///
/// With `CI=true` and a `/dev/kvm` present: there, everything must run. Also if the log named by `PVLOCK_SKIP_LOG` cannot be
/// written, because the test would count as passed.
pub fn skip(reason: impl Display) {
    let ci = env::var("CI").is_ok_and(|value| value == "true");
    assert!(!(ci && Path::new("/dev/kvm").exists()), "CI=true and a /dev/kvm is present, yet this cannot run: {reason}");
    let line = entry(thread::current().name().unwrap_or("a test"), &reason.to_string());
    eprint!("{line}");
    if let Some(log) = env::var_os("PVLOCK_SKIP_LOG") {
        append(Path::new(&log), &line).unwrap_or_else(|error| panic!("cannot write {}: {error}", log.display()));
    }
}

fn entry(test: &str, reason: &str) -> String {
    let reason: Vec<_> = reason.split_whitespace().collect();
    format!("SKIPPED: {test}: {}\n", reason.join(" "))
}

/// In one write, so that lines of tests that run at the same time stay whole.
fn append(log: &Path, line: &str) -> io::Result<()> {
    OpenOptions::new().create(true).append(true).open(log)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_one_line() {
        assert_eq!(entry("boot", "no\n  KVM"), "SKIPPED: boot: no KVM\n");
    }

    #[test]
    fn entries_are_appended() {
        let log = env::temp_dir().join(format!("pvlock-skip-{}", std::process::id()));
        append(&log, "one\n").and_then(|()| append(&log, "two\n")).expect("written");
        let text = std::fs::read_to_string(&log).expect("readable");
        std::fs::remove_file(&log).expect("removed");
        assert_eq!(text, "one\ntwo\n");
    }
}
