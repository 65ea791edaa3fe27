//! What the engine is told once, at construction. Policies are values here, not types.

use crate::Policy;
use pvlock_protocol::HostFlags;

/// On whose wait queue a sleeper is put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queue {
    /// On none: only a kick, an interrupt or the deadline wakes it.
    None,
    /// On the lock holder's: all waiters of a holder wait together, in the order of their tickets.
    Holder,
    /// On that of the vCPU with the ticket before: each queue holds one waiter, and they wake in order.
    #[default]
    Previous,
}

/// What the host knows of a vCPU that is not parked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunStates {
    /// Nothing: it may be preempted at any time (user space).
    #[default]
    ParkedOnly,
    /// Everything: the scheduler reports each vCPU through `Engine::scheduled_in` and `Engine::scheduled_out`.
    Exact,
}

/// Settings of an [`Engine`](crate::Engine).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where sleepers wait.
    pub queue: Queue,
    /// How many halted sleepers of its queue a vCPU wakes when it resumes, so that they run by the time it hands over: 0
    /// leaves that to the guest's kick, 1 wakes the next in line early. One that has been woken but is still there counts as well.
    /// Nobody is woken early twice in one wait.
    pub wake_ahead: u32,
    /// Longest sleep in ns. Reaching it is counted as a forced wake: 0 in a healthy system. Not 0.
    pub deadline_ns: u64,
    /// What is known of vCPUs that are not parked.
    pub run_states: RunStates,
    /// Settings published to the guest.
    pub flags: HostFlags,
    /// Default spin budget published to the guest, in ticks of its counter; 0 leaves it to the guest.
    pub spin_budget: u64,
    /// Frequency of the guest's tick counter in Hz, published; 0 if unknown.
    pub tick_hz: u64,
    /// What to do when vCPUs spin.
    pub policy: Policy,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            queue: Queue::default(),
            wake_ahead: 0,
            deadline_ns: 1_000_000_000,
            run_states: RunStates::default(),
            flags: HostFlags::default(),
            spin_budget: 0,
            tick_hz: 0,
            policy: Policy::default(),
        }
    }
}

/// Why a [`Config`] cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No sleep without a deadline.
    #[error("deadline_ns is 0: every park needs a deadline; the default is one second")]
    NoDeadline,
    /// No vCPUs, or more than the protocol can name.
    #[error("an engine serves 1 to {max} vCPUs", max = pvlock_protocol::MAX_VCPUS)]
    Vcpus,
    /// The window's bounds make no sense.
    #[error("policy.window needs 0 < floor <= start <= ceiling, and grow above 0")]
    Window,
    /// A rate of nothing would stop the guest.
    #[error("policy.limits: rates and bursts are above 0; None is for no limit")]
    Limits,
}

impl Config {
    pub(crate) fn check(&self, vcpus: usize) -> Result<(), ConfigError> {
        if self.deadline_ns == 0 {
            return Err(ConfigError::NoDeadline);
        }
        if vcpus == 0 || vcpus > pvlock_protocol::MAX_VCPUS {
            return Err(ConfigError::Vcpus);
        }
        self.policy.check()
    }
}
