//! What a run is made of: everything that a seed says.

use crate::backend::{Backend, Spec};
use pvlock_guest_image::LockKind;
use pvlock_guest_image::job::{HaltBy, Workload};
use pvlock_host::protocol::HostFlags;
use pvlock_host::{Config, Limits, Policy, Poller, Queue, Rate};
use std::fmt;
use std::time::Duration;

/// Longer than any wait on a busy machine: a sleep that lasts that long has lost its kick.
const DEADLINE_NS: u64 = 20_000_000_000;
/// Entries of the order log for each lock.
const LOG: u64 = 1 << 12;

/// One run.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Where it came from.
    pub seed: u64,
    /// Where it runs.
    pub backend: Backend,
    /// What runs.
    pub spec: Spec,
    /// For how long.
    pub time: Duration,
    /// Mean time between two disturbances; none without.
    pub pace: Option<Duration>,
    /// Threads beside it that want a CPU all the time.
    pub hogs: usize,
    /// Instead of a run: many machines.
    pub drops: Option<Drops>,
}

/// Machines that are made and dropped.
#[derive(Clone, Copy, Debug)]
pub struct Drops {
    /// How many.
    pub machines: u32,
    /// Each after this time at most.
    pub longest_us: u64,
}

impl Mix {
    /// Of this seed.
    ///
    /// # Panics
    ///
    /// If there are no back-ends to choose from.
    pub fn new(seed: u64, backends: &[Backend]) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        // In turn, so that a short soak has all.
        let backend = backends[(seed % backends.len() as u64) as usize];
        let kvm = matches!(backend, Backend::Kvm { .. });
        let lock = match random.u32(..12) {
            0..5 => LockKind::Ticket,
            5..9 => LockKind::Preemptable,
            9 => LockKind::SpinTas,
            10 => LockKind::Mcs,
            _ => LockKind::SpinTicket,
        };
        let halts = matches!(lock, LockKind::Ticket | LockKind::Preemptable);
        // Plain queue locks hardly move with more vCPUs than CPUs.
        let vcpus = random.usize(1..=if halts { 12 } else { 4 });
        let churn = if random.bool() { 0 } else { random.u32(20..400) };
        let workload = [Workload::Counter, Workload::PingPong, Workload::ManyLocks, Workload::Nested, Workload::TryMix];
        let spec = Spec {
            lock,
            workload: workload[random.usize(..workload.len())],
            vcpus,
            locks: random.usize(1..=8),
            inside: log_uniform(&mut random, 10.0, 50_000.0) as u64,
            outside: log_uniform(&mut random, 10.0, 50_000.0) as u64,
            limit: 0,
            churn,
            log: if lock.is_strict() && random.bool() { LOG } else { 0 },
            host: host(&mut random),
            paravirtual: random.u32(..20) > 0,
            halt: HaltBy::Doorbell,
            ioeventfd: kvm && random.u32(..4) == 0,
        };
        let drops = Drops { machines: random.u32(10..60), longest_us: log_uniform(&mut random, 1.0, 10_000.0) as u64 };
        Self {
            seed,
            backend,
            spec,
            time: Duration::from_secs_f64(log_uniform(&mut random, 0.05, 0.8)),
            pace: (random.u32(..4) > 0).then(|| Duration::from_secs_f64(log_uniform(&mut random, 5e-5, 1e-2))),
            hogs: [0, 0, 0, 1, 2][random.usize(..5)],
            drops: (random.u32(..8) == 0).then_some(drops),
        }
    }

    /// Whether the host is told of resets. Only a guest that comes online anew from time to time goes on halting then.
    pub(super) fn resets(&self) -> bool {
        self.spec.churn > 0 && self.spec.paravirtual
    }

    /// Whether the guest may ring what its host refuses, such as ONLINE between UNREGISTER and REGISTER.
    pub(super) fn may_be_refused(&self) -> bool {
        self.spec.churn > 0
    }
}

fn host(random: &mut fastrand::Rng) -> Config {
    // The names are those of the table.
    let named = Policy::named(Policy::NAMED[random.usize(..Policy::NAMED.len())].0).unwrap_or_default();
    let restless = Poller { enter: 1, patience: 1, keep: u32::MAX, own_cpu: true };
    let poller = [None, None, None, Some(Poller::default()), Some(restless)][random.usize(..5)];
    let rate = |random: &mut fastrand::Rng| {
        let rate = Rate { per_second: log_uniform(random, 1_000.0, 200_000.0) as u32, burst: random.u32(1..100) };
        (random.u32(..8) == 0).then_some(rate)
    };
    let limits = Limits { halts: rate(random), kicks: rate(random), pause_loops: rate(random), ..Limits::default() };
    Config {
        queue: [Queue::Previous, Queue::Holder, Queue::None][random.usize(..3)],
        wake_ahead: random.u32(..4).saturating_sub(1),
        deadline_ns: DEADLINE_NS,
        flags: match random.u32(..16) {
            0 => HostFlags::DEDICATED,
            1 => HostFlags::OFF,
            _ => HostFlags::default(),
        },
        spin_budget: [0, 0, 1, 1, 2_000, 100_000][random.usize(..6)],
        policy: Policy { poller, limits, ..named },
        ..Config::default()
    }
}

fn log_uniform(random: &mut fastrand::Rng, low: f64, high: f64) -> f64 {
    low * (high / low).powf(random.f64())
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_everything_and_seeds_differ() {
        let backends = [Backend::Threads];
        let mixes: Vec<_> = (0..500).map(|seed| Mix::new(seed, &backends).to_string()).collect();
        assert!((0..500).all(|seed| Mix::new(seed, &backends).to_string() == mixes[seed as usize]));
        let different: std::collections::BTreeSet<_> = mixes.iter().collect();
        assert_eq!(different.len(), mixes.len());
    }

    #[test]
    fn every_choice_turns_up() {
        let mixes: Vec<_> = (0..2000).map(|seed| Mix::new(seed, &[Backend::Threads])).collect();
        let some = |what: fn(&Mix) -> bool| assert!((100..1900).contains(&mixes.iter().filter(|mix| what(mix)).count()));
        some(|mix| mix.spec.churn > 0);
        some(|mix| mix.spec.log > 0);
        some(|mix| mix.hogs > 0);
        some(|mix| mix.drops.is_some());
        some(|mix| mix.pace.is_some());
        some(|mix| mix.spec.host.policy.poller.is_some());
        some(|mix| mix.spec.host.policy.limits.kicks.is_some());
        some(|mix| mix.spec.vcpus > 6);
        for (name, ..) in Policy::NAMED {
            let named = Policy::named(name).expect("in the table");
            assert!(mixes.iter().any(|mix| mix.spec.host.policy.pause_loop == named.pause_loop), "{name}");
        }
    }
}
