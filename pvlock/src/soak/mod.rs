//! `pvlock soak`: one random run after the other, while things happen to its vCPUs, until the time is over. Nothing may get
//! lost: no count, no kick, no memory, no file descriptor.
//!
//! The seed of a run says everything about it but when things happen, and run n of a soak has the seed of the soak plus n. So
//! the command that repeats a run is a soak that begins with it.

mod census;
mod disturber;
mod hogs;
mod mix;

use crate::backend::{Backend, RunError, kvm};
use crate::measure::{Measured, measure};
use crate::run::BackendChoice;
use crate::session::{Ended, Limits, Vcpus};
use crate::vm::{self, Cpl, KvmKind};
use census::{Census, Growth};
use clap::Args;
use disturber::Disturber;
use hogs::Hogs;
use mix::{Drops, Mix};
use pvlock_guest_image::job::phase;
use pvlock_host::Statistics;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A run without a single critical section for so long has lost something: longer than the deadline of a sleep, whose end is
/// counted as forced. Threads that are told to stop have as long: beside others they may get no CPU for seconds, and each of them
/// may have to wait for all others.
const WATCHDOG: Duration = Duration::from_secs(30);

/// Options of `pvlock soak`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// How long
    #[arg(long, value_name = "N", default_value = "5", value_parser = minutes)]
    pub minutes: f64,
    /// Where the random choices begin [default: another one each time]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// Repeat the first run, with the same choices
    #[arg(long)]
    pub fixed: bool,
    /// Where guest code runs; auto: on KVM and on threads in turn
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub backend: BackendChoice,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value <= 100_000.0 => Ok(value),
        _ => Err("must be a number above 0, at most 100000".into()),
    }
}

/// What a soak has come to so far.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seed of the first run.
    pub seed: u64,
    /// How long it took.
    pub time: Duration,
    /// Runs on KVM.
    pub on_kvm: u64,
    /// Runs on threads.
    pub on_threads: u64,
    /// VMs, or sets of threads, made and dropped; most of them not for a run.
    pub machines: u64,
    /// Acquisitions that were counted, and counted right.
    pub acquisitions: u64,
    /// What happened to vCPUs.
    pub disturbances: u64,
    /// What the hosts counted.
    pub host: Statistics,
    /// Files, threads and memory.
    pub growth: Growth,
}

/// Why a soak ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// KVM was asked for and cannot be had.
    #[error(transparent)]
    Kvm(#[from] vm::KvmError),
    /// This process cannot look at itself, or start a thread.
    #[error("the soak cannot watch itself: {0}")]
    Watch(#[from] std::io::Error),
    /// A run went wrong.
    #[error("{fault}\nin run {number}: {mix}\nto repeat it: cargo xtask soak --seed {seed} --fixed --minutes 1", seed = mix.seed)]
    Run {
        /// What is wrong.
        fault: String,
        /// Which run, from 0.
        number: u64,
        /// What it was made of.
        mix: Box<Mix>,
    },
}

impl Options {
    /// The seed that was asked for, or any.
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(|| fastrand::u64(..1 << 32))
    }
}

/// Runs from `seed` on until the time is over, the user interrupts, or something is wrong. `progress` is told how it stands after
/// each run.
pub fn soak(
    options: &Options,
    seed: u64,
    interrupt: &AtomicBool,
    mut progress: impl FnMut(&Summary),
) -> (Summary, Result<(), Failure>) {
    let mut soak = Soak { summary: Summary { seed, ..Summary::default() }, interrupt };
    let result = soak.run(options, &mut progress);
    (soak.summary, result)
}

struct Soak<'a> {
    summary: Summary,
    interrupt: &'a AtomicBool,
}

