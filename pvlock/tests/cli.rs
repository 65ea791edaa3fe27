//! The command as a user types it. Runs on threads, so that these tests need no KVM.

mod common;

use common::{Directory, command, interrupt, text};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::time::Duration;

fn pvlock(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the command was built")
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
    let all = ["spin-ticket", "spin-tas", "mcs", "ticket", "preemptable", "parking-lot", "std"];
    assert_eq!(names[..names.len() / 2], all);
    for row in rows {
        for key in ["vcpus", "overcommit", "ops_per_s", "share_of_bound", "jain", "halts", "kicks", "spurious", "cpu_s", "cpu_idle"]
        {
            assert!(row[key].is_number(), "{key} in {row}");
        }
        for key in ["p50", "p999", "max"] {
            assert!(row["wait_us"][key].is_number(), "{key} in {row}");
        }
        let counted = !["parking-lot", "std"].contains(&row["lock"].as_str().unwrap());
        assert_eq!(row["pauses_per_op"].is_number(), counted, "{row}");
        assert_eq!(row["exact"], true, "{row}");
        assert_eq!(row["forced"], 0, "{row}");
    }
}

/// As in `pvlock | head -1`.
#[test]
fn who_reads_no_further_ends_the_program_without_a_panic() {
    let mut child = command(&["run", "--backend", "threads", "--seconds", "0.2"]).spawn().expect("the command was built");
    let mut first = [0];
    // The heading is there at once, the table comes when the pipe is gone.
    child.stdout.take().expect("piped").read_exact(&mut first).expect("a heading");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.signal(), text(&output.stderr)), (Some(libc::SIGPIPE), String::new()));
}

/// A place for pictures.
struct Stem(Directory);

impl Stem {
    fn new(test: &str) -> Self {
        Self(Directory::new(test))
    }

    fn argument(&self) -> String {
        self.0.0.join("sweep").display().to_string()
    }

    /// Checks that all four pictures are there and well formed, and name these locks.
    fn check(&self, locks: &[&str]) {
        for name in ["bound", "waits"] {
            let svg = std::fs::read_to_string(self.0.0.join(format!("sweep-{name}.svg"))).unwrap();
            let document = roxmltree::Document::parse(&svg).expect("well-formed XML");
            assert_eq!(document.root_element().tag_name().name(), "svg");
            let text: Vec<_> = document.descendants().filter_map(|node| node.text()).map(str::trim).collect();
            for word in locks.iter().chain(&["100 %", "10 %"]) {
                assert!(text.contains(word), "{word} in {text:?}");
            }
            let png = std::io::BufReader::new(File::open(self.0.0.join(format!("sweep-{name}.png"))).unwrap());
            let mut image = png::Decoder::new(png).read_info().expect("a PNG header");
            let mut pixels = vec![0; image.output_buffer_size().expect("a size")];
            let frame = image.next_frame(&mut pixels).expect("a whole PNG");
            assert!(frame.width >= 1000 && frame.height >= 500, "{frame:?}");
            // Black text on white, and colours.
            let has = |test: fn(&[u8]) -> bool| pixels.chunks_exact(3).any(test);
            assert!(has(|pixel| pixel == [0; 3]) && has(|pixel| pixel == [255; 3]) && has(|pixel| pixel[0] != pixel[2]));
        }
    }
}

