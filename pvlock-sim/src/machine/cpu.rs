//! Tasks on CPUs: on, off, and what ends when.

use super::{Activity, After, Asleep, Event, Machine};
use crate::sched::{CpuId, State, TaskId};

impl Machine {
    /// A CPU chooses who runs on it.
    pub(super) fn resched(&mut self, cpu: CpuId) {
        let before = self.sched.current(cpu);
        if let Some(task) = before {
            self.book(task, self.now);
            self.sched.put(cpu, self.now);
        }
        let mut after = self.sched.pick(cpu, self.now);
        if after.is_none() && self.sched.pull(cpu, true, self.now) {
            after = self.sched.pick(cpu, self.now);
        }
        if let Some(task) = before
            && before != after
        {
            self.leave(task);
        }
        if let Some(task) = after {
            if before == after {
                // It goes on as before; what ends is not changed.
                self.proceed(task);
            } else {
                self.enter(task, before.is_some());
            }
        }
        if after.is_some() && self.sched.waiting(cpu) > 0 {
            self.start_ticking(cpu);
        }
    }

    pub(super) fn start_ticking(&mut self, cpu: CpuId) {
        if !std::mem::replace(&mut self.ticking[cpu], true) {
            let next = (self.now / self.costs.tick + 1) * self.costs.tick;
            self.at(next, Event::Tick(cpu));
        }
    }

    pub(super) fn tick(&mut self, cpu: CpuId) {
        self.ticking[cpu] = false;
        if self.sched.tick(cpu, self.now) {
            self.resched(cpu);
        }
        // Idle CPUs that take no ticks of their own are balanced by those that do.
        let idle: Vec<_> = self.sched.idle().collect();
        for cpu in idle.into_iter().chain([cpu]) {
            if self.sched.balance_due(cpu, self.now) && self.sched.pull(cpu, false, self.now) && self.sched.current(cpu).is_none() {
                self.resched(cpu);
            }
        }
        if self.sched.waiting(cpu) > 0 {
            self.start_ticking(cpu);
        }
    }

    pub(super) fn rotate(&mut self) {
        self.sched.rotate();
        for cpu in 0..self.ticking.len() {
            self.resched(cpu);
        }
        if let Some(slice) = self.gang_slice {
            self.at(self.now + slice, Event::Rotate);
        }
    }

    /// `task` is on a CPU from now on.
    fn enter(&mut self, task: TaskId, switched: bool) {
        let (now, switch) = (self.now, if switched { self.costs.switch } else { self.costs.switch / 2 });
        let vcpu = &mut self.vcpus[task];
        vcpu.booked = now;
        vcpu.overhead += switch;
        vcpu.counts.switches += 1;
        if let Some(recording) = &mut self.recording {
            recording.enter(self.sched.cpu_of(task), task, now);
        }
        self.scheduled_in(task);
        self.proceed(task);
    }

    /// `task` is on no CPU any more.
    pub(super) fn leave(&mut self, task: TaskId) {
        self.book(task, self.now);
        let vcpu = &mut self.vcpus[task];
        vcpu.generation += 1;
        vcpu.spinning_since = None;
        if vcpu.activity == Activity::Spin {
            self.unwatch(task);
        }
        if let Some(recording) = &mut self.recording {
            recording.leave(self.sched.cpu_of(task), task, self.now);
        }
        self.scheduled_out(task);
    }

    /// Books the time since it was last booked: overhead first, then what the task does.
    pub(super) fn book(&mut self, task: TaskId, now: u64) {
        let vcpu = &mut self.vcpus[task];
        let mut passed = now.saturating_sub(vcpu.booked);
        vcpu.booked = now;
        let overhead = passed.min(vcpu.overhead);
        vcpu.overhead -= overhead;
        vcpu.spent.host += overhead;
        passed -= overhead;
        match &mut vcpu.activity {
            Activity::Compute { left } => {
                *left = left.saturating_sub(passed);
                vcpu.spent.computing += passed;
            }
            Activity::Host { left, .. } => {
                *left = left.saturating_sub(passed);
                vcpu.spent.host += passed;
            }
            Activity::Spin => vcpu.spent.spinning += passed,
            Activity::Ready | Activity::Ended => vcpu.spent.computing += passed,
        }
    }

    /// Notes when the present activity of `task`, which is on a CPU, is over.
    pub(super) fn proceed(&mut self, task: TaskId) {
        self.book(task, self.now);
        if self.vcpus[task].activity == Activity::Spin {
            self.watch(task);
        }
        let vcpu = &self.vcpus[task];
        let begin = self.now + vcpu.overhead;
        let end = match vcpu.activity {
            Activity::Ready => begin,
            Activity::Compute { left } | Activity::Host { left, .. } => begin.saturating_add(left),
            Activity::Spin => self.end_of_spin(task, begin),
            Activity::Ended => return,
        };
        let generation = vcpu.generation + 1;
        self.vcpus[task].generation = generation;
        if end < u64::MAX / 2 {
            self.at(end, Event::End { task, generation });
        }
    }

