//! Why does each sleeper sleep? For the person who looks at a hung guest from outside.

use crate::{Engine, GuestMemory};
use core::fmt;
use pvlock_protocol::{SlotIndex, VcpuId};

/// One parked vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sleeper {
    /// Who sleeps.
    pub vcpu: VcpuId,
    /// The nesting level that halted.
    pub slot: SlotIndex,
    /// The lock it said it waits for; 0 if it said nothing.
    pub lock: u64,
    /// Its ticket.
    pub ticket: u32,
    /// On whose queue it is.
    pub queue: Option<VcpuId>,
    /// How long it has slept, in ns.
    pub age_ns: u64,
    /// A wake has been sent, the vCPU has not run yet.
    pub woken: bool,
}

impl fmt::Display for Sleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "vCPU {} sleeps for {} us in slot {}, waiting for lock {:#x} with ticket {}, ",
            self.vcpu.index(),
            self.age_ns / 1000,
            self.slot.index(),
            self.lock,
            self.ticket
        )?;
        match self.queue {
            Some(owner) => write!(f, "on the queue of vCPU {}", owner.index())?,
            None => write!(f, "on no queue")?,
        }
        f.write_str(if self.woken { "; woken, has not run yet" } else { "; needs a kick" })
    }
}

impl<M: GuestMemory, R: lock_api::RawMutex> Engine<M, R> {
    /// Every sleeper, at `now` ns of the driver's clock. A snapshot of moving things: each line is true of some moment.
    pub fn dump(&self, now: u64) -> impl Iterator<Item = Sleeper> {
        self.vcpus().filter_map(move |id| self.sleeper(id, now))
    }
}
