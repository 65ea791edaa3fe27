//! The engine against a model that was written from the documentation alone, without a look at the engine's source: plain vectors, no
//! atomics, and after every event the same verdict, wakes in the same order, queues, sleepers and counters. Where the documentation
//! says nothing, the model follows the engine. Pause loops (their policies have a test of their own), limits and counted kicks are left out.
#![cfg(not(pvlock_loom))]

mod common;

use common::*;
use proptest::prelude::*;
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::{HostFlags, LockId, PAGE_SIZE, VcpuId, WAIT_SLOTS, Wait};
use pvlock_host::{Config, Park, Queue, Resume, Unpark, Verdict};
use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Clone, Debug)]
enum Event {
    Publish(usize, usize, Option<Wait>),
    /// Publishes first if there is something to publish.
    Halt(usize, usize, bool, Option<Wait>),
    Kick(usize, usize),
    Kicked(usize),
    Unparked(usize, Unpark),
    ScheduledIn(usize),
    Interrupt(usize),
    /// Online or offline.
    Online(usize, usize, bool),
    Register(usize),
    Unregister(usize),
    Reset(usize),
    Vm(VmEvent),
}

#[derive(Clone, Copy, Debug)]
enum VmEvent {
    Reset,
    Pause,
    Resume,
    ShutDown,
    SetFlags,
}

#[derive(Default)]
struct Vcpu {
    online: bool,
    latches: [bool; WAIT_SLOTS],
    interrupt: bool,
    /// The slot that it sleeps in, and whether it takes interrupts.
    asleep: Option<(usize, bool)>,
    woken: bool,
    slots: [Option<Wait>; WAIT_SLOTS],
    /// What it waited for when it halted last, and when it was woken early last. A reset does not forget either.
    halted: Option<Wait>,
    early: Option<(LockId, u32)>,
    queue: Vec<usize>,
    counts: BTreeMap<&'static str, u64>,
}

impl Vcpu {
    /// Why its sleep is over, though it may not have noticed.
    fn ended(&self) -> Option<&'static str> {
        let (slot, interrupts) = self.asleep?;
        let causes = [(self.latches[slot], "kicked"), (interrupts && self.interrupt, "interrupted"), (self.woken, "woken")];
        causes.into_iter().find(|cause| cause.0).map(|cause| cause.1)
    }
}

#[derive(Default)]
struct Model {
    wake_ahead: usize,
    registered: bool,
    paused: bool,
    shut_down: bool,
    vcpus: Vec<Vcpu>,
    wakes: Vec<usize>,
}

fn turn(wait: Wait) -> (LockId, u32) {
    (wait.lock, wait.ticket)
}

impl Model {
    fn count(&mut self, v: usize, what: &'static str) {
        *self.vcpus[v].counts.entry(what).or_default() += 1;
    }

    fn owner(&self, v: usize) -> Option<usize> {
        (0..self.vcpus.len()).find(|&owner| self.vcpus[owner].queue.contains(&v))
    }

    /// Whether `v` sleeps, by a chain of queues, on `other`.
    fn behind(&self, v: usize, other: usize) -> bool {
        std::iter::successors(Some(v), |&link| self.owner(link)).any(|link| link == other)
    }

    fn leave(&mut self, v: usize) {
        self.vcpus.iter_mut().for_each(|vcpu| vcpu.queue.retain(|&other| other != v));
    }

    /// Lets `v` take notice of `cause`; if that ends its sleep, and nothing did before, it is woken.
    fn end(&mut self, v: usize, cause: fn(&mut Vcpu)) -> bool {
        let before = self.vcpus[v].ended();
        cause(&mut self.vcpus[v]);
        let wakes = before.is_none() && self.vcpus[v].ended().is_some();
        self.wakes.extend(wakes.then_some(v));
        wakes
    }

    fn wake(&mut self, v: usize) -> bool {
        self.end(v, |vcpu| vcpu.woken = true)
    }

    fn enqueue(&mut self, v: usize, owner: usize) {
        let wait = |v: usize| self.vcpus[v].halted.unwrap();
        let (own, queue) = (wait(v), &self.vcpus[owner].queue);
        let later = |&other: &usize| wait(other).lock == own.lock && (wait(other).ticket.wrapping_sub(own.ticket) as i32) > 0;
        let at = queue.iter().position(later).unwrap_or(queue.len());
        self.vcpus[owner].queue.insert(at, v);
    }

