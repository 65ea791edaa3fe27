//! The host's side of exits: the real engine decides, the machine carries it out.

use super::{Activity, After, Asleep, Event, LineId, Machine};
use crate::sched::{State, TaskId};
use pvlock_host::hypercalls::Doorbell;
use pvlock_host::protocol::VcpuId;
use pvlock_host::{Boost, Engine, Nested, Pivot, Placement, Resume, Scheduler, Unpark, Verdict, Waker, Yields};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

/// The engine of one VM. One thread simulates a machine, so its locks are never contended.
pub type SimEngine = Engine<Nested, parking_lot::RawMutex>;

/// One VM.
pub(crate) struct Vm {
    /// Its first task.
    pub(crate) first: TaskId,
    pub(crate) vcpus: usize,
    /// What decides at its exits; none if it makes none that mean anything.
    pub(crate) engine: Option<Rc<SimEngine>>,
    /// One word for each vCPU: interrupts that others have yet to acknowledge to it.
    pub(crate) unacknowledged: &'static [AtomicU64],
    /// Their lines: the first of them.
    pub(crate) acknowledge_line: LineId,
    /// Where searches for a vCPU to yield to begin.
    pub(crate) pivot: Pivot,
    /// Whom the last one found.
    pub(crate) last_boosted: usize,
    /// How many vCPUs are in the pause-loop handler.
    pub(crate) in_handler: usize,
    /// Its guest does what it likes.
    pub(crate) hostile: bool,
}

/// What the engine sees of the machine, and whom it wakes.
pub(super) struct Host<'a> {
    machine: &'a Machine,
    vm: &'a Vm,
    woken: RefCell<Vec<VcpuId>>,
}

impl Waker for Host<'_> {
    fn wake(&self, vcpu: VcpuId) {
        self.woken.borrow_mut().push(vcpu);
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }
}

impl Scheduler for Host<'_> {
    fn placement(&self, vcpu: VcpuId) -> Placement {
        let task = self.vm.first + vcpu.index();
        match self.machine.sched.state(task) {
            State::Running => Placement::Running,
            State::Runnable => Placement::Preempted,
            State::Sleeping => Placement::Sleeping,
        }
    }

    fn backlog(&self, vcpu: VcpuId) -> Option<u32> {
        Some(self.machine.sched.backlog(self.vm.first + vcpu.index()) as u32)
    }

    fn yields(&self) -> Yields {
        Yields::Directed
    }
}

impl Machine {
    pub(super) fn task_of(&self, vm: usize, vcpu: VcpuId) -> TaskId {
        self.vms[vm].first + vcpu.index()
    }

    pub(super) fn first_of(&self, vm: usize) -> TaskId {
        self.vms[vm].first
    }

    pub(super) fn vcpus_of(&self, vm: usize) -> usize {
        self.vms[vm].vcpus
    }

    pub(super) fn acknowledgements(&self, vm: usize, vcpu: VcpuId) -> (&'static AtomicU64, LineId) {
        let Vm { unacknowledged, acknowledge_line, .. } = &self.vms[vm];
        (&unacknowledged[vcpu.index()], acknowledge_line + vcpu.index())
    }

    /// How long the hardware lets this vCPU spin.
    pub(super) fn pause_window(&self, task: TaskId) -> Option<u64> {
        let window = self.pause_window?;
        let vcpu = &self.vcpus[task];
        let engine = vcpu.vm.and_then(|vm| self.vms[vm].engine.as_ref());
        match engine?.window(vcpu.id) {
            Some(pvlock_host::Setting::Ticks(ticks)) => Some(ticks),
            Some(pvlock_host::Setting::Exponent(exponent)) => Some(1 << exponent),
            None => Some(window),
        }
    }

    /// ns of the engine's clock.
    pub(super) fn ns(&self) -> u64 {
        self.params.ns(self.now)
    }

