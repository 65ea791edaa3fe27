//! The locks on real vCPUs: nothing lost, nobody overtaken, nobody forgotten.

use pvlock::backend::{Backend, Outcome};
use pvlock::measure::{Measured, measure};
use pvlock::session::Limits;
use pvlock::vm::{Cpl, ExitKind};
use pvlock_guest_image::LockKind;
use pvlock_guest_image::job::Workload;
use pvlock_host::protocol::HostFlags;
use pvlock_host::{Config, Queue};
use pvlock_tests::{backends, kvm, run, scaled, spec};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const WORKLOADS: [Workload; 5] = [Workload::Counter, Workload::PingPong, Workload::ManyLocks, Workload::Nested, Workload::TryMix];

#[test]
fn every_workload_is_exact_and_strictly_ordered_at_every_overcommit() {
    for backend in backends() {
        for workload in WORKLOADS {
            for vcpus in [1, 2, 8] {
                let spec = pvlock::backend::Spec { workload, ..spec(LockKind::Ticket, vcpus) };
                let measured = run(backend, &spec);
                let context = format!("{backend:?} {workload:?} {vcpus}: {measured:?}");
                assert!(measured.row.exact, "{context}");
                let order = measured.order.unwrap();
                assert!(order.is_strict(), "{context}");
                assert_eq!(order.unlogged, 0, "{context}");
                let sections = spec.limit * vcpus as u64;
                match workload {
                    // Two acquisitions, but for the last lock.
                    Workload::Nested => assert!((sections..=2 * sections).contains(&order.checked), "{context}"),
                    _ => assert_eq!(order.checked, sections, "{context}"),
                }
                assert_eq!(measured.host.forced, 0, "{context}");
                assert_eq!(measured.host.refused, 0, "{context}");
            }
        }
    }
}

#[test]
fn the_locks_we_compare_with_are_exact() {
    for backend in backends() {
        for (name, lock) in LockKind::ALL {
            if matches!(lock, LockKind::Ticket | LockKind::Preemptable)
                || (lock.needs_std() && !matches!(backend, Backend::Threads))
            {
                continue;
            }
            for workload in [Workload::Counter, Workload::TryMix] {
                // Few: plain queue locks need a scheduler for each hand-over.
                let spec = pvlock::backend::Spec { workload, limit: 20, log: 0, ..spec(lock, 4) };
                let measured = run(backend, &spec);
                assert!(measured.row.exact, "{backend:?} {name} {workload:?}");
                assert_eq!(measured.host.halts, 0, "{backend:?} {name} {workload:?}");
            }
        }
    }
}

#[test]
fn pauses_are_counted_for_every_lock_that_spins() {
    for backend in backends() {
        for (name, lock) in LockKind::ALL.into_iter().filter(|(_, lock)| !lock.needs_std()) {
            // Held half the time, so that somebody waits; nobody halts before the first PAUSE. But one vCPU may have the lock
            // to itself all the time, where the machine is busy or the lock unfair.
            let spec = pvlock::backend::Spec { inside: 5_000, outside: 5_000, limit: 0, log: 0, ..spec(lock, 4) };
            let counted = (0..20).any(|_| {
                let measured = run_for(backend, &spec, Duration::from_millis(200));
                // Nothing measured says nothing, not even that counts agree: see `measure`.
                let pauses = measured.row.pauses_per_op;
                assert!(measured.row.exact || pauses.is_none(), "{backend:?} {name}: {measured:?}");
                pauses.is_some_and(|pauses| pauses > 0.0)
            });
            assert!(counted, "{backend:?} {name}");
        }
    }
}

#[test]
fn a_lock_without_waiters_pauses_not_at_all() {
    for backend in backends() {
        for (name, lock) in LockKind::ALL.into_iter().filter(|(_, lock)| !lock.needs_std()) {
            let spec = pvlock::backend::Spec { limit: 0, log: 0, ..spec(lock, 1) };
            // On a busy machine its vCPU may get no CPU for all of a short run.
            let pauses = (0..20).find_map(|_| run_for(backend, &spec, Duration::from_millis(80)).row.pauses_per_op);
            assert_eq!(pauses, Some(0.0), "{backend:?} {name}");
        }
    }
}

