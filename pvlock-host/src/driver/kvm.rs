//! vCPUs that run in KVM: decodes the doorbell out of the exits of `kvm-ioctls`.
//!
//! Works on PIO, MMIO and MSR exits. The vCPU's thread sleeps in user space, where an in-kernel interrupt controller cannot
//! see it: call [`Driver::interrupt`] when you inject an interrupt, or let only waiters with interrupts off halt this way.

use super::kicker::Kicker;
use super::{Driver, Outcome};
use crate::GuestMemory;
use kvm_ioctls::{VcpuExit, VmFd};
use pvlock_hypercalls::{Access, Transport};
use pvlock_protocol::VcpuId;
use std::io;
use std::sync::Arc;

impl<M: GuestMemory> Driver<M> {
    /// Handles an exit of `vcpu` if it is a doorbell at `transport`, sleeping if the engine says so, and else hands it back.
    pub fn exit<'a>(&self, transport: Transport, vcpu: VcpuId, exit: VcpuExit<'a>) -> Result<Outcome, VcpuExit<'a>> {
        match (transport, exit) {
            (Transport::Pio(pio), VcpuExit::IoOut(port, data)) => match pio.decode_out(port, data) {
                Some(access) => Ok(self.access(vcpu, access, drop)),
                None => Err(VcpuExit::IoOut(port, data)),
            },
            (Transport::Pio(pio), VcpuExit::IoIn(port, data)) => match pio.decode_in(port, data) {
                Some(access) => Ok(self.read(vcpu, access, data)),
                None => Err(VcpuExit::IoIn(port, data)),
            },
            (Transport::Mmio(mmio), VcpuExit::MmioWrite(address, data)) => match mmio.decode_write(address, data) {
                Some(access) => Ok(self.access(vcpu, access, drop)),
                None => Err(VcpuExit::MmioWrite(address, data)),
            },
            (Transport::Mmio(mmio), VcpuExit::MmioRead(address, data)) => match mmio.decode_read(address, data) {
                Some(access) => Ok(self.read(vcpu, access, data)),
                None => Err(VcpuExit::MmioRead(address, data)),
            },
            (Transport::Msr(msr), VcpuExit::X86Wrmsr(exit)) => match msr.decode_write(exit.index, exit.data) {
                Some(access) => {
                    *exit.error = 0;
                    Ok(self.access(vcpu, access, drop))
                }
                None => Err(VcpuExit::X86Wrmsr(exit)),
            },
            (Transport::Msr(msr), VcpuExit::X86Rdmsr(exit)) => match msr.decode_read(exit.index) {
                Some(access) => {
                    *exit.error = 0;
                    Ok(self.access(vcpu, access, |word| *exit.data = word.into()))
                }
                None => Err(VcpuExit::X86Rdmsr(exit)),
            },
            (_, exit) => Err(exit),
        }
    }

    fn read(&self, vcpu: VcpuId, access: Access, data: &mut [u8]) -> Outcome {
        // What a read of another width gets: not 0, which would say Ok.
        data.fill(0xff);
        self.access(vcpu, access, |word| {
            for (byte, answer) in data.iter_mut().zip(word.to_le_bytes()) {
                *byte = answer;
            }
        })
    }
}

impl<M: GuestMemory + 'static> Driver<M> {
    /// Kicks at `transport` reach the engine through eventfds and a thread of the driver's from now on, without an exit to user
    /// space: KVM signals an eventfd for each vCPU when its KICK word is written. Call it before the guest runs. Nothing
    /// changes for the guest; [`Driver::shut_down`] and dropping the driver end the thread.
    ///
    /// Right where an exit to user space costs the kicker more than the thread's CPU time costs the machine: the kick arrives
    /// later, by one more wake-up. Kicks are not limited then, see `Policy::limits`; those that come together are one.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::Unsupported`] if `transport` is neither port nor memory-mapped I/O, [`io::ErrorKind::AlreadyExists`] the
    /// second time, or the kernel's.
    pub fn kick_by_eventfd(&self, transport: Transport, vm: &VmFd) -> io::Result<()> {
        let mut kicker = self.kicker.lock();
        if kicker.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        *kicker = Some(Kicker::start(Arc::clone(&self.inner), transport, vm)?);
        Ok(())
    }
}
