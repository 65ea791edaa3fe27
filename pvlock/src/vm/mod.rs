//! A small VMM on `/dev/kvm`: enough to run the freestanding guest program on up to 64
//! vCPUs, on hardware KVM and on software KVM, and to say clearly what went wrong.
//!
//! ```no_run
//! use pvlock::vm::{self, Cpl, KvmKind, Next, Vm, VmConfig};
//!
//! let kvm = vm::open()?;
//! let config = VmConfig { vcpus: 4, ram_bytes: 64 << 20, cpl: Cpl::best_for(KvmKind::detect()), irqchip: false };
//! let vm = Vm::new(&kvm, &config, pvlock::GUEST_IMAGE, |_vcpu, _cpuid| {})?;
//! let outcome = vm.start(|_vcpu, _exit| Next::Unhandled)?.join()?;
//! println!("{:?}", outcome.ends);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! There are no devices, and no interrupt controller unless one is asked for. What a port means is the caller's
//! business, except for `EXIT` and `PANIC` of [`pvlock_guest_image::port`].

mod counters;
mod cpu;
mod dump;
mod error;
mod image;
mod kick;
mod kind;
mod memory;
mod pv_unhalt;
mod running;
mod vcpu;

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use crossbeam_utils::CachePadded;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use pvlock_guest_image::{BootPage, VcpuBlock, boot};

pub use counters::{ExitCounts, ExitKind};
pub use cpu::Cpl;
pub use dump::{LastExit, Registers, VcpuDump, VcpuState};
pub use error::VmError;
pub use image::ImageError;
pub use kind::{DEVICE, KvmError, KvmKind, open, open_at};
pub use kvm_bindings::kvm_cpuid_entry2;
pub use kvm_ioctls::VcpuExit;
pub use memory::{GuestMemory, OutOfRange};
pub use pv_unhalt::{NoPvUnhalt, check_pv_unhalt};
pub(crate) use pv_unhalt::{PV_UNHALT, kvm_features};
pub use pvlock_guest_image::layout;
pub use running::{DUMP_LIMIT, RunningVm, STOP_LIMIT, Stopper, VmFailure, VmOutcome};
pub use vcpu::{Next, VcpuEnd, VcpuError};

use kick::ImmediateExit;
use running::Shared;
use vcpu::Slot;

/// What a VM looks like.
#[derive(Clone, Copy, Debug)]
pub struct VmConfig {
    /// Number of vCPUs, 1 to [`layout::MAX_VCPUS`].
    pub vcpus: usize,
    /// Guest RAM in bytes, [`layout::MIN_RAM`] to [`layout::MAX_RAM`]; rounded up to 2 MiB.
    pub ram_bytes: u64,
    /// Privilege level of the guest.
    pub cpl: Cpl,
    /// Whether KVM has an interrupt controller for it. Then `hlt` sleeps in the kernel until an interrupt or `KVM_HC_KICK_CPU`;
    /// without one it is an exit.
    pub irqchip: bool,
}

/// A VM that is ready to start: memory filled, vCPUs set up, no thread yet.
#[derive(Debug)]
pub struct Vm {
    // Dropped before the memory that its slots map.
    fd: VmFd,
    fds: Vec<VcpuFd>,
    memory: Arc<GuestMemory>,
    cpl: Cpl,
    entry: u64,
    shares_host_tsc: bool,
}

impl Vm {
    /// Makes a VM and loads `image` into it.
    ///
    /// `cpuid` is called for each vCPU with the CPUID leaves that KVM supports (APIC id filled
    /// in) and may change, add or remove some, such as hypervisor leaves from 0x4000_0000.
    /// Software KVM does not show them to a guest in CPL 3: there `cpuid` runs natively and gives
    /// the host's leaves, so such a guest must learn about its host from the boot page.
    ///
    /// # Errors
    /// Any [`VmError`].
    pub fn new<C>(kvm: &Kvm, config: &VmConfig, image: &[u8], mut cpuid: C) -> Result<Self, VmError>
    where
        C: FnMut(usize, &mut Vec<kvm_cpuid_entry2>),
    {
        let VmConfig { vcpus, ram_bytes, cpl, irqchip } = *config;
        if !(1..=layout::MAX_VCPUS).contains(&vcpus) {
            return Err(VmError::VcpuCount(vcpus));
        }
        let max = kvm.get_max_vcpus();
        if vcpus > max {
            return Err(VmError::TooManyVcpus { asked: vcpus, max });
        }
        if !(layout::MIN_RAM..=layout::MAX_RAM).contains(&ram_bytes) {
            return Err(VmError::RamSize(ram_bytes));
        }
        let memory = GuestMemory::new(ram_bytes).map_err(|source| VmError::Memory { bytes: ram_bytes, source })?;
        let memory = Arc::new(memory);
        let entry = image::load(&memory, image)?;
        cpu::write_tables(&memory)?;

        let failed = |what| move |source| VmError::Vm { what, source };
        let fd = kvm.create_vm().map_err(failed("creating a VM"))?;
        let host = memory.host_ptr(0, memory.len()).ok_or(OutOfRange { address: 0, len: memory.len() })?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: memory.len(),
            userspace_addr: host.as_ptr() as u64,
        };
        // SAFETY: the region is exactly our mapping of guest RAM. It outlives the VM: `Vm` and each
        // vCPU thread hold an `Arc` of it, and a thread left behind keeps both.
        unsafe { fd.set_user_memory_region(region) }.map_err(failed("giving the VM its memory"))?;

