//! The command as a user types it. Runs on threads, so that these tests need no KVM.

use serde_json::Value;
use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Generous: a hang is a failure, a slow machine is not.
const LIMIT: Duration = Duration::from_secs(60);

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvlock"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn pvlock(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the command was built")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn json_is_one_object_with_every_promised_key() {
    let arguments = ["run", "--backend", "threads", "--seconds", "0.2", "--overcommit", "1,2", "--json"];
    let output = pvlock(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(object["backend"], "threads");
    assert_eq!(object["kvm_kind"], Value::Null);
    assert!(object["pcpus"].as_u64().unwrap() > 0);
    let rows = object["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["lock"].as_str().unwrap()).collect();
    assert_eq!(names[..names.len() / 2], names[names.len() / 2..], "every lock at both overcommits");
    assert!(["spin-ticket", "spin-tas", "ticket"].iter().all(|name| names.contains(name)), "{names:?}");
    for row in rows {
        for key in ["vcpus", "overcommit", "ops_per_s", "share_of_bound", "jain", "halts", "kicks", "spurious", "cpu_s", "cpu_idle"]
        {
            assert!(row[key].is_number(), "{key} in {row}");
        }
        for key in ["p50", "p999", "max"] {
            assert!(row["wait_us"][key].is_number(), "{key} in {row}");
        }
        assert_eq!(row["exact"], true, "{row}");
        assert_eq!(row["forced"], 0, "{row}");
    }
}

#[test]
fn a_checking_run_shows_the_order() {
    let output = pvlock(&["--backend", "threads", "--seconds", "0.2", "--vcpus", "4", "--locks", "ticket", "--check"]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    assert!(table.contains("strict ("), "{table}");
    assert!(table.contains("no VM"), "says where it ran: {table}");
}

#[test]
fn the_table_has_every_lock_and_says_what_the_columns_mean() {
    let output = pvlock(&["--backend", "threads", "--seconds", "0.1", "--overcommit", "1", "--repeat", "3"]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    for word in ["spin-ticket", "spin-tas", "ticket", "exact", "bound =", "spread"] {
        assert!(table.contains(word), "{word} in {table}");
    }
}

#[test]
fn wrong_options_get_one_error_that_says_what_to_do() {
    for (arguments, hint) in [
        (["--locks", "mcs5"], "choose from spin-ticket"),
        (["--overcommit", "0"], "whole number from 1"),
        (["--vcpus", "65"], "1..=64"),
        (["--seconds", "0"], "above 0"),
        (["--seconds", "nan"], "above 0"),
        (["--cpl", "1"], "possible values"),
        (["--workload", "x"], "choose from counter"),
        (["--backend", "xen"], "possible values"),
        (["--repeat", "0"], "1..=1000"),
    ] {
        let output = pvlock(&arguments);
        assert!(!output.status.success(), "{arguments:?}");
        let error = text(&output.stderr);
        assert!(error.contains(hint), "{arguments:?}: {error}");
        assert!(!error.contains("panicked"), "{arguments:?}: {error}");
    }
}

#[test]
fn ctrl_c_ends_the_run_and_prints_what_there_is() {
    let arguments = ["--backend", "threads", "--seconds", "0.3", "--vcpus", "2", "--repeat", "1000", "--locks", "ticket,spin-tas"];
    let mut child = command(&arguments).spawn().expect("the command was built");
    // Until it says where it runs, so that the signal does not come before the handler; then let a row be finished.
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0; 6];
    stdout.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"pvlock");
    std::thread::sleep(Duration::from_secs(1));
    // SAFETY: sends a signal to our own child, which has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) }, 0);
    let asked = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(asked.elapsed() < LIMIT, "still running");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.contains("Interrupted"), "{rest}");
    assert!(rest.contains("ticket"), "the rows that were finished: {rest}");
}
