//! Into the guest and out again.
//!
//! Follows: AMD64 APM volume 2, 15.5 "VMRUN Instruction", 15.13 "Interrupt and Local APIC Support", 15.17 "Global Interrupt Flag".

use crate::boot::MAX_CPUS;
use crate::cpu;
use core::arch::naked_asm;
use core::mem::offset_of;
use pvlock_hv_testbed::vmcb::Vmcb;
use x86::msr;

const VM_HSAVE_PA: u32 = 0xc001_0117;

/// The registers that VMRUN leaves alone.
#[derive(Debug)]
#[repr(C, align(16))]
pub(crate) struct Registers {
    pub(crate) rbx: u64,
    pub(crate) rcx: u64,
    pub(crate) rdx: u64,
    pub(crate) rsi: u64,
    pub(crate) rdi: u64,
    rbp: u64,
    r8: [u64; 8],
    /// As FXSAVE keeps the FPU and SSE.
    fx: [u8; 512],
}

impl Registers {
    /// A new CPU's: zeros, and the FPU as after FNINIT, with all SSE exceptions masked.
    pub(crate) fn new() -> Self {
        let mut fx = [0; 512];
        fx[..2].copy_from_slice(&0x037f_u16.to_le_bytes());
        fx[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        Self { rbx: 0, rcx: 0, rdx: 0, rsi: 0, rdi: 0, rbp: 0, r8: [0; 8], fx }
    }
}

#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Where VMRUN keeps the host's state.
static HOST_SAVE: [Page; MAX_CPUS] = [const { Page([0; 4096]) }; MAX_CPUS];
/// Where VMSAVE keeps the rest of it: gs, above all.
static mut HOST: [Vmcb; MAX_CPUS] = [const { Vmcb::new() }; MAX_CPUS];

/// Turns SVM on, on this CPU.
pub(crate) fn enable() {
    let index = cpu::index();
    // SAFETY: EFER.SVME was set at boot; the pages are this CPU's, and used for nothing else.
    unsafe {
        msr::wrmsr(VM_HSAVE_PA, (&raw const HOST_SAVE[index]).expose_provenance() as u64);
        core::arch::asm!("vmsave rax", in("rax") (&raw mut HOST[index]).expose_provenance());
    }
}

/// Runs the guest until it exits, then takes pending interrupts.
///
/// # Safety
///
/// The VMCB is one that keeps the guest in its own memory: nested paging, and all instructions intercepted that reach beyond it.
pub(crate) unsafe fn enter(vmcb: &mut Vmcb, registers: &mut Registers) {
    // SAFETY: the caller's contract; the host's block was filled in by `enable` on this CPU.
    unsafe { switch(registers, vmcb, &raw const HOST[cpu::index()]) }
}

macro_rules! field {
    ($name:ident) => {
        offset_of!(Registers, $name)
    };
}

/// Runs the guest until its next exit. Physical addresses are virtual ones here.
///
/// # Safety
///
/// EFER.SVME is set, the three pages are this CPU's, and `vmcb` describes a guest whose memory is all its own.
// SAFETY: saves and restores what its calling convention asks for, and the guest's registers go to and from `registers`.
#[unsafe(naked)]
unsafe extern "sysv64" fn switch(registers: *mut Registers, vmcb: *mut Vmcb, host: *const Vmcb) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdx",
        "push rdi",
        "mov rax, rsi",
        "fxrstor64 [rdi + {fx}]",
        // From here on no interrupt comes before the guest runs; one that is pending then leaves it at once.
        "clgi",
        "sti",
        "mov rbx, [rdi + {rbx}]",
        "mov rcx, [rdi + {rcx}]",
        "mov rdx, [rdi + {rdx}]",
        "mov rsi, [rdi + {rsi}]",
        "mov rbp, [rdi + {rbp}]",
        "mov r8, [rdi + {r8}]",
        "mov r9, [rdi + {r8} + 8]",
        "mov r10, [rdi + {r8} + 16]",
        "mov r11, [rdi + {r8} + 24]",
        "mov r12, [rdi + {r8} + 32]",
        "mov r13, [rdi + {r8} + 40]",
        "mov r14, [rdi + {r8} + 48]",
        "mov r15, [rdi + {r8} + 56]",
        "mov rdi, [rdi + {rdi}]",
        "vmload rax",
        "vmrun rax",
        "vmsave rax",
        // rax and rsp are the host's again.
        "xchg rdi, [rsp]",
        "mov [rdi + {rbx}], rbx",
        "mov [rdi + {rcx}], rcx",
        "mov [rdi + {rdx}], rdx",
        "mov [rdi + {rsi}], rsi",
        "mov [rdi + {rbp}], rbp",
        "mov [rdi + {r8}], r8",
        "mov [rdi + {r8} + 8], r9",
        "mov [rdi + {r8} + 16], r10",
        "mov [rdi + {r8} + 24], r11",
        "mov [rdi + {r8} + 32], r12",
        "mov [rdi + {r8} + 40], r13",
        "mov [rdi + {r8} + 48], r14",
        "mov [rdi + {r8} + 56], r15",
        "fxsave64 [rdi + {fx}]",
        "pop rcx",
        "mov [rdi + {rdi}], rcx",
        "pop rax",
        "vmload rax",
        // Pending interrupts are taken here, with gs and stack in place.
        "stgi",
        "nop",
        "cli",
        "cld",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
        rbx = const field!(rbx),
        rcx = const field!(rcx),
        rdx = const field!(rdx),
        rsi = const field!(rsi),
        rdi = const field!(rdi),
        rbp = const field!(rbp),
        r8 = const field!(r8),
        fx = const field!(fx),
    )
}
