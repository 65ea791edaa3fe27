//! Threads as vCPUs of which exactly one runs: who has the baton. Every call of the platform is a point at which the schedule
//! may hand it on, so a schedule determines everything that happens, and a run can be repeated.

use crate::common::{Kick, id};
use pvlock_guest::hypercalls::{Access, Direct, Doorbell, Status};
use pvlock_guest::protocol::{Features, RunState, SlotIndex, VcpuId, WaitState};
use pvlock_guest::{Guest, GuestRef, KickKind, Platform, Word};
use std::cell::Cell;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard};

/// vCPUs of a machine.
pub const VCPUS: usize = 5;

/// More steps than any schedule needs, by far: somebody goes round in circles.
const STEPS: u64 = 200_000;

/// Why a vCPU is at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is about to try.
    Trying,
    /// `try_lock` failed.
    Refused,
    /// The lock's callback.
    Drawn(u32),
    /// `lock` or `try_lock` returned with the lock.
    Acquired(Option<u32>),
    /// `unlock` follows.
    Releasing { fair: bool },
    /// `unlock` has returned.
    Released,
    /// `Platform::wait_while`; whether the value waited with is the present one.
    Poll(bool),
    /// `Platform::halt` begins.
    Halt,
    /// `Platform::kick`.
    Kick(usize),
    /// Something without meaning for the rules.
    Work,
}

/// What a lock's memory looks like from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// The first eight bytes.
    pub word: u64,
    /// The four bytes that follow.
    pub next: u32,
}

/// What must hold for a kind of lock.
pub trait Rules: Send {
    /// `vcpu` has changed the lock from `old` to `new` at the time `now`.
    fn changed(&mut self, vcpu: usize, old: Words, new: Words, now: u64) -> Result<(), String>;

    /// `vcpu` is at a point; `halting`: whether it has published that it halts.
    fn at(&mut self, vcpu: usize, event: Event, words: Words, halting: bool) -> Result<(), String>;
}

/// What a schedule does besides choosing.
#[derive(Clone, Debug)]
pub struct Plan {
    /// A decision for each point; round robin follows.
    pub schedule: Vec<u8>,
    /// Ticks from one point to the next.
    pub tick: u64,
    /// Whether halts may end for no reason.
    pub spurious: bool,
    /// Whether the host says who runs.
    pub run_states: bool,
}

/// Who was at which point, and what it saw of the lock.
pub type Log = Vec<(usize, Event, Words)>;

#[derive(Default)]
struct Vcpu {
    finished: bool,
    /// In a halt.
    asleep: bool,
    latch: bool,
    /// The halt ends for no reason.
    roused: bool,
    /// Off its CPU until then.
    preempted: u64,
}

struct Baton {
    now: u64,
    steps: u64,
    running: usize,
    vcpus: Vec<Vcpu>,
    plan: Plan,
    rules: Box<dyn Rules>,
    words: Words,
    failure: Option<String>,
    log: Log,
}

/// A machine with one lock.
pub struct World {
    pub guest: Guest<VCPUS>,
    lock: &'static [AtomicU64; 2],
    baton: Mutex<Baton>,
    turn: [Condvar; VCPUS],
}

/// A thread ends because its run has failed.
struct Stop;

