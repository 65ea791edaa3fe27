//! `pvlock run`: each lock at each overcommit, one VM a cell.

use crate::backend::{Backend, RunError, Spec};
use crate::measure::{Measured, Row, measure, median, share_of_bound};
use crate::session::{Ended, Limits, Vcpus};
use crate::sweep::{self, Sweep};
use crate::vm::{self, Cpl, ExitCounts, KvmKind, NoPvUnhalt};
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use pvlock_guest_image::job::{self, Workload};
use pvlock_guest_image::{HaltBy, LockKind, job::MAX_LOCKS};
use pvlock_host::protocol::HostFlags;
use pvlock_host::{Config, Policy, Poller, Queue, Statistics};
use pvlock_sim::trace::Trace;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Which back-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// `/dev/kvm` if it is usable, else threads.
    Auto,
    /// Only `/dev/kvm`.
    Kvm,
    /// Threads of this process, without a VM.
    Threads,
}

/// Which privilege level the guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CplChoice {
    /// 0 on hardware KVM, 3 on software KVM.
    Auto,
    /// Kernel.
    #[value(name = "0")]
    Zero,
    /// User.
    #[value(name = "3")]
    Three,
}

/// On whose queue sleepers wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QueueChoice {
    /// The lock holder's.
    Holder,
    /// That of the vCPU with the ticket before.
    Previous,
    /// Nobody's.
    None,
}

impl QueueChoice {
    /// The engine's name for it.
    pub(crate) fn queue(self) -> Queue {
        match self {
            Self::Holder => Queue::Holder,
            Self::Previous => Queue::Previous,
            Self::None => Queue::None,
        }
    }
}

/// How kicks reach the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NotifyChoice {
    /// Each by an exit (on threads, a call) of its own.
    Immediate,
    /// Without one while a thread of the host looks for them in memory, which it does if there are many and a CPU is idle.
    Poller,
    /// Through eventfds and a thread of the host, without exits; only on KVM.
    Ioeventfd,
}

fn lock(name: &str) -> Result<LockKind, String> {
    by_name(&LockKind::ALL, name, "lock")
}

fn workload(name: &str) -> Result<Workload, String> {
    by_name(&Workload::ALL, name, "workload")
}

fn halt(name: &str) -> Result<HaltBy, String> {
    by_name(&HaltBy::ALL, name, "way to halt")
}

fn by_name<T: Copy>(all: &[(&'static str, T)], name: &str, what: &str) -> Result<T, String> {
    all.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        format!("there is no such {what}; choose from {}", names.join(", "))
    })
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("must be a number above 0, at most 86400".into()),
    }
}

fn overcommit(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(value) if (1..=job::MAX_VCPUS).contains(&value) => Ok(value),
        _ => Err(format!("must be a whole number from 1 to {}", job::MAX_VCPUS)),
    }
}

