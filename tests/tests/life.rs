//! vCPUs that go and come back, and VMs that stand still: nothing lost, nobody forgotten, nothing left over.

use pvlock::backend::{Backend, Outcome, Spec, kvm::Machine};
use pvlock::measure::measure;
use pvlock::session::{Disturbance, Ended, Limits, Vcpus};
use pvlock_guest_image::LockKind;
use pvlock_guest_image::job::phase;
use pvlock_tests::{backends, kvm, spec, turn};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LIMITS: Limits = Limits { run: Duration::from_millis(400), watchdog: Duration::from_secs(30), end: Duration::from_secs(30) };

/// Half of the lives of vCPU 0 end in a registration, and the others die as often: about a thousand lives.
const REGISTRATIONS: u32 = 150;

#[test]
fn row_06_a_thousand_resets_and_registrations_leave_nothing_behind() {
    for backend in backends() {
        for lock in [LockKind::Ticket, LockKind::Preemptable] {
            let host = pvlock_host::Config { spin_budget: 1, ..spec(lock, 1).host };
            let spec = Spec { churn: 10, inside: 2000, limit: 0, log: 0, host, ..spec(lock, 4) };
            let (mut registrations, started) = (0, Instant::now());
            while registrations < REGISTRATIONS {
                assert!(started.elapsed() < Duration::from_secs(100), "{backend:?} {lock:?}: only {registrations}");
                let _turn = turn();
                let fault = Cell::new(Ok(()));
                // An entry that a queue has kept would show here.
                let look = |_, vcpus: &dyn Vcpus| fault.set(fault.get().and(vcpus.disturb(Disturbance::Look)));
                let read = |outcome: &Outcome<'_>| {
                    (outcome.ended, outcome.job.registrations.load(Ordering::Relaxed), measure(&spec, outcome, 1))
                };
                let result = backend.run(&spec, LIMITS, &AtomicBool::new(false), look, read);
                let (ended, moved, measured) = result.unwrap_or_else(|error| panic!("{backend:?} {lock:?}: {error}"));
                let context = format!("{backend:?} {lock:?}: {measured:?}");
                assert_eq!((ended, fault.get()), (Ended::Done, Ok(())), "{context}");
                assert!(measured.row.exact, "{context}");
                assert_eq!(measured.host.forced, 0, "{context}");
                registrations += moved;
            }
        }
    }
}

#[test]
fn a_paused_vm_stands_still_and_then_goes_on() {
    let Some(Backend::Kvm { cpl, .. }) = kvm() else { return };
    let _turn = turn();
    let host = pvlock_host::Config { spin_budget: 1, ..spec(LockKind::Ticket, 1).host };
    let machine = Machine::start(&Spec { host, limit: 0, log: 0, ..spec(LockKind::Ticket, 4) }, cpl).expect("a VM");
    let job = machine.job();
    let sections = || job.done.iter().map(|done| done.acquisitions.load(Ordering::Relaxed)).sum::<u64>();
    let moves = |from: u64| {
        let asked = Instant::now();
        while sections() == from {
            assert!(asked.elapsed() < Duration::from_secs(20), "the VM does not go on");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // Release: pairs with the vCPUs' Acquire.
    job.phase.store(phase::MEASURE, Ordering::Release);
    for _ in 0..20 {
        moves(sections());
        let snapshot = machine.save().expect("all vCPUs come to rest");
        assert!(snapshot.registers.len() == 4 && snapshot.registers.iter().all(Option::is_some));
        let at_rest = sections();
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(sections(), at_rest);
        let mut now = vec![0; snapshot.memory.len()];
        machine.memory().read(0, &mut now).expect("all of RAM");
        assert!(now == snapshot.memory, "somebody wrote to the memory of a VM that stands still");
        machine.resume();
        moves(at_rest);
    }
    machine.pause().expect("all vCPUs come to rest");
    // Not only a VM that runs can be ended.
    let remains = machine.shut_down().expect("no vCPU failed");
    assert_eq!(remains.host.forced, 0);
}
