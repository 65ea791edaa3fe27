//! Byte offsets of every word, for a side that sees the region as bytes.

/// Byte offsets of the header's words, within the region.
pub mod header {
    /// [`Header::magic`](crate::Header::magic).
    pub const MAGIC: usize = 0;
    /// [`Header::version`](crate::Header::version).
    pub const VERSION: usize = 8;
    /// [`Header::stride`](crate::Header::stride).
    pub const STRIDE: usize = 16;
    /// [`Header::features`](crate::Header::features).
    pub const FEATURES: usize = 24;
    /// [`Header::accepted`](crate::Header::accepted).
    pub const ACCEPTED: usize = 32;
    /// [`Header::flags`](crate::Header::flags).
    pub const FLAGS: usize = 40;
    /// [`Header::spin_budget`](crate::Header::spin_budget).
    pub const SPIN_BUDGET: usize = 48;
    /// [`Header::tick_hz`](crate::Header::tick_hz).
    pub const TICK_HZ: usize = 56;
}

/// Byte offsets of a record's words within the record.
pub mod record {
    use crate::{SlotIndex, WAIT_SLOTS};

    /// [`Record::slots`](crate::Record::slots).
    pub const SLOTS: usize = 0;
    /// [`Record::kick_word`](crate::Record::kick_word).
    pub const KICK_WORD: usize = 16 * WAIT_SLOTS;
    /// [`Record::online`](crate::Record::online).
    pub const ONLINE: usize = KICK_WORD + 8;
    /// First byte after the guest's half.
    pub const GUEST_END: usize = 128;
    /// [`Record::run_state`](crate::Record::run_state).
    pub const RUN_STATE: usize = GUEST_END;
    /// [`Record::spin_budget`](crate::Record::spin_budget).
    pub const SPIN_BUDGET: usize = GUEST_END + 8;
    /// [`Record::kicks`](crate::Record::kicks).
    pub const KICKS: usize = GUEST_END + 16;
    /// [`Record::parks`](crate::Record::parks).
    pub const PARKS: usize = GUEST_END + 24;
    /// [`Record::parked_ns`](crate::Record::parked_ns).
    pub const PARKED_NS: usize = GUEST_END + 32;
    /// First byte after the host's half.
    pub const HOST_END: usize = 256;

    /// Offset of the id of a wait slot.
    pub const fn slot_id(slot: SlotIndex) -> usize {
        SLOTS + 16 * slot.index()
    }

    /// Offset of the word of a wait slot.
    pub const fn slot_word(slot: SlotIndex) -> usize {
        SLOTS + 16 * slot.index() + 8
    }
}
