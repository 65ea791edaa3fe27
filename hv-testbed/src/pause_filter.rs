//! Pause-loop exits out of PAUSE exits, for CPUs that intercept PAUSE but do not count it.
//!
//! Follows: AMD64 APM volume 2, 15.14.4 "Pause Intercept Filtering" for the idea (a loop is a series of PAUSEs no further apart
//! than a threshold), and Intel SDM volume 3, 26.1.3 for the measure: the window is the time since the loop's first PAUSE.

/// One vCPU's loop so far. Times are in ticks.
#[derive(Clone, Copy, Debug, Default)]
pub struct PauseFilter {
    first: u64,
    last: u64,
}

impl PauseFilter {
    /// No loop yet.
    pub const fn new() -> Self {
        Self { first: 0, last: 0 }
    }

    /// A PAUSE at `now`: whether it is one too many. PAUSEs further than `gap` apart belong to different loops; one that comes
    /// more than `window` after the first of its loop is reported, and begins another.
    pub fn pause(&mut self, now: u64, window: u64, gap: u64) -> bool {
        if now.wrapping_sub(self.last) > gap {
            self.first = now;
        }
        self.last = now;
        let reported = now.wrapping_sub(self.first) > window;
        if reported {
            self.first = now;
        }
        reported
    }

    /// The vCPU was not on a CPU until `now`: the loop begins anew.
    pub fn restart(&mut self, now: u64) {
        (self.first, self.last) = (now, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_is_reported_once_for_each_window() {
        let mut filter = PauseFilter::new();
        let reports: usize = (0..100).filter(|n| filter.pause(1_000 + n * 10, 95, 20)).count();
        // Ten PAUSEs fit into a window; every tenth is the first outside.
        assert_eq!(reports, 9);
    }

    #[test]
    fn pauses_far_apart_are_no_loop() {
        let mut filter = PauseFilter::new();
        assert!((0..100).all(|n| !filter.pause(n * 21, 95, 20)));
    }

    #[test]
    fn a_gap_begins_a_new_loop() {
        let mut filter = PauseFilter::new();
        let times = [100, 110, 120, 150, 160, 170, 180, 190, 210];
        let reported: alloc::vec::Vec<_> = times.into_iter().filter(|&at| filter.pause(at, 50, 20)).collect();
        assert_eq!(reported, [210], "60 after 150, not 110 after 100");
    }

    #[test]
    fn time_off_the_cpu_is_no_part_of_a_loop() {
        let mut filter = PauseFilter::new();
        filter.restart(60);
        assert!(!filter.pause(100, 50, 1_000));
        filter.restart(500);
        assert!(!filter.pause(510, 50, 1_000));
        assert!(filter.pause(551, 50, 1_000));
    }
}
