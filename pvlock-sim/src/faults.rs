//! What can go wrong, drawn from a seed: the guest is preempted between any two steps, kicks come late or twice, sleepers wake
//! for nothing, exits are lost, VMs are paused, vCPUs reset.
//!
//! Nothing here is a fault of the guest or of the engine: all of it happens on real machines, and all that has to hold
//! (`invariants.rs`) has to hold with it.

use crate::invariants::Invariants;
use crate::sched::TaskId;
use pvlock_host::protocol::VcpuId;
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use std::collections::VecDeque;

/// How often what goes wrong. Chances are one in so many, and 0 is never; times are in ns, and the longest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Of everything that is random here.
    pub seed: u64,
    /// A vCPU loses its CPU at a point of the guest's code: each call of the platform, and each step of a lock's slow path.
    pub stall: u32,
    /// For how long.
    pub stall_ns: u64,
    /// At such a point comes an interrupt, whose handler takes a lock of its own.
    pub interrupt: u32,
    /// A kick is delivered late, and its sender goes on.
    pub kick_late: u32,
    /// A kick is delivered a second time, later.
    pub kick_twice: u32,
    /// How late.
    pub kick_ns: u64,
    /// A sleep ends for no reason.
    pub wake_for_nothing: u32,
    /// After how long.
    pub nothing_ns: u64,
    /// A pause-loop exit does not reach the engine.
    pub exit_lost: u32,
    /// A VM is paused about every so often; 0: never.
    pub pause_every_ns: u64,
    /// For how long.
    pub pause_ns: u64,
    /// The host forbids halting ([`HostFlags::OFF`](pvlock_host::protocol::HostFlags)) and allows it again, instead of a pause:
    /// one in so many.
    pub forbid: u32,
    /// Between two rounds of its work a vCPU goes offline, is reset, and comes back.
    pub reset: u32,
    /// Between two rounds of its work the first vCPU unregisters the region and registers it again.
    pub register: u32,
}

/// A point of guest code at which something can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// Between two steps of a slow path.
    Step,
    /// A call of the platform.
    Call,
}

/// What happens there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happens {
    Nothing,
    /// The CPU is gone for so many cycles.
    Stall(u64),
    /// An interrupt whose handler holds its lock for so many cycles.
    Interrupt(u64),
}

/// Something that goes wrong at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A kick of `target` by `from` is delivered.
    Kick { from: TaskId, target: VcpuId },
    /// The VM is paused or may not halt for a while.
    Disturb { vm: usize },
    /// That is over.
    Resume { vm: usize },
    /// That is over.
    Allow { vm: usize },
}

/// One run with faults: what goes wrong, what must hold, and what has happened.
#[derive(Debug)]
pub(crate) struct Trial {
    pub(crate) faults: Faults,
    random: Pcg64Mcg,
    pub(crate) invariants: Invariants,
    pub(crate) log: Log,
    /// Until when each VM is paused.
    pub(crate) paused_until: Vec<u64>,
    /// How often each VM has registered anew.
    pub(crate) registrations: Vec<u64>,
    /// Faults so far.
    pub(crate) count: u64,
    /// vCPUs that have work to do.
    pub(crate) busy: usize,
}

impl Trial {
    pub(crate) fn new(faults: Faults, log: usize) -> Self {
        Self {
            faults,
            random: Pcg64Mcg::new(u128::from(faults.seed) << 64 | 0x6a09_e667_f3bc_c909),
            invariants: Invariants::default(),
            log: Log { keep: log, lines: VecDeque::new() },
            paused_until: Vec::new(),
            registrations: Vec::new(),
            count: 0,
            busy: 0,
        }
    }

    /// Whether what has this chance happens.
    pub(crate) fn happens(&mut self, one_in: u32) -> bool {
        let happens = one_in > 0 && self.random.random_range(0..one_in) == 0;
        self.count += u64::from(happens);
        happens
    }

    /// A time of at most so much: mostly short, as what is dangerous often is.
    pub(crate) fn up_to(&mut self, longest: u64) -> u64 {
        let most = longest >> self.random.random_range(0..12_u32);
        self.random.random_range(0..=most)
    }

    /// Something about so much.
    pub(crate) fn about(&mut self, mean: u64) -> u64 {
        self.random.random_range(mean / 2..=mean + mean / 2)
    }
}

/// The last that happened.
#[derive(Debug)]
pub(crate) struct Log {
    keep: usize,
    lines: VecDeque<String>,
}

impl Log {
    pub(crate) fn is_kept(&self) -> bool {
        self.keep > 0
    }

    pub(crate) fn add(&mut self, line: String) {
        if self.lines.len() == self.keep {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    pub(crate) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines).into()
    }
}
