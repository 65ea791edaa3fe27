//! The bare machine as pvlock's platform: what a kernel author has to write.

use crate::{entry, pv_unhalt};
use core::arch::x86_64::_rdtsc;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use pvlock_guest::hypercalls::{
    Doorbell, Host, Instruction, NativeCpuid, NoHost, Pio, Ring, Status, Transport, Vmcall, discover, native_instruction,
};
use pvlock_guest::protocol::{PAGE_SIZE, SlotIndex, VcpuId};
use pvlock_guest::{Guest, GuestRef, KickKind, Platform, Word};
use pvlock_guest_image::job::{HaltBy, Protected};
use pvlock_guest_image::{Bare, BootPage, CountPauses, Job, job, pause_loop, port};

static GUEST: Guest<{ job::MAX_VCPUS }> = Guest::new();
/// How the host is rung: [`NOBODY`] before registration or without a host, one of the hypercall instructions, or a port.
static BELL: AtomicU32 = AtomicU32::new(NOBODY);
const NOBODY: u32 = 0;
const VMCALL: u32 = 1 << 16;
const VMMCALL: u32 = 1 << 17;
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
        } else {
            GUEST.as_ref().kick(&Bell, vcpu);
        }
    }
}

impl CountPauses for Machine {
    #[inline]
    fn pauses() -> u64 {
        entry::vcpu_block().words[PAUSES_WORD].load(Ordering::Relaxed)
    }
}

impl Bare for Machine {
    fn doorbell() -> Option<impl Ring> {
        doorbell()
    }

    fn pfn() -> u64 {
        (core::ptr::from_ref(GUEST.as_ref().region().header).addr() / PAGE_SIZE) as u64
    }

    fn reset() {
        // SAFETY: the VMM opens every port to the guest. It does not come back from this one; what this vCPU's stack holds is
        // not needed any more.
        unsafe { x86::io::outl(port::RESET, 0) };
    }
}

/// What this guest rings, if there is anybody.
fn doorbell() -> Option<Bell> {
    (BELL.load(Ordering::Relaxed) != NOBODY).then_some(Bell)
}

/// The doorbell of whatever host there is.
struct Bell;

impl Ring for Bell {
    #[inline]
    fn ring(&self, word: u32) {
        // SAFETY: the host, which named this kind of doorbell in CPUID or in the job, takes it; hypercalls are used in CPL 0, and
        // every port is open.
        unsafe {
            match BELL.load(Ordering::Relaxed) {
                NOBODY => {}
                VMCALL => Vmcall { instruction: Instruction::Vmcall }.doorbell().ring(word),
                VMMCALL => Vmcall { instruction: Instruction::Vmmcall }.doorbell().ring(word),
                port => Pio { port: port as u16 }.doorbell().ring(word),
            }
        }
    }

    fn answer(&self) -> u32 {
        // SAFETY: as above.
        unsafe {
            match BELL.load(Ordering::Relaxed) {
                NOBODY => Status::Unknown.encode(),
                VMCALL => Vmcall { instruction: Instruction::Vmcall }.doorbell().answer(),
                VMMCALL => Vmcall { instruction: Instruction::Vmmcall }.doorbell().answer(),
                port => Pio { port: port as u16 }.doorbell().answer(),
            }
        }
    }
}

fn ring(doorbell: Doorbell) {
    Bell.ring(doorbell.encode());
}

/// Finds the host and registers, or has KVM itself be the host; returns the status. Run by vCPU 0 before any other uses a lock.
///
/// Where CPUID shows the VMM's leaves, the host is found there. In CPL 3 on software KVM it shows those of the machine below
/// instead; so a VMM with a doorbell port also writes it into the job, and only a guest in CPL 0 insists that both agree.
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
    let mut bell = port;
    if boot.cpl == 0 {
        let found = match discover(&NativeCpuid) {
            Host::Pvlock(offer) => match offer.transport {
                Transport::Pio(pio) => u32::from(pio.port),
                Transport::Vmcall => {
                    bell = match native_instruction(&NativeCpuid) {
                        Instruction::Vmcall => VMCALL,
                        Instruction::Vmmcall => VMMCALL,
                    };
                    0
                }
                _ => panic!("the VMM offers a transport that this guest does not drive"),
            },
            Host::PvUnhalt | Host::None => 0,
        };
        assert!(found == port, "CPUID says port {found:#x}, the job {port:#x}");
    }
    BELL.store(bell, Ordering::Relaxed);
    PAUSE_WINDOW.store(job.pause_window.load(Ordering::Relaxed), Ordering::Relaxed);
    let Some(bell) = doorbell() else { return Status::Ok.encode() };
    match guest.register(&bell, Machine::pfn(), first) {
        Ok(_) => Status::Ok.encode(),
        Err(status) => status.encode(),
    }
}

/// Brings the calling vCPU online.
pub(crate) fn online(vcpu: usize) {
    let Some(id) = VcpuId::new(vcpu) else { return };
    let online = match doorbell() {
        Some(bell) => GUEST.as_ref().online(&bell, id),
        None if pv_unhalt::is_enabled() => GUEST.as_ref().online(&NoHost, id),
        None => return,
    };
    if online.is_ok() {
        entry::vcpu_block().words[ONLINE_WORD].store(VcpuId::encode(Some(id)), Ordering::Relaxed);
    }
}
