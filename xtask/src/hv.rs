//! `cargo xtask hv`: builds the hypervisor and its guest, boots them under QEMU, checks what they say and shows it.
//!
//! The emulator counts instructions as its clock (`-icount`, one a nanosecond) and emulates its CPUs one at a time, so every boot is
//! the same to the last digit, whatever else this machine does.

mod report;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::steps::Workspace;
use crate::{children, packages};
use report::Report;

/// A boot that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(300);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only 4 vCPUs per CPU, and each policy once for each lock.
    #[arg(long)]
    short: bool,
    /// CPUs of the emulated machine.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4))]
    cpus: u8,
    /// Boot so often; all boots must say the same.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    boots: u32,
    /// More words for the hypervisor's command line, see hv-testbed/src/main.rs.
    #[arg(last = true)]
    words: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, String> {
    let workspace = Workspace::find()?;
    let emulator = match Emulator::find(&workspace.target) {
        Ok(emulator) => emulator,
        Err(why) => {
            println!("SKIPPED: hv: no QEMU: {why}");
            println!("Install qemu-system-x86 (Debian), or let apt-get download it: then this runs.");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let guest = workspace.freestanding("pvlock-guest-image", "pvlock-guest")?;
    let hypervisor = workspace.freestanding("pvlock-hv-testbed", "pvlock-hv")?;
    let results = workspace.target.join("hv");
    fs::create_dir_all(&results).map_err(|error| format!("cannot make {}: {error}", results.display()))?;

    let profile = if options.short { "short" } else { "full" };
    let words = [vec![format!("cpus={} profile={profile}", options.cpus)], options.words.clone()].concat().join(" ");
    let mut first: Option<Vec<String>> = None;
    let mut faults = Vec::new();
    for boot in 1..=options.boots {
        let start = Instant::now();
        let lines = emulator.boot(options.cpus, &hypervisor, &guest, &words)?;
        println!("boot {boot} of {}: {} lines in {:.0} s", options.boots, lines.len(), start.elapsed().as_secs_f64());
        match &first {
            Some(first) if *first != lines => faults.push(format!("boot {boot} says something else than the first")),
            Some(_) => {}
            None => first = Some(lines),
        }
    }
    let tried = !options.words.iter().any(|word| word == "trials=none");
    let report = Report::read(&first.unwrap_or_default(), !options.short && options.words.is_empty(), tried);
    report.store(&results)?;
    print!("{report}");
    faults.extend(report.faults());
    faults.iter().for_each(|fault| println!("FAILED: hv: {fault}"));
    println!("{} checks failed; results and schedules are in {}", faults.len(), results.display());
    Ok(if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// QEMU, installed or unpacked.
struct Emulator {
    program: PathBuf,
    /// Where it was unpacked; `None` if it is installed.
    root: Option<PathBuf>,
}

impl Emulator {
    fn find(target: &Path) -> Result<Self, String> {
        const PROGRAM: &str = "qemu-system-x86_64";
        let installed = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if installed.is_ok_and(|status| status.success()) {
            return Ok(Self { program: PROGRAM.into(), root: None });
        }
        let root = packages::fetch(target, packages::QEMU)?;
        Ok(Self { program: root.join("usr/bin").join(PROGRAM), root: Some(root) })
    }

    /// Boots once; returns the lines that the hypervisor prints.
    fn boot(&self, cpus: u8, hypervisor: &Path, guest: &Path, words: &str) -> Result<Vec<String>, String> {
        let mut command = Command::new(&self.program);
        if let Some(root) = &self.root {
            let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|place| root.join(place));
            command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).map_err(|error| error.to_string())?);
            for data in ["usr/share/qemu", "usr/share/seabios"] {
                command.arg("-L").arg(root.join(data));
            }
        }
        command.args(["-M", "q35", "-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off", "-cpu", "max", "-m", "256"]);
        command.args(["-smp", &cpus.to_string(), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-serial", "stdio", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
        command.arg("-kernel").arg(hypervisor).arg("-initrd").arg(guest).args(["-append", words]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", self.program.display()))?;
        let output = child.stdout.take().ok_or("no pipe from QEMU")?;
        let (send, lines) = mpsc::channel();
        thread::spawn(move || BufReader::new(output).lines().map_while(Result::ok).all(|line| send.send(line).is_ok()));
        let deadline = Instant::now() + LIMIT;
        let mut said = Vec::new();
        let late = loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => said.push(line),
                Err(RecvTimeoutError::Disconnected) => break false,
                Err(RecvTimeoutError::Timeout) => break true,
            }
        };
        if late {
            // It may have ended since.
            let _ = child.kill();
        }
        let status = child.wait().map_err(|error| format!("QEMU: {error}"))?;
        // isa-debug-exit: twice what was written, plus one.
        match (late, status.code()) {
            (false, Some(0x21)) => Ok(said),
            _ if children::interrupted() => Err("interrupted".into()),
            _ => {
                let end = said.iter().rev().take(5).rev().cloned().collect::<Vec<_>>().join("\n");
                let how = if late { format!("hangs for {LIMIT:?}") } else { format!("ended with {status}") };
                Err(format!("the hypervisor {how}; its last words:\n{end}"))
            }
        }
    }
}
