//! What can be asked for, and what it comes to.

use super::report::BOUND;
use super::sweep::Sweep;
use crate::run::QueueChoice;
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use pvlock_host::Policy;
use pvlock_sim::locks::LockKind;
use pvlock_sim::params::{self, Params, ParamsError};
use pvlock_sim::scenario::{Contender, MAX_CPUS, MAX_VCPUS, Pins, RuleKind, Scenario, ScenarioError, VmSpec};
use pvlock_sim::workload::Workload;
use std::path::PathBuf;

/// Whose turn it is on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RuleChoice {
    /// That of the task with the least run time.
    Fair,
    /// That of all vCPUs of a VM at once.
    Gang,
    /// That of lock holders and next waiters: no scheduler can know.
    Clairvoyant,
}

/// What vCPUs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WorkloadChoice {
    /// Take one lock, again and again, as the vCPUs of `pvlock run` do.
    Micro,
    /// Take one of 64 locks.
    ManyLocks,
    /// Short sections of a file system.
    Dbench,
    /// One hot address space, and TLB flushes.
    Ebizzy,
    /// Messages and wake-ups.
    Hackbench,
    /// Almost only computing.
    Kernbench,
    /// Many locks, seldom taken.
    Sysbench,
}

/// The name of no policy: hardware without pause-loop exits.
const NO_EXITS: &str = "none";
/// vCPUs per CPU.
const OVERCOMMIT: [usize; 4] = [1, 2, 4, 8];
/// What comes before measuring, as a share of what is measured.
const WARM_UP: f64 = 0.25;

fn lock(name: &str) -> Result<LockKind, String> {
    let known = || LockKind::ALL.into_iter().filter(|(_, kind)| *kind != LockKind::Oracle);
    known().find(|(known, _)| *known == name).map(|(_, kind)| kind).ok_or_else(|| {
        let names: Vec<_> = known().map(|(name, _)| name).collect();
        format!("there is no such lock; choose from {}", names.join(", "))
    })
}

fn policies() -> PossibleValuesParser {
    PossibleValuesParser::new([NO_EXITS].into_iter().chain(Policy::NAMED.map(|named| named.0)))
}

/// A time, in any unit.
pub(super) fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("must be a number above 0, at most 86400".into()),
    }
}

pub(super) fn not_negative(text: &str) -> Result<f64, String> {
    if text.parse() == Ok(0.0) { Ok(0.0) } else { positive(text) }
}

pub(super) fn ns_of_ms(ms: f64) -> u64 {
    (ms * 1e6).round() as u64
}

/// What every simulation can be told.
#[derive(Clone, Debug, Args)]
pub struct MachineOptions {
    /// Threads of this machine to run on [default: one for each CPU]; they change nothing but the time it takes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// What things cost: a file like pvlock-sim/params.toml, which is the default
    #[arg(long, value_name = "FILE")]
    pub params: Option<PathBuf>,
    /// Set one parameter, such as exits.exit=1500; may be repeated
    #[arg(long, value_name = "NAME=NUMBER")]
    pub set: Vec<String>,
}

impl MachineOptions {
    /// Threads to run on.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |threads| threads as usize)
    }

    /// What things cost.
    pub(super) fn params(&self) -> Result<Params, OptionsError> {
        let text = match &self.params {
            Some(path) => std::fs::read_to_string(path).map_err(|source| OptionsError::Read { path: path.clone(), source })?,
            None => params::DEFAULT.to_owned(),
        };
        Ok(Params::with(&text, &self.set)?)
    }
}