thread_local! {
    static ME: Cell<Option<(&'static World, usize)>> = const { Cell::new(None) };
}

fn me() -> (&'static World, usize) {
    ME.get().expect("the thread is a vCPU")
}

impl World {
    /// A machine in which nothing has happened yet. `lock`: the memory of the lock that the rules are about.
    pub fn new(vcpus: usize, plan: Plan, lock: &'static [AtomicU64; 2], rules: Box<dyn Rules>) -> &'static Self {
        let vcpus = (0..vcpus).map(|_| Vcpu::default()).collect();
        let (words, failure, log) = (Words::default(), None, Vec::new());
        let baton = Baton { now: 1, steps: 0, running: 0, vcpus, plan, rules, words, failure, log };
        Box::leak(Box::new(Self { guest: Guest::new(), lock, baton: Mutex::new(baton), turn: Default::default() }))
    }

    /// Registers with a host that gives `budget`, and brings everybody online.
    pub fn register(&self, budget: u64) {
        let guest = self.guest.as_ref();
        let host = Direct(|access| {
            if let Access::Ring(word) = access
                && let Some(Doorbell::Register { .. }) = Doorbell::decode(word)
            {
                guest.region().header.accepted.store(Features::HALT.bits(), Relaxed);
            }
            Status::Ok.encode()
        });
        let vcpus = self.baton().vcpus.len();
        guest.register(&host, 1, (0..vcpus).map(id)).unwrap();
        (0..vcpus).for_each(|vcpu| guest.online(&host, id(vcpu)).unwrap());
        guest.region().header.spin_budget.store(budget, Relaxed);
    }

    /// Runs `program` on each vCPU. What happened, or what went wrong.
    pub fn run(&'static self, program: impl Fn(usize) + Sync) -> Result<Log, String> {
        let vcpus = self.baton().vcpus.len();
        std::thread::scope(|scope| {
            for vcpu in 0..vcpus {
                let program = &program;
                std::thread::Builder::new()
                    .stack_size(1 << 18)
                    .spawn_scoped(scope, move || {
                        let run = || {
                            ME.set(Some((self, vcpu)));
                            drop(self.until_turn(self.baton(), vcpu));
                            program(vcpu);
                            self.finish(vcpu);
                        };
                        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
                            && !panic.is::<Stop>()
                        {
                            let failure = format!("vCPU {vcpu} panicked: {:?}", panic.downcast_ref::<&str>());
                            self.fail(&mut self.baton(), failure);
                        }
                    })
                    .unwrap();
            }
        });
        let mut baton = self.baton();
        match baton.failure.take() {
            None => Ok(std::mem::take(&mut baton.log)),
            Some(failure) => {
                let from = baton.log.len().saturating_sub(60);
                let log: Vec<_> = baton.log[from..]
                    .iter()
                    .map(|(vcpu, event, words)| format!("  {vcpu} {event:?} {:#x} {}", words.word, words.next))
                    .collect();
                Err(format!("{failure}\n{}", log.join("\n")))
            }
        }
    }

    fn baton(&self) -> MutexGuard<'_, Baton> {
        self.baton.lock().unwrap()
    }

    fn fail(&self, baton: &mut Baton, failure: String) {
        baton.failure.get_or_insert(failure);
        self.turn.iter().for_each(Condvar::notify_all);
    }

    fn stop_if_failed<'a>(baton: MutexGuard<'a, Baton>) -> MutexGuard<'a, Baton> {
        if baton.failure.is_some() {
            drop(baton);
            resume_unwind(Box::new(Stop));
        }
        baton
    }

    fn until_turn<'a>(&'a self, baton: MutexGuard<'a, Baton>, vcpu: usize) -> MutexGuard<'a, Baton> {
        let away = |baton: &mut Baton| baton.running != vcpu && baton.failure.is_none();
        Self::stop_if_failed(self.turn[vcpu].wait_while(baton, away).unwrap())
    }

    fn halting(&self, vcpu: usize) -> bool {
        let record = self.guest.as_ref().region().record(id(vcpu)).unwrap();
        record.slots.iter().filter_map(|slot| slot.read()).any(|wait| wait.state == WaitState::Halting)
    }

    /// Tells the rules what the running vCPU has done since it was last at a point.
    fn look(&self, baton: &mut Baton, vcpu: usize, event: Event) {
        let words = Words { word: self.lock[0].load(Relaxed), next: self.lock[1].load(Relaxed) as u32 };
        baton.log.push((vcpu, event, words));
        let (old, now) = (std::mem::replace(&mut baton.words, words), baton.now);
        let verdict = if old == words { Ok(()) } else { baton.rules.changed(vcpu, old, words, now) };
        let verdict = verdict.and_then(|()| baton.rules.at(vcpu, event, words, self.halting(vcpu)));
        if let Err(failure) = verdict {
            self.fail(baton, format!("vCPU {vcpu}, {event:?}: {failure}"));
        }
    }

    /// Hands the baton on as the schedule says; returns when the caller has it again. That is the time then.
    pub fn point(&self, vcpu: usize, event: Event) -> u64 {
        let mut baton = Self::stop_if_failed(self.baton());
        self.look(&mut baton, vcpu, event);
        self.hand_on(&mut baton, vcpu);
        self.until_turn(baton, vcpu).now
    }

    fn finish(&self, vcpu: usize) {
        let mut baton = self.baton();
        self.look(&mut baton, vcpu, Event::Work);
        baton.vcpus[vcpu].finished = true;
        self.hand_on(&mut baton, vcpu);
    }

    fn hand_on(&self, baton: &mut Baton, vcpu: usize) {
        let decision = baton.plan.schedule.get(baton.steps as usize).copied();
        baton.steps += 1;
        baton.now += baton.plan.tick;
        let mut stay = false;
        let mut from = vcpu + 1;
        if let Some(decision) = decision {
            let argument = usize::from(decision >> 3);
            match decision & 7 {
                0..=3 => stay = true,
                4 | 5 => from += argument,
                6 if baton.plan.spurious => {
                    baton.vcpus.iter_mut().skip(argument % 5).take(1).for_each(|vcpu| vcpu.roused = vcpu.asleep)
                }
                _ => {
                    // For 2 to 256 points.
                    baton.vcpus[vcpu].preempted = baton.now + (baton.plan.tick << (1 + argument % 8));
                    from += argument;
                }
            }
        }
        let n = baton.vcpus.len();
        let next = loop {
            let now = baton.now;
            let can_run = |vcpu: &Vcpu| !vcpu.finished && (!vcpu.asleep || vcpu.latch || vcpu.roused);
            let runs = |&index: &usize| can_run(&baton.vcpus[index]) && baton.vcpus[index].preempted <= now;
            if let Some(next) = Some(vcpu).filter(|vcpu| stay && runs(vcpu)).or_else(|| (from..from + n).map(|i| i % n).find(runs))
            {
                break next;
            }
            // Nobody has a CPU: time passes until somebody gets one.
            match baton.vcpus.iter().filter(|vcpu| can_run(vcpu)).map(|vcpu| vcpu.preempted).min() {
                Some(then) => baton.now = then,
                None if baton.vcpus.iter().all(|vcpu| vcpu.finished) => return,
                None => {
                    let asleep: Vec<_> = (0..n).filter(|&vcpu| baton.vcpus[vcpu].asleep).collect();
                    return self.fail(baton, format!("vCPUs {asleep:?} sleep for good"));
                }
            }
        };
        if baton.steps > STEPS {
            return self.fail(baton, "it never ends".into());
        }
        if baton.plan.run_states {
            for vcpu in 0..n {
                let off = baton.vcpus[vcpu].asleep || baton.vcpus[vcpu].preempted > baton.now;
                let state = if off && vcpu != next { RunState::NotRunning } else { RunState::Running };
                let word = &self.guest.as_ref().region().record(id(vcpu)).unwrap().run_state;
                word.store(state.next_word(word.load(Relaxed)), Relaxed);
            }
        }
        baton.running = next;
        if next != vcpu || baton.vcpus[vcpu].asleep {
            self.turn[next].notify_all();
        }
    }

    fn halt(&self, vcpu: usize) {
        self.point(vcpu, Event::Halt);
        let mut baton = self.baton();
        if !baton.vcpus[vcpu].latch {
            baton.vcpus[vcpu].asleep = true;
            self.look(&mut baton, vcpu, Event::Work);
            self.hand_on(&mut baton, vcpu);
            baton = self.until_turn(baton, vcpu);
        }
        let me = &mut baton.vcpus[vcpu];
        (me.asleep, me.roused, me.latch) = (false, false, false);
    }

    fn kick(&self, vcpu: usize, target: usize) {
        self.point(vcpu, Event::Kick(target));
        self.baton().vcpus[target].latch = true;
    }
}

