//! Where everything is in guest memory. Guest-physical and virtual addresses are the same.
//!
//! | address | what |
//! |---|---|
//! | 0x0000_0000 | nothing: a null pointer hits no data of ours |
//! | 0x0000_1000 | page tables: PML4, PDPT, up to four page directories |
//! | 0x0000_8000 | TSS with an I/O bitmap that opens every port |
//! | 0x0000_c000 | boot page |
//! | 0x0001_0000 | one block of 4 KiB per vCPU |
//! | 0x0010_0000 | guest image, up to 3 MiB |
//! | 0x0040_0000 | one stack of 64 KiB per vCPU, growing down |
//! | 0x0080_0000 | shared area, to the end of RAM: the workload's |

use core::ops::Range;

use crate::{BootPage, VcpuBlock};

/// Most vCPUs a VM can have.
pub const MAX_VCPUS: usize = 64;

/// Size of the pages that map guest memory, and the alignment of RAM size and shared area, in bytes.
pub const LARGE_PAGE: u64 = 2 << 20;

/// Least guest RAM in bytes.
pub const MIN_RAM: u64 = 16 << 20;

/// Most guest RAM in bytes: it stays below the hole that PCs keep for devices.
pub const MAX_RAM: u64 = 3 << 30;

/// Size of a small page in bytes.
const PAGE: u64 = 4096;

/// Top page table.
pub const PML4: u64 = 0x1000;
/// Second page table; maps the first 512 GiB.
pub const PDPT: u64 = 0x2000;
/// First page directory; each maps 1 GiB and the next follows it.
pub const PAGE_DIRECTORIES: u64 = 0x3000;
/// Number of page directories that fit.
pub const MAX_PAGE_DIRECTORIES: u64 = 4;

/// Task state segment, shared by all vCPUs: it only holds the I/O bitmap.
pub const TSS: u64 = 0x8000;
/// Offset of the I/O bitmap in the TSS in bytes (Intel SDM vol. 1, 19.5.2).
pub const TSS_IO_BITMAP: u64 = 0x68;
/// Segment limit of the TSS: header, 65 536 bits, and one closing byte, minus one.
pub const TSS_LIMIT: u64 = TSS_IO_BITMAP + 65_536 / 8;

/// The [`BootPage`].
pub const BOOT_PAGE: u64 = 0xc000;

/// First [`VcpuBlock`].
pub const VCPU_BLOCKS: u64 = 0x1_0000;

/// Where the guest image is linked.
pub const IMAGE: Range<u64> = 0x10_0000..0x40_0000;

/// First stack.
pub const STACKS: u64 = 0x40_0000;
/// Size of a stack in bytes.
pub const STACK_SIZE: u64 = 64 << 10;

/// Start of the shared area.
pub const SHARED: u64 = 0x80_0000;

const BLOCK: u64 = size_of::<VcpuBlock>() as u64;

const _: () = {
    let vcpus = MAX_VCPUS as u64;
    assert!(PML4 >= PAGE && PML4 + PAGE <= PDPT && PDPT + PAGE <= PAGE_DIRECTORIES);
    assert!(PAGE_DIRECTORIES + MAX_PAGE_DIRECTORIES * PAGE <= TSS);
    assert!(MAX_RAM <= MAX_PAGE_DIRECTORIES << 30);
    assert!(TSS + TSS_LIMIT < BOOT_PAGE);
    assert!(BOOT_PAGE + size_of::<BootPage>() as u64 <= VCPU_BLOCKS);
    assert!(VCPU_BLOCKS + vcpus * BLOCK <= IMAGE.start);
    assert!(IMAGE.end <= STACKS);
    assert!(STACKS + vcpus * STACK_SIZE <= SHARED);
    assert!(SHARED < MIN_RAM && SHARED.is_multiple_of(LARGE_PAGE));
    assert!(MIN_RAM.is_multiple_of(LARGE_PAGE) && MAX_RAM.is_multiple_of(LARGE_PAGE));
    // Each on pages of its own.
    assert!(PML4.is_multiple_of(PAGE) && PDPT.is_multiple_of(PAGE) && PAGE_DIRECTORIES.is_multiple_of(PAGE));
    assert!(TSS.is_multiple_of(PAGE) && BOOT_PAGE.is_multiple_of(PAGE) && VCPU_BLOCKS.is_multiple_of(PAGE));
    assert!(STACKS.is_multiple_of(STACK_SIZE) && STACK_SIZE.is_multiple_of(PAGE));
};

/// Address of the block of a vCPU, which must be below [`MAX_VCPUS`].
pub const fn vcpu_block(vcpu: usize) -> u64 {
    debug_assert!(vcpu < MAX_VCPUS);
    VCPU_BLOCKS + vcpu as u64 * BLOCK
}

/// Initial stack pointer of a vCPU, which must be below [`MAX_VCPUS`]; 16-byte aligned.
pub const fn stack_top(vcpu: usize) -> u64 {
    debug_assert!(vcpu < MAX_VCPUS);
    STACKS + (vcpu as u64 + 1) * STACK_SIZE
}

/// Entry of a page table: present, writable, open to CPL 3.
const PRESENT_WRITE_USER: u64 = 0x7;
/// A last-level entry of 2 MiB.
const LARGE_LEAF: u64 = 0x80;

/// The page tables that map so much RAM one to one, as words and their addresses (Intel SDM vol. 3, 5.5).
pub fn page_tables(ram_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let table = |page: u64| PAGE_DIRECTORIES + page / 512 * PAGE;
    let pages = 0..ram_bytes / LARGE_PAGE;
    let leaves =
        pages.clone().map(move |page| (table(page) + page % 512 * 8, (page * LARGE_PAGE) | PRESENT_WRITE_USER | LARGE_LEAF));
    let directories = pages.step_by(512).map(move |page| (PDPT + page / 512 * 8, table(page) | PRESENT_WRITE_USER));
    core::iter::once((PML4, PDPT | PRESENT_WRITE_USER)).chain(directories).chain(leaves)
}
