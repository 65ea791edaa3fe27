//! hv
#![no_std]
#![no_main]
extern crate alloc;

mod apic;
mod boot;
mod cpu;
mod irq_lock;
#[path = "../../guest-image/src/mem.rs"]
mod mem;
mod memory;
mod serial;

use boot::StartInfo;
use core::panic::PanicInfo;
use serial::line;

pub(crate) extern "C" fn main(start_info: u64, index: usize) -> ! {
    cpu::set_up(index);
    if index > 0 {
        loop { cpu::wait(); }
    }
    // SAFETY: what the loader passed
    let info = unsafe { StartInfo::at(start_info) };
    apic::calibrate();
    line!("hello {:?} {}", info.command_line(), apic::tsc_hz());
    apic::start_others(2);
    line!("cpus {} module {}", apic::cpus(), info.module().len());
    apic::tick_every(100_000);
    let t = cpu::ticks();
    let n = apic::now();
    for _ in 0..10 { cpu::wait(); }
    line!("ticks {} ns {}", cpu::ticks() - t, apic::now() - n);
    end(true)
}

/// Ends
pub(crate) fn end(success: bool) -> ! {
    // SAFETY: port of QEMU's isa-debug-exit
    unsafe { x86::io::outl(0xf4, if success { 0x10 } else { 0x11 }) };
    loop { cpu::interrupts_off(); 
        // SAFETY: halts
        unsafe { core::arch::asm!("hlt") } }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    serial::print_last(format_args!("hypervisor: {info}"));
    end(false)
}

/// `core` was compiled for unwinding and refers to this; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// As [`rust_eh_personality`].
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    end(false)
}
