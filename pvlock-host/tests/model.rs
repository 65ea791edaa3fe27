//! The engine against a reference that is simple enough to be seen to be right: latches are sets, queues are vectors.
#![cfg(not(pvlock_loom))]

mod common;
use common::*;
use proptest::prelude::*;
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::Wait;
use pvlock_host::{Config, Park, Queue, Resume, Unpark, Verdict};
use std::collections::BTreeSet;

const VCPUS: usize = 5;
const DEADLINE: u64 = 100;

#[derive(Clone, Debug)]
enum Event {
    Halt(usize, usize, bool, Option<Wait>),
    Unparked(usize, Unpark),
    Kick(usize, usize),
    Interrupt(usize),
    ScheduledIn(usize),
    Online(usize),
    Offline(usize),
    Reset(usize),
    ResetVm,
    Register,
    Unregister,
    Pause,
    Resume,
}

fn event() -> impl Strategy<Value = Event> {
    let id = || 0..VCPUS;
    // A little out of range, and around the point where tickets wrap.
    let hint = || proptest::option::weighted(0.9, (0..=VCPUS).prop_map(vcpu));
    let wait = (1u64..3, 0u32..6, hint(), hint()).prop_map(|(lock, ticket, predecessor, holder)| Wait {
        predecessor,
        holder,
        ..waits(lock, ticket.wrapping_sub(3))
    });
    let how = prop_oneof![Just(Unpark::Woken), Just(Unpark::Signal), Just(Unpark::Deadline)];
    prop_oneof![
        12 => (id(), 0usize..4, any::<bool>(), proptest::option::weighted(0.9, wait)).prop_map(|(v, s, i, w)| Event::Halt(v, s, i, w)),
        8 => (id(), how).prop_map(|(v, how)| Event::Unparked(v, how)),
        8 => (id(), id()).prop_map(|(v, to)| Event::Kick(v, to)),
        3 => id().prop_map(Event::Interrupt),
        3 => id().prop_map(Event::ScheduledIn),
        3 => id().prop_map(Event::Online),
        1 => id().prop_map(Event::Offline),
        1 => id().prop_map(Event::Reset),
        1 => Just(Event::Pause),
        1 => Just(Event::Resume),
        1 => prop_oneof![Just(Event::ResetVm), Just(Event::Register), Just(Event::Unregister)],
    ]
}

#[derive(Clone, Default)]
struct Vcpu {
    online: bool,
    latches: BTreeSet<usize>,
    interrupt: bool,
    /// Slot, takes interrupts, was woken.
    parked: Option<(usize, bool, bool)>,
    lock: u64,
    ticket: u32,
}

impl Vcpu {
    fn ended(&self) -> bool {
        self.parked.is_some_and(|(slot, interrupts, woken)| self.latches.contains(&slot) || interrupts && self.interrupt || woken)
    }
}

struct Model {
    queue: Queue,
    wake_ahead: usize,
    registered: bool,
    paused: bool,
    vcpus: Vec<Vcpu>,
    queues: Vec<Vec<usize>>,
    woken: Vec<usize>,
    /// kicked, interrupted, woken, forced, spurious
    ends: [u64; 5],
}

impl Model {
    fn post(&mut self, v: usize, post: impl FnOnce(&mut Vcpu)) {
        let before = self.vcpus[v].ended();
        post(&mut self.vcpus[v]);
        if !before && self.vcpus[v].ended() {
            self.woken.push(v);
        }
    }

    fn wake(&mut self, v: usize) {
        self.post(v, |vcpu| {
            if let Some(parked) = &mut vcpu.parked {
                parked.2 = true;
            }
        });
    }

    fn dequeue(&mut self, v: usize) {
        self.queues.iter_mut().for_each(|queue| queue.retain(|&sleeper| sleeper != v));
    }

    /// Puts `v` before the first that waits for the same lock with a later ticket.
    fn enqueue(&mut self, v: usize, owner: usize) {
        let later = |&other: &usize| {
            let (own, other) = (&self.vcpus[v], &self.vcpus[other]);
            other.lock == own.lock && other.ticket.wrapping_sub(own.ticket) as i32 > 0
        };
        let place = self.queues[owner].iter().position(later).unwrap_or(self.queues[owner].len());
        self.queues[owner].insert(place, v);
    }