    fn halt(&mut self, v: usize, slot: usize, interrupts: bool, queue: Queue) -> Result<Option<usize>, Resume> {
        self.count(v, "halts");
        let vcpu = &mut self.vcpus[v];
        if !vcpu.online {
            return Err(Resume::NotParking);
        }
        vcpu.halted = vcpu.slots[slot];
        if std::mem::take(&mut vcpu.latches[slot]) {
            self.count(v, "latched");
            return Err(Resume::Latched);
        }
        if interrupts && std::mem::take(&mut vcpu.interrupt) {
            return Err(Resume::Interrupt);
        }
        if self.paused || self.shut_down {
            return Err(Resume::NotParking);
        }
        (vcpu.asleep, vcpu.woken) = (Some((slot, interrupts)), false);
        let (wait, early) = (vcpu.halted, vcpu.early);
        self.count(v, "parks");
        let Some(wait) = wait.filter(|&wait| early != Some(turn(wait))) else { return Ok(None) };
        let hint = [None, wait.holder, wait.predecessor][queue as usize].map(VcpuId::index);
        let usable = |&owner: &usize| owner != v && self.vcpus.get(owner).is_some_and(|vcpu| vcpu.online);
        let Some(owner) = hint.filter(usable) else { return Ok(None) };
        if self.behind(owner, v) {
            self.count(v, "cycles");
            return Ok(None);
        }
        self.enqueue(v, owner);
        self.count(v, "queued");
        Ok(Some(owner))
    }

    /// A holder hands its queue over to whoever it kicks, by the lock that the target named when it halted last, asleep or not.
    fn kick(&mut self, from: Option<usize>, target: usize, queue: Queue) {
        self.count(target, "kicks");
        self.end(target, |vcpu| vcpu.latches = [true; WAIT_SLOTS]);
        let Some(holder) = from.or(self.owner(target)).filter(|&holder| holder != target) else { return };
        let lock = |v: usize| self.vcpus[v].halted.map(|wait| wait.lock);
        if queue == Queue::Holder && lock(target).is_some() && self.vcpus[target].online {
            let moved: Vec<_> = self.vcpus[holder].queue.iter().copied().filter(|&v| lock(v) == lock(target)).collect();
            for v in moved {
                self.leave(v);
                if v != target {
                    // No circles; and who is taken off a queue is woken.
                    if self.behind(target, v) {
                        self.leave(target);
                        self.wake(target);
                    }
                    self.enqueue(v, target);
                }
            }
        }
    }

    fn unparked(&mut self, v: usize, how: Unpark) {
        let why = self.vcpus[v].ended().unwrap_or(if how == Unpark::Deadline { "forced" } else { "spurious" });
        self.count(v, why);
        self.leave(v);
        let (slot, interrupts) = self.vcpus[v].asleep.take().unwrap();
        self.vcpus[v].latches[slot] = false;
        self.vcpus[v].interrupt &= !interrupts;
        self.runs(v);
    }

    /// Serves the queue of `v`. Who was woken otherwise counts as one of those ahead.
    fn runs(&mut self, v: usize) {
        let queue = &mut self.vcpus[v].queue;
        let ahead: Vec<_> = queue.drain(..self.wake_ahead.min(queue.len())).collect();
        for sleeper in ahead {
            if self.wake(sleeper) {
                self.vcpus[sleeper].early = self.vcpus[sleeper].halted.map(turn);
                self.count(sleeper, "served");
            }
        }
    }

    /// Online is a reset as well. Who is awake already is woken again if its reason is forgotten.
    fn reset(&mut self, vcpus: Range<usize>, online: bool) {
        for vcpu in &mut self.vcpus[vcpus.clone()] {
            (vcpu.online, vcpu.latches, vcpu.interrupt) = (online, Default::default(), false);
        }
        for v in vcpus {
            self.leave(v);
            self.wake(v);
            for sleeper in std::mem::take(&mut self.vcpus[v].queue) {
                self.wake(sleeper);
            }
        }
    }
}

macro_rules! counters {
    ($statistics:expr; $($name:ident)*) => { [$((stringify!($name), $statistics.$name)),*] };
}

