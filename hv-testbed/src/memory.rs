//! Physical memory, which is mapped one to one: the heap, and the RAM of the VMs.
//!
//! | address | what |
//! |---|---|
//! | 0x0000_8000 | where the other CPUs start |
//! | 0x0010_0000 | the hypervisor |
//! | 0x0100_0000 | heap: engines, vCPUs, nested page tables |
//! | 0x0400_0000 | RAM of the first VM, then of the second |
//! | top | the guest image, where the loader puts an initrd |

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};
use pvlock_guest_image::layout;

const HEAP: core::ops::Range<usize> = 0x100_0000..0x400_0000;
const VMS: u64 = 0x400_0000;

/// Most VMs at a time.
pub(crate) const MAX_VMS: usize = 2;
/// RAM of each VM in bytes.
pub(crate) const RAM: u64 = layout::MIN_RAM;

/// Nothing is given back until everything is: VMs live for one run each.
struct Heap(AtomicUsize);

#[global_allocator]
static ALLOCATOR: Heap = Heap(AtomicUsize::new(HEAP.start));

// SAFETY: each piece lies in the heap, which is RAM that nothing else uses, and no two overlap: the counter only grows until
// `release_all`, whose caller promises that nothing is left.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let place = |from: usize| from.next_multiple_of(layout.align());
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |from| {
            place(from).checked_add(layout.size()).filter(|&end| end <= HEAP.end)
        });
        taken.map_or(core::ptr::null_mut(), |from| core::ptr::with_exposed_provenance_mut(place(from)))
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

/// Bytes of the heap in use.
pub(crate) fn allocated() -> usize {
    ALLOCATOR.0.load(Ordering::Relaxed) - HEAP.start
}

/// Makes the heap empty again.
///
/// # Safety
///
/// Nothing that was allocated is alive.
pub(crate) unsafe fn release_all() {
    ALLOCATOR.0.store(HEAP.start, Ordering::Relaxed);
}

/// Where the RAM of a VM begins.
pub(crate) fn ram(vm: usize) -> NonNull<u8> {
    assert!(vm < MAX_VMS);
    let address = VMS as usize + vm * RAM as usize;
    NonNull::new(core::ptr::with_exposed_provenance_mut(address)).expect("not at 0")
}