#[test]
fn a_sweep_draws_pictures_and_keeps_the_distribution_of_waits() {
    let stem = Stem::new("sweep");
    let plot = stem.argument();
    let arguments = ["run", "--backend", "threads", "--sweep", "--plot", &plot, "--seconds", "0.2", "--repeat", "2"];
    let output =
        command(&arguments).args(["--overcommit", "1,2", "--locks", "spin-tas,std,preemptable", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    stem.check(&["spin-tas", "std", "preemptable"]);

    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(object["pictures"].as_array().unwrap().len(), 4);
    let long = object["sweep"]["long_inside"].as_u64().unwrap();
    let us = long as f64 * object["sweep"]["ns_per_iteration"].as_f64().unwrap() / 1000.0;
    assert!((9.9..=10.1).contains(&us) || long == 201, "{us}");
    let rows = object["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3 * 2 * 2);
    for row in rows {
        assert!([200, long].contains(&row["inside"].as_u64().unwrap()), "{row}");
        assert!(row["share_of_bound"].as_f64().unwrap() > 0.0, "{row}");
        let waits = row["waits"].as_array().unwrap();
        let edges: Vec<_> =
            waits.iter().map(|bucket| (bucket["from_us"].as_f64().unwrap(), bucket["to_us"].as_f64().unwrap())).collect();
        assert!(edges.iter().all(|(from, to)| from < to) && edges.is_sorted(), "{edges:?}");
        let count: u64 = waits.iter().map(|bucket| bucket["count"].as_u64().unwrap()).sum();
        assert!(count > 0, "{row}");
        // The row is the median repeat; the distribution is that of both.
        let worst = row["wait_us"]["max"].as_f64().unwrap();
        assert!(edges.last().unwrap().1 >= 0.99 * worst, "{row}");
    }
}

#[test]
fn a_sweep_says_what_it_runs_and_where_its_pictures_are() {
    let stem = Stem::new("sweep-table");
    let plot = stem.argument();
    let arguments = ["--backend", "threads", "--sweep", "--plot", &plot, "--seconds", "0.2", "--locks", "std,preemptable"];
    let output = pvlock(&arguments);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    for word in ["short sections", "long sections", "iterations", "PAUSE/op", "sweep-bound.svg", "sweep-waits.png"] {
        assert!(table.contains(word), "{word} in {table}");
    }
    stem.check(&["std", "preemptable"]);

    let output = pvlock(&["--backend", "threads", "--sweep", "--plot", "/no/such/place", "--seconds", "0.1", "--locks", "std"]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("cannot write the picture /no/such/place-bound.svg"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("long sections"), "the table is not lost");
}

#[test]
fn ctrl_c_in_a_sweep_draws_what_there_is() {
    let stem = Stem::new("sweep-ctrl-c");
    let plot = stem.argument();
    let arguments =
        ["--backend", "threads", "--sweep", "--plot", &plot, "--seconds", "0.3", "--repeat", "1000", "--locks", "ticket"];
    let (code, rest) = interrupted(&arguments);
    assert_eq!(code, Some(130));
    assert!(rest.contains("Interrupted"), "{rest}");
    stem.check(&["ticket"]);
}

#[test]
fn a_lock_that_needs_an_operating_system_is_refused_in_a_vm() {
    if let Err(error) = pvlock::vm::open() {
        pvlock_tests::skip(&error);
        return;
    }
    for lock in ["parking-lot", "std"] {
        let output = pvlock(&["--backend", "kvm", "--locks", &format!("ticket,{lock}")]);
        assert!(!output.status.success());
        let error = text(&output.stderr);
        assert!(error.contains(lock) && error.contains("--backend threads"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn eventfds_are_refused_without_a_vm() {
    let output = pvlock(&["--backend", "threads", "--notify", "ioeventfd"]);
    assert!(!output.status.success());
    let error = text(&output.stderr);
    assert!(error.contains("--backend kvm") && error.contains("--notify poller"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn a_poller_can_be_asked_for() {
    let arguments = ["--backend", "threads", "--seconds", "0.1", "--vcpus", "2", "--locks", "ticket", "--notify", "poller"];
    let output = pvlock(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
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
fn a_checking_run_can_be_traced() {
    let stem = Stem::new("trace");
    let path = stem.0.0.join("trace.json").display().to_string();
    let arguments = ["--backend", "threads", "--seconds", "0.2", "--vcpus", "3", "--locks", "ticket", "--check", "--trace", &path];
    let output = pvlock(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let trace = std::fs::read_to_string(&path).unwrap();
    assert_eq!(pvlock_sim::trace::check(&trace), Ok(()));
    let object: Value = serde_json::from_str(&trace).unwrap();
    let events = object["traceEvents"].as_array().unwrap();
    let with = |ph: &str| events.iter().filter(|event| event["ph"] == ph).collect::<Vec<_>>();
    assert!(with("X").iter().all(|event| event["name"].as_str().unwrap().starts_with("wait for lock 0, ticket ")));
    let threads: std::collections::BTreeSet<_> = with("i").iter().map(|event| event["tid"].as_u64().unwrap()).collect();
    // On a busy machine a vCPU may come too late for the first acquisitions.
    assert!(!threads.is_empty() && threads.iter().all(|&thread| thread < 3), "{threads:?}");
}

#[test]
fn the_table_has_every_lock_and_says_what_the_columns_mean() {
    let output = pvlock(&["--backend", "threads", "--seconds", "0.1", "--overcommit", "1", "--repeat", "3"]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    for word in ["spin-ticket", "spin-tas", "mcs", "parking-lot", "std", "preemptable", "exact", "bound =", "spread", "PAUSE/op"] {
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
        (["--plot", "x"], "--sweep"),
        (["--trace", "x"], "--check"),
        (["--notify", "x"], "ioeventfd"),
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
    let (code, rest) = interrupted(&arguments);
    assert_eq!(code, Some(130));
    assert!(rest.contains("Interrupted"), "{rest}");
    assert!(rest.contains("ticket"), "the rows that were finished: {rest}");
}

#[test]
fn a_soak_says_its_seed_and_what_it_came_to() {
    let output = pvlock(&["soak", "--backend", "threads", "--minutes", "0.02", "--seed", "42"]);
    let summary = text(&output.stdout);
    assert!(output.status.success(), "{summary}{}", text(&output.stderr));
    for word in ["from seed 42", "0 runs on KVM", "all counts exact", " 0 forced", "growth: 0 file descriptors, 0 threads"] {
        assert!(summary.contains(word), "{word} in {summary}");
    }
}

#[test]
fn ctrl_c_ends_a_soak_with_a_summary() {
    let (code, rest) = interrupted(&["soak", "--backend", "threads", "--minutes", "60"]);
    assert_eq!(code, Some(130));
    assert!(rest.contains("all counts exact") && rest.contains("growth:"), "{rest}");
}

#[test]
fn a_soak_of_no_time_is_refused() {
    for minutes in ["0", "-1", "nan", "x"] {
        let output = pvlock(&["soak", &format!("--minutes={minutes}")]);
        assert!(!output.status.success());
        assert!(text(&output.stderr).contains("above 0"), "{}", text(&output.stderr));
    }
}

/// Presses Ctrl-C after a second or so. Returns the exit code, and what was printed.
fn interrupted(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = command(arguments).spawn().expect("the command was built");
    // Until it says where it runs, so that the signal does not come before the handler; then let a row be finished.
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0; 6];
    stdout.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"pvlock");
    std::thread::sleep(Duration::from_secs(1));
    interrupt(&mut child);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    (child.wait().unwrap().code(), rest)
}

#[test]
fn halts_by_kvm_itself_are_refused_where_they_cannot_be_had() {
    for (arguments, hint) in [
        (["--backend", "threads", "--halt", "pv-unhalt"].as_slice(), "hardware KVM"),
        (&["--halt", "pv"], "choose from doorbell, pv-unhalt"),
        (&["--halt", "pv-unhalt", "--policy", "yield"], "--halt pv-unhalt"),
    ] {
        let output = pvlock(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        let error = text(&output.stderr);
        assert!(error.contains(hint), "{arguments:?}: {error}");
    }
}
