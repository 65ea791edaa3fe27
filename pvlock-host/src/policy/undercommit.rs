//! When nobody else wants the CPU, a pause-loop exit can do no good: return at once, and tell the guest that it need not
//! halt either.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How sure the host must be before it tells the guest. The early return itself needs no such thing: it is decided at each
/// exit anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undercommit {
    /// Whether the guest is told at all, by `HostFlags::DEDICATED`.
    pub tell: bool,
    /// So many exits in a row have found an empty run queue.
    pub calm: u32,
    /// And no sign of overcommit was seen for so long, in ns. One sign ends it at once.
    pub quiet_ns: u64,
}

impl Default for Undercommit {
    fn default() -> Self {
        // A few time slices of 4 ms.
        Self { tell: false, calm: 64, quiet_ns: 20_000_000 }
    }
}

/// What was seen of late.
pub(crate) struct Calm {
    in_a_row: AtomicU32,
    /// Last sign of overcommit, in ns of the driver's clock.
    overcommit_at: AtomicU64,
    told: AtomicBool,
}

impl Calm {
    pub(crate) fn new() -> Self {
        Self { in_a_row: AtomicU32::new(0), overcommit_at: AtomicU64::new(0), told: AtomicBool::new(false) }
    }

    /// An exit at `now` has seen overcommit or not. Returns what the guest is to be told, if that has changed; one caller
    /// gets the change.
    pub(crate) fn see(&self, config: &Undercommit, overcommit: bool, now: u64) -> Option<bool> {
        if overcommit {
            self.in_a_row.store(0, Ordering::Relaxed);
            self.overcommit_at.fetch_max(now, Ordering::Relaxed);
            return self.tell(false);
        }
        // Saturates: the count matters only up to `calm`.
        let seen = self.in_a_row.load(Ordering::Relaxed).saturating_add(1);
        self.in_a_row.store(seen, Ordering::Relaxed);
        let quiet = now.saturating_sub(self.overcommit_at.load(Ordering::Relaxed)) >= config.quiet_ns;
        if config.tell && seen >= config.calm && quiet { self.tell(true) } else { None }
    }

    /// Takes back what the guest has been told; whether there was anything.
    pub(crate) fn untell(&self) -> bool {
        self.in_a_row.store(0, Ordering::Relaxed);
        self.tell(false).is_some()
    }

    fn tell(&self, told: bool) -> Option<bool> {
        (self.told.load(Ordering::Relaxed) != told && self.told.swap(told, Ordering::Relaxed) != told).then_some(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CONFIG: Undercommit = Undercommit { tell: true, calm: 3, quiet_ns: 100 };

    #[test]
    fn the_guest_is_told_after_calm_and_quiet_and_untold_at_the_first_sign() {
        let calm = Calm::new();
        // (overcommit, at, told)
        let steps = [
            (true, 1_000, None),
            (false, 1_010, None),
            (false, 1_020, None),
            (false, 1_030, None), // three in a row, too soon
            (false, 1_099, None),
            (false, 1_100, Some(true)),
            (false, 1_101, None), // once
            (true, 1_102, Some(false)),
            (true, 1_103, None),
            (false, 1_300, None), // long ago, not three in a row
            (false, 1_301, None),
            (false, 1_302, Some(true)),
        ];
        for (n, (overcommit, now, told)) in steps.into_iter().enumerate() {
            assert_eq!(calm.see(&CONFIG, overcommit, now), told, "step {n}");
        }
        let silent = Calm::new();
        let config = Undercommit { tell: false, ..CONFIG };
        assert!((0..100).all(|now| silent.see(&config, false, now * 1_000).is_none()));
    }

    proptest! {
        #[test]
        fn row_23_the_flag_does_not_flap(signs in proptest::collection::vec((any::<bool>(), 0u64..40), 1..400)) {
            let calm = Calm::new();
            let (mut now, mut told_at) = (0, Vec::new());
            for (overcommit, step) in signs {
                now += step;
                if calm.see(&CONFIG, overcommit, now) == Some(true) {
                    told_at.push(now);
                }
            }
            // Between two times lies a sign of overcommit, and from that on quiet.
            prop_assert!(told_at.windows(2).all(|two| two[1] - two[0] >= CONFIG.quiet_ns));
        }
    }

    use std::vec::Vec;
}
