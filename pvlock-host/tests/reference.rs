//! The engine against a reference that is simple enough to be seen to be right: latches are sets, queues are vectors, nothing is
//! atomic. After every event verdicts, wakes in their order, queues, run states and sleepers are the same.
#![cfg(not(pvlock_loom))]

mod common;
use common::*;
use proptest::prelude::*;
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::{HostFlags, RunState, Wait, WaitState};
use pvlock_host::{Config, Park, PauseLoop, Policy, Queue, Resume, RunStates, SleepKind, Unpark, Verdict};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::SeqCst;

const VCPUS: usize = 5;

#[derive(Clone, Debug)]
enum Event {
    Halt(usize, usize, bool, Option<Wait>),
    Spin(usize, usize, Option<Wait>),
    Kick(usize, usize),
    Kicked(usize),
    Return(usize),
    In(usize),
    Out(usize),
    Idle(usize),
    Interrupt(usize),
    Online(usize),
    Offline(usize),
    Reset(usize),
    ResetVm,
    Register,
    Unregister,
    Pause,
    Resume,
    Flags,
    Advance(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let id = || 0..VCPUS;
    // A little out of range, and around the point where tickets wrap.
    let hint = || proptest::option::weighted(0.95, (0..=VCPUS).prop_map(vcpu));
    let wait = (1u64..3, 0u32..4, hint(), hint()).prop_map(|(lock, ticket, predecessor, holder)| Wait {
        predecessor,
        holder,
        ..waits(lock, ticket.wrapping_sub(2))
    });
    let wait = move || proptest::option::weighted(0.95, wait.clone());
    prop_oneof![
        12 => (id(), 0usize..4, any::<bool>(), wait()).prop_map(|(v, slot, interrupts, wait)| Event::Halt(v, slot, interrupts, wait)),
        16 => (id(), 0usize..4, wait()).prop_map(|(v, slot, wait)| Event::Spin(v, slot, wait)),
        6 => (id(), id()).prop_map(|(v, to)| Event::Kick(v, to)),
        10 => id().prop_map(Event::Return),
        3 => prop_oneof![id().prop_map(Event::In), id().prop_map(Event::Kicked)],
        8 => prop_oneof![id().prop_map(Event::Out), id().prop_map(Event::Idle)],
        3 => id().prop_map(Event::Interrupt),
        3 => id().prop_map(Event::Online),
        3 => (1u64..80).prop_map(Event::Advance),
        1 => prop_oneof![id().prop_map(Event::Offline), id().prop_map(Event::Reset), Just(Event::Flags)],
        // What ends sleeps is rarer than what makes them possible again.
        2 => prop_oneof![1 => Just(Event::Pause), 5 => Just(Event::Resume)],
        2 => prop_oneof![1 => Just(Event::ResetVm), 1 => Just(Event::Unregister), 6 => Just(Event::Register)],
    ]
}

// ---- the reference -----------------------------------------------------------------------------------------------------

#[derive(Clone, Copy)]
struct Sleep {
    spun: bool,
    slot: usize,
    interrupts: bool,
    until: u64,
    /// Something but a kick or an interrupt has ended it.
    woken: bool,
}

#[derive(Clone)]
struct Vcpu {
    online: bool,
    latches: BTreeSet<usize>,
    /// An interrupt that no halt has taken, and one since the last halt or pause-loop exit.
    interrupts: [bool; 2],
    /// An interrupt since the last exit at which it could have slept, and the wait in which there was one last.
    unnoted: bool,
    interrupted: (u64, u32),
    sleep: Option<Sleep>,
    /// The driver's token.
    token: bool,
    lock: u64,
    ticket: u32,
    /// In which wait it was woken ahead of its turn last.
    early: (u64, u32),
    run: RunState,
    preempted: bool,
    halted: Vec<usize>,
    spun: Vec<usize>,
}

struct Model {
    config: Config,
    now: u64,
    registered: bool,
    paused: bool,
    vcpus: Vec<Vcpu>,
    woken: Vec<usize>,
    /// Sleeps ended by kicks, interrupts, the host, the deadline, nothing.
    ends: [u64; 5],
}

impl Vcpu {
    fn ended(&self) -> bool {
        let ends = |sleep: Sleep| {
            let interrupt = if sleep.spun { self.interrupts[1] } else { sleep.interrupts && self.interrupts[0] };
            sleep.woken || interrupt || self.latches.contains(&sleep.slot)
        };
        self.sleep.is_some_and(ends)
    }
}

impl Model {
    /// Something happens to `v`; its sleep may end.
    fn post(&mut self, v: usize, happens: impl FnOnce(&mut Vcpu)) {
        let before = self.vcpus[v].ended();
        happens(&mut self.vcpus[v]);
        if self.vcpus[v].ended() && !before {
            self.vcpus[v].token = true;
            self.woken.push(v);
        }
    }

