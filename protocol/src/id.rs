//! Small identifiers: vCPU, lock, wait slot.

use core::num::NonZeroU64;

/// Most vCPUs a guest of this ABI can have: identifiers travel as `id + 1` in 14 bits, 0 meaning "none".
pub const MAX_VCPUS: usize = (1 << VcpuId::BITS) - 1;

/// Wait slots in a record, one per nesting level of waits on one vCPU: task, soft interrupt, interrupt, NMI. Four is what
/// Linux's queued lock provides for the same contexts. Deeper waits spin without publishing.
pub const WAIT_SLOTS: usize = 4;

/// Number of a vCPU within its VM, below [`MAX_VCPUS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VcpuId(u16);

impl VcpuId {
    /// Width of an encoded optional identifier.
    pub const BITS: u32 = 14;

    /// The identifier, or `None` when `id` is not below [`MAX_VCPUS`].
    #[inline]
    pub const fn new(id: usize) -> Option<Self> {
        if id < MAX_VCPUS { Some(Self(id as u16)) } else { None }
    }

    /// The identifier as an index into per-vCPU tables.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// `id + 1`, or 0 for none; fits [`VcpuId::BITS`] bits.
    #[inline]
    pub const fn encode(id: Option<Self>) -> u64 {
        match id {
            Some(id) => id.0 as u64 + 1,
            None => 0,
        }
    }

    /// Inverse of [`VcpuId::encode`]; higher bits of `code` are ignored.
    #[inline]
    pub const fn decode(code: u64) -> Option<Self> {
        match code & ((1 << Self::BITS) - 1) {
            0 => None,
            code => Some(Self((code - 1) as u16)),
        }
    }
}

/// Identity of a lock within its guest; opaque to the host, which only compares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockId(NonZeroU64);

impl LockId {
    /// The identity `id`, or `None` for 0, which marks an empty slot.
    #[inline]
    pub const fn new(id: u64) -> Option<Self> {
        match NonZeroU64::new(id) {
            Some(id) => Some(Self(id)),
            None => None,
        }
    }

    /// The usual identity: the lock's address.
    pub fn of<T>(lock: &T) -> Self {
        // References are never null; the fallback is unreachable.
        Self(NonZeroU64::new(core::ptr::from_ref(lock).addr() as u64).unwrap_or(NonZeroU64::MIN))
    }

    /// The identity as it stands in a slot.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

/// Index of a wait slot, below [`WAIT_SLOTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotIndex(u8);

impl SlotIndex {
    /// The index, or `None` when it is not below [`WAIT_SLOTS`].
    #[inline]
    pub const fn new(index: usize) -> Option<Self> {
        if index < WAIT_SLOTS { Some(Self(index as u8)) } else { None }
    }

    /// The index as an array index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// All slots, outermost first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..WAIT_SLOTS as u8).map(Self)
    }
}
