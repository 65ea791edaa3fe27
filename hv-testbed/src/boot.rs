//! From the loader to [`crate::main`], on every CPU.
//!
//! Follows: the PVH boot protocol, and the Multiboot specification 0.6.96 for loaders that do not know it (both: 32-bit protected
//! mode, paging off, ebx = address of what the loader says); AMD64 APM volume 2, chapter 14
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
    // The Multiboot header: pages aligned, addresses given here, as the file is one for 64 bits. The file is laid out as memory is.
    ".balign 4",
    "multiboot_header:",
    ".long 0x1badb002, 0x10001, -(0x1badb002 + 0x10001)",
    ".long multiboot_header, image_start, data_end, bss_end, pvh_start",
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

// SAFETY: the assembler code above defines both, and only their addresses are used.
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

/// What the loader hands over.
pub(crate) struct StartInfo {
    /// The first module: the guest image.
    pub(crate) module: &'static [u8],
    /// The command line.
    pub(crate) command_line: &'static str,
}

/// `hvm_start_info` of the PVH protocol.
#[repr(C)]
struct Pvh {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    module_list: u64,
    command_line: u64,
}

/// Address and size of a module, as PVH lists them.
#[repr(C)]
struct PvhModule {
    address: u64,
    size: u64,
}

/// The Multiboot information.
#[repr(C)]
struct Multiboot {
    flags: u32,
    unused: [u32; 3],
    command_line: u32,
    modules: u32,
    module_list: u32,
}

/// Start and end of a module, as Multiboot lists them.
#[repr(C)]
struct MultibootModule {
    start: u32,
    end: u32,
}

const PVH_MAGIC: u32 = 0x336e_c578;
/// Multiboot's flags: there is a command line, there are modules.
const MULTIBOOT_FLAGS: u32 = 1 << 2 | 1 << 3;

impl StartInfo {
    /// What the loader put at `address`.
    ///
    /// # Safety
    ///
    /// `address` is what the loader passed to the entry, and nothing has written to memory outside the hypervisor since.
    pub(crate) unsafe fn at(address: u64) -> Self {
        // SAFETY: the caller's contract. Both protocols say that such a structure is there, which PVH's begins with its magic number
        // and Multiboot's with flags that are smaller; and that the module and the string that ends with 0 are where it says.
        unsafe {
            let pvh = &*at::<Pvh>(address);
            let (start, size, line) = if pvh.magic == PVH_MAGIC {
                assert!(pvh.modules > 0, "no guest image: pass it as the initrd");
                let module = &*at::<PvhModule>(pvh.module_list);
                (module.address, module.size, pvh.command_line)
            } else {
                let multiboot = &*at::<Multiboot>(address);
                let whole = multiboot.flags & MULTIBOOT_FLAGS == MULTIBOOT_FLAGS && multiboot.modules > 0;
                assert!(whole, "no guest image: pass it as a module");
                let module = &*at::<MultibootModule>(multiboot.module_list.into());
                (module.start.into(), u64::from(module.end - module.start), multiboot.command_line.into())
            };
            let line = at::<u8>(line);
            // Volatile, so that the loop is not taken for C's strlen, which is not here.
            let length = if line.is_null() { 0 } else { (0..).take_while(|&n| line.add(n).read_volatile() != 0).count() };
            let line = core::slice::from_raw_parts(if length > 0 { line } else { at(1) }, length);
            let module = core::slice::from_raw_parts(at::<u8>(start), size as usize);
            Self { module, command_line: core::str::from_utf8(line).unwrap_or("") }
        }
    }
}

fn at<T>(address: u64) -> *const T {
    core::ptr::with_exposed_provenance(address as usize)
}