    fn in_circle(&self, v: usize) -> bool {
        let owner = |v| self.queues.iter().position(|queue| queue.contains(&v));
        std::iter::successors(owner(v), |&at| owner(at)).take(VCPUS + 1).any(|at| at == v)
    }

    fn drain(&mut self, owner: usize, most: usize) {
        let most = most.min(self.queues[owner].len());
        for v in self.queues[owner].drain(..most).collect::<Vec<_>>() {
            self.wake(v);
        }
    }

    fn forget(&mut self, v: usize, online: bool) {
        self.vcpus[v] = Vcpu { online, latches: BTreeSet::new(), interrupt: false, ..self.vcpus[v].clone() };
    }

    fn set_online(&mut self, v: usize, online: bool) {
        self.forget(v, online);
        self.release(v);
    }

    fn release(&mut self, v: usize) {
        self.wake(v);
        self.dequeue(v);
        self.drain(v, VCPUS);
    }

    fn unregister(&mut self) -> Status {
        if !std::mem::take(&mut self.registered) {
            return Status::NotRegistered;
        }
        (0..VCPUS).for_each(|v| self.forget(v, false));
        (0..VCPUS).for_each(|v| self.release(v));
        Status::Ok
    }

    fn halt(&mut self, v: usize, slot: usize, interrupts: bool, wait: Option<Wait>) -> Verdict {
        if !self.registered || !self.vcpus[v].online || self.vcpus[v].parked.is_some() {
            return Verdict::Resume(Resume::NotParking);
        }
        let own = &mut self.vcpus[v];
        (own.lock, own.ticket) = wait.map_or((0, 0), |wait| (wait.lock.get(), wait.ticket));
        if own.latches.remove(&slot) {
            return Verdict::Resume(Resume::Latched);
        }
        if interrupts && std::mem::take(&mut own.interrupt) {
            return Verdict::Resume(Resume::Interrupt);
        }
        if self.paused {
            return Verdict::Resume(Resume::NotParking);
        }
        own.parked = Some((slot, interrupts, false));
        let hint = wait.and_then(|wait| match self.queue {
            Queue::None => None,
            Queue::Holder => wait.holder,
            Queue::Previous => wait.predecessor,
        });
        let mut on = hint.map(|owner| owner.index()).filter(|&owner| owner != v && owner < VCPUS && self.vcpus[owner].online);
        if let Some(owner) = on {
            self.enqueue(v, owner);
            if self.in_circle(v) {
                self.dequeue(v);
                on = None;
            }
        }
        Verdict::Park(Park { until: DEADLINE, on: on.map(vcpu) })
    }

    fn kick(&mut self, v: usize, to: usize) {
        self.post(to, |vcpu| vcpu.latches = (0..4).collect());
        if self.queue == Queue::Holder && v != to && self.vcpus[to].online {
            self.queues[v].retain(|&sleeper| sleeper != to);
            let lock = self.vcpus[to].lock;
            let (moved, stay) = std::mem::take(&mut self.queues[v]).into_iter().partition(|&s: &usize| self.vcpus[s].lock == lock);
            self.queues[v] = stay;
            Vec::into_iter(moved).for_each(|sleeper| self.enqueue(sleeper, to));
            if self.in_circle(to) {
                self.dequeue(to);
            }
        }
    }

    fn unparked(&mut self, v: usize, how: Unpark) {
        let own = &mut self.vcpus[v];
        let Some((slot, interrupts, woken)) = own.parked.take() else { return };
        let kicked = own.latches.remove(&slot);
        let interrupted = interrupts && std::mem::take(&mut own.interrupt);
        let reasons = [kicked, interrupted, woken, how == Unpark::Deadline, true];
        self.ends[reasons.iter().position(|&holds| holds).unwrap()] += 1;
        self.dequeue(v);
        self.drain(v, self.wake_ahead);
    }
}

