//! How the engine reaches guest memory: one aligned 64-bit word at a time.

#[cfg(not(pvlock_loom))]
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering;
use pvlock_protocol::RegionRef;

/// Guest RAM, as far as the engine needs it. Addresses are guest-physical; the engine asks only for 8-byte aligned words in
/// ranges for which `contains` was true when the region was registered.
pub trait GuestMemory: Send + Sync {
    /// Whether `length` bytes from `address` on are RAM of this guest.
    fn contains(&self, address: u64, length: u64) -> bool;

    /// Loads a word with Acquire; 0 where there is none.
    fn load(&self, address: u64) -> u64;

    /// Stores a word with Release, and marks its page dirty where that is tracked; does nothing where there is none.
    fn store(&self, address: u64, value: u64);
}

/// One contiguous mapping of guest RAM.
#[cfg(not(pvlock_loom))]
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    /// Guest-physical address of the first byte.
    start: u64,
    memory: core::ptr::NonNull<u8>,
    length: usize,
}

// SAFETY: all accesses are atomic; the mapping is valid from any thread by `new`'s contract.
#[cfg(not(pvlock_loom))]
unsafe impl Send for Mapped {}
// SAFETY: as above.
#[cfg(not(pvlock_loom))]
unsafe impl Sync for Mapped {}

#[cfg(not(pvlock_loom))]
impl Mapped {
    /// Guest RAM of `length` bytes at guest-physical `start`, mapped at `memory`.
    ///
    /// # Safety
    ///
    /// `memory` is 8-byte aligned, and `length` bytes from it stay mapped readable and writable for as long as the result or
    /// an engine made of it lives. This process accesses them only through atomics, raw pointers and other guests' eyes:
    /// no Rust reference to non-atomic data lies in them.
    pub const unsafe fn new(start: u64, memory: core::ptr::NonNull<u8>, length: usize) -> Self {
        Self { start, memory, length }
    }

    fn word(&self, address: u64) -> Option<&AtomicU64> {
        let offset = usize::try_from(address.checked_sub(self.start)?).ok()?;
        if offset.checked_add(8)? > self.length || !offset.is_multiple_of(8) {
            return None;
        }
        // SAFETY: the eight bytes lie in the mapping (checked above), are aligned (the mapping is, and `offset` is a
        // multiple of 8), and live and are shared as atomics by `new`'s contract.
        Some(unsafe { AtomicU64::from_ptr(self.memory.as_ptr().add(offset).cast()) })
    }
}

#[cfg(not(pvlock_loom))]
impl GuestMemory for Mapped {
    fn contains(&self, address: u64, length: u64) -> bool {
        let end = address.checked_add(length);
        address >= self.start && end.is_some_and(|end| end - self.start <= self.length as u64)
    }

    fn load(&self, address: u64) -> u64 {
        // Acquire: pairs with the guest's Release stores, see `pvlock_protocol`'s slot.
        self.word(address).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, address: u64, value: u64) {
        if let Some(word) = self.word(address) {
            // Release: what the host did before is visible to a guest that acts on the word.
            word.store(value, Ordering::Release);
        }
    }
}

/// A guest in the same process, whose "RAM" is its region, at address 0: threads as vCPUs, models, simulators.
#[derive(Clone, Copy, Debug)]
pub struct Nested(pub RegionRef<'static>);

impl GuestMemory for Nested {
    fn contains(&self, address: u64, length: u64) -> bool {
        let size = pvlock_protocol::region_size(self.0.records.len(), pvlock_protocol::RECORD_STRIDE) as u64;
        address.checked_add(length).is_some_and(|end| end <= size)
    }

    fn load(&self, address: u64) -> u64 {
        // Acquire: as above.
        self.0.word(address as usize).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, address: u64, value: u64) {
        if let Some(word) = self.0.word(address as usize) {
            // Release: as above.
            word.store(value, Ordering::Release);
        }
    }
}

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;
    use core::ptr::NonNull;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_mapping_serves_exactly_its_aligned_words(start in 0u64..1 << 40, address: u64, near in -16i64..160, length: u64) {
            let mut words = [0u64; 16];
            // SAFETY: the array outlives the mapping and is touched by nothing else.
            let memory = unsafe { Mapped::new(start, NonNull::from(&mut words).cast(), 128) };
            for address in [address, start.wrapping_add_signed(near)] {
                let offset = address.wrapping_sub(start);
                let inside = offset <= 120 && offset % 8 == 0;
                memory.store(address, 7);
                prop_assert_eq!(memory.load(address), if inside { 7 } else { 0 });
                let fits = offset <= 128 && length <= 128 - offset;
                prop_assert_eq!(memory.contains(address, length), fits);
            }
        }
    }
}
