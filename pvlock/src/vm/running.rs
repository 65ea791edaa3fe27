//! A VM whose vCPU threads run: stop it, wait for it, look into it.

use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::counters::ExitCounts;
use super::cpu::Cpl;
use super::dump::{Registers, VcpuDump};
use super::error::VmError;
use super::memory::GuestMemory;
use super::vcpu::{self, Next, Slot, VcpuEnd, VcpuError};

/// How long a stop waits for threads before it reports them as stuck.
pub const STOP_LIMIT: Duration = Duration::from_secs(2);

/// How long a dump waits for the vCPUs to answer.
pub const DUMP_LIMIT: Duration = Duration::from_millis(500);

/// How often a stop signals threads that are still there: a handler that went back to
/// sleep after the first signal gets another.
const KICK_AGAIN: Duration = Duration::from_millis(20);

/// Locks even if a thread panicked while it held the lock: what is inside is simple values.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What all threads of a VM share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) memory: Arc<GuestMemory>,
    pub(super) slots: Vec<CachePadded<Slot>>,
    /// Privilege level and entry point, for resets.
    pub(super) start: (Cpl, u64),
    stop: AtomicBool,
    pause: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// Threads that ended.
    ended: usize,
    /// Threads that rest in a pause.
    resting: usize,
    /// When the stop was asked for.
    stop_asked: Option<Instant>,
    /// The first failure; later ones are its consequences.
    failure: Option<(usize, VcpuError)>,
}

impl Shared {
    pub(super) fn new(memory: Arc<GuestMemory>, slots: Vec<CachePadded<Slot>>, start: (Cpl, u64)) -> Self {
        let (stop, pause) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { memory, slots, start, stop, pause, progress: Mutex::new(Progress::default()), changed: Condvar::new() }
    }

