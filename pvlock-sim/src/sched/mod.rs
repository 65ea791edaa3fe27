//! A model of the scheduler that hosts have: per-CPU run queues ordered by virtual run time, slices, wake-up preemption, idle
//! and periodic balancing, yields plain and directed. All tasks weigh the same.
//!
//! It decides and does nothing else: the machine calls it, and charges the time that things take.
//!
//! | decision | rule | source |
//! |---|---|---|
//! | slice | `latency / tasks`, at least `min_granularity`; looked at only at ticks | the fair scheduler's documentation |
//! | at a tick | preempt who has had its slice, or is a slice ahead of the leftmost after `min_granularity` | as above |
//! | wake-up | placed half a latency behind the queue at most; preempts who is more than `wakeup_granularity` ahead | as above |
//! | wake-up's CPU | the last one if idle, else an idle one, else the less loaded of the waker's and its last (ties: waker's) | as above |
//! | plain yield | the next task in line, unless it is more than `wakeup_granularity` ahead of the first | as above |
//! | directed yield | fails if the target runs or sleeps; else it is next on its CPU, under the same condition | the directed yield's mailing-list thread, 2010–2012 |
//! | idle CPU | pulls from the longest queue, not what ran there less than `migration_cost` ago | as above |

mod gang;
#[cfg(test)]
mod tests;

pub use gang::Gang;

use std::collections::BTreeSet;
use std::sync::Arc;

/// Number of a task.
pub type TaskId = usize;
/// Number of a CPU.
pub type CpuId = usize;

/// Times in the machine's cycles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// In which every task of a queue should run once.
    pub latency: u64,
    /// Shortest slice.
    pub min_granularity: u64,
    /// How far ahead a running task has to be for a woken one to preempt it.
    pub wakeup_granularity: u64,
    /// Between two looks at the running task.
    pub tick: u64,
    /// What ran so recently is not pulled to another CPU.
    pub migration_cost: u64,
    /// Between two balancings of a busy CPU.
    pub balance_busy: u64,
    /// Between two balancings of an idle CPU.
    pub balance_idle: u64,
}

/// Who may be on a CPU when.
#[derive(Clone, Debug, Default)]
pub enum Rule {
    /// Everybody, by virtual run time.
    #[default]
    Fair,
    /// The vCPUs of one set of VMs at a time, on all CPUs.
    Gang(Gang),
    /// Urgent tasks (lock holders, and the next in line) at once, and for as long as they are; the others by virtual run time.
    Clairvoyant,
}

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Is on a CPU.
    Running,
    /// Waits for one.
    Runnable,
    /// Wants none.
    Sleeping,
}

#[derive(Debug)]
struct Task {
    group: usize,
    /// Ascending.
    allowed: Arc<[CpuId]>,
    /// Where it is or was last.
    cpu: CpuId,
    state: State,
    vruntime: u64,
    /// Since when it is on its CPU.
    picked_at: u64,
    /// When it last left one.
    left_at: u64,
    urgent: bool,
}

#[derive(Debug, Default)]
struct Cpu {
    current: Option<TaskId>,
    queue: Vec<TaskId>,
    min_vruntime: u64,
    /// Up to when the current task's run time is accounted.
    accounted: u64,
    /// Runs next, if that is not too unfair.
    next: Option<TaskId>,
    /// Has yielded.
    skip: Option<TaskId>,
    balanced_at: u64,
}

/// Where a woken task was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// On this CPU's queue.
    pub cpu: CpuId,
    /// And that CPU should choose anew.
    pub preempts: bool,
}

/// Why a directed yield did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YieldFailed {
    /// The target is on a CPU.
    Running,
    /// The target sleeps.
    Sleeping,
    /// Nobody else is on the queue of either.
    Alone,
}

/// The scheduler of one host.
#[derive(Debug)]
pub struct Sched {
    times: Times,
    rule: Rule,
    cpus: Vec<Cpu>,
    tasks: Vec<Task>,
    idle: BTreeSet<CpuId>,
}

impl Sched {
    /// A host without tasks.
    pub fn new(times: Times, rule: Rule, cpus: usize) -> Self {
        Self { times, rule, cpus: (0..cpus).map(|_| Cpu::default()).collect(), tasks: Vec::new(), idle: (0..cpus).collect() }
    }