    fn wake(&mut self, v: usize) {
        self.post(v, |vcpu| vcpu.sleep.iter_mut().for_each(|sleep| sleep.woken = true));
    }

    fn wake_all(&mut self, sleepers: impl IntoIterator<Item = usize>) {
        sleepers.into_iter().for_each(|v| self.wake(v));
    }

    /// On whose queue `v` is.
    fn owner(&self, v: usize) -> Option<usize> {
        self.vcpus.iter().position(|owner| owner.halted.contains(&v) || owner.spun.contains(&v))
    }

    /// How many sleepers one behind the other `v` is behind; as many as there are vCPUs in a circle.
    fn depth(&self, v: usize) -> usize {
        std::iter::successors(self.owner(v), |&owner| self.owner(owner)).take(VCPUS).count()
    }

    fn leave(&mut self, v: usize) {
        for owner in &mut self.vcpus {
            owner.halted.retain(|&sleeper| sleeper != v);
            owner.spun.retain(|&sleeper| sleeper != v);
        }
    }

    /// In front of the first that waits for the same lock with a later ticket; `false` if that would close a circle.
    fn join(&mut self, v: usize, owner: usize, spun: bool) -> bool {
        let queue = if spun { &self.vcpus[owner].spun } else { &self.vcpus[owner].halted };
        let (lock, ticket) = (self.vcpus[v].lock, self.vcpus[v].ticket);
        let is_later = |other: &Vcpu| other.lock == lock && other.ticket.wrapping_sub(ticket) as i32 > 0;
        let place = queue.iter().position(|&other| is_later(&self.vcpus[other])).unwrap_or(queue.len());
        let owner = &mut self.vcpus[owner];
        if spun { &mut owner.spun } else { &mut owner.halted }.insert(place, v);
        if self.depth(v) == VCPUS {
            self.leave(v);
            return false;
        }
        true
    }

    fn runs(&mut self, v: usize) {
        let exact = self.config.run_states == RunStates::Exact;
        let own = &mut self.vcpus[v];
        (own.run, own.preempted) = (if exact { RunState::Running } else { RunState::Unknown }, false);
        let ahead = own.halted.len().min(self.config.wake_ahead as usize);
        let drained: Vec<_> = own.spun.drain(..).collect();
        let served: Vec<_> = own.halted.drain(..ahead).collect();
        self.wake_all(drained);
        for v in served {
            let ended = self.vcpus[v].ended();
            self.wake(v);
            let own = &mut self.vcpus[v];
            if own.ended() && !ended {
                own.early = (own.lock, own.ticket);
            }
        }
    }

    /// `v` begins or ends a life.
    fn set_online(&mut self, v: usize, online: bool) {
        let own = &mut self.vcpus[v];
        (own.online, own.latches, own.interrupts, own.unnoted) = (online, BTreeSet::new(), [false; 2], false);
    }

    fn release(&mut self, v: usize) {
        self.wake(v);
        self.leave(v);
        let own = &mut self.vcpus[v];
        let sleepers: Vec<_> = own.spun.drain(..).chain(own.halted.drain(..)).collect();
        self.wake_all(sleepers);
    }

    fn unregister(&mut self) -> Status {
        if !std::mem::take(&mut self.registered) {
            return Status::NotRegistered;
        }
        (0..VCPUS).for_each(|v| self.set_online(v, false));
        (0..VCPUS).for_each(|v| self.release(v));
        Status::Ok
    }

    fn sleeps(&mut self, v: usize, spun: bool, slot: usize, interrupts: bool, on: Option<usize>) -> Verdict {
        let until = self.now + self.config.deadline_ns;
        self.vcpus[v].sleep = Some(Sleep { spun, slot, interrupts, until, woken: false });
        (self.vcpus[v].run, self.vcpus[v].preempted) = (RunState::NotRunning, false);
        Verdict::Park(Park { until, on: on.map(vcpu) })
    }

