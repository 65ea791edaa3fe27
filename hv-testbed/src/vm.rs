//! A VM: its memory, its engine, its vCPUs as they start.
//!
//! Follows: AMD64 APM volume 2, 15.25 "Nested Paging" and 15.5 "VMRUN Instruction" (state that VMRUN checks).

use crate::enter::Registers;
use crate::irq_lock::IrqLock;
use crate::{apic, memory};
use alloc::boxed::Box;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use elf::ElfBytes;
use elf::abi::PT_LOAD;
use elf::endian::LittleEndian;
use lock_api::Mutex;
use pvlock_guest_image::job::{Job, LogEntry};
use pvlock_guest_image::{BootPage, VcpuBlock, boot, layout};
use pvlock_host::{Config, Engine, Mapped, protocol::VcpuId};
use pvlock_hv_testbed::cells::WINDOW;
use pvlock_hv_testbed::pause_filter::PauseFilter;
use pvlock_hv_testbed::vmcb::{INJECT_GP, INJECT_UD, Segment, V_INTR_MASKING, Vmcb, intercept};
use pvlock_hv_testbed::wake_order::WakeOrder;

/// Acquisitions that are logged.
pub(crate) const LOG: usize = 1 << 16;
/// Where the job is in guest memory, and the log behind it.
const JOB: u64 = layout::SHARED;
const LOG_AT: u64 = JOB + (size_of::<Job>() as u64).next_multiple_of(4096);
const _: () = assert!(LOG_AT + (LOG * size_of::<LogEntry>()) as u64 <= memory::RAM);
/// RAM that a guest may have changed when it is done: nothing lies behind the log.
const USED: u64 = LOG_AT + (LOG * size_of::<LogEntry>()) as u64;
/// Where a program that is no guest image is put.
pub(crate) const PROGRAM: u64 = layout::IMAGE.start;

/// CPUID 8000_000A EDX: the CPU counts PAUSEs.
const PAUSE_FILTER: u32 = 1 << 10;
/// And sees gaps between loops.
const PAUSE_FILTER_THRESHOLD: u32 = 1 << 12;

/// Whether this CPU counts PAUSEs.
pub(crate) fn has_pause_filter() -> bool {
    svm_features() & PAUSE_FILTER != 0
}

fn svm_features() -> u32 {
    x86::cpuid::cpuid!(0x8000_000a).edx
}

#[repr(C, align(4096))]
struct Table([u64; 512]);

/// Everything is intercepted: every port and every MSR.
#[repr(C, align(4096))]
struct Permissions([u8; 3 * 4096]);
static PERMISSIONS: Permissions = Permissions([0xff; 3 * 4096]);

/// What happened, for the report.
#[derive(Default)]
pub(crate) struct Events {
    /// PAUSE exits, before they are counted to a window.
    pub(crate) pauses: AtomicU64,
    /// Pause-loop exits at which the holder that the vCPU waits for was off its CPU.
    pub(crate) holder_preempted: AtomicU64,
    /// Sleepers that should have been woken when the vCPU they wait for got a CPU, and were not.
    pub(crate) not_drained: AtomicU64,
    /// Times a vCPU got a CPU.
    pub(crate) switches: AtomicU64,
    /// Reports of guest misbehaviour.
    pub(crate) reports: AtomicU64,
}

pub(crate) struct Vm {
    pub(crate) id: usize,
    /// Number of its first vCPU among all VMs'.
    pub(crate) first: usize,
    pub(crate) vcpus: usize,
    pub(crate) engine: Engine<Mapped, IrqLock>,
    /// What the engine has allocated.
    pub(crate) engine_bytes: usize,
    pub(crate) events: Events,
    pub(crate) order: Mutex<IrqLock, WakeOrder>,
    /// None of its vCPUs runs again.
    pub(crate) stopped: AtomicBool,
    nested: Box<[Table; 3]>,
    entry: u64,
}

/// One vCPU. Only the CPU that runs it touches it.
pub(crate) struct Vcpu {
    pub(crate) id: VcpuId,
    pub(crate) vmcb: Box<Vmcb>,
    pub(crate) registers: Box<Registers>,
    pub(crate) filter: PauseFilter,
    /// Turns that the timer ended.
    pub(crate) preemptions: u64,
    /// The CPU whose TLB may know it.
    pub(crate) last_cpu: usize,
}

