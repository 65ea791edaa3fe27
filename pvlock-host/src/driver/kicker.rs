//! Kicks through eventfds: KVM signals one when a vCPU's KICK word is written, and a thread carries the kick to the engine.

use super::{Inner, Machine};
use crate::GuestMemory;
use kvm_ioctls::{IoEventAddress, VmFd};
use pvlock_hypercalls::{Doorbell, Transport};
use pvlock_protocol::VcpuId;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The eventfd that ends the thread, among those of the vCPUs.
const STOP: u64 = u64::MAX;
/// Eventfds read in one go.
const EVENTS: usize = 64;

/// The thread, while it runs.
pub(super) struct Kicker {
    stop: EventFd,
    thread: JoinHandle<()>,
}

impl Kicker {
    pub(super) fn start<M: GuestMemory + 'static>(inner: Arc<Inner<M>>, transport: Transport, vm: &VmFd) -> io::Result<Self> {
        let address = match transport {
            Transport::Pio(pio) => IoEventAddress::Pio(pio.port.into()),
            Transport::Mmio(mmio) => IoEventAddress::Mmio(mmio.address),
            Transport::Msr(_) | Transport::Vmcall => return Err(io::ErrorKind::Unsupported.into()),
        };
        let epoll = Epoll::new()?;
        let watched = |data| {
            let event = EventFd::new(EFD_NONBLOCK)?;
            epoll.ctl(ControlOperation::Add, std::os::fd::AsRawFd::as_raw_fd(&event), EpollEvent::new(EventSet::IN, data))?;
            io::Result::Ok(event)
        };
        let stop = watched(STOP)?;
        let vcpus = || inner.engine.vcpus();
        let kicks: Arc<[_]> = vcpus().map(|vcpu| watched(vcpu.index() as u64)).collect::<io::Result<_>>()?;
        let run = {
            let (inner, kicks) = (Arc::clone(&inner), Arc::clone(&kicks));
            move || run(&inner, &epoll, &kicks)
        };
        let thread = std::thread::Builder::new().name("pvlock-kicker".into()).spawn(run)?;
        let kicker = Self { stop, thread };
        // Of four bytes: a KICK word of another width is as malformed as without eventfds.
        let word = |vcpu| -> u32 { Doorbell::Kick(vcpu).encode() };
        for (vcpu, kick) in vcpus().zip(&*kicks) {
            if let Err(error) = vm.register_ioevent(kick, &address, word(vcpu)) {
                // Or KVM would go on signalling those that nobody looks at.
                for (vcpu, kick) in vcpus().zip(&*kicks).take(vcpu.index()) {
                    let _ = vm.unregister_ioevent(kick, &address, word(vcpu));
                }
                kicker.end();
                return Err(io::Error::from_raw_os_error(error.errno()));
            }
        }
        Ok(kicker)
    }

    /// Ends the thread, at once. Kicks are lost from then on: nobody may halt any more.
    pub(super) fn end(self) {
        // Fails only for a counter that is full, which is as good.
        let _ = self.stop.write(1);
        let _ = self.thread.join();
    }
}

fn run<M: GuestMemory>(inner: &Inner<M>, epoll: &Epoll, kicks: &[EventFd]) {
    let mut events = [EpollEvent::default(); EVENTS];
    loop {
        // Fails for signals, and mistakes of this file.
        let ready = epoll.wait(-1, &mut events).unwrap_or(0);
        for event in events.iter().take(ready) {
            if event.data() == STOP {
                return;
            }
            let vcpu = event.data() as usize;
            // Read before the kick is delivered: one that comes in between signals anew.
            if let (Some(kick), Some(vcpu)) = (kicks.get(vcpu), VcpuId::new(vcpu))
                && kick.read().is_ok()
            {
                inner.engine.kicked(vcpu, &Machine(inner));
            }
        }
    }
}
