//! Guests that break the rules. What they do to their own locks is their affair; their host and their neighbours must not
//! notice more than the CPU time that they use.

use crate::bare::Bare;
use crate::job::Workload;
use core::sync::atomic::Ordering;
use pvlock_guest::hypercalls::{Doorbell, Ring};
use pvlock_guest::protocol::{LockId, RECORD_STRIDE, SlotIndex, VcpuId, Wait, WaitState, region_size};

/// Doorbells of one kind before the next kind has its turn.
const STORM: u64 = 64;
/// Opcodes of doorbells are below this, and so is one that means nothing.
const OPCODES: u64 = 10;

/// One round of vCPU `vcpu` of `vcpus`. Random bits and the number of the round say what is done in it.
pub(crate) fn round<P: Bare>(workload: Workload, vcpu: usize, vcpus: usize, round: u64, random: u64) {
    let Some(doorbell) = P::doorbell() else { return };
    match workload {
        Workload::Scribble => scribble::<P>(random),
        Workload::DoorbellStorm => {
            let argument = match random >> 60 {
                // Mostly what could be meant, as far as this guest goes; then every bit.
                0..14 => random as u32 % (2 * vcpus as u32),
                _ => random as u32 & ((1 << 28) - 1),
            };
            let opcode = (round / STORM + vcpu as u64) % OPCODES;
            doorbell.ring((opcode as u32) << 28 | argument);
            if random >> 32 & 7 == 0 {
                doorbell.answer();
            }
        }
        Workload::KickAll => (0..vcpus).filter_map(VcpuId::new).for_each(|target| ring(&doorbell, Doorbell::Kick(target))),
        Workload::RegisterTwice => register::<P>(&doorbell, vcpus, random),
        Workload::LieCycles => lie::<P>(&doorbell, vcpu, vcpus, random),
        _ => halt(&doorbell, random),
    }
}

fn ring(doorbell: &impl Ring, what: Doorbell) {
    doorbell.ring(what.encode());
}

fn halt(doorbell: &impl Ring, random: u64) {
    let slot = SlotIndex::all().nth(random as usize & 3);
    slot.into_iter().for_each(|slot| ring(doorbell, Doorbell::Halt { slot, interrupts: random & 4 != 0 }));
}

/// Every word of the region, the host's as well.
fn scribble<P: Bare>(random: u64) {
    let region = P::guest().region();
    let words = (0..region_size(region.records.len(), RECORD_STRIDE)).step_by(8);
    for (word, n) in words.filter_map(|offset| region.word(offset)).zip(1..) {
        let rubbish = random.wrapping_mul(n);
        // Now all bits, now a small number that could be meant, now nothing.
        word.store([rubbish, rubbish >> 58, 0, u64::MAX][(rubbish >> 32) as usize & 3], Ordering::Relaxed);
    }
}

fn register<P: Bare>(doorbell: &impl Ring, vcpus: usize, random: u64) {
    let low = match random >> 61 {
        0..4 => P::pfn() as u32,
        // A page next door, and any.
        4 => P::pfn() as u32 + 1,
        _ => random as u32 & ((1 << 28) - 1),
    };
    let someone = VcpuId::new(random as usize % vcpus.max(1));
    match (random >> 40 & 7, someone) {
        (0, _) => ring(doorbell, Doorbell::Unregister),
        (1, _) => ring(doorbell, Doorbell::RegisterHigh { high: random as u32 & 0xff_ffff }),
        (2, Some(someone)) => ring(doorbell, Doorbell::Offline(someone)),
        (3, Some(someone)) => ring(doorbell, Doorbell::Online(someone)),
        // So that there are sleepers whose region goes away.
        (4, _) => halt(doorbell, random),
        (5, Some(someone)) => ring(doorbell, Doorbell::Kick(someone)),
        _ => ring(doorbell, Doorbell::Register { low }),
    }
}

fn lie<P: Bare>(doorbell: &impl Ring, vcpu: usize, vcpus: usize, random: u64) {
    let (Some(id), Some(lock)) = (VcpuId::new(vcpu), LockId::new(0x1000)) else { return };
    let victim = match random >> 61 {
        // A circle of all, of two, of itself, and somebody who does not exist.
        0..5 => (vcpu + 1) % vcpus,
        5 => vcpu ^ 1,
        6 => vcpu,
        _ => random as usize & 0x1fff,
    };
    let hint = VcpuId::new(victim);
    let state = if random & 1 == 0 { WaitState::Halting } else { WaitState::Spinning };
    let wait = Wait { lock, ticket: random as u32, state, predecessor: hint, holder: hint };
    if let (Some(record), Some(slot)) = (P::guest().region().record(id), SlotIndex::all().next()) {
        record.slot(slot).publish(&wait);
    }
    match random >> 40 & 7 {
        0 => hint.into_iter().for_each(|target| ring(doorbell, Doorbell::Kick(target))),
        1..4 => ring(doorbell, Doorbell::PauseLoop),
        // The slot of the lie is the first.
        _ => halt(doorbell, random & !3),
    }
}
