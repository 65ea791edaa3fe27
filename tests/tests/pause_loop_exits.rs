//! What hardware counts: pause-loop exits of VT-x, from the kernel's own trace of exits.
//!
//! Needs Intel's pause-loop exiting, a guest in CPL 0 and the right to trace. So it is no part of the ordinary tests; `cargo
//! xtask stock-kvm intel` runs it.

// With `required-features` instead, `--test *` would be refused without the feature.
#![cfg(feature = "stock-kvm")]

use pvlock::backend::{Outcome, Spec};
use pvlock::measure::measure;
use pvlock::session::{Ended, Limits, Vcpus};
use pvlock_guest_image::{HaltBy, LockKind};
use pvlock_host::Config;
use pvlock_tests::{kvm, scaled, spec};
use std::fs;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const EVENT: &str = "/sys/kernel/tracing/events/kvm/kvm_exit";
/// Reason of a pause-loop exit (Intel SDM vol. 3, appendix C).
const PAUSE_INSTRUCTION: u64 = 40;

/// Pause-loop exits of all VMs, from now on.
struct Exits;

impl Exits {
    fn count() -> Self {
        fs::write(format!("{EVENT}/trigger"), "hist:keys=exit_reason").expect("the right to trace kvm_exit");
        Self
    }

    /// Pause-loop exits so far. A line of the histogram: `{ exit_reason:         40 } hitcount:        778`.
    fn so_far(&self) -> u64 {
        let text = fs::read_to_string(format!("{EVENT}/hist")).expect("the histogram of kvm_exit");
        let numbers = |line: &str| -> Option<(u64, u64)> {
            let (reason, hits) = line.strip_prefix("{ exit_reason:")?.split_once("} hitcount:")?;
            Some((reason.trim().parse().ok()?, hits.trim().parse().ok()?))
        };
        text.lines().filter_map(numbers).find(|(reason, _)| *reason == PAUSE_INSTRUCTION).map_or(0, |(_, hits)| hits)
    }
}

impl Drop for Exits {
    fn drop(&mut self) {
        let _ = fs::write(format!("{EVENT}/trigger"), "!hist:keys=exit_reason");
    }
}

/// Pause-loop exits while the vCPUs of a run do their work, without those of the wait for its beginning.
fn exits(spec: &Spec) -> u64 {
    let backend = kvm().expect("stock KVM");
    let exits = Exits::count();
    let mut before = None;
    let limits = Limits { run: Duration::from_secs(600), watchdog: Duration::from_secs(120), end: Duration::from_secs(120) };
    let progress = |_, _: &dyn Vcpus| _ = before.get_or_insert_with(|| exits.so_far());
    let read = |outcome: &Outcome<'_>| {
        assert_eq!(outcome.ended, Ended::Done);
        measure(spec, outcome, 1)
    };
    let measured = backend.run(spec, limits, &AtomicBool::new(false), progress, read).unwrap_or_else(|error| panic!("{error}"));
    assert!(measured.row.exact, "{measured:?}");
    let count = exits.so_far() - before.expect("it has begun");
    println!(
        "{} on {} vCPUs, {:?}: {count} pause-loop exits, {} halts",
        measured.row.lock, spec.vcpus, spec.halt, measured.row.halts
    );
    count
}

#[test]
fn our_locks_cause_fewer_pause_loop_exits_than_a_plain_ticket_lock() {
    // Sections longer than the window of 4096 cycles, and more vCPUs than CPUs.
    let contended = |lock| Spec { limit: scaled(1000), inside: 20_000, outside: 1_000, log: 0, ..spec(lock, 4) };
    let plain = exits(&contended(LockKind::SpinTicket));
    assert!(plain > 0, "no pause-loop exiting here");
    // KVM gives no spin budget, and has no window for guests to see: one window, so that waiters halt when the next would end.
    let host = Config { spin_budget: 4096, ..spec(LockKind::Ticket, 1).host };
    for lock in [LockKind::Ticket, LockKind::Preemptable] {
        for ours in [contended(lock), Spec { halt: HaltBy::PvUnhalt, host, ..contended(lock) }] {
            let count = exits(&ours);
            assert!(count < plain, "{ours:?}: {count}, against {plain} of a plain ticket lock");
        }
    }
}
