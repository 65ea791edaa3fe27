//! `pvlock sim` as a user types it.

mod common;

use common::{Directory, interrupt, text};
use serde_json::Value;
use std::io::Read;
use std::process::{Command, Output};
use std::time::Duration;

fn command(arguments: &[&str]) -> Command {
    let mut command = common::command(&["sim"]);
    command.args(arguments);
    command
}

/// Runs it in a directory, where its picture goes.
fn sim(directory: &Directory, arguments: &[&str]) -> Output {
    command(arguments).current_dir(&directory.0).output().expect("the command was built")
}

fn read(directory: &Directory, name: &str) -> Vec<u8> {
    std::fs::read(directory.0.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn the_table_has_every_lock_and_says_where_the_picture_is() {
    let directory = Directory::new("sim-table");
    let output = sim(&directory, &["--cpus", "2", "--seconds", "0.005"]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    for word in
        ["plain-ticket", "test-and-set", "classic-ticket", "queued", "ticket", "preemptable", "bound", "1x", "2x", "4x", "8x"]
    {
        assert!(table.contains(word), "{word} in {table}");
    }
    assert!(table.contains("wrote pvlock-sim.png"), "{table}");
    let picture = png::Decoder::new(std::io::Cursor::new(read(&directory, "pvlock-sim.png"))).read_info().unwrap();
    assert!(picture.info().width > 1000);
}

#[test]
fn the_output_is_the_same_byte_for_byte_on_any_number_of_threads() {
    let run = |threads: &str, other: &str| {
        let directory = Directory::new(&format!("sim-threads-{threads}"));
        let arguments = ["--cpus", "2", "--seconds", "0.004", "--seeds", "3", "--map-ms", "2", "--threads", threads, other];
        let files = ["--plot", "plot.svg", "--map", "map.png", "--trace", "trace.json"];
        let output = sim(&directory, &[&arguments[..], &files[..]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let files = ["plot.svg", "map.png", "trace.json"].map(|name| read(&directory, name));
        (output.stdout, files)
    };
    for json in ["--json", "--policy=ignore,park-on-previous"] {
        let (one, two) = (run("1", json), run("2", json));
        assert_eq!(text(&one.0), text(&two.0));
        assert!(one.1 == two.1, "files differ");
    }
    assert_ne!(text(&run("2", "--json").0), text(&run("2", "--seed=9").0));
}

#[test]
fn json_is_one_object_with_every_promised_key() {
    let directory = Directory::new("sim-json");
    let output =
        sim(&directory, &["--seconds", "0.004", "--locks", "ticket,preemptable", "--vcpus", "4,12", "--seeds", "2", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!((&object["cpus"], &object["seeds"], &object["files"][0]), (&4.into(), &2.into(), &"pvlock-sim.png".into()));
    let rows = object["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| (row["lock"].as_str().unwrap(), row["vcpus"].as_u64().unwrap())).collect();
    assert_eq!(names, [("bound", 4), ("ticket", 4), ("preemptable", 4), ("bound", 12), ("ticket", 12), ("preemptable", 12)]);
    for row in rows {
        for key in [
            "overcommit",
            "share_of_bound",
            "work_per_s",
            "work_deviation",
            "acquisitions_per_s",
            "wait_p99_us",
            "wait_max_us",
            "pause_loops_per_s",
            "parks_per_s",
            "spin_share",
            "host_share",
        ] {
            assert!(row[key].is_number(), "{key} in {row}");
        }
        assert!(row["acquisitions_per_s"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(rows[0]["share_of_bound"], 1.0);
}

#[test]
fn a_trace_opens_in_viewers_and_shows_waits_holds_and_kicks() {
    let directory = Directory::new("sim-trace");
    let arguments =
        ["--cpus", "2", "--vcpus", "8", "--locks", "ticket", "--seconds", "0.02", "--inside", "20000", "--trace", "trace.json"];
    let output = sim(&directory, &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let trace = text(&read(&directory, "trace.json"));
    assert_eq!(pvlock_sim::trace::check(&trace), Ok(()));
    let object: Value = serde_json::from_str(&trace).unwrap();
    let events = object["traceEvents"].as_array().unwrap();
    let count = |ph: &str, name: &str| {
        events.iter().filter(|event| event["ph"] == ph && event["name"].as_str().unwrap().starts_with(name)).count()
    };
    for (ph, name) in [
        ("M", "process_name"),
        ("X", "wait for lock 0"),
        ("X", "hold lock 0"),
        ("X", "CPU 1"),
        ("i", "park"),
        ("s", "kick"),
        ("f", "kick"),
    ] {
        assert!(count(ph, name) > 0, "{ph} {name}");
    }
}

#[test]
fn a_map_can_be_stored_and_drawn_later() {
    let directory = Directory::new("sim-map");
    let work = ["--cpus", "2", "--vcpus", "6", "--locks", "ticket", "--policy", "park-on-previous", "--inside", "20000"];
    let arguments = [&work[..], &["--seconds", "0.01", "--map", "map.jsonl"]].concat();
    let output = sim(&directory, &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = sim(&directory, &["map", "map.jsonl", "map.svg", "--title", "Stored"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "wrote map.svg\n");
    let svg = text(&read(&directory, "map.svg"));
    let document = roxmltree::Document::parse(&svg).expect("well-formed XML");
    let words: Vec<_> = document.descendants().filter_map(|node| node.text()).map(str::trim).collect();
    for word in ["Stored", "map.jsonl", "CPU", "VM 0, vCPUs 0 to 5", "parked", "kicked another", "holds a lock"] {
        assert!(words.contains(&word), "{word} in {words:?}");
    }

    std::fs::write(directory.0.join("bad.jsonl"), "{\"span\":{\"cpu\":0,\"start\":1,\"end\":5,\"vm\":0,\"vcpu\":0}}\n{}\n")
        .unwrap();
    for (arguments, hint) in [
        (["map", "bad.jsonl", "map.png", "--ms=1"], "bad.jsonl: line 2: "),
        (["map", "map.jsonl", "map.gif", "--ms=1"], "ends in .png or .svg"),
        (["map", "none.jsonl", "map.png", "--ms=1"], "cannot read none.jsonl"),
        (["map", "map.jsonl", "map.png", "--from-ms=99"], "--from-ms"),
    ] {
        refused(&sim(&directory, &arguments), hint);
    }
}

/// One line, with this hint in it.
fn refused(output: &Output, hint: &str) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{hint}: {error}");
    assert!(error.contains(hint), "{hint}: {error}");
    assert_eq!(error.lines().count(), 1, "{hint}: {error}");
    assert_eq!(text(&output.stdout), "", "{hint}: nothing has run");
}

#[test]
fn what_cannot_be_simulated_gets_one_error_that_says_why() {
    let directory = Directory::new("sim-bad");
    std::fs::write(directory.0.join("zero.toml"), pvlock_sim::params::DEFAULT.replace("exit = 1200", "exit = 0")).unwrap();
    std::fs::write(directory.0.join("unknown.toml"), format!("speed = 1\n{}", pvlock_sim::params::DEFAULT)).unwrap();
    for (arguments, hint) in [
        (&["--cpus", "0"][..], "1 to 1024 CPUs"),
        (&["--cpus", "2000"], "1 to 1024 CPUs"),
        (&["--vms", "0"], "no VM"),
        (&["--vcpus", "0"], "1 to 256 vCPUs"),
        (&["--vcpus", "4,257"], "1 to 256 vCPUs"),
        (&["--cpus", "2", "--vms", "99"], "--vcpus"),
        (&["--cpus", "2", "--vcpus", "3", "--pins", "0,1,2"], "--pins 2 is no CPU: the host has CPUs 0 to 1"),
        (&["--vcpus", "3", "--pins", "0,1"], "each vCPU needs one"),
        (&["--vcpus", "1", "--pins", "0,1"], "each vCPU needs one"),
        (&["--set", "exits.exit=0"], "exits.exit is 0"),
        (&["--set", "exits.exti=7"], "exti"),
        (&["--set", "exit"], "section.name=number"),
        (&["--params", "zero.toml"], "exits.exit is 0"),
        (&["--params", "unknown.toml"], "speed"),
        (&["--params", "none.toml"], "cannot read the parameters none.toml"),
        (&["--plot", "picture.gif"], "ends in .png or .svg"),
        (&["--map", "picture"], ".jsonl"),
        (&["--map", "map.png", "--seconds", "0.001"], "--map-ms"),
    ] {
        refused(&sim(&directory, arguments), hint);
    }
    for (arguments, hint) in [
        (["--locks", "mcs"], "choose from plain-ticket"),
        (["--locks", "oracle"], "choose from plain-ticket"),
        (["--policy", "x"], "park-on-previous"),
        (["--rule", "x"], "clairvoyant"),
        (["--workload", "x"], "micro"),
        (["--seconds", "0"], "above 0"),
        (["--seeds", "0"], "1..=10000"),
        (["--threads", "0"], "1..=1024"),
        (["--pins", "0"], "--vcpus"),
        (["--inside", "2000000000"], "--inside"),
    ] {
        let output = sim(&directory, &arguments);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(hint) && !error.contains("panicked"), "{arguments:?}: {error}");
    }
}

#[test]
fn a_picture_that_cannot_be_written_does_not_lose_the_table() {
    let directory = Directory::new("sim-unwritable");
    let output = sim(&directory, &["--seconds", "0.002", "--locks", "ticket", "--plot", "/no/such/place.png"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write the picture /no/such/place.png"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("ticket"), "{}", text(&output.stdout));
}

#[test]
fn ctrl_c_ends_it_and_prints_what_there_is() {
    let directory = Directory::new("sim-ctrl-c");
    // Ten thousand runs take longer than the test waits.
    let arguments = ["--cpus", "1", "--vcpus", "1", "--locks", "test-and-set", "--seconds", "0.01", "--seeds", "10000"];
    let mut child = command(&arguments).current_dir(&directory.0).spawn().expect("the command was built");
    let mut stdout = child.stdout.take().unwrap();
    // Until it says what it does, so that the signal does not come before the handler; then let some runs be finished.
    let mut first = [0; 10];
    stdout.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"pvlock sim");
    std::thread::sleep(Duration::from_secs(1));
    interrupt(&mut child);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest}");
    assert!(rest.contains("Interrupted: 0 of 2 rows"), "{rest}");

    // In the middle of a run.
    let mut child = command(&["--cpus", "64", "--seconds", "80000"]).current_dir(&directory.0).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    interrupt(&mut child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
