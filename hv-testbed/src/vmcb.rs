//! The virtual machine control block, and what an exit means.
//!
//! Follows: AMD64 APM volume 2, chapter 15 "Secure Virtual Machine" and appendix B "Layout of VMCB". Only the fields that are
//! used have names.

use core::mem::offset_of;

/// A segment register as the VMCB keeps it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Bits 40–47 and 52–55 of a descriptor, closed up.
    pub attributes: u16,
    /// Limit in bytes.
    pub limit: u32,
    /// Base address.
    pub base: u64,
}

/// A VMCB: what to intercept, why the guest was left, and the guest's state as far as `vmrun`, `vmload` and `vmsave` deal with it.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Vmcb {
    control_registers: [u32; 3],
    /// Vector 3: see [`intercept`].
    pub intercepts: u32,
    /// Vector 4: see [`intercept`].
    pub svm_intercepts: u32,
    reserved_14: [u32; 10],
    /// Largest number of cycles between two PAUSEs of one loop.
    pub pause_filter_threshold: u16,
    /// How many PAUSEs of one loop do not exit.
    pub pause_filter_count: u16,
    /// Physical address of the I/O permission map.
    pub iopm: u64,
    /// Physical address of the MSR permission map.
    pub msrpm: u64,
    /// Added to the time-stamp counter.
    pub tsc_offset: u64,
    /// Address space of the guest; not 0.
    pub asid: u32,
    /// 1: flush the whole TLB.
    pub tlb_control: u32,
    /// [`V_INTR_MASKING`] is the only bit used.
    pub virtual_interrupt: u64,
    reserved_68: u64,
    /// See [`Exit`].
    pub exit_code: u64,
    /// Details.
    pub exit_info_1: u64,
    /// More of them.
    pub exit_info_2: u64,
    reserved_88: u64,
    /// 1: nested paging.
    pub nested: u64,
    reserved_98: [u64; 2],
    /// Event to be injected: see [`INJECT_UD`].
    pub inject: u64,
    /// Physical address of the nested page table.
    pub nested_cr3: u64,
    reserved_b8: u64,
    /// 0: nothing is cached.
    pub clean: u64,
    /// Address of the next instruction, if the CPU says so.
    pub next_rip: u64,
    reserved_d0: [u64; 102],
    /// Segments.
    pub es: Segment,
    /// Code.
    pub cs: Segment,
    /// Stack.
    pub ss: Segment,
    /// Data.
    pub ds: Segment,
    /// FS.
    pub fs: Segment,
    /// GS.
    pub gs: Segment,
    /// Global descriptor table.
    pub gdtr: Segment,
    /// Local descriptor table.
    pub ldtr: Segment,
    /// Interrupt descriptor table.
    pub idtr: Segment,
    /// Task.
    pub tr: Segment,
    reserved_4a0: [u8; 0x2b],
    /// Privilege level.
    pub cpl: u8,
    reserved_4cc: u32,
    /// Extended features; SVME must be set.
    pub efer: u64,
    reserved_4d8: [u64; 14],
    /// CR4.
    pub cr4: u64,
    /// CR3.
    pub cr3: u64,
    /// CR0.
    pub cr0: u64,
    /// DR7.
    pub dr7: u64,
    /// DR6.
    pub dr6: u64,
    /// Flags.
    pub rflags: u64,
    /// Instruction pointer.
    pub rip: u64,
    reserved_580: [u64; 11],
    /// Stack pointer.
    pub rsp: u64,
    reserved_5e0: [u64; 3],
    /// RAX; the other registers are the hypervisor's to keep.
    pub rax: u64,
    reserved_600: [u64; 13],
    /// Page attribute table of the guest.
    pub pat: u64,
    reserved_670: [u64; 306],
}

const _: () = {
    assert!(size_of::<Vmcb>() == 4096);
    assert!(offset_of!(Vmcb, intercepts) == 0x0c);
    assert!(offset_of!(Vmcb, pause_filter_threshold) == 0x3c);
    assert!(offset_of!(Vmcb, iopm) == 0x40);
    assert!(offset_of!(Vmcb, asid) == 0x58);
    assert!(offset_of!(Vmcb, virtual_interrupt) == 0x60);
    assert!(offset_of!(Vmcb, exit_code) == 0x70);
    assert!(offset_of!(Vmcb, nested) == 0x90);
    assert!(offset_of!(Vmcb, inject) == 0xa8);
    assert!(offset_of!(Vmcb, nested_cr3) == 0xb0);
    assert!(offset_of!(Vmcb, next_rip) == 0xc8);
    assert!(offset_of!(Vmcb, es) == 0x400);
    assert!(offset_of!(Vmcb, tr) == 0x490);
    assert!(offset_of!(Vmcb, cpl) == 0x4cb);
    assert!(offset_of!(Vmcb, efer) == 0x4d0);
    assert!(offset_of!(Vmcb, cr4) == 0x548);
    assert!(offset_of!(Vmcb, rip) == 0x578);
    assert!(offset_of!(Vmcb, rsp) == 0x5d8);
    assert!(offset_of!(Vmcb, rax) == 0x5f8);
    assert!(offset_of!(Vmcb, pat) == 0x668);
};

