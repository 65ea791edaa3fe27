//! The local APIC: timer, interrupts between CPUs, start of the others. And what time it is.
//!
//! Follows: AMD64 APM volume 2, chapter 16 "Advanced Programmable Interrupt Controller".

use crate::boot::{self, MAX_CPUS};
use crate::cpu;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use x86::io::{inb, outb};

/// Where the registers are mapped after reset.
pub(crate) const BASE: u32 = 0xfee0_0000;
/// End of interrupt.
pub(crate) const EOI: u32 = 0xb0;
const ID: u32 = 0x20;
const SPURIOUS: u32 = 0xf0;
const COMMAND_LOW: u32 = 0x300;
const COMMAND_HIGH: u32 = 0x310;
const TIMER: u32 = 0x320;
const INITIAL_COUNT: u32 = 0x380;
const CURRENT_COUNT: u32 = 0x390;
const DIVIDE: u32 = 0x3e0;

const SOFTWARE_ENABLE: u32 = 1 << 8;
const PERIODIC: u32 = 1 << 17;
const BY_16: u32 = 0b0011;
/// Of the command register: all CPUs but this one; INIT; start-up.
const OTHERS: u32 = 0b11 << 18 | 1 << 14;
const INIT: u32 = 0b101 << 8;
const START_UP: u32 = 0b110 << 8;

/// The APIC id of each CPU.
static IDS: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];
/// CPUs that run.
static CPUS: AtomicU32 = AtomicU32::new(0);
/// Hz of the time-stamp counter and of the timer (divided by 16).
static TSC_HZ: AtomicU64 = AtomicU64::new(0);
static TIMER_HZ: AtomicU64 = AtomicU64::new(0);

fn register(offset: u32) -> *mut u32 {
    core::ptr::with_exposed_provenance_mut((BASE + offset) as usize)
}

fn read(offset: u32) -> u32 {
    // SAFETY: the APIC is mapped one to one, and reading the registers used here has no effect.
    unsafe { register(offset).read_volatile() }
}

fn write(offset: u32, value: u32) {
    // SAFETY: the APIC is mapped one to one; what it does is take and send interrupts, for which there are handlers.
    unsafe { register(offset).write_volatile(value) }
}

pub(crate) fn enable() {
    write(SPURIOUS, SOFTWARE_ENABLE | u32::from(cpu::SPURIOUS));
    IDS[cpu::index()].store(read(ID) >> 24, Ordering::Relaxed);
    // Release: pairs with `start_others`.
    CPUS.fetch_add(1, Ordering::Release);
}

/// How many CPUs run.
pub(crate) fn cpus() -> usize {
    CPUS.load(Ordering::Acquire) as usize
}

/// Starts all other CPUs and waits until `count` run.
pub(crate) fn start_others(count: usize) {
    boot::install_trampoline();
    write(COMMAND_LOW, OTHERS | INIT);
    sleep_ns(10_000_000);
    write(COMMAND_LOW, OTHERS | START_UP | (boot::TRAMPOLINE >> 12) as u32);
    while cpus() < count {
        core::hint::spin_loop();
    }
}

/// Wakes another CPU.
pub(crate) fn wake(cpu: usize) {
    write(COMMAND_HIGH, IDS[cpu].load(Ordering::Relaxed) << 24);
    write(COMMAND_LOW, 1 << 14 | u32::from(cpu::WAKE));
}

/// A timer interrupt on this CPU every so many ns.
pub(crate) fn tick_every(ns: u64) {
    write(DIVIDE, BY_16);
    write(TIMER, PERIODIC | u32::from(cpu::TIMER));
    write(INITIAL_COUNT, (u128::from(ns) * u128::from(TIMER_HZ.load(Ordering::Relaxed)) / 1_000_000_000) as u32);
}

/// ns since the counter began.
pub(crate) fn now() -> u64 {
    (u128::from(cpu::ticks_now()) * 1_000_000_000 / u128::from(TSC_HZ.load(Ordering::Relaxed))) as u64
}

/// Hz of the time-stamp counter.
pub(crate) fn tsc_hz() -> u64 {
    TSC_HZ.load(Ordering::Relaxed)
}

fn sleep_ns(ns: u64) {
    let end = now() + ns;
    while now() < end {
        core::hint::spin_loop();
    }
}

/// Lets so many ns pass, without letting another emulated CPU have them.
pub(crate) fn pass(ns: u64) {
    let end = now() + ns;
    while now() < end {
        for n in 0..50 {
            core::hint::black_box(n);
        }
    }
}

/// Learns how fast the clocks run from the one whose speed is known: channel 2 of the 8254 timer, 1 193 182 Hz.
pub(crate) fn calibrate() {
    const COUNT: u16 = 11_932; // 10 ms
    write(DIVIDE, BY_16);
    write(TIMER, 1 << 16); // masked
    // SAFETY: the timer's ports and the gate (0x61) belong to nobody else; they change no memory.
    let (ticks, timer) = unsafe {
        // Nothing comes from the old interrupt controllers.
        outb(0x21, 0xff);
        outb(0xa1, 0xff);
        outb(0x61, inb(0x61) & !3 | 1);
        outb(0x43, 0b1011_0000);
        outb(0x42, COUNT as u8);
        outb(0x42, (COUNT >> 8) as u8);
        write(INITIAL_COUNT, u32::MAX);
        let start = cpu::ticks_now();
        while inb(0x61) & 0x20 == 0 {}
        (cpu::ticks_now() - start, u64::from(u32::MAX - read(CURRENT_COUNT)))
    };
    // The nearest MHz: reading the clocks takes a moment.
    let hz = |counted: u64| (counted * 1_193_182 / u64::from(COUNT) + 500_000) / 1_000_000 * 1_000_000;
    TSC_HZ.store(hz(ticks), Ordering::Relaxed);
    TIMER_HZ.store(hz(timer * 16) / 16, Ordering::Relaxed);
}
