//! What the engine may ask of the scheduler below it: the whole contract.
//!
//! Every answer may be "unknown", and that is the default. The engine never takes an unknown for a yes: without run states it
//! parks nobody at a pause-loop exit and picks nobody for a directed yield, without run queues it sees no undercommit, and
//! without a directed yield it asks for a plain one.

use pvlock_protocol::VcpuId;

/// Where a vCPU is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// On a CPU.
    Running,
    /// Off-CPU, and would run if it were given one.
    Preempted,
    /// Off-CPU, and waits for something: giving it a CPU would do nothing.
    Sleeping,
    /// Nobody can tell.
    #[default]
    Unknown,
}

/// How a vCPU can give up its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Yields {
    /// Not at all: `Verdict::Yield` and `Verdict::YieldTo` would do nothing, and are never given.
    #[default]
    None,
    /// To whoever the scheduler picks.
    Plain,
    /// To a vCPU of the same VM as well.
    Directed,
}

/// A scheduler, seen from the engine. All methods are called without any lock of the engine held, a bounded number of times
/// per event, and change nothing.
pub trait Scheduler {
    /// Where a vCPU is that does not sleep in the engine. Not asked where `RunStates::Exact` says that the engine is told.
    /// Being out of date is harmless: the answer only chooses whom to yield to.
    fn placement(&self, vcpu: VcpuId) -> Placement {
        let _ = vcpu;
        Placement::Unknown
    }

    /// How many others want the CPU that `vcpu` is on, or was on last: the length of its run queue without `vcpu`.
    fn backlog(&self, vcpu: VcpuId) -> Option<u32> {
        let _ = vcpu;
        None
    }

    /// What the driver can do with a verdict to yield.
    fn yields(&self) -> Yields {
        Yields::None
    }
}

/// A scheduler of which nothing is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unknown;

impl Scheduler for Unknown {}