        if irqchip {
            fd.create_irq_chip().map_err(failed("creating the interrupt controllers"))?;
        }
        let leaves = cpu::supported_cpuid(kvm)?;
        let mut fds = Vec::with_capacity(vcpus);
        let mut shares_host_tsc = true;
        for vcpu in 0..vcpus {
            let vcpu_fd = fd.create_vcpu(vcpu as u64).map_err(|source| VmError::Vcpu { vcpu, what: "creating it", source })?;
            let mut leaves = leaves.clone();
            cpu::set_apic_id(&mut leaves, vcpu);
            cpuid(vcpu, &mut leaves);
            cpu::set_cpuid(&vcpu_fd, vcpu, &leaves)?;
            cpu::set_up(&vcpu_fd, vcpu, cpl, entry)?;
            if irqchip {
                cpu::set_up_apic(&vcpu_fd, vcpu)?;
            }
            shares_host_tsc &= cpu::share_host_tsc(&vcpu_fd);
            fds.push(vcpu_fd);
        }
        let vm = Self { fd, fds, memory, cpl, entry, shares_host_tsc };
        vm.write_boot_data(cpl)?;
        Ok(vm)
    }

    fn write_boot_data(&self, cpl: Cpl) -> Result<(), OutOfRange> {
        let memory = &self.memory;
        let at = |offset: usize| layout::BOOT_PAGE + offset as u64;
        let vcpus = self.fds.len();
        let tsc_khz = self.fds.first().and_then(|fd| fd.get_tsc_khz().ok()).unwrap_or(0);
        let shared = self.shared_area();
        memory.store(at(offset_of!(BootPage, magic)), boot::MAGIC)?;
        memory.write(at(offset_of!(BootPage, version)), &boot::VERSION.to_le_bytes())?;
        memory.write(at(offset_of!(BootPage, vcpus)), &(vcpus as u32).to_le_bytes())?;
        memory.write(at(offset_of!(BootPage, cpl)), &u32::from(cpl.number()).to_le_bytes())?;
        memory.store(at(offset_of!(BootPage, ram_bytes)), memory.len())?;
        memory.store(at(offset_of!(BootPage, shared_start)), shared.start)?;
        memory.store(at(offset_of!(BootPage, shared_bytes)), shared.end - shared.start)?;
        memory.store(at(offset_of!(BootPage, tsc_hz)), u64::from(tsc_khz) * 1000)?;
        for vcpu in 0..vcpus {
            let block = layout::vcpu_block(vcpu);
            memory.store(block + offset_of!(VcpuBlock, self_address) as u64, block)?;
            memory.store(block + offset_of!(VcpuBlock, vcpu) as u64, vcpu as u64)?;
        }
        Ok(())
    }

    /// Guest RAM; keep a clone to read results after the VM ended.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The VM as KVM knows it, to register eventfds with.
    pub fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// The part of guest RAM that the workload may use as it likes.
    pub fn shared_area(&self) -> Range<u64> {
        layout::SHARED..self.memory.len()
    }

    /// Whether KVM agreed to give the guest the host's TSC. On software KVM a guest in CPL 3 reads
    /// the host's TSC anyway.
    pub fn shares_host_tsc(&self) -> bool {
        self.shares_host_tsc
    }

    /// Writes word `index` of [`BootPage::args`].
    ///
    /// # Errors
    /// [`OutOfRange`] when `index` is not below [`boot::ARGS`].
    pub fn set_arg(&self, index: usize, value: u64) -> Result<(), OutOfRange> {
        self.memory.store(arg_address(index)?, value)
    }

    /// Starts one thread for each vCPU.
    ///
    /// The threads call `handler` with the vCPU's index for each exit that means something to a
    /// caller: port and MMIO accesses, `hlt`, forwarded hypercalls, filtered MSRs. The data of a
    /// read is the handler's to fill in. A handler that sleeps must come back when the VM stops:
    /// the thread gets a signal (EINTR), again every 20 ms while somebody waits for the end.
    ///
    /// # Errors
    /// [`VmError::Host`] when the host refuses a thread or the signal handler.
    pub fn start<H>(self, handler: H) -> Result<RunningVm, VmError>
    where
        H: Fn(usize, VcpuExit<'_>) -> Next + Send + Sync + 'static,
    {
        let host = |what| move |source| VmError::Host { what, source };
        kick::install_handler().map_err(host("installing the signal handler"))?;
        let mut slots = Vec::with_capacity(self.fds.len());
        for fd in &self.fds {
            let immediate_exit = ImmediateExit::map(fd).map_err(host("mapping a vCPU"))?;
            slots.push(CachePadded::new(Slot::new(immediate_exit)));
        }
        let shared = Arc::new(Shared::new(self.memory, slots, (self.cpl, self.entry)));
        RunningVm::start(self.fd, shared, self.fds, handler)
    }
}

/// Guest-physical address of word `index` of [`BootPage::args`].
///
/// # Errors
/// [`OutOfRange`] when `index` is not below [`boot::ARGS`].
pub fn arg_address(index: usize) -> Result<u64, OutOfRange> {
    let address = layout::BOOT_PAGE + offset_of!(BootPage, args) as u64 + index as u64 * 8;
    if index < boot::ARGS { Ok(address) } else { Err(OutOfRange { address, len: 8 }) }
}
