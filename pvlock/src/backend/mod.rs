//! Where guest code runs: in a VM on `/dev/kvm`, or on threads.

pub mod kvm;
pub mod threads;

use crate::order::LogView;
use crate::session::{Ended, Limits, Times, Vcpus};
use crate::vm;
use crate::vm::{Cpl, ExitCounts, KvmError, KvmKind, NoPvUnhalt, OutOfRange, VmError, VmFailure};
use pvlock_guest_image::job::{LogEntry, MAX_LOCKS, Workload};
use pvlock_guest_image::{HaltBy, Job, LockKind};
use pvlock_host::{Config, EngineError, PauseLoop, Statistics};
use std::sync::atomic::{AtomicBool, Ordering};

/// What to run.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The lock.
    pub lock: LockKind,
    /// The workload.
    pub workload: Workload,
    /// vCPUs.
    pub vcpus: usize,
    /// Locks used by workloads with many, 1 to [`MAX_LOCKS`].
    pub locks: usize,
    /// Iterations of work inside the lock.
    pub inside: u64,
    /// Iterations of work outside.
    pub outside: u64,
    /// Critical sections of each vCPU; 0: until the time is over.
    pub limit: u64,
    /// Critical sections from one end of a vCPU's life to the next, see `pvlock_guest_image::life`; 0: it lives on.
    pub churn: u32,
    /// Entries of the order log for each lock; 0: no log.
    pub log: u64,
    /// The host's settings.
    pub host: Config,
    /// Whether the guest gets somebody who halts and kicks at all.
    pub paravirtual: bool,
    /// How the guest halts and kicks, if it is paravirtual.
    pub halt: HaltBy,
    /// Whether kicks reach the host through eventfds, without exits. Without a VM there are none.
    pub ioeventfd: bool,
}

impl Spec {
    /// Whether the guest rings doorbells of a pvlock host.
    pub fn rings(&self) -> bool {
        self.paravirtual && self.halt == HaltBy::Doorbell
    }

    /// Whether the guest halts and kicks by KVM's own means.
    pub fn pv_unhalt(&self) -> bool {
        self.paravirtual && self.halt == HaltBy::PvUnhalt
    }
}

/// What a run left behind.
pub struct Outcome<'a> {
    /// Whether it came to its end.
    pub ended: Ended,
    /// How long it took.
    pub times: Times,
    /// Parameters and results.
    pub job: &'a Job,
    /// The order log, if there was one.
    pub log: LogView<'a>,
    /// What the host counted.
    pub host: Statistics,
    /// Exits of all vCPUs by kind; none without a VM.
    pub exits: Option<ExitCounts>,
}

/// A place where guest code runs.
#[derive(Clone, Copy, Debug)]
pub enum Backend {
    /// `/dev/kvm`.
    Kvm {
        /// What kind of KVM it is.
        kind: KvmKind,
        /// The guest's privilege level.
        cpl: Cpl,
    },
    /// Threads of this process, without a VM.
    Threads,
}

