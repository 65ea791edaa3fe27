//! What goes into the engine and what comes out.

use crate::decision::{Decision, reasons};
use crate::scheduler::{Scheduler, Unknown};
use pvlock_protocol::VcpuId;

/// What the driver does with a vCPU after an event.
#[must_use = "a verdict that is not carried out leaves the vCPU's state wrong"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go back to the guest.
    Resume(Resume),
    /// Give up the CPU to whoever the scheduler picks, then go back to the guest.
    Yield(Yield),
    /// Give up the CPU to this vCPU, then go back to the guest.
    YieldTo(VcpuId, Boost),
    /// Sleep, then report `Engine::unparked`, whatever happens to the vCPU meanwhile.
    Park(Park),
}

reasons! {
    /// Why a vCPU goes back to the guest.
    Resume {
        /// The doorbell needed no sleep.
        Done,
        /// A kick came before the halt or the pause-loop exit.
        Latched,
        /// An interrupt came before the halt or the pause-loop exit.
        Interrupt,
        /// Nobody halts: no region is registered, this vCPU is offline, or the VM is paused or shut down.
        NotParking,
        /// The doorbell made no sense; the guest can read why.
        Refused,
        /// Pause loop: the policy is to ignore it.
        Ignored,
        /// Pause loop: nobody else wants the CPU.
        Undercommit,
        /// Pause loop: the lock's holder runs, and as far as is known everybody who is asked for.
        HolderRunning,
        /// Pause loop: the vCPU with the ticket before runs.
        PreviousRunning,
        /// Pause loop: nobody can tell whether the awaited vCPU runs, and the driver cannot yield.
        Unknown,
        /// Pause loop: no vCPU of this VM waits for a CPU, or those ahead sleep and the driver cannot yield.
        NoCandidate,
        /// Pause loop: the driver cannot yield.
        CannotYield,
        /// Pause loop: the awaited vCPU sleeps, by a chain of queues, on this one.
        Circle,
        /// Pause loop: the awaited vCPU is at the end of a chain of sleepers that is long enough, and the driver cannot yield.
        ChainTooLong,
    }
}

reasons! {
    /// Why a vCPU gives up its CPU to whoever the scheduler picks.
    Yield {
        /// The policy is to.
        Policy,
        /// The policy asks for the awaited vCPU's run state, and nobody can tell.
        Unknown,
        /// The vCPU has had its directed yield of this period.
        Throttled,
        /// The driver has no directed yield.
        NotDirected,
        /// Those ahead sleep: a CPU would be of no use to them, nor is it to this one.
        Asleep,
        /// The awaited vCPU is at the end of a chain of sleepers that is long enough.
        ChainTooLong,
    }
}

reasons! {
    /// Why just this vCPU is yielded to.
    Boost {
        /// It holds the lock, and is off-CPU.
        Holder,
        /// It is the off-CPU waiter ahead whose turn comes first.
        Predecessor,
        /// The guest said nothing usable; it is the next in turn that waits for a CPU.
        RoundRobin,
    }
}

reasons! {
    /// Why a vCPU sleeps.
    Sleep {
        /// It halted: it has announced itself and will be kicked.
        Halted,
        /// Pause loop: it waits until the lock's holder is scheduled in.
        OnHolder,
        /// Pause loop: it waits until the vCPU with the ticket before is scheduled in.
        OnPrevious,
        /// Its VM rings more than its limits allow.
        Limited,
    }
}

/// A sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Park {
    /// Wake up by then, in ns of the driver's clock.
    pub until: u64,
    /// On whose queue the sleeper stands: the vCPU that it waits for. A scheduler that lets this one run next, if it wants a
    /// CPU, shortens the wait for all.
    pub on: Option<VcpuId>,
}

/// How a sleep ended, as the driver saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unpark {
    /// By the waker, or by a token that was there before.
    Woken,
    /// By a signal to the vCPU's thread.
    Signal,
    /// At the deadline.
    Deadline,
}

/// How the engine wakes a parked vCPU. Called in the order in which they are to run, and never with a lock of the engine
/// held. A wake may come before the vCPU has gone to sleep: it must not get lost (a token).
pub trait Waker {
    /// Ends the sleep of this vCPU.
    fn wake(&self, vcpu: VcpuId);

    /// What is known of the scheduler: nothing, unless the driver says more.
    fn scheduler(&self) -> &dyn Scheduler {
        &Unknown
    }

    /// Told of every decision, after it was made and counted, without any lock of the engine held. Costs nothing if it is
    /// left alone.
    fn decided(&self, vcpu: VcpuId, decision: Decision) {
        let _ = (vcpu, decision);
    }
}

impl<F: Fn(VcpuId)> Waker for F {
    fn wake(&self, vcpu: VcpuId) {
        self(vcpu);
    }
}
