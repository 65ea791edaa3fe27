//! A VM whose host is the real engine, and a platform whose doorbells go there.

use crate::{Config, Machine, OnMachine, SlotLatches, Start};
use loom::thread::JoinHandle;
use pvlock_guest::protocol::{LockId, SlotIndex, VcpuId, Wait, WaitState};
use pvlock_guest::{GuestRef, Platform, Word, hypercalls};
use pvlock_host::driver::Parker;
use pvlock_host::hypercalls::{Direct, Doorbell, Ring};
use pvlock_host::{Nested, Verdict, Waker};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// The engine of the models. (In a model its locks are loom's, whatever the second parameter says.)
pub type Engine = pvlock_host::Engine<Nested, parking_lot::RawMutex>;

/// Longer than any exploration.
pub const FOREVER: Duration = Duration::from_secs(1 << 30);

/// The identifier of a vCPU.
pub fn vcpu(index: usize) -> VcpuId {
    VcpuId::new(index).expect("models have few vCPUs")
}

/// How a vCPU's thread sleeps: as the drivers' threads do. There is no deadline, so a wake that is lost is a deadlock.
struct Sleeper {
    parker: Parker,
    /// Whether it was woken and has not slept since.
    woken: Cell<bool>,
}

/// The VM of the present execution.
pub struct Vm {
    engine: Engine,
    machine: &'static Machine,
    sleepers: Vec<Sleeper>,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm").field("config", self.engine.config()).finish_non_exhaustive()
    }
}

thread_local! {
    static VM: Cell<Option<&'static Vm>> = const { Cell::new(None) };
}

impl Vm {
    /// A VM with `N` vCPUs for this execution, registered and with everybody online; the caller becomes vCPU 0.
    pub fn new<const N: usize>(config: pvlock_host::Config) -> &'static Self {
        if let Some(last) = VM.take() {
            // SAFETY: it was leaked below. The threads of that execution have ended, or will never run again because it
            // failed; the references that they had are not used any more, and no other thread ever had one.
            drop(unsafe { Box::from_raw(std::ptr::from_ref(last).cast_mut()) });
        }
        // The region belongs to the machine, which lives longer than the engine: until the next one is made.
        let machine = Machine::new::<N>(Config { start: Start::Native, ..Config::default() });
        let memory = Nested(machine.guest().region());
        let vm: &'static Self = Box::leak(Box::new(Self {
            engine: Engine::new(config, N, memory).expect("models have a sound configuration"),
            machine,
            sleepers: (0..N).map(|_| Sleeper { parker: Parker::new(), woken: Cell::new(false) }).collect(),
        }));
        VM.set(Some(vm));
        let ring = vm.doorbell(0);
        machine.guest().register(&ring, 0, (0..N).map(vcpu)).expect("the engine accepts");
        for index in 0..N {
            machine.guest().online(&ring, vcpu(index)).expect("the engine accepts");
        }
        vm
    }

    fn get() -> &'static Self {
        VM.get().expect("a model makes its VM first")
    }

    /// Starts a vCPU.
    pub fn spawn(&'static self, index: usize, code: impl FnOnce() + 'static) -> JoinHandle<()> {
        self.machine.spawn(index, code)
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The guest's state.
    pub fn guest(&self) -> GuestRef<'static> {
        self.machine.guest()
    }

    /// The doorbell of a vCPU, for those that let nobody park.
    pub fn doorbell(&'static self, index: usize) -> impl Ring {
        Direct(move |access| match access {
            hypercalls::Access::Ring(word) => {
                let _: Verdict = self.engine.doorbell(vcpu(index), word, 0, self);
                0
            }
            _ => self.engine.answer(vcpu(index)),
        })
    }

    /// A vCPU rings a doorbell; if it is told to park, the caller says how that goes on.
    pub fn ring(&self, index: usize, doorbell: Doorbell) -> Verdict {
        self.engine.doorbell(vcpu(index), doorbell.encode(), 0, self)
    }

    /// A vCPU kicks another one.
    pub fn kick(&self, index: usize, target: usize) {
        let _: Verdict = self.ring(index, Doorbell::Kick(vcpu(target)));
    }

    /// A vCPU says that it waits for the one lock there is, with ticket `ticket`, for `on`: its predecessor or the holder,
    /// whichever the engine looks at.
    pub fn wait(&self, index: usize, ticket: u32, on: usize) {
        let on = Some(vcpu(on));
        let wait = Wait { lock: LockId::new(1).expect("not 0"), ticket, state: WaitState::Halting, predecessor: on, holder: on };
        let record = self.guest().region().record(vcpu(index)).expect("every vCPU has a record");
        record.slot(slot(0)).publish(&wait);
    }

    /// A vCPU halts in slot `level`; it does not sleep if it is told to park.
    pub fn try_halt(&self, index: usize, level: usize, interrupts: bool) -> Verdict {
        self.ring(index, Doorbell::Halt { slot: slot(level), interrupts })
    }

    /// A vCPU halts in slot `level` and sleeps if it is told to park.
    pub fn halt(&self, index: usize, level: usize, interrupts: bool) {
        if matches!(self.try_halt(index, level, interrupts), Verdict::Park(_)) {
            self.sleep(index);
        }
    }

    /// A vCPU that was told to park sleeps until woken, and reports that.
    pub fn sleep(&self, index: usize) {
        let sleeper = &self.sleepers[index];
        let how = sleeper.parker.park(Instant::now() + FOREVER);
        sleeper.woken.set(false);
        self.machine.has_slept();
        self.engine.unparked(vcpu(index), how, 0, self);
    }

    /// Whether somebody has woken this vCPU since it last slept.
    pub fn woken(&self, index: usize) -> bool {
        self.sleepers[index].woken.get()
    }

    /// How many sleepers stand on queues.
    pub fn queued(&self) -> usize {
        self.engine.check_queues().expect("the queues are sound").concat().len()
    }
}

impl Waker for Vm {
    fn wake(&self, vcpu: VcpuId) {
        let sleeper = &self.sleepers[vcpu.index()];
        sleeper.woken.set(true);
        sleeper.parker.unpark();
    }
}

fn slot(level: usize) -> SlotIndex {
    SlotIndex::new(level).expect("models nest little")
}

/// The platform of a VM whose host is the engine. Every spin budget is over before the first look, so every waiter halts
/// unless the lock's own looks show that it must not.
#[derive(Debug)]
pub enum OnEngine {}

impl Platform for OnEngine {
    fn guest() -> GuestRef<'static> {
        OnMachine::<SlotLatches>::guest()
    }

    fn current() -> Option<VcpuId> {
        OnMachine::<SlotLatches>::current()
    }

    fn ticks() -> u64 {
        OnMachine::<SlotLatches>::ticks()
    }

    fn wait_while(_word: &Word, value: u64, _deadline: u64) -> u64 {
        value
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        Vm::get().halt(current(), slot.index(), interrupts);
    }

    fn kick(vcpu: VcpuId) {
        Self::guest().kick(&Vm::get().doorbell(current()), vcpu);
    }
}

fn current() -> usize {
    OnEngine::current().expect("only vCPUs run guest code").index()
}
