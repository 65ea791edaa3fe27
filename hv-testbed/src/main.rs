//! A hypervisor for AMD SVM, small enough to be read in an evening, that links `pvlock-host`: it sees what a hypervisor in user
//! space never does, pause-loop exits and its vCPUs coming and going.
//!
//! Boots as a PVH kernel with the guest image as initrd, or as a Multiboot kernel with it as first module. The command line says what
//! to run:
//!
//! | word | |
//! |---|---|
//! | `cpus=N` | CPUs to wait for |
//! | `profile=short`, `full` | which cells are run; `none` only has the trials |
//! | `trials=none` | leaves out the guests that misbehave |
//! | `lock=`, `policy=`, `over=`, `halts=` | only the cells of this lock, policy, overcommit, with or without halts |
//! | `inside=N`, `outside=N` | iterations of work inside the lock and outside |
//! | `warm-up=N`, `measure=N` | length of the phases in ms |
//!
//! What it finds goes to the serial port, one JSON object a line; `{"done":true}` is the last one.

#![no_std]
#![no_main]

extern crate alloc;

mod apic;
mod boot;
mod cpu;
mod enter;
mod exits;
mod host;
mod irq_lock;
mod measure;
#[path = "../../guest-image/src/mem.rs"]
mod mem;
mod memory;
mod run;
mod serial;
mod trace;
mod trials;
mod vm;

use crate::boot::StartInfo;
use crate::measure::Times;
use crate::run::Run;
use crate::serial::line;
use core::panic::PanicInfo;
use pvlock_hv_testbed::cells::Cell;

/// Where every CPU arrives, the first one with what the loader left.
pub(crate) extern "C" fn main(start_info: u64, index: usize) -> ! {
    cpu::set_up(index);
    enter::enable();
    if index > 0 {
        Run::take_part()
    }
    // SAFETY: the boot code passes on what the loader passed, and nothing has been written to but our own memory.
    let info = unsafe { StartInfo::at(start_info) };
    serial::set_up();
    apic::calibrate();
    let word = |name: &str| info.command_line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    let cpus = word("cpus").and_then(|number| number.parse().ok()).unwrap_or(1);
    apic::start_others(cpus);
    Run::start_ticking();
    let filter = vm::has_pause_filter();
    line!(r#"{{"boot":{{"cpus":{},"tsc_hz":{},"pause_filter":{filter}}}}}"#, apic::cpus(), apic::tsc_hz());

    let number = |name: &str, default: u64| word(name).and_then(|number| number.parse().ok()).unwrap_or(default);
    let times = Times {
        inside: number("inside", 400),
        outside: number("outside", 400),
        warm_up: number("warm-up", 8) * 1_000_000,
        measure: number("measure", if word("profile") == Some("short") { 32 } else { 64 }) * 1_000_000,
        patience: 400_000_000,
    };
    let wanted = |cell: &Cell| {
        word("lock").is_none_or(|lock| lock == cell.lock.name())
            && word("policy").is_none_or(|policy| policy == cell.policy)
            && word("over").is_none_or(|over| over.parse() == Ok(cell.overcommit))
            && word("halts").is_none_or(|halts| halts.parse() == Ok(cell.halts))
    };
    if word("trials") != Some("none") {
        trials::all(info.module, &times);
    }
    match word("profile") {
        Some("none") => {}
        Some("short") => Cell::short().filter(wanted).for_each(|cell| measure::cell(info.module, &cell, times)),
        _ => Cell::all().filter(wanted).for_each(|cell| measure::cell(info.module, &cell, times)),
    }
    line!(r#"{{"done":true}}"#);
    end(true)
}

/// Ends the machine, if it can be ended (QEMU's isa-debug-exit); else nothing happens any more.
pub(crate) fn end(success: bool) -> ! {
    // SAFETY: a port of no other device.
    unsafe { x86::io::outl(0xf4, if success { 0x10 } else { 0x11 }) };
    loop {
        cpu::interrupts_off();
        // SAFETY: nothing follows.
        unsafe { x86::halt() };
    }
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
