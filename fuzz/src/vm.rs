//! One VM under attack: its engine, its guest, a driver that keeps the engine's contract, and what must hold after every event.

use crate::counted::{self, Counted};
use crate::events::{End, Event, Host, Scheduling, Settings, Setup, Write};
use crate::ram::{Race, Ram, START};
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::offset::{header, record};
use pvlock_host::protocol::{
    ABI_VERSION, HostFlags, LockId, MAGIC, PAGE_SIZE, RECORD_STRIDE, SlotIndex, VcpuId, WAIT_SLOTS, Wait, WaitState, region_size,
};
use pvlock_host::{Engine, Placement, RunStates, Scheduler, SleepKind, Statistics, Unpark, Verdict, Waker, Yields};
use std::cell::{Cell, RefCell};

/// The driver's side of a vCPU.
#[derive(Clone, Copy, Default)]
struct Vcpu {
    /// Its deadline, if it sleeps.
    until: Option<u64>,
    /// A wake that it has not seen yet.
    token: bool,
    /// What its scheduler has said last.
    on_cpu: bool,
    /// It waits for something that the engine does not know.
    idle: bool,
}

/// The driver as the engine sees it, on a scheduler whose answers make no sense together.
struct Machine {
    woken: RefCell<Vec<VcpuId>>,
    seed: Cell<u32>,
    asked: Cell<usize>,
}

impl Machine {
    fn ask(&self) -> u32 {
        assert_eq!(counted::held(), 0, "the scheduler is asked under a lock");
        self.asked.set(self.asked.get() + 1);
        self.seed.get()
    }
}

impl Scheduler for Machine {
    fn placement(&self, vcpu: VcpuId) -> Placement {
        let placements = [Placement::Unknown, Placement::Preempted, Placement::Running, Placement::Sleeping];
        placements[(self.ask() >> (vcpu.index() * 2)) as usize % 4]
    }

    fn backlog(&self, vcpu: VcpuId) -> Option<u32> {
        (self.ask().rotate_right(vcpu.index() as u32 * 3) % 8).checked_sub(1)
    }

    fn yields(&self) -> Yields {
        [Yields::None, Yields::Plain, Yields::Directed][self.ask() as usize % 3]
    }
}

impl Waker for Machine {
    fn wake(&self, vcpu: VcpuId) {
        assert_eq!(counted::held(), 0, "a vCPU is woken under a lock");
        self.woken.borrow_mut().push(vcpu);
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }
}

/// What a VM has got from its host, in order, and what was left in the end.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    seen: Vec<(Option<Verdict>, Vec<VcpuId>)>,
    pub(crate) statistics: Statistics,
    ram: Vec<u64>,
}

/// A VM.
pub(crate) struct Vm {
    engine: Engine<Ram, Counted>,
    ram: Ram,
    machine: Machine,
    now: u64,
    vcpus: Vec<Vcpu>,
    registered: bool,
    paused: bool,
    shut_down: bool,
    returns: u64,
    outcome: Outcome,
}

fn bounded(id: u8) -> VcpuId {
    VcpuId::new(id.into()).expect("far below the most there may be")
}

fn level(slot: u8) -> SlotIndex {
    SlotIndex::new(usize::from(slot) % WAIT_SLOTS).expect("bounded")
}

/// At this page of RAM, or behind it.
fn register(page: u8) -> Doorbell {
    Doorbell::Register { low: (START / PAGE_SIZE as u64) as u32 + u32::from(page % 8) }
}

impl Vm {
    pub(crate) fn new(settings: &Settings) -> Self {
        let vcpus = settings.vcpus();
        let ram = Ram::new();
        let mut vm = Self {
            engine: Engine::new(settings.config(), vcpus, ram.clone()).expect("the configuration is sound"),
            ram,
            machine: Machine { woken: RefCell::default(), seed: Cell::new(0), asked: Cell::new(0) },
            now: settings.start.unwrap_or(0),
            vcpus: vec![Vcpu::default(); vcpus],
            registered: false,
            paused: false,
            shut_down: false,
            returns: 0,
            outcome: Outcome::default(),
        };
        if settings.registered {
            vm.boot(0);
            assert!(vm.registered);
        }
        vm
    }

    fn exact(&self) -> bool {
        self.engine.config().run_states == RunStates::Exact
    }

    fn stopped(&self) -> bool {
        self.paused || self.shut_down
    }

    fn own(&self, id: u8) -> VcpuId {
        VcpuId::new(usize::from(id) % self.vcpus.len()).expect("a vCPU of this VM")
    }

    /// One of this VM's, or hardly beyond.
    fn named(&self, id: u8) -> VcpuId {
        bounded(id % (self.vcpus.len() as u8 + 1))
    }

    fn hint(&self, id: u8) -> Option<VcpuId> {
        VcpuId::decode(u64::from(id) % (self.vcpus.len() as u64 + 2))
    }

