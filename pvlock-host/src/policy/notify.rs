//! When a kick is worth an exit: each one, or none while somebody looks for kicks anyway.
//!
//! The rules are those that virtual network cards converged on. A sleeper must never stay asleep with a kick that nobody was
//! told of; and while the poller is busy, no exit tells it what it is about to see.

/// When a poller is awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Poller {
    /// It wakes up when a period had so many kicks.
    pub enter: u32,
    /// It goes to sleep after so many periods with fewer than `keep` kicks.
    pub patience: u32,
    /// So many kicks in a period are worth staying awake for.
    pub keep: u32,
    /// A CPU is set aside for it: drivers do not ask for a spare one.
    pub own_cpu: bool,
}

impl Default for Poller {
    fn default() -> Self {
        // In periods of 1 ms: an exit of some µs each 50 µs is what a CPU that polls can save.
        Self { enter: 20, patience: 4, keep: 5, own_cpu: false }
    }
}

/// What the poller is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Polling {
    /// It looks for kicks, and guests skip their doorbells.
    pub awake: bool,
    /// Periods in a row that were not worth it.
    pub idle: u32,
}

impl Poller {
    /// What it is to be after a period with so many kicks. `spare`: whether a CPU has nothing else to do; where nobody can
    /// tell, there is none.
    #[must_use]
    pub fn next(&self, now: Polling, kicks: u32, spare: Option<bool>) -> Polling {
        if spare != Some(true) {
            return Polling::default();
        }
        if !now.awake {
            return Polling { awake: kicks >= self.enter, idle: 0 };
        }
        let idle = if kicks >= self.keep { 0 } else { now.idle.saturating_add(1) };
        if idle >= self.patience { Polling::default() } else { Polling { awake: true, idle } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_wakes_for_many_kicks_and_sleeps_after_patience_or_for_want_of_a_cpu() {
        let poller = Poller { enter: 10, patience: 2, keep: 3, own_cpu: false };
        let mut now = Polling::default();
        // Kicks, a spare CPU, awake afterwards.
        let periods = [
            (9, Some(true), false),
            (10, None, false),
            (10, Some(false), false),
            (10, Some(true), true),
            (2, Some(true), true),
            (3, Some(true), true),
            (2, Some(true), true),
            (2, Some(true), false),
            (9, Some(true), false),
            (50, Some(true), true),
            (50, Some(false), false),
        ];
        for (n, (kicks, spare, awake)) in periods.into_iter().enumerate() {
            now = poller.next(now, kicks, spare);
            assert_eq!(now.awake, awake, "period {n}");
        }
    }
}