    /// Has the engine of `task`'s VM, if there is one, do something; then wakes whom it woke. The waker pays for it.
    pub(super) fn engine<R>(&mut self, task: TaskId, event: impl FnOnce(&SimEngine, VcpuId, u64, &Host<'_>) -> R) -> Option<R> {
        let vm = self.vcpus[task].vm?;
        let engine = Rc::clone(self.vms[vm].engine.as_ref()?);
        let host = Host { machine: self, vm: &self.vms[vm], woken: RefCell::new(Vec::new()) };
        let result = event(&engine, self.vcpus[task].id, self.ns(), &host);
        let woken = host.woken.into_inner();
        for vcpu in woken {
            self.vcpus[task].overhead += self.costs.wake_cost;
            self.wake_parked(task, self.task_of(vm, vcpu));
        }
        self.touched(vm);
        Some(result)
    }

    /// `waker`'s exit ends the sleep of `task`.
    fn wake_parked(&mut self, waker: TaskId, task: TaskId) {
        if self.vcpus[task].asleep != Some(Asleep::Parked) {
            return;
        }
        let (sleep, cpu) = (self.vcpus[task].sleep, self.sched.cpu_of(waker));
        self.vcpus[waker].counts.wakes += 1;
        self.wake_is_sent(task);
        if let Some(recording) = &mut self.recording {
            recording.kicked(self.sched.cpu_of(waker), waker, task, self.now);
        }
        self.at(
            self.now + self.costs.wake_cost + self.costs.wake_latency,
            Event::Wake { task, sleep, how: Unpark::Woken, waker: cpu },
        );
    }

    pub(super) fn scheduled_in(&mut self, task: TaskId) {
        match self.vcpus[task].unparked.take() {
            Some(how) => self.engine(task, |engine, vcpu, now, waker| engine.unparked(vcpu, how, now, waker)),
            None => self.engine(task, |engine, vcpu, _, waker| engine.scheduled_in(vcpu, waker)),
        };
    }

    pub(super) fn scheduled_out(&mut self, task: TaskId) {
        match self.vcpus[task].asleep {
            // The engine knows.
            Some(Asleep::Parked) => {}
            Some(Asleep::Idle) => {
                self.engine(task, |engine, vcpu, _, _| engine.idle(vcpu));
            }
            Some(Asleep::Stolen | Asleep::Oracle) | None => {
                self.engine(task, |engine, vcpu, _, _| engine.scheduled_out(vcpu));
            }
        }
    }

    pub(super) fn interrupt_parked(&mut self, task: TaskId) {
        self.engine(task, |engine, vcpu, _, waker| engine.interrupt(vcpu, waker));
    }

    /// What the running vCPU reads as the answer to its last doorbell.
    pub(crate) fn answer(&self) -> u32 {
        let running = self.running.map(|task| &self.vcpus[task]);
        let engine = running.and_then(|vcpu| Some((self.vms[vcpu.vm?].engine.as_ref()?, vcpu.id)));
        engine.map_or(0, |(engine, vcpu)| engine.answer(vcpu))
    }

    pub(super) fn doorbell(&mut self, task: TaskId, word: u32) {
        if self.kick_goes_astray(task, word) {
            self.enter_guest(task);
            return;
        }
        let verdict = self.engine(task, |engine, vcpu, now, waker| engine.doorbell(vcpu, word, now, waker));
        self.note(|| format!("task {task} rang {:?}: {verdict:?}", Doorbell::decode(word)));
        self.carry_out(task, verdict.unwrap_or(Verdict::Resume(Resume::Done)));
    }

    pub(super) fn pause_loop(&mut self, task: TaskId) {
        if self.pause_loop_is_lost() {
            self.handled(task, Verdict::Resume(Resume::Ignored));
            return;
        }
        let verdict = self.engine(task, |engine, vcpu, now, waker| engine.pause_loop(vcpu, now, waker));
        let verdict = verdict.unwrap_or(Verdict::Resume(Resume::Ignored));
        self.note(|| format!("task {task} spins: {verdict:?}"));
        let search = match verdict {
            Verdict::Resume(Resume::NoCandidate) => self.search(task, None),
            Verdict::YieldTo(target, Boost::RoundRobin) => self.search(task, Some(target)),
            Verdict::Resume(Resume::Ignored | Resume::Undercommit) | Verdict::Yield(_) => 0,
            _ => self.costs.decide,
        };
        if let Verdict::Park(_) = verdict {
            // It may be woken from now on.
            self.vcpus[task].overhead += search;
            self.handled(task, verdict);
        } else {
            self.vcpus[task].activity = Activity::Host { left: search, then: After::Handled(verdict) };
            self.proceed(task);
        }
    }

    /// The pause-loop handler has come to its end.
    pub(super) fn handled(&mut self, task: TaskId, verdict: Verdict) {
        if let Some(vm) = self.vcpus[task].vm {
            self.vms[vm].in_handler -= 1;
        }
        self.carry_out(task, verdict);
    }

    /// What it costs to try the vCPUs from the pivot to `target` in turn, or all of them: those that run are only found out
    /// with both run queues locked, and who is in the handler at the same time locks the same ones.
    fn search(&mut self, task: TaskId, target: Option<VcpuId>) -> u64 {
        let Some(vm) = self.vcpus[task].vm else { return 0 };
        let Vm { first, vcpus, last_boosted, pivot, in_handler, .. } = self.vms[vm];
        let from = if pivot == Pivot::Own { task - first } else { last_boosted };
        let tried = target.map_or(vcpus, |target| (target.index() + vcpus - from) % vcpus);
        let running = |&nth: &usize| {
            let candidate = first + (from + nth) % vcpus;
            candidate != task && self.sched.state(candidate) == State::Running
        };
        let in_vain = (1..tried).filter(running).count() as u64;
        if let Some(target) = target {
            self.vms[vm].last_boosted = target.index();
        }
        let others = in_handler.saturating_sub(1) as u64;
        (in_vain + u64::from(target.is_some())) * (self.costs.candidate + others * self.costs.contended)
    }

    fn carry_out(&mut self, task: TaskId, verdict: Verdict) {
        let cpu = self.sched.cpu_of(task);
        match verdict {
            Verdict::Resume(_) => self.enter_guest(task),
            Verdict::Yield(_) => {
                self.vcpus[task].counts.yields += 1;
                self.enter_guest(task);
                self.sched.yield_now(cpu);
                self.resched(cpu);
            }
            Verdict::YieldTo(target, _) => {
                self.vcpus[task].counts.directed += 1;
                let target = self.vcpus[task].vm.map(|vm| self.task_of(vm, target));
                self.enter_guest(task);
                match target.map(|target| self.sched.yield_to(cpu, target)) {
                    Some(Ok(other)) => {
                        if other != cpu {
                            self.at(self.now + self.costs.wake_latency / 2, Event::Resched(other));
                        }
                        self.resched(cpu);
                    }
                    Some(Err(_)) | None => self.vcpus[task].counts.directed_failed += 1,
                }
            }
            Verdict::Park(park) => {
                self.vcpus[task].counts.parks += 1;
                // The CPU that it leaves is best used by whom it waits for.
                let awaited = park.on.zip(self.vcpus[task].vm).map(|(on, vm)| self.task_of(vm, on));
                if let Some(other) = awaited.and_then(|awaited| self.sched.boost(awaited)) {
                    self.at(self.now + self.costs.wake_latency / 2, Event::Resched(other));
                }
                let deadline = self.params.cycles(park.until);
                self.sleep(task, Asleep::Parked, Some(deadline.max(self.now + 1)));
                self.maybe_wake_for_nothing(task);
            }
        }
    }
}
