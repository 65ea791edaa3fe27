//! `cargo xtask fuzz`: libFuzzer on each target in `fuzz/`.

use std::fs;
use std::process::{Command, ExitCode, Stdio};

use crate::children;
use crate::steps::Workspace;

/// The programs in `fuzz/fuzz_targets/`.
pub(crate) const TARGETS: [&str; 3] = ["engine", "hypercalls", "registration"];

/// Fuzzes until the time is over or an input fails, which cargo-fuzz then names.
pub(crate) fn run(workspace: &Workspace, only: &[String], minutes: u64) -> Result<ExitCode, String> {
    let present = |program: &str, arguments: &[&str]| {
        let status =
            Command::new(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !present("cargo-fuzz", &["--version"]) {
        return Err("no cargo-fuzz: `cargo install cargo-fuzz`, and put ~/.cargo/bin on the PATH".into());
    }
    if !present("c++", &["--version"]) {
        return Err("no C++ compiler, which libFuzzer is built with (Debian: g++)".into());
    }
    for target in TARGETS.into_iter().filter(|target| only.is_empty() || only.iter().any(|name| name == target)) {
        // What is found stays out of the committed corpus, which is kept small by hand.
        let found = workspace.target.join("fuzz/corpus").join(target);
        fs::create_dir_all(&found).map_err(|error| format!("cannot create {}: {error}", found.display()))?;
        let mut command = workspace.cargo(&format!("fuzz run {target}"));
        command.arg(&found).arg(format!("fuzz/corpus/{target}"));
        command.args(["--", "-max_len=4096", "-timeout=10", "-print_final_stats=1", &format!("-max_total_time={}", minutes * 60)]);
        command.env("CARGO_TARGET_DIR", workspace.target.join("fuzz"));
        // The instrumentation is behind flags that a stable compiler refuses otherwise.
        command.env("RUSTC_BOOTSTRAP", "1");
        let status = command.status().map_err(|error| format!("cannot start cargo: {error}"))?;
        if children::interrupted() {
            return Ok(ExitCode::from(130));
        }
        if !status.success() {
            return Err(format!("{target}: {status}"));
        }
    }
    Ok(ExitCode::SUCCESS)
}
