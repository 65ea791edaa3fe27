//! Boot page and per-vCPU blocks: plain memory, laid out by `repr(C)`.

use core::mem::{align_of, offset_of, size_of};
use core::sync::atomic::{AtomicU8, AtomicU64};

/// First word of a valid [`BootPage`]: the bytes `pvlkboot`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"pvlkboot");

/// Version of [`BootPage`] and [`VcpuBlock`]. Image and VMM are built together,
/// so a mismatch means a stale image.
pub const VERSION: u32 = 1;

/// Number of free argument words in a [`BootPage`].
pub const ARGS: usize = 128;

/// Longest panic text that a [`VcpuBlock`] holds, in bytes of UTF-8; longer text is cut.
pub const PANIC_TEXT: usize = 1024;

/// Number of free words in a [`VcpuBlock`].
pub const WORDS: usize = 256;

/// One page that describes the VM. The VMM writes it before any vCPU starts.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct BootPage {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u32,
    /// Number of vCPUs that the VMM starts.
    pub vcpus: u32,
    /// Privilege level the guest runs at: 0 or 3.
    pub cpl: u32,
    /// Zero.
    pub reserved: u32,
    /// Size of guest RAM in bytes; it begins at address 0.
    pub ram_bytes: u64,
    /// Address of the area that image, stacks and tables leave free, 2 MiB aligned.
    pub shared_start: u64,
    /// Size of that area in bytes.
    pub shared_bytes: u64,
    /// Guest TSC frequency in Hz, or 0 when the VMM could not learn it.
    pub tsc_hz: u64,
    /// Arguments and results whose meaning the workload defines. Zero at start.
    pub args: [AtomicU64; ARGS],
}

/// Memory of one vCPU: the guest finds it through the GS base.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct VcpuBlock {
    /// The address of this block, so that `mov reg, gs:[0]` finds it.
    pub self_address: u64,
    /// Index of the vCPU that owns this block.
    pub vcpu: u64,
    /// Bytes of [`panic_text`](Self::panic_text) in use. Written by the guest: the VMM must not trust it.
    pub panic_len: AtomicU64,
    /// Text of a panic.
    pub panic_text: [AtomicU8; PANIC_TEXT],
    /// Words that the owner vCPU may use as it likes. Zero at start.
    pub words: [AtomicU64; WORDS],
}

const _: () = {
    assert!(size_of::<BootPage>() == 4096 && align_of::<BootPage>() == 4096);
    assert!(size_of::<VcpuBlock>() == 4096 && align_of::<VcpuBlock>() == 4096);
    // `mov reg, gs:[0]` depends on it.
    assert!(offset_of!(VcpuBlock, self_address) == 0);
    // No hidden padding before the arrays.
    assert!(offset_of!(BootPage, args) == 56);
    assert!(offset_of!(VcpuBlock, panic_text) == 24);
    assert!(offset_of!(VcpuBlock, words) == 24 + PANIC_TEXT);
};