/// What a VM runs.
#[derive(Clone, Copy)]
pub(crate) enum Program<'a> {
    /// The guest image, with a job.
    Image(&'a [u8]),
    /// A few instructions.
    Code(&'a [u8]),
}

fn write(vm: usize, address: u64, bytes: &[u8]) {
    assert!(address + bytes.len() as u64 <= memory::RAM);
    // SAFETY: it lies in the VM's RAM, and no vCPU of it runs yet.
    unsafe { memory::ram(vm).as_ptr().add(address as usize).copy_from(bytes.as_ptr(), bytes.len()) };
}

impl Vm {
    /// A VM that is ready to start.
    pub(crate) fn new(id: usize, first: usize, vcpus: usize, program: Program<'_>, config: Config) -> Self {
        let ram = memory::ram(id);
        // SAFETY: the VM's RAM, which no vCPU uses now. As words: each repetition counts as an instruction here.
        unsafe { core::arch::asm!("rep stosq", inout("rcx") USED / 8 => _, inout("rdi") ram.as_ptr() => _, in("rax") 0) };
        let entry = match program {
            Program::Image(image) => load(id, image),
            Program::Code(code) => {
                write(id, PROGRAM, code);
                PROGRAM
            }
        };
        for (address, word) in layout::page_tables(memory::RAM) {
            write(id, address, &word.to_le_bytes());
        }
        let page = BootPage {
            magic: boot::MAGIC,
            version: boot::VERSION,
            vcpus: vcpus as u32,
            cpl: 0,
            reserved: 0,
            ram_bytes: memory::RAM,
            shared_start: layout::SHARED,
            shared_bytes: memory::RAM - layout::SHARED,
            tsc_hz: apic::tsc_hz(),
            args: [const { AtomicU64::new(0) }; boot::ARGS],
        };
        page.args[0].store(JOB, Ordering::Relaxed);
        // SAFETY: the boot page's place in the VM's RAM, page aligned, which no vCPU uses yet.
        unsafe { ram.as_ptr().add(layout::BOOT_PAGE as usize).cast::<BootPage>().write(page) };
        for vcpu in 0..vcpus {
            let block = layout::vcpu_block(vcpu);
            write(id, block + core::mem::offset_of!(VcpuBlock, self_address) as u64, &block.to_le_bytes());
            write(id, block + core::mem::offset_of!(VcpuBlock, vcpu) as u64, &(vcpu as u64).to_le_bytes());
        }
        let before = memory::allocated();
        // SAFETY: the VM's RAM: page aligned, mapped for ever, and reached by the hypervisor through atomics and raw pointers only.
        let mapped = unsafe { Mapped::new(0, ram, memory::RAM as usize) };
        let engine = Engine::new(config, vcpus, mapped).expect("a sound configuration");
        Self {
            id,
            first,
            vcpus,
            engine,
            engine_bytes: memory::allocated() - before,
            events: Events::default(),
            order: Mutex::new(WakeOrder::new(vcpus)),
            stopped: AtomicBool::new(false),
            nested: nested(ram.as_ptr().addr() as u64),
            entry,
        }
    }

    /// The job; all zeros until somebody fills it in.
    pub(crate) fn job(&self) -> &Job {
        // SAFETY: in the VM's RAM, page aligned; atomics throughout, of which every value is valid.
        unsafe { &*memory::ram(self.id).as_ptr().add(JOB as usize).cast() }
    }

    /// The log of the acquisitions.
    pub(crate) fn log(&self) -> &[LogEntry] {
        // SAFETY: as the job.
        unsafe { core::slice::from_raw_parts(memory::ram(self.id).as_ptr().add(LOG_AT as usize).cast(), LOG) }
    }

    /// Address of the log as the guest sees it.
    pub(crate) fn log_address(&self) -> u64 {
        LOG_AT
    }

    /// The text of a panic of this vCPU.
    pub(crate) fn panic_text(&self, vcpu: VcpuId) -> impl Iterator<Item = char> {
        let place = memory::ram(self.id).as_ptr().wrapping_add(layout::vcpu_block(vcpu.index()) as usize);
        // SAFETY: the block's place in the VM's RAM; what the guest changes in it are atomics.
        let block = unsafe { &*place.cast::<VcpuBlock>() };
        let length = (block.panic_len.load(Ordering::Relaxed) as usize).min(boot::PANIC_TEXT);
        block.panic_text[..length].iter().map(|byte| char::from(byte.load(Ordering::Relaxed)))
    }

    /// A vCPU in 64-bit mode at the entry, as `pvlock_guest_image` describes it.
    pub(crate) fn vcpu(&self, id: VcpuId) -> Vcpu {
        let code = Segment { selector: 0x08, attributes: 0xa9b, limit: u32::MAX, base: 0 };
        let data = Segment { selector: 0x10, attributes: 0xc93, limit: u32::MAX, base: 0 };
        let permissions = (&raw const PERMISSIONS).expose_provenance() as u64;
        use intercept::{CPUID, HLT, INTR, MSRS, NMI, PAUSE, PORTS, SHUTDOWN, SVM};
        let mut vmcb = Box::new(Vmcb::new());
        vmcb.intercepts = INTR | NMI | CPUID | PAUSE | HLT | PORTS | MSRS | SHUTDOWN;
        vmcb.svm_intercepts = SVM;
        vmcb.iopm = permissions;
        vmcb.msrpm = permissions;
        // One for each vCPU, or what one CPU's TLB knows of one would be taken for another's.
        vmcb.asid = 1 + (self.first + id.index()) as u32;
        vmcb.virtual_interrupt = V_INTR_MASKING;
        vmcb.nested = 1;
        vmcb.nested_cr3 = (&raw const self.nested[0]).expose_provenance() as u64;
        vmcb.cs = code;
        vmcb.ss = data;
        vmcb.ds = data;
        vmcb.es = data;
        vmcb.fs = data;
        vmcb.gs = Segment { base: layout::vcpu_block(id.index()), ..data };
        vmcb.tr = Segment { selector: 0x18, attributes: 0x8b, limit: 0x67, base: layout::TSS };
        vmcb.ldtr = Segment { attributes: 0x82, ..Segment::default() };
        vmcb.efer = 0x1d01; // SVME, NXE, LMA, LME, SCE
        vmcb.cr0 = 0x8005_0033;
        vmcb.cr3 = layout::PML4;
        vmcb.cr4 = 0x620;
        vmcb.dr6 = 0xffff_0ff0;
        vmcb.dr7 = 0x400;
        vmcb.rflags = 2;
        vmcb.rip = self.entry;
        vmcb.rsp = layout::stack_top(id.index());
        vmcb.pat = 0x0007_0406_0007_0406;
        let mut registers = Box::new(Registers::new());
        (registers.rdi, registers.rsi) = (id.index() as u64, layout::BOOT_PAGE);
        let mut vcpu = Vcpu { id, vmcb, registers, filter: PauseFilter::new(), preemptions: 0, last_cpu: usize::MAX };
        if has_pause_filter() {
            vcpu.count_pauses(WINDOW);
        }
        vcpu
    }
}

/// What a PAUSE and the rest of its loop take, in cycles, to turn a window of ticks into a count of PAUSEs.
const CYCLES_PER_PAUSE: u64 = 64;
/// Two PAUSEs of one loop are no further apart, in cycles.
const FILTER_THRESHOLD: u16 = 1 << 10;

impl Vcpu {
    /// Whether the CPU counts this vCPU's PAUSEs, and lets out only those that are too many (APM volume 2, 15.14.4).
    pub(crate) fn counts_pauses(&self) -> bool {
        self.vmcb.pause_filter_count > 0
    }

    /// Has the CPU count PAUSEs up to a window in ticks.
    pub(crate) fn count_pauses(&mut self, window: u64) {
        self.vmcb.pause_filter_count = (window / CYCLES_PER_PAUSE).clamp(1, u16::MAX.into()) as u16;
        if svm_features() & PAUSE_FILTER_THRESHOLD != 0 {
            self.vmcb.pause_filter_threshold = FILTER_THRESHOLD;
        }
    }

    /// The guest's instruction is one that this CPU does not have.
    pub(crate) fn inject_ud(&mut self) {
        self.vmcb.inject = INJECT_UD;
    }

    /// The guest is not allowed that.
    pub(crate) fn inject_gp(&mut self) {
        self.vmcb.inject = INJECT_GP;
    }
}

/// Nested page tables that map guest RAM to where it is; nothing else is there for the guest.
fn nested(ram: u64) -> Box<[Table; 3]> {
    const USER: u64 = 0x7;
    const LARGE: u64 = 0x80;
    let mut tables = Box::new([const { Table([0; 512]) }; 3]);
    let addresses: [u64; 3] = core::array::from_fn(|n| (&raw const tables[n]).expose_provenance() as u64);
    tables[0].0[0] = addresses[1] | USER;
    tables[1].0[0] = addresses[2] | USER;
    for (page, leaf) in (0..memory::RAM / layout::LARGE_PAGE).zip(&mut tables[2].0) {
        *leaf = (ram + page * layout::LARGE_PAGE) | USER | LARGE;
    }
    tables
}

/// Puts the guest image into place; returns its entry point.
fn load(vm: usize, image: &[u8]) -> u64 {
    let file = ElfBytes::<LittleEndian>::minimal_parse(image).expect("the guest image is an ELF file");
    for segment in file.segments().expect("it has segments").iter().filter(|segment| segment.p_type == PT_LOAD) {
        let room = layout::IMAGE.contains(&segment.p_paddr) && segment.p_paddr + segment.p_memsz <= layout::IMAGE.end;
        assert!(room, "the guest image is linked to run elsewhere");
        write(vm, segment.p_paddr, file.segment_data(&segment).expect("the guest image is whole"));
    }
    file.ehdr.e_entry
}
