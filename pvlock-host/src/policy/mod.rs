//! What to do when a vCPU spins: every published policy, and ours, as values of one configuration.
//!
//! The parts are independent of each other and each has its own file: what a pause-loop exit does ([`PauseLoop`]), when it is
//! not worth doing ([`Undercommit`]), how long a vCPU spins before the next one ([`Window`]), and how much of it a VM may ask
//! for ([`Limits`]).

mod boosts;
mod limits;
mod notify;
mod undercommit;
mod window;

pub use boosts::Pivot;
pub use limits::{Limits, Rate};
pub use notify::{Poller, Polling};
pub use undercommit::Undercommit;
pub use window::{Actuator, Setting, Window};

pub(crate) use limits::Metered;
pub(crate) use window::Seen;

use crate::config::ConfigError;
use alloc::boxed::Box;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use pvlock_protocol::{RunState, VcpuId};

/// What becomes of a vCPU that has spun for long.
///
/// Each falls back on the next simpler one where something is missing: parking on a vCPU whose run state is unknown becomes a
/// plain yield, a guest that publishes nothing usable gets directed yields in turn, a directed yield that the driver cannot do
/// becomes a plain one, and a yield that it cannot do becomes a return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PauseLoop {
    /// Back to the guest at once, as if there were no such exits.
    #[default]
    Ignore,
    /// Give up the CPU to whoever the scheduler picks.
    Yield,
    /// Give it up to the holder if it is off-CPU, else to the off-CPU waiter ahead whose turn comes first, else (for a guest that
    /// publishes nothing usable) to the next vCPU in turn that waits for a CPU.
    DirectedYield,
    /// Sleep on the holder's queue until it is scheduled in, if it is known to be off-CPU.
    ParkOnHolder,
    /// Sleep on the queue of the vCPU with the ticket before, if that is known to be off-CPU.
    ParkOnPrevious,
}

/// The settings of all policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// What a pause-loop exit does.
    pub pause_loop: PauseLoop,
    /// Where directed yields in turn begin.
    pub pivot: Pivot,
    /// Directed yields of one vCPU are at least this far apart, in ns, and plain yields in between; 0 for no limit.
    pub directed_period_ns: u64,
    /// How many waiters ahead a directed yield looks at for one that is off-CPU. Reading one costs up to 12 loads.
    pub look_ahead: u32,
    /// Longest chain of sleepers that another one is parked behind: 1 parks only behind a vCPU that waits on no queue itself.
    /// A chain wakes one by one, so a long one costs more than the spinning that it saves.
    pub chain: u32,
    /// When exits are not worth anything; `None` never asks.
    pub undercommit: Option<Undercommit>,
    /// How long vCPUs spin; `None` leaves it to the driver and the guest.
    pub window: Option<Window>,
    /// How often a VM may ring.
    pub limits: Limits,
    /// When a poller looks at kicks that the guest only counts; `None`: every kick is rung. Drivers run one if it is asked
    /// for; who uses the engine alone calls `Engine::poller_wakes`.
    pub poller: Option<Poller>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            pause_loop: PauseLoop::default(),
            pivot: Pivot::default(),
            directed_period_ns: 0,
            look_ahead: 4,
            chain: 4,
            undercommit: Some(Undercommit::default()),
            window: None,
            limits: Limits::default(),
            poller: None,
        }
    }
}

