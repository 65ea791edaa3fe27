//! The locks that can be compared, behind one trait.

use crate::job::{LogEntry, MAX_LOCKS};
use crate::pauses::{CountPauses, Counting};
use crossbeam_utils::CachePadded;
use mcslock::relax::Relax;
use pvlock_guest::{Platform, PreemptableTicketLock, TicketLock};
use spin::RelaxStrategy;
use spin::mutex::{SpinMutex, TicketMutex};
#[cfg(feature = "std")]
use std::sync::PoisonError;

/// Which lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum LockKind {
    /// `spin::TicketMutex`.
    SpinTicket = 0,
    /// `spin::SpinMutex`, a test-and-set lock.
    SpinTas = 1,
    /// pvlock's strict ticket lock.
    Ticket = 2,
    /// pvlock's preemptable ticket lock.
    Preemptable = 3,
    /// `mcslock::raw::Mutex`, whose waiters each spin on a word of their own.
    Mcs = 4,
    /// `parking_lot::Mutex`; only on threads.
    ParkingLot = 5,
    /// `std::sync::Mutex`; only on threads.
    Std = 6,
}

impl LockKind {
    /// All locks with their names.
    pub const ALL: [(&'static str, Self); 7] = [
        ("spin-ticket", Self::SpinTicket),
        ("spin-tas", Self::SpinTas),
        ("mcs", Self::Mcs),
        ("ticket", Self::Ticket),
        ("preemptable", Self::Preemptable),
        ("parking-lot", Self::ParkingLot),
        ("std", Self::Std),
    ];

    /// The lock with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().map(|(_, kind)| kind).find(|kind| *kind as u32 == number)
    }

    /// Its name on the command line and in tables.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("?", |(name, _)| name)
    }

    /// Whether it sleeps in an operating system, so that only threads can use it.
    pub fn needs_std(self) -> bool {
        matches!(self, Self::ParkingLot | Self::Std)
    }

    /// Whether its PAUSEs are counted: those of `parking_lot` and `std` are not.
    pub fn counts_pauses(self) -> bool {
        !self.needs_std()
    }

    /// Whether nobody is ever overtaken, and tickets tell so.
    pub fn is_strict(self) -> bool {
        self == Self::Ticket
    }
}

/// A lock under test.
pub trait TestLock {
    /// Runs `section` with the lock held. `drawn` runs as soon as the place in the queue is fixed, where the lock can tell;
    /// `section` gets the ticket, [`LogEntry::BYPASS`] where there is none.
    fn hold<R>(&self, drawn: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R;

    /// The same if that needs no waiting.
    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R>;
}

impl<S: RelaxStrategy> TestLock for TicketMutex<(), S> {
    #[inline]
    fn hold<R>(&self, _: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R {
        let _guard = self.lock();
        section(LogEntry::BYPASS)
    }

    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R> {
        self.try_lock().map(|_guard| section(LogEntry::BYPASS))
    }
}

impl<S: RelaxStrategy> TestLock for SpinMutex<(), S> {
    #[inline]
    fn hold<R>(&self, _: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R {
        let _guard = self.lock();
        section(LogEntry::BYPASS)
    }

    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R> {
        self.try_lock().map(|_guard| section(LogEntry::BYPASS))
    }
}

impl<S: Relax> TestLock for mcslock::raw::Mutex<(), S> {
    #[inline]
    fn hold<R>(&self, _: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R {
        self.lock_then(|()| section(LogEntry::BYPASS))
    }

    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R> {
        self.try_lock_then(|held| held.map(|()| section(LogEntry::BYPASS)))
    }
}

#[cfg(feature = "std")]
impl TestLock for parking_lot::Mutex<()> {
    #[inline]
    fn hold<R>(&self, _: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R {
        let _guard = self.lock();
        section(LogEntry::BYPASS)
    }

    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R> {
        self.try_lock().map(|_guard| section(LogEntry::BYPASS))
    }
}

#[cfg(feature = "std")]
impl TestLock for std::sync::Mutex<()> {
    #[inline]
    fn hold<R>(&self, _: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R {
        // Poison: an owner panicked, which fails the run anyway.
        let _guard = self.lock().unwrap_or_else(PoisonError::into_inner);
        section(LogEntry::BYPASS)
    }

    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R> {
        self.try_lock().ok().map(|_guard| section(LogEntry::BYPASS))
    }
}

impl<P: Platform> TestLock for TicketLock<P> {
    #[inline]
    fn hold<R>(&self, drawn: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R {
        let ticket = self.lock_with(|_| drawn());
        let result = section(u64::from(ticket.number()));
        // SAFETY: the `lock_with` above returned this ticket.
        unsafe { self.unlock(ticket) };
        result
    }

    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R> {
        let ticket = self.try_lock()?;
        let result = section(u64::from(ticket.number()));
        // SAFETY: the `try_lock` above returned this ticket.
        unsafe { self.unlock(ticket) };
        Some(result)
    }
}

impl<P: Platform> TestLock for PreemptableTicketLock<P> {
    #[inline]
    fn hold<R>(&self, drawn: impl FnOnce(), section: impl FnOnce(u64) -> R) -> R {
        let mut ticket = LogEntry::BYPASS;
        let held = self.lock_with(|drew| {
            ticket = drew.into();
            drawn();
        });
        let result = section(ticket);
        // SAFETY: the `lock_with` above took the lock.
        unsafe { self.unlock(held) };
        result
    }

