//! The bare machine as pvlock's platform: what a kernel author has to write.

use crate::{entry, pv_unhalt};
use core::arch::x86_64::_rdtsc;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use pvlock_guest::hypercalls::{Doorbell, Host, NativeCpuid, NoHost, Pio, Ring, Transport, discover};
use pvlock_guest::protocol::{PAGE_SIZE, SlotIndex, VcpuId};
use pvlock_guest::{Guest, GuestRef, KickKind, Platform, Word};
use pvlock_guest_image::job::{HaltBy, Protected};
use pvlock_guest_image::{BootPage, CountPauses, Job, job, pause_loop};

static GUEST: Guest<{ job::MAX_VCPUS }> = Guest::new();
/// The host's doorbell port; 0 before registration or without a host.
static PORT: AtomicU32 = AtomicU32::new(0);
/// The job's pause window; 0 before registration or without a host.
static PAUSE_WINDOW: AtomicU64 = AtomicU64::new(0);
/// Word of a vCPU's block that says 1 + its number once it takes part.
const ONLINE_WORD: usize = 1;
/// Word of a vCPU's block that counts its PAUSEs.
const PAUSES_WORD: usize = 2;

pub(crate) enum Machine {}

impl Platform for Machine {
    // Both back-ends keep to it: doorbells have more latches, KVM has this one.
    const KICK: KickKind = KickKind::VcpuLatch;

    #[inline]
    fn guest() -> GuestRef<'static> {
        GUEST.as_ref()
    }

    #[inline]
    fn current() -> Option<VcpuId> {
        VcpuId::decode(entry::vcpu_block().words[ONLINE_WORD].load(Ordering::Relaxed))
    }

    #[inline]
    fn ticks() -> u64 {
        // SAFETY: every x86-64 processor has a time-stamp counter, and the VMM leaves CR4.TSD clear.
        unsafe { _rdtsc() }
    }

    #[inline]
    fn relax() {
        Protected::advance(&entry::vcpu_block().words[PAUSES_WORD]);
        core::hint::spin_loop();
    }

    #[inline]
    fn wait_while(word: &Word, value: u64, deadline: u64) -> u64 {
        let window = PAUSE_WINDOW.load(Ordering::Relaxed);
        pause_loop::wait_while::<Self>(word, value, deadline, window, || ring(Doorbell::PauseLoop))
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        if pv_unhalt::is_enabled() { pv_unhalt::halt() } else { ring(Doorbell::Halt { slot, interrupts }) }
    }

    fn kick(vcpu: VcpuId) {
        if pv_unhalt::is_enabled() {
            pv_unhalt::kick(vcpu);
        } else if let Some(pio) = doorbell() {
            GUEST.as_ref().kick(&pio, vcpu);
        }
    }
}

impl CountPauses for Machine {
    #[inline]
    fn pauses() -> u64 {
        entry::vcpu_block().words[PAUSES_WORD].load(Ordering::Relaxed)
    }
}

fn doorbell() -> Option<impl Ring> {
    match PORT.load(Ordering::Relaxed) {
        0 => None,
        // SAFETY: the VMM decodes this port, which it named in CPUID or in the job, and opens every port to the guest.
        port => Some(unsafe { Pio { port: port as u16 }.doorbell() }),
    }
}

fn ring(doorbell_word: Doorbell) {
    if let Some(pio) = doorbell() {
        pio.ring(doorbell_word.encode());
    }
}

/// Finds the host and registers, or has KVM itself be the host; returns the status. Run by vCPU 0 before any other uses a lock.
///
/// Where CPUID shows the VMM's leaves, the host is found there. In CPL 3 on software KVM it shows those of the machine below
/// instead; so the VMM also writes the port into the job, and only a guest in CPL 0 insists that both agree.
pub(crate) fn register(boot: &BootPage, job: &Job) -> u32 {
    let guest = GUEST.as_ref();
    let first = VcpuId::new(0);
    if job.halt.load(Ordering::Relaxed) == HaltBy::PvUnhalt as u32 {
        pv_unhalt::enable(boot.cpl);
        // There is no host to write it.
        guest.region().header.spin_budget.store(job.spin_budget.load(Ordering::Relaxed), Ordering::Relaxed);
        guest.switch_over(first);
        return 0;
    }
    let port = job.port.load(Ordering::Relaxed);
    if boot.cpl == 0 {
        let found = match discover(&NativeCpuid) {
            Host::Pvlock(offer) => match offer.transport {
                Transport::Pio(pio) => u32::from(pio.port),
                _ => panic!("the VMM offers a transport that this guest does not drive"),
            },
            Host::PvUnhalt | Host::None => 0,
        };
        assert!(found == port, "CPUID says port {found:#x}, the job {port:#x}");
    }
    PORT.store(port, Ordering::Relaxed);
    PAUSE_WINDOW.store(job.pause_window.load(Ordering::Relaxed), Ordering::Relaxed);
    let Some(pio) = doorbell() else { return 0 };
    let address = core::ptr::from_ref(guest.region().header).addr();
    match guest.register(&pio, (address / PAGE_SIZE) as u64, first) {
        Ok(_) => 0,
        Err(status) => status.encode(),
    }
}

/// Brings the calling vCPU online.
pub(crate) fn online(vcpu: usize) {
    let Some(id) = VcpuId::new(vcpu) else { return };
    let online = match doorbell() {
        Some(pio) => GUEST.as_ref().online(&pio, id),
        None if pv_unhalt::is_enabled() => GUEST.as_ref().online(&NoHost, id),
        None => return,
    };
    if online.is_ok() {
        entry::vcpu_block().words[ONLINE_WORD].store(VcpuId::encode(Some(id)), Ordering::Relaxed);
    }
}
