//! `cargo xtask stock-kvm`: the end-to-end tests on stock KVM, inside emulated machines.
//!
//! Software KVM is no stock KVM, and a machine with neither VT-x nor SVM has no other. But two emulators run Debian's kernel with
//! its KVM modules, and our VMM on top, with the guest in CPL 0:
//!
//! * **amd**: QEMU without KVM emulates SVM. Quick; its CPUs take turns, so it preempts anywhere and runs nothing in parallel.
//! * **intel**: Bochs emulates VT-x, pause-loop exiting included. Slow.
//!
//! Everything is below the target directory: the packages, static test programs, and an initramfs of them and a shell script,
//! which is the only process there. What it prints on the serial port is judged like what any test program prints, and it must
//! end with [`CLOSING`].

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::run::{self, Outcome};
use crate::steps::{Step, Workspace};
use crate::summary::Summary;
use crate::{children, packages};

/// The last line of a machine on which all went well.
const CLOSING: &str = "stock KVM: every program succeeded";
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// After this time an emulator is killed: it may not listen to anything milder.
const LIMIT: Duration = Duration::from_secs(600);
/// Test programs, and by how much their work is divided. (Contended loops of about a thousand acquisitions are enough there.)
const AMD: &[&str] = &["10 boot", "10 failures", "10 locks", "10 notify", "10 policies", "10 pv_unhalt"];
const INTEL: &[&str] = &["10 pause_loop_exits --nocapture", "30 pv_unhalt", "30 locks the_vcpus_really_run the_locks_we_compare"];

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Leg {
    /// QEMU with SVM and `kvm_amd`.
    Amd,
    /// Bochs with VT-x, pause-loop exiting and `kvm_intel`.
    Intel,
}

impl Leg {
    fn name(self) -> &'static str {
        match self {
            Self::Amd => "amd",
            Self::Intel => "intel",
        }
    }

    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Amd => AMD,
            Self::Intel => INTEL,
        }
    }

    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Amd => packages::QEMU,
            Self::Intel => &["bochs", "bochs-term", "bochsbios", "vgabios", "genisoimage", "isolinux", "syslinux-common"],
        }
    }
}

/// Runs the tests on these machines, or on all.
pub(crate) fn run(legs: &[Leg], workspace: &Workspace, summary: &mut Summary) {
    let legs = if legs.is_empty() { Leg::value_variants() } else { legs };
    let mut begun = Vec::new();
    let start = Instant::now();
    println!("\n=== packages");
    for &leg in legs {
        match Machine::fetch(leg, workspace) {
            Ok(machine) => begun.push(machine),
            Err(reason) => summary.add(Outcome::skipped(leg.name(), start.elapsed(), format!("no packages: {reason}"))),
        }
    }
    if begun.is_empty() {
        return;
    }
    let build =
        Step { name: "build", commands: vec![build(workspace)], runs_tests: false, limit: Duration::from_secs(900), closing: None };
    let built = run::step(build, workspace);
    let failed = !built.faults.is_empty();
    summary.add(built);
    for machine in begun {
        if failed || children::interrupted() {
            summary.not_run(machine.leg.name());
            continue;
        }
        summary.add(match machine.assemble(workspace) {
            Ok(emulator) => run::step(machine.step(emulator), workspace),
            Err(fault) => Outcome::failed(machine.leg.name(), fault),
        });
    }
}

/// Builds the test programs and puts them into one folder: the "runner" that cargo starts for each of them copies it.
///
/// Static, so that the initramfs needs no libraries; in a target directory of its own, as with all other flags.
fn build(workspace: &Workspace) -> Command {
    let programs = programs(workspace);
    let _ = fs::remove_dir_all(&programs);
    // If that fails, so does each copy.
    let _ = fs::create_dir_all(&programs);
    let mut command = workspace.cargo("test --release --package pvlock-tests --features pvlock-tests/stock-kvm --test *");
    command.args(["--target", TARGET, "--config"]).arg(format!("target.{TARGET}.runner = [\"cp\", \"-t\", {programs:?}]"));
    command.env("CARGO_TARGET_DIR", target(workspace)).env("RUSTFLAGS", "-C target-feature=+crt-static");
    command.env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
    command
}

/// Where the test programs are.
fn programs(workspace: &Workspace) -> PathBuf {
    target(workspace).join("programs")
}

