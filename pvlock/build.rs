//! Builds the freestanding guest image and tells the crate where it is.
//!
//! The guest gets a target directory of its own under `OUT_DIR`, so the inner
//! cargo never waits for the outer one's lock, and a clean environment, so that
//! flags meant for the host build (loom, coverage, sanitizers) stay out of it.
//! It is always a release build: a debug guest would measure the compiler.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What the image is made of, below the workspace root.
const SOURCES: [&str; 6] = ["guest-image", "protocol", "hypercalls", "pvlock-guest", "Cargo.toml", "Cargo.lock"];

/// Variables that carry settings of the outer build into an inner cargo.
const UNWANTED: [&str; 10] = [
    "RUSTFLAGS",
    "RUSTDOCFLAGS",
    "CARGO_ENCODED_RUSTDOCFLAGS",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "CARGO_INCREMENTAL",
    "CARGO_TARGET_DIR",
    "CLIPPY_ARGS",
    "LLVM_PROFILE_FILE",
    "CARGO_UNSTABLE_TARGET_APPLIES_TO_HOST",
];

/// Prefixes of the same kind. `CARGO_CFG_*` and `CARGO_FEATURE_*` describe the outer crate to its build script.
const UNWANTED_PREFIXES: [&str; 6] =
    ["CARGO_BUILD_", "CARGO_CFG_", "CARGO_FEATURE_", "CARGO_LLVM_COV", "CARGO_PROFILE_", "CARGO_TARGET_"];

fn main() -> ExitCode {
    match build() {
        Ok(image) => {
            println!("cargo:rustc-env=PVLOCK_GUEST_IMAGE={}", image.display());
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("\nThe guest image could not be built.\n{message}\n");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<PathBuf, String> {
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let root = manifest.parent().ok_or("pvlock is not inside its workspace")?.to_path_buf();
    println!("cargo:rerun-if-changed=build.rs");
    for source in SOURCES {
        watch(&root.join(source));
    }

    let target_dir = Path::new(&variable("OUT_DIR")?).join("guest");
    let mut command = Command::new(variable("CARGO")?);
    for (name, _) in env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        if UNWANTED.contains(&text) || UNWANTED_PREFIXES.iter().any(|p| text.starts_with(p)) {
            command.env_remove(&name);
        }
    }
    command
        .current_dir(&root)
        // Replaces flags from the environment and from cargo's configuration files alike.
        .env("CARGO_ENCODED_RUSTFLAGS", "-Crelocation-model=static")
        .args(["rustc", "--package", "pvlock-guest-image", "--bin", "pvlock-guest"])
        .args(["--features", "freestanding", "--profile", "guest", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target_dir)
        .args(["--", "-C", "relocation-model=static", "-C", "strip=debuginfo"]);

    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
    let shown = format!("cargo {}", arguments.join(" "));
    let output = command.output().map_err(|error| format!("cannot start `{shown}`: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "`{shown}`\nended with {}:\n\n{}\n\
             The guest needs the {TARGET} target (`rustup target add {TARGET}`) and a C linker (`cc`).",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    let image = target_dir.join(TARGET).join("guest").join("pvlock-guest");
    match fs::metadata(&image) {
        Ok(data) if data.is_file() => Ok(image),
        _ => Err(format!("cargo succeeded but left no image at {}", image.display())),
    }
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error} (run this through cargo)"))
}

/// Runs this script again when anything below `path` changes. A path that does not
/// exist yet would rerun it on every build, so it is left out.
fn watch(path: &Path) {
    if path.exists() {
        println!("cargo:rerun-if-changed={}", path.display());
    }
}