/// A point in a vCPU's own program.
pub fn point(event: Event) {
    let (world, vcpu) = me();
    world.point(vcpu, event);
}

thread_local! {
    static INTERRUPTS: Cell<bool> = const { Cell::new(true) };
}

/// The platform.
#[derive(Debug)]
pub struct OnBaton<K>(PhantomData<K>);

impl<K: Kick + Debug> Platform for OnBaton<K> {
    const KICK: KickKind = K::KIND;

    fn guest() -> GuestRef<'static> {
        point(Event::Work);
        me().0.guest.as_ref()
    }

    fn current() -> Option<VcpuId> {
        point(Event::Work);
        Some(id(me().1))
    }

    fn ticks() -> u64 {
        let (world, vcpu) = me();
        world.point(vcpu, Event::Work)
    }

    fn wait_while(word: &Word, value: u64, _deadline: u64) -> u64 {
        point(Event::Poll(word.load(Relaxed) == value));
        word.load(std::sync::atomic::Ordering::Acquire)
    }

    fn halt(_slot: SlotIndex, interrupts: bool) {
        let (world, vcpu) = me();
        world.halt(vcpu);
        INTERRUPTS.set(interrupts);
    }

    fn kick(target: VcpuId) {
        let (world, vcpu) = me();
        world.kick(vcpu, target.index());
    }

    fn interrupts_enabled() -> bool {
        point(Event::Work);
        INTERRUPTS.get()
    }

    fn disable_interrupts() {
        point(Event::Work);
        INTERRUPTS.set(false);
    }

    fn enable_interrupts() {
        INTERRUPTS.set(true);
        point(Event::Work);
    }
}
