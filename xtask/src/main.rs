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
mod libtest;
mod packages;
mod run;
mod steps;
mod stock_kvm;
mod summary;

use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::steps::Workspace;
use crate::stock_kvm::Leg;
use crate::summary::Summary;

/// Checks of the pvlock workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = include_str!("../budget.md"))]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// `mutate` and `soak` will stand here: what takes longer, or needs more than Rust, than `test` may.
#[derive(Subcommand)]
enum Command {
    /// Run every check, or only the steps named.
    Test {
        /// Steps to run, in the order of the table; all of them if none is named.
        #[arg(value_name = "STEP", value_parser = steps::NAMES)]
        only: Vec<String>,
    },
    /// Run the end-to-end tests on stock KVM in emulated machines, whose packages are fetched.
    StockKvm {
        /// Machines; both of them if none is named.
        #[arg(value_name = "MACHINE")]
        only: Vec<Leg>,
    },
}

fn main() -> ExitCode {
    let result = children::end_on_signals().and_then(|()| match Cli::parse().command {
        Command::Test { only } => test(&only),
        Command::StockKvm { only } => stock_kvm(&only),
    });
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn test(only: &[String]) -> Result<ExitCode, String> {
    let workspace = Workspace::find()?;
    // In CI, a machine that has KVM must be able to use it.
    let mut summary = Summary::new(in_ci() && Path::new("/dev/kvm").exists());
    for step in steps::all(&workspace).filter(|step| only.is_empty() || only.iter().any(|name| name == step.name)) {
        if children::interrupted() {
            summary.not_run(step.name);
        } else {
            summary.add(run::step(step, &workspace));
        }
    }
    Ok(end(&summary))
}

fn stock_kvm(only: &[Leg]) -> Result<ExitCode, String> {
    let workspace = Workspace::find()?;
    // In CI, it may not pass by running nothing.
    let mut summary = Summary::new(in_ci());
    stock_kvm::run(only, &workspace, &mut summary);
    Ok(end(&summary))
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
    }
}
