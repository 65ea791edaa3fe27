//! Runs the commands of a step.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::children;
use crate::libtest::{self, Counts};
use crate::steps::{Step, Workspace};

/// What became of a step.
pub(crate) struct Outcome {
    pub(crate) name: &'static str,
    pub(crate) time: Duration,
    /// `None` if the step does not run tests.
    pub(crate) counts: Option<Counts>,
    /// Tests that found out that they cannot run here, with the reason.
    pub(crate) skips: Vec<String>,
    /// What the summary repeats: lines that begin with `note: `.
    pub(crate) notes: Vec<String>,
    /// Empty if all commands succeeded.
    pub(crate) faults: Vec<String>,
}

impl Outcome {
    /// Of a step that cannot run here.
    pub(crate) fn skipped(name: &'static str, time: Duration, reason: String) -> Self {
        Self { name, time, counts: None, skips: vec![reason], notes: Vec::new(), faults: Vec::new() }
    }

    /// Of a step that failed before it ran anything.
    pub(crate) fn failed(name: &'static str, fault: String) -> Self {
        Self { name, time: Duration::ZERO, counts: None, skips: Vec::new(), notes: Vec::new(), faults: vec![fault] }
    }
}

/// Runs all commands of a step and shows what they print.
pub(crate) fn step(step: Step, workspace: &Workspace) -> Outcome {
    let start = Instant::now();
    println!("\n=== {}", step.name);
    let log = SkipLog::new(workspace.target.join(format!("xtask/skipped-{}", step.name)));
    let mut counts = Counts::default();
    let mut faults = Vec::new();
    let mut notes = Vec::new();
    let mut told = Vec::new();
    for mut command in step.commands {
        if children::interrupted() {
            break;
        }
        println!("--- {}", shown(&command));
        command.stdin(Stdio::null()).env("PVLOCK_SKIP_LOG", &log.path);
        let left = step.limit.saturating_sub(start.elapsed());
        let mut closed = false;
        let result = within(left, &mut command, |line| {
            if step.runs_tests {
                counts += Counts::of_line(line).unwrap_or_default();
            } else {
                notes.extend(line.strip_prefix("note: ").map(|note| note.trim_end().to_owned()));
            }
            if let Some(closing) = step.closing {
                closed |= line.trim() == closing;
                told.extend(libtest::skips(line));
            }
        });
        if let Err(fault) = result {
            faults.push(format!("{fault}: {}", shown(&command)));
        }
        if let Some(closing) = step.closing.filter(|_| !closed) {
            faults.push(format!("it did not say {closing:?}"));
        }
    }
    let mut skips = log.read().unwrap_or_else(|error| {
        faults.push(format!("cannot read {}: {error}", log.path.display()));
        Vec::new()
    });
    skips.append(&mut told);
    Outcome { name: step.name, time: start.elapsed(), counts: step.runs_tests.then_some(counts), skips, notes, faults }
}

/// Runs a command to its end, shows its output and gives each line of it to `look`.
fn within(limit: Duration, command: &mut Command, mut look: impl FnMut(&str)) -> Result<(), String> {
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| format!("cannot start ({error})"))?;
    let output = child.stdout.take().ok_or("no pipe to the command")?;

    let (done, watched) = mpsc::channel::<()>();
    let watch = thread::spawn(move || {
        let late = watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
        if late {
            children::end_all();
        }
        late
    });
    let copied = copy_lines(output, &mut look);
    let status = child.wait();
    drop(done);
    let late = watch.join().map_err(|_| "the watchdog panicked")?;

    match (status, copied) {
        _ if late => Err("stopped at its time limit".into()),
        (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
        (Ok(status), Ok(())) if status.success() => Ok(()),
        (Ok(status), Ok(())) => Err(status.to_string()),
    }
}

fn copy_lines(output: impl io::Read, look: &mut impl FnMut(&str)) -> io::Result<()> {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while output.read_until(b'\n', &mut line)? != 0 {
        let text = String::from_utf8_lossy(&line);
        print!("{text}");
        look(&text);
        line.clear();
    }
    io::stdout().flush()
}

/// The command as a person would type it, without what only tells it where to put its files.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let variables = command.get_envs().filter(|(name, _)| *name == "RUSTFLAGS" || *name == "RUSTDOCFLAGS");
    let variables = variables.filter_map(|(name, value)| Some(format!("{}={:?} ", name.display(), value?)));
    let arguments = command.get_args().map(|argument| format!(" {}", argument.display()));
    format!("{}{}{}", variables.collect::<String>(), program.display(), arguments.collect::<String>())
}

/// The file to which a step's tests append one line when they cannot run.
struct SkipLog {
    path: PathBuf,
}

impl SkipLog {
    /// Starts anew. If that fails, reading fails as well, and is reported.
    fn new(path: PathBuf) -> Self {
        let _ = path.parent().map(fs::create_dir_all);
        let _ = fs::remove_file(&path);
        let _ = fs::write(&path, "");
        Self { path }
    }

    fn read(&self) -> io::Result<Vec<String>> {
        fs::read_to_string(&self.path).map(|text| libtest::skips(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_commands_lines_and_status_are_seen() {
        let mut lines = Vec::new();
        let limit = Duration::from_secs(60);
        assert_eq!(within(limit, &mut shell("echo one; printf two"), |line| lines.push(line.to_owned())), Ok(()));
        assert_eq!(lines, ["one\n", "two"]);
        assert_eq!(within(limit, &mut shell("exit 3"), |_| {}), Err("exit status: 3".into()));
        let missing = within(limit, &mut Command::new("no-such-program-here"), |_| {});
        assert!(missing.is_err_and(|fault| fault.starts_with("cannot start")));
    }

    #[test]
    fn a_log_starts_empty_and_a_missing_one_is_an_error() {
        let path = std::env::temp_dir().join(format!("pvlock-xtask-{}", std::process::id()));
        fs::write(&path, "SKIPPED: from: before\n").expect("a temporary file");
        let log = SkipLog::new(path.clone());
        assert!(log.read().expect("readable").is_empty());
        fs::write(&path, "SKIPPED: a: b\n").expect("a temporary file");
        assert_eq!(log.read().expect("readable"), ["a: b"]);
        fs::remove_file(&path).expect("removed");
        assert!(log.read().is_err());
    }
}
