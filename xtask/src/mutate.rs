//! `cargo xtask mutate`: switches on one fault after the other in the crates' code, and sees that the models which have to
//! fail do, at the bounds at which they hold without it.
//!
//! The faults are named in each crate's `src/mutation.rs`; which models have to fail, and how, stands in
//! `loom-tests/mutations.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::steps::Workspace;
use crate::{children, table};

const CRATES: [&str; 4] = ["protocol", "pvlock-guest", "pvlock-host", "loom-tests"];
/// Time for one model: the slowest take half a minute on an idle machine.
const LIMIT: Duration = Duration::from_secs(600);

/// A fault and a test that has to fail because of it, saying `how`. Without a fault: a test that has to pass.
struct Run {
    fault: Option<String>,
    test: String,
    how: String,
}

/// What became of a run.
enum Outcome {
    /// The fault was found.
    Killed,
    /// There is no fault, and the model held in this many executions.
    Holds(usize),
    Survived,
    Bad(String),
}

pub(crate) fn run(workspace: &Workspace, only: &[String]) -> Result<ExitCode, String> {
    let runs = runs(&workspace.root, only)?;
    let programs = build(workspace)?;
    let start = Instant::now();
    let done = all(&runs, &programs, workspace)?;
    if children::interrupted() {
        return Ok(ExitCode::from(130));
    }
    println!("\n{:<22} {:<72} {:>7}  result", "fault", "test", "seconds");
    let mut bad = 0;
    for (run, (outcome, time)) in runs.iter().zip(&done) {
        let result = match outcome {
            Outcome::Holds(executions) => format!("holds in {executions} executions"),
            Outcome::Killed => format!("killed: {}", run.how),
            Outcome::Survived => "SURVIVED".into(),
            Outcome::Bad(why) => format!("BAD: {why}"),
        };
        bad += usize::from(matches!(outcome, Outcome::Survived | Outcome::Bad(_)));
        println!("{:<22} {:<72} {:>7.1}  {result}", run.fault.as_deref().unwrap_or("-"), run.test, time.as_secs_f64());
    }
    let faults: BTreeSet<_> = runs.iter().filter_map(|run| run.fault.as_ref()).collect();
    let killings = runs.iter().filter(|run| run.fault.is_some()).count();
    println!(
        "\n{} faults, {killings} killings by {} tests that pass without them, {bad} not as it should be, {:.0} s",
        faults.len(),
        runs.len() - killings,
        start.elapsed().as_secs_f64()
    );
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is to be run: first the tests without any fault, then with each.
fn runs(root: &Path, only: &[String]) -> Result<Vec<Run>, String> {
    let mut declared = BTreeSet::new();
    for name in CRATES {
        let file = root.join(name).join("src/mutation.rs");
        let text = fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        for fault in faults(&text) {
            if !declared.insert(fault.to_owned()) {
                return Err(format!("two faults are called {fault}"));
            }
        }
    }
    let mut listed = BTreeSet::new();
    let mut killings = Vec::new();
    for row in table::rows(&root.join("loom-tests/mutations.md"), "Faults")? {
        let [fault, test, how] = <[String; 3]>::try_from(row).map_err(|row| format!("mutations.md: not three cells: {row:?}"))?;
        listed.insert(fault.clone());
        if test != "none" {
            killings.push(Run { fault: Some(fault), test, how });
        }
    }
    if let Some(fault) = declared.symmetric_difference(&listed).next() {
        return Err(format!("{fault} is not both in a crate's mutation.rs and in loom-tests/mutations.md"));
    }
    if let Some(unknown) = only.iter().find(|fault| !declared.contains(*fault)) {
        return Err(format!("no fault is called {unknown}; they are {}", declared.into_iter().collect::<Vec<_>>().join(", ")));
    }
    killings.retain(|run| only.is_empty() || only.iter().any(|fault| Some(fault) == run.fault.as_ref()));
    let tests: BTreeSet<_> = killings.iter().map(|run| run.test.clone()).collect();
    let unmutated = tests.into_iter().map(|test| Run { fault: None, test, how: String::new() });
    Ok(unmutated.chain(killings).collect())
}

/// The names in a `mutations! { … }`.
fn faults(source: &str) -> impl Iterator<Item = &str> {
    let list = source.lines().skip_while(|line| !line.trim_start().starts_with("mutations!") && !line.contains("::mutations!"));
    let list = list.skip(1).take_while(|line| *line != "}");
    list.filter_map(|line| line.trim().strip_suffix(',')).filter(|name| name.chars().all(char::is_alphanumeric))
}

/// Builds the models; the program of each test file.
fn build(workspace: &Workspace) -> Result<BTreeMap<String, PathBuf>, String> {
    let mut command =
        workspace.loom("test --release --no-run --message-format json-render-diagnostics --package pvlock-loom-tests --tests");
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        return Err("the models do not build".into());
    }
    let lines = String::from_utf8_lossy(&output.stdout);
    let artifacts = lines.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let programs = artifacts.filter_map(|artifact| {
        Some((artifact["target"]["name"].as_str()?.to_owned(), PathBuf::from(artifact["executable"].as_str()?)))
    });
    Ok(programs.collect())
}

