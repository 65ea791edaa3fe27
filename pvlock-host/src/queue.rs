//! Wait queues: one per vCPU, intrusive, ordered by ticket within a lock. A sleeper is on at most one.
//!
//! The list of a vCPU and the links of everybody on it are protected by that vCPU's lock. Only a sleeper's own thread puts it
//! on a queue; anyone may move it to another or take it off.
//!
//! `Link::owner` may be read without a lock, as a hint to find the lock: it is `NONE` only for who is on no queue (a move goes
//! from one owner to the next directly), so a sleeper's thread that reads `NONE` has nothing to take off.
//!
//! # Circles
//!
//! Sleepers that wait for each other in a circle would wait for the deadline. Whoever adds an edge looks for a circle
//! afterwards, and of those that close one together at least the last sees it:
//!
//! ```text
//! A sleeps on B                  B sleeps on A                   (or a hand-over makes B sleep on A)
//!   A.owner := B                   B.owner := A
//!   fence(SeqCst)                  fence(SeqCst)
//!   walks B.owner, …               walks A.owner, …
//! ```

use crate::mutation::{Mutation, active};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};
use crate::vcpu::Vcpu;
use alloc::vec::Vec;
use crossbeam_utils::CachePadded;
use pvlock_protocol::{RunState, VcpuId};

const NONE: u32 = u32::MAX;

/// What a vCPU's queue lock protects: its queue, and what is written to its record.
pub(crate) struct List {
    halted: Lane,
    spun: Lane,
    /// As last published, or to be published at the next REGISTER.
    pub(crate) run_state: RunState,
    /// It is off-CPU because the scheduler has taken its CPU away, and not because it waits for something.
    pub(crate) preempted: bool,
}

/// The sleepers of one kind.
struct Lane {
    head: u32,
    tail: u32,
    length: u32,
}

/// The two kinds of sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It has announced itself: a releaser will kick it. Woken early, some of them at a time.
    Halted,
    /// It was parked at a pause-loop exit: no releaser knows. So it sleeps only while the owner is known to be off-CPU, and
    /// all of them are woken when that ends.
    Spun,
}

impl List {
    pub(crate) const EMPTY: Self = Self { halted: Lane::EMPTY, spun: Lane::EMPTY, run_state: RunState::Unknown, preempted: false };

    /// How many sleep until this vCPU runs.
    pub(crate) fn spinners(&self) -> usize {
        self.spun.length as usize
    }

    fn lane(&mut self, kind: Kind) -> &mut Lane {
        match kind {
            Kind::Halted => &mut self.halted,
            Kind::Spun => &mut self.spun,
        }
    }
}

impl Lane {
    const EMPTY: Self = Self { head: NONE, tail: NONE, length: 0 };
}

/// A vCPU's place on somebody's queue, and what it waits for there.
pub(crate) struct Link {
    owner: AtomicU32,
    next: AtomicU32,
    previous: AtomicU32,
    /// 1 if it is of the kind that spun. Changes only while it is on no queue.
    spun: AtomicU32,
    pub(crate) lock: AtomicU64,
    pub(crate) ticket: AtomicU32,
}

impl Link {
    pub(crate) fn new() -> Self {
        Self {
            owner: AtomicU32::new(NONE),
            next: AtomicU32::new(NONE),
            previous: AtomicU32::new(NONE),
            spun: AtomicU32::new(0),
            lock: AtomicU64::new(0),
            ticket: AtomicU32::new(0),
        }
    }

    /// On whose queue this vCPU stands; a hint unless that queue's lock is held.
    pub(crate) fn owner(&self) -> Option<VcpuId> {
        match self.owner.load(Ordering::Relaxed) {
            NONE => None,
            owner => VcpuId::new(owner as usize),
        }
    }

    fn kind(&self) -> Kind {
        if self.spun.load(Ordering::Relaxed) == 0 { Kind::Halted } else { Kind::Spun }
    }

