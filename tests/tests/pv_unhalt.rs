//! Halts and kicks by stock KVM's own means, without a pvlock host. There is no deadline: a lost kick is a hang.
//!
//! On software KVM that is impossible, and each of these tests asks that it be refused with one error that says so.

use pvlock::backend::{Backend, RunError, Spec};
use pvlock::measure::Measured;
use pvlock::vm::{Cpl, ExitKind, KvmKind, NoPvUnhalt};
use pvlock_guest_image::job::Workload;
use pvlock_guest_image::{HaltBy, LockKind};
use pvlock_host::Config;
use pvlock_tests::{kvm, run, scaled, spec, try_run};
use std::time::{Duration, Instant};

const LOCKS: [LockKind; 2] = [LockKind::Ticket, LockKind::Preemptable];

/// KVM that can do it; where it cannot, checks that it is refused.
fn hardware() -> Option<Backend> {
    let backend = kvm()?;
    let refused = match backend {
        Backend::Kvm { kind: KvmKind::Hardware, .. } => return Some(backend),
        Backend::Kvm { cpl, .. } => [Cpl::Zero, cpl].map(|cpl| Backend::Kvm { kind: KvmKind::Software, cpl }),
        Backend::Threads => unreachable!("not KVM"),
    };
    for backend in refused {
        let error = try_run(backend, &halting(LockKind::Ticket, 2), Duration::from_secs(30)).expect_err("software KVM cannot");
        assert!(matches!(error, RunError::NoPvUnhalt(NoPvUnhalt::Software)), "{error}");
        let text = error.to_string();
        assert!(text.contains("hardware KVM") && text.contains("doorbells") && text.lines().count() == 1, "{text}");
    }
    None
}

/// A run in which waiters halt almost at once.
fn halting(lock: LockKind, vcpus: usize) -> Spec {
    let host = Config { spin_budget: 1, ..spec(lock, 1).host };
    Spec { host, halt: HaltBy::PvUnhalt, ..spec(lock, vcpus) }
}

/// What must be so after every run.
fn checked(backend: Backend, spec: &Spec) -> Measured {
    let measured = run(backend, spec);
    let context = format!("{spec:?}: {measured:?}");
    assert!(measured.row.exact, "{context}");
    if spec.lock.is_strict() {
        assert!(measured.order.unwrap().is_strict(), "{context}");
        assert_eq!(measured.order.unwrap().unlogged, 0, "{context}");
    }
    // The end of each vCPU, and nothing else: neither a doorbell nor a halt has come to user space.
    let exits = measured.exits.unwrap();
    assert_eq!((exits.get(ExitKind::IoOut), exits.get(ExitKind::IoIn)), (spec.vcpus as u64, 0), "{context}");
    assert_eq!(exits.get(ExitKind::Hlt), 0, "{context}");
    assert_eq!(measured.host.halts + measured.host.kicks, 0, "{context}");
    measured
}

#[test]
fn every_workload_is_exact_and_strictly_ordered_with_kvms_own_halts_and_kicks() {
    let Some(backend) = hardware() else { return };
    for lock in LOCKS {
        for workload in [Workload::Counter, Workload::PingPong, Workload::ManyLocks, Workload::Nested, Workload::TryMix] {
            for vcpus in [1, 2, 6] {
                checked(backend, &Spec { workload, ..halting(lock, vcpus) });
            }
        }
    }
}

#[test]
fn waiters_halt_and_every_kick_arrives() {
    let Some(backend) = hardware() else { return };
    for lock in LOCKS {
        // Sections that outlast the spin before a wait is published, and more of them than fit a time slice.
        let (limit, inside) = (scaled(1000), 50_000);
        let measured = checked(backend, &Spec { limit, inside, log: 6 * limit, ..halting(lock, 6) });
        assert!(measured.row.halts > 0, "with a budget of one tick waiters halt: {measured:?}");
        assert!(measured.row.kicks > 0, "{measured:?}");
    }
}

#[test]
fn with_the_guests_own_budget_it_is_exact_too() {
    let Some(backend) = hardware() else { return };
    for lock in LOCKS {
        checked(backend, &Spec { host: spec(lock, 1).host, inside: 5_000, ..halting(lock, 6) });
    }
}

#[test]
fn vcpus_that_sleep_in_the_kernel_are_dumped_and_ended_in_time() {
    let Some(backend) = hardware() else { return };
    let spec = Spec { workload: Workload::Stuck, limit: 0, log: 0, ..halting(LockKind::Ticket, 4) };
    let begun = Instant::now();
    match try_run(backend, &spec, Duration::from_secs(1)) {
        Err(RunError::Hung { dump, .. }) => assert_eq!(dump.matches("vCPU ").count(), 4, "{dump}"),
        other => panic!("vCPU 0 keeps the lock for ever, yet: {other:?}"),
    }
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn threads_have_no_kvm_to_halt_by() {
    let error = try_run(Backend::Threads, &halting(LockKind::Ticket, 2), Duration::from_secs(30)).expect_err("no KVM");
    assert!(matches!(error, RunError::NoPvUnhalt(NoPvUnhalt::NoVm)), "{error}");
}
