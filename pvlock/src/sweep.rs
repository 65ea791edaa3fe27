//! What `pvlock run --sweep` runs: short and long critical sections, at every overcommit.

use pvlock_guest_image::work::spend;
use std::time::{Duration, Instant};

/// vCPUs per CPU.
pub const OVERCOMMIT: [usize; 4] = [1, 2, 4, 8];
/// Iterations inside the lock of a short section.
const SHORT: u64 = 200;
/// Iterations outside, for short and long sections.
const OUTSIDE: u64 = 2000;
/// Work inside the lock of a long section.
const LONG: Duration = Duration::from_micros(10);

/// The critical sections of a sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sweep {
    /// Time of one iteration of work, in ns.
    pub ns_per_iteration: f64,
    /// Iterations inside the lock of a long section.
    pub long: u64,
}

/// One length of critical sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// Its name.
    pub name: &'static str,
    /// Iterations of work inside the lock.
    pub inside: u64,
    /// Iterations of work outside.
    pub outside: u64,
}

impl Sweep {
    /// Finds out how fast this machine works.
    ///
    /// Guests run the same loop, compiled with optimisation. So must this program be, or its long sections are too short.
    pub fn calibrated() -> Self {
        const ITERATIONS: u64 = 1 << 20;
        // The fastest of a few: the others were disturbed.
        let time = (0..9).map(|_| {
            let begun = Instant::now();
            spend(ITERATIONS);
            begun.elapsed()
        });
        Self::at(time.min().unwrap_or(LONG).as_nanos() as f64 / ITERATIONS as f64)
    }

    /// For a machine as fast as that.
    pub fn at(ns_per_iteration: f64) -> Self {
        let long = LONG.as_nanos() as f64 / ns_per_iteration.max(f64::MIN_POSITIVE);
        // Never mistaken for short.
        Self { ns_per_iteration, long: (long as u64).max(SHORT + 1) }
    }

    /// Short and long.
    pub fn sections(&self) -> [Sections; 2] {
        [("short", SHORT), ("long", self.long)].map(|(name, inside)| Sections { name, inside, outside: OUTSIDE })
    }

    /// How long the work inside takes, in µs.
    pub fn inside_us(&self, sections: &Sections) -> f64 {
        sections.inside as f64 * self.ns_per_iteration / 1000.0
    }

    /// How long the work outside takes, in µs.
    pub fn outside_us(&self, sections: &Sections) -> f64 {
        sections.outside as f64 * self.ns_per_iteration / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_sections_take_ten_microseconds() {
        assert_eq!(Sweep::at(0.25).long, 40_000);
        assert_eq!(Sweep::at(1e9).long, 201, "and are never taken for short ones");
        let measured = Sweep::calibrated();
        assert!(measured.ns_per_iteration > 0.01 && measured.ns_per_iteration < 1000.0, "{measured:?}");
        let [_, long] = measured.sections();
        assert!((9.0..=11.0).contains(&measured.inside_us(&long)) || measured.long == 201, "{measured:?}");
    }
}