    /// A sleeping task of this group (its VM) that may run on these CPUs and begins near `cpu`, one of them, as if it had run
    /// for `ahead` cycles already.
    pub fn add(&mut self, group: usize, allowed: Arc<[CpuId]>, cpu: CpuId, ahead: u64) -> TaskId {
        let (state, vruntime) = (State::Sleeping, self.cpus[cpu].min_vruntime + ahead);
        self.tasks.push(Task { group, allowed, cpu, state, vruntime, picked_at: 0, left_at: 0, urgent: false });
        self.tasks.len() - 1
    }

    /// What a task does.
    pub fn state(&self, task: TaskId) -> State {
        self.tasks[task].state
    }

    /// The CPU that a task is on, waits for, or was on last.
    pub fn cpu_of(&self, task: TaskId) -> CpuId {
        self.tasks[task].cpu
    }

    /// Who is on a CPU.
    pub fn current(&self, cpu: CpuId) -> Option<TaskId> {
        self.cpus[cpu].current
    }

    /// How many wait for a CPU.
    pub fn waiting(&self, cpu: CpuId) -> usize {
        self.cpus[cpu].queue.len()
    }

    /// How many want the CPU that `task` is on or waits for, without itself.
    pub fn backlog(&self, task: TaskId) -> usize {
        let cpu = &self.cpus[self.tasks[task].cpu];
        let all = cpu.queue.len() + usize::from(cpu.current.is_some());
        all - usize::from(self.tasks[task].state != State::Sleeping).min(all)
    }

    fn load(&self, cpu: CpuId) -> usize {
        self.cpus[cpu].queue.len() + usize::from(self.cpus[cpu].current.is_some())
    }

    fn slice(&self, tasks: usize) -> u64 {
        (self.times.latency / tasks.max(1) as u64).max(self.times.min_granularity)
    }

    /// Adds what the current task has run.
    fn account(&mut self, cpu: CpuId, now: u64) {
        let this = &mut self.cpus[cpu];
        let ran = now.saturating_sub(this.accounted);
        this.accounted = now;
        let running = this.current.map(|task| {
            self.tasks[task].vruntime += ran;
            self.tasks[task].vruntime
        });
        let least = this.queue.iter().map(|&task| self.tasks[task].vruntime).chain(running).min();
        this.min_vruntime = this.min_vruntime.max(least.unwrap_or(0));
    }

    // ---- waking and sleeping -----------------------------------------------------------------------------------------

    /// `task` wants a CPU; who wakes it is on `waker`.
    pub fn wake(&mut self, task: TaskId, waker: Option<CpuId>, now: u64) -> Placed {
        let cpu = self.place(task, waker);
        self.account(cpu, now);
        let credit = self.cpus[cpu].min_vruntime.saturating_sub(self.times.latency / 2);
        let from = self.tasks[task].cpu;
        let moved = self.translated(task, from, cpu);
        let woken = &mut self.tasks[task];
        woken.vruntime = moved.max(credit);
        (woken.cpu, woken.state) = (cpu, State::Runnable);
        self.cpus[cpu].queue.push(task);
        self.idle.remove(&cpu);
        Placed { cpu, preempts: self.preempts(cpu, task) }
    }

    /// Its virtual run time on another CPU's scale.
    fn translated(&self, task: TaskId, from: CpuId, to: CpuId) -> u64 {
        (self.tasks[task].vruntime + self.cpus[to].min_vruntime).saturating_sub(self.cpus[from].min_vruntime)
    }

    fn place(&self, task: TaskId, waker: Option<CpuId>) -> CpuId {
        let Task { allowed, cpu: last, urgent, .. } = &self.tasks[task];
        let may = |cpu: &CpuId| allowed.binary_search(cpu).is_ok();
        if self.idle.contains(last) || allowed.len() == 1 {
            return *last;
        }
        // From the last one on, as a scheduler looks near first.
        if let Some(&idle) = self.idle.range(*last..).chain(self.idle.range(..*last)).find(|cpu| may(cpu)) {
            return idle;
        }
        let free = |&cpu: &CpuId| !self.is_urgent(self.cpus[cpu].current);
        if *urgent && let Some(cpu) = std::iter::once(*last).chain(allowed.iter().copied()).find(free) {
            return cpu;
        }
        match waker.filter(may) {
            Some(waker) if self.load(waker) <= self.load(*last) => waker,
            _ => *last,
        }
    }

