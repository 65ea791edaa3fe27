//! Threads that stand in for vCPUs: the same guest code and host engine, no VM.

use super::{Outcome, RunError, Spec, fill, log_entries, pause_window};
use crate::order::LogView;
use crate::session::{Disturbance, Ended, Limits, Vcpus, disturb_host, ticks, watch};
use pvlock_guest::{Guest, GuestRef, Platform, Word};
use pvlock_guest_image::job::{self, Job, LogEntry};
use pvlock_guest_image::{Arena, Bare, CountPauses, pause_loop, work};
use pvlock_host::driver::threads::{Threads, threads};
use pvlock_host::hypercalls::{Doorbell, Ring};
use pvlock_host::protocol::{SlotIndex, VcpuId};
use std::cell::Cell;
use std::fmt::Write;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A "VM" of threads.
struct Machine {
    guest: GuestRef<'static>,
    host: Option<Threads>,
    arena: Arena<Thread>,
    pause_window: u64,
}

/// The vCPU that the current thread is.
#[derive(Clone, Copy)]
struct Current {
    machine: &'static Machine,
    vcpu: VcpuId,
}

std::thread_local! {
    static CURRENT: Cell<Option<Current>> = const { Cell::new(None) };
    static PAUSES: Cell<u64> = const { Cell::new(0) };
}

/// The platform of a thread.
enum Thread {}

impl Thread {
    fn ring(doorbell: Doorbell) {
        if let Some(Current { machine: Machine { host: Some(host), .. }, vcpu }) = CURRENT.get() {
            host.doorbell(vcpu).ring(doorbell.encode());
        }
    }
}

/// Threads that are no vCPUs have a guest without a host.
static NOBODY: Guest<1> = Guest::new();

impl Platform for Thread {
    #[inline]
    fn guest() -> GuestRef<'static> {
        CURRENT.get().map_or(NOBODY.as_ref(), |current| current.machine.guest)
    }

    #[inline]
    fn current() -> Option<VcpuId> {
        CURRENT.get().map(|current| current.vcpu)
    }

    #[inline]
    fn ticks() -> u64 {
        ticks()
    }

    #[inline]
    fn relax() {
        PAUSES.set(PAUSES.get().wrapping_add(1));
        std::hint::spin_loop();
    }

    #[inline]
    fn wait_while(word: &Word, value: u64, deadline: u64) -> u64 {
        let window = CURRENT.get().map_or(0, |current| current.machine.pause_window);
        pause_loop::wait_while::<Self>(word, value, deadline, window, || Self::ring(Doorbell::PauseLoop))
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        Self::ring(Doorbell::Halt { slot, interrupts });
    }

    fn kick(vcpu: VcpuId) {
        if let Some(Current { machine: Machine { host: Some(host), guest, .. }, vcpu: own }) = CURRENT.get() {
            guest.kick(&host.doorbell(own), vcpu);
        }
    }
}

impl CountPauses for Thread {
    #[inline]
    fn pauses() -> u64 {
        PAUSES.get()
    }
}

impl Bare for Thread {
    fn doorbell() -> Option<impl Ring> {
        let Current { machine, vcpu } = CURRENT.get()?;
        machine.host.as_ref().map(|host| host.doorbell(vcpu))
    }

    fn pfn() -> u64 {
        0
    }

    fn reset() {
        if let Some(Current { machine: Machine { host: Some(host), .. }, vcpu }) = CURRENT.get() {
            host.reset(vcpu);
        }
    }
}

/// Counts the threads that have ended, however they did.
struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

struct Watched<'a> {
    count: usize,
    running: Arc<AtomicUsize>,
    job: &'static Job,
    threads: &'a [JoinHandle<()>],
    host: Option<&'a Threads>,
}

impl Vcpus for Watched<'_> {
    fn count(&self) -> u32 {
        self.count as u32
    }

    fn have_failed(&self) -> bool {
        // Ended without having said so: a panic. A thread says so before it ends, so this is the order to look in.
        let running = self.running.load(Ordering::Acquire);
        let ended = self.job.ended.load(Ordering::Acquire) as usize;
        running + ended < self.count
    }

    fn disturb(&self, disturbance: Disturbance) -> Result<(), &'static str> {
        if let Disturbance::Signal(vcpu, nap) = disturbance {
            self.threads.get(vcpu).into_iter().for_each(|thread| nap.send(thread));
        }
        // Threads cannot be kept from running: in a pause they only do not sleep.
        let pause = |time| {
            std::thread::sleep(time);
            Ok(())
        };
        self.host.map_or(Ok(()), |host| disturb_host(host, disturbance, pause))
    }
}

/// Everything that the threads of one run see. They may outlive the run if they hang, so it is freed only when all have
/// ended.
struct World {
    guest: Guest<{ job::MAX_VCPUS }>,
    job: Job,
    log: Vec<LogEntry>,
}