impl Soak<'_> {
    fn run(&mut self, options: &Options, progress: &mut impl FnMut(&Summary)) -> Result<(), Failure> {
        let backends = backends(options.backend)?;
        let started = Instant::now();
        let mut census: Option<Census> = None;
        for number in 0.. {
            let seed = self.summary.seed.wrapping_add(if options.fixed { 0 } else { number });
            let mix = Mix::new(seed, &backends);
            let fault = self.one(&mix).and_then(|()| {
                let census = match &mut census {
                    Some(census) => census,
                    // What is made once, such as a thread's first buffers, is made by now.
                    None if number + 1 < backends.len() as u64 => return Ok(()),
                    None => census.insert(Census::new().map_err(|error| error.to_string())?),
                };
                self.summary.growth = census.take(self.interrupt).map_err(|error| error.to_string())?;
                self.summary.growth.fault().map_or(Ok(()), Err)
            });
            self.summary.time = started.elapsed();
            if self.interrupted() {
                // Whatever it was, nobody waited for it to end.
                return Ok(());
            }
            fault.map_err(|fault| Failure::Run { fault, number, mix: Box::new(mix) })?;
            progress(&self.summary);
            if self.summary.time.as_secs_f64() >= 60.0 * options.minutes {
                return Ok(());
            }
        }
        Ok(())
    }

    fn interrupted(&self) -> bool {
        self.interrupt.load(Ordering::Relaxed)
    }

    fn one(&mut self, mix: &Mix) -> Result<(), String> {
        let _hogs = Hogs::start(mix.hogs).map_err(|error| error.to_string())?;
        match mix.drops {
            Some(drops) => self.drop_many(mix, drops),
            None => self.count(mix),
        }
    }

    /// A run to its end.
    fn count(&mut self, mix: &Mix) -> Result<(), String> {
        let limits = Limits { run: mix.time, watchdog: WATCHDOG, end: WATCHDOG };
        let mut disturber = Disturber::new(mix).map_err(|error| error.to_string())?;
        let disturb = |time, vcpus: &dyn Vcpus| disturber.disturb(time, vcpus);
        let read =
            |outcome: &crate::backend::Outcome<'_>| (outcome.ended, measure(&mix.spec, outcome, 1), acquisitions(outcome.job));
        let result = mix.backend.run(&mix.spec, limits, self.interrupt, disturb, read);
        self.summary.disturbances += disturber.count();
        self.summary.machines += 1;
        *(match mix.backend {
            Backend::Kvm { .. } => &mut self.summary.on_kvm,
            Backend::Threads => &mut self.summary.on_threads,
        }) += 1;
        let (ended, measured, (acquisitions, idle)) = result.map_err(|error| error.to_string())?;
        self.summary.host = self.summary.host + measured.host;
        match disturber.fault() {
            Some(fault) => Err(fault.into()),
            None if ended != Ended::Done => Err(format!("the run ended otherwise: {ended:?}")),
            None => judge(mix, &measured, idle).map_or(Ok(()), Err),
        }?;
        self.summary.acquisitions += acquisitions;
        Ok(())
    }

    /// Machines that are dropped at some moment of their start or their work.
    fn drop_many(&mut self, mix: &Mix, drops: Drops) -> Result<(), String> {
        let mut random = fastrand::Rng::with_seed(mix.seed);
        for _ in 0..drops.machines {
            if self.interrupted() {
                break;
            }
            self.summary.machines += 1;
            self.drop_one(mix, Duration::from_micros(random.u64(..=drops.longest_us))).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn drop_one(&mut self, mix: &Mix, after: Duration) -> Result<(), RunError> {
        match mix.backend {
            Backend::Kvm { cpl, .. } => {
                let machine = kvm::Machine::start(&mix.spec, cpl)?;
                machine.job().phase.store(phase::MEASURE, Ordering::Release);
                std::thread::sleep(after);
                self.summary.host = self.summary.host + machine.statistics();
                Ok(())
            }
            Backend::Threads => {
                // Threads cannot be dropped; they are told to stop before they have begun.
                let limits = Limits { run: mix.time, watchdog: WATCHDOG, end: WATCHDOG };
                let host = mix.backend.run(&mix.spec, limits, &AtomicBool::new(true), |_, _| (), |outcome| outcome.host)?;
                self.summary.host = self.summary.host + host;
                Ok(())
            }
        }
    }
}

/// What is wrong with a run that came to its end.
fn judge(mix: &Mix, measured: &Measured, idle: bool) -> Option<String> {
    let Measured { row, host, order, .. } = measured;
    if !row.exact && !idle {
        return Some("counts do not agree: a critical section was lost or there were two owners at once".into());
    }
    if host.forced > 0 {
        return Some(format!("{} sleeps ended at their deadline: a kick was lost", host.forced));
    }
    if host.refused > 0 && !mix.may_be_refused() {
        return Some(format!("{} doorbells were refused", host.refused));
    }
    // Nothing to check in a run that took no lock.
    let order = order.filter(|order| order.checked > 0 && !order.is_strict())?;
    Some(format!("somebody was overtaken: {order:?}"))
}

/// Acquisitions of all vCPUs, and whether there were none because none of them got a CPU for all of a short run. (A measurement
/// calls that inexact.)
fn acquisitions(job: &pvlock_guest_image::Job) -> (u64, bool) {
    let acquisitions = job.done.iter().map(|done| done.acquisitions.load(Ordering::Relaxed)).sum();
    let advanced = job.protected.iter().any(|protected| protected.counter.load(Ordering::Relaxed) > 0);
    (acquisitions, acquisitions == 0 && !advanced)
}

fn backends(choice: BackendChoice) -> Result<Vec<Backend>, vm::KvmError> {
    let kvm = || {
        vm::open().map(|_| {
            let kind = KvmKind::detect();
            Backend::Kvm { kind, cpl: Cpl::best_for(kind) }
        })
    };
    Ok(match choice {
        BackendChoice::Kvm => vec![kvm()?],
        BackendChoice::Threads => vec![Backend::Threads],
        BackendChoice::Auto => kvm().into_iter().chain([Backend::Threads]).collect(),
    })
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, time, on_kvm, on_threads, machines, acquisitions, disturbances, host, growth } = self;
        let minutes = time.as_secs_f64() / 60.0;
        writeln!(
            f,
            "soak: {minutes:.1} minutes from seed {seed}: {on_kvm} runs on KVM, {on_threads} on threads; {machines} machines made and dropped"
        )?;
        writeln!(f, "{acquisitions} acquisitions, all counts exact; {disturbances} disturbances")?;
        writeln!(
            f,
            "hosts: {} halts, {} sleeps, {} kicks; {} sleeps ended by a kick, {} spurious, {} forced",
            host.halts, host.parks, host.kicks, host.kicked, host.spurious, host.forced
        )?;
        write!(f, "{growth}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pvlock_guest_image::Job;

    #[test]
    fn a_run_that_got_no_cpu_is_idle_and_one_that_lost_all_its_counts_is_not() {
        // SAFETY: all zeros is a valid job.
        let job = unsafe { Box::<Job>::new_zeroed().assume_init() };
        assert_eq!(acquisitions(&job), (0, true));
        job.protected[3].counter.store(1, Ordering::Relaxed);
        assert_eq!(acquisitions(&job), (0, false));
        job.done[2].acquisitions.store(7, Ordering::Relaxed);
        assert_eq!(acquisitions(&job), (7, false));
        job.protected[3].counter.store(0, Ordering::Relaxed);
        assert_eq!(acquisitions(&job), (7, false));
    }
}
