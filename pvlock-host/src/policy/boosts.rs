//! Directed yields in turn, for guests that do not say whom they wait for.
//!
//! Published handlers walk the vCPUs twice from a pivot and flip a flag of each candidate that they pass over, so that it is
//! not picked twice in a row. Here looking changes nothing: boosts are numbered, and a candidate's last number says how
//! recently it had its turn. Of those that wait for a CPU the first from the pivot is picked that has not had one of the last
//! turns; if all had, the one whose turn is longest ago. So everybody who waits gets a turn, whatever the pivot is.

use alloc::boxed::Box;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Where the search for a vCPU to yield to begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pivot {
    /// Behind whoever was boosted last in this VM. vCPUs that search at the same time look at the same candidates.
    LastBoosted,
    /// Behind the searching vCPU itself.
    #[default]
    Own,
}

/// Whose turns were when. Numbers start at 1; 0 is "never".
pub(crate) struct Boosts {
    turns: AtomicU64,
    last: AtomicUsize,
    vcpus: Box<[Boost]>,
}

struct Boost {
    /// The last turn that this vCPU was given.
    turn: AtomicU64,
    /// When this vCPU last gave one: 1 + ns of the driver's clock, 0 for never.
    gave: AtomicU64,
}

impl Boosts {
    pub(crate) fn new(vcpus: usize) -> Self {
        let never = || Boost { turn: AtomicU64::new(0), gave: AtomicU64::new(0) };
        Self {
            turns: AtomicU64::new(0),
            last: AtomicUsize::new(vcpus.saturating_sub(1)),
            vcpus: (0..vcpus).map(|_| never()).collect(),
        }
    }

    /// Whom `from` should yield to, of those that are `eligible`; asks at most once for each, and not for `from`.
    pub(crate) fn pick(&self, pivot: Pivot, from: usize, mut eligible: impl FnMut(usize) -> bool) -> Option<usize> {
        let n = self.vcpus.len();
        let start = match pivot {
            Pivot::LastBoosted => self.last.load(Ordering::Relaxed),
            Pivot::Own => from,
        };
        let turns = self.turns.load(Ordering::Relaxed);
        // A turn of the last n - 2: in n - 1 calls that pick somebody, each of the n - 1 others can have one.
        let recent = (turns + 1).saturating_sub((n as u64).saturating_sub(2)).max(1);
        let mut oldest = None;
        // Two plain loops: a chain of ranges is tested at each step.
        for range in [start + 1..n, 0..(start + 1).min(n)] {
            for candidate in range {
                if candidate == from || !eligible(candidate) {
                    continue;
                }
                let Some(boost) = self.vcpus.get(candidate) else { break };
                let turn = boost.turn.load(Ordering::Relaxed);
                if turn < recent {
                    return Some(candidate);
                }
                if oldest.is_none_or(|(first, _)| turn < first) {
                    oldest = Some((turn, candidate));
                }
            }
        }
        oldest.map(|(_, candidate)| candidate)
    }

