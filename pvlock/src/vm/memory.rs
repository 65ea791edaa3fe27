//! Guest RAM: one anonymous mapping, huge pages where the host has them.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::layout::LARGE_PAGE;

/// Guest RAM. Guest-physical address 0 is its first byte.
///
/// The guest may write any of it at any time, so all access goes through atomics or raw
/// pointers; there are no references to plain data inside.
#[derive(Debug)]
pub struct GuestMemory {
    base: NonNull<u8>,
    len: usize,
    huge: bool,
}

// SAFETY: the mapping is owned by this value, stays where it is until drop, and is only reached
// through atomics or through raw pointers whose users take on the duty to avoid data races.
unsafe impl Send for GuestMemory {}
// SAFETY: as above; `&GuestMemory` gives no non-atomic access of its own.
unsafe impl Sync for GuestMemory {}

/// An access touched memory that the guest does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("guest-physical range {address:#x}+{len:#x} is outside guest RAM or misaligned")]
pub struct OutOfRange {
    /// First address of the access.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
}

impl GuestMemory {
    /// Maps `bytes` of zeroed RAM, rounded up to 2 MiB, and touches every page of it, so that
    /// the guest never waits for the host to find memory.
    ///
    /// # Errors
    /// What the kernel says; running out of memory is [`io::ErrorKind::OutOfMemory`].
    pub fn new(bytes: u64) -> io::Result<Self> {
        let large = LARGE_PAGE as usize;
        let too_big = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| bytes.checked_next_multiple_of(large))
            .filter(|&len| len > 0)
            .ok_or_else(too_big)?;
        let mapped = len.checked_add(large).ok_or_else(too_big)?;

        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no other object.
        let raw = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let raw: *mut u8 = raw.cast();

        // Cut the mapping to an aligned piece.
        let head = raw.align_offset(large);
        let tail = large - head;
        // SAFETY: head + len + tail == mapped, so all three pieces lie inside the new mapping, which
        // nobody else knows yet; the pieces unmapped are never used again.
        let base = unsafe {
            if head > 0 {
                libc::munmap(raw.cast(), head);
            }
            if tail > 0 {
                libc::munmap(raw.add(head + len).cast(), tail);
            }
            raw.add(head)
        };
        // SAFETY: advice about our own mapping; it changes no contents.
        let huge = unsafe { libc::madvise(base.cast(), len, libc::MADV_HUGEPAGE) == 0 };
        // A core dump of the VMM should not hold the guest's memory. Failure does no harm.
        // SAFETY: as above.
        unsafe { libc::madvise(base.cast(), len, libc::MADV_DONTDUMP) };

        let base = NonNull::new(base).ok_or_else(too_big)?;
        let memory = Self { base, len, huge };
        for at in (0..len).step_by(4096) {
            // SAFETY: `at` is below `len`, inside the mapping; no guest runs yet. Volatile, so that
            // the compiler cannot drop writing the zero that is already there.
            unsafe { memory.base.as_ptr().add(at).write_volatile(0) };
        }
        Ok(memory)
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether there is no memory at all; never true.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the host accepted the advice to use huge pages.
    pub fn huge_pages_advised(&self) -> bool {
        self.huge
    }

    /// Host address of the guest-physical range, or `None` when part of it is outside RAM.
    ///
    /// The pointer is valid while `self` lives. The guest may write there at any time: use
    /// atomics, or be sure that no vCPU runs.
    pub fn host_ptr(&self, address: u64, len: u64) -> Option<NonNull<u8>> {
        let end = address.checked_add(len)?;
        if end > self.len() {
            return None;
        }
        // SAFETY: address <= end <= len, so the result is inside the mapping or one past its end.
        Some(unsafe { self.base.add(address as usize) })
    }

    /// The 64-bit word at `address`, or `None` when it is outside RAM or not 8-byte aligned.
    pub fn word(&self, address: u64) -> Option<&AtomicU64> {
        let ptr = self.aligned(address, 8)?;
        // SAFETY: `aligned` checked range and alignment (the mapping is page-aligned); the memory
        // lives as long as `self`; host code reaches it through atomics only.
        Some(unsafe { AtomicU64::from_ptr(ptr.cast().as_ptr()) })
    }

    /// The 32-bit word at `address`, or `None` when it is outside RAM or not 4-byte aligned.
    pub fn word32(&self, address: u64) -> Option<&AtomicU32> {
        let ptr = self.aligned(address, 4)?;
        // SAFETY: as in `word`.
        Some(unsafe { AtomicU32::from_ptr(ptr.cast().as_ptr()) })
    }

