//! A VM: the guest, the engine, and a driver whose vCPUs are shuttle's threads.

use pvlock_guest::protocol::{SlotIndex, VcpuId};
use pvlock_guest::{CLAIM, Guest, GuestRef, Platform, Word, hypercalls};
use pvlock_host::driver::Parker;
use pvlock_host::hypercalls::{Direct, Doorbell, Ring};
use pvlock_host::{Config, Engine, Nested, Scheduler, Statistics, Verdict, Waker, Yields};
use shuttle::rand::Rng;
use shuttle::thread;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the host says for all vCPUs, in ticks: several looks that are short, one that is long.
const BUDGET: u64 = 4 * CLAIM;

/// One of `0..n`, chosen by the schedule.
pub fn choose(n: usize) -> usize {
    shuttle::rand::thread_rng().gen_range(0..n)
}

/// A VM on one schedule.
pub struct Vm {
    guest: GuestRef<'static>,
    // In a model its locks are shuttle's, whatever the second parameter says.
    engine: Engine<Nested, parking_lot::RawMutex>,
    /// How the drivers' threads sleep.
    parkers: Box<[Parker]>,
    /// No sleep ends at it: a wake that is lost is a deadlock.
    deadline: Instant,
    ticks: AtomicU64,
    /// Whether waiters that spin report it.
    pause_loops: bool,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm").field("config", self.engine.config()).finish_non_exhaustive()
    }
}

shuttle::thread_local! {
    static CURRENT: Cell<Option<(&'static Vm, VcpuId)>> = Cell::new(None);
}

fn current() -> (&'static Vm, VcpuId) {
    CURRENT.with(Cell::get).expect("only vCPUs run guest code")
}

fn id(index: usize) -> VcpuId {
    VcpuId::new(index).expect("models have few vCPUs")
}

impl Vm {
    /// A VM with `N` vCPUs, registered and with everybody online: each runs `vcpu` once, while `host` runs beside them. Returns
    /// when all are done, and nobody is left on a queue or was woken by anything but what is meant to wake.
    pub fn run<const N: usize>(
        config: Config,
        vcpu: impl Fn(usize) + Send + Sync + 'static,
        host: impl FnOnce(&Self),
    ) -> Statistics {
        let config = Config { spin_budget: BUDGET, ..config };
        let memory = Box::into_raw(Box::new(Guest::<N>::new()));
        // SAFETY: freed below, after the last use.
        let guest = unsafe { &*memory }.as_ref();
        let vm = Box::into_raw(Box::new(Self {
            guest,
            engine: Engine::new(config, N, Nested(guest.region())).expect("models have a sound configuration"),
            parkers: (0..N).map(|_| Parker::new()).collect(),
            deadline: Instant::now() + Duration::from_secs(24 * 3600),
            ticks: AtomicU64::new(0),
            pause_loops: config.policy.pause_loop != pvlock_host::PauseLoop::Ignore,
        }));
        // SAFETY: as above.
        let this: &'static Self = unsafe { &*vm };
        guest.register(&this.doorbell(0), 0, (0..N).map(id)).expect("the engine accepts");
        (0..N).for_each(|index| guest.online(&this.doorbell(index), id(index)).expect("the engine accepts"));

        let vcpu = Arc::new(vcpu);
        let threads = (0..N).map(|index| {
            let vcpu = vcpu.clone();
            thread::spawn(move || {
                CURRENT.with(|current| current.set(Some((this, id(index)))));
                vcpu(index);
            })
        });
        let threads: Vec<_> = threads.collect();
        host(this);
        threads.into_iter().for_each(|thread| thread.join().expect("a panic ends the schedule"));

        let queues = this.engine.check_queues().map(|queues| queues.concat());
        assert!(matches!(&queues, Ok(queued) if queued.is_empty()), "left on a queue: {queues:?}");
        assert_eq!(this.engine.dump(0).count(), 0, "left asleep");
        let statistics = this.engine.statistics();
        assert_eq!(statistics.forced, 0);
        assert_eq!(statistics.kicked + statistics.interrupted + statistics.woken + statistics.spurious, statistics.parks);
        // SAFETY: made above; the vCPUs' threads have ended, and nobody else has had a reference. (A schedule that fails does
        // not come here, and leaks both.)
        unsafe {
            drop(Box::from_raw(vm));
            drop(Box::from_raw(memory));
        }
        statistics
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<Nested, parking_lot::RawMutex> {
        &self.engine
    }

    /// Some vCPU.
    pub fn some_vcpu(&self) -> VcpuId {
        id(choose(self.parkers.len()))
    }

    fn doorbell(&'static self, index: usize) -> impl Ring {
        Direct(move |access| match access {
            hypercalls::Access::Ring(word) => {
                self.ring(id(index), word);
                0
            }
            _ => self.engine.answer(id(index)),
        })
    }

    /// As the driver for threads does it.
    fn ring(&self, vcpu: VcpuId, word: u32) {
        match self.engine.doorbell(vcpu, word, 0, self) {
            Verdict::Park(_) => {
                let how = self.parkers[vcpu.index()].park(self.deadline);
                self.engine.unparked(vcpu, how, 0, self);
            }
            // Not each yield is heard.
            Verdict::Yield(_) | Verdict::YieldTo(..) if choose(2) == 0 => thread::yield_now(),
            Verdict::Yield(_) | Verdict::YieldTo(..) | Verdict::Resume(_) => {}
        }
    }
}

impl Scheduler for Vm {
    fn yields(&self) -> Yields {
        Yields::Plain
    }
}

impl Waker for Vm {
    fn wake(&self, vcpu: VcpuId) {
        self.parkers[vcpu.index()].unpark();
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }
}

/// The platform of such a VM.
#[derive(Debug)]
pub enum OnVm {}

impl Platform for OnVm {
    fn guest() -> GuestRef<'static> {
        current().0.guest
    }

    fn current() -> Option<VcpuId> {
        Some(current().1)
    }

    /// Time passes as the schedule likes it.
    fn ticks() -> u64 {
        let passed = [1, CLAIM / 2, CLAIM, BUDGET][choose(4)];
        current().0.ticks.fetch_add(passed, Ordering::Relaxed) + passed
    }

    fn relax() {
        thread::yield_now();
    }

    fn wait_while(word: &Word, value: u64, deadline: u64) -> u64 {
        let (vm, vcpu) = current();
        loop {
            // PCT takes a vCPU that yields for one that is to run last: so most looks do not.
            match choose(4) {
                0 => Self::relax(),
                1 if vm.pause_loops => vm.ring(vcpu, Doorbell::PauseLoop.encode()),
                _ => {}
            }
            // Acquire: as the platform's contract says.
            let now = word.load(Ordering::Acquire);
            if now != value || Self::ticks() >= deadline {
                return now;
            }
        }
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        let (vm, vcpu) = current();
        vm.ring(vcpu, Doorbell::Halt { slot, interrupts }.encode());
    }

    fn kick(vcpu: VcpuId) {
        let (vm, own) = current();
        Self::guest().kick(&vm.doorbell(own.index()), vcpu);
    }

    /// So that interrupts end halts. There are no handlers.
    fn interrupts_enabled() -> bool {
        true
    }
}