/// Runs everything, as many at once as there are CPUs.
fn all(runs: &[Run], programs: &BTreeMap<String, PathBuf>, workspace: &Workspace) -> Result<Vec<(Outcome, Duration)>, String> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(BTreeMap::new());
    let work = || {
        while let Some((n, run)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|n| Some((n, runs.get(n)?))) {
            if children::interrupted() {
                break;
            }
            let start = Instant::now();
            let outcome = one(run, programs, &workspace.target.join(format!("xtask/mutate-{n}")));
            done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(n, (outcome, start.elapsed()));
            println!("{} of {}: {} {}", n + 1, runs.len(), run.fault.as_deref().unwrap_or("-"), run.test);
        }
    };
    fs::create_dir_all(workspace.target.join("xtask")).map_err(|error| format!("cannot make a directory: {error}"))?;
    thread::scope(|scope| (0..thread::available_parallelism().map_or(1, usize::from)).for_each(|_| _ = scope.spawn(work)));
    Ok(done.into_inner().map_err(|_| "a run panicked")?.into_values().collect())
}

fn one(run: &Run, programs: &BTreeMap<String, PathBuf>, log: &Path) -> Outcome {
    let Some((program, name)) = run.test.split_once("::").and_then(|(file, name)| Some((programs.get(file)?, name))) else {
        return Outcome::Bad("no such test file".into());
    };
    let mut command = Command::new(program);
    command.args(["--exact", "--nocapture", "--test-threads=1", &format!("models::{name}")]);
    command.env("RUST_BACKTRACE", "0").env("PVLOCK_MUTATION", run.fault.as_deref().unwrap_or_default());
    let (success, output) = match logged(&mut command, log) {
        Ok(ended) => ended,
        Err(why) => return Outcome::Bad(why),
    };
    match (&run.fault, success) {
        _ if !output.contains("running 1 test") => Outcome::Bad("no such test".into()),
        (None, true) => Outcome::Holds(executions(&output)),
        (None, false) => Outcome::Bad(format!("fails without any fault: {}", panic(&output))),
        (Some(_), true) => Outcome::Survived,
        (Some(_), false) if output.contains(&run.how) => Outcome::Killed,
        (Some(_), false) => Outcome::Bad(format!("fails, but not by \"{}\": {}", run.how, panic(&output))),
    }
}

/// Runs a command that prints to a file; whether it succeeded, and what it printed.
fn logged(command: &mut Command, log: &Path) -> Result<(bool, String), String> {
    let mut run = || {
        let mut file = fs::File::options().read(true).write(true).create(true).truncate(true).open(log)?;
        let mut child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?).spawn()?;
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if start.elapsed() > LIMIT {
                child.kill()?;
                child.wait()?;
                break None;
            }
            thread::sleep(Duration::from_millis(10));
        };
        file.seek(SeekFrom::Start(0))?;
        let output = String::from_utf8_lossy(&fs::read(log)?).into_owned();
        fs::remove_file(log)?;
        Ok((status, output))
    };
    match run() {
        Ok((Some(status), output)) => Ok((status.success(), output)),
        Ok((None, _)) => Err(format!("stopped after {} s", LIMIT.as_secs())),
        Err(error) => Err(std::io::Error::to_string(&error)),
    }
}

/// What models say of themselves, summed: `… holds in 12 executions, …`.
fn executions(output: &str) -> usize {
    let counts = output.split(" executions").filter_map(|before| before.rsplit(' ').next()?.parse::<usize>().ok());
    counts.sum()
}

/// The first panic's message.
fn panic(output: &str) -> &str {
    output.lines().skip_while(|line| !line.contains(" panicked at ")).nth(1).unwrap_or("no panic")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found() {
        let source =
            "//! mutations\npvlock_protocol::mutations! {\n    /// One,\n    One,\n    /// Two.\n    Two,\n}\nfn not(a: u8,\n";
        assert_eq!(faults(source).collect::<Vec<_>>(), ["One", "Two"]);
    }

    #[test]
    fn every_fault_is_listed_and_is_a_fault_of_one_crate() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
        let runs = runs(root, &[]).unwrap_or_else(|error| panic!("{error}"));
        assert!(runs.iter().filter_map(|run| run.fault.as_ref()).collect::<BTreeSet<_>>().len() > 20);
    }

    #[test]
    fn executions_are_summed() {
        assert_eq!(executions("test a ... b: holds in 12 executions, 3ms\nholds at 7 steps, 30 executions, 1s\nok\n"), 42);
        assert_eq!(executions("ok"), 0);
    }

    #[test]
    fn a_panic_is_quoted() {
        assert_eq!(panic("running\nthread 'a' panicked at b.rs:1:2:\ndeadlock\nnote\n"), "deadlock");
    }
}
