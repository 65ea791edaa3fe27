//! What must hold, judged by the changes of a lock's memory and by who was at which point when.

use crate::baton::{Event, Rules, VCPUS, Words};
use pvlock_guest::CLAIM;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How often what the rules are about has happened, so that a test knows that they were needed.
#[derive(Debug, Default)]
pub struct Counts {
    pub halts: AtomicU64,
    pub kicks: AtomicU64,
    pub waits: AtomicU64,
    pub bypasses: AtomicU64,
    pub silences: AtomicU64,
    pub presences: AtomicU64,
    pub fair: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

macro_rules! ensure {
    ($holds:expr, $($otherwise:tt)+) => {
        if !$holds {
            return Err(format!($($otherwise)+));
        }
    };
}

/// Common to all locks: one owner at a time, one kick for each halt that was announced, kicks after releases.
struct Common {
    counts: &'static Counts,
    /// Between the return of `lock` and the call of `unlock`.
    inside: Option<usize>,
    /// Tickets drawn but not yet served.
    tickets: [Option<u32>; VCPUS],
    halting: [bool; VCPUS],
    /// Whether it may be kicked for its last announcement.
    sleeps: [u64; VCPUS],
    kicked: [u64; VCPUS],
    /// Whom it has to kick next, because it released the lock from a halted head.
    owes: [Option<usize>; VCPUS],
}

impl Common {
    fn new(counts: &'static Counts) -> Self {
        let (tickets, halting, owes) = Default::default();
        Self { counts, inside: None, tickets, halting, sleeps: [0; VCPUS], kicked: [0; VCPUS], owes }
    }

    fn at(&mut self, vcpu: usize, event: Event, halting: bool) -> Result<(), String> {
        if halting && !self.halting[vcpu] {
            self.sleeps[vcpu] += 1;
        }
        self.halting[vcpu] = halting;
        let owed = self.owes[vcpu].take();
        match event {
            Event::Kick(target) => {
                ensure!(self.inside != Some(vcpu), "an owner kicks {target}");
                ensure!(owed == Some(target), "kicks {target}, but released the lock for {owed:?}");
                self.kicked[target] += 1;
                count(&self.counts.kicks);
                let (kicked, sleeps) = (self.kicked[target], self.sleeps[target]);
                ensure!(kicked <= sleeps, "{target} was kicked {kicked} times for {sleeps} halts");
                return Ok(());
            }
            Event::Halt => {
                count(&self.counts.halts);
                ensure!(halting, "halts without saying so");
                ensure!(self.tickets[vcpu].is_some(), "halts without a ticket");
            }
            Event::Refused => ensure!(self.tickets[vcpu].is_none(), "try_lock has failed and drawn a ticket"),
            Event::Acquired(_) => {
                ensure!(self.inside.is_none(), "also owned by {:?}", self.inside);
                self.inside = Some(vcpu);
            }
            Event::Releasing { .. } => {
                ensure!(self.inside == Some(vcpu), "not the owner");
                self.inside = None;
            }
            _ => {}
        }
        ensure!(owed.is_none(), "{owed:?} has halted and is not kicked");
        Ok(())
    }

    fn draws(&mut self, vcpu: usize, ticket: u32) -> Result<(), String> {
        ensure!(self.tickets[vcpu].is_none(), "draws {ticket} and has {:?}", self.tickets[vcpu]);
        self.tickets[vcpu] = Some(ticket);
        count(&self.counts.waits);
        Ok(())
    }

