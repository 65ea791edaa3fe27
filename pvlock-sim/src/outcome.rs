//! What a run has shown.

use crate::sched::{CpuId, TaskId};

/// Buckets of the histogram of waits: bucket `n` counts those of 2^n to 2^(n+1) cycles.
pub const WAIT_BUCKETS: usize = 44;

/// What happened to one vCPU while it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Pieces of work that the workload has done.
    pub work: u64,
    /// Locks taken.
    pub acquisitions: u64,
    /// Pause-loop exits.
    pub pause_loops: u64,
    /// Plain yields.
    pub yields: u64,
    /// Directed yields.
    pub directed: u64,
    /// Those of them that the scheduler refused.
    pub directed_failed: u64,
    /// Sleeps by the engine's verdict.
    pub parks: u64,
    /// Sleeps of others that this one's exits ended.
    pub wakes: u64,
    /// Times it was put on a CPU.
    pub switches: u64,
    /// Interrupts taken.
    pub interrupts: u64,
    /// Longest wait for a lock, in cycles.
    pub longest_wait: u64,
    /// Waits for a lock by length.
    pub waits: [u64; WAIT_BUCKETS],
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            work: 0,
            acquisitions: 0,
            pause_loops: 0,
            yields: 0,
            directed: 0,
            directed_failed: 0,
            parks: 0,
            wakes: 0,
            switches: 0,
            interrupts: 0,
            longest_wait: 0,
            waits: [0; WAIT_BUCKETS],
        }
    }
}

impl Counts {
    /// A lock was taken after so many cycles.
    pub(crate) fn waited(&mut self, cycles: u64) {
        self.acquisitions += 1;
        self.longest_wait = self.longest_wait.max(cycles);
        self.waits[(cycles.max(1).ilog2() as usize).min(WAIT_BUCKETS - 1)] += 1;
    }

    /// Both.
    pub fn plus(mut self, other: &Self) -> Self {
        let Self { work, acquisitions, pause_loops, yields, directed, directed_failed, parks, wakes, switches, interrupts, .. } =
            other;
        self.work += work;
        self.acquisitions += acquisitions;
        self.pause_loops += pause_loops;
        self.yields += yields;
        self.directed += directed;
        self.directed_failed += directed_failed;
        self.parks += parks;
        self.wakes += wakes;
        self.switches += switches;
        self.interrupts += interrupts;
        self.longest_wait = self.longest_wait.max(other.longest_wait);
        self.waits.iter_mut().zip(other.waits).for_each(|(sum, more)| *sum += more);
        self
    }

    /// Upper bound of the wait that `share` (such as 0.99) of the waits did not exceed, in cycles.
    pub fn wait_quantile(&self, share: f64) -> u64 {
        let wanted = (self.acquisitions as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.waits.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return 2 << bucket;
            }
        }
        self.longest_wait
    }
}

/// Where the CPU time of one vCPU went, in cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// In the guest, not spinning.
    pub computing: u64,
    /// Spinning.
    pub spinning: u64,
    /// In the host: exits, switches.
    pub host: u64,
}

impl Spent {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.computing + self.spinning + self.host
    }
}

/// What one VM did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmOutcome {
    /// Of each of its vCPUs.
    pub counts: Vec<Counts>,
    /// Of each of its vCPUs.
    pub spent: Vec<Spent>,
    /// Of its engine.
    pub host: pvlock_host::Statistics,
}

impl VmOutcome {
    /// Of all its vCPUs.
    pub fn total(&self) -> Counts {
        self.counts.iter().fold(Counts::default(), |sum, more| sum.plus(more))
    }
}

/// What a run has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// VM by VM.
    pub vms: Vec<VmOutcome>,
    /// How long was measured, in ns.
    pub measured_ns: u64,
    /// Lock operations of the whole run, warm-up included.
    pub operations: u64,
    /// If it was asked for.
    pub recording: Option<Recording>,
}

impl Outcome {
    /// Pieces of work a second, of all VMs.
    pub fn rate(&self) -> f64 {
        self.vms.iter().map(|vm| vm.total().work).sum::<u64>() as f64 * 1e9 / self.measured_ns.max(1) as f64
    }

