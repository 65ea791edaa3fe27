//! Exits by kind, counted for each vCPU.

use std::sync::atomic::{AtomicU64, Ordering};

use kvm_ioctls::VcpuExit;

/// Why a vCPU came out of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitKind {
    /// `in` from a port.
    IoIn,
    /// `out` to a port.
    IoOut,
    /// Read from an address without memory.
    MmioRead,
    /// Write to an address without memory.
    MmioWrite,
    /// `hlt`, without an in-kernel interrupt controller.
    Hlt,
    /// A hypercall that KVM forwards.
    Hypercall,
    /// Read or write of a filtered MSR.
    Msr,
    /// A signal: somebody kicked the vCPU, or the process got a signal.
    Interrupted,
    /// Triple fault.
    Shutdown,
    /// KVM could not go on.
    InternalError,
    /// Anything else.
    Other,
}

impl ExitKind {
    /// All kinds, in the order of their counters.
    pub const ALL: [Self; 11] = [
        Self::IoIn,
        Self::IoOut,
        Self::MmioRead,
        Self::MmioWrite,
        Self::Hlt,
        Self::Hypercall,
        Self::Msr,
        Self::Interrupted,
        Self::Shutdown,
        Self::InternalError,
        Self::Other,
    ];

    /// Short name for tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::IoIn => "io_in",
            Self::IoOut => "io_out",
            Self::MmioRead => "mmio_read",
            Self::MmioWrite => "mmio_write",
            Self::Hlt => "hlt",
            Self::Hypercall => "hypercall",
            Self::Msr => "msr",
            Self::Interrupted => "interrupted",
            Self::Shutdown => "shutdown",
            Self::InternalError => "internal_error",
            Self::Other => "other",
        }
    }

    pub(super) fn of(exit: &VcpuExit<'_>) -> Self {
        match exit {
            VcpuExit::IoIn(..) => Self::IoIn,
            VcpuExit::IoOut(..) => Self::IoOut,
            VcpuExit::MmioRead(..) => Self::MmioRead,
            VcpuExit::MmioWrite(..) => Self::MmioWrite,
            VcpuExit::Hlt => Self::Hlt,
            VcpuExit::Hypercall(_) => Self::Hypercall,
            VcpuExit::X86Rdmsr(_) | VcpuExit::X86Wrmsr(_) => Self::Msr,
            VcpuExit::Intr => Self::Interrupted,
            VcpuExit::Shutdown => Self::Shutdown,
            VcpuExit::InternalError => Self::InternalError,
            _ => Self::Other,
        }
    }
}

/// Live counters of one vCPU; only its thread writes them.
#[derive(Debug, Default)]
pub(super) struct ExitCounters([AtomicU64; ExitKind::ALL.len()]);

impl ExitCounters {
    pub(super) fn count(&self, kind: ExitKind) {
        let counter = &self.0[kind as usize];
        // One writer: a plain load and store are enough, and cheaper than a read-modify-write.
        counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> ExitCounts {
        ExitCounts(std::array::from_fn(|at| self.0[at].load(Ordering::Relaxed)))
    }
}

/// Exits by kind, as read at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitCounts([u64; ExitKind::ALL.len()]);

impl ExitCounts {
    /// Number of exits of one kind.
    pub fn get(&self, kind: ExitKind) -> u64 {
        self.0[kind as usize]
    }

    /// All kinds with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (ExitKind, u64)> + '_ {
        ExitKind::ALL.into_iter().map(|kind| (kind, self.get(kind)))
    }

    /// Number of exits of all kinds.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds the counts of another vCPU.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }
}
