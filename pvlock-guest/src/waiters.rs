//! Who has which ticket: the table in which a new owner finds its successor, and a waiter its predecessor, in O(1).
//!
//! A table of one cache line per vCPU, shared by all locks of the guest. A waiter enters itself under (lock, ticket) before
//! it publishes that it halts, and takes itself out when it is served. **A waiter that finds no room does not halt** before
//! it is next in line: so what is not in the table needs no kick, and the lookup is exact, not a hint. With as many lines of
//! eight entries as vCPUs, and at most four waits a vCPU, a line overflows only if hashing is unlucky.
//!
//! Only the waiter that filled an entry empties it.

use crate::mutation::{Mutation, active};
use crate::sync::{AtomicU64, Ordering, array, const_unless_loom};
use pvlock_protocol::{LockId, VcpuId};

/// Entries in a line of 64 bytes. Loom's two or three waiters need no more than two, and each atomic costs it time.
const ENTRIES: usize = if cfg!(all(pvlock_loom, not(pvlock_shuttle))) { 2 } else { 8 };

/// One line of the table.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Bucket {
    entries: [AtomicU64; ENTRIES],
}

impl Bucket {
    const_unless_loom! {
        pub(crate) const fn new() -> Self {
            Self { entries: array!(AtomicU64::new(0)) }
        }
    }
}

/// Bits 0–31: ticket, 32–45: vCPU + 1 (so that no entry is 0), 46–63: part of the lock's hash.
fn entry(lock: LockId, ticket: u32, vcpu: VcpuId) -> u64 {
    u64::from(ticket) | VcpuId::encode(Some(vcpu)) << 32 | hash(lock) >> 46 << 46
}

fn hash(lock: LockId) -> u64 {
    // Fibonacci hashing: 2^64 / golden ratio. Lock ids are addresses, equal in their low bits.
    lock.get().wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn bucket(table: &[Bucket], lock: LockId, ticket: u32) -> Option<&Bucket> {
    // Successive tickets of a lock fall on successive lines.
    let index = ((hash(lock) >> 32) as u32).wrapping_add(ticket) as usize;
    table.get(index.checked_rem(table.len())?)
}

/// Enters a waiter; `None` if its line is full. The result is the place to [`leave`].
pub(crate) fn enter(table: &'static [Bucket], lock: LockId, ticket: u32, vcpu: VcpuId) -> Option<&'static AtomicU64> {
    if active(Mutation::TableFull) {
        return None;
    }
    let entry = entry(lock, ticket, vcpu);
    // Relaxed: the entry becomes visible with the read-modify-write on the lock's word that follows before a halt.
    bucket(table, lock, ticket)?
        .entries
        .iter()
        .find(|place| place.compare_exchange(0, entry, Ordering::Relaxed, Ordering::Relaxed).is_ok())
}

/// Takes a waiter out again.
pub(crate) fn leave(place: &AtomicU64) {
    place.store(0, Ordering::Relaxed);
}

/// The vCPUs that may wait for `lock` with `ticket`; almost always one or none. Locks whose hashes share 18 bits look alike,
/// so the caller checks the vCPU's record.
pub(crate) fn find(table: &[Bucket], lock: LockId, ticket: u32) -> impl Iterator<Item = VcpuId> {
    let vcpu_mask = ((1 << VcpuId::BITS) - 1) << 32;
    bucket(table, lock, ticket).into_iter().flat_map(|bucket| &bucket.entries).filter_map(move |place| {
        // Relaxed: see `enter`; the caller has acquired the lock's word since.
        let found = place.load(Ordering::Relaxed);
        let vcpu = VcpuId::decode(found >> 32)?;
        (found & !vcpu_mask == entry(lock, ticket, vcpu) & !vcpu_mask).then_some(vcpu)
    })
}

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn table(n: usize) -> &'static [Bucket] {
        (0..n).map(|_| Bucket::new()).collect::<Vec<_>>().leak()
    }

    proptest! {
        #[test]
        fn who_got_in_is_found_and_who_left_is_not(lock in 1u64.., first: u32, n in 1usize..20) {
            let lock = LockId::new(lock).unwrap();
            let table = table(n);
            let tickets: Vec<u32> = (0..n as u32).map(|i| first.wrapping_add(i)).collect();
            let places: Vec<_> = tickets.iter().enumerate()
                .map(|(vcpu, &ticket)| enter(table, lock, ticket, VcpuId::new(vcpu).unwrap()).unwrap())
                .collect();
            for (vcpu, &ticket) in tickets.iter().enumerate() {
                prop_assert_eq!(find(table, lock, ticket).collect::<Vec<_>>(), [VcpuId::new(vcpu).unwrap()]);
            }
            places.into_iter().for_each(leave);
            for &ticket in &tickets {
                prop_assert_eq!(find(table, lock, ticket).count(), 0);
            }
        }
    }

    #[test]
    fn a_full_line_refuses_and_loses_nobody() {
        let table = table(1);
        let lock = LockId::new(8).unwrap();
        for vcpu in 0..ENTRIES {
            assert!(enter(table, lock, vcpu as u32, VcpuId::new(vcpu).unwrap()).is_some());
        }
        assert!(enter(table, lock, 99, VcpuId::new(99).unwrap()).is_none());
        for vcpu in 0..ENTRIES {
            assert_eq!(find(table, lock, vcpu as u32).count(), 1);
        }
    }

    #[test]
    fn no_table_no_entry() {
        assert!(enter(&[], LockId::new(8).unwrap(), 0, VcpuId::new(0).unwrap()).is_none());
        assert_eq!(find(&[], LockId::new(8).unwrap(), 0).count(), 0);
    }
}
