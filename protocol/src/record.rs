//! One vCPU's record.

use crate::offset::record;
use crate::sync::{AtomicU64, Ordering};
use crate::{SlotIndex, WAIT_SLOTS, WaitSlot};
use crate::{array, const_unless_loom};

/// The record of one vCPU: a line of wait slots and a control line that the guest writes, two lines that the host writes.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Record {
    /// Guest (the record's vCPU): what it waits for, one slot per nesting level.
    pub slots: [WaitSlot; WAIT_SLOTS],
    /// Guest (any vCPU, by atomic addition): counts kicks of this vCPU whose doorbell was skipped because the host said
    /// that a poller is awake. The host only reads it.
    pub kick_word: AtomicU64,
    /// Guest (the record's vCPU, or who unplugs it): 1 while the vCPU is online, 0 otherwise.
    pub online: AtomicU64,
    guest_reserved: [u64; 6],
    /// Host: run state, see [`RunState`].
    pub run_state: AtomicU64,
    /// Host: spin budget of this vCPU in ticks; 0: use the header's.
    pub spin_budget: AtomicU64,
    /// Host: kicks delivered to this vCPU.
    pub kicks: AtomicU64,
    /// Host: times this vCPU was put to sleep.
    pub parks: AtomicU64,
    /// Host: time this vCPU slept, in ns.
    pub parked_ns: AtomicU64,
    host_reserved: [u64; 11],
}

/// Whether a vCPU is on a CPU, as its host publishes it in [`Record::run_state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// The host cannot tell (or there is none): word 0.
    Unknown,
    /// On a CPU: even and not 0.
    Running,
    /// Off-CPU, preempted or asleep: odd.
    NotRunning,
}

impl RunState {
    /// The state that `word` says.
    #[inline]
    pub const fn from_word(word: u64) -> Self {
        match word {
            0 => Self::Unknown,
            word if word & 1 == 1 => Self::NotRunning,
            _ => Self::Running,
        }
    }

    /// The counter that follows `word` when the vCPU enters this state: it moves at each change and never returns to 0.
    /// [`RunState::Unknown`] is 0 itself.
    #[inline]
    pub const fn next_word(self, word: u64) -> u64 {
        let odd = match self {
            Self::Unknown => return 0,
            Self::Running => 0,
            Self::NotRunning => 1,
        };
        let next = if word & 1 == odd && word != 0 { word } else { word.wrapping_add(1) };
        match next {
            // From Unknown to Running, or wrapped around.
            0 => 2,
            next if next & 1 == odd => next,
            next => next + 1,
        }
    }
}

impl Record {
    const_unless_loom! {
        /// A record as a guest writes it before it registers.
        pub const fn new() -> Self {
            Self {
                slots: array!(WaitSlot::new()),
                kick_word: AtomicU64::new(0),
                online: AtomicU64::new(0),
                guest_reserved: [0; 6],
                run_state: AtomicU64::new(0),
                spin_budget: AtomicU64::new(0),
                kicks: AtomicU64::new(0),
                parks: AtomicU64::new(0),
                parked_ns: AtomicU64::new(0),
                host_reserved: [0; 11],
            }
        }
    }

    /// The wait slot of one nesting level.
    #[inline]
    pub fn slot(&self, slot: SlotIndex) -> &WaitSlot {
        // A `SlotIndex` is below `WAIT_SLOTS`: no check is left after optimisation.
        &self.slots[slot.index()]
    }

    /// What the host says of this vCPU.
    #[inline]
    pub fn run_state(&self) -> RunState {
        // Relaxed: a hint, nothing is published with it.
        RunState::from_word(self.run_state.load(Ordering::Relaxed))
    }

    /// The word at a byte offset within the record; `None` for reserved words and beyond.
    pub fn word(&self, offset: usize) -> Option<&AtomicU64> {
        Some(match offset {
            record::KICK_WORD => &self.kick_word,
            record::ONLINE => &self.online,
            record::RUN_STATE => &self.run_state,
            record::SPIN_BUDGET => &self.spin_budget,
            record::KICKS => &self.kicks,
            record::PARKS => &self.parks,
            record::PARKED_NS => &self.parked_ns,
            _ => {
                let slot = self.slots.get(offset / 16)?;
                match offset % 16 {
                    0 => &slot.id,
                    8 => &slot.word,
                    _ => return None,
                }
            }
        })
    }
}

impl Default for Record {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn run_state_words_say_what_was_put_in(word: u64) {
            for state in [RunState::Unknown, RunState::Running, RunState::NotRunning] {
                prop_assert_eq!(RunState::from_word(state.next_word(word)), state);
            }
        }

        #[test]
        fn the_run_state_counter_moves_exactly_when_the_state_changes(word in 1u64..) {
            let same = RunState::from_word(word);
            let other = if same == RunState::Running { RunState::NotRunning } else { RunState::Running };
            prop_assert_eq!(same.next_word(word), word);
            prop_assert_ne!(other.next_word(word), word);
        }
    }

    #[test]
    fn row_17_a_record_has_no_padding() {
        assert_no_padding!(Record::new() => Record, Record {
            slots, kick_word, online, guest_reserved, run_state, spin_budget, kicks, parks, parked_ns, host_reserved,
        });
    }

    #[test]
    fn every_named_offset_leads_to_its_own_word() {
        let record = Record::new();
        let slots = SlotIndex::all().flat_map(|slot| [record::slot_id(slot), record::slot_word(slot)]);
        let offsets: std::vec::Vec<_> = slots
            .chain([record::KICK_WORD, record::ONLINE, record::RUN_STATE, record::SPIN_BUDGET])
            .chain([record::KICKS, record::PARKS, record::PARKED_NS])
            .collect();
        for &offset in &offsets {
            let word = record.word(offset).unwrap();
            assert_eq!(core::ptr::from_ref(word) as usize - core::ptr::from_ref(&record) as usize, offset);
        }
        for offset in (0..512).filter(|offset| !offsets.contains(offset)) {
            assert!(record.word(offset).is_none(), "{offset}");
        }
    }
}
