//! How long a vCPU spins before the host hears of it: one controller for the pause-loop window of the hardware and the spin
//! budget of the guest's waiters, in ticks.
//!
//! It grows while exits find nothing to do and shrinks as soon as overcommit shows: an exit costs a few microseconds whatever
//! comes of it, and a spinning vCPU on a contended CPU costs somebody the time it spins. It is never reset when a vCPU is
//! scheduled in: if it were, each time slice would begin with a storm of exits until it has grown again.

/// Bounds and speed of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Never below, in ticks; not 0.
    pub floor: u64,
    /// Never above, in ticks.
    pub ceiling: u64,
    /// Where it begins, in ticks.
    pub start: u64,
    /// Factor by which it grows; 1 and above.
    pub grow: u64,
    /// Divisor by which it shrinks; 0: falls to the floor at once.
    pub shrink: u64,
    /// What is set with it.
    pub actuator: Actuator,
}

/// What the machine lets one set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Actuator {
    /// Any number of ticks: x86's pause-loop window, a guest's spin budget.
    #[default]
    Ticks,
    /// The exponent of a power of two, as Arm's WFE trap delay: `2^(offset + exponent)` ticks.
    Exponent {
        /// Exponent that 0 stands for: 8 on Arm, whose shortest delay is 2^8 cycles.
        offset: u32,
        /// Highest value: 15 on Arm.
        highest: u32,
    },
}

/// A window as the actuator takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// In ticks.
    Ticks(u64),
    /// As an exponent, of at most as many ticks as the controller wants (but the shortest that there is).
    Exponent(u32),
}

impl Default for Window {
    fn default() -> Self {
        // 4096 cycles is what hypervisors begin with (about 2 us); a time slice is a few ms.
        Self { floor: 1 << 12, ceiling: 1 << 20, start: 1 << 12, grow: 2, shrink: 4, actuator: Actuator::Ticks }
    }
}

/// What an exit has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// An awaited vCPU off-CPU, or somebody who wants this CPU.
    Overcommit,
    /// There was nothing to do.
    NothingToDo,
    /// Neither can be told.
    Unknown,
}

impl Window {
    pub(crate) fn is_sound(&self) -> bool {
        self.floor > 0 && self.floor <= self.start && self.start <= self.ceiling && self.grow > 0
    }

    /// The window after an exit.
    pub(crate) fn next(&self, ticks: u64, seen: Seen) -> u64 {
        let next = match seen {
            Seen::NothingToDo => ticks.saturating_mul(self.grow),
            Seen::Overcommit => ticks.checked_div(self.shrink).unwrap_or(self.floor),
            Seen::Unknown => ticks,
        };
        next.clamp(self.floor, self.ceiling)
    }

    /// How the actuator takes this window.
    pub(crate) fn setting(&self, ticks: u64) -> Setting {
        match self.actuator {
            Actuator::Ticks => Setting::Ticks(ticks),
            Actuator::Exponent { offset, highest } => Setting::Exponent(ticks.max(1).ilog2().saturating_sub(offset).min(highest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: Window = Window { floor: 100, ceiling: 10_000, start: 400, grow: 2, shrink: 4, actuator: Actuator::Ticks };

    #[test]
    fn it_grows_for_nothing_and_shrinks_at_the_first_sight_of_overcommit() {
        let to_floor = Window { shrink: 0, ..WINDOW };
        let cases = [
            (WINDOW, 400, Seen::NothingToDo, 800),
            (WINDOW, 400, Seen::Unknown, 400),
            (WINDOW, 400, Seen::Overcommit, 100),
            (WINDOW, 8_000, Seen::Overcommit, 2_000),
            (WINDOW, 8_000, Seen::NothingToDo, 10_000),
            (WINDOW, 100, Seen::Overcommit, 100),
            (to_floor, 8_000, Seen::Overcommit, 100),
        ];
        for (window, ticks, seen, next) in cases {
            assert_eq!(window.next(ticks, seen), next, "{ticks} {seen:?}");
        }
    }

    #[test]
    fn an_exponent_is_the_same_controller_with_steps() {
        let arm = Window { actuator: Actuator::Exponent { offset: 8, highest: 15 }, ..WINDOW };
        for (ticks, exponent) in [(0, 0), (255, 0), (256, 0), (511, 0), (512, 1), (4_096, 4), (u64::MAX, 15)] {
            assert_eq!(arm.setting(ticks), Setting::Exponent(exponent), "{ticks}");
        }
        assert_eq!(WINDOW.setting(777), Setting::Ticks(777));
    }

    proptest! {
        #[test]
        fn row_32_it_stays_within_its_bounds_whatever_is_seen(
            floor in 1u64..u64::MAX / 2, more: u64, grow in 1u64.., shrink: u64, ticks: u64,
            seen in proptest::collection::vec(0u8..3, 0..80),
        ) {
            let ceiling = floor.saturating_add(more);
            let window = Window { floor, ceiling, start: floor, grow, shrink, actuator: Actuator::Ticks };
            prop_assert!(window.is_sound());
            let mut ticks = ticks.clamp(floor, ceiling);
            for seen in seen {
                let seen = [Seen::Overcommit, Seen::NothingToDo, Seen::Unknown][usize::from(seen)];
                let next = window.next(ticks, seen);
                prop_assert!((floor..=ceiling).contains(&next));
                match seen {
                    Seen::Overcommit => prop_assert!(next <= ticks),
                    Seen::NothingToDo => prop_assert!(next >= ticks),
                    Seen::Unknown => prop_assert_eq!(next, ticks),
                }
                ticks = next;
            }
        }
    }

    #[test]
    fn unsound_bounds_are_refused() {
        for window in [
            Window { floor: 0, ..WINDOW },
            Window { floor: 500, ..WINDOW },
            Window { ceiling: 300, ..WINDOW },
            Window { grow: 0, ..WINDOW },
        ] {
            assert!(!window.is_sound(), "{window:?}");
        }
        assert!(WINDOW.is_sound() && Window::default().is_sound());
    }
}