pub(super) fn run<T>(
    spec: &Spec,
    limits: Limits,
    interrupt: &AtomicBool,
    progress: impl FnMut(Duration, &dyn Vcpus),
    read: impl FnOnce(&Outcome<'_>) -> T,
) -> Result<T, RunError> {
    let owned_world = Box::into_raw(new_world(log_entries(spec)));
    // SAFETY: valid until it is freed below, if it is.
    let world: &'static World = unsafe { &*owned_world };
    let guest = world.guest.as_ref();
    let host = if spec.paravirtual { Some(threads(spec.host, guest.region(), spec.vcpus)?) } else { None };
    let machine = Machine { guest, host, arena: Arena::new(), pause_window: pause_window(spec) };
    let owned_machine = Box::into_raw(Box::new(machine));
    // SAFETY: as above.
    let machine: &'static Machine = unsafe { &*owned_machine };
    let job = &world.job;
    fill(job, spec, 0, 0);

    let running = Arc::new(AtomicUsize::new(spec.vcpus));
    let mut handles = Vec::new();
    if let Some(host) = &machine.host {
        let boot = VcpuId::new(0);
        // As at boot: one vCPU registers before the others are started.
        if let Some(status) = boot.and_then(|boot| guest.register(&host.doorbell(boot), 0, [boot]).err()) {
            return Err(RunError::Registration(status));
        }
    }
    for vcpu in (0..spec.vcpus).filter_map(VcpuId::new) {
        let running = Running(Arc::clone(&running));
        handles.push(std::thread::spawn(move || {
            let _running = running;
            if let Some(host) = &machine.host {
                // Refused only if the VM is going down already; then this vCPU spins.
                let _ = guest.online(&host.doorbell(vcpu), vcpu);
            }
            CURRENT.set(Some(Current { machine, vcpu }));
            work::run(job, &machine.arena, &world.log, vcpu.index());
        }));
    }

    let host = machine.host.as_ref();
    let watched = Watched { count: spec.vcpus, running: Arc::clone(&running), job, threads: &handles, host };
    let (ended, times) = watch(job, &watched, limits, interrupt, progress);
    if let Some(host) = &machine.host
        && !matches!(ended, Ended::Hung { .. })
    {
        host.shut_down();
    }
    let asked = Instant::now();
    while running.load(Ordering::Acquire) > 0 && !matches!(ended, Ended::Hung { .. }) && asked.elapsed() < limits.end {
        std::thread::sleep(Duration::from_millis(1));
    }
    if running.load(Ordering::Acquire) > 0 {
        if ended == Ended::Failed {
            // One has panicked with a lock held; the others wait for it.
            return Err(RunError::Panicked);
        }
        if !matches!(ended, Ended::Hung { .. }) {
            return Err(RunError::NotEnded { seconds: asked.elapsed().as_secs_f64(), dump: dump(machine, job, &handles) });
        }
        let sections = job.done.iter().fold(0, |sum: u64, done| sum.wrapping_add(done.sections.load(Ordering::Relaxed)));
        // The threads cannot be ended; their world stays.
        return Err(RunError::Hung { sections, seconds: limits.watchdog.as_secs_f64(), dump: dump(machine, job, &handles) });
    }
    let panicked = handles.into_iter().map(|handle| handle.join().is_err()).filter(|&panicked| panicked).count() > 0;
    let result = if panicked {
        Err(RunError::Panicked)
    } else {
        let host = machine.host.as_ref().map(Threads::statistics).unwrap_or_default();
        Ok(read(&Outcome { ended, times, job, log: LogView::new(&world.log, spec.log), host, exits: None }))
    };
    // SAFETY: both came from boxes above; all threads that saw them have been joined, and what `read` returned does not borrow
    // from them.
    unsafe {
        drop(Box::from_raw(owned_machine));
        drop(Box::from_raw(owned_world));
    }
    result
}

/// Every vCPU and every sleeper. Who waits for its turn and has had no CPU time is not what hangs.
fn dump(machine: &Machine, job: &Job, threads: &[JoinHandle<()>]) -> String {
    let mut text = String::new();
    for (vcpu, (thread, done)) in threads.iter().zip(&job.done).enumerate() {
        // Writing to a String does not fail.
        let _ = match (thread.is_finished(), cpu_time(thread)) {
            (false, Some(time)) => {
                let acquisitions = done.acquisitions.load(Ordering::Relaxed);
                writeln!(text, "vCPU {vcpu} has had {} us of CPU time and {acquisitions} acquisitions", time.as_micros())
            }
            _ => writeln!(text, "vCPU {vcpu} has ended"),
        };
    }
    for sleeper in machine.host.iter().flat_map(Threads::dump) {
        let _ = writeln!(text, "{sleeper}");
    }
    text
}

/// CPU time of a thread; `None` if it has ended.
fn cpu_time(thread: &JoinHandle<()>) -> Option<Duration> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the thread has not been joined, so its id is valid; the rest are places of our own.
    let read = unsafe {
        libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock) == 0 && libc::clock_gettime(clock, &raw mut time) == 0
    };
    read.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

fn new_world(entries: usize) -> Box<World> {
    let mut world = Box::<World>::new_uninit();
    let place = world.as_mut_ptr();
    // SAFETY: each field is written in place once (the job, half a megabyte of atomics, as zeros, which are valid), so that
    // the box is initialised.
    unsafe {
        (&raw mut (*place).guest).write(Guest::new());
        (&raw mut (*place).job).write_bytes(0, 1);
        (&raw mut (*place).log).write(std::iter::repeat_with(LogEntry::default).take(entries).collect());
        world.assume_init()
    }
}