    fn who_has(&self, ticket: u32) -> Option<usize> {
        self.tickets.iter().position(|&its| its == Some(ticket))
    }
}

fn decode(word: u64, shift: u32) -> Option<usize> {
    (word >> shift & 0x3fff).checked_sub(1).map(|vcpu| vcpu as usize)
}

/// The strict lock: acquired in the order in which tickets are drawn.
pub struct Strict {
    common: Common,
    acquired: u32,
}

impl Strict {
    pub fn new(counts: &'static Counts) -> Self {
        Self { common: Common::new(counts), acquired: 0 }
    }
}

impl Rules for Strict {
    fn changed(&mut self, vcpu: usize, old: Words, new: Words, _now: u64) -> Result<(), String> {
        if new.next != old.next {
            ensure!(new.next == old.next.wrapping_add(1), "more than one ticket drawn at once");
            self.common.draws(vcpu, old.next)?;
        }
        let (before, after) = (old.word as u32, new.word as u32);
        if before != after {
            ensure!(after == before.wrapping_add(1), "serves {after} after {before}");
            ensure!(self.common.tickets[vcpu] == Some(before), "releases {before}, which is not its own");
            self.common.tickets[vcpu] = None;
            self.common.owes[vcpu] = decode(old.word, 32);
        }
        match decode(new.word, 32) {
            Some(noted) => {
                let next = self.common.who_has(after.wrapping_add(1));
                ensure!(next == Some(noted), "{noted} is noted to be kicked, {next:?} is next");
            }
            None => ensure!(before != after || decode(old.word, 32).is_none(), "the note is gone"),
        }
        Ok(())
    }

    fn at(&mut self, vcpu: usize, event: Event, words: Words, halting: bool) -> Result<(), String> {
        match event {
            Event::Drawn(ticket) => ensure!(self.common.tickets[vcpu] == Some(ticket), "has not drawn {ticket}"),
            Event::Acquired(ticket) => {
                ensure!(ticket == Some(self.acquired), "acquired by {ticket:?}, the turn is {}'s", self.acquired);
                ensure!(ticket == self.common.tickets[vcpu] && ticket == Some(words.word as u32), "{ticket:?} is not served");
                self.acquired += 1;
            }
            Event::Releasing { fair: true } => count(&self.common.counts.fair),
            _ => {}
        }
        self.common.at(vcpu, event, halting)
    }
}

/// The fields of the preemptable lock's word.
#[derive(Clone, Copy)]
struct Fields(u64);

impl Fields {
    fn locked(self) -> bool {
        self.0 & 1 != 0
    }

    fn away(self) -> bool {
        self.0 & 2 != 0
    }

    fn halted(self) -> Option<usize> {
        if self.0 & 4 == 0 { None } else { decode(self.0, 4) }
    }

    fn serving(self) -> u32 {
        (self.0 >> 18) as u16 as u32
    }

    fn next(self) -> u32 {
        (self.0 >> 34) as u16 as u32
    }

    fn queue_is_empty(self) -> bool {
        self.serving() == self.next()
    }
}

/// The preemptable lock: tickets in order; bypassed only if the head is away or silent.
pub struct Preemptable {
    common: Common,
    /// By the word, which is before `lock` returns.
    owner: Option<usize>,
    /// Has announced a halt and not said since that it is present.
    away: [bool; VCPUS],
    free_since: u64,
    /// The head has let a free lock lie for CLAIM ticks, and not said since that it is present.
    silent: bool,
    /// The head has polled since it was last away or silent; and who has bypassed it since, how often.
    polled: Option<[u32; VCPUS]>,
    releasing_fair: bool,
    /// Reserved for the head, come what may.
    fair: bool,
    acquired: u32,
}

impl Preemptable {
    pub fn new(counts: &'static Counts) -> Self {
        let (owner, polled, away) = (None, None, [false; VCPUS]);
        let common = Common::new(counts);
        Self { common, owner, away, free_since: 0, silent: false, polled, releasing_fair: false, fair: false, acquired: 0 }
    }

    fn new_head(&mut self) {
        (self.silent, self.polled, self.fair) = (false, None, false);
    }

    /// Whether the lock is free and has been for long. Whoever sees that may tell.
    fn is_silent(&mut self, old: Fields, now: u64) {
        if !old.locked() && now - self.free_since >= CLAIM {
            (self.silent, self.polled) = (true, None);
            count(&self.common.counts.silences);
        }
    }

