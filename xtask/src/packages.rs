//! Debian packages as folders: fetched and unpacked below the target directory, never installed.
//!
//! (Installing them could remove others from the machine, and would need root.)

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::children;

/// QEMU for x86-64, with its accelerators and firmware.
pub(crate) const QEMU: &[&str] = &["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

/// Unpacks the packages `names`, and the libraries that they need and that are not installed, into one root below `target`, and
/// returns it. What was fetched before is not fetched again: then this needs no network.
pub(crate) fn fetch(target: &Path, names: &[&str]) -> Result<PathBuf, String> {
    let (root, archives) = (target.join("packages/root"), target.join("packages/archives"));
    for directory in [&root, &archives] {
        fs::create_dir_all(directory).map_err(|error| format!("cannot create {}: {error}", directory.display()))?;
    }
    let fetched = |name: &str| archives.join(format!("{name}.unpacked"));
    let wanted = with_lists(|| with_libraries(names))?;
    let missing: Vec<_> = wanted.into_iter().filter(|name| !fetched(name).exists()).collect();
    if !missing.is_empty() {
        println!("--- apt-get download {}", missing.join(" "));
        with_lists(|| output(Command::new("apt-get").arg("download").args(&missing).current_dir(&archives)))?;
    }
    for name in missing {
        // NAME_VERSION_ARCHITECTURE.deb
        let archive = newest(&archives, &format!("{name}_")).ok_or_else(|| format!("apt-get left no archive of {name}"))?;
        output(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&root))?;
        let done = fetched(&name);
        fs::write(&done, "").map_err(|error| format!("cannot write {}: {error}", done.display()))?;
        // Unpacked, it is only in the way.
        let _ = fs::remove_file(archive);
    }
    Ok(root)
}

/// The packages that a package depends on directly.
pub(crate) fn depends(name: &str) -> Result<Vec<String>, String> {
    let text = with_lists(|| output(Command::new("apt-cache").args(["depends", "--important", name])))?;
    Ok(text.lines().filter_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned).collect())
}

fn with_libraries(names: &[&str]) -> Result<BTreeSet<String>, String> {
    let mut needs = Command::new("apt-cache");
    needs.args(["depends", "--recurse", "--important", "--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances"]);
    let needed = output(needs.args(names))?;
    let installed = output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Abbrev} ${Package}\n"]))?;
    let installed: BTreeSet<_> = installed.lines().filter_map(|line| line.strip_prefix("ii")).map(str::trim).collect();
    // One package a line; what it depends on is indented, and comes again as a package. `<name>` is a virtual one.
    let libraries = needed.lines().filter(|name| name.starts_with("lib") && !installed.contains(name));
    Ok(libraries.chain(names.iter().copied()).map(str::to_owned).collect())
}

/// Does `what`; if that fails, reads the lists of packages anew, which may be missing or old, and tries once more.
fn with_lists<T>(what: impl Fn() -> Result<T, String>) -> Result<T, String> {
    what().or_else(|error| {
        if children::interrupted() {
            return Err(error);
        }
        // Only root may; if it fails, the second attempt says what is missing.
        let _ = output(Command::new("apt-get").arg("update"));
        what()
    })
}

/// What a command prints, if it succeeds.
fn output(command: &mut Command) -> Result<String, String> {
    let shown = command.get_program().display().to_string();
    let output = command.env("LC_ALL", "C").output().map_err(|error| format!("cannot start {shown}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
    Err(format!("{shown} failed: {last}"))
}

fn newest(directory: &Path, prefix: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?.flatten();
    let of_package = entries.filter(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with(prefix) && name.ends_with(".deb")
    });
    of_package.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok()).map(|entry| entry.path())
}
