//! What has to hold after every event, whatever goes wrong.
//!
//! * **Exclusion**: nobody takes a lock that somebody holds.
//! * **Order**: a strict ticket lock serves its tickets one by one. A preemptable one serves those with tickets in their order; and
//!   bypasses a head that polls at most once per other vCPU, unless the lock was left unclaimed for [`CLAIM`], and never after a
//!   fair release.
//! * **One queue per sleeper**, and queues and links that agree; nobody sleeps whose sleep the engine knows to be over, or whose
//!   VM is paused; nobody who spun sleeps on a vCPU that runs (`machine/faults.rs` asks the engine).
//! * **One kick for a halt**: a waiter is kicked no more often than it has given cause to.
//! * **Every waiter is served** within a bound of simulated time; in the end nobody is left asleep, no lock is left taken, and no
//!   sleep was ended by its deadline.

use crate::machine::LineId;
use crate::sched::TaskId;
use pvlock_guest::CLAIM;
use std::collections::{BTreeSet, VecDeque};

/// What a lock promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Order {
    /// Nothing.
    #[default]
    None,
    /// Tickets are served one by one.
    Strict,
    /// Those with tickets are served one by one; others may bypass them.
    Bounded {
        /// How often a head that polls may be bypassed.
        most: usize,
    },
}

/// A lock as it looks from outside.
#[derive(Debug, Default)]
struct Watched {
    order: Order,
    owner: Option<TaskId>,
    /// The last ticket served (strict) or drawn (bounded), and by how many bits tickets wrap.
    last: Option<u32>,
    /// Who waits with a ticket, in order.
    queue: VecDeque<TaskId>,
    /// How often the present head was bypassed while it polled.
    bypassed: usize,
    released_at: u64,
    /// Nobody may bypass the head.
    fair: bool,
}

/// What a vCPU waits for.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    line: LineId,
    since: u64,
    halts: u32,
    kicks: u32,
}

/// Everything that is watched in one run.
#[derive(Debug, Default)]
pub(crate) struct Invariants {
    locks: Vec<Watched>,
    /// By task: what it waits for, one entry for each interrupted level.
    waiting: Vec<Vec<Waiting>>,
    /// By task: the lock that it is about to release.
    releasing: Vec<Option<LineId>>,
    /// By task: its last sleep that somebody was told to end.
    wake_sent: Vec<u64>,
    touched: BTreeSet<usize>,
    /// No wait lasts longer than so many cycles.
    pub(crate) longest_wait: u64,
    /// When to look next.
    look_at: u64,
    violation: Option<String>,
}

impl Invariants {
    /// So many tasks and lines are watched.
    pub(crate) fn size(&mut self, tasks: usize, lines: usize) {
        self.waiting.resize_with(tasks, Vec::new);
        self.releasing.resize(tasks, None);
        self.wake_sent.resize(tasks, 0);
        self.locks.resize_with(lines, Watched::default);
    }

