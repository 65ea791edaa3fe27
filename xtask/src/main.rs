//! The project's own commands.
//!
//! `cargo xtask test` runs every check there is, one named step after the other. A failing step does not stop the others.
//! The end is a table of the steps and, alone on the last line, `N passed, N failed, N skipped`. The exit code is 0 only if
//! every step passed; a step that should run tests and ran none has failed, and so has one that exceeded its time limit.
//! A step that fails without a failing test (formatting, a test that aborts its process) counts as one failure.
//!
//! # For authors of tests
//!
//! A test that cannot run on this machine calls `pvlock_tests::skip(&reason)`, once and on the test's own thread, and returns:
//!
//! ```text
//! let Some(kvm) = vm::open().inspect_err(pvlock_tests::skip).ok() else { return };
//! ```
//!
//! libtest hides the output of tests that pass and has no notion of a skip found at run time. So `skip` also appends
//! `SKIPPED: test: reason` to the file named by `PVLOCK_SKIP_LOG`, which each step that runs tests sets. Those tests are
//! counted as skipped, not as passed. So are `#[ignore]`d ones. With `CI=true` and a `/dev/kvm` present, every skip is a
//! failure. What takes too long for the test command is a command of its own, not an ignored test.
//!
//! # Budget
//!
#![doc = include_str!("../budget.md")]

mod children;
mod fuzz;
mod hv;
mod inventory;
mod libtest;
#[cfg(test)]
mod listed;
mod mutate;
mod packages;
mod run;
mod steps;
mod stock_kvm;
mod summary;
mod table;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command as Process, ExitCode};

use clap::{Parser, Subcommand};

use crate::steps::{Step, Workspace};
use crate::stock_kvm::Leg;
use crate::summary::Summary;

/// Checks of the pvlock workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = include_str!("../budget.md"))]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Besides `test`: what takes longer, or needs more than Rust, than that may.
#[derive(Subcommand)]
enum Command {
    /// Run every check, or only the steps named.
    Test {
        /// Steps to run, in the order of the table; all of them if none is named.
        #[arg(value_name = "STEP", value_parser = steps::NAMES)]
        only: Vec<String>,
    },
    /// Run the tests of guest and host under the address sanitizer.
    Sanitize,
    /// List every piece of unsafe code with the invariant that it rests on; fail if one names none.
    Unsafe {
        /// Only count.
        #[arg(long)]
        brief: bool,
    },
    /// Put one fault after the other into the code, and see the models fail that have to (loom-tests/mutations.md).
    Mutate {
        /// Faults to run; all of them if none is named.
        #[arg(value_name = "FAULT")]
        only: Vec<String>,
    },
    /// Build `pvlock` as users get it, and become `pvlock soak`: random mixes of locks, workloads and policies, with vCPUs that are
    /// paused, signalled and reset, on KVM and on threads. Ctrl-C ends it with a summary.
    Soak {
        /// See `pvlock soak --help`: --minutes N, --seed SEED, --fixed, --backend kvm|threads.
        #[arg(value_name = "OPTIONS", trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Fuzz the host's side with cargo-fuzz.
    Fuzz {
        /// Targets, one after the other; all of them if none is named.
        #[arg(value_name = "TARGET", value_parser = fuzz::TARGETS)]
        only: Vec<String>,
        /// How long each of them is fuzzed.
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
        minutes: u64,
    },
    /// Boot the bare-metal hypervisor of hv-testbed under emulation, and run guests on it with each policy.
    Hv(hv::Options),
    /// Run the end-to-end tests on stock KVM in emulated machines, whose packages are fetched.
    StockKvm {
        /// Machines; both of them if none is named.
        #[arg(value_name = "MACHINE")]
        only: Vec<Leg>,
    },
}

fn main() -> ExitCode {
    command(Cli::parse().command).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn command(command: Command) -> Result<ExitCode, String> {
    let workspace = Workspace::find()?;
    if let Command::Soak { options } = &command {
        return soak(&workspace, options);
    }
    children::end_on_signals()?;
    match command {
        Command::Soak { .. } => unreachable!("it has become another process"),
        Command::Test { only } => Ok(all_of(steps::all(&workspace), &only, &workspace)),
        Command::Sanitize => Ok(all_of(std::iter::once(steps::sanitize(&workspace)), &[], &workspace)),
        Command::Unsafe { brief } => inventory::run(&workspace.root, brief),
        Command::Fuzz { only, minutes } => fuzz::run(&workspace, &only, minutes),
        Command::Hv(options) => hv::run(&options),
        Command::StockKvm { only } => Ok(stock_kvm(&only, &workspace)),
        Command::Mutate { only } => mutate::run(&workspace, &only),
    }
}

/// Runs these steps, or only those named.
fn all_of(steps: impl Iterator<Item = Step>, only: &[String], workspace: &Workspace) -> ExitCode {
    // In CI, a machine that has KVM must be able to use it.
    let mut summary = Summary::new(in_ci() && Path::new("/dev/kvm").exists());
    for step in steps.filter(|step| only.is_empty() || only.iter().any(|name| name == step.name)) {
        if children::interrupted() {
            summary.not_run(step.name);
        } else {
            summary.add(run::step(step, workspace));
        }
    }
    end(&summary)
}

fn stock_kvm(only: &[Leg], workspace: &Workspace) -> ExitCode {
    // In CI, it may not pass by running nothing.
    let mut summary = Summary::new(in_ci());
    stock_kvm::run(only, workspace, &mut summary);
    end(&summary)
}

fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

/// Shows what became of it, and says so to the caller.
fn end(summary: &Summary) -> ExitCode {
    print!("\n{summary}");
    match (children::interrupted(), summary.is_success()) {
        (true, _) => ExitCode::from(130),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    }
}

/// Does not come back if all goes well: the soak takes the place of this process, so that signals reach it and nobody else.
fn soak(workspace: &Workspace, options: &[String]) -> Result<ExitCode, String> {
    let mut build = workspace.cargo("build --release --package pvlock");
    let status = build.status().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !status.success() {
        return Err(format!("pvlock could not be built: {status}"));
    }
    let error = Process::new(workspace.target.join("release/pvlock")).arg("soak").args(options).exec();
    Err(format!("cannot start pvlock: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn unknown_commands_and_steps_are_refused_with_the_known_ones() {
        let error = |arguments: &[&str]| Cli::try_parse_from(arguments).err().expect("must be refused").to_string();
        assert!(error(&["xtask", "tset"]).contains("'test'"));
        assert!(error(&["xtask", "test", "lom"]).contains("loom"));
        assert!(Cli::try_parse_from(["xtask", "test", "format", "loom"]).is_ok());
        assert!(Cli::try_parse_from(["xtask", "soak", "--minutes", "5"]).is_ok());
    }
}