/// Options of `pvlock sim`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// CPUs of the host
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub cpus: usize,
    /// vCPUs of each VM, a list [default: what makes 1, 2, 4 and 8 vCPUs per CPU]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub vcpus: Vec<usize>,
    /// VMs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub vms: usize,
    /// The CPU of each vCPU of a VM, a list; the same for each VM [default: any]
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "vcpus")]
    pub pins: Vec<usize>,
    /// Locks to compare, a list of plain-ticket, test-and-set, classic-ticket, queued, ticket, preemptable [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = lock)]
    pub locks: Vec<LockKind>,
    /// What the host does at a pause-loop exit, a list; `none`: hardware without such exits
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "yield", value_parser = policies())]
    pub policy: Vec<String>,
    /// On whose wait queue the host puts sleepers
    #[arg(long, value_enum, default_value_t = QueueChoice::Previous)]
    pub queue: QueueChoice,
    /// Sleepers that a resuming vCPU wakes before they are kicked
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=64))]
    pub wake_ahead: u32,
    /// Whose turn it is on a CPU
    #[arg(long, value_enum, default_value_t = RuleChoice::Fair)]
    pub rule: RuleChoice,
    /// What vCPUs do
    #[arg(long, value_enum, default_value_t = WorkloadChoice::Micro)]
    pub workload: WorkloadChoice,
    /// Work inside the lock, in ns
    #[arg(long, value_name = "NS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    pub inside: u64,
    /// Work outside the lock, in ns, exponentially distributed about this mean
    #[arg(long, value_name = "NS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    pub outside: u64,
    /// Simulated seconds that are measured
    #[arg(long, value_name = "S", default_value = "0.5", value_parser = positive)]
    pub seconds: f64,
    /// Runs of each row, with consecutive seeds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub seeds: u64,
    /// The first seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Threads and parameters
    #[command(flatten)]
    pub machine: MachineOptions,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Where to draw share of the bound over overcommit: .png or .svg
    #[arg(long, value_name = "FILE", default_value = "pvlock-sim.png")]
    pub plot: PathBuf,
    /// Draw who ran where in a part of the table's last row: .png or .svg; .jsonl for its data
    #[arg(long, value_name = "FILE")]
    pub map: Option<PathBuf>,
    /// From when on to draw the map, in ms
    #[arg(long, value_name = "MS", default_value = "0", value_parser = not_negative)]
    pub map_from_ms: f64,
    /// How much of the run to draw, in ms
    #[arg(long, value_name = "MS", default_value = "3", value_parser = positive)]
    pub map_ms: f64,
    /// Write the same part of the run as trace events, for Chrome's or Perfetto's viewer
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// What is wrong with the options.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// The file of parameters is not there.
    #[error("cannot read the parameters {path}: {source}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The parameters are wrong.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// More VMs than vCPUs.
    #[error("{vms} VMs cannot share {cpus} vCPUs: say how many each has with --vcpus")]
    Share {
        /// VMs.
        vms: usize,
        /// CPUs.
        cpus: usize,
    },
    /// More pins than CPUs.
    #[error("--pins {pins} is no CPU: the host has CPUs 0 to {}", cpus - 1)]
    Pin {
        /// Where.
        pins: usize,
        /// How many there are.
        cpus: usize,
    },
    /// The part to draw is not in the run.
    #[error(
        "the run ends at {run_ms} ms, before the map does at {end_ms} ms: choose a smaller --map-from-ms or --map-ms, or more --seconds"
    )]
    Map {
        /// What there is.
        run_ms: f64,
        /// What is asked for.
        end_ms: f64,
    },
    /// No kind of map.
    #[error("{path}: the name of a map ends in .png, .svg or .jsonl", path = path.display())]
    MapEnding {
        /// Which.
        path: PathBuf,
    },
    /// Not a topology.
    #[error(transparent)]
    Scenario(#[from] ScenarioError),
}

/// One lock with what the host does for it, on so many vCPUs: one row.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    /// What is compared.
    pub contender: Contender,
    /// The policy's name.
    pub policy: String,
    /// vCPUs of each VM.
    pub vcpus: usize,
    /// vCPUs per CPU.
    pub overcommit: f64,
}

