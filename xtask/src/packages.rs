//! Programs of the distribution that are used without being installed: downloaded, and unpacked below the target directory.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Downloads Debian packages, with whatever they depend on that is not installed, and unpacks them below `directory`, once.
/// Returns the root of the tree.
pub(crate) fn unpack(packages: &[&str], directory: &Path) -> Result<PathBuf, String> {
    let root = directory.join("root");
    let done = directory.join(format!("unpacked-{}", packages.join("-")));
    if done.exists() {
        return Ok(root);
    }
    let archives = directory.join("archives");
    for place in [&root, &archives] {
        fs::create_dir_all(place).map_err(|error| format!("cannot make {}: {error}", place.display()))?;
    }
    let missing = missing(packages)?;
    let mut download = Command::new("apt-get");
    download.arg("download").args(&missing).current_dir(&archives).stdout(Stdio::null());
    run(&mut download)?;
    let entries = fs::read_dir(&archives).map_err(|error| format!("cannot read {}: {error}", archives.display()))?;
    for archive in entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "deb")) {
        run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&root))?;
    }
    fs::write(&done, "").map_err(|error| format!("cannot write {}: {error}", done.display()))?;
    Ok(root)
}

/// These packages and all that they need, without what is installed.
fn missing(packages: &[&str]) -> Result<BTreeSet<String>, String> {
    const NOT: [&str; 6] = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"];
    let mut depends = Command::new("apt-cache");
    depends.args(["depends", "--recurse"]);
    depends.args(NOT.iter().map(|kind| format!("--no-{kind}"))).args(packages);
    let known = output(&mut depends)?;
    let installed = output(Command::new("dpkg-query").args(["-W", "-f", "${Package} ${db:Status-Status}\n"]))?;
    let installed: BTreeSet<&str> = installed.lines().filter_map(|line| line.strip_suffix(" installed")).collect();
    Ok(named(&known).filter(|name| !installed.contains(name)).map(str::to_owned).collect())
}

/// The packages in the output of `apt-cache depends`: names begin a line, relations are indented, virtual packages in brackets.
fn named(depends: &str) -> impl Iterator<Item = &str> {
    depends.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_alphanumeric()))
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name}: {status}")),
        Err(error) => Err(format!("cannot start {name}: {error}")),
    }
}

fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("cannot start {name}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_real_packages_are_named() {
        let text = "qemu-system-x86\n  Depends: libfdt1\n    libfdt1\n  Depends: <a-virtual-one>\nlibfdt1\n<a-virtual-one>\n    provider\n";
        assert_eq!(named(text).collect::<Vec<_>>(), ["qemu-system-x86", "libfdt1"]);
    }
}
