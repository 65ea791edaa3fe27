//! Was anybody overtaken? Decided from the guest's order log, which nobody has to believe.
//!
//! The position of an entry in the log is the order of the critical sections. Each entry says when (on the machine's
//! counter) its ticket was drawn at the earliest and at the latest. So if A's ticket was certainly drawn before B's, but A
//! stands behind B, A was overtaken, whatever the tickets say. The tickets are checked too: they must follow each other.

use crate::backend::{Outcome, Spec};
use pvlock_guest_image::Job;
use pvlock_guest_image::job::LogEntry;
use pvlock_sim::trace::{Trace, Track};
use std::sync::atomic::Ordering;

/// The order logs of all locks.
#[derive(Clone, Copy, Debug)]
pub struct LogView<'a> {
    entries: &'a [LogEntry],
    capacity: usize,
}

/// What the logs say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Entries looked at.
    pub checked: u64,
    /// Acquisitions that did not fit into the log.
    pub unlogged: u64,
    /// Entries that stand behind one whose ticket was certainly drawn later.
    pub overtaken: u64,
    /// Tickets that do not follow the one before.
    pub out_of_sequence: u64,
    /// Entries that were acquired before the one ahead of them.
    pub backwards: u64,
}

impl Order {
    /// Whether there was something to check, and nobody was overtaken.
    pub fn is_strict(&self) -> bool {
        self.checked > 0 && self.overtaken + self.out_of_sequence + self.backwards == 0
    }
}

struct Entry {
    ticket: u64,
    vcpu: u64,
    before_draw: u64,
    after_draw: u64,
    acquired: u64,
}

impl<'a> LogView<'a> {
    /// Logs of `capacity` entries each, one behind the other.
    pub fn new(entries: &'a [LogEntry], capacity: u64) -> Self {
        Self { entries, capacity: capacity as usize }
    }

    /// Checks the logs of all locks of `job`.
    pub fn order(&self, job: &Job) -> Order {
        let mut order = Order::default();
        if self.capacity == 0 {
            return order;
        }
        for (log, protected) in self.entries.chunks_exact(self.capacity).zip(&job.protected) {
            let logged = protected.logged.load(Ordering::Relaxed);
            let kept = entries(log, logged);
            check(kept, &mut order);
            order.unlogged = order.unlogged.saturating_add(logged.saturating_sub(self.capacity as u64));
        }
        order
    }

    /// Adds the waits of the first 10 000 acquisitions of each lock to `trace`: a group of tracks, one for each vCPU.
    pub fn trace(&self, outcome: &Outcome<'_>, spec: &Spec, group: usize, trace: &mut Trace) {
        if self.capacity == 0 {
            return;
        }
        let logs: Vec<Vec<Entry>> = (self.entries.chunks_exact(self.capacity).zip(&outcome.job.protected))
            .map(|(log, protected)| entries(log, protected.logged.load(Ordering::Relaxed)).take(TRACED).collect())
            .collect();
        let begun = logs.iter().flatten().map(|entry| entry.before_draw).min().unwrap_or_default();
        let tick_ns = outcome.times.elapsed.as_nanos() as f64 / outcome.times.ticks.max(1) as f64;
        // What the guest writes may be anything: a time before the first, or after the run.
        let ns = |ticks: u64| (ticks.saturating_sub(begun) as f64 * tick_ns) as u64;
        trace.process(group, &format!("{}, {} vCPUs", spec.lock.name(), spec.vcpus));
        for vcpu in 0..spec.vcpus {
            trace.thread(Track { process: group, thread: vcpu }, &format!("vCPU {vcpu}"));
        }
        for (lock, log) in logs.iter().enumerate() {
            for entry in log.iter().filter(|entry| entry.vcpu < spec.vcpus as u64) {
                let track = Track { process: group, thread: entry.vcpu as usize };
                let (drawn, acquired) = (ns(entry.before_draw), ns(entry.acquired));
                if drawn < acquired {
                    trace.slice(track, &format!("wait for lock {lock}, ticket {}", entry.ticket as u32), "wait", (drawn, acquired));
                }
                trace.moment(track, &format!("acquired lock {lock}"), acquired);
            }
        }
    }
}

/// Acquisitions of each lock in a trace: what a viewer opens quickly.
const TRACED: usize = 10_000;

/// The entries of one log, of which the guest says that it has written so many.
fn entries(log: &[LogEntry], logged: u64) -> impl Iterator<Item = Entry> {
    log.iter().take(logged.try_into().unwrap_or(usize::MAX)).map(|entry| Entry {
        ticket: entry.ticket.load(Ordering::Relaxed),
        vcpu: entry.vcpu.load(Ordering::Relaxed),
        before_draw: entry.before_draw.load(Ordering::Relaxed),
        after_draw: entry.after_draw.load(Ordering::Relaxed),
        acquired: entry.acquired.load(Ordering::Relaxed),
    })
}

fn check(log: impl Iterator<Item = Entry>, order: &mut Order) {
    let mut last: Option<Entry> = None;
    // The latest moment at which an earlier entry's ticket was certainly not drawn yet.
    let mut drawn_after = 0;
    for entry in log {
        order.checked += 1;
        if entry.after_draw < drawn_after {
            order.overtaken += 1;
        }
        drawn_after = drawn_after.max(entry.before_draw);
        if let Some(last) = &last {
            // Tickets are 32 bits wide and wrap.
            order.out_of_sequence += u64::from(entry.ticket as u32 != (last.ticket as u32).wrapping_add(1));
            order.backwards += u64::from(entry.acquired < last.acquired);
        }
        last = Some(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (ticket, drawn between, drawn between, acquired)
    fn order(entries: &[(u64, u64, u64, u64)]) -> Order {
        let mut order = Order::default();
        let entries = entries.iter().map(|&(ticket, before_draw, after_draw, acquired)| Entry {
            ticket,
            vcpu: 0,
            before_draw,
            after_draw,
            acquired,
        });
        check(entries, &mut order);
        order
    }

    #[test]
    fn first_come_first_served_is_strict() {
        assert!(order(&[(7, 10, 11, 12), (8, 10, 12, 20), (9, 9, 30, 31)]).is_strict());
        assert!(order(&[(u32::MAX.into(), 1, 2, 3), (0, 2, 3, 4)]).is_strict(), "tickets wrap");
        assert!(!order(&[]).is_strict(), "nothing checked proves nothing");
    }

    #[test]
    fn an_overtaken_waiter_is_seen_whatever_its_ticket_says() {
        // The second drew at 5 at the latest, the first at 6 at the earliest.
        let lied = order(&[(7, 6, 7, 8), (8, 4, 5, 9)]);
        assert_eq!((lied.overtaken, lied.out_of_sequence), (1, 0));
        // Far apart in the log.
        assert_eq!(order(&[(1, 50, 51, 52), (2, 20, 60, 61), (3, 10, 49, 70)]).overtaken, 1);
    }

    #[test]
    fn tickets_out_of_sequence_and_time_running_backwards_are_seen() {
        assert_eq!(order(&[(7, 1, 2, 3), (9, 1, 2, 4)]).out_of_sequence, 1);
        assert_eq!(order(&[(7, 1, 2, 5), (8, 1, 2, 4)]).backwards, 1);
    }
}
