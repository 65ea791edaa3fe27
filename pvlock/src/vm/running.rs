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
    stop: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// Threads that ended.
    ended: usize,
    /// When the stop was asked for.
    stop_asked: Option<Instant>,
    /// The first failure; later ones are its consequences.
    failure: Option<(usize, VcpuError)>,
}

impl Shared {
    pub(super) fn new(memory: Arc<GuestMemory>, slots: Vec<CachePadded<Slot>>) -> Self {
        Self { memory, slots, stop: AtomicBool::new(false), progress: Mutex::new(Progress::default()), changed: Condvar::new() }
    }

    pub(super) fn stopping(&self) -> bool {
        // Pairs with the Release in `request_stop`.
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn request_stop(&self) {
        self.stop.store(true, Ordering::Release);
        lock(&self.progress).stop_asked.get_or_insert_with(Instant::now);
        self.changed.notify_all();
        self.kick_all();
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