    /// `from` yields to `to`, at `now`.
    pub(crate) fn note(&self, from: usize, to: usize, now: u64) {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed) + 1;
        self.last.store(to, Ordering::Relaxed);
        if let Some(boost) = self.vcpus.get(to) {
            boost.turn.store(turn, Ordering::Relaxed);
        }
        if let Some(boost) = self.vcpus.get(from) {
            boost.gave.store(now.saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Whether `from` has had its directed yield of this period.
    pub(crate) fn is_throttled(&self, from: usize, period_ns: u64, now: u64) -> bool {
        let gave = self.vcpus.get(from).map_or(0, |boost| boost.gave.load(Ordering::Relaxed));
        gave != 0 && now.saturating_sub(gave - 1) < period_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_pivot_says_where_the_search_begins() {
        /// Pivot, last boosted, who searches, eligible, picked.
        type Case = (Pivot, usize, usize, &'static [usize], Option<usize>);
        let cases: [Case; 10] = [
            (Pivot::Own, 5, 2, &[0, 1, 3, 4], Some(3)),
            (Pivot::Own, 5, 2, &[0, 1], Some(0)),
            (Pivot::Own, 3, 7, &[2, 6], Some(2)),
            (Pivot::Own, 3, 2, &[2], None),
            (Pivot::Own, 3, 2, &[], None),
            (Pivot::LastBoosted, 4, 2, &[0, 3, 5], Some(5)),
            (Pivot::LastBoosted, 4, 2, &[4, 6], Some(6)),
            (Pivot::LastBoosted, 7, 2, &[1, 3], Some(1)),
            (Pivot::LastBoosted, 4, 5, &[5, 6], Some(6)),
            (Pivot::LastBoosted, 4, 5, &[5], None),
        ];
        for (pivot, last, from, eligible, picked) in cases {
            let boosts = Boosts::new(8);
            boosts.last.store(last, Ordering::Relaxed);
            assert_eq!(boosts.pick(pivot, from, |v| eligible.contains(&v)), picked, "{pivot:?} {last} {from} {eligible:?}");
        }
    }

    proptest! {
        #[test]
        fn row_22_everybody_who_waits_gets_a_turn_within_as_many_calls_as_there_are_vcpus(
            vcpus in 2usize..40,
            waiting: u64,
            from: usize,
            own: bool,
            before in proptest::collection::vec((any::<usize>(), any::<usize>()), 0..60),
        ) {
            let boosts = Boosts::new(vcpus);
            for (from, to) in before {
                boosts.note(from % vcpus, to % vcpus, 0);
            }
            let (from, pivot) = (from % vcpus, if own { Pivot::Own } else { Pivot::LastBoosted });
            let waiting: BTreeSet<usize> = (0..vcpus).filter(|&v| v != from && waiting >> v & 1 == 1).collect();
            let mut had_one = BTreeSet::new();
            for _ in 0..vcpus {
                let mut asked = BTreeSet::new();
                let picked = boosts.pick(pivot, from, |v| { assert!(asked.insert(v)); waiting.contains(&v) });
                prop_assert!(!asked.contains(&from));
                prop_assert_eq!(picked.is_some(), !waiting.is_empty());
                let Some(picked) = picked else { break };
                prop_assert!(waiting.contains(&picked));
                boosts.note(from, picked, 0);
                had_one.insert(picked);
            }
            prop_assert_eq!(had_one, waiting);
        }
    }

    #[test]
    fn two_who_wait_among_many_take_turns() {
        for pivot in [Pivot::Own, Pivot::LastBoosted] {
            let boosts = Boosts::new(20);
            let turns: std::vec::Vec<_> = (0..100)
                .map(|_| {
                    let picked = boosts.pick(pivot, 0, |v| v == 3 || v == 9).unwrap();
                    boosts.note(0, picked, 0);
                    picked
                })
                .collect();
            assert!(turns.windows(2).all(|two| two[0] != two[1]), "{pivot:?}: {turns:?}");
        }
    }

    #[test]
    fn row_13_looking_for_a_candidate_changes_nothing() {
        let boosts = Boosts::new(4);
        boosts.note(0, 2, 7);
        let all = || {
            let each = boosts.vcpus.iter().map(|boost| (boost.turn.load(Ordering::Relaxed), boost.gave.load(Ordering::Relaxed)));
            let each: std::vec::Vec<_> = each.collect();
            (boosts.turns.load(Ordering::Relaxed), boosts.last.load(Ordering::Relaxed), each)
        };
        let before = all();
        for _ in 0..3 {
            assert_eq!(boosts.pick(Pivot::Own, 0, |v| v != 1), Some(3));
            assert_eq!(boosts.pick(Pivot::LastBoosted, 0, |v| v == 2), Some(2));
            assert_eq!(boosts.pick(Pivot::Own, 0, |_| false), None);
        }
        assert_eq!(boosts.pick(Pivot::Own, 1, |v| v != 3), Some(0));
        assert_eq!(all(), before);
    }

    #[test]
    fn the_period_is_counted_from_the_last_directed_yield() {
        let boosts = Boosts::new(2);
        assert!(!boosts.is_throttled(0, 100, 0), "never gave one");
        boosts.note(0, 1, 1_000);
        for (from, period, now, throttled) in [
            (0, 100, 1_000, true),
            (0, 100, 1_099, true),
            (0, 100, 1_100, false),
            (0, 0, 1_000, false),
            (1, 100, 1_000, false),
            (0, 100, 5, true),
        ] {
            assert_eq!(boosts.is_throttled(from, period, now), throttled, "vCPU {from}, {period} ns, at {now}");
        }
    }
}