    fn end_of_spin(&self, task: TaskId, begin: u64) -> u64 {
        let vcpu = &self.vcpus[task];
        let Some(spin) = &vcpu.spin else { return begin };
        let exit = self.pause_window(task).map_or(u64::MAX, |window| vcpu.spinning_since.unwrap_or(begin).saturating_add(window));
        spin.until.min(spin.seen.unwrap_or(u64::MAX)).min(exit).max(begin)
    }

    /// The activity of `task`, which is on a CPU, is over.
    pub(super) fn end(&mut self, task: TaskId) {
        let now = self.now;
        self.book(task, now);
        match self.vcpus[task].activity {
            Activity::Compute { .. } | Activity::Ready => self.run(task),
            Activity::Spin => {
                let spin = self.vcpus[task].spin;
                if spin.is_none_or(|spin| spin.seen.is_some_and(|seen| seen <= now) || spin.until <= now) {
                    self.unwatch(task);
                    self.vcpus[task].spin = None;
                    self.run(task);
                } else {
                    self.unwatch(task);
                    self.vcpus[task].counts.pause_loops += 1;
                    if let Some(vm) = self.vcpus[task].vm {
                        self.vms[vm].in_handler += 1;
                    }
                    self.vcpus[task].spinning_since = None;
                    let left = self.costs.exit + self.costs.pause_loop;
                    self.vcpus[task].activity = Activity::Host { left, then: After::PauseLoop };
                    self.proceed(task);
                }
            }
            Activity::Host { then, .. } => self.after(task, then),
            Activity::Ended => {}
        }
    }

    fn run(&mut self, task: TaskId) {
        self.vcpus[task].activity = Activity::Ready;
        self.running = Some(task);
    }

    fn after(&mut self, task: TaskId, then: After) {
        match then {
            After::Guest => self.enter_guest(task),
            After::Doorbell(word) => self.doorbell(task, word),
            After::PauseLoop => self.pause_loop(task),
            After::Handled(verdict) => self.handled(task, verdict),
            After::Flush => self.flush(task),
            After::Interrupt(target) => {
                self.send(task, target, None);
                self.enter_guest(task);
            }
            After::Reset => {
                self.reset_vcpu(task);
                self.enter_guest(task);
            }
            After::Idle if self.vcpus[task].events > 0 || !self.vcpus[task].interrupts.is_empty() => self.enter_guest(task),
            After::Idle => self.sleep(task, Asleep::Idle, None),
            After::Oracle => self.sleep(task, Asleep::Oracle, None),
            After::Stolen(time) => self.sleep(task, Asleep::Stolen, Some(self.now + time)),
        }
    }

    /// Back to the guest: to its spin, if the exit interrupted one, else to its code.
    pub(super) fn enter_guest(&mut self, task: TaskId) {
        if let Some(until) = self.held_until(task) {
            self.sleep(task, Asleep::Stolen, Some(until));
            return;
        }
        let vcpu = &mut self.vcpus[task];
        vcpu.activity = if vcpu.spin.is_some() { Activity::Spin } else { Activity::Ready };
        if vcpu.spin.is_some() {
            vcpu.spinning_since = Some(self.now);
        }
        self.deliver(task);
        self.proceed(task);
    }

    /// `task`, which is on a CPU, sleeps until it is woken, at the latest at `deadline`.
    pub(super) fn sleep(&mut self, task: TaskId, asleep: Asleep, deadline: Option<u64>) {
        let cpu = self.sched.cpu_of(task);
        let vcpu = &mut self.vcpus[task];
        vcpu.asleep = Some(asleep);
        vcpu.sleep += 1;
        vcpu.activity = Activity::Host { left: 1, then: After::Guest };
        let sleep = vcpu.sleep;
        if let Some(deadline) = deadline {
            let how = if asleep == Asleep::Stolen { pvlock_host::Unpark::Woken } else { pvlock_host::Unpark::Deadline };
            self.at(deadline, Event::Wake { task, sleep, how, waker: cpu });
        }
        self.leave(task);
        self.sched.block(cpu, self.now);
        if let Some(recording) = &mut self.recording {
            recording.parked(cpu, task, self.now);
        }
        self.resched(cpu);
    }

    /// A sleep is over, unless it was over already.
    pub(super) fn awake(&mut self, task: TaskId, sleep: u64, how: pvlock_host::Unpark, waker: CpuId) {
        let vcpu = &mut self.vcpus[task];
        if vcpu.sleep != sleep || vcpu.asleep.is_none() {
            return;
        }
        if vcpu.asleep.take() == Some(Asleep::Parked) {
            vcpu.unparked = Some(how);
        }
        self.make_runnable(task, Some(waker));
    }

    /// `task` wants a CPU.
    pub(crate) fn make_runnable(&mut self, task: TaskId, waker: Option<CpuId>) {
        debug_assert_eq!(self.sched.state(task), State::Sleeping);
        let placed = self.sched.wake(task, waker, self.now);
        if placed.preempts {
            self.resched(placed.cpu);
        } else {
            self.start_ticking(placed.cpu);
        }
    }

    /// Begins the run: everybody wants a CPU.
    pub(crate) fn start(&mut self) {
        for task in 0..self.vcpus.len() {
            if self.vcpus[task].activity != Activity::Ended {
                self.make_runnable(task, None);
            }
        }
        if let Some(slice) = self.gang_slice {
            self.at(slice, Event::Rotate);
        }
    }
}