    fn is_urgent(&self, task: Option<TaskId>) -> bool {
        task.is_some_and(|task| self.tasks[task].urgent)
    }

    /// Whether `task`, on the queue of `cpu`, should run at once.
    fn preempts(&self, cpu: CpuId, task: TaskId) -> bool {
        let Some(current) = self.cpus[cpu].current else { return self.eligible(task) };
        match &self.rule {
            Rule::Gang(_) => false,
            Rule::Clairvoyant if self.tasks[current].urgent => false,
            Rule::Clairvoyant if self.tasks[task].urgent => true,
            Rule::Fair | Rule::Clairvoyant => {
                self.tasks[current].vruntime > self.tasks[task].vruntime + self.times.wakeup_granularity
            }
        }
    }

    /// Says whether a task is to run at once ([`Rule::Clairvoyant`]); true if its CPU should choose anew.
    pub fn set_urgent(&mut self, task: TaskId, urgent: bool) -> bool {
        self.tasks[task].urgent = urgent;
        urgent && self.tasks[task].state == State::Runnable && self.preempts(self.tasks[task].cpu, task)
    }

    /// The current task of `cpu` wants no CPU any more.
    pub fn block(&mut self, cpu: CpuId, now: u64) {
        self.leave(cpu, now, State::Sleeping);
    }

    /// The current task of `cpu` goes back on the queue.
    pub fn put(&mut self, cpu: CpuId, now: u64) {
        if let Some(task) = self.leave(cpu, now, State::Runnable) {
            self.cpus[cpu].queue.push(task);
            self.idle.remove(&cpu);
        }
    }

    fn leave(&mut self, cpu: CpuId, now: u64, state: State) -> Option<TaskId> {
        self.account(cpu, now);
        let task = self.cpus[cpu].current.take()?;
        self.tasks[task].state = state;
        self.tasks[task].left_at = now;
        if self.cpus[cpu].queue.is_empty() {
            self.idle.insert(cpu);
        }
        Some(task)
    }

    // ---- choosing ----------------------------------------------------------------------------------------------------

    fn eligible(&self, task: TaskId) -> bool {
        match &self.rule {
            Rule::Gang(gang) => gang.is_active(self.tasks[task].group),
            Rule::Fair | Rule::Clairvoyant => true,
        }
    }

    /// Whether `task` may run although `first` has run less.
    fn is_fair(&self, task: TaskId, first: TaskId) -> bool {
        self.tasks[task].vruntime <= self.tasks[first].vruntime + self.times.wakeup_granularity
    }

    /// Chooses who runs on `cpu`, which has no current task; `None` if nobody may.
    pub fn pick(&mut self, cpu: CpuId, now: u64) -> Option<TaskId> {
        self.account(cpu, now);
        let key = |task: &TaskId| (!self.tasks[*task].urgent, self.tasks[*task].vruntime, *task);
        let this = &self.cpus[cpu];
        let queue = || this.queue.iter().copied().filter(|&task| self.eligible(task));
        let first = queue().min_by_key(key)?;
        let mut chosen = first;
        if this.skip == Some(first)
            && let Some(second) = queue().filter(|&task| task != first).min_by_key(key)
            && self.is_fair(second, first)
        {
            chosen = second;
        }
        if let Some(next) = this.next
            && queue().any(|task| task == next)
            && self.is_fair(next, first)
        {
            chosen = next;
        }
        let this = &mut self.cpus[cpu];
        (this.next, this.skip) = (None, None);
        this.queue.retain(|&task| task != chosen);
        this.current = Some(chosen);
        this.accounted = now;
        self.idle.remove(&cpu);
        let task = &mut self.tasks[chosen];
        (task.state, task.picked_at) = (State::Running, now);
        Some(chosen)
    }