    pub(super) fn stopping(&self) -> bool {
        // Pairs with the Release in `request_stop`.
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn request_stop(&self) {
        {
            // Under the lock, as in `resume`.
            let mut progress = lock(&self.progress);
            self.stop.store(true, Ordering::Release);
            progress.stop_asked.get_or_insert_with(Instant::now);
        }
        self.changed.notify_all();
        self.kick_all();
    }

    /// Whether vCPUs are to rest.
    pub(super) fn pausing(&self) -> bool {
        // Acquire: pairs with the Release in `pause`.
        self.pause.load(Ordering::Acquire)
    }

    /// The calling vCPU thread, out of the guest, waits for the end of the pause, or a stop.
    pub(super) fn rest(&self) {
        let mut progress = lock(&self.progress);
        progress.resting += 1;
        self.changed.notify_all();
        while self.pausing() && !self.stopping() {
            progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        progress.resting -= 1;
    }

    /// Gets all vCPUs to rest; false if they do not by the deadline.
    fn pause(&self, deadline: Instant) -> bool {
        self.pause.store(true, Ordering::Release);
        let mut progress = lock(&self.progress);
        while progress.ended + progress.resting < self.slots.len() {
            // First and again, as for a stop.
            drop(progress);
            if Instant::now() >= deadline {
                return false;
            }
            self.kick_all();
            progress = lock(&self.progress);
            if progress.ended + progress.resting < self.slots.len() {
                progress = self.changed.wait_timeout(progress, KICK_AGAIN).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        true
    }

    fn resume(&self) {
        // Under the lock, or a thread that has just looked could miss the notification.
        let progress = lock(&self.progress);
        self.pause.store(false, Ordering::Release);
        drop(progress);
        self.changed.notify_all();
    }

    fn kick_all(&self) {
        for slot in &self.slots {
            slot.kick();
        }
    }

    fn ended(&self, vcpu: usize, result: Result<VcpuEnd, VcpuError>, registers: Option<Registers>) {
        let end = *result.as_ref().unwrap_or(&VcpuEnd::Failed);
        self.slots[vcpu].detach(registers, end);
        let mut progress = lock(&self.progress);
        progress.ended += 1;
        let failed = result.is_err();
        if let Err(error) = result {
            progress.failure.get_or_insert((vcpu, error));
        }
        drop(progress);
        self.changed.notify_all();
        if failed {
            self.request_stop();
        }
    }

    /// Waits until all threads ended (true), until they are stuck in a stop, or until the
    /// deadline (false). Signals again during a stop.
    fn wait(&self, deadline: Option<Instant>) -> bool {
        let mut progress = lock(&self.progress);
        loop {
            if progress.ended == self.slots.len() {
                return true;
            }
            let now = Instant::now();
            let stop_limit = progress.stop_asked.map(|asked| asked + STOP_LIMIT);
            let until = match (deadline, stop_limit) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            if until.is_some_and(|until| now >= until) {
                return false;
            }
            let mut pause = until.map_or(Duration::MAX, |until| until - now);
            if progress.stop_asked.is_some() {
                pause = pause.min(KICK_AGAIN);
            }
            let (again, result) =
                self.changed.wait_timeout(progress, pause.min(Duration::from_secs(3600))).unwrap_or_else(PoisonError::into_inner);
            progress = again;
            if result.timed_out() && progress.stop_asked.is_some() {
                drop(progress);
                self.kick_all();
                progress = lock(&self.progress);
            }
        }
    }

    fn dump_all(&self) -> Vec<VcpuDump> {
        for slot in &self.slots {
            slot.ask_registers();
        }
        let deadline = Instant::now() + DUMP_LIMIT;
        self.slots
            .iter()
            .enumerate()
            .map(|(vcpu, slot)| {
                let registers = slot.wait_registers(deadline);
                VcpuDump { vcpu, state: slot.state(), last_exit: slot.last_exit(), registers }
            })
            .collect()
    }
}

/// Stops a VM from elsewhere, for example from a Ctrl-C handler's thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// Asks all vCPUs to end and returns at once. A handler that sleeps must watch for the
    /// stop itself, or sleep in a system call that reports EINTR.
    pub fn stop(&self) {
        self.0.request_stop();
    }

    /// Whether the VM was asked to stop, by anybody or by a failure.
    pub fn is_stopping(&self) -> bool {
        self.0.stopping()
    }
}

/// A VM whose vCPUs run. Dropping it stops it.
#[derive(Debug)]
pub struct RunningVm {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Keeps the VM's memory slots; the vCPUs keep references of their own in the kernel.
    _vm: kvm_ioctls::VmFd,
}

/// How a VM ended when nothing failed.
#[derive(Clone, Debug)]
pub struct VmOutcome {
    /// How each vCPU ended.
    pub ends: Vec<VcpuEnd>,
    /// Exits of each vCPU by kind.
    pub exits: Vec<ExitCounts>,
}

/// How a VM failed, with the registers of every vCPU.
#[derive(Debug, thiserror::Error)]
pub enum VmFailure {
    /// A vCPU could not go on; the others were stopped.
    #[error("vCPU {vcpu}: {error}\n{}", Dumps(dumps))]
    Vcpu {
        /// The vCPU that failed first.
        vcpu: usize,
        /// Why.
        error: VcpuError,
        /// Every vCPU's last state.
        dumps: Vec<VcpuDump>,
    },
    /// Threads did not end within [`STOP_LIMIT`]: the exit handler keeps them.
    #[error("vCPU threads {vcpus:?} did not end within {STOP_LIMIT:?} of the stop\n{}", Dumps(dumps))]
    Stuck {
        /// Which vCPUs.
        vcpus: Vec<usize>,
        /// Every vCPU's last state.
        dumps: Vec<VcpuDump>,
    },
}

/// Prints one dump after the other.
struct Dumps<'a>(&'a [VcpuDump]);

impl fmt::Display for Dumps<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, dump) in self.0.iter().enumerate() {
            if at > 0 {
                writeln!(f)?;
            }
            write!(f, "{dump}")?;
        }
        Ok(())
    }
}

