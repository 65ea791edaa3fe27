//! What `cargo xtask test` runs.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Some commands under one name: one row of the summary.
pub(crate) struct Step {
    /// One of [`NAMES`].
    pub(crate) name: &'static str,
    /// All of them run, whatever becomes of the ones before.
    pub(crate) commands: Vec<Command>,
    /// Whether the commands run tests; then it is a failure if they run none.
    pub(crate) runs_tests: bool,
    /// Time for the whole step. A lost wake-up shows as a hang, and must not hang the caller.
    pub(crate) limit: Duration,
    /// For commands that run a machine, whose exit status says nothing of what ran in it: a line that it must have printed. Skips
    /// are told in such lines too.
    pub(crate) closing: Option<&'static str>,
}

/// The steps, in order.
pub(crate) const NAMES: [&str; 10] =
    ["format", "clippy", "unsafe", "docs", "no-std", "features", "tests", "loom", "shuttle", "end-to-end"];

/// All steps, in the order of [`NAMES`].
pub(crate) fn all(workspace: &Workspace) -> impl Iterator<Item = Step> {
    NAMES.into_iter().map(|name| {
        let (minutes, runs_tests, commands) = match name {
            "format" => (3, false, vec![workspace.cargo("fmt --all --check")]),
            "clippy" => (9, false, clippy(workspace)),
            "unsafe" => (3, false, vec![workspace.xtask("unsafe --brief")]),
            "docs" => (6, false, docs(workspace)),
            "no-std" => (3, false, no_std(workspace)),
            "features" => (6, false, features(workspace)),
            "tests" => (15, true, tests(workspace)),
            "loom" => (15, true, loom(workspace)),
            "shuttle" => (9, true, vec![workspace.shuttle("test --release --no-fail-fast --package pvlock-shuttle-tests")]),
            "end-to-end" => (15, true, end_to_end(workspace)),
            _ => unreachable!("a step without commands: {name}"),
        };
        Step { name, commands, runs_tests, limit: Duration::from_secs(60 * minutes), closing: None }
    })
}

// pvlock-guest-image and pvlock-hv-testbed stand apart wherever all features are on: their feature `freestanding` is for programs
// without std.

fn clippy(workspace: &Workspace) -> Vec<Command> {
    vec![
        workspace.cargo(
            "clippy --workspace --exclude pvlock-guest-image --exclude pvlock-hv-testbed --all-targets --all-features -- -D warnings",
        ),
        workspace.cargo("clippy --package pvlock-guest-image --package pvlock-hv-testbed --all-targets -- -D warnings"),
        workspace.cargo("clippy --package pvlock-guest-image --features freestanding --profile guest --bins --lib -- -D warnings"),
        workspace.cargo("clippy --package pvlock-hv-testbed --features freestanding --profile guest --bins --lib -- -D warnings"),
        workspace.loom("clippy --release --package pvlock-loom-tests --all-targets -- -D warnings"),
        workspace.shuttle("clippy --release --package pvlock-shuttle-tests --all-targets -- -D warnings"),
    ]
}

fn docs(workspace: &Workspace) -> Vec<Command> {
    let mut commands = vec![
        workspace.cargo("doc --workspace --exclude pvlock-guest-image --exclude pvlock-hv-testbed --no-deps --all-features"),
        workspace.cargo("doc --package pvlock-guest-image --package pvlock-hv-testbed --no-deps"),
    ];
    for command in &mut commands {
        command.env("RUSTDOCFLAGS", "-D warnings").env_remove("CARGO_ENCODED_RUSTDOCFLAGS");
    }
    commands
}

/// Builds the crates that go into kernels, then a program with a panic handler of its own on top of them. rustc refuses
/// that if anything below brings std along, so this needs no target without std.
fn no_std(workspace: &Workspace) -> Vec<Command> {
    let directory = workspace.target.join("no-std");
    let mut build = workspace.cargo(
        "build --package pvlock-protocol --package pvlock-hypercalls --package pvlock-guest --package pvlock-host \
         --no-default-features --features pvlock-guest/lock_api_04,pvlock-guest/lock_api_05",
    );
    build.env("CARGO_TARGET_DIR", &directory).env_remove("CARGO_BUILD_TARGET");

    let mut probe = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    probe.current_dir(&workspace.root).args(["--edition", "2024", "--crate-type", "lib", "--emit", "metadata"]);
    probe.arg("-o").arg(directory.join("probe.rmeta"));
    probe.arg("-L").arg(prefixed("dependency=", &directory.join("debug/deps")));
    for name in ["pvlock_protocol", "pvlock_hypercalls", "pvlock_guest", "pvlock_host"] {
        let library = directory.join(format!("debug/lib{name}.rlib"));
        probe.arg("--extern").arg(prefixed(&format!("{name}="), &library));
    }
    probe.arg("xtask/probe/no_std.rs");
    vec![build, probe]
}

fn prefixed(prefix: &str, path: &Path) -> std::ffi::OsString {
    let mut text = std::ffi::OsString::from(prefix);
    text.push(path);
    text
}

fn features(workspace: &Workspace) -> Vec<Command> {
    let sets = [
        ("pvlock-guest", ["", "lock_api_04", "lock_api_05", "lock_api_04,lock_api_05"].as_slice()),
        ("pvlock-host", ["", "std", "threads", "kvm", "threads,kvm", "threads,tracing"].as_slice()),
    ];
    let clippy = |package, set| {
        workspace.cargo(&format!("clippy --package {package} --lib --no-default-features --features={set} -- -D warnings"))
    };
    sets.iter().flat_map(|&(package, sets)| sets.iter().map(move |&set| clippy(package, set))).collect()
}