fn events(n: usize) -> impl Strategy<Value = Event> {
    let v = move || 0..n;
    // Hints and targets: often the same few, sometimes out of range.
    let some = move || prop_oneof![0..2usize, 0..n + 1];
    let hint = move || proptest::option::weighted(0.9, some().prop_map(vcpu));
    // They wrap. Tickets half their range apart have no order.
    let wait = move || {
        (1..3u64, 0..6u32, hint(), hint()).prop_map(|(lock, ticket, predecessor, holder)| Wait {
            predecessor,
            holder,
            ..waits(lock, ticket.wrapping_sub(3))
        })
    };
    let how = prop_oneof![Just(Unpark::Woken), Just(Unpark::Signal), Just(Unpark::Deadline)];
    let slot = || 0..WAIT_SLOTS;
    let vm = [VmEvent::Reset, VmEvent::Pause, VmEvent::Resume, VmEvent::Resume, VmEvent::Resume, VmEvent::SetFlags];
    prop_oneof![
        30 => (v(), slot(), proptest::option::of(wait())).prop_map(|(v, slot, wait)| Event::Publish(v, slot, wait)),
        200 => (v(), slot(), any::<bool>(), proptest::option::weighted(0.8, wait()))
            .prop_map(|(v, slot, interrupts, wait)| Event::Halt(v, slot, interrupts, wait)),
        60 => (some(), some()).prop_map(|(v, target)| Event::Kick(v, target)),
        10 => v().prop_map(Event::Kicked),
        60 => (v(), how).prop_map(|(v, how)| Event::Unparked(v, how)),
        10 => v().prop_map(Event::ScheduledIn),
        20 => v().prop_map(Event::Interrupt),
        30 => (v(), some(), proptest::bool::weighted(0.9)).prop_map(|(v, target, online)| Event::Online(v, target, online)),
        10 => v().prop_map(Event::Register),
        2 => v().prop_map(Event::Unregister),
        4 => v().prop_map(Event::Reset),
        15 => proptest::sample::select(vm.to_vec()).prop_map(Event::Vm),
        1 => proptest::bool::weighted(0.2).prop_map(|end| Event::Vm(if end { VmEvent::ShutDown } else { VmEvent::Pause })),
    ]
}

