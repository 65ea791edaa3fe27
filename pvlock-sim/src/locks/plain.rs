//! Locks that only spin.

use crate::platform::Sim;
use pvlock_guest::{Platform, Word};
use std::sync::atomic::Ordering;

/// No deadline.
const FOREVER: u64 = u64::MAX / 2;

/// First come, first served.
#[derive(Debug, Default)]
pub(crate) struct PlainTicket {
    next: Word,
    serving: Word,
}

impl PlainTicket {
    pub(crate) fn lock(&self) {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        // Acquire: pairs with the release in `unlock`.
        let mut serving = self.serving.load(Ordering::Acquire);
        while serving != ticket {
            serving = Sim::wait_while(&self.serving, serving, FOREVER);
        }
    }

    pub(crate) fn unlock(&self) {
        self.serving.fetch_add(1, Ordering::Release);
    }
}

/// Whoever comes when it is free.
#[derive(Debug, Default)]
pub(crate) struct TestAndSet {
    taken: Word,
}

impl TestAndSet {
    pub(crate) fn lock(&self) {
        // Acquire: pairs with the release in `unlock`.
        while self.taken.swap(1, Ordering::Acquire) != 0 {
            Sim::wait_while(&self.taken, 1, FOREVER);
        }
    }

    pub(crate) fn unlock(&self) {
        self.taken.store(0, Ordering::Release);
    }
}
