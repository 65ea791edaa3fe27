//! Where the machine lets things go wrong, and has its invariants looked at. Does nothing in runs without a trial.

use super::host::Host;
use super::{Activity, Asleep, Event, LineId, Machine, SimEngine};
use crate::faults::{Fault, Happens, Point};
use crate::sched::TaskId;
use pvlock_host::Unpark;
use pvlock_host::hypercalls::Doorbell;
use pvlock_host::protocol::{HostFlags, VcpuId};

impl Machine {
    // ---- in the guest ------------------------------------------------------------------------------------------------

    /// The running code is at a point; `nested` interrupts of it are being handled.
    pub(crate) fn happens(&mut self, point: Point, nested: u32) -> Happens {
        let (Some(task), Some(trial)) = (self.running, &mut self.trial) else { return Happens::Nothing };
        // The owner of a lock is about to release it, by an operation that takes no time: so exclusion is checked exactly.
        if trial.invariants.is_releasing(task) {
            if point == Point::Call {
                return Happens::Nothing;
            }
            trial.invariants.has_released(task);
        }
        if trial.happens(trial.faults.stall) {
            let time = trial.up_to(self.params.cycles(trial.faults.stall_ns));
            self.note(|| format!("task {task} loses its CPU for {time} cycles"));
            return Happens::Stall(time);
        }
        let Some(trial) = &mut self.trial else { return Happens::Nothing };
        if point == Point::Step && nested < 2 && trial.happens(trial.faults.interrupt) {
            let time = trial.up_to(self.params.cycles(2_000));
            self.note(|| format!("task {task} is interrupted at depth {nested}"));
            return Happens::Interrupt(time);
        }
        Happens::Nothing
    }

    /// The running code of `task` has come to its end.
    pub(super) fn ended(&mut self, task: TaskId) {
        let Some(trial) = &mut self.trial else { return };
        trial.busy -= 1;
        self.note(|| format!("task {task} has done its work"));
    }

    // ---- what the running code does with locks, for the invariants -----------------------------------------------------

    /// Waits for the lock of this line from now on.
    pub(crate) fn wants(&mut self, line: LineId) {
        if let (Some(task), Some(trial)) = (self.running, &mut self.trial) {
            trial.invariants.wants(task, line, self.now);
        }
    }

    /// Waits no longer.
    pub(crate) fn gives_up(&mut self) {
        if let (Some(task), Some(trial)) = (self.running, &mut self.trial) {
            trial.invariants.gives_up(task);
        }
    }

    /// Has drawn a ticket with which it may be bypassed.
    pub(crate) fn drew(&mut self, line: LineId, ticket: u32) {
        if let (Some(task), Some(trial)) = (self.running, &mut self.trial) {
            trial.invariants.drew(task, line, ticket);
            self.note(|| format!("task {task} draws ticket {ticket} on line {line}"));
        }
    }

    /// Has taken the lock, with this ticket if it had to have one.
    pub(crate) fn took(&mut self, line: LineId, ticket: Option<u32>) {
        let (Some(task), Some(mut trial)) = (self.running, self.trial.take()) else { return };
        let polls = |task: TaskId| {
            let vcpu = &self.vcpus[task];
            let on_cpu = self.sched.current(self.sched.cpu_of(task)) == Some(task);
            on_cpu && vcpu.activity == Activity::Spin && vcpu.overhead == 0 && vcpu.line == Some(line)
        };
        trial.invariants.took(task, line, ticket, self.now, polls);
        self.trial = Some(trial);
        self.note(|| format!("task {task} takes line {line}, ticket {ticket:?}"));
    }

    /// Releases the lock as the next thing it does.
    pub(crate) fn releases(&mut self, line: LineId, fair: bool) {
        if let (Some(task), Some(trial)) = (self.running, &mut self.trial) {
            trial.invariants.releases(task, line, fair, self.now);
            self.note(|| format!("task {task} releases line {line}{}", if fair { " fairly" } else { "" }));
        }
    }

