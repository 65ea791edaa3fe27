//! What goes into the engine and what comes out.

use pvlock_protocol::VcpuId;

/// What the driver does with a vCPU after an event.
#[must_use = "a verdict that is not carried out leaves the vCPU's state wrong"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Go back to the guest.
    Resume(Resume),
    /// Sleep, then report `Engine::unparked`, whatever happens to the vCPU meanwhile.
    Park(Park),
}

/// Why a vCPU goes back to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The doorbell needed no sleep.
    Done,
    /// A kick came before the halt.
    Latched,
    /// An interrupt came before the halt.
    Interrupt,
    /// Nobody halts: no region is registered, this vCPU is offline, or the VM is paused or shut down.
    NotParking,
    /// The doorbell made no sense; the guest can read why.
    Refused,
}

/// A sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Park {
    /// Wake up by then, in ns of the driver's clock.
    pub until: u64,
    /// On whose queue the sleeper stands.
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
}

impl<F: Fn(VcpuId)> Waker for F {
    fn wake(&self, vcpu: VcpuId) {
        self(vcpu);
    }
}
