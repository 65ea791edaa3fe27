//! Simulated hardware and host: CPUs that run tasks, vCPUs that run guest code, exits, interrupts, cache lines.
//!
//! Guest code runs in coroutines and takes no time by itself. What takes time is said by it, through the [`Platform`]
//! (`crate::platform`): computing, spinning on a word, a doorbell. Each sets the vCPU's activity and, unless nothing else
//! happens before it is over, suspends the coroutine. A spin is one event however long it takes: the machine knows which
//! spinners watch the line that the running code operates on, and looks at their words whenever that code lets time pass.
//!
//! [`Platform`]: pvlock_guest::Platform

mod cpu;
mod faults;
mod host;
mod interrupts;
mod lines;
mod oracle;

pub use host::SimEngine;
pub(crate) use host::Vm;
pub use lines::{Line, LineId};

use crate::event::Events;
use crate::faults::{Fault, Trial};
use crate::outcome::{Counts, Hold, Recording, Spent};
use crate::params::Params;
use crate::sched::{CpuId, Sched, TaskId};
use pvlock_guest::Word;
use pvlock_host::protocol::VcpuId;
use rand_pcg::Pcg64Mcg;

/// What a vCPU does as soon and as long as it is on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Runs its code, which takes no time.
    Ready,
    /// Computes for so many cycles.
    Compute { left: u64 },
    /// Spins, see `Vcpu::spin`.
    Spin,
    /// Is in the host for so many cycles.
    Host { left: u64, then: After },
    /// Its code has ended, or it never had any.
    Ended,
}

/// What follows when the time in the host is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// The guest.
    Guest,
    /// The engine hears of this doorbell.
    Doorbell(u32),
    /// The engine hears of a pause-loop exit.
    PauseLoop,
    /// The pause-loop handler has found out what to do.
    Handled(pvlock_host::Verdict),
    /// The guest has nothing to do until an interrupt comes.
    Idle,
    /// Interrupts go out to all other vCPUs of the VM, and each acknowledges it on the sender's line.
    Flush,
    /// An interrupt goes to this vCPU.
    Interrupt(VcpuId),
    /// The host resets the vCPU.
    Reset,
    /// The vCPU leaves its CPU for so long, without knowing.
    Stolen(u64),
    /// It waits for an oracle's lock.
    Oracle,
}

/// A spinning wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    /// What it looks at, and what was there; none for a plain delay.
    pub(crate) word: Option<(*const Word, u64)>,
    /// Until when.
    until: u64,
    /// When it notices that the word has changed, if it has.
    seen: Option<u64>,
}

/// Why a vCPU sleeps in the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asleep {
    /// The engine parked it.
    Parked,
    /// The guest has nothing to do.
    Idle,
    /// Its time is being stolen.
    Stolen,
    /// It waits for an oracle's lock.
    Oracle,
}

/// One vCPU, or another task that only computes.
#[derive(Debug)]
pub(crate) struct Vcpu {
    /// Its VM; none for a task of the host.
    pub(crate) vm: Option<usize>,
    pub(crate) id: VcpuId,
    pub(crate) activity: Activity,
    /// Where a spin goes on after an exit.
    pub(crate) spin: Option<Spin>,
    /// Since when it has been spinning without doing anything else: what the hardware counts.
    spinning_since: Option<u64>,
    /// Cycles that pass before its activity goes on: switches, interrupt handlers.
    pub(crate) overhead: u64,
    /// Up to when its time on the CPU is booked.
    booked: u64,
    /// Tells its present end of activity from earlier ones.
    generation: u64,
    /// The line that its code operates on.
    pub(crate) line: Option<LineId>,
    pub(crate) asleep: Option<Asleep>,
    /// Tells its present sleep's deadline from earlier ones.
    pub(crate) sleep: u64,
    /// A sleep that the engine began has ended like this, and the engine has not heard of it yet.
    unparked: Option<pvlock_host::Unpark>,
    /// Interrupts that wait for it to be in the guest; each is acknowledged on a line, or only wakes.
    interrupts: Vec<Option<TaskId>>,
    /// Interrupts that only wake, not yet taken by idling.
    pub(crate) events: u64,
    pub(crate) counts: Counts,
    pub(crate) spent: Spent,
    /// Locks it holds or is the next to get, for a clairvoyant scheduler.
    pub(crate) urgency: u32,
}