fn target(workspace: &Workspace) -> PathBuf {
    workspace.target.join("stock-kvm")
}

/// What a machine is put together from.
struct Machine {
    leg: Leg,
    /// Where the packages are unpacked.
    root: PathBuf,
    /// The kernel's version.
    kernel: String,
}

impl Machine {
    fn fetch(leg: Leg, workspace: &Workspace) -> Result<Self, String> {
        // The package that follows Debian's kernel of the day. Small, and KVM and the serial port are in it.
        let image = packages::depends("linux-image-cloud-amd64")?;
        let image = image.iter().find(|name| name.starts_with("linux-image-")).ok_or("Debian has no kernel for clouds here")?;
        let names: Vec<_> = [image.as_str(), "busybox-static", "cpio"].into_iter().chain(leg.packages().iter().copied()).collect();
        let root = packages::fetch(&workspace.target, &names)?;
        Ok(Self { leg, root, kernel: image.trim_start_matches("linux-image-").to_owned() })
    }

    fn step(&self, emulator: Command) -> Step {
        // Longer than the emulator's own limit, so that it is that which ends it.
        let limit = LIMIT + Duration::from_secs(30);
        Step { name: self.leg.name(), commands: vec![emulator], runs_tests: true, limit, closing: Some(CLOSING) }
    }

