//! Counts of what happened, per vCPU and in sum.

use crate::Decision;
use core::sync::atomic::{AtomicU64, Ordering};

/// Buckets of the sleep-time histogram: bucket `n` counts sleeps of 2^n to 2^(n+1) ns, the last everything longer.
pub const SLEEP_BUCKETS: usize = 36;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters of one vCPU. Statistics are not part of any model: `core`'s atomics, Relaxed throughout.
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) sleeps: [AtomicU64; SLEEP_BUCKETS],
            decisions: [AtomicU64; Decision::COUNT],
        }

        /// What happened so far, for one vCPU or all.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Statistics {
            $($(#[$doc])* pub $name: u64,)*
            /// Sleeps by length: bucket `n` counts those of 2^n to 2^(n+1) ns, the last everything longer.
            pub sleeps: [u64; SLEEP_BUCKETS],
            decisions: [u64; Decision::COUNT],
        }

        impl Counters {
            pub(crate) const fn new() -> Self {
                Self {
                    $($name: AtomicU64::new(0),)*
                    sleeps: [const { AtomicU64::new(0) }; SLEEP_BUCKETS],
                    decisions: [const { AtomicU64::new(0) }; Decision::COUNT],
                }
            }

            pub(crate) fn read(&self) -> Statistics {
                Statistics {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    sleeps: core::array::from_fn(|n| self.sleeps[n].load(Ordering::Relaxed)),
                    decisions: core::array::from_fn(|n| self.decisions[n].load(Ordering::Relaxed)),
                }
            }
        }

        impl Default for Statistics {
            fn default() -> Self {
                Self { $($name: 0,)* sleeps: [0; SLEEP_BUCKETS], decisions: [0; Decision::COUNT] }
            }
        }

        impl core::ops::Add for Statistics {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self {
                    // Thousands of vCPUs sleep 2^64 ns within days.
                    $($name: self.$name.saturating_add(other.$name),)*
                    sleeps: core::array::from_fn(|n| self.sleeps[n].saturating_add(other.sleeps[n])),
                    decisions: core::array::from_fn(|n| self.decisions[n].saturating_add(other.decisions[n])),
                }
            }
        }
    };
}

counters! {
    /// HALT doorbells.
    halts,
    /// Halts that returned at once because a kick had come before.
    latched,
    /// Halts that put the vCPU to sleep.
    parks,
    /// Sleeps on somebody's queue.
    queued,
    /// Usable hints that would have closed a circle of sleepers; such a sleeper is on no queue.
    cycles,
    /// KICK doorbells that this vCPU rang.
    kicks_sent,
    /// Kicks of this vCPU, however they came.
    kicks,
    /// Sleeps of this vCPU that a kick ended.
    kicked,
    /// Sleeps that ended for another reason that the engine knows: served by a queue, reset, pause, unregistering.
    woken,
    /// Sleeps that an interrupt ended.
    interrupted,
    /// Sleeps that ended for no reason that the engine knows: signals, stale tokens.
    spurious,
    /// Sleeps that only the deadline ended: 0 in a healthy system.
    forced,
    /// Times a sleep was ended because the owner of the queue resumed (wake-ahead).
    served,
    /// Pause-loop exits and PAUSE_LOOP doorbells.
    pause_loops,
    /// Those of them that a poller found in its record.
    polled,
    /// Sleeps until the awaited vCPU is scheduled in, that this ended.
    drained,
    /// Sleeps for being over a limit that lasted as long as they should.
    throttled,
    /// Times that the VM was told to stop halting, or to start again, for want or sight of overcommit.
    mode_switches,
    /// Doorbells refused: unknown words, arguments out of range.
    refused,
    /// Time slept, in ns.
    parked_ns,
}

impl Statistics {
    /// How often this was decided.
    pub fn decided(&self, decision: Decision) -> u64 {
        self.decisions.get(decision.index()).copied().unwrap_or(0)
    }

    /// Every decision that was made, and how often.
    pub fn decisions(&self) -> impl Iterator<Item = (Decision, u64)> {
        Decision::all().zip(self.decisions).filter(|&(_, n)| n > 0)
    }
}

impl Counters {
    pub(crate) fn decided(&self, decision: Decision) {
        if let Some(counter) = self.decisions.get(decision.index()) {
            Self::count(counter);
        }
    }

    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn slept(&self, ns: u64) {
        self.parked_ns.fetch_add(ns, Ordering::Relaxed);
        let bucket = (ns.max(1).ilog2() as usize).min(SLEEP_BUCKETS - 1);
        Self::count(&self.sleeps[bucket]);
    }
}