    fn bypassed(&mut self, vcpu: usize, head: usize, old: Fields, now: u64) -> Result<(), String> {
        count(&self.common.counts.bypasses);
        self.is_silent(old, now);
        ensure!(!self.fair, "takes a lock that was released for {head} by unlock_fair");
        let free = now - self.free_since;
        ensure!(self.away[head] || self.silent, "bypasses {head}, which is not away; the lock was free for {free} ticks");
        if let Some(bypasses) = &mut self.polled {
            bypasses[vcpu] += 1;
            ensure!(bypasses[vcpu] <= 1, "bypasses {head} again, which polls");
        }
        Ok(())
    }
}

impl Rules for Preemptable {
    fn changed(&mut self, vcpu: usize, old: Words, new: Words, now: u64) -> Result<(), String> {
        let (old, new) = (Fields(old.word), Fields(new.word));
        let head = self.common.who_has(old.serving());
        if new.next() != old.next() {
            ensure!(new.next() == (old.next() + 1) & 0xffff, "more than one ticket drawn at once");
            ensure!(self.owner != Some(vcpu), "draws and owns the lock");
            if old.queue_is_empty() {
                self.new_head();
            }
            self.away[vcpu] = false;
            self.common.draws(vcpu, old.next())?;
        }
        let served = new.serving() != old.serving();
        if served {
            ensure!(new.serving() == (old.serving() + 1) & 0xffff, "{} is served after {}", new.serving(), old.serving());
            ensure!(!old.locked() && new.locked(), "a ticket is served without the lock");
            ensure!(head == Some(vcpu), "served in place of {head:?}");
        }
        match (old.locked(), new.locked()) {
            (false, true) => {
                ensure!(self.owner.is_none(), "takes it from {:?}", self.owner);
                if served {
                    self.new_head();
                    self.common.tickets[vcpu] = None;
                } else {
                    ensure!(self.common.tickets[vcpu].is_none(), "takes it out of turn");
                    if let Some(head) = head {
                        self.bypassed(vcpu, head, old, now)?;
                    }
                }
                self.owner = Some(vcpu);
            }
            (true, false) => {
                ensure!(self.owner == Some(vcpu), "releases what {:?} owns", self.owner);
                (self.owner, self.free_since) = (None, now);
                self.fair = self.releasing_fair && !new.queue_is_empty();
                self.common.owes[vcpu] = old.halted();
                ensure!(new.halted().is_none(), "the head would be kicked again");
            }
            _ => {}
        }
        let head = self.common.who_has(new.serving());
        match (old.away(), new.away()) {
            (false, true) => {
                self.is_silent(old, now);
                let is_head = head == Some(vcpu);
                ensure!(is_head || self.silent || head.is_some_and(|head| self.away[head]), "says that {head:?} is away");
            }
            (true, false) if !served => {
                ensure!(head == Some(vcpu), "says that {head:?} is present");
                count(&self.common.counts.presences);
                (self.away[vcpu], self.silent) = (false, false);
            }
            _ => {}
        }
        ensure!(new.halted().is_none() || new.halted() == head, "{:?} is noted to be kicked, {head:?} is next", new.halted());
        Ok(())
    }

    fn at(&mut self, vcpu: usize, event: Event, words: Words, halting: bool) -> Result<(), String> {
        let word = Fields(words.word);
        let is_head = self.common.tickets[vcpu] == Some(word.serving());
        if halting {
            self.away[vcpu] = true;
            if is_head {
                self.polled = None;
            }
        }
        match event {
            Event::Poll(true) if is_head => {
                self.polled.get_or_insert_default();
            }
            Event::Poll(true) => self.away[vcpu] = false,
            Event::Drawn(ticket) => ensure!(self.common.tickets[vcpu] == Some(ticket), "has not drawn {ticket}"),
            Event::Acquired(ticket) => {
                ensure!(self.owner == Some(vcpu), "the owner is {:?}", self.owner);
                if let Some(ticket) = ticket {
                    ensure!(ticket == self.acquired & 0xffff, "ticket {ticket} is served, the turn is {}'s", self.acquired);
                    self.acquired += 1;
                }
            }
            Event::Releasing { fair } => {
                self.releasing_fair = fair;
                if fair {
                    count(&self.common.counts.fair);
                }
            }
            _ => {}
        }
        self.common.at(vcpu, event, halting)
    }
}
