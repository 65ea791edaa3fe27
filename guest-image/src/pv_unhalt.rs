//! Halts and kicks of stock KVM, without a pvlock host: `hlt` with interrupts off, and the hypercall that ends it.
//!
//! KVM keeps one latch for each vCPU: a kick that comes before its halt ends that halt at once. This guest has nothing that
//! interrupts it, so nothing comes between a waiter's last look and its `hlt`.

use crate::entry;
use core::sync::atomic::{AtomicU32, Ordering};
use pvlock_guest::hypercalls::{Host, Instruction, NativeCpuid, discover, kick_cpu, native_instruction};
use pvlock_guest::protocol::VcpuId;
use pvlock_guest_image::job::{Done, Protected};

/// The hypercall instruction: 0, none, this is not how this guest halts; 1, `vmcall`; 2, `vmmcall`.
static INSTRUCTION: AtomicU32 = AtomicU32::new(0);
/// Words of a vCPU's block that count its halts and its kicks of others.
const HALTS_WORD: usize = 3;
const KICKS_WORD: usize = 4;

/// From now on this guest halts and kicks by KVM's own means. Run by vCPU 0 before any other uses a lock.
pub(crate) fn enable(cpl: u32) {
    assert!(cpl == 0, "hlt and hypercalls need CPL 0, and this is CPL {cpl}");
    assert!(discover(&NativeCpuid) == Host::PvUnhalt, "CPUID offers no PV_UNHALT");
    let instruction = match native_instruction(&NativeCpuid) {
        Instruction::Vmcall => 1,
        Instruction::Vmmcall => 2,
    };
    INSTRUCTION.store(instruction, Ordering::Relaxed);
}

pub(crate) fn is_enabled() -> bool {
    INSTRUCTION.load(Ordering::Relaxed) != 0
}

/// Halts until somebody kicks this vCPU, or has done so since it last halted.
pub(crate) fn halt() {
    Protected::advance(&entry::vcpu_block().words[HALTS_WORD]);
    // SAFETY: `enable` made sure of CPL 0. With interrupts off only a kick ends the halt, and that is what the caller wants.
    // They were on, and nothing here ever sends one.
    unsafe {
        x86::irq::disable();
        x86::halt();
        x86::irq::enable();
    }
}

/// Kicks a vCPU, whose APIC id is its number.
pub(crate) fn kick(vcpu: VcpuId) {
    Protected::advance(&entry::vcpu_block().words[KICKS_WORD]);
    let instruction = match INSTRUCTION.load(Ordering::Relaxed) {
        1 => Instruction::Vmcall,
        _ => Instruction::Vmmcall,
    };
    // SAFETY: `enable` found PV_UNHALT, CPL 0 and this CPU's instruction.
    unsafe { kick_cpu(instruction, vcpu.index() as u32) };
}

/// Leaves behind what this vCPU did: there is no host that could count it.
pub(crate) fn report(done: &Done) {
    let words = &entry::vcpu_block().words;
    done.halts.store(words[HALTS_WORD].load(Ordering::Relaxed), Ordering::Relaxed);
    done.kicks.store(words[KICKS_WORD].load(Ordering::Relaxed), Ordering::Relaxed);
}
