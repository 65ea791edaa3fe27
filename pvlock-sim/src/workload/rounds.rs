//! What guests do in runs in which things go wrong: a number of rounds of locking and unlocking in every way there is, with
//! vCPUs that come and go; or all that a guest must not do.

use super::Vcpu;
use super::vcpu::{give_back, take};
use crate::locks::Lock;
use crate::machine::{After, LineId, Machine};
use crate::platform;
use crossbeam_utils::CachePadded;
use pvlock_host::hypercalls::{Doorbell, Ring};
use pvlock_host::protocol::{SlotIndex, VcpuId};
use pvlock_host::{GuestMemory, Nested};
use rand::RngExt;

/// What kind of guest it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guests {
    /// Keeps to the protocol.
    Sane,
    /// Rings at random and scribbles over its own region.
    Hostile,
}

/// A number of rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// What kind.
    pub guests: Guests,
    /// Locks that the code takes, besides those of interrupt handlers.
    pub locks: usize,
    /// Of each vCPU; 0: for ever.
    pub rounds: u32,
    /// Time in a section, in ns, about.
    pub inside_ns: u64,
    /// Time between sections, in ns, about.
    pub outside_ns: u64,
}

/// Interrupts nest this deep.
const NESTED: usize = 2;

/// What handles the interrupts of a vCPU: at each depth it takes a lock of its own.
#[derive(Clone, Copy)]
pub(crate) struct Handler {
    locks: &'static [CachePadded<Lock>],
    line: LineId,
    pub(crate) nested: u32,
}

impl Handler {
    /// With the last of these locks, the first of which is of this line.
    pub(crate) fn new(locks: &'static [CachePadded<Lock>], line: LineId) -> Option<Self> {
        (locks.len() > NESTED).then_some(Self { locks, line, nested: 0 })
    }

    /// While so many interrupts are being handled.
    pub(crate) fn nested(self, nested: u32) -> Self {
        Self { nested, ..self }
    }
}

/// The running code is interrupted, and the handler holds its lock for so many cycles.
pub(crate) fn interrupt(handler: Handler, cycles: u64) {
    let line = platform::with(|machine| machine.running.and_then(|task| machine.vcpus[task].line));
    let lock = handler.locks.len() - 1 - handler.nested as usize;
    let owned = take(handler.locks, handler.line, lock);
    platform::compute(cycles);
    give_back(handler.locks, handler.line, owned, false);
    platform::with(|machine| machine.back_to(line));
}

impl Rounds {
    /// With those of interrupt handlers.
    pub(super) fn locks(&self) -> usize {
        self.locks + NESTED
    }

    pub(super) fn run(&self, mut vcpu: Vcpu) {
        match self.guests {
            Guests::Sane => self.behave(&mut vcpu),
            Guests::Hostile => misbehave(&mut vcpu),
        }
    }

    fn behave(&self, vcpu: &mut Vcpu) {
        let mut registration = 0;
        for _ in 0..self.rounds {
            self.come_and_go(vcpu, &mut registration);
            vcpu.compute_about(self.outside_ns);
            let lock = vcpu.random.random_range(0..self.locks);
            let tries = vcpu.random.random_range(0..8) == 0;
            let owned = if tries { vcpu.try_lock(lock) } else { None };
            let owned = owned.unwrap_or_else(|| vcpu.lock(lock));
            vcpu.compute_about(self.inside_ns);
            // A second one inside, always in the same order.
            if lock + 1 < self.locks && vcpu.random.random_range(0..4) == 0 {
                vcpu.section(lock + 1, self.inside_ns / 2);
            }
            if vcpu.random.random_range(0..4) == 0 {
                vcpu.unlock_fair(owned)
            } else {
                vcpu.unlock(owned)
            }
            vcpu.worked();
        }
        // Who has ended cannot come online after a later registration.
        let _ = platform::guest().offline(&platform::ring(), vcpu.id);
    }

    /// Between two rounds, with no lock held: what a kernel does that takes vCPUs offline, or replaces itself.
    fn come_and_go(&self, vcpu: &mut Vcpu, registration: &mut u64) {
        let (guest, ring, id) = (platform::guest(), platform::ring(), vcpu.id);
        let Some((reset, register)) = platform::with(Machine::chances) else { return };
        if reset {
            let _ = guest.offline(&ring, id);
            platform::exit(0, After::Reset);
            vcpu.compute_about(self.outside_ns);
            let _ = guest.online(&ring, id);
        }
        if register {
            let _ = guest.unregister(&ring);
            vcpu.compute_about(self.outside_ns);
            let others = (0..vcpu.vcpus).filter_map(VcpuId::new);
            let busy = others.filter(|&vcpu| platform::with(|machine| machine.is_busy(vcpu)));
            if guest.register(&ring, 0, busy).is_ok() {
                platform::with(Machine::registered);
            }
        }
        let last = platform::with(|machine| machine.registrations());
        if std::mem::replace(registration, last) != last {
            let _ = guest.online(&ring, id);
        }
    }
}

/// Rings at random, and writes anything anywhere in the region.
fn misbehave(vcpu: &mut Vcpu) {
    let ring = platform::ring();
    let memory = Nested(platform::guest().region());
    loop {
        vcpu.compute_about(2_000);
        let (any, other) = (vcpu.random.random::<u64>(), VcpuId::new(vcpu.random.random_range(0..vcpu.vcpus + 2)));
        let other = other.unwrap_or(vcpu.id);
        let slot = SlotIndex::new(any as usize % 4);
        match vcpu.random.random_range(0..16) {
            0..5 => {
                // The value is of the kind that means something, as often as not.
                let value = if any % 3 == 0 { any } else { any >> 40 };
                let size = 128 * (vcpu.vcpus as u64 + 2);
                memory.store(((any >> 7) % size) & !7, value);
            }
            5..9 => ring.ring(Doorbell::Kick(other).encode()),
            9 => ring.ring(any as u32),
            10 => ring.ring(Doorbell::Online(other).encode()),
            11 => ring.ring(Doorbell::Offline(other).encode()),
            12 => ring.ring(Doorbell::PauseLoop.encode()),
            13 => ring.ring(Doorbell::Register { low: any as u32 % 2 }.encode()),
            14 => {
                if let Some(slot) = slot {
                    ring.ring(Doorbell::Halt { slot, interrupts: any % 2 == 0 }.encode());
                }
            }
            _ => ring.ring(Doorbell::Unregister.encode()),
        }
    }
}
