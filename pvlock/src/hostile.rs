//! `pvlock hostile`: a VM whose guest breaks the rules beside one that does ordinary work, in one process. The second must get its
//! fair share of the CPUs, which is what it gets beside a VM that only spins; and whatever the first does, both can be paused,
//! saved and ended.

use crate::backend::{RunError, Spec, kvm::Machine};
use crate::run::{CplChoice, NotifyChoice};
use crate::vm::{self, Cpl, KvmKind, VmFailure};
use clap::Args;
use comfy_table::{Cell, CellAlignment, Table, presets};
use pvlock_guest_image::job::{HaltBy, Workload, phase};
use pvlock_guest_image::{Job, LockKind};
use pvlock_host::{Config, Limits, Policy, Poller, Rate, Statistics};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time for the schedulers to have run everybody, before anything is measured.
const WARM_UP: Duration = Duration::from_millis(300);
/// What has not happened by then hangs.
const HANG: Duration = Duration::from_secs(20);
/// How often it is looked whether something has happened.
const LOOK: Duration = Duration::from_millis(1);

/// Options of `pvlock hostile`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// vCPUs of each VM [default: the number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub vcpus: Option<u32>,
    /// Seconds to measure each pair
    #[arg(long, value_name = "S", default_value = "1", value_parser = crate::run::positive)]
    pub seconds: f64,
    /// Runs of each pair; the table shows the medians
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// How kicks of the hostile guest reach its host
    #[arg(long, value_enum, default_value_t = NotifyChoice::Immediate)]
    pub notify: NotifyChoice,
    /// Privilege level of the guests
    #[arg(long, value_enum, default_value_t = CplChoice::Auto)]
    pub cpl: CplChoice,
}

/// Two VMs and how long they run beside one another.
#[derive(Clone, Debug)]
pub struct Pair {
    /// What the hostile one does.
    pub hostile: Spec,
    /// What its neighbour does.
    pub neighbour: Spec,
    /// Privilege level of both.
    pub cpl: Cpl,
    /// Time to measure.
    pub time: Duration,
}

/// What came of a pair.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// Acquisitions of the neighbour per second.
    pub rate: f64,
    /// Until all vCPUs of both VMs were out of their guests.
    pub pause: Duration,
    /// Until registers and memory of both were copied, after that.
    pub save: Duration,
    /// Until both VMs had ended.
    pub end: Duration,
    /// What the host of the hostile VM counted.
    pub hostile: Statistics,
    /// What the neighbour's counted.
    pub neighbour: Statistics,
    /// Acquisitions of the neighbour in all.
    pub acquisitions: u64,
    /// Whether none of them was lost or counted twice.
    pub exact: bool,
}