/// Options of `pvlock run`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Where guest code runs
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
    /// Number of vCPUs, instead of --overcommit
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=job::MAX_VCPUS as i64))]
    pub vcpus: Option<u32>,
    /// vCPUs per CPU, a list [default: 1,2,4; in a sweep 1,2,4,8]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = overcommit)]
    pub overcommit: Vec<usize>,
    /// Locks to compare, a list of spin-ticket, spin-tas, mcs, ticket, preemptable and, only on threads, parking-lot, std
    /// [default: all that there are]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = lock)]
    pub locks: Vec<LockKind>,
    /// Run short and long critical sections (work of about 10 us) at every overcommit, and draw pictures of the results
    #[arg(long, conflicts_with_all = ["vcpus", "inside", "outside"])]
    pub sweep: bool,
    /// Where to put the pictures of a sweep: STEM-bound and STEM-waits, each as .svg and .png
    #[arg(long, value_name = "STEM", default_value = "pvlock-sweep", requires = "sweep")]
    pub plot: PathBuf,
    /// Seconds to run each lock
    #[arg(long, value_name = "S", default_value = "2", value_parser = positive)]
    pub seconds: f64,
    /// Work inside the lock, in iterations of about a nanosecond
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub inside: u64,
    /// Work outside the lock, in iterations
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub outside: u64,
    /// counter, ping-pong, many-locks, nested or try-mix
    #[arg(long, value_name = "NAME", default_value = "counter", value_parser = workload)]
    pub workload: Workload,
    /// On whose wait queue the host puts sleepers
    #[arg(long, value_enum, default_value_t = QueueChoice::Previous)]
    pub queue: QueueChoice,
    /// What the host does with a vCPU that reports its spinning
    #[arg(long, value_name = "NAME", default_value = "ignore", value_parser = PossibleValuesParser::new(Policy::NAMED.map(|named| named.0)))]
    pub policy: String,
    /// Sleepers that a resuming vCPU wakes before they are kicked
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=64))]
    pub wake_ahead: u32,
    /// How kicks reach the host
    #[arg(long, value_enum, default_value_t = NotifyChoice::Immediate)]
    pub notify: NotifyChoice,
    /// How waiters halt: doorbell, through pvlock's host; or pv-unhalt, by KVM's own means without it; only on hardware KVM
    #[arg(long, value_name = "NAME", default_value = "doorbell", value_parser = halt)]
    pub halt: HaltBy,
    /// Privilege level of the guest
    #[arg(long, value_enum, default_value_t = CplChoice::Auto)]
    pub cpl: CplChoice,
    /// Runs of each cell; the table shows the median
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Spin budget in ticks that the host gives the guest; 0: the guest's own
    #[arg(long, value_name = "TICKS", default_value_t = 0)]
    pub spin: u64,
    /// Tell the guest that every vCPU has a CPU of its own: nobody halts
    #[arg(long)]
    pub dedicated: bool,
    /// Keep an order log and check that nobody was overtaken
    #[arg(long)]
    pub check: bool,
    /// Write the first waits of each lock of a checking run as trace events, for Chrome's or Perfetto's viewer
    #[arg(long, value_name = "FILE", requires = "check")]
    pub trace: Option<PathBuf>,
    /// Seconds without progress after which a guest counts as hung
    #[arg(long, value_name = "S", default_value = "2", value_parser = positive)]
    pub watchdog: f64,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Entries of the order log of a checking run, for each lock.
const LOG_ENTRIES: u64 = 1 << 20;
/// The same where there are many locks.
const LOG_ENTRIES_OF_MANY: u64 = 1 << 15;

/// What the options come to on this machine.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where it runs.
    pub backend: Backend,
    /// Why there.
    pub why: String,
    /// CPUs of the machine.
    pub pcpus: usize,
    /// One for each lock, number of vCPUs and length of sections, in the order of the tables.
    pub cells: Vec<Spec>,
    /// The sections of a sweep, if it is one.
    pub sweep: Option<Sweep>,
    /// Runs of each.
    pub repeat: u32,
    /// Limits of each run.
    pub limits: Limits,
    /// Whether to keep a trace of the first run of each.
    pub trace: bool,
}

/// Where a plan stands.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Runs that are over.
    pub runs: u32,
    /// Time into the present run.
    pub time: Duration,
    /// The present cell.
    pub cell: &'a Spec,
}

/// Everything that came of a plan.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The rows, as far as the plan came.
    pub rows: Vec<Row>,
    /// What the hosts counted, in sum.
    pub host: Statistics,
    /// Exits by kind, in sum.
    pub exits: Option<ExitCounts>,
    /// Whether the user stopped it.
    pub interrupted: bool,
    /// What the order logs show of the first run of each cell, if the plan says so.
    pub trace: Option<Trace>,
}