    /// Has done so.
    pub(crate) fn has_released(&mut self) {
        if let (Some(task), Some(trial)) = (self.running, &mut self.trial) {
            trial.invariants.has_released(task);
        }
    }

    /// Halts.
    pub(crate) fn halts(&mut self) {
        if let (Some(task), Some(trial)) = (self.running, &mut self.trial) {
            trial.invariants.halts(task);
        }
    }

    /// Kicks another vCPU of its VM, as the lock that it operates on demands.
    pub(crate) fn kicks(&mut self, target: VcpuId) {
        let Some(task) = self.running.filter(|_| self.trial.is_some()) else { return };
        let (Some(vm), Some(line)) = (self.vcpus[task].vm, self.vcpus[task].line) else { return };
        let target = self.task_of(vm, target);
        if let Some(trial) = &mut self.trial {
            trial.invariants.kicked(target, line);
        }
    }

    /// Goes on with what it was interrupted in, on this line.
    pub(crate) fn back_to(&mut self, line: Option<LineId>) {
        if let Some(task) = self.running {
            self.settle(task);
            self.vcpus[task].line = line;
        }
    }

    // ---- what the running code asks between its rounds -----------------------------------------------------------------

    /// Whether it is to be reset, and whether it (the first of its VM only) is to register anew.
    pub(crate) fn chances(&mut self) -> Option<(bool, bool)> {
        let vcpu = &self.vcpus[self.running?];
        let (first, trial) = (vcpu.id.index() == 0, self.trial.as_mut()?);
        let reset = trial.happens(trial.faults.reset);
        let register = first && trial.happens(trial.faults.register);
        Some((reset, register))
    }

    /// The region of its VM is registered anew.
    pub(crate) fn registered(&mut self) {
        let vm = self.running.and_then(|task| self.vcpus[task].vm);
        if let (Some(vm), Some(trial)) = (vm, &mut self.trial) {
            trial.registrations[vm] += 1;
            self.note(|| format!("VM {vm} has registered anew"));
        }
    }

    /// How often that was done.
    pub(crate) fn registrations(&self) -> u64 {
        let vm = self.running.and_then(|task| self.vcpus[task].vm);
        vm.zip(self.trial.as_ref()).map_or(0, |(vm, trial)| trial.registrations[vm])
    }

    /// Whether another vCPU of its VM has work to do.
    pub(crate) fn is_busy(&self, vcpu: VcpuId) -> bool {
        let vm = self.running.and_then(|task| self.vcpus[task].vm);
        vm.is_some_and(|vm| self.vcpus[self.task_of(vm, vcpu)].activity != Activity::Ended)
    }

    // ---- in the host -------------------------------------------------------------------------------------------------

    /// Whether this doorbell is a kick that will come late. One that comes twice comes now as well.
    pub(super) fn kick_goes_astray(&mut self, task: TaskId, word: u32) -> bool {
        let (Some(trial), Some(Doorbell::Kick(target))) = (&mut self.trial, Doorbell::decode(word)) else { return false };
        let late = trial.happens(trial.faults.kick_late);
        if late || trial.happens(trial.faults.kick_twice) {
            let after = trial.up_to(self.params.cycles(trial.faults.kick_ns));
            self.note(|| {
                format!("task {task}'s kick of {target:?} comes {} {after} cycles later", if late { "only" } else { "again" })
            });
            self.at(self.now + after, Event::Fault(Fault::Kick { from: task, target }));
        }
        late
    }

    pub(super) fn pause_loop_is_lost(&mut self) -> bool {
        self.trial.as_mut().is_some_and(|trial| trial.happens(trial.faults.exit_lost))
    }

