//! A lock, and what it protects.

use crate::OnVm;
use pvlock_guest::{PreemptableTicketLock, RawLock, TicketLock};
use shuttle::sync::atomic::{AtomicU32, Ordering};
use std::sync::atomic::AtomicBool;

/// Work that vCPUs do under a lock.
#[derive(Debug)]
pub struct Work<L> {
    lock: L,
    inside: AtomicBool,
    /// Advanced by a load and a store: an exact count needs exclusion.
    visits: AtomicU32,
    /// The next ticket to be served.
    serving: AtomicU32,
}

impl<L: RawLock> Work<L> {
    /// Work under `lock`, which is free.
    pub fn new(lock: L) -> Self {
        Self { lock, inside: AtomicBool::new(false), visits: AtomicU32::new(0), serving: AtomicU32::new(0) }
    }

    fn inside(&self) {
        assert!(!self.inside.swap(true, Ordering::Relaxed), "two are inside");
        let visits = self.visits.load(Ordering::Relaxed);
        self.visits.store(visits + 1, Ordering::Relaxed);
        self.inside.store(false, Ordering::Relaxed);
    }

    /// Works, if the lock can be taken at once.
    pub fn try_once(&self) -> bool {
        let Some(token) = self.lock.try_lock() else { return false };
        self.inside();
        // SAFETY: taken above.
        unsafe { self.lock.unlock(token) };
        true
    }

    /// Everybody has left.
    pub fn finish(&self, visits: usize) {
        assert_eq!(self.visits.load(Ordering::Relaxed) as usize, visits, "an update was lost");
        assert!(!self.lock.is_locked(), "every ticket drawn has been served");
    }

    fn served(&self, ticket: u32) {
        let expected = self.serving.load(Ordering::Relaxed);
        assert_eq!(ticket, expected, "served out of turn");
        self.serving.store(expected + 1, Ordering::Relaxed);
    }
}

impl Work<TicketLock<OnVm>> {
    /// Takes the lock, works, releases it. Tickets are served in their order, whoever drew them.
    pub fn once(&self) {
        let ticket = self.lock.lock();
        self.served(ticket.number());
        self.inside();
        // SAFETY: taken above.
        unsafe { self.lock.unlock(ticket) };
    }
}

impl Work<PreemptableTicketLock<OnVm>> {
    /// Takes the lock, works, releases it. Tickets are served in their order.
    pub fn once(&self) {
        let mut drawn = None;
        let held = self.lock.lock_with(|ticket| drawn = Some(ticket));
        if let Some(ticket) = drawn {
            self.served(ticket);
        }
        self.inside();
        if crate::choose(4) == 0 {
            // SAFETY: taken above.
            unsafe { self.lock.unlock_fair(held) };
        } else {
            // SAFETY: taken above.
            unsafe { self.lock.unlock(held) };
        }
    }
}