fn run(queue: Queue, wake_ahead: usize, n: usize, events: &[Event]) -> Result<(), TestCaseError> {
    let rig = Rig::bare(Config { queue, wake_ahead: wake_ahead as u32, ..Config::default() }, n);
    let mut model = Model { wake_ahead, vcpus: (0..n).map(|_| Vcpu::default()).collect(), ..Model::default() };
    let start: Vec<_> = [Event::Register(0)].into_iter().chain((0..n).map(|v| Event::Online(0, v, true))).collect();
    for event in start.iter().chain(events) {
        let runs = |v: usize| v < n && model.vcpus[v].asleep.is_none();
        // What the guest is answered, if it rings a doorbell that has an answer.
        let mut answers = None;
        match *event {
            Event::Publish(v, slot, wait) => {
                rig.publish(v, slot, wait);
                model.vcpus[v].slots[slot] = wait;
            }
            Event::Halt(v, slot, interrupts, wait) if runs(v) => {
                if wait.is_some() {
                    rig.publish(v, slot, wait);
                    model.vcpus[v].slots[slot] = wait;
                }
                let verdict = match model.halt(v, slot, interrupts, queue) {
                    Ok(on) => Verdict::Park(Park { until: rig.engine.config().deadline_ns, on: on.map(vcpu) }),
                    Err(why) => Verdict::Resume(why),
                };
                prop_assert_eq!(rig.halt(v, slot, interrupts), verdict, "{:?}", event);
            }
            Event::Kick(v, target) if runs(v) => {
                let (counter, why) = if target < n { ("kicks_sent", Resume::Done) } else { ("refused", Resume::Refused) };
                prop_assert_eq!(rig.ring(v, Doorbell::Kick(vcpu(target)).encode()), Verdict::Resume(why));
                model.count(v, counter);
                if target < n {
                    model.kick(Some(v), target, queue);
                }
            }
            Event::Kicked(target) => {
                rig.engine.kicked(vcpu(target), &rig.waker());
                model.kick(None, target, queue);
            }
            Event::Unparked(v, how) if !runs(v) => {
                rig.unparked(v, how);
                model.unparked(v, how);
            }
            Event::ScheduledIn(v) if runs(v) => {
                rig.engine.scheduled_in(vcpu(v), &rig.waker());
                model.runs(v);
            }
            Event::Interrupt(v) => {
                rig.engine.interrupt(vcpu(v), &rig.waker());
                model.end(v, |vcpu| vcpu.interrupt = true);
            }
            Event::Online(v, target, online) if runs(v) => {
                let doorbell = if online { Doorbell::Online } else { Doorbell::Offline };
                let status = match () {
                    () if target >= n => Status::NoSuchVcpu,
                    () if online && !model.registered => Status::NotRegistered,
                    () => Status::Ok,
                };
                answers = Some((v, rig.call(v, doorbell(vcpu(target))), status));
                if status == Status::Ok {
                    model.reset(target..target + 1, online);
                }
            }
            Event::Register(v) if runs(v) => {
                let status = if model.registered { Status::AlreadyRegistered } else { Status::Ok };
                answers = Some((v, rig.call(v, Doorbell::Register { low: (RAM / PAGE_SIZE as u64) as u32 }), status));
                model.registered = true;
            }
            Event::Unregister(v) if runs(v) => {
                let status = if model.registered { Status::Ok } else { Status::NotRegistered };
                answers = Some((v, rig.call(v, Doorbell::Unregister), status));
                if std::mem::take(&mut model.registered) {
                    model.reset(0..n, false);
                }
            }
            Event::Reset(v) => {
                rig.engine.reset(vcpu(v), &rig.waker());
                model.reset(v..v + 1, false);
            }
            Event::Vm(VmEvent::Reset) => {
                rig.engine.reset_vm(&rig.waker());
                model.registered = false;
                model.reset(0..n, false);
            }
            Event::Vm(VmEvent::Resume) => {
                rig.engine.resume();
                model.paused = false;
            }
            Event::Vm(event) => {
                match event {
                    VmEvent::Pause => rig.engine.pause(&rig.waker()),
                    VmEvent::ShutDown => rig.engine.shut_down(&rig.waker()),
                    _ => rig.engine.set_flags(HostFlags::default(), &rig.waker()),
                }
                model.paused |= matches!(event, VmEvent::Pause);
                model.shut_down |= matches!(event, VmEvent::ShutDown);
                (0..n).for_each(|v| _ = model.wake(v));
            }
            _ => {}
        }
        if let Some((v, status, expected)) = answers {
            prop_assert_eq!(status, expected, "{:?}", event);
            if status != Status::Ok {
                model.count(v, "refused");
            }
        }
        prop_assert_eq!(rig.woken(), std::mem::take(&mut model.wakes), "woken after {:?}", event);
        let queues: Vec<_> = model.vcpus.iter().map(|vcpu| vcpu.queue.clone()).collect();
        prop_assert_eq!(rig.queues(), queues, "queues after {:?}", event);
        let dump = rig.engine.dump(0).map(|s| (s.vcpu, s.slot, s.lock, s.ticket, s.queue, s.woken)).collect::<Vec<_>>();
        let asleep = model.vcpus.iter().enumerate().filter_map(|(v, state)| {
            let (lock, ticket) = state.halted.map_or((0, 0), |wait| (wait.lock.get(), wait.ticket));
            Some((vcpu(v), slot(state.asleep?.0), lock, ticket, model.owner(v).map(vcpu), state.ended().is_some()))
        });
        prop_assert_eq!(dump, asleep.collect::<Vec<_>>(), "dump after {:?}", event);
        for (v, state) in model.vcpus.iter().enumerate() {
            let statistics = rig.engine.vcpu_statistics(vcpu(v));
            let counters = counters!(statistics; halts latched parks queued cycles served refused kicks_sent kicks
                kicked woken interrupted spurious forced);
            for (name, count) in counters {
                prop_assert_eq!(count, state.counts.get(name).copied().unwrap_or(0), "{} of {} after {:?}", name, v, event);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_engine_does_what_its_documentation_says(
        queue in prop_oneof![Just(Queue::None), Just(Queue::Holder), Just(Queue::Previous)],
        wake_ahead in 0..3usize,
        (n, events) in (3..=6usize).prop_flat_map(|n| (Just(n), proptest::collection::vec(events(n), 0..300))),
    ) {
        run(queue, wake_ahead, n, &events)?;
    }
}