    /// Whether a spinner may sleep until the owner of `list` and `owner` runs: that must not depend, by whatever locks, on the
    /// spinner itself.
    ///
    /// A preempted vCPU runs when its scheduler says so. One that sleeps in the engine (`asleep`) runs when it is kicked:
    /// certainly before the spinner is served if it waits for the same lock with the ticket before; but if the hint is stale,
    /// it may wait for the spinner. (So may the lock's holder if the spinner is in an interrupt handler: then `asleep` is false.)
    /// What it waits for was noted by its own thread before it was marked as not running, and stays, even if it has woken and
    /// is idle since: then it is no answer.
    fn may_await(&self, list: &List, owner: &Self, asleep: bool) -> bool {
        let ticket = self.ticket.load(Ordering::Relaxed).wrapping_sub(1);
        let is_before = owner.waits_for(self.lock.load(Ordering::Relaxed)) && owner.ticket.load(Ordering::Relaxed) == ticket;
        list.run_state == RunState::NotRunning && (list.preempted || asleep && is_before || active(Mutation::StaleHintTrusted))
    }

    /// Whether this one waits for `lock` with a ticket after `ticket`; tickets wrap.
    fn is_after(&self, lock: u64, ticket: u32) -> bool {
        self.waits_for(lock) && self.ticket.load(Ordering::Relaxed).wrapping_sub(ticket) as i32 > 0
    }

    fn waits_for(&self, lock: u64) -> bool {
        self.lock.load(Ordering::Relaxed) == lock
    }
}

/// What became of an `enqueue`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enqueued {
    Queued,
    /// The owner sleeps, by a chain of queues, on the sleeper.
    Circle,
    /// The owner is offline, or not a vCPU of this VM.
    NoQueue,
    /// The sleeper spun, and the owner's return is not certain to come before the sleeper is needed.
    WouldStrand,
}

/// All vCPUs of an engine, as far as queues go.
pub(crate) struct Queues<'a, R>(pub(crate) &'a [CachePadded<Vcpu<R>>]);