    /// Puts the machine together and returns the command that runs it, with the serial port on its standard output.
    fn assemble(&self, workspace: &Workspace) -> Result<Command, String> {
        let folder = target(workspace).join(self.leg.name());
        let _ = fs::remove_dir_all(&folder);
        let initramfs = folder.join("initramfs");
        for directory in ["bin", "modules", "tests", "proc", "sys", "dev", "tmp"] {
            fs::create_dir_all(initramfs.join(directory)).map_err(|error| format!("{}: {error}", initramfs.display()))?;
        }
        let modules = self.root.join(format!("lib/modules/{}/kernel", self.kernel));
        let vendor = format!("arch/x86/kvm/kvm-{}", self.leg.name());
        // In the order in which they are loaded.
        for (at, module) in ["virt/lib/irqbypass", "arch/x86/kvm/kvm", &vendor].into_iter().enumerate() {
            let to = initramfs.join(format!("modules/{at}.ko"));
            copy(&modules.join(format!("{module}.ko")), &to)?;
            // Loading what is for debuggers takes an emulated machine 10 s.
            command("strip", ["--strip-debug"], &[&to])?;
        }
        for program in self.leg.programs() {
            let name = program.split_whitespace().nth(1).ok_or("a program without a name")?;
            let to = initramfs.join("tests").join(name);
            copy(&test_program(workspace, name)?, &to)?;
            command("strip", [], &[&to])?;
        }
        copy(&self.root.join("bin/busybox"), &initramfs.join("bin/busybox"))?;
        std::os::unix::fs::symlink("busybox", initramfs.join("bin/sh")).map_err(|error| error.to_string())?;
        write(&initramfs.join("programs"), &(self.leg.programs().join("\n") + "\n"))?;
        write(&initramfs.join("init"), include_str!("../stock-kvm/init"))?;
        command("chmod", ["+x"], &[&initramfs.join("init")])?;
        let cpio = self.root.join("bin/cpio");
        let pack = format!("cd initramfs && find . | '{}' --quiet -o -H newc -R 0:0 > ../initrd", cpio.display());
        done(Command::new("sh").arg("-c").arg(pack).current_dir(&folder))?;
        let kernel = self.root.join(format!("boot/vmlinuz-{}", self.kernel));
        let mut emulator = match self.leg {
            Leg::Amd => self.qemu(&kernel),
            Leg::Intel => self.bochs(&kernel, &folder)?,
        };
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|library| self.root.join(library));
        let path = std::env::join_paths(libraries).map_err(|error| error.to_string())?;
        emulator.current_dir(folder).env("LD_LIBRARY_PATH", path);
        Ok(emulator)
    }

    /// An emulator that is killed when its time is over, even if this program is not there any more.
    fn emulator(&self, shell: &str, program: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", shell, "sh", "timeout", "--signal=KILL"]).arg(LIMIT.as_secs().to_string());
        command.arg(self.root.join(program));
        command
    }

    fn qemu(&self, kernel: &Path) -> Command {
        let mut command = self.emulator(r#"exec "$@""#, "usr/bin/qemu-system-x86_64");
        for data in ["usr/share/seabios", "usr/share/qemu"] {
            command.arg("-L").arg(self.root.join(data));
        }
        // One thread for all CPUs: with more, nested guests fail at random, and not by our doing.
        command.args(["-M", "q35", "-accel", "tcg,thread=single", "-cpu", "max", "-smp", "4", "-m", "768"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]);
        command.args(["-initrd", "initrd", "-kernel"]).arg(kernel);
        command.args(["-append", "console=ttyS0,115200 quiet panic=-1 tsc=reliable mitigations=off"]);
        command
    }

    fn bochs(&self, kernel: &Path, folder: &Path) -> Result<Command, String> {
        let disc = folder.join("disc");
        fs::create_dir_all(&disc).map_err(|error| format!("{}: {error}", disc.display()))?;
        copy(kernel, &disc.join("vmlinuz"))?;
        copy(&self.root.join("usr/lib/ISOLINUX/isolinux.bin"), &disc.join("isolinux.bin"))?;
        copy(&self.root.join("usr/lib/syslinux/modules/bios/ldlinux.c32"), &disc.join("ldlinux.c32"))?;
        write(&disc.join("isolinux.cfg"), include_str!("../stock-kvm/isolinux.cfg"))?;
        // Its firmware reads discs slowly.
        done(Command::new("sh").args(["-c", "gzip -1 < initrd > disc/initrd"]).current_dir(folder))?;
        let mut iso = Command::new(self.root.join("usr/bin/genisoimage"));
        iso.args(["-quiet", "-o", "boot.iso", "-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4"]);
        done(iso.args(["-boot-info-table", "disc"]).current_dir(folder))?;
        write(&folder.join("bochsrc"), include_str!("../stock-kvm/bochsrc"))?;
        // Debian builds it with its debugger, which waits for a command: go on.
        write(&folder.join("commands"), "c\n")?;
        // The serial port is fd 3; what it draws on its terminal is nobody's. It calls a power-off a panic.
        let mut command = self.emulator(r#"exec 3>&1 >bochs.out 2>&1; "$@"; test $? != 137"#, "usr/bin/bochs-bin");
        command.args(["-q", "-f", "bochsrc", "-rc", "commands"]).env("TERM", "xterm");
        command.env("BXSHARE", self.root.join("usr/share/bochs"));
        command.env("LTDL_LIBRARY_PATH", self.root.join("usr/lib/x86_64-linux-gnu/bochs/plugins"));
        Ok(command)
    }
}

/// The test program of this name; cargo adds a hash to it.
fn test_program(workspace: &Workspace, name: &str) -> Result<PathBuf, String> {
    let folder = programs(workspace);
    let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| {
        path.to_str().and_then(|path| path.rsplit_once('-')).is_some_and(|(path, _)| Path::new(path).ends_with(name))
    };
    paths.find(is_it).ok_or_else(|| format!("no test program {name} in {}", folder.display()))
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    fs::copy(from, to).map(drop).map_err(|error| format!("cannot copy {} to {}: {error}", from.display(), to.display()))
}

fn write(to: &Path, text: &str) -> Result<(), String> {
    fs::write(to, text).map_err(|error| format!("cannot write {}: {error}", to.display()))
}

fn command<const N: usize>(program: &str, arguments: [&str; N], files: &[&Path]) -> Result<(), String> {
    done(Command::new(program).args(arguments).args(files))
}

fn done(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().display().to_string();
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{program}: {status}")),
        Err(error) => Err(format!("cannot start {program}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_of_the_machine_ends_with_the_closing_line() {
        let script = include_str!("../stock-kvm/init");
        let (says, end) = CLOSING.split_once(": ").expect("two parts");
        assert!(script.contains(&format!("end=\"{end}\"\n")) && script.contains(&format!("echo \"{says}: $end\"\n")));
    }

    #[test]
    fn every_program_has_a_divisor_and_a_name() {
        for program in AMD.iter().chain(INTEL) {
            let mut words = program.split_whitespace();
            assert!(words.next().is_some_and(|divisor| divisor.parse::<u64>().is_ok_and(|divisor| divisor > 0)), "{program}");
            assert!(words.next().is_some(), "{program}");
        }
    }
}
