//! Cache lines: who had one last, and who watches it.

use super::{Activity, Machine};
use crate::sched::TaskId;
use pvlock_guest::Word;
use rand::RngExt;
use std::collections::VecDeque;

/// Number of a line.
pub type LineId = usize;

/// A lock's cache line (with the lines that its waiters have of their own), or that of another word that vCPUs wait for.
#[derive(Debug, Default)]
pub struct Line {
    /// Spinning vCPUs that are on a CPU.
    watchers: Vec<TaskId>,
    /// Who operated on it last.
    last: Option<TaskId>,
    /// Owner and waiters of an oracle's lock.
    pub(super) queue: VecDeque<TaskId>,
}

impl Machine {
    /// So many lines more.
    pub(crate) fn new_lines(&mut self, lines: usize) {
        self.lines.resize_with(self.lines.len() + lines, Line::default);
    }

    /// The running code operates on `line` from now on; returns what getting hold of it costs, in cycles.
    pub(crate) fn touch(&mut self, line: LineId) -> u64 {
        let Some(task) = self.running else { return 0 };
        self.settle(task);
        self.vcpus[task].line = Some(line);
        let Line { watchers, last, .. } = &mut self.lines[line];
        let own = last.replace(task) == Some(task) && watchers.is_empty();
        if own || self.clairvoyant { self.costs.atomic } else { self.costs.transfer }
    }

    /// Looks whether the code of `task` has changed what others watch on the line that it operates on.
    pub(super) fn settle(&mut self, task: TaskId) {
        if let Some(line) = self.vcpus[task].line
            && !self.lines[line].watchers.is_empty()
        {
            self.notify(line);
        }
    }

    /// Spinners whose word has changed will notice.
    pub(super) fn notify(&mut self, line: LineId) {
        let watchers = std::mem::take(&mut self.lines[line].watchers);
        for &watcher in &watchers {
            if self.vcpus[watcher].spin.is_some_and(|spin| spin.seen.is_none()) && self.has_changed(watcher) {
                self.noticed(watcher, watchers.len());
                self.proceed(watcher);
            }
        }
        self.lines[line].watchers = watchers;
    }

    /// One of `watchers` will see the change when its turn to fetch the line has come.
    fn noticed(&mut self, task: TaskId, watchers: usize) {
        let place = self.random.random_range(0..watchers.max(1) as u64);
        let at = self.now + self.costs.transfer + place * self.costs.refetch;
        if let Some(spin) = &mut self.vcpus[task].spin {
            spin.seen = Some(at);
        }
    }

    fn has_changed(&self, task: TaskId) -> bool {
        let Some((word, value)) = self.vcpus[task].spin.as_ref().and_then(|spin| spin.word) else { return false };
        let word: *const Word = word;
        // SAFETY: the pointer is of a reference that the suspended `wait_while` of this vCPU holds, and the coroutines are
        // dropped after everything that they refer to has been used for the last time.
        unsafe { (*word).load(std::sync::atomic::Ordering::Relaxed) != value }
    }

    /// `task`, which is on a CPU, spins.
    pub(super) fn watch(&mut self, task: TaskId) {
        let vcpu = &self.vcpus[task];
        let Some(line) = vcpu.line.filter(|_| vcpu.spin.is_some_and(|spin| spin.word.is_some() && spin.seen.is_none())) else {
            return;
        };
        if !self.lines[line].watchers.contains(&task) {
            self.lines[line].watchers.push(task);
        }
        // What has changed while it was away, or before it began.
        if self.has_changed(task) {
            self.noticed(task, 1);
        }
    }

    pub(super) fn unwatch(&mut self, task: TaskId) {
        if let Some(line) = self.vcpus[task].line {
            self.lines[line].watchers.retain(|&watcher| watcher != task);
        }
        let vcpu = &mut self.vcpus[task];
        if let Some(spin) = &mut vcpu.spin
            && vcpu.activity != Activity::Ready
            && spin.seen.is_some_and(|seen| seen > self.now)
        {
            // It leaves its CPU before it has noticed.
            spin.seen = None;
        }
    }
}