/// What happens at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A vCPU's activity is over.
    End { task: TaskId, generation: u64 },
    /// A CPU looks whether its task has run for long enough.
    Tick(CpuId),
    /// A CPU chooses anew.
    Resched(CpuId),
    /// A sleeping vCPU becomes runnable; who woke it is on this CPU.
    Wake { task: TaskId, sleep: u64, how: pvlock_host::Unpark, waker: CpuId },
    /// An interrupt arrives.
    Interrupt { task: TaskId, acknowledge: Option<TaskId> },
    /// The gangs take turns.
    Rotate,
    /// Measuring begins.
    Measure,
    /// Something goes wrong.
    Fault(Fault),
    /// The run is over.
    Stop,
}

/// What to do next.
pub(crate) enum Step {
    /// Let this vCPU's code run.
    Run(TaskId),
    /// Nothing any more.
    Stop,
}

/// A host and its VMs at one time.
pub struct Machine {
    pub(crate) now: u64,
    pub(crate) params: Params,
    pub(crate) costs: Costs,
    events: Events<Event>,
    pub(crate) sched: Sched,
    pub(crate) vcpus: Vec<Vcpu>,
    pub(crate) vms: Vec<Vm>,
    pub(crate) lines: Vec<Line>,
    ticking: Vec<bool>,
    /// Whose code runs, or is to run next.
    pub(crate) running: Option<TaskId>,
    pause_window: Option<u64>,
    pub(crate) random: Pcg64Mcg,
    pub(crate) recording: Option<Recording>,
    pub(crate) gang_slice: Option<u64>,
    /// A bound is simulated.
    pub(crate) clairvoyant: bool,
    /// Lock operations so far.
    pub(crate) operations: u64,
    /// What goes wrong, and what must hold all the same.
    pub(crate) trial: Option<Box<Trial>>,
}

/// Parameters in cycles, as they are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    pub(crate) pause: u64,
    pub(crate) gap: u64,
    pub(crate) atomic: u64,
    pub(crate) transfer: u64,
    pub(crate) refetch: u64,
    pub(crate) flush: u64,
    pub(crate) exit: u64,
    pub(crate) pause_loop: u64,
    pub(crate) candidate: u64,
    pub(crate) contended: u64,
    pub(crate) decide: u64,
    pub(crate) wake_cost: u64,
    pub(crate) wake_latency: u64,
    pub(crate) switch: u64,
    pub(crate) ipi_send: u64,
    pub(crate) ipi_receive: u64,
    pub(crate) tick: u64,
}

impl Costs {
    pub(crate) fn new(params: &Params) -> Self {
        let Params { guest, exits, pause_loop, scheduler, .. } = *params;
        let cycles = |ns| params.cycles(ns);
        Self {
            pause: guest.pause_cycles,
            gap: pause_loop.gap_cycles,
            atomic: cycles(guest.atomic),
            transfer: cycles(guest.transfer),
            refetch: cycles(guest.refetch),
            flush: cycles(guest.flush),
            exit: cycles(exits.exit),
            pause_loop: cycles(exits.pause_loop),
            candidate: cycles(exits.candidate),
            contended: cycles(exits.contended),
            decide: cycles(exits.decide),
            wake_cost: cycles(exits.wake_cost),
            wake_latency: cycles(exits.wake_latency),
            switch: cycles(exits.switch),
            ipi_send: cycles(exits.ipi_send),
            ipi_receive: cycles(exits.ipi_receive),
            tick: cycles(scheduler.tick),
        }
    }
}

impl Machine {
    pub(crate) fn new(params: Params, sched: Sched, cpus: usize, pause_window: Option<u64>, random: Pcg64Mcg) -> Self {
        Self {
            now: 0,
            params,
            costs: Costs::new(&params),
            events: Events::default(),
            sched,
            vcpus: Vec::new(),
            vms: Vec::new(),
            lines: Vec::new(),
            ticking: vec![false; cpus],
            running: None,
            pause_window,
            random,
            recording: None,
            gang_slice: None,
            clairvoyant: false,
            operations: 0,
            trial: None,
        }
    }

    /// A vCPU, or (without VM) another task of the host.
    pub(crate) fn add(&mut self, vm: Option<usize>, id: VcpuId, activity: Activity) {
        self.vcpus.push(Vcpu {
            vm,
            id,
            activity,
            spin: None,
            spinning_since: None,
            overhead: 0,
            booked: 0,
            generation: 0,
            line: None,
            asleep: None,
            sleep: 0,
            unparked: None,
            interrupts: Vec::new(),
            events: 0,
            counts: Counts::default(),
            spent: Spent::default(),
            urgency: 0,
        });
    }

