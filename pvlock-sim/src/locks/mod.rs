//! The locks that can be compared: this project's, and others of the kinds that have been published, all on the same platform.

mod classic;
mod plain;
mod queued;

use crate::platform::{self, Sim};
use classic::ClassicTicket;
use plain::{PlainTicket, TestAndSet};
use pvlock_guest::{PreemptableTicketLock, TicketLock};
use queued::Queued;

/// Which lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// A ticket lock that spins.
    PlainTicket,
    /// A test-and-set lock that spins.
    TestAndSet,
    /// A ticket lock whose waiters spin for 2048 looks, then halt; the releaser looks for the next and kicks it.
    ClassicTicket,
    /// A queued lock whose waiters halt, with one attempt to take it out of turn before queueing.
    Queued,
    /// pvlock's strict ticket lock.
    Ticket,
    /// pvlock's preemptable ticket lock.
    Preemptable,
    /// No lock that can be built: waiters sleep and wake without cost or delay. With a clairvoyant scheduler, a bound.
    Oracle,
}

impl LockKind {
    /// All locks with their names.
    pub const ALL: [(&'static str, Self); 7] = [
        ("plain-ticket", Self::PlainTicket),
        ("test-and-set", Self::TestAndSet),
        ("classic-ticket", Self::ClassicTicket),
        ("queued", Self::Queued),
        ("ticket", Self::Ticket),
        ("preemptable", Self::Preemptable),
        ("oracle", Self::Oracle),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("?", |(name, _)| name)
    }

    /// Whether its waiters halt, so that the guest needs its host.
    pub fn halts(self) -> bool {
        matches!(self, Self::ClassicTicket | Self::Queued | Self::Ticket | Self::Preemptable)
    }
}

/// One lock of any kind.
pub(crate) enum Lock {
    PlainTicket(PlainTicket),
    TestAndSet(TestAndSet),
    ClassicTicket(ClassicTicket),
    Queued(Queued),
    Ticket(TicketLock<Sim>),
    Preemptable(PreemptableTicketLock<Sim>),
    Oracle,
}

/// What a lock's owner gives back.
pub(crate) enum Token {
    Ticket(pvlock_guest::Ticket),
    Preemptable(pvlock_guest::Held),
    None,
}

impl Token {
    /// The ticket that was served, if tickets are served one by one.
    pub(crate) fn ticket(&self) -> Option<u32> {
        if let Self::Ticket(ticket) = self { Some(ticket.number()) } else { None }
    }
}

impl Lock {
    pub(crate) fn new(kind: LockKind) -> Self {
        match kind {
            LockKind::PlainTicket => Self::PlainTicket(PlainTicket::default()),
            LockKind::TestAndSet => Self::TestAndSet(TestAndSet::default()),
            LockKind::ClassicTicket => Self::ClassicTicket(ClassicTicket::default()),
            LockKind::Queued => Self::Queued(Queued::default()),
            LockKind::Ticket => Self::Ticket(TicketLock::new()),
            LockKind::Preemptable => Self::Preemptable(PreemptableTicketLock::new()),
            LockKind::Oracle => Self::Oracle,
        }
    }

    /// Takes the lock, whose line is `line`.
    pub(crate) fn lock(&self, line: usize) -> Token {
        match self {
            Self::PlainTicket(lock) => lock.lock(),
            Self::TestAndSet(lock) => lock.lock(),
            Self::ClassicTicket(lock) => lock.lock(),
            Self::Queued(lock) => lock.lock(),
            Self::Ticket(lock) => return Token::Ticket(lock.lock()),
            Self::Preemptable(lock) => {
                return Token::Preemptable(lock.lock_with(|ticket| platform::with(|machine| machine.drew(line, ticket))));
            }
            Self::Oracle => {
                if !platform::with(|machine| machine.oracle_lock(line)) {
                    platform::suspend();
                }
            }
        }
        Token::None
    }

    /// Takes the lock if it can be had without waiting; only this project's locks can be tried.
    pub(crate) fn try_lock(&self) -> Option<Token> {
        match self {
            Self::Ticket(lock) => lock.try_lock().map(Token::Ticket),
            Self::Preemptable(lock) => lock.try_lock().map(Token::Preemptable),
            _ => None,
        }
    }

    /// As [`Lock::unlock`], and nobody overtakes those who wait.
    pub(crate) fn unlock_fair(&self, token: Token, line: usize) {
        match (self, token) {
            // SAFETY: the token came from the `lock` of this lock, and goes with it.
            (Self::Preemptable(lock), Token::Preemptable(held)) => unsafe { lock.unlock_fair(held) },
            (_, token) => self.unlock(token, line),
        }
    }

    /// Gives the lock back, whose line is `line`.
    pub(crate) fn unlock(&self, token: Token, line: usize) {
        match (self, token) {
            (Self::PlainTicket(lock), _) => lock.unlock(),
            (Self::TestAndSet(lock), _) => lock.unlock(),
            (Self::ClassicTicket(lock), _) => lock.unlock(),
            (Self::Queued(lock), _) => lock.unlock(),
            // SAFETY: the token came from the `lock` of this lock, and goes with it.
            (Self::Ticket(lock), Token::Ticket(ticket)) => unsafe { lock.unlock(ticket) },
            // SAFETY: as above.
            (Self::Preemptable(lock), Token::Preemptable(held)) => unsafe { lock.unlock(held) },
            (Self::Oracle, _) => platform::with(|machine| machine.oracle_unlock(line)),
            (Self::Ticket(_) | Self::Preemptable(_), _) => unreachable!("a token goes back to its own lock"),
        }
    }
}
