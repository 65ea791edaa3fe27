//! What is run: every policy with every lock at every overcommit.

use pvlock_guest_image::LockKind;
use pvlock_host::{Config, PauseLoop, Policy, Queue, RunStates, Window, protocol::HostFlags};

/// The policies that are compared, by the names of [`Policy::NAMED`], and how many sleepers a resuming vCPU wakes early.
pub const POLICIES: [(&str, u32); 8] = [
    ("ignore", 0),
    ("yield", 0),
    ("directed", 0),
    ("directed-last-boosted", 0),
    ("park-on-holder", 0),
    ("park-on-holder", 1),
    ("park-on-previous", 0),
    ("park-on-previous", 1),
];
/// The locks: one that knows nothing of hosts, and pvlock's.
pub const LOCKS: [LockKind; 3] = [LockKind::SpinTicket, LockKind::Ticket, LockKind::Preemptable];
/// vCPUs for each CPU.
pub const OVERCOMMIT: [usize; 3] = [1, 2, 4];

/// Longest sleep, in ns: longer than any wait of a healthy run, shorter than a run.
const DEADLINE_NS: u64 = 50_000_000;

/// The pause-loop window in ticks, where it does not adapt, and where it begins.
pub const WINDOW: u64 = 20_000;

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The guest's lock.
    pub lock: LockKind,
    /// The host's policy.
    pub policy: &'static str,
    /// Sleepers that a resuming vCPU wakes early.
    pub wake_ahead: u32,
    /// vCPUs for each CPU.
    pub overcommit: usize,
    /// Whether waiters may halt. Where not, pause-loop exits are all that the host sees of a wait.
    pub halts: bool,
    /// Whether the pause-loop window, and the waiters' spin budget with it, adapts.
    pub adapts: bool,
}

impl Cell {
    /// All of them that differ: who wakes early matters only to those who sleep, and a lock that knows nothing of hosts neither
    /// halts nor says whom its waiters wait for.
    pub fn all() -> impl Iterator<Item = Self> {
        let cells = OVERCOMMIT.into_iter().flat_map(|overcommit| {
            LOCKS.into_iter().flat_map(move |lock| {
                [false, true].into_iter().flat_map(move |halts| {
                    POLICIES.into_iter().flat_map(move |(policy, wake_ahead)| {
                        let adapting = policy == "park-on-previous" && wake_ahead == 0 && halts;
                        let cell = move |adapts| Self { lock, policy, wake_ahead, overcommit, halts, adapts };
                        [false, true].into_iter().filter(move |adapts| adapting || !adapts).map(cell)
                    })
                })
            })
        });
        cells.filter(|cell| {
            let speaks = cell.lock != LockKind::SpinTicket;
            (speaks || !cell.halts) && (cell.halts || cell.wake_ahead == 0)
        })
    }

    /// Those that show each policy at work on each lock, and nothing else: the short profile.
    pub fn short() -> impl Iterator<Item = Self> {
        Self::all().filter(|cell| {
            cell.overcommit == 4 && cell.wake_ahead == 0 && !cell.adapts && (!cell.halts || cell.policy == "park-on-previous")
        })
    }

    /// Whether its schedule is kept: one run for each policy, of the strict lock, which shows most.
    pub fn is_drawn(&self) -> bool {
        self.lock == LockKind::Ticket && self.overcommit == 4 && !self.halts
    }

    /// The engine's settings for it.
    pub fn config(&self) -> Config {
        // It grows to a third of a time slice at most.
        let window = self.adapts.then_some(Window { floor: WINDOW, start: WINDOW, ceiling: 16 * WINDOW, ..Window::default() });
        let policy = Policy { window, ..Policy::named(self.policy).unwrap_or_default() };
        Config {
            queue: if policy.pause_loop == PauseLoop::ParkOnHolder { Queue::Holder } else { Queue::Previous },
            wake_ahead: self.wake_ahead,
            deadline_ns: DEADLINE_NS,
            run_states: RunStates::Exact,
            flags: if self.halts { HostFlags::default() } else { HostFlags::OFF },
            policy,
            ..Config::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn every_cell_is_another_and_names_a_policy() {
        let cells: Vec<_> = Cell::all().collect();
        for (n, cell) in cells.iter().enumerate() {
            assert!(Policy::named(cell.policy).is_some(), "{cell:?}");
            assert!(!cells[..n].contains(cell), "{cell:?} twice");
        }
        assert!(Cell::short().all(|cell| cells.contains(&cell)));
        let policies = Cell::short().map(|cell| cell.policy).collect::<alloc::collections::BTreeSet<_>>();
        assert_eq!(policies.len(), 6, "the short profile leaves no policy out");
        assert_eq!(Cell::short().filter(Cell::is_drawn).count(), 6, "one for each policy");
    }
}
