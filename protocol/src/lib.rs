//! Layout of the memory that a paravirtualised guest shares with its host about spinlock waiters: ABI version 1.
//!
//! The guest allocates the [`Region`] in its own RAM and registers it with the host. Each vCPU has one [`Record`]; in it
//! the guest publishes which lock the vCPU waits for, with which ticket, behind whom; the host answers with run states,
//! budgets and counters. Guest and host meet only here and in `pvlock-hypercalls`.
//!
//! # What the ABI assumes, and what goes wrong otherwise
//!
//! * Both sides are little-endian and have 64-bit atomic loads and stores. Every field is one naturally aligned 64-bit
//!   word, so no read can tear.
//! * Each word has **one writer** (guest or host), named in its documentation. [`Record::kick_word`] is the exception: any
//!   vCPU of the guest adds to it, always by an atomic addition.
//! * Guest-written and host-written words never share a cache line, nor a 128-byte pair of lines (x86's adjacent-line
//!   prefetch fetches those together); otherwise a waiter's publications would evict the host's run states. The one
//!   exception is the [`Header`]: its guest half is constant once registered.
//! * Everything the guest writes is a *hint* to the host, and may be stale or hostile. Read each word once, through
//!   [`Wait::snapshot`] or [`Geometry::read`], then check.
//! * Reserved words are zero when written by version 1 and ignored when read; unknown feature bits survive a copy.
//!
//! This crate has no `unsafe` code and nothing at run time besides `core`.

#![no_std]
#![forbid(unsafe_code)]

#[cfg(any(test, pvlock_loom))]
extern crate std;

/// Row 17: whether the fields of a value, all of them, are as many bytes as its type, so that none is padding. Decided when
/// this is compiled; a field that is not named does not compile.
#[cfg(all(test, not(pvlock_loom)))]
macro_rules! assert_no_padding {
    ($value:expr => $type:ty, $name:ident { $($field:ident),* $(,)? }) => {
        const {
            #[allow(clippy::declare_interior_mutable_const, reason = "only measured")]
            const VALUE: $type = $value;
            #[allow(clippy::borrow_interior_mutable_const, reason = "only measured")]
            let $name { $($field),* } = &VALUE;
            assert!(size_of::<$type>() == 0 $(+ size_of_val($field))*, "there is padding");
        }
    };
}

mod header;
mod id;
#[cfg(pvlock_loom)]
pub mod mutation;
#[cfg(not(pvlock_loom))]
mod mutation;
pub mod offset;
mod record;
mod region;
mod slot;
pub mod sync;

pub use header::{Features, Geometry, Header, HeaderError, HostFlags};
pub use id::{LockId, MAX_VCPUS, SlotIndex, VcpuId, WAIT_SLOTS};
pub use record::{Record, RunState};
pub use region::{PAGE_SIZE, Region, RegionRef, record_offset, region_size};
pub use slot::{Wait, WaitSlot, WaitState};

/// First word of a region: the bytes `pvlock\0\x01` read as a little-endian integer.
pub const MAGIC: u64 = u64::from_le_bytes(*b"pvlock\0\x01");

/// The version of the layout that this crate describes.
pub const ABI_VERSION: u32 = 1;

/// Bytes in a cache line of every x86-64 processor, and the granularity of the layout.
pub const CACHE_LINE: usize = 64;

/// Bytes that x86's spatial prefetcher treats as one: a 128-byte aligned pair of lines (Intel 64 and IA-32 Architectures
/// Optimization Reference Manual, "Data Prefetching"; the same number `crossbeam_utils::CachePadded` uses).
pub const PREFETCH_PAIR: usize = 128;

/// Bytes from one record to the next in a region of this version.
pub const RECORD_STRIDE: usize = 256;

/// Compile-time proof that the structures are what the ABI says. Loom's atomics have another size; the layout is not
/// theirs to prove.
#[cfg(not(pvlock_loom))]
mod proof {
    use super::*;
    use crate::offset::{header, record};
    use core::mem::{align_of, offset_of, size_of};
    use static_assertions::{assert_impl_all, const_assert, const_assert_eq};

    // No padding: each size is the sum of the fields, which are all 64-bit words.
    const_assert_eq!(size_of::<WaitSlot>(), 2 * 8);
    const_assert_eq!(size_of::<Header>(), 8 * 8);
    const_assert_eq!(size_of::<Record>(), WAIT_SLOTS * size_of::<WaitSlot>() + 8 * 8 + 8 * 8 + 8 * 8);

    // Size and alignment.
    const_assert_eq!(size_of::<Header>(), CACHE_LINE);
    const_assert_eq!(align_of::<Header>(), CACHE_LINE);
    const_assert_eq!(size_of::<Record>(), RECORD_STRIDE);
    const_assert_eq!(align_of::<Record>(), PREFETCH_PAIR);
    const_assert_eq!(align_of::<Region<1>>(), PAGE_SIZE);
    const_assert_eq!(RECORD_STRIDE % PREFETCH_PAIR, 0);
    const_assert_eq!(offset_of!(Region<2>, header), 0);
    const_assert_eq!(offset_of!(Region<2>, records), RECORD_STRIDE);
    const_assert!(size_of::<Region<15>>() >= region_size(15, RECORD_STRIDE));

    // The offsets that the host uses are those of the fields that the guest uses.
    const_assert_eq!(offset_of!(Header, magic), header::MAGIC);
    const_assert_eq!(offset_of!(Header, version), header::VERSION);
    const_assert_eq!(offset_of!(Header, stride), header::STRIDE);
    const_assert_eq!(offset_of!(Header, features), header::FEATURES);
    const_assert_eq!(offset_of!(Header, accepted), header::ACCEPTED);
    const_assert_eq!(offset_of!(Header, flags), header::FLAGS);
    const_assert_eq!(offset_of!(Header, spin_budget), header::SPIN_BUDGET);
    const_assert_eq!(offset_of!(Header, tick_hz), header::TICK_HZ);
    const_assert_eq!(offset_of!(Record, slots), record::SLOTS);
    const_assert_eq!(offset_of!(Record, kick_word), record::KICK_WORD);
    const_assert_eq!(offset_of!(Record, online), record::ONLINE);
    const_assert_eq!(offset_of!(Record, run_state), record::RUN_STATE);
    const_assert_eq!(offset_of!(Record, spin_budget), record::SPIN_BUDGET);
    const_assert_eq!(offset_of!(Record, kicks), record::KICKS);
    const_assert_eq!(offset_of!(Record, parks), record::PARKS);
    const_assert_eq!(offset_of!(Record, parked_ns), record::PARKED_NS);

    // The last guest-written word and the first host-written word lie in different prefetch pairs.
    const_assert!((record::GUEST_END - 8) / PREFETCH_PAIR < record::RUN_STATE / PREFETCH_PAIR);
    // A record's host half and the next record's guest half do as well, at every stride the host accepts.
    const_assert!((record::HOST_END - 8) / PREFETCH_PAIR < RECORD_STRIDE / PREFETCH_PAIR);
    const_assert_eq!(record::HOST_END, RECORD_STRIDE);

    // Both sides share these between CPUs.
    assert_impl_all!(Header: Send, Sync);
    assert_impl_all!(Record: Send, Sync);
}