fn step(rig: &Rig, model: &mut Model, event: &Event) {
    match *event {
        Event::Halt(v, level, interrupts, wait) => {
            if model.vcpus[v].parked.is_none() {
                rig.publish(v, level, wait);
            }
            assert_eq!(rig.halt(v, level, interrupts), model.halt(v, level, interrupts, wait));
        }
        // A driver reports it only of who was parked.
        Event::Unparked(v, how) if model.vcpus[v].parked.is_some() => {
            rig.unparked(v, how);
            model.unparked(v, how);
        }
        Event::Unparked(..) => {}
        Event::Kick(v, to) => {
            rig.kick(v, to);
            model.kick(v, to);
        }
        Event::Interrupt(v) => {
            rig.engine.interrupt(vcpu(v), &rig.waker());
            model.post(v, |vcpu| vcpu.interrupt = true);
        }
        Event::ScheduledIn(v) => {
            rig.engine.scheduled_in(vcpu(v), &rig.waker());
            model.drain(v, model.wake_ahead);
        }
        Event::Online(v) if !model.registered => assert_eq!(rig.call(0, Doorbell::Online(vcpu(v))), Status::NotRegistered),
        Event::Online(v) => {
            assert_eq!(rig.call(0, Doorbell::Online(vcpu(v))), Status::Ok);
            model.set_online(v, true);
        }
        Event::Offline(v) => {
            assert_eq!(rig.call(0, Doorbell::Offline(vcpu(v))), Status::Ok);
            model.set_online(v, false);
        }
        Event::Reset(v) => {
            rig.engine.reset(vcpu(v), &rig.waker());
            model.set_online(v, false);
        }
        Event::ResetVm => {
            rig.engine.reset_vm(&rig.waker());
            model.unregister();
            (0..VCPUS).for_each(|v| model.set_online(v, false));
        }
        Event::Register => {
            let expected = if model.registered { Status::AlreadyRegistered } else { Status::Ok };
            assert_eq!(rig.register(), expected);
            model.registered = true;
            (0..VCPUS).for_each(|v| {
                assert_eq!(rig.call(0, Doorbell::Online(vcpu(v))), Status::Ok);
                model.set_online(v, true);
            });
        }
        Event::Unregister => assert_eq!(rig.call(0, Doorbell::Unregister), model.unregister()),
        Event::Pause => {
            rig.engine.pause(&rig.waker());
            model.paused = true;
            (0..VCPUS).for_each(|v| model.wake(v));
        }
        Event::Resume => {
            rig.engine.resume();
            model.paused = false;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn row_11_the_engine_does_what_the_reference_does_and_nobody_is_on_two_queues(
        queue in prop_oneof![Just(Queue::None), Just(Queue::Holder), Just(Queue::Previous)],
        wake_ahead in 0u32..3,
        events in proptest::collection::vec(event(), 1..150),
    ) {
        let rig = Rig::new(Config { queue, wake_ahead, deadline_ns: DEADLINE, ..Config::default() }, VCPUS);
        let mut model = Model {
            queue,
            wake_ahead: wake_ahead as usize,
            registered: true,
            paused: false,
            vcpus: vec![Vcpu { online: true, ..Vcpu::default() }; VCPUS],
            queues: vec![vec![]; VCPUS],
            woken: vec![],
            ends: [0; 5],
        };
        for event in &events {
            step(&rig, &mut model, event);
            prop_assert_eq!(rig.woken(), std::mem::take(&mut model.woken), "woken by {:?}", event);
            prop_assert_eq!(rig.queues(), model.queues.clone(), "queues after {:?}", event);
            prop_assert!((0..VCPUS).all(|v| !model.in_circle(v)));
            let asleep: Vec<_> = rig.engine.dump(0).map(|sleeper| (sleeper.vcpu.index(), sleeper.woken)).collect();
            let expected = model.vcpus.iter().enumerate().filter(|(_, vcpu)| vcpu.parked.is_some());
            prop_assert_eq!(asleep, expected.map(|(v, vcpu)| (v, vcpu.ended())).collect::<Vec<_>>(), "after {:?}", event);
        }
        let counts = rig.engine.statistics();
        prop_assert_eq!([counts.kicked, counts.interrupted, counts.woken, counts.forced, counts.spurious], model.ends);
    }
}
