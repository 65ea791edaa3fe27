//! What the end-to-end tests share: where they run, and how they say that they cannot.

use pvlock::backend::{Backend, Outcome, RunError, Spec};
use pvlock::measure::{Measured, measure};
use pvlock::session::{Ended, Limits};
use pvlock::vm::{self, Cpl, KvmKind};
use pvlock_guest_image::job::Workload;
use pvlock_guest_image::{HaltBy, LockKind};
use pvlock_host::Config;
use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Says loudly that the calling test cannot run here: on standard error and, for the summary of `cargo xtask test`, in the
/// file that the environment variable `PVLOCK_SKIP_LOG` names.
///
/// # Panics
///
/// If that file cannot be written: a skip must not go unseen.
pub fn skip(reason: &impl Display) {
    let thread = std::thread::current();
    let line = format!("SKIPPED: {}: {reason}", thread.name().unwrap_or("?"));
    eprintln!("{line}");
    if let Some(path) = std::env::var_os("PVLOCK_SKIP_LOG") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()))
            .expect("PVLOCK_SKIP_LOG must name a file that can be written");
    }
}

/// KVM with the guest in the privilege level that suits it; `None`, said loudly, where there is none.
pub fn kvm() -> Option<Backend> {
    match vm::open() {
        Ok(_) => {
            let kind = KvmKind::detect();
            Some(Backend::Kvm { kind, cpl: Cpl::best_for(kind) })
        }
        Err(error) => {
            skip(&error);
            None
        }
    }
}

/// Threads, and KVM if there is one; on an emulated machine only KVM, which is what it is there for.
pub fn backends() -> Vec<Backend> {
    let threads = emulated().is_none().then_some(Backend::Threads);
    [threads, kvm()].into_iter().flatten().collect()
}

/// On an emulated machine, which is slow, the number by which tests are to divide their work: the environment variable
/// `PVLOCK_EMULATED`, as `cargo xtask stock-kvm` sets it.
fn emulated() -> Option<u64> {
    let divisor = std::env::var("PVLOCK_EMULATED").ok()?;
    Some(divisor.parse().ok().filter(|divisor| *divisor > 0).expect("PVLOCK_EMULATED must be a number above 0"))
}

/// So many critical sections, or fewer on an emulated machine.
pub fn scaled(sections: u64) -> u64 {
    (sections / emulated().unwrap_or(1)).max(1)
}

/// Longer than any wait on a busy machine, so that a forced wake in these tests is a lost kick.
pub const DEADLINE_NS: u64 = 20_000_000_000;

/// One VM at a time: a dozen at once measure the scheduler's patience, not the locks.
static TURN: Mutex<()> = Mutex::new(());

/// Waits for the turn of whoever has VMs of its own.
pub fn turn() -> MutexGuard<'static, ()> {
    // A test that failed in its turn leaves nothing behind that matters here.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A checking run of `lock` on the counter workload: short, with a log, ended by its own limit.
pub fn spec(lock: LockKind, vcpus: usize) -> Spec {
    let limit = scaled(300);
    Spec {
        lock,
        workload: Workload::Counter,
        vcpus,
        locks: 8,
        inside: 100,
        outside: 300,
        limit,
        churn: 0,
        log: limit * vcpus as u64,
        host: Config { deadline_ns: DEADLINE_NS, ..Config::default() },
        paravirtual: true,
        halt: HaltBy::Doorbell,
        ioeventfd: false,
    }
}

/// Runs a spec to its own end. The watchdog is generous: these tests ask what comes out, not when.
///
/// # Errors
///
/// Whatever the run fails with.
pub fn try_run(backend: Backend, spec: &Spec, watchdog: Duration) -> Result<Measured, RunError> {
    let _turn = turn();
    let limits = Limits { run: Duration::from_secs(600), watchdog, end: watchdog };
    let read = |outcome: &Outcome<'_>| {
        assert_eq!(outcome.ended, Ended::Done);
        measure(spec, outcome, 1)
    };
    backend.run(spec, limits, &AtomicBool::new(false), |_, _| (), read)
}

/// Runs a spec to its own end.
///
/// # Panics
///
/// If the run fails.
pub fn run(backend: Backend, spec: &Spec) -> Measured {
    // An emulated machine's clock goes on while the emulator waits for a CPU.
    let patience = if emulated().is_some() { 120 } else { 30 };
    match try_run(backend, spec, Duration::from_secs(patience)) {
        Ok(measured) => measured,
        Err(error) => panic!("{backend:?}: {error}"),
    }
}