    /// The engine has just put `task` to sleep.
    pub(super) fn maybe_wake_for_nothing(&mut self, task: TaskId) {
        let Some(trial) = &mut self.trial else { return };
        if trial.happens(trial.faults.wake_for_nothing) {
            let at = self.now + trial.up_to(self.params.cycles(trial.faults.nothing_ns));
            let (sleep, waker) = (self.vcpus[task].sleep, self.sched.cpu_of(task));
            self.at(at, Event::Wake { task, sleep, how: Unpark::Signal, waker });
        }
    }

    /// Until when `task` may not enter the guest, if its VM is paused.
    pub(super) fn held_until(&self, task: TaskId) -> Option<u64> {
        let trial = self.trial.as_ref()?;
        let until = *trial.paused_until.get(self.vcpus[task].vm?)?;
        (until > self.now).then_some(until)
    }

    pub(super) fn reset_vcpu(&mut self, task: TaskId) {
        self.note(|| format!("task {task} is reset"));
        self.engine(task, |engine, vcpu, _, waker| engine.reset(vcpu, waker));
    }

    /// Has the engine of `task`'s VM do something that costs that vCPU nothing.
    fn host_does<R>(&mut self, task: TaskId, event: impl FnOnce(&SimEngine, VcpuId, u64, &Host<'_>) -> R) -> Option<R> {
        let overhead = self.vcpus[task].overhead;
        let result = self.engine(task, event);
        self.vcpus[task].overhead = overhead;
        result
    }

    /// Something goes wrong now.
    pub(super) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kick { from, target } => {
                // A kick never parks its sender.
                let _ = self.host_does(from, |engine, vcpu, _, waker| engine.kick(vcpu, target, waker));
            }
            Fault::Disturb { vm } => self.disturb(vm),
            Fault::Resume { vm } => {
                self.host_does(self.vms[vm].first, |engine, _, _, _| engine.resume());
                self.plan_disturbance(vm);
            }
            Fault::Allow { vm } => {
                self.host_does(self.vms[vm].first, |engine, _, _, waker| engine.set_flags(HostFlags::default(), waker));
                self.plan_disturbance(vm);
            }
        }
    }

    fn disturb(&mut self, vm: usize) {
        let Some(trial) = &mut self.trial else { return };
        let until = self.now + trial.up_to(self.params.cycles(trial.faults.pause_ns)) + 1;
        if trial.happens(trial.faults.forbid) {
            self.host_does(self.vms[vm].first, |engine, _, _, waker| engine.set_flags(HostFlags::OFF, waker));
            self.at(until, Event::Fault(Fault::Allow { vm }));
        } else {
            trial.paused_until[vm] = until;
            self.host_does(self.vms[vm].first, |engine, _, _, waker| engine.pause(waker));
            self.at(until, Event::Fault(Fault::Resume { vm }));
        }
    }

    /// When this VM is to be disturbed next.
    pub(crate) fn plan_disturbance(&mut self, vm: usize) {
        let Some(trial) = &mut self.trial else { return };
        if trial.faults.pause_every_ns > 0 {
            let at = self.now + trial.about(self.params.cycles(trial.faults.pause_every_ns));
            self.at(at, Event::Fault(Fault::Disturb { vm }));
        }
    }

    // ---- what has to hold --------------------------------------------------------------------------------------------

    pub(crate) fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trial) = &mut self.trial
            && trial.log.is_kept()
        {
            let ns = self.params.ns(self.now);
            trial.log.add(format!("{ns:>12} ns  {}", text()));
        }
    }

    pub(super) fn note_event(&mut self, event: &Event) {
        if !matches!(event, Event::End { .. } | Event::Tick(_)) {
            self.note(|| format!("{event:?}"));
        }
    }

    /// Something that must not be.
    pub(crate) fn violated(&mut self, what: String) {
        self.note(|| format!("VIOLATED: {what}"));
        if let Some(trial) = &mut self.trial {
            trial.invariants.violated(what);
        }
    }

    /// The engine's waker was called for `task`, which sleeps.
    pub(super) fn wake_is_sent(&mut self, task: TaskId) {
        if let Some(trial) = &mut self.trial {
            trial.invariants.wake_sent(task, self.vcpus[task].sleep);
        }
    }

    /// The engine of this VM has heard of something.
    pub(super) fn touched(&mut self, vm: usize) {
        if let Some(trial) = &mut self.trial {
            trial.invariants.touched(vm);
        }
    }

    /// Looks at what has to hold after every event; whether there is nothing more to see.
    pub(super) fn is_decided(&mut self) -> bool {
        let Some(mut trial) = self.trial.take() else { return false };
        for vm in trial.invariants.take_touched() {
            if let Err(what) = self.check_engine(vm, &trial) {
                trial.invariants.violated(what);
            }
        }
        trial.invariants.look_at_waits(self.now, |cycles| self.params.ns(cycles));
        let decided = trial.busy == 0 && self.running.is_none() || trial.invariants.violation().is_some();
        self.trial = Some(trial);
        decided
    }

    /// What has to hold of an engine and its sleepers.
    fn check_engine(&self, vm: usize, trial: &crate::faults::Trial) -> Result<(), String> {
        let Some(engine) = &self.vms[vm].engine else { return Ok(()) };
        engine.check_queues().map_err(|what| format!("queues of VM {vm}: {what}"))?;
        for sleeper in engine.dump(self.ns()) {
            let task = self.task_of(vm, sleeper.vcpu);
            let sleeps = self.vcpus[task].asleep == Some(Asleep::Parked);
            if sleeper.woken && sleeps && !trial.invariants.is_wake_sent(task, self.vcpus[task].sleep) {
                return Err(format!("VM {vm}: its sleep is over, but nobody wakes it: {sleeper}"));
            }
            if !sleeper.woken && trial.paused_until[vm] > self.now {
                return Err(format!("VM {vm}: it is paused, and nobody has woken {sleeper}"));
            }
            if let (pvlock_host::SleepKind::Spun, Some(owner), false) = (sleeper.kind, sleeper.queue, sleeper.woken) {
                let owner = self.task_of(vm, owner);
                if self.sched.current(self.sched.cpu_of(owner)) == Some(owner) {
                    return Err(format!("VM {vm}: nobody will kick it, and whom it waits for runs: {sleeper}"));
                }
            }
        }
        Ok(())
    }

    /// What has to hold when everybody has done its work.
    pub(crate) fn check_end(&mut self) {
        let Some(mut trial) = self.trial.take() else { return };
        let names = |line| format!("lock on line {line}");
        if let Some(what) = trial.invariants.left_behind(names) {
            trial.invariants.violated(what);
        }
        for (vm, state) in self.vms.iter().enumerate().filter(|(_, vm)| !vm.hostile) {
            let Some(engine) = &state.engine else { continue };
            if let Some(sleeper) = engine.dump(self.ns()).next() {
                trial.invariants.violated(format!("VM {vm}: left asleep: {sleeper}"));
            }
            let forced = engine.statistics().forced;
            if forced > 0 {
                trial.invariants.violated(format!("VM {vm}: {forced} sleeps ended only at their deadline"));
            }
        }
        self.trial = Some(trial);
    }

    /// Every sleeper, for a report.
    pub(crate) fn dump(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (number, vm) in self.vms.iter().enumerate() {
            for sleeper in vm.engine.iter().flat_map(|engine| engine.dump(self.ns())) {
                lines.push(format!("VM {number}: {sleeper}"));
            }
            for task in vm.first..vm.first + vm.vcpus {
                let vcpu = &self.vcpus[task];
                lines.push(format!(
                    "VM {number}: task {task}, {:?}, {:?}, asleep: {:?}",
                    self.sched.state(task),
                    vcpu.activity,
                    vcpu.asleep
                ));
            }
        }
        lines
    }
}