impl<R: lock_api::RawMutex> Queues<'_, R> {
    fn link(&self, index: u32) -> Option<&Link> {
        self.0.get(index as usize).map(|vcpu| &vcpu.link)
    }

    /// Puts `sleeper` on `owner`'s queue behind those of the same lock that have earlier tickets. The sleeper's thread calls
    /// it, with `lock` and `ticket` noted in its link, while it is on no queue.
    pub(crate) fn enqueue(&self, sleeper: VcpuId, owner: VcpuId, kind: Kind) -> Enqueued {
        let (Some(vcpu), Some(target)) = (self.0.get(sleeper.index()), self.0.get(owner.index())) else {
            return Enqueued::NoQueue;
        };
        {
            let mut list = target.queue.lock();
            // Under the lock: who takes the owner offline empties its queue afterwards, before us or behind us.
            if !target.is_online() && !active(Mutation::OfflineNotChecked) {
                return Enqueued::NoQueue;
            }
            // Under the lock as well: the owner is marked running under it before its queue is drained.
            let asleep = || target.parked().is_some() && (!vcpu.may_be_in_handler() || active(Mutation::HandlerParked));
            let may_await = || vcpu.link.may_await(&list, &target.link, asleep());
            if kind == Kind::Spun && !active(Mutation::StrandNotChecked) && !may_await() {
                return Enqueued::WouldStrand;
            }
            vcpu.link.spun.store((kind == Kind::Spun).into(), Ordering::Relaxed);
            let list = list.lane(kind);
            let lock = vcpu.link.lock.load(Ordering::Relaxed);
            let ticket = vcpu.link.ticket.load(Ordering::Relaxed);
            // From the tail, as a new waiter mostly has the latest ticket, past those of other locks. Bounded by the length.
            let mut before = list.tail;
            let mut cursor = list.tail;
            while let Some(link) = self.link(cursor) {
                cursor = link.previous.load(Ordering::Relaxed);
                if link.is_after(lock, ticket) {
                    before = cursor;
                } else if link.waits_for(lock) {
                    break;
                }
            }
            self.insert_after(list, before, sleeper.index() as u32);
            vcpu.link.owner.store(owner.index() as u32, Ordering::Relaxed);
        }
        if !active(Mutation::CircleNotChecked) && self.closes_circle(sleeper) {
            self.dequeue(sleeper);
            return Enqueued::Circle;
        }
        Enqueued::Queued
    }

    /// Takes a sleeper off the queue it is on, if any.
    pub(crate) fn dequeue(&self, sleeper: VcpuId) {
        let Some(vcpu) = self.0.get(sleeper.index()) else { return };
        // Repeats only if a hand-over moved the sleeper to another queue meanwhile, which is somebody's progress.
        while let Some(owner) = vcpu.link.owner() {
            let Some(target) = self.0.get(owner.index()) else { return };
            let mut list = target.queue.lock();
            if vcpu.link.owner() == Some(owner) {
                self.unlink(list.lane(vcpu.link.kind()), sleeper.index() as u32);
                vcpu.link.owner.store(NONE, Ordering::Relaxed);
            }
        }
    }

    /// Takes the first sleeper of this kind off `owner`'s queue.
    pub(crate) fn pop(&self, owner: VcpuId, kind: Kind) -> Option<VcpuId> {
        let mut list = self.0.get(owner.index())?.queue.lock();
        let list = list.lane(kind);
        let first = list.head;
        let link = self.link(first)?;
        self.unlink(list, first);
        link.owner.store(NONE, Ordering::Relaxed);
        VcpuId::new(first as usize)
    }

    /// Number of sleepers of this kind on `owner`'s queue.
    pub(crate) fn length(&self, owner: VcpuId, kind: Kind) -> usize {
        self.0.get(owner.index()).map_or(0, |vcpu| vcpu.queue.lock().lane(kind).length as usize)
    }

    /// Whether `owner` sleeps at the end of a chain of `most` sleepers or more. A hint, as others move meanwhile.
    pub(crate) fn chain_reaches(&self, owner: VcpuId, most: usize) -> bool {
        let mut at = Some(owner);
        for _ in 0..most.min(self.0.len()) {
            at = match at.and_then(|at| self.link(at.index() as u32)).and_then(Link::owner) {
                None => return false,
                owner => owner,
            };
        }
        true
    }

    /// `lock`, for which `to` waited, passes from `from` to `to`: the others that halted and sleep on `from` for it now sleep
    /// on `to`, in the order of their tickets. Nobody who spun sleeps on `from`, which runs.
    ///
    /// `to` may have been back since it was kicked, and sleep again, on one of them: then it is taken off that queue. True if so:
    /// it has to be woken, as nothing else wakes it if it spun.
    #[must_use]
    pub(crate) fn hand_over(&self, from: VcpuId, to: VcpuId, lock: u64) -> bool {
        let (Some(source), Some(target)) = (self.0.get(from.index()), self.0.get(to.index())) else { return false };
        if from == to {
            return false;
        }
        let owner = to.index() as u32;
        {
            // In the order of their vCPUs.
            let (mut source, mut list) = if from < to {
                let source = source.queue.lock();
                (source, target.queue.lock())
            } else {
                let list = target.queue.lock();
                (source.queue.lock(), list)
            };
            // As in `enqueue`.
            if !target.is_online() {
                return false;
            }
            let (source, list) = (&mut source.halted, &mut list.halted);
            let mut cursor = source.head;
            // Both lists are in order: one pass over each.
            let mut place = list.head;
            while let Some(link) = self.link(cursor) {
                let node = cursor;
                cursor = link.next.load(Ordering::Relaxed);
                if node == owner {
                    // The new holder waits for nobody.
                    self.unlink(source, node);
                    link.owner.store(NONE, Ordering::Relaxed);
                } else if link.waits_for(lock) {
                    self.unlink(source, node);
                    if active(Mutation::HandOverViaNone) {
                        link.owner.store(NONE, Ordering::Relaxed);
                    }
                    let ticket = link.ticket.load(Ordering::Relaxed);
                    while let Some(other) = self.link(place).filter(|other| !other.is_after(lock, ticket)) {
                        place = other.next.load(Ordering::Relaxed);
                    }
                    let before = self.link(place).map_or(list.tail, |other| other.previous.load(Ordering::Relaxed));
                    self.insert_after(list, before, node);
                    link.owner.store(owner, Ordering::Relaxed);
                }
            }
        }
        // Every edge that was added leads to the new holder, so it is on any new circle.
        let circle = !active(Mutation::HandOverCircle) && self.closes_circle(to);
        if circle {
            self.dequeue(to);
        }
        circle
    }

    /// Whether following queues from `start` leads back to it (or to a circle that it hangs on), called after an edge was
    /// added. Walks at most as many links as there are vCPUs.
    fn closes_circle(&self, start: VcpuId) -> bool {
        // SeqCst: pairs with itself, see the module's documentation.
        if !active(Mutation::CircleNotFenced) {
            fence(Ordering::SeqCst);
        }
        let mut at = start;
        for _ in 0..self.0.len() {
            match self.link(at.index() as u32).and_then(Link::owner) {
                None => return false,
                Some(owner) if owner == start => return true,
                Some(owner) => at = owner,
            }
        }
        true
    }

    fn insert_after(&self, list: &mut Lane, before: u32, node: u32) {
        let Some(link) = self.link(node) else { return };
        let after = match self.link(before) {
            Some(before) => before.next.swap(node, Ordering::Relaxed),
            None => core::mem::replace(&mut list.head, node),
        };
        match self.link(after) {
            Some(after) => after.previous.store(node, Ordering::Relaxed),
            None => list.tail = node,
        }
        link.previous.store(before, Ordering::Relaxed);
        link.next.store(after, Ordering::Relaxed);
        list.length += 1;
    }

    /// Takes `node` out of the list; its owner is the caller's to change, while it holds the list.
    fn unlink(&self, list: &mut Lane, node: u32) {
        let Some(link) = self.link(node) else { return };
        let (before, after) = (link.previous.load(Ordering::Relaxed), link.next.load(Ordering::Relaxed));
        match self.link(before) {
            Some(before) => before.next.store(after, Ordering::Relaxed),
            None => list.head = after,
        }
        match self.link(after) {
            Some(after) => after.previous.store(before, Ordering::Relaxed),
            None => list.tail = before,
        }
        list.length -= 1;
    }

    /// Everybody on `owner`'s queue, first to last, those that halted first, if the lists and their links agree.
    pub(crate) fn inspect(&self, list: &List, owner: u32) -> Result<Vec<VcpuId>, &'static str> {
        let mut sleepers = Vec::new();
        for (kind, lane) in [(Kind::Halted, &list.halted), (Kind::Spun, &list.spun)] {
            let (first, mut before, mut at) = (sleepers.len(), NONE, lane.head);
            while let Some(link) = self.link(at) {
                if link.owner.load(Ordering::Relaxed) != owner {
                    return Err("a sleeper's owner is not the vCPU on whose queue it is");
                }
                if link.kind() != kind {
                    return Err("a sleeper is among those of the other kind");
                }
                if link.previous.load(Ordering::Relaxed) != before {
                    return Err("links forwards and backwards differ");
                }
                sleepers.extend(VcpuId::new(at as usize));
                if sleepers.len() > self.0.len() {
                    return Err("a list runs in a circle");
                }
                (before, at) = (at, link.next.load(Ordering::Relaxed));
            }
            if lane.tail != before || lane.length as usize != sleepers.len() - first {
                return Err("a list's tail or length is wrong");
            }
        }
        if self.0.iter().filter(|vcpu| vcpu.link.owner.load(Ordering::Relaxed) == owner).count() != sleepers.len() {
            return Err("a sleeper's owner does not have it on its queue");
        }
        Ok(sleepers)
    }
}
