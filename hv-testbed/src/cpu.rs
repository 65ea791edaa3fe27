//! One physical CPU: interrupts, its per-CPU words, its clock.
//!
//! Follows: AMD64 APM volume 2, chapter 8 "Exceptions and Interrupts".
//!
//! Interrupts are let in at two places only, [`wait`] and the end of [`crate::enter`]; the handlers count and acknowledge, in
//! assembly, and touch nothing else. What they have counted is looked at afterwards.

use crate::boot::{CODE, MAX_CPUS};
use crate::{apic, serial};
use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};
use x86::msr;

/// Vector of the timer.
pub(crate) const TIMER: u8 = 0x20;
/// Vector of the interrupt by which CPUs wake each other.
pub(crate) const WAKE: u8 = 0x21;
/// Vector of interrupts that are none.
pub(crate) const SPURIOUS: u8 = 0xff;

/// What the handlers write and `gs` points at.
#[repr(C, align(128))]
struct PerCpu {
    /// Timer interrupts so far.
    ticks: AtomicU64,
    index: u64,
}

static PER_CPU: [PerCpu; MAX_CPUS] = {
    const fn per_cpu(index: u64) -> PerCpu {
        PerCpu { ticks: AtomicU64::new(0), index }
    }
    [per_cpu(0), per_cpu(1), per_cpu(2), per_cpu(3)]
};

#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Gate(u64, u64);

static mut IDT: [Gate; 256] = [Gate(0, 0); 256];

/// The number of the CPU that runs this.
pub(crate) fn index() -> usize {
    let index: usize;
    // SAFETY: `set_up` pointed gs at this CPU's block, whose word at 8 never changes.
    unsafe { asm!("mov {}, gs:[8]", out(reg) index, options(pure, readonly, nostack, preserves_flags)) };
    index
}

/// Timer interrupts of this CPU so far.
pub(crate) fn ticks() -> u64 {
    PER_CPU[index()].ticks.load(Ordering::Relaxed)
}

/// Turns interrupts off; whether they were on.
#[inline]
pub(crate) fn interrupts_off() -> bool {
    let flags: u64;
    // SAFETY: only the interrupt flag changes. Not `nomem`: nothing moves from behind to before it.
    unsafe { asm!("pushfq", "pop {}", "cli", out(reg) flags) };
    flags & 1 << 9 != 0
}

/// Turns interrupts on again, if they were.
#[inline]
pub(crate) fn interrupts_on_if(on: bool) {
    if on {
        // SAFETY: they were on before `interrupts_off`.
        unsafe { asm!("sti") };
    }
}

/// Waits for an interrupt and takes it.
pub(crate) fn wait() {
    // SAFETY: the handlers keep every register and write only to this CPU's block. `sti` takes effect after `hlt` began, so no
    // interrupt comes in between.
    unsafe { asm!("sti", "hlt", "cli") };
}

/// Time-stamp counter.
#[inline]
pub(crate) fn ticks_now() -> u64 {
    // SAFETY: every x86-64 processor has one.
    unsafe { core::arch::x86_64::_rdtsc() }
}

macro_rules! handler {
    ($name:ident, $count:literal) => {
        /// # Safety
        ///
        /// Entered through the IDT only.
        // SAFETY: saves what it uses and returns as an interrupt handler does.
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "push rax",
                $count,
                "mov eax, {eoi}",
                "mov dword ptr [rax], 0",
                "pop rax",
                "iretq",
                eoi = const apic::BASE + apic::EOI,
            )
        }
    };
}
handler!(timer, "inc qword ptr gs:[0]");
handler!(wake, "");

/// # Safety
///
/// Entered through the IDT only.
// SAFETY: touches nothing and returns as an interrupt handler does.
#[unsafe(naked)]
unsafe extern "C" fn spurious() {
    naked_asm!("iretq")
}

/// Exceptions of the hypervisor itself are its bugs. Those with an error code have it where the others have their rip.
macro_rules! exceptions {
    ($($vector:literal)*) => {
        [$({
            /// # Safety
            ///
            /// Entered through the IDT only.
            // SAFETY: does not come back.
            #[unsafe(naked)]
            unsafe extern "C" fn exception() {
                naked_asm!("mov rdi, {}", "mov rsi, [rsp]", "mov rdx, [rsp + 8]", "and rsp, -16", "call {}", const $vector, sym failed)
            }
            exception as *const () as u64
        },)*]
    };
}

extern "C" fn failed(vector: u64, first: u64, second: u64) -> ! {
    // SAFETY: reading CR2 has no effect.
    let cr2 = unsafe { x86::controlregs::cr2() };
    serial::print_last(format_args!(
        "hypervisor: exception {vector} on CPU {}, stack {first:#x} {second:#x}, cr2 {cr2:#x}",
        index()
    ));
    crate::end(false)
}

/// The IDT, once, on the first CPU.
fn fill_idt() {
    let gate = |handler: u64| {
        // Present interrupt gate, 64-bit.
        let low = handler & 0xffff | u64::from(CODE) << 16 | 0x8e00 << 32 | (handler >> 16 & 0xffff) << 48;
        Gate(low, handler >> 32)
    };
    let exceptions: [u64; 32] = exceptions!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
    let idt: *mut Gate = (&raw mut IDT).cast();
    let ours = [(TIMER, timer as *const () as u64), (WAKE, wake as *const () as u64), (SPURIOUS, spurious as *const () as u64)];
    for (vector, handler) in (0u8..).zip(exceptions).chain(ours) {
        // SAFETY: a vector is below 256; only the first CPU writes the table, before any has loaded it.
        unsafe { idt.add(usize::from(vector)).write(gate(handler)) };
    }
}

/// Makes the calling CPU number `index`: its block, its IDT, its APIC.
pub(crate) fn set_up(index: usize) {
    if index == 0 {
        fill_idt();
    }
    #[repr(C, packed)]
    struct Pointer(u16, *const Gate);
    let pointer = Pointer(size_of::<[Gate; 256]>() as u16 - 1, (&raw const IDT).cast());
    // SAFETY: the block is this CPU's, and the IDT is complete: the first CPU has filled it before it started the others.
    unsafe {
        msr::wrmsr(msr::IA32_GS_BASE, (&raw const PER_CPU[index]).addr() as u64);
        asm!("lidt [{}]", in(reg) &raw const pointer, options(nostack, preserves_flags));
    }
    apic::enable();
}
