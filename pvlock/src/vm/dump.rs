//! What every vCPU was doing: registers for people.

use std::fmt;

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::counters::ExitKind;

/// Registers of a vCPU outside of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Registers {
    /// General registers, instruction pointer and flags.
    pub general: kvm_regs,
    /// Segment and control registers.
    pub special: kvm_sregs,
}

impl Registers {
    /// `None` when KVM will not say.
    pub(super) fn read(fd: &VcpuFd) -> Option<Self> {
        Some(Self { general: fd.get_regs().ok()?, special: fd.get_sregs().ok()? })
    }
}

impl fmt::Display for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (r, s) = (&self.general, &self.special);
        writeln!(f, "  rip {:016x} rsp {:016x} rbp {:016x} rflags {:08x}", r.rip, r.rsp, r.rbp, r.rflags)?;
        writeln!(f, "  rax {:016x} rbx {:016x} rcx {:016x} rdx {:016x}", r.rax, r.rbx, r.rcx, r.rdx)?;
        writeln!(f, "  rsi {:016x} rdi {:016x} r8  {:016x} r9  {:016x}", r.rsi, r.rdi, r.r8, r.r9)?;
        writeln!(f, "  r10 {:016x} r11 {:016x} r12 {:016x} r13 {:016x}", r.r10, r.r11, r.r12, r.r13)?;
        writeln!(f, "  r14 {:016x} r15 {:016x} cr2 {:016x} cr3 {:016x}", r.r14, r.r15, s.cr2, s.cr3)?;
        write!(
            f,
            "  cpl {} cs {:02x} ss {:02x} fs {:x} gs {:x} cr0 {:x} cr4 {:x} efer {:x}",
            s.cs.dpl, s.cs.selector, s.ss.selector, s.fs.base, s.gs.base, s.cr0, s.cr4, s.efer
        )
    }
}

/// Where a vCPU's thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum VcpuState {
    /// Its thread has not entered the guest yet.
    Starting,
    /// In the guest, or on the way in or out.
    Guest,
    /// Out of the guest, in the caller's handler (a parked vCPU is here).
    Handler,
    /// Its thread is done.
    Ended,
}

impl VcpuState {
    pub(super) fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Starting,
            1 => Self::Guest,
            2 => Self::Handler,
            _ => Self::Ended,
        }
    }
}

/// The last exit of a vCPU that the caller's handler saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastExit {
    /// Its kind.
    pub kind: ExitKind,
    /// Port or, cut to 32 bits, address or MSR; 0 for other kinds.
    pub place: u32,
}

impl fmt::Display for LastExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:#x}", self.kind.name(), self.place)
    }
}

/// State of one vCPU at one moment.
#[derive(Clone, Debug)]
pub struct VcpuDump {
    /// Index of the vCPU.
    pub vcpu: usize,
    /// Where its thread was.
    pub state: VcpuState,
    /// Its last exit to the handler.
    pub last_exit: Option<LastExit>,
    /// Its registers. Those of an ended vCPU are its last ones; `None` when the thread did not
    /// answer in time because the handler keeps it.
    pub registers: Option<Registers>,
}

impl fmt::Display for VcpuDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {}: {:?}", self.vcpu, self.state)?;
        match self.last_exit {
            Some(exit) => writeln!(f, ", last exit {exit}")?,
            None => writeln!(f, ", no exit yet")?,
        }
        match &self.registers {
            Some(registers) => write!(f, "{registers}"),
            None => write!(f, "  (no registers: its thread did not answer)"),
        }
    }
}