impl Policy {
    /// Policies that have been published or are this project's, by name. The others of their settings are the default's.
    pub const NAMED: [(&'static str, PauseLoop, Pivot, u64); 7] = [
        ("ignore", PauseLoop::Ignore, Pivot::Own, 0),
        ("yield", PauseLoop::Yield, Pivot::Own, 0),
        ("directed", PauseLoop::DirectedYield, Pivot::Own, 0),
        ("directed-last-boosted", PauseLoop::DirectedYield, Pivot::LastBoosted, 0),
        ("directed-throttled", PauseLoop::DirectedYield, Pivot::Own, 4_000_000),
        ("park-on-holder", PauseLoop::ParkOnHolder, Pivot::Own, 0),
        ("park-on-previous", PauseLoop::ParkOnPrevious, Pivot::Own, 0),
    ];

    /// The policy of this name, see [`Policy::NAMED`].
    pub fn named(name: &str) -> Option<Self> {
        let (_, pause_loop, pivot, directed_period_ns) = Self::NAMED.into_iter().find(|named| named.0 == name)?;
        Some(Self { pause_loop, pivot, directed_period_ns, ..Self::default() })
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.window.is_some_and(|window| !window.is_sound()) {
            return Err(ConfigError::Window);
        }
        if !self.limits.are_sound() {
            return Err(ConfigError::Limits);
        }
        Ok(())
    }
}

/// What the policies of one VM remember. Nothing here is needed to be right, only to decide well: plain `core` atomics,
/// Relaxed throughout, no part of any model.
pub(crate) struct State {
    pub(crate) boosts: boosts::Boosts,
    pub(crate) calm: undercommit::Calm,
    pub(crate) meters: limits::Meters,
    /// `HostFlags` that the guest sees.
    pub(crate) flags: AtomicU64,
    /// `Features` that the guest was granted at its last REGISTER.
    pub(crate) accepted: AtomicU64,
    /// Each vCPU's kick word, as last seen, and in which of the guest's lives: see `State::kicks_are_news`.
    kick_words: Box<[AtomicU64]>,
    /// Each vCPU's run state as last reported, one byte each, so that a search passes over 64 of them with one cache line.
    run_states: Box<[AtomicU8]>,
    /// Each vCPU's window in ticks.
    windows: Box<[AtomicU64]>,
}

impl State {
    pub(crate) fn new(config: &crate::Config, vcpus: usize) -> Self {
        let window = config.policy.window.map_or(0, |window| window.start);
        Self {
            boosts: boosts::Boosts::new(vcpus),
            calm: undercommit::Calm::new(),
            meters: limits::Meters::new(),
            flags: AtomicU64::new(config.flags.bits()),
            accepted: AtomicU64::new(0),
            kick_words: (0..vcpus).map(|_| AtomicU64::new(0)).collect(),
            run_states: (0..vcpus).map(|_| AtomicU8::new(0)).collect(),
            windows: (0..vcpus).map(|_| AtomicU64::new(window)).collect(),
        }
    }

    pub(crate) fn run_state(&self, vcpu: VcpuId) -> RunState {
        match self.run_states.get(vcpu.index()).map(|state| state.load(Ordering::Relaxed)) {
            Some(1) => RunState::Running,
            Some(2) => RunState::NotRunning,
            _ => RunState::Unknown,
        }
    }

    pub(crate) fn set_run_state(&self, vcpu: VcpuId, state: RunState) {
        if let Some(place) = self.run_states.get(vcpu.index()) {
            let state = match state {
                RunState::Unknown => 0,
                RunState::Running => 1,
                RunState::NotRunning => 2,
            };
            place.store(state, Ordering::Relaxed);
        }
    }

    /// Whether a vCPU's kick word, in the guest's `life`, has changed since the last look; notes it.
    pub(crate) fn kicks_are_news(&self, vcpu: VcpuId, life: u64, word: u64) -> bool {
        // 2^64 / golden ratio: no guest counts as far as from one life's numbers to another's.
        let word = word.wrapping_add(life.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        self.kick_words.get(vcpu.index()).is_some_and(|seen| seen.swap(word, Ordering::Relaxed) != word)
    }

    pub(crate) fn window(&self, vcpu: VcpuId) -> u64 {
        self.windows.get(vcpu.index()).map_or(0, |window| window.load(Ordering::Relaxed))
    }

    /// Only the vCPU's own events call it: a load and a store do.
    pub(crate) fn set_window(&self, vcpu: VcpuId, ticks: u64) {
        if let Some(window) = self.windows.get(vcpu.index()) {
            window.store(ticks, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_policy_is_sound_and_differs_from_the_others() {
        let named = Policy::NAMED.map(|(name, ..)| Policy::named(name).unwrap());
        for (n, policy) in named.iter().enumerate() {
            assert_eq!(policy.check(), Ok(()));
            assert!(named[..n].iter().all(|other| other != policy), "{policy:?}");
        }
        assert_eq!(Policy::named("no such policy"), None);
        assert_eq!(Policy::named("ignore"), Some(Policy::default()));
    }
}