    /// The vCPU that is to do something, if it does not sleep. It runs then: its scheduler says so first.
    fn running(&mut self, id: u8) -> Option<VcpuId> {
        let vcpu = self.own(id);
        let state = self.vcpus[vcpu.index()];
        if state.until.is_some() {
            return None;
        }
        if self.exact() && !state.on_cpu {
            self.scheduling(&Scheduling::In(id));
        }
        Some(vcpu)
    }

    pub(crate) fn step(&mut self, event: &Event) {
        match *event {
            Event::Halt { vcpu, slot, interrupts } => self.ring(vcpu, Doorbell::Halt { slot: level(slot), interrupts }),
            Event::Kick { vcpu, target } => self.ring(vcpu, Doorbell::Kick(self.named(target))),
            Event::Spin(id) => {
                if let Some(vcpu) = self.running(id) {
                    let now = self.now;
                    let verdict = self.event(false, |vm| vm.engine.pause_loop(vcpu, now, &vm.machine));
                    self.after(Some((vcpu, verdict)));
                }
            }
            Event::Return(id) => self.comes_back(self.own(id)),
            Event::Publish { vcpu, slot, lock, ticket, predecessor, holder, halting } => {
                let wait = LockId::new((lock % 4).into()).map(|lock| Wait {
                    lock,
                    ticket: (ticket % 8) as u32,
                    state: if halting { WaitState::Halting } else { WaitState::Spinning },
                    predecessor: self.hint(predecessor),
                    holder: self.hint(holder),
                });
                let record = (self.own(vcpu).index() + 1) * RECORD_STRIDE;
                self.ram.write((record + record::slot_word(level(slot))) / 8, wait.map_or(0, |wait| wait.word()));
                self.ram.write((record + record::slot_id(level(slot))) / 8, wait.map_or(0, |wait| wait.lock.get()));
            }
            Event::Scheduler(ref event) => self.scheduling(event),
            Event::Memory(ref write) => self.memory(write),
            Event::Host(ref event) => self.host(event),
            Event::Setup(Setup::Ring(id, word)) => self.ring_word(id, word),
            Event::Setup(Setup::Online(id, target)) => self.ring(id, Doorbell::Online(self.named(target))),
            Event::Setup(Setup::Register { vcpu, page }) => self.ring(vcpu, register(page)),
            Event::Setup(Setup::Boot(id)) => self.boot(id),
            Event::Setup(Setup::Resume) => {
                self.paused = false;
                self.outside(|vm| vm.engine.resume());
            }
        }
    }

    fn scheduling(&mut self, event: &Scheduling) {
        match *event {
            Scheduling::In(id) => {
                let vcpu = self.own(id);
                if self.exact() && self.vcpus[vcpu.index()].until.is_none() {
                    let state = &mut self.vcpus[vcpu.index()];
                    (state.on_cpu, state.idle) = (true, false);
                    self.outside(|vm| vm.engine.scheduled_in(vcpu, &vm.machine));
                }
            }
            Scheduling::Out(id) => {
                let vcpu = self.own(id);
                if self.exact() {
                    let state = &mut self.vcpus[vcpu.index()];
                    (state.on_cpu, state.idle) = (false, false);
                    self.outside(|vm| vm.engine.scheduled_out(vcpu));
                }
            }
            Scheduling::Idle(id) => {
                if let Some(vcpu) = self.running(id).filter(|_| self.exact()) {
                    let state = &mut self.vcpus[vcpu.index()];
                    (state.on_cpu, state.idle) = (false, true);
                    self.outside(|vm| vm.engine.idle(vcpu));
                }
            }
            Scheduling::Says(seed) => self.machine.seed.set(seed),
            Scheduling::Advance(ns) => self.now = self.now.saturating_add(ns.into()),
        }
    }

    fn memory(&mut self, write: &Write) {
        match *write {
            Write::Region { at, word } => {
                let words = region_size(self.vcpus.len(), RECORD_STRIDE) / 8;
                self.ram.write(usize::from(at) % words, word);
            }
            Write::Anywhere { at, word } => self.ram.write(at.into(), word),
            Write::Race { after, at, word } => self.ram.race(Race { after: after % 16, at, word }),
            Write::Header { version, vcpus, stride, features } => {
                self.ram.write(header::MAGIC / 8, MAGIC);
                self.ram.write(header::VERSION / 8, version.unwrap_or(u64::from(ABI_VERSION) | u64::from(vcpus) << 32));
                self.ram.write(header::STRIDE / 8, stride.map_or(RECORD_STRIDE as u64, u64::from));
                self.ram.write(header::FEATURES / 8, features.into());
            }
        }
    }

