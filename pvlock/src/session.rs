//! One run of a job: start the vCPUs together, watch them, end them. The same for every back-end.

use crate::nap::Nap;
use pvlock_guest_image::Job;
use pvlock_guest_image::job::phase;
use pvlock_host::driver::Driver;
use pvlock_host::protocol::{HostFlags, VcpuId};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a run looks at its guest, and at whether it should end.
const LOOK: Duration = Duration::from_millis(20);

/// Part of a run that is not measured, at most: long enough for a scheduler to have run every vCPU several times.
const WARM_UP: Duration = Duration::from_millis(500);

/// Times the watchdog's patience that vCPUs have to begin, and to end when they are told to: a queue of 64 spinning vCPUs needs
/// that long to come through a plain ticket lock.
const GRACE: f64 = 15.0;

/// How long a job runs, and when it counts as hung.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time to run, warm-up included; the job may have a limit of its own that comes sooner.
    pub run: Duration,
    /// Longest time without a single critical section.
    pub watchdog: Duration,
    /// Longest wait for the end of threads that were told to stop. (vCPUs of a VM are stopped, whatever they do.)
    pub end: Duration,
}

impl Limits {
    /// For somebody who has pressed Ctrl-C.
    pub const END: Duration = Duration::from_secs(2);
}

/// What can be done to vCPUs while a job runs on them.
pub trait Vcpus {
    /// How many there are.
    fn count(&self) -> u32;

    /// Whether some vCPU has failed, so that the job will not end by itself.
    fn have_failed(&self) -> bool;

    /// Does this to them, without a host as far as it goes.
    ///
    /// # Errors
    ///
    /// What was found wrong.
    fn disturb(&self, disturbance: Disturbance) -> Result<(), &'static str>;
}

/// Something that happens to a running VM.
#[derive(Clone, Copy, Debug)]
pub enum Disturbance {
    /// A signal for the thread of a vCPU.
    Signal(usize, Nap),
    /// An interrupt for a vCPU, as far as the host engine is concerned: the guest has none.
    Interrupt(usize),
    /// The host engine is told that a vCPU was reset. (A real one comes from the guest, which has to let go of its locks first.)
    Reset(usize),
    /// The host engine is told that the VM was reset.
    ResetVm,
    /// Settings of the host change: its guest is to halt no more, or again.
    Flags(HostFlags),
    /// The VM is paused for that long.
    Pause(Duration),
    /// Somebody wants to see who sleeps, and whether the wait queues are as they should be.
    Look,
}

/// As much of a disturbance as the host engine sees.
pub(crate) fn disturb_host<M: pvlock_host::GuestMemory + 'static>(
    host: &Driver<M>,
    disturbance: Disturbance,
    at_rest: impl FnOnce(Duration) -> Result<(), &'static str>,
) -> Result<(), &'static str> {
    match disturbance {
        Disturbance::Signal(..) => {}
        Disturbance::Interrupt(vcpu) => VcpuId::new(vcpu).into_iter().for_each(|vcpu| host.interrupt(vcpu)),
        Disturbance::Reset(vcpu) => VcpuId::new(vcpu).into_iter().for_each(|vcpu| host.reset(vcpu)),
        Disturbance::ResetVm => host.reset_vm(),
        Disturbance::Flags(flags) => host.set_flags(flags),
        Disturbance::Pause(time) => {
            host.pause();
            let rested = at_rest(time);
            host.resume();
            return rested;
        }
        Disturbance::Look => {
            host.dump().for_each(drop);
            host.check_queues()?;
        }
    }
    Ok(())
}

/// How a session ended, if not because the job was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All vCPUs are through.
    Done,
    /// The user wants to stop.
    Interrupted,
    /// No vCPU made progress for the watchdog's time.
    Hung {
        /// Critical sections until then.
        sections: u64,
    },
    /// A vCPU failed; the back-end knows why.
    Failed,
}

/// Times of a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// The time that was measured.
    pub elapsed: Duration,
    /// Ticks in that time.
    pub ticks: u64,
    /// CPU time of this process in that time.
    pub cpu: Duration,
    /// Share of all CPUs that was idle in that time, 0 to 1.
    pub idle: f64,
}