    /// A hint that names another vCPU of this VM that is online.
    fn usable(&self, v: usize, hint: Option<pvlock_host::protocol::VcpuId>) -> Option<usize> {
        hint.map(|hint| hint.index()).filter(|&hint| hint != v && hint < VCPUS && self.vcpus[hint].online)
    }

    fn halt(&mut self, v: usize, slot: usize, interrupts: bool, wait: Option<Wait>) -> Verdict {
        if !self.registered || !self.vcpus[v].online {
            return Verdict::Resume(Resume::NotParking);
        }
        let own = &mut self.vcpus[v];
        (own.lock, own.ticket) = wait.map_or((0, 0), |wait| (wait.lock.get(), wait.ticket));
        if own.latches.remove(&slot) {
            return Verdict::Resume(Resume::Latched);
        }
        if interrupts && own.interrupts[0] {
            own.interrupts = [false; 2];
            return Verdict::Resume(Resume::Interrupt);
        }
        if self.paused {
            own.interrupts[1] = false;
            return Verdict::Resume(Resume::NotParking);
        }
        let hint = wait.and_then(|wait| match self.config.queue {
            Queue::None => None,
            Queue::Holder => wait.holder,
            Queue::Previous => wait.predecessor,
        });
        let again = wait.is_some_and(|wait| self.vcpus[v].early == (wait.lock.get(), wait.ticket));
        let on = self.usable(v, hint).filter(|&owner| !again && self.join(v, owner, false));
        self.sleeps(v, false, slot, interrupts, on)
    }

    /// By a scheduler of which nothing is known, so without yields.
    fn spin(&mut self, v: usize, slot: usize, wait: Option<Wait>) -> Verdict {
        let resume = Verdict::Resume;
        let on_holder = match self.config.policy.pause_loop {
            PauseLoop::ParkOnHolder => true,
            PauseLoop::ParkOnPrevious => false,
            _ => return resume(Resume::Ignored),
        };
        let wait = wait.filter(|_| self.registered && self.vcpus[v].online);
        let hint = wait.and_then(|wait| if on_holder { wait.holder } else { wait.predecessor });
        let (Some(owner), Some(wait)) = (self.usable(v, hint), wait) else { return resume(Resume::CannotYield) };
        match (self.vcpus[owner].run, on_holder) {
            (RunState::Running, true) => return resume(Resume::HolderRunning),
            (RunState::Running, false) => return resume(Resume::PreviousRunning),
            (RunState::Unknown, _) => return resume(Resume::Unknown),
            (RunState::NotRunning, _) => {}
        }
        if self.depth(owner) >= self.config.policy.chain as usize {
            return resume(Resume::ChainTooLong);
        }
        let own = &mut self.vcpus[v];
        (own.lock, own.ticket) = (wait.lock.get(), wait.ticket);
        if std::mem::take(&mut own.unnoted) {
            own.interrupted = (own.lock, own.ticket);
        }
        let handler = own.interrupted == (own.lock, own.ticket);
        if own.latches.contains(&slot) {
            return resume(Resume::Latched);
        }
        if std::mem::take(&mut own.interrupts[1]) {
            return resume(Resume::Interrupt);
        }
        if self.paused {
            return resume(Resume::NotParking);
        }
        let awaited = &self.vcpus[owner];
        let is_before = awaited.sleep.is_some() && awaited.lock == wait.lock.get() && awaited.ticket == wait.ticket.wrapping_sub(1);
        if !awaited.preempted && (handler || !is_before) {
            return resume(Resume::NoCandidate);
        }
        if !self.join(v, owner, true) {
            return resume(Resume::Circle);
        }
        self.sleeps(v, true, slot, true, Some(owner))
    }

    /// `lock` passes from `from` to `to`, which is kicked for it.
    fn hand_over(&mut self, from: usize, to: usize, lock: u64) {
        if self.config.queue != Queue::Holder || from == to || !self.vcpus[to].online {
            return;
        }
        let queue = std::mem::take(&mut self.vcpus[from].halted).into_iter().filter(|&sleeper| sleeper != to);
        let (moved, stay) = queue.partition::<Vec<_>, _>(|&sleeper| self.vcpus[sleeper].lock == lock);
        self.vcpus[from].halted = stay;
        for sleeper in moved {
            if !self.join(sleeper, to, false) {
                // The circle leads through `to`, which is taken off its queue, and so woken.
                self.leave(to);
                self.wake(to);
                assert!(self.join(sleeper, to, false));
            }
        }
    }

