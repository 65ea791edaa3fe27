//! A wait slot: one vCPU's publication that it waits for one lock.
//!
//! Two 64-bit words. The writer clears the id, stores the word, stores the id; a reader takes id, word, id and accepts
//! only if both ids agree:
//!
//! ```text
//! writer (one vCPU)                         reader (any vCPU, or the host)
//!   id   := 0          Relaxed                a := id     Acquire  (A)
//!   word := new        Release  (W)           w := word   Acquire  (B)
//!   id   := lock       Release  (I)           b := id     Relaxed
//!                                             accept if a == b != 0
//! ```
//!
//! * (A) reads (I): the word is at least as new as that publication.
//! * (B) reads a newer (W): the `id := 0` before it happens before the last load, which then reads 0 or something newer,
//!   and the pair is refused unless the same lock was published again, which is harmless. With a Relaxed store (W) the last
//!   load could still return the old id and pair it with the new word.

use crate::const_unless_loom;
use crate::mutation::{Mutation, active, weakened};
use crate::sync::{AtomicU64, Ordering};
use crate::{LockId, VcpuId};

/// What a waiter is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitState {
    /// Spinning: it sees the release by itself if its vCPU runs.
    Spinning,
    /// Halting or halted: it needs a kick.
    Halting,
}

/// A publication, as one consistent copy. Everything in it is a hint to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The lock that is waited for.
    pub lock: LockId,
    /// The waiter's ticket; tickets wrap.
    pub ticket: u32,
    /// Spinning or halting.
    pub state: WaitState,
    /// The vCPU with the ticket before, as far as the waiter knows.
    pub predecessor: Option<VcpuId>,
    /// The vCPU that holds the lock, as far as the waiter knows. Stale by nature once the waiter has halted.
    pub holder: Option<VcpuId>,
}

const PREDECESSOR_SHIFT: u32 = 32;
const HOLDER_SHIFT: u32 = PREDECESSOR_SHIFT + VcpuId::BITS;
const HALTING_BIT: u32 = HOLDER_SHIFT + VcpuId::BITS;

impl Wait {
    /// The second word of the slot:
    ///
    /// | bits | field |
    /// |---|---|
    /// | 0–31 | ticket |
    /// | 32–45 | predecessor + 1, 0 for none |
    /// | 46–59 | holder + 1, 0 for none |
    /// | 60 | 1: halting, 0: spinning |
    /// | 61–63 | reserved, zero |
    #[inline]
    pub const fn word(&self) -> u64 {
        self.ticket as u64
            | VcpuId::encode(self.predecessor) << PREDECESSOR_SHIFT
            | VcpuId::encode(self.holder) << HOLDER_SHIFT
            | (matches!(self.state, WaitState::Halting) as u64) << HALTING_BIT
    }

    /// The publication made of these two words; `None` for an empty slot (id 0).
    #[inline]
    pub const fn from_words(id: u64, word: u64) -> Option<Self> {
        let Some(lock) = LockId::new(id) else { return None };
        Some(Self {
            lock,
            ticket: word as u32,
            state: if word >> HALTING_BIT & 1 == 1 { WaitState::Halting } else { WaitState::Spinning },
            predecessor: VcpuId::decode(word >> PREDECESSOR_SHIFT),
            holder: VcpuId::decode(word >> HOLDER_SHIFT),
        })
    }

    /// Reads a slot through `id` and `word`, which load the two words with Acquire. The word is loaded once; the second
    /// load of the id is only compared. `None` if the slot is empty or is being rewritten.
    #[inline]
    pub fn snapshot(id: impl Fn() -> u64, word: impl FnOnce() -> u64) -> Option<Self> {
        let first = id();
        if first == 0 {
            return None;
        }
        let word = word();
        if id() != first {
            return None;
        }
        Self::from_words(first, word)
    }
}