/// What a hostile guest has managed to do.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A VM could not be made.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A VM ended otherwise than it was told to.
    #[error("a VM failed: {0}")]
    Vm(#[from] VmFailure),
    /// Something took longer than it ever may.
    #[error("{0} did not happen within {HANG:?}")]
    Hang(&'static str),
    /// The user interrupted.
    #[error("interrupted")]
    Interrupted,
}

/// Waits until `done` says so.
fn until(what: &'static str, interrupt: &AtomicBool, done: impl Fn() -> bool) -> Result<(), Failure> {
    let asked = Instant::now();
    while !done() {
        if interrupt.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        if asked.elapsed() > HANG {
            return Err(Failure::Hang(what));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn acquisitions(job: &Job) -> u64 {
    job.done.iter().map(|done| done.acquisitions.load(Ordering::Relaxed)).sum()
}

impl Pair {
    /// The usual pair: this attack, on a host with these settings, beside vCPUs that take one preemptable lock.
    pub fn new(attack: Workload, host: Config, vcpus: usize, cpl: Cpl, time: Duration) -> Self {
        let neighbour = Spec {
            lock: LockKind::Preemptable,
            workload: Workload::Counter,
            vcpus,
            locks: 1,
            inside: 200,
            outside: 2000,
            limit: 0,
            churn: 0,
            log: 0,
            // Longer than it could wait beside any neighbour: a forced wake is a lost kick.
            host: Config { deadline_ns: HANG.as_nanos() as u64, ..Config::default() },
            paravirtual: true,
            halt: HaltBy::Doorbell,
            ioeventfd: false,
        };
        Self { hostile: Spec { workload: attack, host, ..neighbour.clone() }, neighbour, cpl, time }
    }

    /// Runs both, pauses and saves both, lets both go on, and ends both.
    ///
    /// # Errors
    ///
    /// See [`Failure`].
    pub fn run(&self, interrupt: &AtomicBool) -> Result<Trial, Failure> {
        let hostile = Machine::start(&self.hostile, self.cpl)?;
        let neighbour = Machine::start(&self.neighbour, self.cpl)?;
        let (theirs, job) = (hostile.job(), neighbour.job());
        let ready = |job: &Job, spec: &Spec| job.ready.load(Ordering::Acquire) as usize >= spec.vcpus;
        until("the start of both VMs", interrupt, || ready(theirs, &self.hostile) && ready(job, &self.neighbour))?;
        // Release: pairs with the vCPUs' Acquire.
        theirs.phase.store(phase::MEASURE, Ordering::Release);
        job.phase.store(phase::MEASURE, Ordering::Release);

        sleep(WARM_UP, interrupt)?;
        let (before, started) = (acquisitions(job), Instant::now());
        sleep(self.time, interrupt)?;
        let rate = (acquisitions(job) - before) as f64 / started.elapsed().as_secs_f64();

        let asked = Instant::now();
        hostile.pause().ok_or(Failure::Hang("the pause of the hostile VM"))?;
        neighbour.pause().ok_or(Failure::Hang("the pause of its neighbour"))?;
        let paused = Instant::now();
        hostile.save().ok_or(Failure::Hang("the snapshot of the hostile VM"))?;
        neighbour.save().ok_or(Failure::Hang("the snapshot of its neighbour"))?;
        let saved = Instant::now();
        let at_rest = acquisitions(job);
        hostile.resume();
        neighbour.resume();
        until("progress after the pause", interrupt, || acquisitions(job) > at_rest)?;

        let told = Instant::now();
        job.phase.store(phase::STOP, Ordering::Release);
        // The hostile one is not asked.
        let hostile = hostile.shut_down()?;
        until("the end of the neighbour", interrupt, || job.ended.load(Ordering::Acquire) as usize >= self.neighbour.vcpus)?;
        let neighbour = neighbour.shut_down()?;
        let end = told.elapsed();

        let job = neighbour.job();
        let advanced: u64 = job.protected.iter().map(|protected| protected.counter.load(Ordering::Relaxed)).sum();
        Ok(Trial {
            rate,
            pause: paused - asked,
            save: saved - paused,
            end,
            hostile: hostile.host,
            neighbour: neighbour.host,
            acquisitions: acquisitions(job),
            exact: advanced == acquisitions(job),
        })
    }
}

fn sleep(time: Duration, interrupt: &AtomicBool) -> Result<(), Failure> {
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        if interrupt.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        std::thread::sleep(left.min(Duration::from_millis(20)));
    }
    Ok(())
}

/// A VM's allowance for one that is not trusted: what a busy honest one of the README's table rings, and a little more.
pub const ALLOWANCE: Limits = {
    let rate = Some(Rate { per_second: 20_000, burst: 200 });
    Limits { halts: rate, kicks: rate, pause_loops: rate, longest_ns: 1_000_000 }
};

/// Every attack, with and without limits.
#[derive(Debug)]
pub struct Report {
    rows: Vec<(&'static str, bool, Vec<Trial>)>,
}

/// Runs every attack. What was measured until a failure is in the report.
pub fn attack(options: &Options, interrupt: &AtomicBool, mut progress: impl FnMut(u64, &str)) -> (Report, Result<(), Failure>) {
    let poller = (options.notify == NotifyChoice::Poller).then(Poller::default);
    let host = |limits| Config { policy: Policy { limits, poller, ..Policy::default() }, ..Config::default() };
    let names =
        Workload::ALL.into_iter().filter(|(_, workload)| *workload == Workload::Spin || Workload::HOSTILE.contains(workload));
    let cells: Vec<_> = names
        .flat_map(|(name, workload)| [false, true].map(|limited| (name, workload, limited)))
        .filter(|&(_, workload, limited)| !(workload == Workload::Spin && limited))
        .collect();
    let mut report = Report { rows: cells.iter().map(|&(name, _, limited)| (name, limited, Vec::new())).collect() };
    let mut run = || -> Result<(), Failure> {
        vm::open().map_err(RunError::from)?;
        let cpl = match options.cpl {
            CplChoice::Auto => Cpl::best_for(KvmKind::detect()),
            CplChoice::Zero => Cpl::Zero,
            CplChoice::Three => Cpl::Three,
        };
        let vcpus =
            options.vcpus.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |vcpus| vcpus as usize);
        let time = Duration::from_secs_f64(options.seconds);
        let mut runs = 0;
        for _ in 0..options.repeat {
            for (&(name, workload, limited), row) in cells.iter().zip(&mut report.rows) {
                progress(runs, name);
                runs += 1;
                let host = host(if limited { ALLOWANCE } else { Limits::default() });
                let mut pair = Pair::new(workload, host, vcpus, cpl, time);
                pair.hostile.ioeventfd = options.notify == NotifyChoice::Ioeventfd;
                row.2.push(pair.run(interrupt)?);
            }
        }
        Ok(())
    };
    let result = run();
    (report, result)
}

impl Options {
    /// Pairs to run.
    pub fn runs(&self) -> u64 {
        u64::from(self.repeat) * (1 + 2 * Workload::HOSTILE.len() as u64)
    }
}

impl Report {
    /// Whether each neighbour counted right, and never had to be woken by its deadline.
    pub fn is_sound(&self) -> bool {
        self.rows.iter().flat_map(|row| &row.2).all(|trial| trial.exact && trial.neighbour.forced == 0)
    }

    /// A row for each attack, with medians.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
            "neighbour is",
            "limits",
            "ops/s",
            "share",
            "least",
            "most",
            "pause",
            "save",
            "end",
            "longest",
            "halts/s",
            "kicks/s",
            "refused/s",
            "forced",
            "exact",
        ]);
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let fair = self.rows.first().map_or(f64::NAN, |row| median(&row.2, |trial| trial.rate));
        for (name, limited, trials) in self.rows.iter().filter(|row| !row.2.is_empty()) {
            let ms = |time: f64| format!("{:.1} ms", 1e3 * time);
            let of = |figure: fn(&Trial) -> Duration| ms(median(trials, |trial| figure(trial).as_secs_f64()));
            let longest =
                trials.iter().flat_map(|trial| [trial.pause, trial.pause + trial.save, trial.end]).max().unwrap_or_default();
            let percent = |rate: f64| format!("{:.0} %", 100.0 * rate / fair);
            let shares = || trials.iter().map(|trial| trial.rate);
            let seconds = |figure: fn(&Statistics) -> u64| {
                format!("{:.0}", median(trials, |trial| figure(&trial.hostile) as f64 / trial.acquisitions as f64 * trial.rate))
            };
            table.add_row([
                Cell::new(name),
                Cell::new(if *limited { "yes" } else { "no" }),
                Cell::new(format!("{:.0} k", median(trials, |trial| trial.rate) / 1e3)),
                Cell::new(percent(median(trials, |trial| trial.rate))),
                Cell::new(percent(shares().fold(f64::INFINITY, f64::min))),
                Cell::new(percent(shares().fold(0.0, f64::max))),
                Cell::new(of(|trial| trial.pause)),
                Cell::new(of(|trial| trial.save)),
                Cell::new(of(|trial| trial.end)),
                Cell::new(ms(longest.as_secs_f64())),
                Cell::new(seconds(|host| host.halts)),
                Cell::new(seconds(|host| host.kicks_sent)),
                Cell::new(seconds(|host| host.refused)),
                Cell::new(trials.iter().map(|trial| trial.neighbour.forced).sum::<u64>()),
                Cell::new(trials.iter().all(|trial| trial.exact)),
            ]);
        }
        table.to_string()
    }
}

fn median(trials: &[Trial], figure: impl Fn(&Trial) -> f64) -> f64 {
    let mut figures: Vec<f64> = trials.iter().map(figure).collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
