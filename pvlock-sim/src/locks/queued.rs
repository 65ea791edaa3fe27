//! A queued lock with halting waiters and one attempt to steal: who comes tries once to take a free lock, then queues up; only
//! the head of the queue waits for the lock itself, everybody else for a word of its own.

use crate::platform::Sim;
use pvlock_guest::{Platform, Word};
use pvlock_host::protocol::{SlotIndex, VcpuId};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Cycles for which a waiter spins before it halts: 2^15 looks in the merged lock, an eighth of that once the predecessor does
/// not run; in between.
const SPIN: u64 = 1 << 16;

const FREE: u64 = 0;
const TAKEN: u64 = 1;
/// Taken, and the head of the queue has halted.
const TAKEN_HALTED: u64 = 2;

const WAITING: u64 = 0;
const HALTED: u64 = 1;
const HEAD: u64 = 2;

#[derive(Debug)]
struct Node {
    state: Word,
    vcpu: VcpuId,
}

/// The lock.
#[derive(Debug, Default)]
pub(crate) struct Queued {
    word: Word,
    /// A vCPU operates on it without letting time pass.
    queue: RefCell<VecDeque<Rc<Node>>>,
}

impl Queued {
    fn take(&self, from: u64) -> bool {
        // Acquire: pairs with the release in `unlock`.
        self.word.compare_exchange(from, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn lock(&self) {
        if self.take(FREE) {
            return;
        }
        let (Some(vcpu), Some(slot)) = (Sim::current(), SlotIndex::new(0)) else { return };
        let first = self.queue.borrow().is_empty();
        let node = Rc::new(Node { state: Word::new(if first { HEAD } else { WAITING }), vcpu });
        self.queue.borrow_mut().push_back(Rc::clone(&node));
        while node.state.load(Ordering::Acquire) != HEAD {
            let deadline = Sim::ticks() + SPIN;
            while node.state.load(Ordering::Acquire) != HEAD && Sim::ticks() < deadline {
                Sim::wait_while(&node.state, WAITING, deadline);
            }
            if node.state.compare_exchange(WAITING, HALTED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                Sim::halt(slot, true);
                let _ = node.state.compare_exchange(HALTED, WAITING, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        while !self.take(FREE) {
            let deadline = Sim::ticks() + SPIN;
            while self.word.load(Ordering::Relaxed) != FREE && Sim::ticks() < deadline {
                Sim::wait_while(&self.word, self.word.load(Ordering::Relaxed), deadline);
            }
            if self.word.compare_exchange(TAKEN, TAKEN_HALTED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                Sim::halt(slot, true);
            }
        }
        self.queue.borrow_mut().pop_front();
        let head = self.queue.borrow().front().cloned();
        if let Some(head) = head
            && head.state.swap(HEAD, Ordering::AcqRel) == HALTED
        {
            Sim::kick(head.vcpu);
        }
    }

    pub(crate) fn unlock(&self) {
        if self.word.swap(FREE, Ordering::Release) == TAKEN_HALTED {
            let head = self.queue.borrow().front().map(|head| head.vcpu);
            if let Some(vcpu) = head {
                Sim::kick(vcpu);
            }
        }
    }
}