/// The two words of a slot in the record of the vCPU that waits. Writer: that vCPU, at the slot's nesting level.
#[derive(Debug)]
#[repr(C)]
pub struct WaitSlot {
    /// [`LockId`], or 0 for an empty slot.
    pub id: AtomicU64,
    /// See [`Wait::word`].
    pub word: AtomicU64,
}

impl WaitSlot {
    const_unless_loom! {
        /// An empty slot.
        #[allow(clippy::new_without_default, reason = "a slot lives in a record")]
        pub const fn new() -> Self {
            Self { id: AtomicU64::new(0), word: AtomicU64::new(0) }
        }
    }

    /// Publishes a new wait in place of whatever stood here.
    #[inline]
    pub fn publish(&self, wait: &Wait) {
        if !active(Mutation::SlotNotEmptiedFirst) {
            self.id.store(0, Ordering::Relaxed);
        }
        self.update(wait);
        // Pairs with the first load of the id in `read`: who sees the id sees the word.
        self.id.store(wait.lock.get(), weakened(Mutation::SlotIdRelaxed, Ordering::Release, Ordering::Relaxed));
    }

    /// Changes state and hints of the wait that is already published here (same lock, same ticket).
    #[inline]
    pub fn update(&self, wait: &Wait) {
        // Pairs with the Acquire load of the word in `read`: who sees this word does not see an older id afterwards.
        self.word.store(wait.word(), weakened(Mutation::SlotWordRelaxed, Ordering::Release, Ordering::Relaxed));
    }

    /// Empties the slot. A waiter does so before it releases the lock it waited for.
    #[inline]
    pub fn clear(&self) {
        self.id.store(0, Ordering::Relaxed);
    }

    /// One consistent copy of the slot; `None` if it is empty or is being rewritten.
    #[inline]
    pub fn read(&self) -> Option<Wait> {
        // Acquire: pairs with the Release stores in `publish` and `update`.
        let id = weakened(Mutation::SlotIdReadRelaxed, Ordering::Acquire, Ordering::Relaxed);
        let word = weakened(Mutation::SlotWordReadRelaxed, Ordering::Acquire, Ordering::Relaxed);
        Wait::snapshot(|| self.id.load(id), || self.word.load(word))
    }
}

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wait() -> impl Strategy<Value = Wait> {
        let vcpu = || proptest::option::of((0..crate::MAX_VCPUS).prop_map(|id| VcpuId::new(id).unwrap()));
        (1..=u64::MAX, any::<u32>(), any::<bool>(), vcpu(), vcpu()).prop_map(|(lock, ticket, halting, predecessor, holder)| Wait {
            lock: LockId::new(lock).unwrap(),
            ticket,
            state: if halting { WaitState::Halting } else { WaitState::Spinning },
            predecessor,
            holder,
        })
    }

    proptest! {
        #[test]
        fn what_is_published_is_read(wait in wait(), other in wait()) {
            let slot = WaitSlot::new();
            prop_assert_eq!(slot.read(), None);
            slot.publish(&other);
            slot.publish(&wait);
            prop_assert_eq!(slot.read(), Some(wait));
            slot.clear();
            prop_assert_eq!(slot.read(), None);
        }

        #[test]
        fn any_two_words_decode_to_something_in_range(id: u64, word: u64) {
            if let Some(wait) = Wait::from_words(id, word) {
                for vcpu in [wait.predecessor, wait.holder].into_iter().flatten() {
                    prop_assert!(vcpu.index() < crate::MAX_VCPUS);
                }
                // Reserved bits are dropped, everything else survives.
                prop_assert_eq!(wait.word(), word & ((1 << 61) - 1));
            }
        }
    }

    #[test]
    fn row_17_a_slot_has_no_padding() {
        assert_no_padding!(WaitSlot::new() => WaitSlot, WaitSlot { id, word });
    }

    #[test]
    fn a_slot_that_changes_between_the_reads_is_refused() {
        let ids = core::cell::Cell::new(0);
        let id = || {
            ids.set(ids.get() + 1);
            ids.get()
        };
        assert_eq!(Wait::snapshot(id, || 0), None);
    }
}
