//! The rows of the tables: what has been published, and what is ours.

use super::{Column, Figure, Origin, TableRow};
use crate::locks::LockKind;
use crate::scenario::{Contender, RuleKind};
use pvlock_host::{PauseLoop, Pivot, Policy, Queue, Undercommit};

/// A policy as it was published: exits are answered whether anybody else wants the CPU or not.
pub(super) fn published_policy(pause_loop: PauseLoop, pivot: Pivot) -> Policy {
    Policy { pause_loop, pivot, undercommit: None, ..Policy::default() }
}

/// A ticket lock that spins, without pause-loop exits.
pub(super) fn no_exits(name: &str) -> Contender {
    Contender::new(name, LockKind::PlainTicket)
}

/// The same with exits that end in a plain yield.
pub(super) fn plain_yield(name: &str) -> Contender {
    no_exits(name).policy(published_policy(PauseLoop::Yield, Pivot::Own))
}

/// The same with exits that end in a directed yield.
pub(super) fn directed(name: &str, pivot: Pivot) -> Contender {
    no_exits(name).policy(published_policy(PauseLoop::DirectedYield, pivot))
}

/// Without exits, VM by VM.
pub(super) fn gang(name: &str) -> Contender {
    Contender { rule: RuleKind::Gang, ..no_exits(name) }
}

/// The first paravirtual ticket lock.
pub(super) fn classic(name: &str) -> Contender {
    Contender::new(name, LockKind::ClassicTicket)
}

/// What may be done where nobody else wants the CPU.
fn undercommit_rules() -> [(&'static str, Option<Undercommit>); 3] {
    [
        ("", Some(Undercommit::default())),
        (", no early return", None),
        (", tell", Some(Undercommit { tell: true, ..Undercommit::default() })),
    ]
}

/// Our rows, and the bound; in a table with so many columns.
pub(super) fn ours(columns: &[Column]) -> Vec<TableRow> {
    let mut rows = Vec::new();
    let mut add = |contender: Contender, origin| rows.push(row(contender, origin, vec![None; columns.len()]));
    let kinds = [
        ("ticket, directed yield", LockKind::Ticket, PauseLoop::DirectedYield, Queue::Previous, 0),
        ("ticket, park on holder", LockKind::Ticket, PauseLoop::ParkOnHolder, Queue::Holder, 0),
        ("ticket, park on previous", LockKind::Ticket, PauseLoop::ParkOnPrevious, Queue::Previous, 0),
        ("ticket, park on previous, wake 1", LockKind::Ticket, PauseLoop::ParkOnPrevious, Queue::Previous, 1),
        ("preemptable", LockKind::Preemptable, PauseLoop::DirectedYield, Queue::Previous, 0),
        ("preemptable, park on holder", LockKind::Preemptable, PauseLoop::ParkOnHolder, Queue::Holder, 0),
        ("preemptable, park on previous", LockKind::Preemptable, PauseLoop::ParkOnPrevious, Queue::Previous, 0),
    ];
    for (name, lock, pause_loop, queue, wake_ahead) in kinds {
        let rules = undercommit_rules();
        // The rules make the same difference wherever they make one: shown with the best of each lock.
        let all = pause_loop == PauseLoop::ParkOnPrevious && (wake_ahead == 1 || lock == LockKind::Preemptable);
        for &(suffix, undercommit) in &rules[..if all { 3 } else { 1 }] {
            let policy = Policy { pause_loop, undercommit, ..Policy::default() };
            let contender = Contender::new(&format!("{name}{suffix}"), lock).policy(policy);
            add(Contender { queue, wake_ahead, ..contender }, Origin::Ours);
        }
    }
    let bound = Contender { rule: RuleKind::Clairvoyant, ..Contender::new("clairvoyant bound", LockKind::Oracle) };
    // Waits for other things than locks are helped as well as has been published.
    add(bound.policy(published_policy(PauseLoop::DirectedYield, Pivot::Own)), Origin::Bound);
    rows
}

pub(super) fn row(contender: Contender, origin: Origin, published: Vec<Option<Figure>>) -> TableRow {
    TableRow { contender, origin, published, vms: None }
}

/// A published row.
pub(super) fn measured(contender: Contender, figures: &[Figure]) -> TableRow {
    row(contender, Origin::Published, figures.iter().copied().map(Some).collect())
}

/// A figure with its deviation.
pub(super) fn figure(value: f64, deviation: f64) -> Figure {
    Figure { value, deviation: Some(deviation) }
}

/// A figure without one.
pub(super) fn bare(value: f64) -> Figure {
    Figure { value, deviation: None }
}