/// What is wrong with the options, or this machine.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// KVM was asked for and cannot be had.
    #[error("{0}")]
    Kvm(#[from] vm::KvmError),
    /// More vCPUs than the VMM can do.
    #[error("{overcommit} vCPUs on each of {pcpus} CPUs are more than the {max} this program can run; choose a smaller --overcommit, or --vcpus", max = job::MAX_VCPUS)]
    TooMany {
        /// vCPUs per CPU.
        overcommit: usize,
        /// CPUs.
        pcpus: usize,
    },
    /// Eventfds without KVM.
    #[error("--notify ioeventfd is KVM's, and there is none here ({why}): use --backend kvm, or --notify poller or immediate")]
    NeedsKvm {
        /// Why it would run on threads.
        why: String,
    },
    /// KVM does not halt and kick for a guest here.
    #[error("--halt pv-unhalt: {0}")]
    NoPvUnhalt(#[from] NoPvUnhalt),
    /// An option that tells pvlock's host what to do, and no such host.
    #[error("{option} is for pvlock's host, which has no part in --halt pv-unhalt: leave one of the two out")]
    NeedsHost {
        /// The option.
        option: &'static str,
    },
    /// A lock that a guest cannot use.
    #[error("`{lock}` sleeps in the operating system, and the guest has none: add --backend threads, or leave it out of --locks")]
    NeedsThreads {
        /// Its name.
        lock: &'static str,
    },
}

impl Options {
    /// What these options come to on this machine.
    ///
    /// # Errors
    ///
    /// See [`PlanError`].
    pub fn plan(&self) -> Result<Plan, PlanError> {
        let (backend, why) = self.backend()?;
        if self.notify == NotifyChoice::Ioeventfd && matches!(backend, Backend::Threads) {
            return Err(PlanError::NeedsKvm { why });
        }
        if self.halt == HaltBy::PvUnhalt {
            self.halts_without_host(&backend)?;
        }
        let pcpus = std::thread::available_parallelism().map_or(1, usize::from);
        let counts = match self.vcpus {
            Some(vcpus) => vec![vcpus as usize],
            None => self
                .overcommits(pcpus)
                .into_iter()
                .map(|overcommit| {
                    let vcpus = overcommit * pcpus;
                    if vcpus <= job::MAX_VCPUS { Ok(vcpus) } else { Err(PlanError::TooMany { overcommit, pcpus }) }
                })
                .collect::<Result<_, _>>()?,
        };
        let locks = self.locks(&backend)?;
        let sweep = self.sweep.then(Sweep::calibrated);
        let sections = match &sweep {
            Some(sweep) => sweep.sections().map(|sections| (sections.inside, sections.outside)).to_vec(),
            None => vec![(self.inside, self.outside)],
        };
        let mut cells = Vec::new();
        for (inside, outside) in sections {
            let of_vcpus = |&vcpus: &usize| locks.iter().map(move |&lock| Spec { inside, outside, ..self.spec(lock, vcpus) });
            cells.extend(counts.iter().flat_map(of_vcpus));
        }
        let seconds = Duration::from_secs_f64;
        let limits = Limits { run: seconds(self.seconds), watchdog: seconds(self.watchdog), end: Limits::END };
        Ok(Plan { backend, why, pcpus, cells, sweep, repeat: self.repeat, limits, trace: self.trace.is_some() })
    }

    fn halts_without_host(&self, backend: &Backend) -> Result<(), PlanError> {
        backend.check_pv_unhalt()?;
        let told = [
            ("--queue", self.queue != QueueChoice::Previous),
            ("--policy", self.policy != "ignore"),
            ("--wake-ahead", self.wake_ahead != 0),
            ("--notify", self.notify != NotifyChoice::Immediate),
            ("--dedicated", self.dedicated),
        ];
        match told.into_iter().find(|(_, told)| *told) {
            Some((option, _)) => Err(PlanError::NeedsHost { option }),
            None => Ok(()),
        }
    }

    fn overcommits(&self, pcpus: usize) -> Vec<usize> {
        match (self.overcommit.as_slice(), self.sweep) {
            ([], false) => vec![1, 2, 4],
            // As far as the VMM goes, on a large machine; 1 stays, so that there is an error if not even that goes.
            ([], true) => sweep::OVERCOMMIT
                .into_iter()
                .filter(|&overcommit| overcommit == 1 || overcommit * pcpus <= job::MAX_VCPUS)
                .collect(),
            (told, _) => told.to_vec(),
        }
    }

    fn locks(&self, backend: &Backend) -> Result<Vec<LockKind>, PlanError> {
        let threads = matches!(backend, Backend::Threads);
        if self.locks.is_empty() {
            return Ok(LockKind::ALL.into_iter().map(|(_, lock)| lock).filter(|lock| threads || !lock.needs_std()).collect());
        }
        match self.locks.iter().find(|lock| lock.needs_std()) {
            Some(lock) if !threads => Err(PlanError::NeedsThreads { lock: lock.name() }),
            _ => Ok(self.locks.clone()),
        }
    }

    fn backend(&self) -> Result<(Backend, String), PlanError> {
        let kvm = || {
            let kind = KvmKind::detect();
            let cpl = match self.cpl {
                CplChoice::Auto => Cpl::best_for(kind),
                CplChoice::Zero => Cpl::Zero,
                CplChoice::Three => Cpl::Three,
            };
            Backend::Kvm { kind, cpl }
        };
        let told = |backend: Backend| (backend, "as told".to_owned());
        match self.backend {
            BackendChoice::Threads => Ok(told(Backend::Threads)),
            BackendChoice::Kvm => {
                vm::open()?;
                Ok(told(kvm()))
            }
            BackendChoice::Auto => Ok(match vm::open() {
                Ok(_) => (kvm(), "/dev/kvm is usable".to_owned()),
                Err(error) => (Backend::Threads, error.to_string()),
            }),
        }
    }

    fn spec(&self, lock: LockKind, vcpus: usize) -> Spec {
        // The parser lets no other name through.
        let policy = Policy::named(&self.policy).unwrap_or_default();
        let policy = Policy { poller: (self.notify == NotifyChoice::Poller).then(Poller::default), ..policy };
        let flags = if self.dedicated { HostFlags::DEDICATED } else { HostFlags::default() };
        Spec {
            lock,
            workload: self.workload,
            vcpus,
            locks: MAX_LOCKS,
            inside: self.inside,
            outside: self.outside,
            limit: 0,
            churn: 0,
            log: match (self.check && lock.is_strict(), self.workload.has_one_lock()) {
                (false, _) => 0,
                (true, true) => LOG_ENTRIES,
                (true, false) => LOG_ENTRIES_OF_MANY,
            },
            host: Config {
                queue: self.queue.queue(),
                wake_ahead: self.wake_ahead,
                flags,
                spin_budget: self.spin,
                policy,
                ..Config::default()
            },
            paravirtual: true,
            halt: self.halt,
            ioeventfd: self.notify == NotifyChoice::Ioeventfd,
        }
    }
}

impl Plan {
    /// Number of runs.
    pub fn runs(&self) -> u32 {
        self.cells.len() as u32 * self.repeat
    }

    /// Carries the plan out. When the user interrupts or a run fails, what was measured until then is in the report.
    ///
    /// The repeats of all cells are interleaved, so that a disturbance of the machine hits every lock alike.
    pub fn carry_out(&self, interrupt: &AtomicBool, mut progress: impl FnMut(Progress<'_>)) -> (Report, Option<RunError>) {
        let mut report = Report::default();
        let mut repeats: Vec<Vec<Row>> = vec![Vec::new(); self.cells.len()];
        let mut error = None;
        let mut runs = 0;
        let mut trace = self.trace.then(Trace::default);
        'all: for repeat in 0..self.repeat {
            for (number, (cell, rows)) in self.cells.iter().zip(&mut repeats).enumerate() {
                let tell = |time, _: &dyn Vcpus| progress(Progress { runs, time, cell });
                let read = |outcome: &crate::backend::Outcome<'_>| {
                    if let (Some(trace), 0) = (&mut trace, repeat) {
                        outcome.log.trace(outcome, cell, number, trace);
                    }
                    (outcome.ended, measure(cell, outcome, self.pcpus))
                };
                match self.backend.run(cell, self.limits, interrupt, tell, read) {
                    Ok((Ended::Interrupted, _)) => {
                        report.interrupted = true;
                        break 'all;
                    }
                    Ok((Ended::Failed | Ended::Hung { .. }, _)) => {
                        error = Some(RunError::Panicked);
                        break 'all;
                    }
                    Ok((Ended::Done, Measured { mut row, host, exits, .. })) => {
                        if self.sweep.is_none() {
                            row.waits.clear();
                        }
                        rows.push(row);
                        report.host = report.host + host;
                        if let Some(exits) = exits {
                            report.exits.get_or_insert_default().add(&exits);
                        }
                    }
                    Err(failure) => {
                        error = Some(failure);
                        break 'all;
                    }
                }
                runs += 1;
            }
        }
        report.trace = trace;
        report.rows = repeats.into_iter().filter_map(median).collect();
        share_of_bound(&mut report.rows);
        (report, error)
    }
}