/// What can go wrong in a run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// `/dev/kvm` cannot be used.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The VM could not be made.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A vCPU failed.
    #[error("{0}")]
    Failure(#[from] VmFailure),
    /// The host engine refuses its settings.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// KVM does not halt and kick for this guest.
    #[error(transparent)]
    NoPvUnhalt(#[from] NoPvUnhalt),
    /// KVM signals no eventfds for the doorbell.
    #[error("kicks through eventfds: {0}")]
    Ioeventfd(std::io::Error),
    /// Guest memory is too small: a mistake in this program.
    #[error("guest memory: {0}")]
    Memory(#[from] OutOfRange),
    /// The guest could not register with the host.
    #[error("the guest could not register its region with the host: {0}")]
    Registration(pvlock_host::hypercalls::Status),
    /// Nothing moved.
    #[error("the guest hangs: {sections} critical sections, then none for {seconds:.1} s\n{dump}")]
    Hung {
        /// Critical sections until then.
        sections: u64,
        /// The watchdog's patience.
        seconds: f64,
        /// Every vCPU and every sleeper.
        dump: String,
    },
    /// Threads did not end in the time they had. On a busy machine they may not have had a CPU.
    #[error("threads that were told to stop have not ended in {seconds:.1} s\n{dump}")]
    NotEnded {
        /// How long they had.
        seconds: f64,
        /// Every vCPU and every sleeper.
        dump: String,
    },
    /// A thread panicked.
    #[error("a vCPU thread panicked")]
    Panicked,
}

impl Backend {
    /// Its name in output.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kvm { .. } => "kvm",
            Self::Threads => "threads",
        }
    }

    /// Whether a guest here can halt and be kicked by KVM's own means.
    ///
    /// # Errors
    ///
    /// What stands against it.
    pub fn check_pv_unhalt(&self) -> Result<(), NoPvUnhalt> {
        match *self {
            Self::Kvm { kind, cpl } => vm::check_pv_unhalt(kind, cpl),
            Self::Threads => Err(NoPvUnhalt::NoVm),
        }
    }

    /// Runs `spec` and hands what came of it to `read`.
    ///
    /// # Errors
    ///
    /// Any [`RunError`].
    pub fn run<T>(
        &self,
        spec: &Spec,
        limits: Limits,
        interrupt: &AtomicBool,
        progress: impl FnMut(std::time::Duration, &dyn Vcpus),
        read: impl FnOnce(&Outcome<'_>) -> T,
    ) -> Result<T, RunError> {
        if spec.pv_unhalt() {
            self.check_pv_unhalt()?;
        }
        match *self {
            Self::Kvm { cpl, .. } => kvm::run(spec, cpl, limits, interrupt, progress, read),
            Self::Threads => threads::run(spec, limits, interrupt, progress, read),
        }
    }
}

/// Writes the parameters into a job of zeros.
fn fill(job: &Job, spec: &Spec, port: u32, log_address: u64) {
    job.workload.store(spec.workload as u32, Ordering::Relaxed);
    job.lock.store(spec.lock as u32, Ordering::Relaxed);
    job.vcpus.store(spec.vcpus as u32, Ordering::Relaxed);
    job.locks.store(locks(spec) as u32, Ordering::Relaxed);
    job.inside.store(spec.inside, Ordering::Relaxed);
    job.outside.store(spec.outside, Ordering::Relaxed);
    job.limit.store(spec.limit, Ordering::Relaxed);
    job.churn.store(spec.churn, Ordering::Relaxed);
    job.log_capacity.store(spec.log, Ordering::Relaxed);
    job.log_address.store(log_address, Ordering::Relaxed);
    job.pause_window.store(pause_window(spec), Ordering::Relaxed);
    if spec.pv_unhalt() {
        job.halt.store(spec.halt as u32, Ordering::Relaxed);
        job.spin_budget.store(spec.host.spin_budget, Ordering::Relaxed);
    }
    job.port.store(port, Ordering::Relaxed);
}

/// After so many ticks of spinning a guest reports it, if the host has a policy for that. The window that hypervisors begin
/// with, about 2 us; a quarter or less of what waiters spin before they halt.
const PAUSE_WINDOW: u64 = 4096;

fn pause_window(spec: &Spec) -> u64 {
    let wanted = spec.rings() && spec.host.policy.pause_loop != PauseLoop::Ignore;
    if wanted { PAUSE_WINDOW } else { 0 }
}

fn locks(spec: &Spec) -> usize {
    if spec.workload.has_one_lock() { 1 } else { spec.locks.clamp(1, MAX_LOCKS) }
}

fn log_entries(spec: &Spec) -> usize {
    spec.log as usize * locks(spec)
}

fn log_bytes(spec: &Spec) -> u64 {
    (log_entries(spec) * size_of::<LogEntry>()) as u64
}
