//! How often a VM may ring: a token bucket each for halts, kicks and pause-loop exits.
//!
//! What is over the limit is carried out all the same (a kick that was dropped would be a lost wake-up), and then the vCPU
//! that rang sleeps for the time its VM has overdrawn, which only pause, reset and the end of the VM cut short.

use core::sync::atomic::{AtomicU64, Ordering};

/// A rate and how far it may be exceeded for a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Events per second; not 0.
    pub per_second: u32,
    /// Events at once after a quiet time; not 0.
    pub burst: u32,
}

/// The limits of one VM. `None` is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// HALT doorbells.
    pub halts: Option<Rate>,
    /// KICK doorbells.
    pub kicks: Option<Rate>,
    /// Pause-loop exits and PAUSE_LOOP doorbells.
    pub pause_loops: Option<Rate>,
    /// Longest sleep of a vCPU for one event over a limit, in ns. It delays interrupts too, so it should be short; the longer
    /// it is, the less many vCPUs at once can exceed the limits.
    pub longest_ns: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { halts: None, kicks: None, pause_loops: None, longest_ns: 1_000_000 }
    }
}

impl Limits {
    pub(crate) fn are_sound(&self) -> bool {
        let rates = [self.halts, self.kicks, self.pause_loops];
        rates.into_iter().flatten().all(|rate| rate.per_second > 0 && rate.burst > 0)
    }
}

/// What is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metered {
    Halt,
    Kick,
    PauseLoop,
}

/// A token bucket as one time: that at which it will be full again. Shared by all vCPUs of a VM.
struct Meter(AtomicU64);

impl Meter {
    /// Takes a token at `now`; returns for how many ns the VM has overdrawn, at most `longest_ns`.
    fn take(&self, rate: Rate, longest_ns: u64, now: u64) -> u64 {
        let interval = 1_000_000_000 / u64::from(rate.per_second).max(1);
        let allowed = interval.saturating_mul(rate.burst.into());
        let mut overdrawn = 0;
        // Never fails: the closure always returns something. Retries are other vCPUs' progress.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
            let next = full_at.max(now).saturating_add(interval);
            overdrawn = (next - now).saturating_sub(allowed).min(longest_ns);
            // A debt beyond the longest sleep is forgiven, or a storm would be punished long after it has ended.
            Some(next.min(now.saturating_add(allowed).saturating_add(longest_ns)))
        });
        overdrawn
    }
}

pub(crate) struct Meters {
    halts: Meter,
    kicks: Meter,
    pause_loops: Meter,
}

impl Meters {
    pub(crate) fn new() -> Self {
        let meter = || Meter(AtomicU64::new(0));
        Self { halts: meter(), kicks: meter(), pause_loops: meter() }
    }

    /// One event at `now`; returns for how many ns its vCPU should sleep.
    pub(crate) fn take(&self, limits: &Limits, what: Metered, now: u64) -> u64 {
        let (meter, rate) = match what {
            Metered::Halt => (&self.halts, limits.halts),
            Metered::Kick => (&self.kicks, limits.kicks),
            Metered::PauseLoop => (&self.pause_loops, limits.pause_loops),
        };
        rate.map_or(0, |rate| meter.take(rate, limits.longest_ns, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_burst_is_free_and_what_follows_waits_for_its_token() {
        let meter = Meter(AtomicU64::new(0));
        let rate = Rate { per_second: 1_000, burst: 3 };
        let take = |now| meter.take(rate, 5 * MS, now);
        let now = 700 * MS;
        assert_eq!([take(now), take(now), take(now)], [0, 0, 0]);
        assert_eq!([take(now), take(now), take(now)], [MS, 2 * MS, 3 * MS], "one behind the other");
        assert_eq!(take(now + 4 * MS), 0);
        assert_eq!([take(now + 5 * MS), take(now + 5 * MS)], [0, MS]);
        // Quiet for long: one burst, not more.
        let now = now + 1_000 * MS;
        assert_eq!([take(now), take(now), take(now), take(now)], [0, 0, 0, MS]);
        let debts: std::vec::Vec<_> = (0..10).map(|_| take(now)).collect();
        assert_eq!(debts[5..], [5 * MS; 5], "no longer than the longest");
        assert_eq!(take(now + 6 * MS), 0, "and forgiven afterwards");
    }

    #[test]
    fn each_kind_has_its_own_bucket_and_none_without_a_rate() {
        let meters = Meters::new();
        let rate = Some(Rate { per_second: 1, burst: 1 });
        let limits = Limits { kicks: rate, halts: rate, ..Limits::default() };
        assert_eq!([Metered::Kick, Metered::Halt, Metered::PauseLoop].map(|what| meters.take(&limits, what, 5)), [0; 3]);
        assert_eq!([Metered::Kick, Metered::Halt].map(|what| meters.take(&limits, what, 5)), [MS; 2]);
        assert!((0..1_000).all(|_| meters.take(&limits, Metered::PauseLoop, 5) == 0));
    }

    proptest! {
        #[test]
        fn row_21_a_storm_is_held_to_its_rate(
            per_second in 1u32..2_000_000, burst in 1u32..100, vcpus in 1usize..8, longest_us in 1u64..5_000, start: u32, cost_ns in 1u64..10_000,
        ) {
            let meter = Meter(AtomicU64::new(0));
            let (rate, longest) = (Rate { per_second, burst }, longest_us * 1_000);
            // Each vCPU rings again as soon as it may; a ring costs its own time.
            let start = u64::from(start);
            let mut next = std::vec![start; vcpus];
            let (mut events, mut now) = (0u64, start);
            for _ in 0..2_000 {
                let v = (0..vcpus).min_by_key(|&v| next[v]).unwrap();
                now = next[v];
                next[v] = now + meter.take(rate, longest, now) + cost_ns;
                events += 1;
            }
            let span = now - start;
            let interval = 1_000_000_000 / u64::from(per_second);
            // By the rate, and what is forgiven: each vCPU once per longest sleep.
            let most = u64::from(burst) + vcpus as u64 + span / interval + vcpus as u64 * (span / longest + 1);
            prop_assert!(events <= most, "{} events in {} ns, at most {}", events, span, most);
        }
    }
}
