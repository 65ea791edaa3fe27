//! The guest program. It runs with nothing below it: no operating system, no
//! interrupts, one stack a vCPU.

#![no_std]
#![no_main]

mod entry;
mod mem;

use core::sync::atomic::Ordering;

use pvlock_guest_image::boot::BootPage;
use pvlock_guest_image::port;
use x86::io::{inl, outl};

/// Every vCPU comes here once.
fn main(vcpu: usize, boot: &'static BootPage) -> ! {
    entry::vcpu_block().words[0].store(u64::from(boot.vcpus) << 32 | vcpu as u64, Ordering::Relaxed);
    let asked = 0x5eed_0000 | vcpu as u32;
    // SAFETY: the VMM opens every port to the guest; ECHO only exchanges a value.
    let answer = unsafe {
        outl(port::ECHO, asked);
        inl(port::ECHO)
    };
    assert!(answer == port::echo(asked), "asked {asked:#x}, got {answer:#x}");
    entry::exit(0)
}
