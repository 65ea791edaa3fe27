//! What hardware does with pause-loop exits, for guests whose host does not get them: a waiter that spins for a window without
//! seeing its lock move reports it.

use core::sync::atomic::Ordering;
use pvlock_guest::{Platform, Word};

/// As [`Platform::wait_while`], but calls `report` each time `window` ticks of it have passed; 0 for never.
#[inline]
pub fn wait_while<P: Platform>(word: &Word, value: u64, deadline: u64, window: u64, report: impl Fn()) -> u64 {
    let mut next = P::ticks().saturating_add(if window == 0 { u64::MAX } else { window });
    loop {
        P::relax();
        // Acquire: pairs with the releasing operation of whichever lock this word belongs to.
        let now = word.load(Ordering::Acquire);
        let ticks = P::ticks();
        if now != value || ticks >= deadline {
            return now;
        }
        if ticks >= next {
            report();
            // What the host did with it does not count.
            next = P::ticks().saturating_add(window);
        }
    }
}
