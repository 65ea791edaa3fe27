//! Guests that go wrong: each ends with a named error, and none takes the VMM along.

use pvlock::backend::{Backend, RunError, Spec};
use pvlock::session::{Limits, Vcpus};
use pvlock_guest_image::LockKind;
use pvlock_guest_image::job::Workload;
use pvlock_host::{Config, ConfigError, EngineError};
use pvlock_tests::{kvm, spec, try_run};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const WATCHDOG: Duration = Duration::from_secs(2);

#[test]
fn a_hung_guest_is_dumped_vcpu_by_vcpu() {
    let Some(backend) = kvm() else { return };
    // The deadline is longer than the watchdog, so the sleepers are asleep when it looks; and they do not end by themselves
    // before vCPU 0 has come.
    let host = Config { deadline_ns: 3_600_000_000_000, spin_budget: 1, ..Config::default() };
    let stuck = Spec { workload: Workload::Stuck, host, limit: 0, log: 0, ..spec(LockKind::Ticket, 3) };
    let error = try_run(backend, &stuck, WATCHDOG).unwrap_err();
    let RunError::Hung { dump, .. } = &error else { panic!("{error}") };
    for vcpu in 0..3 {
        assert!(dump.contains(&format!("vCPU {vcpu}")), "{dump}");
    }
    assert!(dump.contains("waiting for lock 0x") && dump.contains("needs a kick"), "sleepers say why they sleep: {dump}");
    assert!(error.to_string().contains("the guest hangs"), "{error}");
}

#[test]
fn a_guest_that_panics_is_quoted() {
    let Some(backend) = kvm() else { return };
    let error = try_run(backend, &Spec { workload: Workload::Panic, ..spec(LockKind::Ticket, 2) }, WATCHDOG).unwrap_err();
    assert!(error.to_string().contains("the job asks for a panic"), "{error}");
}

#[test]
fn a_thread_that_panics_ends_the_run() {
    let error = try_run(Backend::Threads, &Spec { workload: Workload::Panic, ..spec(LockKind::Ticket, 2) }, WATCHDOG).unwrap_err();
    assert!(matches!(error, RunError::Panicked), "{error}");
}

#[test]
fn a_host_without_a_deadline_is_refused() {
    let host = Config { deadline_ns: 0, ..Config::default() };
    let error = try_run(Backend::Threads, &Spec { host, ..spec(LockKind::Ticket, 2) }, WATCHDOG).unwrap_err();
    assert!(matches!(error, RunError::Engine(EngineError::Config(ConfigError::NoDeadline))), "{error}");
}

#[test]
fn threads_that_have_no_time_to_end_are_no_hung_guest() {
    // Told to stop as soon as they have begun, while vCPU 0 holds the lock for good; and nobody waits for them at all.
    let stuck = Spec { workload: Workload::Stuck, limit: 0, log: 0, ..spec(LockKind::Ticket, 3) };
    let limits = Limits { run: Duration::from_secs(600), watchdog: Duration::from_secs(600), end: Duration::ZERO };
    let interrupt = AtomicBool::new(false);
    let begun = |_, _: &dyn Vcpus| interrupt.store(true, Ordering::Relaxed);
    let error = Backend::Threads.run(&stuck, limits, &interrupt, begun, |outcome| outcome.ended).unwrap_err();
    let RunError::NotEnded { seconds, dump } = &error else { panic!("{error}") };
    assert!(*seconds < 600.0, "the time they had, not the watchdog's: {error}");
    assert!((0..3).all(|vcpu| dump.contains(&format!("vCPU {vcpu} has"))), "{error}");
}