    fn try_hold<R>(&self, section: impl FnOnce(u64) -> R) -> Option<R> {
        let held = self.try_lock()?;
        let result = section(LogEntry::BYPASS);
        // SAFETY: the `try_lock` above took the lock.
        unsafe { self.unlock(held) };
        Some(result)
    }
}

/// One set of each kind of lock.
pub struct Arena<P> {
    pub(crate) spin_ticket: [CachePadded<TicketMutex<(), Counting<P>>>; MAX_LOCKS],
    pub(crate) spin_tas: [CachePadded<SpinMutex<(), Counting<P>>>; MAX_LOCKS],
    pub(crate) ticket: [CachePadded<TicketLock<P>>; MAX_LOCKS],
    pub(crate) preemptable: [CachePadded<PreemptableTicketLock<P>>; MAX_LOCKS],
    pub(crate) mcs: [CachePadded<mcslock::raw::Mutex<(), Counting<P>>>; MAX_LOCKS],
    #[cfg(feature = "std")]
    pub(crate) parking_lot: [CachePadded<parking_lot::Mutex<()>>; MAX_LOCKS],
    #[cfg(feature = "std")]
    pub(crate) std: [CachePadded<std::sync::Mutex<()>>; MAX_LOCKS],
}

impl<P: CountPauses> Arena<P> {
    /// Free locks.
    pub const fn new() -> Self {
        Self {
            spin_ticket: [const { CachePadded::new(TicketMutex::new(())) }; MAX_LOCKS],
            spin_tas: [const { CachePadded::new(SpinMutex::new(())) }; MAX_LOCKS],
            ticket: [const { CachePadded::new(TicketLock::new()) }; MAX_LOCKS],
            preemptable: [const { CachePadded::new(PreemptableTicketLock::new()) }; MAX_LOCKS],
            mcs: [const { CachePadded::new(mcslock::raw::Mutex::new(())) }; MAX_LOCKS],
            #[cfg(feature = "std")]
            parking_lot: [const { CachePadded::new(parking_lot::Mutex::new(())) }; MAX_LOCKS],
            #[cfg(feature = "std")]
            std: [const { CachePadded::new(std::sync::Mutex::new(())) }; MAX_LOCKS],
        }
    }
}

impl<P: CountPauses> Default for Arena<P> {
    fn default() -> Self {
        Self::new()
    }
}
