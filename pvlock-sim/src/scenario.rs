//! What is simulated: a host, VMs on it, and a contender: a lock with what the host does for it.

use crate::locks::LockKind;
use crate::params::Params;
use crate::workload::Workload;
use pvlock_host::{Config, Policy, Queue, RunStates};

/// A lock, and what the host does: one row of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Contender {
    /// Its name.
    pub name: String,
    /// The guests' lock.
    pub lock: LockKind,
    /// What hardware and host do with spinning vCPUs; none: there are no pause-loop exits.
    pub policy: Option<Policy>,
    /// On whose queue halted waiters sleep.
    pub queue: Queue,
    /// How many of its queue a vCPU wakes when it is scheduled in.
    pub wake_ahead: u32,
    /// Hardware's pause-loop window in cycles; the parameters' if none.
    pub window: Option<u64>,
    /// Who may run when.
    pub rule: RuleKind,
}

/// Kinds of [`crate::sched::Rule`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RuleKind {
    /// By virtual run time.
    #[default]
    Fair,
    /// VM by VM.
    Gang,
    /// Lock holders and next waiters first.
    Clairvoyant,
}

impl Contender {
    /// A lock on hosts without pause-loop exits.
    pub fn new(name: &str, lock: LockKind) -> Self {
        Self { name: name.to_owned(), lock, policy: None, queue: Queue::None, wake_ahead: 0, window: None, rule: RuleKind::Fair }
    }

    /// With this policy at pause-loop exits.
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// The engine's settings for it.
    pub(crate) fn config(&self) -> Config {
        Config {
            queue: self.queue,
            wake_ahead: self.wake_ahead,
            run_states: RunStates::Exact,
            policy: self.policy.unwrap_or_default(),
            ..Config::default()
        }
    }
}

/// Where the vCPUs of a VM may run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Pins {
    /// Anywhere.
    #[default]
    Free,
    /// Each on one CPU: vCPU `n` on the `n`th.
    Each(Vec<usize>),
    /// All of them on these.
    Among(Vec<usize>),
}

/// One VM.
#[derive(Clone, Debug, PartialEq)]
pub struct VmSpec {
    /// Its size.
    pub vcpus: usize,
    /// Where it may run.
    pub pins: Pins,
    /// What it does.
    pub workload: Workload,
}

/// A whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The host's CPUs.
    pub cpus: usize,
    /// Its VMs.
    pub vms: Vec<VmSpec>,
    /// Tasks of the host that only compute.
    pub others: usize,
    /// The lock and the host's help.
    pub contender: Contender,
    /// Simulated before measuring, in ns.
    pub warm_up_ns: u64,
    /// Measured, in ns.
    pub run_ns: u64,
    /// Of everything that is random.
    pub seed: u64,
    /// What things cost.
    pub params: Params,
    /// From when to when (in ns after the warm-up) to record.
    pub record_ns: Option<(u64, u64)>,
}

/// What cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScenarioError {
    /// No host.
    #[error("a host has 1 to {MAX_CPUS} CPUs, not {0}")]
    Cpus(usize),
    /// Nothing to run.
    #[error("there is no VM to simulate")]
    NoVms,
    /// Too many or no vCPUs.
    #[error("VM {vm}: a VM has 1 to {MAX_VCPUS} vCPUs, not {vcpus}")]
    Vcpus {
        /// Which.
        vm: usize,
        /// How many.
        vcpus: usize,
    },
    /// Pins that cannot be.
    #[error("VM {vm}: {pins} pins for {vcpus} vCPUs: each vCPU needs one")]
    Pins {
        /// Which.
        vm: usize,
        /// How many.
        pins: usize,
        /// Of how many.
        vcpus: usize,
    },
    /// A CPU that is not there.
    #[error("VM {vm} is pinned to CPU {cpu}, but the host has CPUs 0 to {}", cpus - 1)]
    NoSuchCpu {
        /// Which.
        vm: usize,
        /// Where.
        cpu: usize,
        /// How many there are.
        cpus: usize,
    },
    /// A lock that the workload has not.
    #[error("nothing is measured: the run lasts 0 ns")]
    NoTime,
    /// The engine refuses.
    #[error("the host's settings: {0}")]
    Engine(String),
}

/// Largest host.
pub const MAX_CPUS: usize = 1024;
/// Largest VM.
pub const MAX_VCPUS: usize = 256;

impl Scenario {
    /// Whether it can be.
    ///
    /// # Errors
    ///
    /// See [`ScenarioError`].
    pub fn check(&self) -> Result<(), ScenarioError> {
        if !(1..=MAX_CPUS).contains(&self.cpus) {
            return Err(ScenarioError::Cpus(self.cpus));
        }
        if self.vms.is_empty() {
            return Err(ScenarioError::NoVms);
        }
        if self.run_ns == 0 {
            return Err(ScenarioError::NoTime);
        }
        for (vm, spec) in self.vms.iter().enumerate() {
            let vcpus = spec.vcpus;
            if !(1..=MAX_VCPUS).contains(&vcpus) {
                return Err(ScenarioError::Vcpus { vm, vcpus });
            }
            let pins = match &spec.pins {
                Pins::Free => continue,
                Pins::Each(pins) if pins.len() != vcpus => return Err(ScenarioError::Pins { vm, pins: pins.len(), vcpus }),
                Pins::Among(pins) if pins.is_empty() => return Err(ScenarioError::Pins { vm, pins: 0, vcpus }),
                Pins::Each(pins) | Pins::Among(pins) => pins,
            };
            if let Some(&cpu) = pins.iter().find(|&&cpu| cpu >= self.cpus) {
                return Err(ScenarioError::NoSuchCpu { vm, cpu, cpus: self.cpus });
            }
        }
        Ok(())
    }

    /// vCPUs and other tasks, by CPUs.
    pub fn overcommit(&self) -> f64 {
        (self.vms.iter().map(|vm| vm.vcpus).sum::<usize>() + self.others) as f64 / self.cpus as f64
    }
}