    fn host(&mut self, event: &Host) {
        match *event {
            Host::Interrupt(id) => {
                let vcpu = self.own(id);
                self.outside(|vm| vm.engine.interrupt(vcpu, &vm.machine));
            }
            Host::Kicked(id) => {
                let target = self.named(id);
                self.outside(|vm| vm.engine.kicked(target, &vm.machine));
                self.arrived(target);
            }
            Host::Flags(flags) => self.outside(|vm| vm.engine.set_flags(HostFlags::from_bits(flags.into()), &vm.machine)),
            Host::PollerWakes => self.outside(|vm| _ = vm.engine.poller_wakes()),
            Host::Poll => self.outside(|vm| _ = vm.engine.poll(&vm.machine)),
            Host::PollerSleeps => self.outside(|vm| vm.engine.poller_sleeps(&vm.machine)),
            Host::End(End::Offline(id, target)) => self.ring(id, Doorbell::Offline(self.named(target))),
            Host::End(End::Reset(id)) => {
                let vcpu = self.own(id);
                self.outside(|vm| vm.engine.reset(vcpu, &vm.machine));
            }
            Host::End(End::Pause) => {
                self.paused = true;
                self.outside(|vm| vm.engine.pause(&vm.machine));
            }
            Host::End(End::Unregister(id)) => self.ring(id, Doorbell::Unregister),
            Host::End(End::ResetVm) => {
                self.registered = false;
                self.outside(|vm| vm.engine.reset_vm(&vm.machine));
            }
        }
    }

    fn boot(&mut self, id: u8) {
        let vcpus = self.vcpus.len() as u8;
        self.memory(&Write::Header { version: None, vcpus, stride: None, features: u8::MAX });
        self.ring(id, register(0));
        (0..vcpus).for_each(|target| self.ring(id, Doorbell::Online(bounded(target))));
    }

    fn ring(&mut self, id: u8, doorbell: Doorbell) {
        self.ring_word(id, doorbell.encode());
    }

    fn ring_word(&mut self, id: u8, word: u32) {
        let Some(vcpu) = self.running(id) else { return };
        let doorbell = Doorbell::decode(word);
        let registers = matches!(doorbell, Some(Doorbell::Register { .. }));
        let now = self.now;
        let verdict = self.event(registers, |vm| vm.engine.doorbell(vcpu, word, now, &vm.machine));
        match doorbell {
            Some(Doorbell::Register { .. }) => self.registered |= Status::decode(self.engine.answer(vcpu)) == Status::Ok,
            // Whatever it is answered.
            Some(Doorbell::Unregister) => self.registered = false,
            _ => {}
        }
        self.after(Some((vcpu, verdict)));
        if let Some(Doorbell::Kick(target)) = doorbell {
            self.arrived(target);
        }
    }

    /// The thread of `vcpu` leaves its sleep, if it sleeps, for whatever reason there is.
    fn comes_back(&mut self, vcpu: VcpuId) {
        let Vcpu { until: Some(until), token, .. } = self.vcpus[vcpu.index()] else { return };
        let how = match token {
            true => Unpark::Woken,
            false if self.now >= until => Unpark::Deadline,
            false => Unpark::Signal,
        };
        self.vcpus[vcpu.index()] = Vcpu { on_cpu: true, ..Vcpu::default() };
        self.returns += 1;
        let now = self.now;
        self.outside(|vm| vm.engine.unparked(vcpu, how, now, &vm.machine));
    }

    // ---- what must hold ------------------------------------------------------------------------------------------------

    fn outside(&mut self, happens: impl FnOnce(&Self)) {
        self.event(false, happens);
        self.after(None);
    }

    /// One event of the engine's. Its work is bounded by the number of vCPUs.
    fn event<T>(&mut self, registers: bool, happens: impl FnOnce(&Self) -> T) -> T {
        self.ram.begin(registers);
        self.machine.asked.set(0);
        counted::taken();
        let result = happens(self);
        let (vcpus, ahead) = (self.vcpus.len(), self.engine.config().policy.look_ahead as usize);
        let (accesses, locks, asked) = (self.ram.accesses(), counted::taken(), self.machine.asked.get());
        assert!(accesses <= 32 + 6 * vcpus + 12 * ahead, "{accesses} accesses to guest memory");
        // While one is held, a list is walked at most, which has at most as many links.
        assert!(locks <= 8 + 10 * vcpus, "{locks} locks taken");
        assert!(asked <= 12 + 2 * vcpus + 4 * ahead, "the scheduler was asked {asked} times");
        result
    }