    /// Whether the current task of `cpu` has to make room at this tick.
    pub fn tick(&mut self, cpu: CpuId, now: u64) -> bool {
        self.account(cpu, now);
        let Some(current) = self.cpus[cpu].current else { return !self.cpus[cpu].queue.is_empty() };
        if !self.eligible(current) {
            return true;
        }
        if matches!(self.rule, Rule::Clairvoyant) && self.tasks[current].urgent {
            return false;
        }
        // Of those who may run now: a gang that is larger than the host takes turns in itself.
        let rivals = || self.cpus[cpu].queue.iter().filter(|&&task| self.eligible(task)).map(|&task| self.tasks[task].vruntime);
        let Some(least) = rivals().min() else { return false };
        let slice = self.slice(rivals().count() + 1);
        let ran = now - self.tasks[current].picked_at;
        ran > slice || ran >= self.times.min_granularity && self.tasks[current].vruntime > least.saturating_add(slice)
    }

    /// The gangs take turns; all CPUs have to choose anew.
    pub fn rotate(&mut self) {
        if let Rule::Gang(gang) = &mut self.rule {
            gang.rotate();
        }
    }

    // ---- yields ------------------------------------------------------------------------------------------------------

    /// The current task of `cpu` gives way; it has to be [`put`](Self::put) back and the next one picked.
    pub fn yield_now(&mut self, cpu: CpuId) {
        self.cpus[cpu].skip = self.cpus[cpu].current;
    }

    /// The current task of `cpu` gives way to `target`. On success both CPUs have to choose anew: the one returned as well.
    ///
    /// # Errors
    ///
    /// See [`YieldFailed`].
    pub fn yield_to(&mut self, cpu: CpuId, target: TaskId) -> Result<CpuId, YieldFailed> {
        let other = self.tasks[target].cpu;
        match self.tasks[target].state {
            State::Running => return Err(YieldFailed::Running),
            State::Sleeping => return Err(YieldFailed::Sleeping),
            State::Runnable if self.load(cpu) == 1 && self.load(other) == 1 => return Err(YieldFailed::Alone),
            State::Runnable => {}
        }
        self.cpus[other].next = Some(target);
        self.yield_now(cpu);
        Ok(other)
    }

    /// `target` runs next on its CPU, which is returned and has to choose anew; `None` if it runs or sleeps.
    pub fn boost(&mut self, target: TaskId) -> Option<CpuId> {
        let cpu = self.tasks[target].cpu;
        (self.tasks[target].state == State::Runnable).then(|| {
            self.cpus[cpu].next = Some(target);
            cpu
        })
    }

    // ---- balancing ---------------------------------------------------------------------------------------------------

    /// Brings a waiting task from the longest queue to `cpu`, which is idle (`newly`: since now) or has fewer; whether there
    /// was one.
    pub fn pull(&mut self, cpu: CpuId, newly: bool, now: u64) -> bool {
        if !matches!(self.rule, Rule::Fair | Rule::Clairvoyant) {
            return false;
        }
        let mine = self.load(cpu);
        let candidate = |from: CpuId| {
            let cold = |task: TaskId| !newly || now.saturating_sub(self.tasks[task].left_at) >= self.times.migration_cost;
            let may = |task: &TaskId| self.tasks[*task].allowed.binary_search(&cpu).is_ok() && cold(*task);
            self.cpus[from].queue.iter().copied().filter(may).max_by_key(|&task| (self.tasks[task].vruntime, task))
        };
        let found = (0..self.cpus.len())
            .filter(|&from| from != cpu && self.load(from) >= mine + 2 && !self.cpus[from].queue.is_empty())
            .filter_map(|from| Some((self.load(from), from, candidate(from)?)))
            .max_by_key(|&(load, from, _)| (load, std::cmp::Reverse(from)));
        let Some((_, from, task)) = found else { return false };
        self.cpus[from].queue.retain(|&queued| queued != task);
        let vruntime = self.translated(task, from, cpu);
        let pulled = &mut self.tasks[task];
        (pulled.vruntime, pulled.cpu) = (vruntime, cpu);
        self.cpus[cpu].queue.push(task);
        self.idle.remove(&cpu);
        true
    }

    /// Whether it is time to balance `cpu`; notes that it was.
    pub fn balance_due(&mut self, cpu: CpuId, now: u64) -> bool {
        let every = if self.load(cpu) == 0 { self.times.balance_idle } else { self.times.balance_busy };
        let due = now.saturating_sub(self.cpus[cpu].balanced_at) >= every;
        if due {
            self.cpus[cpu].balanced_at = now;
        }
        due
    }

    /// Idle CPUs, in order.
    pub fn idle(&self) -> impl Iterator<Item = CpuId> {
        self.idle.iter().copied()
    }
}
