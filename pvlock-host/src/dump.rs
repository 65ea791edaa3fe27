//! Why does each sleeper sleep? For the person who looks at a hung guest from outside.

use crate::{Engine, GuestMemory};
use core::fmt;
use pvlock_protocol::{SlotIndex, VcpuId};

/// What a sleeper waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepKind {
    /// It halted and waits for a kick.
    Halted,
    /// It spun and waits until the vCPU on whose queue it is runs.
    Spun,
    /// Its VM is over a limit; it waits until that is made up for.
    Limited,
}

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
    /// What it waits for.
    pub kind: SleepKind,
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
        f.write_str(match (self.woken, self.kind) {
            (true, _) => "; woken, has not run yet",
            (false, SleepKind::Halted) => "; needs a kick",
            (false, SleepKind::Spun) => "; spun until it was parked, wakes when that vCPU runs",
            (false, SleepKind::Limited) => "; held back, its VM rings more than its limits allow",
        })
    }
}

impl<M: GuestMemory, R: lock_api::RawMutex> Engine<M, R> {
    /// Every sleeper, at `now` ns of the driver's clock. A snapshot of moving things: each line is true of some moment.
    pub fn dump(&self, now: u64) -> impl Iterator<Item = Sleeper> {
        self.vcpus().filter_map(move |id| self.sleeper(id, now))
    }
}