    /// After an event; what the vCPU is told whose it was.
    fn after(&mut self, verdict: Option<(VcpuId, Verdict)>) {
        if !self.registered {
            self.ram.forget_region();
        }
        if let Some((vcpu, verdict)) = verdict {
            self.carry_out(vcpu, verdict);
        }
        let woken = self.machine.woken.take();
        for (n, &vcpu) in woken.iter().enumerate() {
            assert!(!woken[..n].contains(&vcpu), "{vcpu:?} is woken twice by one event");
            let state = &mut self.vcpus[vcpu.index()];
            assert!(state.until.is_some(), "{vcpu:?} is woken and did not sleep");
            state.token = true;
        }
        self.outcome.seen.push((verdict.map(|(_, verdict)| verdict), woken));
        self.check_sleepers();
    }

    fn carry_out(&mut self, vcpu: VcpuId, verdict: Verdict) {
        let park = match verdict {
            Verdict::Park(park) => park,
            Verdict::YieldTo(target, _) => {
                assert!(target != vcpu && target.index() < self.vcpus.len(), "{vcpu:?} yields to {target:?}");
                return;
            }
            Verdict::Resume(_) | Verdict::Yield(_) => return,
        };
        assert!(!self.stopped(), "{vcpu:?} parks in a VM that is paused");
        let config = self.engine.config();
        let longest = config.deadline_ns.max(config.policy.limits.longest_ns);
        assert!(park.until >= self.now && park.until <= self.now.saturating_add(longest), "{park:?} at {}", self.now);
        let sleeper = self.engine.dump(self.now).find(|sleeper| sleeper.vcpu == vcpu).expect("who is told to park sleeps");
        assert_eq!(sleeper.queue, park.on, "{vcpu:?} is told that it is on another queue");
        self.vcpus[vcpu.index()] = Vcpu { until: Some(park.until), ..Vcpu::default() };
    }

    fn check_sleepers(&self) {
        let queues = self.engine.check_queues().expect("the queues are sound");
        let sleepers: Vec<_> = self.engine.dump(self.now).collect();
        let asleep = self.vcpus.iter().zip(0..).filter(|(vcpu, _)| vcpu.until.is_some()).map(|(_, id)| bounded(id));
        assert!(asleep.eq(sleepers.iter().map(|sleeper| sleeper.vcpu)), "driver and engine differ on who sleeps");
        let owner = |vcpu: VcpuId| sleepers.iter().find(|sleeper| sleeper.vcpu == vcpu).and_then(|sleeper| sleeper.queue);
        for sleeper in &sleepers {
            let on: Vec<_> =
                (0..).zip(&queues).filter(|(_, queue)| queue.contains(&sleeper.vcpu)).map(|(id, _)| bounded(id)).collect();
            assert_eq!(on, Vec::from_iter(sleeper.queue), "{sleeper} is on other queues");
            let mut at = Some(sleeper.vcpu);
            (0..=self.vcpus.len()).for_each(|_| at = at.and_then(owner));
            assert_eq!(at, None, "{sleeper}: in a circle");
            if sleeper.woken {
                assert!(self.vcpus[sleeper.vcpu.index()].token, "{sleeper}: nobody has told the driver");
                continue;
            }
            assert!(!self.stopped(), "{sleeper}: in a VM that is paused");
            assert!(self.registered || sleeper.kind == SleepKind::Limited, "{sleeper}: without a region");
            if sleeper.kind == SleepKind::Spun {
                let owner = sleeper.queue.expect("nobody else will wake it");
                let state = self.vcpus[owner.index()];
                assert!(!state.on_cpu && (self.exact() || state.until.is_some()), "{sleeper}: which runs");
                assert!(!state.idle, "{sleeper}: which may wait for the sleeper");
            }
        }
        assert_eq!(queues.iter().flatten().count(), sleepers.iter().filter(|sleeper| sleeper.queue.is_some()).count());
    }

    /// Somebody has kicked `target`.
    fn arrived(&self, target: VcpuId) {
        let mut sleepers = self.engine.dump(self.now);
        if let Some(sleeper) = sleepers.find(|sleeper| sleeper.vcpu == target && sleeper.kind != SleepKind::Limited) {
            assert!(sleeper.woken, "{sleeper}: was kicked");
        }
    }

    /// Whatever its guest has done, it can be shut down, and everybody comes back.
    pub(crate) fn finish(mut self) -> Outcome {
        self.shut_down = true;
        self.outside(|vm| vm.engine.shut_down(&vm.machine));
        (0..self.vcpus.len()).for_each(|id| self.comes_back(bounded(id as u8)));
        assert_eq!(self.engine.dump(self.now).count(), 0);
        assert_eq!(self.engine.check_queues().expect("the queues are sound").concat(), []);
        let statistics = self.engine.statistics();
        let Statistics { kicked, interrupted, woken, throttled, forced, spurious, .. } = statistics;
        assert_eq!(kicked + interrupted + woken + throttled + forced + spurious, self.returns, "each sleep ends for one reason");
        assert_eq!(statistics.parks, self.returns, "each sleep ends");
        Outcome { statistics, ram: self.ram.words(), ..self.outcome }
    }
}