    /// The lock of this line keeps this order.
    pub(crate) fn promise(&mut self, line: LineId, order: Order) {
        self.locks[line].order = order;
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(crate) fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    // ---- locks -------------------------------------------------------------------------------------------------------

    pub(crate) fn wants(&mut self, task: TaskId, line: LineId, now: u64) {
        self.waiting[task].push(Waiting { line, since: now, halts: 0, kicks: 0 });
    }

    /// It halts, as far as its innermost wait goes.
    pub(crate) fn halts(&mut self, task: TaskId) {
        if let Some(wait) = self.waiting[task].last_mut() {
            wait.halts += 1;
        }
    }

    /// It is kicked by who releases the lock of this line: once for each halt; once as the successor of who was served, while its
    /// slot says that it halts; and once for a halt that it has announced and not come to.
    pub(crate) fn kicked(&mut self, task: TaskId, line: LineId) {
        if self.locks[line].order == Order::None {
            return;
        }
        let Some(wait) = self.waiting[task].iter_mut().find(|wait| wait.line == line) else { return };
        wait.kicks += 1;
        if wait.kicks > wait.halts + 2 {
            let Waiting { kicks, halts, .. } = *wait;
            self.violated(format!("line {line}: task {task} was kicked {kicks} times though it halted {halts} times"));
        }
    }

    /// It no longer does: a try has failed.
    pub(crate) fn gives_up(&mut self, task: TaskId) {
        self.waiting[task].pop();
    }

    /// `task` has drawn this ticket of a lock of bounded order.
    pub(crate) fn drew(&mut self, task: TaskId, line: LineId, ticket: u32) {
        let lock = &mut self.locks[line];
        if lock.last.is_some_and(|last| ticket != (last + 1) & 0xffff) {
            self.violation.get_or_insert(format!("line {line}: task {task} drew ticket {ticket} after {:?}", lock.last));
        }
        lock.last = Some(ticket);
        if lock.queue.is_empty() {
            lock.bypassed = 0;
        }
        lock.queue.push_back(task);
    }

    /// `task` has taken a lock, with this ticket if it is a strict one. `polls`: whether a waiter looks at the lock now.
    pub(crate) fn took(&mut self, task: TaskId, line: LineId, ticket: Option<u32>, now: u64, polls: impl FnOnce(TaskId) -> bool) {
        self.waiting[task].pop();
        let lock = &mut self.locks[line];
        let mut wrong = None;
        if let Some(owner) = lock.owner.replace(task) {
            wrong = Some(format!("line {line}: task {task} took the lock that task {owner} holds"));
        }
        match lock.order {
            Order::None => {}
            Order::Strict => {
                if let (Some(last), Some(ticket)) = (lock.last, ticket)
                    && ticket != last.wrapping_add(1)
                {
                    wrong.get_or_insert(format!("line {line}: task {task} was served with ticket {ticket} after {last}"));
                }
                lock.last = ticket;
            }
            Order::Bounded { most } => {
                if let Some(place) = lock.queue.iter().position(|&queued| queued == task) {
                    lock.queue.remove(place);
                    if place > 0 {
                        wrong.get_or_insert(format!("line {line}: task {task} overtook {place} with earlier tickets"));
                    }
                    lock.bypassed = 0;
                } else if let Some(&head) = lock.queue.front() {
                    if lock.fair {
                        wrong.get_or_insert(format!("line {line}: task {task} bypassed task {head} after a fair release"));
                    }
                    if now - lock.released_at < CLAIM && polls(head) {
                        lock.bypassed += 1;
                    } else {
                        lock.bypassed = 0;
                    }
                    if lock.bypassed > most {
                        wrong.get_or_insert(format!("line {line}: task {head} polls and was bypassed {most} times"));
                    }
                }
                lock.fair = false;
            }
        }
        if let Some(wrong) = wrong {
            self.violated(wrong);
        }
    }

    /// `task` is about to release, as the next thing it does.
    pub(crate) fn releases(&mut self, task: TaskId, line: LineId, fair: bool, now: u64) {
        let lock = &mut self.locks[line];
        if lock.owner.take() != Some(task) {
            self.violation.get_or_insert(format!("line {line}: task {task} releases what it does not hold"));
        }
        lock.released_at = now;
        lock.fair = fair && !lock.queue.is_empty();
        self.releasing[task] = Some(line);
    }

    /// Whether it has not done so yet.
    pub(crate) fn is_releasing(&self, task: TaskId) -> bool {
        self.releasing[task].is_some()
    }

    /// It has.
    pub(crate) fn has_released(&mut self, task: TaskId) {
        self.releasing[task] = None;
    }

    /// Whether somebody has waited for too long.
    pub(crate) fn look_at_waits(&mut self, now: u64, ns: impl Fn(u64) -> u64) {
        if now < self.look_at {
            return;
        }
        let oldest = |(task, waits): (TaskId, &Vec<Waiting>)| waits.first().map(|wait| (wait.since, task, wait.line));
        let oldest = self.waiting.iter().enumerate().filter_map(oldest).min();
        self.look_at = oldest.map_or(now, |(since, ..)| since) + self.longest_wait;
        if let Some((since, task, line)) = oldest
            && now >= since + self.longest_wait
        {
            self.violated(format!("task {task} has waited for the lock of line {line} for {} us", ns(now - since) / 1000));
        }
    }

    /// What is not as it was in the beginning.
    pub(crate) fn left_behind(&self, name: impl Fn(LineId) -> String) -> Option<String> {
        self.locks.iter().enumerate().find_map(|(line, lock)| match (lock.owner, lock.queue.front()) {
            (Some(owner), _) => Some(format!("{}: task {owner} never released it", name(line))),
            (None, Some(head)) => Some(format!("{}: task {head} was never served", name(line))),
            (None, None) => None,
        })
    }

    // ---- sleepers ----------------------------------------------------------------------------------------------------

    pub(crate) fn wake_sent(&mut self, task: TaskId, sleep: u64) {
        self.wake_sent[task] = sleep;
    }

    pub(crate) fn is_wake_sent(&self, task: TaskId, sleep: u64) -> bool {
        self.wake_sent[task] == sleep
    }

    pub(crate) fn touched(&mut self, vm: usize) {
        self.touched.insert(vm);
    }

    pub(crate) fn take_touched(&mut self) -> BTreeSet<usize> {
        std::mem::take(&mut self.touched)
    }
}