/// What leaves the guest.
pub mod intercept {
    /// Physical interrupts.
    pub const INTR: u32 = 1 << 0;
    /// Non-maskable interrupts.
    pub const NMI: u32 = 1 << 1;
    /// CPUID.
    pub const CPUID: u32 = 1 << 18;
    /// PAUSE.
    pub const PAUSE: u32 = 1 << 23;
    /// HLT.
    pub const HLT: u32 = 1 << 24;
    /// Ports, as the permission map says.
    pub const PORTS: u32 = 1 << 27;
    /// MSRs, as the permission map says.
    pub const MSRS: u32 = 1 << 28;
    /// Triple faults.
    pub const SHUTDOWN: u32 = 1 << 31;
    /// Of vector 4: VMRUN (required), VMMCALL, VMLOAD, VMSAVE, STGI, CLGI, SKINIT.
    pub const SVM: u32 = 0x7f;
}

/// Interrupts are masked by the host's flag while the guest runs, whatever the guest's flag says.
pub const V_INTR_MASKING: u64 = 1 << 24;
/// Exception 6, valid.
pub const INJECT_UD: u64 = 6 | 3 << 8 | 1 << 31;
/// Exception 13 with error code 0, valid.
pub const INJECT_GP: u64 = 13 | 3 << 8 | 1 << 11 | 1 << 31;

/// Why the guest was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A physical interrupt, or NMI, is pending.
    Interrupt,
    /// PAUSE, if the filter let it out.
    Pause,
    /// CPUID.
    Cpuid,
    /// HLT.
    Halt,
    /// VMMCALL.
    Hypercall,
    /// IN or OUT.
    Port {
        /// Which.
        port: u16,
        /// IN.
        input: bool,
        /// Bytes.
        width: u8,
        /// INS or OUTS.
        string: bool,
    },
    /// RDMSR, or WRMSR.
    Msr {
        /// WRMSR.
        write: bool,
    },
    /// A triple fault.
    Shutdown,
    /// An access to memory that the VM does not have.
    NoMemory {
        /// Guest-physical address.
        address: u64,
    },
    /// The VMCB makes no sense to the CPU: a bug of the hypervisor.
    Invalid,
    /// Anything else: an instruction that the guest is not allowed.
    Other(u64),
}

impl Vmcb {
    /// All zeros.
    pub const fn new() -> Self {
        // SAFETY: integers and structures of integers: zero is a valid value of all.
        unsafe { core::mem::zeroed() }
    }

    /// Why the guest was left.
    pub const fn exit(&self) -> Exit {
        let info = self.exit_info_1;
        match self.exit_code {
            0x60 | 0x61 => Exit::Interrupt,
            0x72 => Exit::Cpuid,
            0x77 => Exit::Pause,
            0x78 => Exit::Halt,
            0x7b => Exit::Port {
                port: (info >> 16) as u16,
                input: info & 1 != 0,
                width: (info >> 4 & 7) as u8,
                string: info & 1 << 2 != 0,
            },
            0x7c => Exit::Msr { write: info & 1 != 0 },
            0x7f => Exit::Shutdown,
            0x81 => Exit::Hypercall,
            0x400 => Exit::NoMemory { address: self.exit_info_2 },
            u64::MAX => Exit::Invalid,
            code => Exit::Other(code),
        }
    }

    /// Goes on behind the instruction that was left at. Only for exits whose instruction has one encoding without prefixes, where
    /// the CPU does not say where the next one is.
    pub fn skip(&mut self) {
        let length = match self.exit() {
            Exit::Port { .. } => {
                self.rip = self.exit_info_2;
                return;
            }
            Exit::Cpuid | Exit::Pause | Exit::Msr { .. } => 2,
            Exit::Hypercall => 3,
            Exit::Halt => 1,
            _ => 0,
        };
        self.rip = if self.next_rip != 0 { self.next_rip } else { self.rip.wrapping_add(length) };
    }
}

impl Default for Vmcb {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_exit_says_which_and_how() {
        // OUT of 4 bytes to port 0x1b00: APM volume 2, figure 15-2.
        let mut vmcb = Vmcb { exit_code: 0x7b, exit_info_1: 0x1b00 << 16 | 1 << 6, exit_info_2: 0x1002, ..Vmcb::new() };
        assert_eq!(vmcb.exit(), Exit::Port { port: 0x1b00, input: false, width: 4, string: false });
        vmcb.skip();
        assert_eq!(vmcb.rip, 0x1002);
    }

    #[test]
    fn the_cpus_word_on_the_next_instruction_counts_first() {
        let mut vmcb = Vmcb { exit_code: 0x81, rip: 100, ..Vmcb::new() };
        vmcb.skip();
        assert_eq!(vmcb.rip, 103, "the length of vmmcall");
        vmcb.next_rip = 105;
        vmcb.skip();
        assert_eq!(vmcb.rip, 105);
    }
}