    fn kick(&mut self, to: usize) {
        self.post(to, |vcpu| vcpu.latches = (0..4).collect());
    }

    fn comes_back(&mut self, v: usize) -> Option<Unpark> {
        let ended = self.vcpus[v].ended();
        let own = &mut self.vcpus[v];
        let sleep = own.sleep?;
        let how = match std::mem::take(&mut own.token) {
            true => Unpark::Woken,
            false if self.now >= sleep.until => Unpark::Deadline,
            false => Unpark::Signal,
        };
        let kicked = own.latches.contains(&sleep.slot);
        let interrupted = if sleep.spun { own.interrupts[1] } else { sleep.interrupts && own.interrupts[0] };
        let reasons = [kicked, interrupted, ended, how == Unpark::Deadline, true];
        self.ends[reasons.iter().position(|&holds| holds)?] += 1;
        if !sleep.spun {
            own.latches.remove(&sleep.slot);
            own.interrupts[0] &= !sleep.interrupts;
        }
        own.interrupts[1] = false;
        own.sleep = None;
        self.leave(v);
        self.runs(v);
        Some(how)
    }
}

// ---- both at once --------------------------------------------------------------------------------------------------------

/// Whether `v` can do something: it does not sleep. On a host that knows run states it runs then.
fn awake(rig: &Rig, model: &mut Model, v: usize) -> bool {
    let awake = model.vcpus[v].sleep.is_none();
    if awake && model.config.run_states == RunStates::Exact && model.vcpus[v].run != RunState::Running {
        rig.engine.scheduled_in(vcpu(v), &rig.waker());
        model.runs(v);
    }
    awake
}

fn step(rig: &Rig, model: &mut Model, event: &Event) {
    let exact = model.config.run_states == RunStates::Exact;
    let waker = &rig.waker();
    match *event {
        Event::Halt(v, slot, interrupts, wait) if awake(rig, model, v) => {
            rig.publish(v, slot, wait);
            assert_eq!(rig.halt(v, slot, interrupts), model.halt(v, slot, interrupts, wait));
        }
        Event::Spin(v, slot, wait) if awake(rig, model, v) => {
            (0..4).for_each(|slot| rig.publish(v, slot, None));
            rig.publish(v, slot, wait.map(|wait| Wait { state: WaitState::Spinning, ..wait }));
            assert_eq!(rig.engine.pause_loop(vcpu(v), model.now, waker), model.spin(v, slot, wait));
        }
        Event::Kick(v, to) if awake(rig, model, v) => {
            let lock = model.vcpus[to].lock;
            rig.kick(v, to);
            model.kick(to);
            model.hand_over(v, to, lock);
        }
        Event::Halt(..) | Event::Spin(..) | Event::Kick(..) => {}
        Event::Kicked(to) => {
            let (lock, from) = (model.vcpus[to].lock, model.owner(to));
            rig.engine.kicked(vcpu(to), waker);
            model.kick(to);
            from.into_iter().for_each(|from| model.hand_over(from, to, lock));
        }
        Event::Return(v) => {
            if let Some(how) = model.comes_back(v) {
                rig.unparked(v, how);
            }
        }
        Event::In(v) => _ = exact && awake(rig, model, v),
        Event::Out(v) if exact => {
            rig.engine.scheduled_out(vcpu(v));
            model.vcpus[v].preempted |= model.vcpus[v].sleep.is_none();
            model.vcpus[v].run = RunState::NotRunning;
        }
        Event::Idle(v) if exact && awake(rig, model, v) => {
            rig.engine.idle(vcpu(v));
            model.vcpus[v].run = RunState::NotRunning;
        }
        Event::Out(_) | Event::Idle(_) => {}
        Event::Interrupt(v) => {
            rig.engine.interrupt(vcpu(v), waker);
            model.post(v, |vcpu| (vcpu.interrupts, vcpu.unnoted) = ([true; 2], true));
        }
        Event::Online(v) | Event::Offline(v) => {
            let online = matches!(event, Event::Online(_));
            let doorbell = if online { Doorbell::Online(vcpu(v)) } else { Doorbell::Offline(vcpu(v)) };
            let refused = online && !model.registered;
            assert_eq!(rig.call(0, doorbell), if refused { Status::NotRegistered } else { Status::Ok });
            if !refused {
                model.set_online(v, online);
                model.release(v);
            }
        }
        Event::Reset(v) => {
            rig.engine.reset(vcpu(v), waker);
            model.set_online(v, false);
            model.release(v);
        }
        Event::ResetVm => {
            rig.engine.reset_vm(waker);
            model.unregister();
            (0..VCPUS).for_each(|v| {
                model.set_online(v, false);
                model.release(v);
            });
        }
        Event::Register => {
            let expected = if model.registered { Status::AlreadyRegistered } else { Status::Ok };
            assert_eq!(rig.register(), expected);
            model.registered = true;
            (0..VCPUS).filter(|_| expected == Status::Ok).for_each(|v| step(rig, model, &Event::Online(v)));
        }
        Event::Unregister => assert_eq!(rig.call(0, Doorbell::Unregister), model.unregister()),
        Event::Pause => {
            rig.engine.pause(waker);
            model.paused = true;
            model.wake_all(0..VCPUS);
        }
        Event::Resume => {
            rig.engine.resume();
            model.paused = false;
        }
        Event::Flags => {
            rig.engine.set_flags(HostFlags::OFF, waker);
            model.wake_all(0..VCPUS);
        }
        Event::Advance(ns) => {
            model.now += ns;
            rig.now.store(model.now, SeqCst);
        }
    }
}

fn config() -> impl Strategy<Value = Config> {
    let queue = prop_oneof![Just(Queue::None), Just(Queue::Holder), Just(Queue::Previous)];
    let pause_loop =
        prop_oneof![1 => Just(PauseLoop::Ignore), 4 => Just(PauseLoop::ParkOnHolder), 4 => Just(PauseLoop::ParkOnPrevious)];
    (queue, 0u32..3, any::<bool>(), pause_loop, 0u32..6).prop_map(|(queue, wake_ahead, exact, pause_loop, chain)| Config {
        queue,
        wake_ahead,
        deadline_ns: 100,
        run_states: if exact { RunStates::Exact } else { RunStates::ParkedOnly },
        policy: Policy { pause_loop, chain, undercommit: None, ..Policy::default() },
        ..Config::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn row_11_the_engine_does_what_the_reference_does_and_nobody_is_on_two_queues(
        config in config(),
        events in proptest::collection::vec(event(), 1..300),
    ) {
        let rig = Rig::new(config, VCPUS);
        let vcpu = Vcpu {
            online: true,
            latches: BTreeSet::new(),
            interrupts: [false; 2],
            unnoted: false,
            interrupted: (0, 0),
            sleep: None,
            token: false,
            lock: 0,
            ticket: 0,
            early: (0, 0),
            run: RunState::Unknown,
            preempted: false,
            halted: vec![],
            spun: vec![],
        };
        let vcpus = vec![vcpu; VCPUS];
        let mut model = Model { config, now: 0, registered: true, paused: false, vcpus, woken: vec![], ends: [0; 5] };
        for event in &events {
            step(&rig, &mut model, event);
            prop_assert_eq!(rig.woken(), std::mem::take(&mut model.woken), "woken by {:?}", event);
            let queues = model.vcpus.iter().map(|vcpu| [&vcpu.halted[..], &vcpu.spun].concat()).collect::<Vec<_>>();
            prop_assert_eq!(rig.queues(), queues, "queues after {:?}", event);
            let sleepers = rig.engine.dump(model.now).map(|sleeper| (sleeper.vcpu.index(), sleeper.woken, sleeper.kind == SleepKind::Spun));
            let expected = (0..).zip(&model.vcpus).filter_map(|(v, vcpu)| vcpu.sleep.map(|sleep| (v, vcpu.ended(), sleep.spun)));
            prop_assert_eq!(sleepers.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "after {:?}", event);
            for (v, vcpu) in model.vcpus.iter().enumerate().filter(|_| model.registered) {
                prop_assert_eq!(RunState::from_word(rig.run_state(v)), vcpu.run, "vCPU {} after {:?}", v, event);
            }
        }
        let counts = rig.engine.statistics();
        prop_assert_eq!([counts.kicked, counts.interrupted, counts.woken, counts.forced, counts.spurious], model.ends);
    }
}