impl Options {
    /// All runs that these options come to.
    pub(super) fn sweep(&self) -> Result<Sweep, OptionsError> {
        let params = self.machine.params()?;
        if !(1..=MAX_CPUS).contains(&self.cpus) {
            return Err(ScenarioError::Cpus(self.cpus).into());
        }
        if self.vms == 0 {
            return Err(ScenarioError::NoVms.into());
        }
        if let Some(&pins) = self.pins.iter().find(|&&cpu| cpu >= self.cpus) {
            return Err(OptionsError::Pin { pins, cpus: self.cpus });
        }
        let run_ns = (self.seconds * 1e9).round() as u64;
        let window = (ns_of_ms(self.map_from_ms), ns_of_ms(self.map_from_ms + self.map_ms));
        let records = self.map.is_some() || self.trace.is_some();
        if records && window.1 > run_ns {
            return Err(OptionsError::Map { run_ms: run_ns as f64 / 1e6, end_ms: window.1 as f64 / 1e6 });
        }
        let cells = self.cells()?;
        let mut scenarios = Vec::new();
        for cell in &cells {
            let pins = if self.pins.is_empty() { Pins::Free } else { Pins::Each(self.pins.clone()) };
            let vm = VmSpec { vcpus: cell.vcpus, pins, workload: self.workload() };
            scenarios.extend((0..self.seeds).map(|n| Scenario {
                cpus: self.cpus,
                vms: vec![vm.clone(); self.vms],
                others: 0,
                contender: cell.contender.clone(),
                warm_up_ns: (run_ns as f64 * WARM_UP) as u64,
                run_ns,
                seed: self.seed.wrapping_add(n),
                params,
                record_ns: None,
            }));
        }
        scenarios.iter().try_for_each(Scenario::check)?;
        // The last row's first run.
        let recorded = records.then(|| scenarios.len() - self.seeds as usize);
        if let Some(recorded) = recorded {
            scenarios[recorded].record_ns = Some(window);
        }
        Ok(Sweep { cells, scenarios, seeds: self.seeds as usize, recorded })
    }

    fn workload(&self) -> Workload {
        let locks = match self.workload {
            WorkloadChoice::Micro => 1,
            WorkloadChoice::ManyLocks => 64,
            WorkloadChoice::Dbench => return Workload::Dbench,
            WorkloadChoice::Ebizzy => return Workload::Ebizzy,
            WorkloadChoice::Hackbench => return Workload::Hackbench,
            WorkloadChoice::Kernbench => return Workload::Kernbench,
            WorkloadChoice::Sysbench => return Workload::Sysbench,
        };
        Workload::Micro { locks, inside_ns: self.inside, outside_ns: self.outside }
    }

    /// The bound first, then the contenders, on each number of vCPUs.
    fn cells(&self) -> Result<Vec<Cell>, OptionsError> {
        let counts = if self.vcpus.is_empty() { self.counts()? } else { self.vcpus.clone() };
        let all = || LockKind::ALL.into_iter().map(|(_, kind)| kind).filter(|kind| *kind != LockKind::Oracle);
        let locks: Vec<_> = if self.locks.is_empty() { all().collect() } else { self.locks.clone() };
        let mut cells = Vec::new();
        for vcpus in counts {
            let overcommit = (vcpus * self.vms) as f64 / self.cpus as f64;
            let rule = RuleKind::Clairvoyant;
            let contender = Contender { rule, ..Contender::new(BOUND, LockKind::Oracle) };
            cells.push(Cell { contender, policy: NO_EXITS.to_owned(), vcpus, overcommit });
            for policy in &self.policy {
                for &lock in &locks {
                    let contender = self.contender(lock, policy);
                    cells.push(Cell { contender, policy: policy.clone(), vcpus, overcommit });
                }
            }
        }
        Ok(cells)
    }

    fn counts(&self) -> Result<Vec<usize>, OptionsError> {
        let counts: Vec<_> =
            OVERCOMMIT.map(|overcommit| overcommit * self.cpus / self.vms).into_iter().filter(|vcpus| *vcpus > 0).collect();
        let mut counts: Vec<_> = counts.into_iter().filter(|vcpus| *vcpus <= MAX_VCPUS).collect();
        counts.dedup();
        if counts.is_empty() { Err(OptionsError::Share { vms: self.vms, cpus: self.cpus }) } else { Ok(counts) }
    }

    fn contender(&self, lock: LockKind, policy: &str) -> Contender {
        let name = if self.policy.len() > 1 { format!("{}, {policy}", lock.name()) } else { lock.name().to_owned() };
        let rule = match self.rule {
            RuleChoice::Fair => RuleKind::Fair,
            RuleChoice::Gang => RuleKind::Gang,
            RuleChoice::Clairvoyant => RuleKind::Clairvoyant,
        };
        Contender {
            policy: Policy::named(policy),
            queue: self.queue.queue(),
            wake_ahead: self.wake_ahead,
            rule,
            ..Contender::new(&name, lock)
        }
    }
}