    pub(crate) fn at(&mut self, time: u64, event: Event) {
        self.events.add(time, event);
    }

    /// Lets things happen until some guest code is to run.
    pub(crate) fn step(&mut self) -> Step {
        loop {
            if self.trial.is_some() && self.is_decided() {
                return Step::Stop;
            }
            if let Some(task) = self.running {
                return Step::Run(task);
            }
            let Some((time, event)) = self.events.pop() else { return Step::Stop };
            debug_assert!(time >= self.now, "time goes on");
            self.now = time;
            if self.trial.is_some() {
                self.note_event(&event);
            }
            match event {
                Event::End { task, generation } if self.vcpus[task].generation == generation => self.end(task),
                Event::End { .. } => {}
                Event::Tick(cpu) => self.tick(cpu),
                Event::Resched(cpu) => self.resched(cpu),
                Event::Wake { task, sleep, how, waker } => self.awake(task, sleep, how, waker),
                Event::Interrupt { task, acknowledge } => self.interrupt(task, acknowledge),
                Event::Rotate => self.rotate(),
                Event::Measure => self.measure(),
                Event::Fault(fault) => self.fault(fault),
                Event::Stop => return Step::Stop,
            }
        }
    }

    /// The code that ran has suspended itself, or ended.
    pub(crate) fn suspended(&mut self, ended: bool) {
        let Some(task) = self.running.take() else { return };
        self.settle(task);
        if ended {
            self.ended(task);
            self.vcpus[task].activity = Activity::Ended;
            let cpu = self.sched.cpu_of(task);
            self.leave(task);
            self.sched.block(cpu, self.now);
            self.resched(cpu);
        } else {
            self.proceed(task);
        }
    }

    // ---- what the running code asks for ------------------------------------------------------------------------------

    /// Computes for `cycles`; true if that is done, false if the code has to suspend itself.
    pub(crate) fn compute(&mut self, cycles: u64) -> bool {
        let Some(task) = self.running else { return true };
        if cycles > self.costs.gap {
            self.vcpus[task].spinning_since = None;
        }
        self.settle(task);
        if self.pass(task, cycles) {
            return true;
        }
        self.book(task, self.now);
        self.vcpus[task].activity = Activity::Compute { left: cycles };
        false
    }

    /// Lets time pass at once, if nothing happens meanwhile.
    fn pass(&mut self, task: TaskId, cycles: u64) -> bool {
        let fits = self.now + cycles < self.events.next_time() && self.vcpus[task].interrupts.is_empty();
        if fits {
            self.now += cycles;
        }
        fits
    }

    /// Spins while `word` is `value`, until `until`. As [`Machine::compute`].
    pub(crate) fn spin(&mut self, word: Option<(*const Word, u64)>, until: u64) -> bool {
        let Some(task) = self.running else { return true };
        self.settle(task);
        self.book(task, self.now);
        let vcpu = &mut self.vcpus[task];
        vcpu.spinning_since.get_or_insert(self.now);
        vcpu.spin = Some(Spin { word, until: until.max(self.now + self.costs.pause), seen: None });
        vcpu.activity = Activity::Spin;
        false
    }

    /// Leaves the guest.
    pub(crate) fn exit(&mut self, cost: u64, then: After) {
        let Some(task) = self.running else { return };
        self.settle(task);
        self.book(task, self.now);
        self.vcpus[task].spinning_since = None;
        self.vcpus[task].activity = Activity::Host { left: self.costs.exit + cost, then };
    }

    /// The running code has taken a lock that it has wanted since then.
    pub(crate) fn acquired(&mut self, wanted: u64) {
        let Some(task) = self.running else { return };
        self.operations += 1;
        self.vcpus[task].spinning_since = None;
        self.vcpus[task].counts.waited(self.now - wanted);
    }

    /// The running code is about to give a lock back that it wanted and took then.
    pub(crate) fn released(&mut self, lock: usize, wanted: u64, taken: u64) {
        if let (Some(recording), Some(task)) = (&mut self.recording, self.running) {
            recording.held(Hold { task, lock, wanted, taken, released: self.now });
        }
    }

    /// Books the time of a task up to now, if it is on a CPU.
    pub(crate) fn book_running(&mut self, task: TaskId) {
        if self.sched.current(self.sched.cpu_of(task)) == Some(task) {
            self.book(task, self.now);
        }
    }

    fn measure(&mut self) {
        for task in 0..self.vcpus.len() {
            self.book_running(task);
            self.vcpus[task].counts = Counts::default();
            self.vcpus[task].spent = Spent::default();
        }
    }
}