    /// Pieces of work a second of one VM.
    pub fn rate_of(&self, vm: usize) -> f64 {
        self.vms[vm].total().work as f64 * 1e9 / self.measured_ns.max(1) as f64
    }

    /// Of all VMs.
    pub fn total(&self) -> Counts {
        self.vms.iter().fold(Counts::default(), |sum, vm| sum.plus(&vm.total()))
    }

    /// Of all vCPUs.
    pub fn spent(&self) -> Spent {
        self.vms.iter().flat_map(|vm| &vm.spent).fold(Spent::default(), |sum, more| Spent {
            computing: sum.computing + more.computing,
            spinning: sum.spinning + more.spinning,
            host: sum.host + more.host,
        })
    }
}

/// A task was on a CPU from one time to another, in cycles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where.
    pub cpu: CpuId,
    /// Who.
    pub task: TaskId,
    /// From.
    pub start: u64,
    /// To.
    pub end: u64,
}

/// What a mark says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkKind {
    /// Was parked there.
    Parked,
    /// Ended the sleep of this task.
    Kicked(TaskId),
}

/// A moment of a task on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Where.
    pub cpu: CpuId,
    /// Who.
    pub task: TaskId,
    /// When.
    pub at: u64,
    /// What.
    pub kind: MarkKind,
}

/// A lock was waited for, then held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// By whom.
    pub task: TaskId,
    /// Which of its VM's locks.
    pub lock: usize,
    /// When the wait began.
    pub wanted: u64,
    /// When it was taken.
    pub taken: u64,
    /// When it was given back.
    pub released: u64,
}

/// Everything that was drawn or traced, of a part of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    /// From this time on, in cycles.
    pub from: u64,
    /// To this time.
    pub to: u64,
    /// Each CPU's task, since when.
    on_cpu: Vec<Option<(TaskId, u64)>>,
    /// Who was where.
    pub spans: Vec<Span>,
    /// Parks and kicks.
    pub marks: Vec<Mark>,
    /// Locks held.
    pub holds: Vec<Hold>,
    /// The VM of each task (none: another task of the host), and its number in it.
    pub tasks: Vec<(Option<usize>, usize)>,
}

impl Recording {
    /// Of these cycles.
    pub(crate) fn new(cpus: usize, from: u64, to: u64) -> Self {
        Self { from, to, on_cpu: vec![None; cpus], ..Self::default() }
    }

    fn wants(&self, at: u64) -> bool {
        (self.from..self.to).contains(&at)
    }

    pub(crate) fn enter(&mut self, cpu: CpuId, task: TaskId, now: u64) {
        self.on_cpu[cpu] = Some((task, now));
    }

    pub(crate) fn leave(&mut self, cpu: CpuId, task: TaskId, now: u64) {
        let Some((who, since)) = self.on_cpu[cpu].take() else { return };
        debug_assert_eq!(who, task);
        let (start, end) = (since.max(self.from), now.min(self.to));
        if start < end {
            self.spans.push(Span { cpu, task, start, end });
        }
    }

    pub(crate) fn parked(&mut self, cpu: CpuId, task: TaskId, now: u64) {
        if self.wants(now) {
            self.marks.push(Mark { cpu, task, at: now, kind: MarkKind::Parked });
        }
    }

    pub(crate) fn kicked(&mut self, cpu: CpuId, task: TaskId, target: TaskId, now: u64) {
        if self.wants(now) {
            self.marks.push(Mark { cpu, task, at: now, kind: MarkKind::Kicked(target) });
        }
    }

    pub(crate) fn held(&mut self, hold: Hold) {
        if hold.released >= self.from && hold.wanted < self.to {
            self.holds.push(hold);
        }
    }

    pub(crate) fn finish(&mut self, now: u64) {
        for cpu in 0..self.on_cpu.len() {
            if let Some((task, _)) = self.on_cpu[cpu] {
                self.leave(cpu, task, now);
            }
        }
    }
}
