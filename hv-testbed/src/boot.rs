//! From the loader to [`crate::main`], on every CPU.
//!
//! Follows: the PVH boot protocol (32-bit protected mode, paging off, ebx = start info); AMD64 APM volume 2, chapter 14
//! "Processor Initialization and Long Mode Activation" and 16.4 for the start of application processors by INIT and SIPI.

use core::arch::global_asm;

/// Most CPUs that are started.
pub(crate) const MAX_CPUS: usize = 4;
/// Stack of each CPU, in bytes.
const STACK: usize = 64 << 10;
/// Where the application processors begin, in real mode: any page below 1 MiB that nobody else uses.
pub(crate) const TRAMPOLINE: u64 = 0x8000;

#[repr(C, align(4096))]
struct Stacks([[u8; STACK]; MAX_CPUS]);
static mut STACKS: Stacks = Stacks([[0; STACK]; MAX_CPUS]);

#[repr(C, align(4096))]
struct Table([u64; 512]);

/// Present, writable, large: the first 4 GiB one to one, in pages of 1 GiB (the local APICs included).
const fn gigabytes() -> Table {
    let mut table = [0; 512];
    let mut n = 0;
    while n < 4 {
        table[n] = (n as u64) << 30 | 0x83;
        n += 1;
    }
    Table(table)
}
static PDPT: Table = gigabytes();
/// Entry 0 is filled in by the first instructions, which know where `PDPT` is.
static mut PML4: Table = Table([0; 512]);

/// Null, 64-bit code, data, 32-bit code.
static GDT: [u64; 4] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x00cf_9b00_0000_ffff];
/// Selector of the 64-bit code segment.
pub(crate) const CODE: u16 = 0x08;

global_asm!(
    // The note by which loaders find the entry: owner "Xen", type 18 (XEN_ELFNOTE_PHYS32_ENTRY).
    ".section .note.pvh, \"a\", @note",
    ".balign 4",
    ".long 4, 4, 18",
    ".asciz \"Xen\"",
    ".long pvh_start",

    ".section .text.start, \"ax\"",
    ".code32",
    ".global pvh_start",
    "pvh_start:",
    "cld",
    "movl %ebx, %edi",
    "movl ${pdpt}, %eax",
    "orl $3, %eax",
    "movl %eax, {pml4}",
    // Both kinds of CPU come here, in 32-bit mode without paging; edi is passed on.
    "long_mode:",
    "movl %cr4, %eax",
    "orl $0x620, %eax", // PAE, OSFXSR, OSXMMEXCPT
    "movl %eax, %cr4",
    "movl ${pml4}, %eax",
    "movl %eax, %cr3",
    "movl $0xc0000080, %ecx", // EFER: SVME, LME
    "rdmsr",
    "orl $0x1100, %eax",
    "wrmsr",
    "movl %cr0, %eax",
    "andl $0xfffffff3, %eax", // no EM, no TS
    "orl $0x80000023, %eax",  // PG, NE, MP, PE
    "movl %eax, %cr0",
    "lgdtl gdt_pointer",
    "ljmpl ${code}, $in_long_mode",
    ".code64",
    "in_long_mode:",
    "movw $0x10, %ax",
    "movw %ax, %ds",
    "movw %ax, %es",
    "movw %ax, %ss",
    "movw %ax, %fs",
    "movw %ax, %gs",
    "movl $1, %esi",
    "lock xaddl %esi, cpus_started",
    "movl %esi, %eax",
    "incl %eax",
    "imull ${stack}, %eax",
    "leaq {stacks}(%rax), %rsp",
    "xorl %ebp, %ebp",
    "call {main}",
    "ud2",

    // Copied to TRAMPOLINE.
    ".code16",
    ".global trampoline_start",
    "trampoline_start:",
    "cli",
    "cld",
    "xorw %ax, %ax",
    "movw %ax, %ds",
    "lgdtl {trampoline} + trampoline_gdt - trampoline_start",
    "movl %cr0, %eax",
    "orl $1, %eax",
    "movl %eax, %cr0",
    "ljmpl $0x18, $in_protected_mode",
    ".balign 4",
    "trampoline_gdt:",
    ".word 31",
    ".long {gdt}",
    ".global trampoline_end",
    "trampoline_end:",

    ".code32",
    "in_protected_mode:",
    "movw $0x10, %ax",
    "movw %ax, %ds",
    "movw %ax, %ss",
    "xorl %edi, %edi",
    "jmp long_mode",
    ".code64",

    ".section .data",
    ".balign 8",
    "gdt_pointer:",
    ".word 31",
    ".long {gdt}, 0",
    ".balign 4",
    "cpus_started: .long 0",
    pdpt = sym PDPT,
    pml4 = sym PML4,
    gdt = sym GDT,
    stacks = sym STACKS,
    main = sym crate::main,
    code = const CODE,
    stack = const STACK,
    trampoline = const TRAMPOLINE,
    options(att_syntax),
);

unsafe extern "C" {
    static trampoline_start: u8;
    static trampoline_end: u8;
}

/// Puts the code that application processors begin with in its place.
pub(crate) fn install_trampoline() {
    let start = &raw const trampoline_start;
    let length = (&raw const trampoline_end).addr() - start.addr();
    // SAFETY: the two symbols bound the code above; the page at TRAMPOLINE is RAM that nothing else uses.
    unsafe { core::ptr::copy_nonoverlapping(start, core::ptr::with_exposed_provenance_mut(TRAMPOLINE as usize), length) };
}

/// What the loader hands over (`hvm_start_info` of the PVH protocol).
#[repr(C)]
pub(crate) struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    module_list: u64,
    command_line: u64,
}

#[repr(C)]
struct Module {
    address: u64,
    size: u64,
    command_line: u64,
    reserved: u64,
}

impl StartInfo {
    /// The one that the loader put at `address`.
    ///
    /// # Safety
    ///
    /// `address` is what the loader passed to the entry, and nothing has written to memory below the hypervisor since.
    pub(crate) unsafe fn at(address: u64) -> &'static Self {
        // SAFETY: the caller's contract; the protocol says that such a structure is there.
        let info = unsafe { &*core::ptr::with_exposed_provenance::<Self>(address as usize) };
        assert!(info.magic == 0x336e_c578, "booted by something that is no PVH loader");
        info
    }

    /// The first module: the guest image.
    pub(crate) fn module(&self) -> &'static [u8] {
        assert!(self.modules > 0, "no guest image: pass it as the initrd");
        // SAFETY: the protocol says that so many modules are listed here, in memory that stays as it is.
        unsafe {
            let module = &*core::ptr::with_exposed_provenance::<Module>(self.module_list as usize);
            core::slice::from_raw_parts(core::ptr::with_exposed_provenance(module.address as usize), module.size as usize)
        }
    }

    /// The command line.
    pub(crate) fn command_line(&self) -> &'static str {
        if self.command_line == 0 {
            return "";
        }
        let start: *const u8 = core::ptr::with_exposed_provenance(self.command_line as usize);
        // SAFETY: the protocol says that a string that ends with 0 is here, in memory that stays as it is. (Volatile, so that
        // the loop is not taken for C's strlen, which is not here.)
        let text = unsafe {
            let length = (0..).take_while(|&at| start.add(at).read_volatile() != 0).count();
            core::slice::from_raw_parts(start, length)
        };
        core::str::from_utf8(text).unwrap_or("")
    }
}