/// Lets the vCPUs of `job` start, waits for the end, and measures. `progress` is called again and again while they run, with the
/// time that they have run.
pub fn watch(
    job: &Job,
    vcpus: &impl Vcpus,
    limits: Limits,
    interrupt: &AtomicBool,
    mut progress: impl FnMut(Duration, &dyn Vcpus),
) -> (Ended, Times) {
    let count = vcpus.count();
    let mut dog = Dog::new(limits.watchdog);
    dog.limit(GRACE);
    let enter = |phase| {
        // Release: pairs with the vCPUs' Acquire.
        job.phase.store(phase, Ordering::Release);
        Clocks::now()
    };
    while job.ready.load(Ordering::Acquire) < count {
        if let Some(ended) = dog.look(job.ready.load(Ordering::Relaxed).into(), vcpus, interrupt) {
            enter(phase::STOP);
            return (ended, Times::default());
        }
    }
    let begun = enter(phase::WARM_UP);
    dog.limit(limits.run.as_secs_f64() / limits.watchdog.as_secs_f64() + GRACE);
    let warm_up = (limits.run / 4).min(WARM_UP);
    let mut measuring = None;
    let mut times = None;
    let mut ended = Ended::Done;
    while job.ended.load(Ordering::Acquire) < count {
        let elapsed = begun.started.elapsed();
        progress(elapsed.min(limits.run), vcpus);
        if elapsed >= warm_up {
            measuring.get_or_insert_with(|| enter(phase::MEASURE));
        }
        if elapsed >= limits.run {
            times.get_or_insert_with(|| measuring.as_ref().unwrap_or(&begun).until(&enter(phase::STOP)));
        }
        let progress = sections(job).wrapping_add(job.ended.load(Ordering::Relaxed).into());
        if let Some(early) = dog.look(progress, vcpus, interrupt) {
            enter(phase::STOP);
            ended = early;
            break;
        }
    }
    // A job with a limit of its own may have ended before its time.
    (ended, times.unwrap_or_else(|| measuring.as_ref().unwrap_or(&begun).until(&Clocks::now())))
}

/// Critical sections so far, as far as the guest tells.
fn sections(job: &Job) -> u64 {
    job.done.iter().fold(0, |sum, done| sum.wrapping_add(done.sections.load(Ordering::Relaxed)))
}

/// The watchdog.
struct Dog {
    patience: Duration,
    seen: u64,
    since: Instant,
    /// What shows as progress is the guest's to write: at this time it is over all the same.
    end: Instant,
}

impl Dog {
    fn new(patience: Duration) -> Self {
        Self { patience, seen: 0, since: Instant::now(), end: Instant::now() }
    }

    /// From now on it is over after so many times the patience at the latest.
    fn limit(&mut self, patiences: f64) {
        self.end = Instant::now() + self.patience.mul_f64(patiences);
    }

    /// Waits a moment, then looks; `progress` is any number that moves while things go well.
    fn look(&mut self, progress: u64, vcpus: &impl Vcpus, interrupt: &AtomicBool) -> Option<Ended> {
        std::thread::sleep(LOOK);
        if interrupt.load(Ordering::Relaxed) {
            return Some(Ended::Interrupted);
        }
        if vcpus.have_failed() {
            return Some(Ended::Failed);
        }
        if progress != self.seen {
            (self.seen, self.since) = (progress, Instant::now());
        }
        (self.since.elapsed() > self.patience || Instant::now() > self.end).then_some(Ended::Hung { sections: self.seen })
    }
}

/// Everything that is read before and after.
struct Clocks {
    started: Instant,
    ticks: u64,
    cpu: Duration,
    machine: Option<MachineTime>,
}

impl Clocks {
    fn now() -> Self {
        Self { started: Instant::now(), ticks: ticks(), cpu: process_time(), machine: MachineTime::read() }
    }

    fn until(&self, now: &Self) -> Times {
        let idle = match (&self.machine, &now.machine) {
            (Some(before), Some(after)) if after.all > before.all => {
                // Time in iowait may go backwards, see proc(5).
                after.idle.saturating_sub(before.idle) as f64 / (after.all - before.all) as f64
            }
            _ => f64::NAN,
        };
        Times {
            elapsed: now.started - self.started,
            ticks: now.ticks.wrapping_sub(self.ticks),
            cpu: now.cpu.saturating_sub(self.cpu),
            idle,
        }
    }
}

/// The host's time-stamp counter.
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has it, and Linux lets user space read it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

fn process_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the structure; on failure it stays zero, which is a valid value too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |time: libc::timeval| Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// `/proc/stat`'s first line, in clock ticks of all CPUs together.
struct MachineTime {
    idle: u64,
    all: u64,
}

impl MachineTime {
    fn read() -> Option<Self> {
        let text = std::fs::read_to_string("/proc/stat").ok()?;
        // user nice system idle iowait irq softirq steal; guest times are contained in user.
        let fields: Vec<u64> =
            text.lines().next()?.split_whitespace().skip(1).take(8).map_while(|field| field.parse().ok()).collect();
        Some(Self { idle: fields.get(3)? + fields.get(4)?, all: fields.iter().sum() })
    }
}