/// Unit, integration, documentation and property tests, all with debug assertions. pvlock's tests on VMs come later.
fn tests(workspace: &Workspace) -> Vec<Command> {
    vec![
        workspace.cargo(
            "test --no-fail-fast --workspace --all-features \
             --exclude pvlock-guest-image --exclude pvlock-hv-testbed --exclude pvlock-loom-tests --exclude pvlock-shuttle-tests \
             --exclude pvlock --exclude pvlock-tests",
        ),
        workspace.cargo("test --no-fail-fast --package pvlock-hv-testbed --lib"),
        workspace.cargo("test --no-fail-fast --package pvlock-guest-image --package pvlock --package pvlock-tests --lib --bins"),
        workspace.cargo("test --no-fail-fast --package pvlock-guest-image --package pvlock --package pvlock-tests --doc"),
    ]
}

fn loom(workspace: &Workspace) -> Vec<Command> {
    vec![workspace.loom("test --release --no-fail-fast --package pvlock-loom-tests")]
}

/// The tests of the crates with shared memory, under the address sanitizer. (A stable compiler has it, but not its option.) The
/// thread sanitizer needs a standard library that is instrumented too, or it reports the test harness's own channels.
pub(crate) fn sanitize(workspace: &Workspace) -> Step {
    let mut command = workspace.cargo(
        "test --target x86_64-unknown-linux-gnu --no-fail-fast --lib --tests \
         --package pvlock-protocol --package pvlock-hypercalls --package pvlock-guest --package pvlock-host \
         --features pvlock-guest/lock_api_04,pvlock-guest/lock_api_05,pvlock-host/threads",
    );
    command.env("CARGO_TARGET_DIR", workspace.target.join("address")).env_remove("CARGO_ENCODED_RUSTFLAGS");
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    // Tests leak their VMs, so that threads may outlive a failure.
    command.env("ASAN_OPTIONS", "detect_leaks=0");
    Step { name: "sanitize", commands: vec![command], runs_tests: true, limit: Duration::from_secs(60 * 30), closing: None }
}

/// Real VMs, with the programs that users get.
fn end_to_end(workspace: &Workspace) -> Vec<Command> {
    vec![workspace.cargo("test --no-fail-fast --release --package pvlock --package pvlock-tests --test *")]
}

/// Where things are.
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    /// Cargo's target directory, absolute.
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// The workspace this program was built in, and the target directory it was built into.
    pub(crate) fn find() -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask is not inside its workspace")?;
        let program = env::current_exe().map_err(|error| format!("cannot find this program's own path: {error}"))?;
        // target/debug/xtask
        let target = program.ancestors().nth(2).ok_or("this program is not in a target directory")?;
        Ok(Self { root: root.to_path_buf(), target: target.to_path_buf() })
    }

    /// Builds a program that runs on a machine of its own, and returns where it is. Flags meant for the rest stay out of it.
    pub(crate) fn freestanding(&self, package: &str, program: &str) -> Result<PathBuf, String> {
        const TARGET: &str = "x86_64-unknown-linux-gnu";
        let directory = self.target.join("freestanding");
        let mut build = self.cargo(&format!(
            "rustc --quiet --package {package} --bin {program} --features freestanding --profile guest --target {TARGET} -- \
             -C relocation-model=static -C strip=debuginfo"
        ));
        build.env("CARGO_TARGET_DIR", &directory).env_remove("RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
        build.env("CARGO_ENCODED_RUSTFLAGS", "-Crelocation-model=static");
        let status = build.status().map_err(|error| format!("cannot start cargo: {error}"))?;
        if !status.success() {
            return Err(format!("{program} could not be built ({status}): it needs a C linker and the target {TARGET}"));
        }
        Ok(directory.join(TARGET).join("guest").join(program))
    }

    /// Cargo with `arguments`, which are separated by white space and seen by no shell.
    pub(crate) fn cargo(&self, arguments: &str) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target).args(arguments.split_whitespace());
        command
    }

    /// This program with `arguments`.
    fn xtask(&self, arguments: &str) -> Command {
        let mut command = Command::new(env::current_exe().unwrap_or_else(|_| "xtask".into()));
        command.current_dir(&self.root).args(arguments.split_whitespace());
        command
    }

    /// Cargo for models that loom explores.
    pub(crate) fn loom(&self, arguments: &str) -> Command {
        self.model("loom", "--cfg pvlock_loom", arguments)
    }

    /// The same for models that shuttle explores.
    fn shuttle(&self, arguments: &str) -> Command {
        self.model("shuttle", "--cfg pvlock_loom --cfg pvlock_shuttle", arguments)
    }

    /// In a target directory of its own: other flags would rebuild everything each time.
    fn model(&self, directory: &str, cfgs: &str, arguments: &str) -> Command {
        let flags = env::var("RUSTFLAGS").unwrap_or_default();
        let mut command = self.cargo(arguments);
        command.env("CARGO_TARGET_DIR", self.target.join(directory));
        command.env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", format!("{flags} {cfgs}").trim_start());
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_commands() {
        let workspace = Workspace { root: "/root-of-it".into(), target: "/target".into() };
        let steps: Vec<_> = all(&workspace).collect();
        assert_eq!(steps.iter().map(|step| step.name).collect::<Vec<_>>(), NAMES);
        assert!(steps.iter().all(|step| !step.commands.is_empty()));
        assert!(steps.iter().any(|step| step.runs_tests));
    }
}