impl RunningVm {
    pub(super) fn start<H>(vm: kvm_ioctls::VmFd, shared: Arc<Shared>, fds: Vec<VcpuFd>, handler: H) -> Result<Self, VmError>
    where
        H: Fn(usize, VcpuExit<'_>) -> Next + Send + Sync + 'static,
    {
        let handler = Arc::new(handler);
        let mut running = Self { shared, threads: Vec::with_capacity(fds.len()), _vm: vm };
        for (vcpu, mut fd) in fds.into_iter().enumerate() {
            let (shared, handler) = (Arc::clone(&running.shared), Arc::clone(&handler));
            let thread = thread::Builder::new().name(format!("vcpu-{vcpu}")).spawn(move || {
                shared.slots[vcpu].attach();
                let work = AssertUnwindSafe(|| vcpu::run(&mut fd, vcpu, &shared, &*handler));
                let result = panic::catch_unwind(work).unwrap_or(Err(VcpuError::HandlerPanicked));
                let registers = Registers::read(&fd);
                shared.ended(vcpu, result, registers);
            });
            match thread {
                Ok(thread) => running.threads.push(thread),
                Err(source) => {
                    // Those that never started count as ended, so that the drop does not wait for them.
                    lock(&running.shared.progress).ended += running.shared.slots.len() - vcpu;
                    return Err(VmError::Host { what: "starting a vCPU thread", source });
                }
            }
        }
        Ok(running)
    }

    /// Guest RAM.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.shared.memory
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.shared.slots.len()
    }

    /// A handle that can stop this VM from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Asks all vCPUs to end and returns at once; see [`Stopper::stop`].
    pub fn stop(&self) {
        self.shared.request_stop();
    }

    /// Gets every vCPU out of the guest and keeps it out until [`resume`](Self::resume). Returns their registers (none for one
    /// that KVM would not read): with the guest's memory, that is what a snapshot holds. `None` if one of them does not come
    /// within [`STOP_LIMIT`], because the handler keeps it; the others rest all the same.
    pub fn pause(&self) -> Option<Vec<Option<Registers>>> {
        let rest = self.shared.pause(Instant::now() + STOP_LIMIT);
        rest.then(|| self.shared.slots.iter().map(|slot| slot.registers()).collect())
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.shared.resume();
    }

    /// Sends a signal to the thread of a vCPU, with a value for the handler of that signal, as anybody in the process might.
    /// Nothing happens for a vCPU that does not exist.
    pub fn signal(&self, vcpu: usize, signal: crate::nap::Nap) {
        self.threads.get(vcpu).into_iter().for_each(|thread| signal.send(thread));
    }

    /// Waits until all vCPUs ended; false when they have not after `timeout`, or are stuck in a stop.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.shared.wait(Instant::now().checked_add(timeout))
    }

    /// Exits of each vCPU by kind, up to now.
    pub fn exits(&self) -> Vec<ExitCounts> {
        self.shared.slots.iter().map(|slot| slot.exits.snapshot()).collect()
    }

    /// Gets every vCPU out of the guest, reads its registers and lets it go on. For a watchdog that
    /// sees no progress. Takes at most [`DUMP_LIMIT`]; a vCPU that its handler keeps has no
    /// registers in the result. A sleeping handler gets a signal (EINTR).
    pub fn dump_all(&self) -> Vec<VcpuDump> {
        self.shared.dump_all()
    }

    /// Waits for all vCPUs to end. Without a stop, an exit of the guest or a failure this does not
    /// return; after a stop it takes at most [`STOP_LIMIT`] and [`DUMP_LIMIT`].
    ///
    /// # Errors
    /// [`VmFailure`], which prints the registers of every vCPU.
    pub fn join(mut self) -> Result<VmOutcome, VmFailure> {
        if !self.shared.wait(None) {
            let dumps = self.shared.dump_all();
            let alive = |(vcpu, slot): (usize, &CachePadded<Slot>)| slot.end().is_none().then_some(vcpu);
            let vcpus = self.shared.slots.iter().enumerate().filter_map(alive).collect();
            // Joining would hang: leave the threads behind. They keep what they use alive.
            self.threads.clear();
            return Err(VmFailure::Stuck { vcpus, dumps });
        }
        self.join_threads();
        let failure = lock(&self.shared.progress).failure.take();
        if let Some((vcpu, error)) = failure {
            let dumps = self.shared.dump_all();
            return Err(VmFailure::Vcpu { vcpu, error, dumps });
        }
        Ok(VmOutcome {
            ends: self.shared.slots.iter().map(|slot| slot.end().unwrap_or(VcpuEnd::Stopped)).collect(),
            exits: self.exits(),
        })
    }

    fn join_threads(&mut self) {
        for thread in self.threads.drain(..) {
            // The closure catches panics itself, and `ended` was its last act.
            let _ = thread.join();
        }
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        self.shared.request_stop();
        if self.shared.wait(None) {
            self.join_threads();
        }
    }
}