    /// Copies guest memory to `into`. Not a snapshot: the guest may write meanwhile, but each
    /// aligned 8-byte word is read at once.
    ///
    /// # Errors
    /// [`OutOfRange`]; then nothing was copied.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), OutOfRange> {
        self.check(address, into.len())?;
        let head = (address.wrapping_neg() % 8).min(into.len() as u64) as usize;
        let (edge, rest) = into.split_at_mut(head);
        self.read_bytes(address, edge);
        let mut at = address + head as u64;
        let mut words = rest.chunks_exact_mut(8);
        for chunk in &mut words {
            if let Some(word) = self.word(at) {
                chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
            at += 8;
        }
        self.read_bytes(at, words.into_remainder());
        Ok(())
    }

    /// Copies `from` to guest memory, byte by byte as far as the guest can see.
    ///
    /// # Errors
    /// [`OutOfRange`]; then nothing was copied.
    pub fn write(&self, address: u64, from: &[u8]) -> Result<(), OutOfRange> {
        self.check(address, from.len())?;
        for (at, byte) in (address..).zip(from) {
            if let Some(cell) = self.byte(at) {
                cell.store(*byte, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Stores a 64-bit word, little-endian.
    ///
    /// # Errors
    /// [`OutOfRange`] when it is outside RAM or not 8-byte aligned.
    pub fn store(&self, address: u64, value: u64) -> Result<(), OutOfRange> {
        let word = self.word(address).ok_or(OutOfRange { address, len: 8 })?;
        word.store(value, Ordering::Relaxed);
        Ok(())
    }

    fn check(&self, address: u64, len: usize) -> Result<(), OutOfRange> {
        let len = len as u64;
        self.host_ptr(address, len).map(|_| ()).ok_or(OutOfRange { address, len })
    }

    fn aligned(&self, address: u64, size: u64) -> Option<NonNull<u8>> {
        if address.is_multiple_of(size) { self.host_ptr(address, size) } else { None }
    }

    fn byte(&self, address: u64) -> Option<&AtomicU8> {
        let ptr = self.host_ptr(address, 1)?;
        // SAFETY: `host_ptr` checked the range; the rest as in `word`.
        Some(unsafe { AtomicU8::from_ptr(ptr.as_ptr()) })
    }

    fn read_bytes(&self, address: u64, into: &mut [u8]) {
        for (at, slot) in (address..).zip(into) {
            if let Some(cell) = self.byte(at) {
                *slot = cell.load(Ordering::Relaxed);
            }
        }
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the piece that `new` kept; nothing borrows from `self` any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_stays_inside_ram() {
        let memory = GuestMemory::new(1).expect("2 MiB");
        assert_eq!(memory.len(), LARGE_PAGE);
        let end = memory.len();
        assert!(memory.host_ptr(0, end).is_some() && memory.host_ptr(end, 0).is_some());
        assert!(memory.host_ptr(0, end + 1).is_none());
        assert!(memory.host_ptr(end - 1, 2).is_none());
        assert!(memory.host_ptr(u64::MAX, 2).is_none());
        assert!(memory.host_ptr(1, u64::MAX).is_none());
        assert!(memory.word(end - 8).is_some() && memory.word(end).is_none());
        assert!(memory.word(4).is_none() && memory.word32(4).is_some() && memory.word32(2).is_none());
        assert_eq!(memory.write(end - 1, &[1, 2]), Err(OutOfRange { address: end - 1, len: 2 }));
    }

    #[test]
    fn what_is_written_is_read_at_every_alignment() {
        let memory = GuestMemory::new(LARGE_PAGE).expect("2 MiB");
        let pattern: Vec<u8> = (1..=40).collect();
        for start in 0..9 {
            for len in 0..pattern.len() {
                memory.write(start, &pattern[..len]).expect("in range");
                let mut back = vec![0; len];
                memory.read(start, &mut back).expect("in range");
                assert_eq!(back, pattern[..len], "start {start} len {len}");
            }
        }
    }

    #[test]
    fn the_mapping_is_aligned_for_huge_pages() {
        let memory = GuestMemory::new(3 * LARGE_PAGE).expect("6 MiB");
        let base = memory.host_ptr(0, 1).expect("in range").as_ptr() as u64;
        assert_eq!(base % LARGE_PAGE, 0);
    }
}
