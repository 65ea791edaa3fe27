//! What can go wrong between opening KVM and the first guest instruction.

use std::io;

use super::image::ImageError;
use super::layout::{MAX_RAM, MAX_VCPUS, MIN_RAM};
use super::memory::OutOfRange;

/// Why a VM could not be made. What goes wrong later is a [`VmFailure`](super::VmFailure).
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// No vCPUs, or more than the layout has room for.
    #[error("a VM can have 1 to {MAX_VCPUS} vCPUs, not {0}")]
    VcpuCount(usize),
    /// More vCPUs than this KVM allows.
    #[error("this KVM allows {max} vCPUs in a VM, {asked} were asked for: lower --vcpus or --overcommit")]
    TooManyVcpus {
        /// What was asked for.
        asked: usize,
        /// What KVM allows.
        max: usize,
    },
    /// RAM size outside what the layout can map.
    #[error("guest RAM must be {MIN_RAM} to {MAX_RAM} bytes, not {0}")]
    RamSize(u64),
    /// The host has no memory for the guest.
    #[error("cannot get {bytes} bytes of guest RAM: {source}")]
    Memory {
        /// What was asked for.
        bytes: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The guest image cannot be loaded.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A table or argument does not fit in guest RAM.
    #[error(transparent)]
    Range(#[from] OutOfRange),
    /// An ioctl on the VM failed.
    #[error("{what} failed: {source}")]
    Vm {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: kvm_ioctls::Error,
    },
    /// An ioctl on a vCPU failed.
    #[error("vCPU {vcpu}: {what} failed: {source}")]
    Vcpu {
        /// Which vCPU.
        vcpu: usize,
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: kvm_ioctls::Error,
    },
    /// The caller's CPUID hook added more leaves than KVM takes.
    #[error("{entries} CPUID leaves are more than KVM takes: add fewer in the CPUID hook")]
    CpuidTooLong {
        /// Number of leaves.
        entries: usize,
    },
    /// The operating system refused a thread, a signal handler or a mapping.
    #[error("{what} failed: {source}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}
