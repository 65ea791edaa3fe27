//! Wait queues: one per vCPU, intrusive, ordered by ticket within a lock. A sleeper is on at most one.
//!
//! The list of a vCPU and the links of everybody on it are protected by that vCPU's lock. `Link::owner` may be read without
//! it, as a hint to find the lock; it changes only under the lock of the queue that it names, or that it will name.

use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::vcpu::Vcpu;
use crossbeam_utils::CachePadded;
use pvlock_protocol::VcpuId;

const NONE: u32 = u32::MAX;

/// A vCPU's queue.
pub(crate) struct List {
    head: u32,
    tail: u32,
    length: u32,
}

impl List {
    pub(crate) const EMPTY: Self = Self { head: NONE, tail: NONE, length: 0 };
}

/// A vCPU's place on somebody's queue, and what it waits for there.
pub(crate) struct Link {
    owner: AtomicU32,
    next: AtomicU32,
    previous: AtomicU32,
    pub(crate) lock: AtomicU64,
    pub(crate) ticket: AtomicU32,
}

impl Link {
    pub(crate) fn new() -> Self {
        Self {
            owner: AtomicU32::new(NONE),
            next: AtomicU32::new(NONE),
            previous: AtomicU32::new(NONE),
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
}

/// All vCPUs of an engine, as far as queues go.
pub(crate) struct Queues<'a, R>(pub(crate) &'a [CachePadded<Vcpu<R>>]);

impl<R: lock_api::RawMutex> Queues<'_, R> {
    fn link(&self, index: u32) -> Option<&Link> {
        self.0.get(index as usize).map(|vcpu| &vcpu.link)
    }

    /// Puts `sleeper` on `owner`'s queue behind those of the same lock that have earlier tickets. The sleeper's thread calls
    /// it, with `lock` and `ticket` noted in its link. False, and nothing done, if a chain of queues leads back to the sleeper.
    pub(crate) fn enqueue(&self, sleeper: VcpuId, owner: VcpuId) -> bool {
        let (Some(vcpu), Some(target)) = (self.0.get(sleeper.index()), self.0.get(owner.index())) else { return false };
        if self.leads_to(owner, sleeper) {
            return false;
        }
        let mut list = target.queue.lock();
        let lock = vcpu.link.lock.load(Ordering::Relaxed);
        let ticket = vcpu.link.ticket.load(Ordering::Relaxed);
        // From the tail: a new waiter mostly has the latest ticket. Bounded by the queue's length.
        let mut before = list.tail;
        while let Some(link) = self.link(before) {
            let later = link.ticket.load(Ordering::Relaxed).wrapping_sub(ticket) as i32 > 0;
            if link.lock.load(Ordering::Relaxed) != lock || !later {
                break;
            }
            before = link.previous.load(Ordering::Relaxed);
        }
        self.insert_after(&mut list, before, sleeper.index() as u32);
        vcpu.link.owner.store(owner.index() as u32, Ordering::Relaxed);
        true
    }

    /// Takes a sleeper off the queue it is on, if any. Only its own thread, or a reset of it, calls this.
    pub(crate) fn dequeue(&self, sleeper: VcpuId) {
        let Some(vcpu) = self.0.get(sleeper.index()) else { return };
        // Repeats only if a hand-over moved the sleeper to another queue meanwhile, which is somebody's progress.
        while let Some(owner) = vcpu.link.owner() {
            let Some(target) = self.0.get(owner.index()) else { return };
            let mut list = target.queue.lock();
            if vcpu.link.owner() == Some(owner) {
                self.unlink(&mut list, sleeper.index() as u32);
            }
        }
    }

    /// Takes the first sleeper off `owner`'s queue.
    pub(crate) fn pop(&self, owner: VcpuId) -> Option<VcpuId> {
        let mut list = self.0.get(owner.index())?.queue.lock();
        let first = list.head;
        self.unlink(&mut list, first);
        VcpuId::new(first as usize).filter(|_| first != NONE)
    }

    /// Number of sleepers on `owner`'s queue.
    pub(crate) fn length(&self, owner: VcpuId) -> usize {
        self.0.get(owner.index()).map_or(0, |vcpu| vcpu.queue.lock().length as usize)
    }

    /// The lock that `to` waited for passes from `from` to `to`: the others that sleep on `from` for it now sleep on `to`.
    pub(crate) fn hand_over(&self, from: VcpuId, to: VcpuId) {
        let (Some(source), Some(target)) = (self.0.get(from.index()), self.0.get(to.index())) else { return };
        if from == to {
            return;
        }
        let lock = target.link.lock.load(Ordering::Relaxed);
        // Two queues are always locked in the order of their vCPUs.
        let (mut source, mut target) = if from < to {
            let source = source.queue.lock();
            (source, target.queue.lock())
        } else {
            let target = target.queue.lock();
            (source.queue.lock(), target)
        };
        let mut cursor = source.head;
        while let Some(link) = self.link(cursor) {
            let next = link.next.load(Ordering::Relaxed);
            if link.lock.load(Ordering::Relaxed) == lock && cursor != to.index() as u32 {
                self.unlink(&mut source, cursor);
                let tail = target.tail;
                self.insert_after(&mut target, tail, cursor);
                link.owner.store(to.index() as u32, Ordering::Relaxed);
            }
            cursor = next;
        }
    }

    /// Whether following queues from `from` arrives at `to`; walks at most as many links as there are vCPUs.
    fn leads_to(&self, from: VcpuId, to: VcpuId) -> bool {
        let mut at = Some(from);
        for _ in 0..=self.0.len() {
            match at {
                None => return false,
                Some(vcpu) if vcpu == to => return true,
                Some(vcpu) => at = self.link(vcpu.index() as u32).and_then(Link::owner),
            }
        }
        true
    }

    fn insert_after(&self, list: &mut List, before: u32, node: u32) {
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

    fn unlink(&self, list: &mut List, node: u32) {
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
        link.owner.store(NONE, Ordering::Relaxed);
        list.length -= 1;
    }
}
