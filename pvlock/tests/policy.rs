//! `pvlock run --policy` as a user types it. Runs on threads, so that these tests need no KVM.

use pvlock_host::Policy;
use std::process::{Command, Output};

fn pvlock(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pvlock")).args(arguments).output().expect("the command was built")
}

fn run(policy: &str) -> Output {
    pvlock(&[
        "run",
        "--backend",
        "threads",
        "--vcpus",
        "4",
        "--locks",
        "ticket",
        "--seconds",
        "0.1",
        "--inside",
        "20000",
        "--policy",
        policy,
    ])
}

#[test]
fn every_policy_can_be_chosen_and_says_what_it_decided() {
    for (name, ..) in Policy::NAMED {
        let output = run(name);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}: {text}{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(text.contains("reports of spinning; decisions: "), name != "ignore", "{name}: {text}");
    }
}

#[test]
fn the_doctor_has_one_line_for_each_thing_and_says_what_follows() {
    let output = pvlock(&["doctor"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success());
    for what in ["/dev/kvm", "pause-loop exits", "huge pages", "CPUs", "cgroup quota"] {
        assert_eq!(text.lines().filter(|line| line.starts_with(what)).count(), 1, "{what}: {text}");
    }
    assert!(text.lines().all(|line| line.contains(": ")), "{text}");
}

#[test]
fn an_unknown_policy_is_refused_with_the_names_of_those_that_exist() {
    let output = run("guess");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    for (name, ..) in Policy::NAMED {
        assert!(text.contains(name), "{name} is missing in {text}");
    }
}
