//! The state a vCPU starts with: 64-bit mode from the first instruction.
//!
//! No firmware, no GDT, no IDT: KVM takes the hidden parts of the segment registers
//! as given, and a guest that only computes, touches its memory and writes ports never
//! loads one. Any exception is therefore a triple fault, which the VMM reports.

use std::fmt;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_RUNNABLE, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_cpuid_entry2, kvm_device_attr,
    kvm_dtable, kvm_fpu, kvm_mp_state, kvm_regs, kvm_segment, kvm_sregs,
};
use kvm_ioctls::{Kvm, VcpuFd};

use super::error::VmError;
use super::kind::KvmKind;
use super::layout;
use super::memory::{GuestMemory, OutOfRange};

/// The bit that is always one, and interrupts on, as a kernel mostly has them, though there is nothing here that sends any. Where
/// they are off, Bochs 2.7 keeps the host's own from ending the guest's turn on the CPU.
const RFLAGS: u64 = 1 << 1 | 1 << 9;

/// Privilege level the guest runs at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cpl {
    /// Kernel mode, where kernels take their locks. Native on hardware KVM only.
    Zero,
    /// User mode. Native on every kind of KVM; ports are opened by the TSS.
    Three,
}

impl Cpl {
    /// The level that runs natively and closest to a kernel: 0 on hardware KVM, 3 on software KVM.
    pub fn best_for(kind: KvmKind) -> Self {
        match kind {
            KvmKind::Hardware => Self::Zero,
            KvmKind::Software => Self::Three,
        }
    }

    /// The level as a number: 0 or 3.
    pub fn number(self) -> u8 {
        match self {
            Self::Zero => 0,
            Self::Three => 3,
        }
    }
}

impl fmt::Display for Cpl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}

// Control registers: PE, MP, ET, NE, WP, AM, PG; PAE, OSFXSR, OSXMMEXCPT; SCE, LME, LMA, NXE.
const CR0: u64 = 0x8005_0033;
const CR4: u64 = 0x620;
const EFER: u64 = 0xd01;

// Types of segment descriptors (Intel SDM vol. 3, 3.4.5.1 and 3.5).
const TYPE_CODE: u8 = 11; // execute, read, accessed
const TYPE_DATA: u8 = 3; // read, write, accessed
const TYPE_BUSY_TSS: u8 = 11;

/// `_IOW(KVMIO, 0xe1, struct kvm_device_attr)` of linux/kvm.h; kvm-ioctls has it on vCPUs for Arm only.
const KVM_SET_DEVICE_ATTR: libc::c_ulong = 0x4018_aee1;

const _: () = assert!(size_of::<kvm_device_attr>() == 0x18);

/// Writes the tables that all vCPUs share: page tables (one to one, 2 MiB pages, user
/// access) and the TSS.
pub(super) fn write_tables(memory: &GuestMemory) -> Result<(), OutOfRange> {
    for (address, word) in layout::page_tables(memory.len()) {
        memory.store(address, word)?;
    }
    // A zero bit in the bitmap opens its port. The rest of the TSS (stacks for
    // interrupts) is unused and stays zero.
    memory.write(layout::TSS + 0x66, &(layout::TSS_IO_BITMAP as u16).to_le_bytes())?;
    memory.write(layout::TSS + layout::TSS_LIMIT, &[0xff])
}

/// Segments and control registers for `vcpu`, on top of what KVM gave it.
fn sregs(mut sregs: kvm_sregs, vcpu: usize, cpl: Cpl) -> kvm_sregs {
    let (code_selector, data_selector) = match cpl {
        Cpl::Zero => (0x08, 0x10),
        Cpl::Three => (0x23, 0x1b),
    };
    let code = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: code_selector,
        type_: TYPE_CODE,
        present: 1,
        dpl: cpl.number(),
        db: 0,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment { selector: data_selector, type_: TYPE_DATA, db: 1, l: 0, ..code };
    sregs.cs = code;
    (sregs.ss, sregs.ds, sregs.es, sregs.fs) = (data, data, data, data);
    sregs.gs = kvm_segment { base: layout::vcpu_block(vcpu), ..data };
    sregs.tr =
        kvm_segment { base: layout::TSS, limit: layout::TSS_LIMIT as u32, type_: TYPE_BUSY_TSS, present: 1, ..Default::default() };
    sregs.ldt = kvm_segment { unusable: 1, ..Default::default() };
    (sregs.gdt, sregs.idt) = (kvm_dtable::default(), kvm_dtable::default());
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, layout::PML4, CR4, EFER);
    sregs
}