/// Runs a spec without a limit of its own for that long.
fn run_for(backend: Backend, spec: &pvlock::backend::Spec, time: Duration) -> Measured {
    let limits = Limits { run: time, watchdog: Duration::from_secs(30), end: Duration::from_secs(30) };
    let read = |outcome: &Outcome<'_>| measure(spec, outcome, 1);
    match backend.run(spec, limits, &AtomicBool::new(false), |_, _| (), read) {
        Ok(measured) => measured,
        Err(error) => panic!("{backend:?}: {error}"),
    }
}

#[test]
fn every_queue_and_wake_ahead_serves_in_order() {
    for backend in backends() {
        for queue in [Queue::None, Queue::Holder, Queue::Previous] {
            for wake_ahead in [0, 1, 4] {
                let host = Config { queue, wake_ahead, spin_budget: 1, ..spec(LockKind::Ticket, 1).host };
                // Sections that outlast the spin before a wait is published, and more of them than fit a time slice.
                let (limit, inside) = (scaled(1000), 50_000);
                let measured =
                    run(backend, &pvlock::backend::Spec { host, inside, limit, log: 6 * limit, ..spec(LockKind::Ticket, 6) });
                let context = format!("{backend:?} {queue:?} {wake_ahead}: {measured:?}");
                assert!(measured.row.exact && measured.order.unwrap().is_strict(), "{context}");
                assert_eq!(measured.host.forced, 0, "{context}");
                assert!(measured.host.parks > 0, "with a budget of one tick waiters halt: {context}");
                if queue == Queue::None {
                    assert_eq!(measured.host.queued, 0, "{context}");
                }
            }
        }
    }
}

#[test]
fn row_23_on_dedicated_cpus_or_switched_off_nobody_halts() {
    for backend in backends() {
        for flags in [HostFlags::DEDICATED, HostFlags::OFF] {
            let host = Config { flags, spin_budget: 1, ..spec(LockKind::Ticket, 1).host };
            let measured = run(backend, &pvlock::backend::Spec { host, ..spec(LockKind::Ticket, 2) });
            assert!(measured.row.exact && measured.order.unwrap().is_strict(), "{backend:?} {flags:?}");
            assert_eq!((measured.host.halts, measured.host.kicks), (0, 0), "{backend:?} {flags:?}");
        }
    }
}

#[test]
fn without_a_host_the_same_lock_spins() {
    for backend in backends() {
        let measured = run(backend, &pvlock::backend::Spec { paravirtual: false, limit: 100, ..spec(LockKind::Ticket, 2) });
        assert!(measured.row.exact && measured.order.unwrap().is_strict(), "{backend:?}");
        assert_eq!(measured.host.halts + measured.host.kicks + measured.host.refused, 0, "{backend:?}");
    }
}

#[test]
fn sixty_four_vcpus_are_served_in_order() {
    for backend in backends() {
        let measured = run(backend, &pvlock::backend::Spec { limit: 20, ..spec(LockKind::Ticket, 64) });
        assert!(measured.row.exact && measured.order.unwrap().is_strict(), "{backend:?}: {measured:?}");
        assert_eq!(measured.host.forced, 0, "{backend:?}");
    }
}

#[test]
fn the_vcpus_really_run_in_kvm() {
    let Some(backend) = kvm() else { return };
    let host = Config { spin_budget: 1, ..spec(LockKind::Ticket, 1).host };
    let measured = run(backend, &pvlock::backend::Spec { host, ..spec(LockKind::Ticket, 4) });
    let exits = measured.exits.unwrap();
    // REGISTER, four ONLINEs and their answers, each halt and kick, each vCPU's end.
    assert_eq!(exits.get(ExitKind::IoOut), 1 + 4 + measured.host.halts + measured.host.kicks_sent + 4);
    assert_eq!(exits.get(ExitKind::IoIn), 1 + 4);
}

/// Where kernels live. On software KVM every instruction there is emulated: few acquisitions.
#[test]
fn the_guest_runs_in_cpl_0_and_finds_its_host_through_cpuid() {
    let Some(Backend::Kvm { kind, .. }) = kvm() else { return };
    let backend = Backend::Kvm { kind, cpl: Cpl::Zero };
    for paravirtual in [true, false] {
        let measured =
            run(backend, &pvlock::backend::Spec { limit: 20, inside: 1, outside: 1, paravirtual, ..spec(LockKind::Ticket, 2) });
        assert!(measured.row.exact && measured.order.unwrap().is_strict(), "{measured:?}");
        assert_eq!(measured.host.forced, 0);
    }
}
