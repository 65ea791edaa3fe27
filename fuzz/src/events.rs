//! What the bytes mean to the engine's target.

use arbitrary::Arbitrary;
use pvlock_host::{Config, Limits, Policy, Poller, Queue, Rate, RunStates, Undercommit, Window};

const MOST_VCPUS: usize = 8;

/// What the host is told at construction.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Settings {
    vcpus: u8,
    queue: u8,
    wake_ahead: u8,
    deadline: u16,
    exact: bool,
    policy: u8,
    look_ahead: u8,
    chain: u8,
    window: bool,
    /// Exits until the guest is told that it has its CPUs for itself.
    calm: Option<u8>,
    /// Events per ms, and at once.
    limits: Option<[Option<(u8, u8)>; 3]>,
    poller: bool,
    /// Whether the guest begins with a region and everybody online.
    pub(crate) registered: bool,
    /// The driver's clock.
    pub(crate) start: Option<u64>,
}

/// What happens to a VM. What is frequent stands here, what is rare or ends everything further down, as each choice of an `enum`
/// is as likely as the others. Numbers of vCPUs, slots and the like are taken modulo how many there are, or a few more.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Event {
    Halt {
        vcpu: u8,
        slot: u8,
        interrupts: bool,
    },
    Kick {
        vcpu: u8,
        target: u8,
    },
    Spin(u8),
    /// The thread of this vCPU leaves its sleep.
    Return(u8),
    /// This vCPU says what it waits for.
    Publish {
        vcpu: u8,
        slot: u8,
        lock: u8,
        ticket: i8,
        predecessor: u8,
        holder: u8,
        halting: bool,
    },
    Scheduler(Scheduling),
    Memory(Write),
    Host(Host),
    Setup(Setup),
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Scheduling {
    In(u8),
    Out(u8),
    Idle(u8),
    /// What the scheduler says when it is asked.
    Says(u32),
    /// Time passes, in ns.
    Advance(u16),
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Write {
    Region {
        at: u16,
        word: u64,
    },
    Anywhere {
        at: u16,
        word: u64,
    },
    /// The word is written during the next event, after so many loads of the host's.
    Race {
        after: u8,
        at: u16,
        word: u64,
    },
    Header {
        version: Option<u64>,
        vcpus: u8,
        stride: Option<u16>,
        features: u8,
    },
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Host {
    Interrupt(u8),
    Kicked(u8),
    Flags(u8),
    PollerWakes,
    Poll,
    PollerSleeps,
    End(End),
}

/// What ends sleeps, lives or registrations.
#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum End {
    Offline(u8, u8),
    Reset(u8),
    Pause,
    Unregister(u8),
    ResetVm,
}

#[derive(Arbitrary, Clone, Debug)]
pub(crate) enum Setup {
    /// Any word.
    Ring(u8, u32),
    Online(u8, u8),
    Register {
        vcpu: u8,
        page: u8,
    },
    /// A sound header, a region, everybody online.
    Boot(u8),
    Resume,
}

impl Settings {
    pub(crate) fn vcpus(&self) -> usize {
        usize::from(self.vcpus) % MOST_VCPUS + 1
    }

    pub(crate) fn config(&self) -> Config {
        let rate = |limit: Option<(u8, u8)>| {
            limit.map(|(per_ms, burst)| Rate { per_second: (u32::from(per_ms) + 1) * 1_000, burst: u32::from(burst) + 1 })
        };
        let [halts, kicks, pause_loops] = self.limits.unwrap_or_default().map(rate);
        let (name, ..) = Policy::NAMED[usize::from(self.policy) % Policy::NAMED.len()];
        let policy = Policy {
            look_ahead: u32::from(self.look_ahead) % 6,
            chain: u32::from(self.chain) % 6,
            window: self.window.then(Window::default),
            undercommit: self.calm.map(|calm| Undercommit { tell: true, calm: calm.into(), quiet_ns: 1_000 }),
            limits: Limits { halts, kicks, pause_loops, ..Limits::default() },
            poller: self.poller.then(Poller::default),
            ..Policy::named(name).expect("every name names a policy")
        };
        Config {
            queue: [Queue::None, Queue::Holder, Queue::Previous][usize::from(self.queue) % 3],
            wake_ahead: u32::from(self.wake_ahead) % 4,
            deadline_ns: u64::from(self.deadline) + 1,
            run_states: if self.exact { RunStates::Exact } else { RunStates::ParkedOnly },
            policy,
            ..Config::default()
        }
    }
}
