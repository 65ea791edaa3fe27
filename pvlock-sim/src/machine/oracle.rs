//! A lock that nobody can build, for a bound: who waits sleeps, and is on a CPU again when its turn comes, all without cost;
//! and who holds it or is next does not leave its CPU.

use super::{Activity, After, Asleep, LineId, Machine};
use crate::sched::TaskId;

impl Machine {
    /// The running code takes the lock of this line; false if it has to wait, suspended.
    pub(crate) fn oracle_lock(&mut self, line: LineId) -> bool {
        let Some(task) = self.running else { return true };
        self.lines[line].queue.push_back(task);
        match self.lines[line].queue.len() {
            1 => {
                self.urge(task, 1);
                true
            }
            2 => {
                // The next one keeps its CPU, and is not asked for anything else.
                self.urge(task, 1);
                self.book(task, self.now);
                self.vcpus[task].activity = Activity::Host { left: u64::MAX / 2, then: After::Guest };
                false
            }
            _ => {
                self.book(task, self.now);
                self.vcpus[task].activity = Activity::Host { left: 0, then: After::Oracle };
                false
            }
        }
    }

    /// The running code gives it back.
    pub(crate) fn oracle_unlock(&mut self, line: LineId) {
        let Some(task) = self.running else { return };
        self.lines[line].queue.pop_front();
        self.urge(task, -1);
        if let Some(&owner) = self.lines[line].queue.front() {
            self.oracle_served(owner, true);
        }
        if let Some(&next) = self.lines[line].queue.get(1) {
            self.urge(next, 1);
            self.oracle_served(next, false);
        }
    }

    /// `task` waits and is the owner, or the next, from now on.
    fn oracle_served(&mut self, task: TaskId, owner: bool) {
        let left = if owner { 0 } else { u64::MAX / 2 };
        self.book_running(task);
        self.vcpus[task].activity = Activity::Host { left, then: After::Guest };
        if self.sched.current(self.sched.cpu_of(task)) == Some(task) {
            self.proceed(task);
        } else if self.vcpus[task].asleep.take_if(|asleep| *asleep == Asleep::Oracle).is_some() {
            let cpu = self.running.map(|running| self.sched.cpu_of(running));
            let placed = self.sched.wake(task, cpu, self.now);
            self.at(self.now, super::Event::Resched(placed.cpu));
        }
    }

    fn urge(&mut self, task: TaskId, change: i32) {
        let vcpu = &mut self.vcpus[task];
        vcpu.urgency = vcpu.urgency.saturating_add_signed(change);
        let urgent = vcpu.urgency > 0;
        if self.sched.set_urgent(task, urgent) {
            self.at(self.now, super::Event::Resched(self.sched.cpu_of(task)));
        }
    }
}
