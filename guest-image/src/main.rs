//! The guest program. It runs with nothing below it: no operating system, no
//! interrupts, one stack a vCPU.

#![no_std]
#![no_main]

mod entry;
mod machine;
mod mem;
mod pv_unhalt;

use core::sync::atomic::{AtomicU32, Ordering};

use machine::Machine;
use pvlock_guest::Platform;
use pvlock_guest_image::boot::BootPage;
use pvlock_guest_image::job::{Job, LogEntry};
use pvlock_guest_image::{Arena, port, work};
use x86::io::{inl, outl};

static ARENA: Arena<Machine> = Arena::new();
/// Set by vCPU 0 when registration is over, one way or the other.
static REGISTERED: AtomicU32 = AtomicU32::new(0);

/// Every vCPU comes here once. `args[0]` of the boot page is the address of the job; without one, the guest checks that it
/// was booted right.
fn main(vcpu: usize, boot: &'static BootPage) -> ! {
    match boot.args[0].load(Ordering::Relaxed) {
        0 => echo(vcpu, boot),
        address => {
            // SAFETY: the VMM passes the address of a job in guest RAM, page aligned, mapped one to one and alive as long as
            // the guest. All its fields are atomics, and all zeros is valid.
            let job: &'static Job = unsafe { &*core::ptr::with_exposed_provenance(address as usize) };
            take_part(vcpu, boot, job)
        }
    }
    entry::exit(0)
}

fn take_part(vcpu: usize, boot: &BootPage, job: &'static Job) {
    // vCPU 0 registers before anyone else has touched a lock; once, as it may have been reset since.
    if vcpu == 0 && REGISTERED.load(Ordering::Relaxed) == 0 {
        job.registered.store(1 + machine::register(boot, job), Ordering::Relaxed);
        // Release: pairs with the Acquire below: the others start in the mode that was chosen.
        REGISTERED.store(1, Ordering::Release);
    }
    while REGISTERED.load(Ordering::Acquire) == 0 {
        Machine::relax();
    }
    machine::online(vcpu);
    let entries = (job.log_capacity.load(Ordering::Relaxed) * u64::from(job.locks.load(Ordering::Relaxed))) as usize;
    let log: &[LogEntry] = match job.log_address.load(Ordering::Relaxed) {
        0 => &[],
        // SAFETY: as for the job: the VMM laid out so many entries there, page aligned, all of atomics.
        address => unsafe { core::slice::from_raw_parts(core::ptr::with_exposed_provenance(address as usize), entries) },
    };
    work::run(job, &ARENA, log, vcpu);
    if let Some(done) = job.done.get(vcpu).filter(|_| pv_unhalt::is_enabled()) {
        pv_unhalt::report(done);
    }
}

/// One round trip through the VMM, to check that the vCPU was set up right.
fn echo(vcpu: usize, boot: &BootPage) {
    entry::vcpu_block().words[0].store(u64::from(boot.vcpus) << 32 | vcpu as u64, Ordering::Relaxed);
    let asked = 0x5eed_0000 | vcpu as u32;
    // SAFETY: the VMM opens every port to the guest; ECHO only exchanges a value.
    let answer = unsafe {
        outl(port::ECHO, asked);
        inl(port::ECHO)
    };
    assert!(answer == port::echo(asked), "asked {asked:#x}, got {answer:#x}");
}