/// Sets every register of a new vCPU.
pub(super) fn set_up(fd: &VcpuFd, vcpu: usize, cpl: Cpl, entry: u64) -> Result<(), VmError> {
    let failed = |what| move |source| VmError::Vcpu { vcpu, what, source };
    let before = fd.get_sregs().map_err(failed("reading segment registers"))?;
    fd.set_sregs(&sregs(before, vcpu, cpl)).map_err(failed("setting segment registers"))?;
    fd.set_regs(&kvm_regs {
        rip: entry,
        rsp: layout::stack_top(vcpu),
        rdi: vcpu as u64,
        rsi: layout::BOOT_PAGE,
        rflags: RFLAGS,
        ..Default::default()
    })
    .map_err(failed("setting general registers"))?;
    fd.set_fpu(&kvm_fpu {
        fcw: 0x37f,    // as after FNINIT
        mxcsr: 0x1f80, // all SSE exceptions masked
        ..Default::default()
    })
    .map_err(failed("setting FPU registers"))
}

/// Offset of the spurious-interrupt vector register, and its value: enabled, vector 0xff (Intel SDM vol. 3, 11.9).
const APIC_SVR: usize = 0xf0;
const APIC_ENABLED: u32 = 0x1ff;

/// Has a vCPU with an in-kernel interrupt controller run from the start, not wait for INIT and SIPI, with its APIC enabled:
/// KVM delivers nothing to one that is not, kicks included.
pub(super) fn set_up_apic(fd: &VcpuFd, vcpu: usize) -> Result<(), VmError> {
    let failed = |what| move |source| VmError::Vcpu { vcpu, what, source };
    let mut apic = fd.get_lapic().map_err(failed("reading its APIC"))?;
    for (to, from) in apic.regs[APIC_SVR..].iter_mut().zip(APIC_ENABLED.to_le_bytes()) {
        *to = from as _;
    }
    fd.set_lapic(&apic).map_err(failed("enabling its APIC"))?;
    fd.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE }).map_err(failed("making it runnable"))
}

/// The CPUID leaves that this KVM can give a guest.
pub(super) fn supported_cpuid(kvm: &Kvm) -> Result<Vec<kvm_cpuid_entry2>, VmError> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map(|cpuid| cpuid.as_slice().to_vec())
        .map_err(|source| VmError::Vm { what: "asking for the supported CPUID", source })
}

/// Puts the APIC id, which is the vCPU's index here, where CPUID reports it.
pub(super) fn set_apic_id(entries: &mut [kvm_cpuid_entry2], vcpu: usize) {
    let id = vcpu as u32;
    for entry in entries {
        match entry.function {
            0x1 => entry.ebx = (entry.ebx & 0x00ff_ffff) | (id << 24),
            0xb | 0x1f => entry.edx = id,
            _ => {}
        }
    }
}

/// Gives a vCPU its CPUID. On software KVM only a guest in CPL 0 sees it: in CPL 3 `cpuid` runs
/// natively.
pub(super) fn set_cpuid(fd: &VcpuFd, vcpu: usize, entries: &[kvm_cpuid_entry2]) -> Result<(), VmError> {
    let cpuid = CpuId::from_entries(entries).map_err(|_| VmError::CpuidTooLong { entries: entries.len() })?;
    fd.set_cpuid2(&cpuid).map_err(|source| VmError::Vcpu { vcpu, what: "setting CPUID", source })
}

/// Makes the guest's TSC equal to the host's, so that ticks of both sides compare.
/// Returns false where this KVM cannot (before Linux 5.16, or the software kind).
pub(super) fn share_host_tsc(fd: &VcpuFd) -> bool {
    let offset: u64 = 0;
    let attribute = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: (&raw const offset) as u64,
        flags: 0,
    };
    // SAFETY: the ioctl reads one `kvm_device_attr` and the u64 that its `addr` points to; both live
    // until it returns, and it writes to neither.
    unsafe { libc::ioctl(fd.as_raw_fd(), KVM_SET_DEVICE_ATTR, &raw const attribute) == 0 }
}
