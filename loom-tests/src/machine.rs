//! A machine with a few vCPUs, each of them a loom thread, and the smallest host that honours halts and kicks.
//!
//! There is one machine per execution of a model. Loom runs all threads of a model on the OS thread that called it, so the
//! machine is found through an ordinary thread-local, and what only one loom thread can touch between two loom operations
//! needs no atomics.

use crate::explore::spawn;
use crate::mutation::{Mutation, active};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::thread::{JoinHandle, Thread};
use pvlock_guest::hypercalls::{Direct, Doorbell, Ring, Status};
use pvlock_guest::protocol::{Features, SlotIndex, VcpuId};
use pvlock_guest::{Guest, GuestRef, KickKind, Platform, Ticket, TicketLock, Word, hypercalls};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a kick is on the machine, as a type.
pub trait Kick: 'static {
    /// The platform's answer.
    const KIND: KickKind;
}

/// A latch for each wait slot.
#[derive(Debug)]
pub enum SlotLatches {}
impl Kick for SlotLatches {
    const KIND: KickKind = KickKind::SlotLatch;
}

/// One latch for the vCPU.
#[derive(Debug)]
pub enum VcpuLatch {}
impl Kick for VcpuLatch {
    const KIND: KickKind = KickKind::VcpuLatch;
}

/// A maskable interrupt.
#[derive(Debug)]
pub enum InterruptKick {}
impl Kick for InterruptKick {
    const KIND: KickKind = KickKind::Interrupt;
}

/// How far the guest has come before its vCPUs start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Nobody has registered.
    Native,
    /// Registered, and every vCPU is online: waiters may halt.
    Halting,
}

/// How a vCPU waits for another one to do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// It sleeps until a kick or a release. Loom reports a deadlock if everybody sleeps. Waking makes visible what the waker
    /// did.
    Sleep,
    /// It looks again and again, each time after somebody else has done a step. Nothing is made visible. Only for two vCPUs:
    /// two that look can do so in turns for ever.
    Poll,
}

/// A machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// How vCPUs that have halted wait for a kick.
    pub halt: Wait,
    /// How vCPUs that spin wait for a release, once they have had their looks.
    pub spin: Wait,
    /// How far the guest has come.
    pub start: Start,
    /// Looks at the word that a waiter gets between two halts before it must let somebody else run. A waiter that halts
    /// needs two the first time (before and after it publishes) and one each time it halts again.
    pub looks: u32,
    /// Whether those looks see nothing new: the deadline has passed before the first. The lock's own looks remain.
    pub blind: bool,
    /// Whether vCPUs start with interrupts enabled.
    pub interrupts: bool,
    /// Whether an interrupt that is taken out of a halt ends it.
    pub interrupt_ends_halt: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            halt: Wait::Sleep,
            spin: Wait::Sleep,
            start: Start::Halting,
            looks: 2,
            blind: false,
            interrupts: true,
            interrupt_ends_halt: false,
        }
    }
}

/// At which step of which vCPU an interrupt comes, and whether any execution has had that step.
#[derive(Clone, Debug)]
pub struct InterruptAt {
    /// The vCPU.
    pub vcpu: usize,
    /// The step: the number of points passed before with interrupts enabled.
    pub step: usize,
    /// Set when it has come.
    pub came: Arc<AtomicBool>,
}

struct Interrupt {
    at: InterruptAt,
    passed: Cell<usize>,
    handler: Box<dyn Fn()>,
}

struct Vcpu {
    id: VcpuId,
    /// A bit for each latch.
    latches: AtomicU32,
    thread: RefCell<Option<Thread>>,
    interrupts: Cell<bool>,
    in_handler: Cell<bool>,
    looks: Cell<u32>,
    /// Looks at the clock since it last slept.
    clock_looks: Cell<u32>,
    sleeping: Cell<bool>,
}

impl Vcpu {
    /// Sleeps until somebody wakes it. There must be no step between the look that says it has to and this call.
    fn sleep(&self) {
        self.sleeping.set(true);
        loom::thread::park();
    }

    /// Wakes it if it sleeps. (Loom's `unpark` would wake it out of anything.)
    fn wake(&self) {
        if self.sleeping.take()
            && let Some(thread) = &*self.thread.borrow()
        {
            thread.unpark();
        }
    }
}

/// The machine of the present execution.
pub struct Machine {
    guest: GuestRef<'static>,
    /// What `guest` refers to.
    memory: Box<dyn Any>,
    vcpus: Vec<Vcpu>,
    ticks: Cell<u64>,
    interrupt: RefCell<Option<Rc<Interrupt>>>,
    config: Config,
    halts: Cell<usize>,
    /// Makes visible to who sleeps what was done before a release.
    released: AtomicU32,
    releases: Cell<u32>,
    interrupted: Cell<bool>,
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").field("config", &self.config).finish_non_exhaustive()
    }
}

thread_local! {
    static MACHINE: Cell<Option<&'static Machine>> = const { Cell::new(None) };
}

loom::thread_local! {
    static VCPU: Cell<Option<VcpuId>> = Cell::new(None);
}

/// The platform of a machine on which a kick is `K`.
#[derive(Debug)]
pub struct OnMachine<K>(PhantomData<K>);

/// The lock of the models.
pub type Lock<K> = TicketLock<OnMachine<K>>;

/// Room for a lock.
#[repr(align(64))]
struct Place(#[allow(dead_code, reason = "only its size counts")] MaybeUninit<[u64; 8]>);

thread_local! {
    /// The places of this OS thread, and how many of them this execution has used.
    static PLACES: RefCell<(Vec<*mut Place>, usize)> = const { RefCell::new((Vec::new(), 0)) };
}

/// A lock at an address that is the same in every execution of a model. The table of waiters is indexed by a hash of that
/// address, and loom wants to see the same operations again when it repeats an execution.
fn lock_in_place<K: Kick>() -> &'static Lock<K> {
    const { assert!(size_of::<Lock<K>>() <= size_of::<Place>() && align_of::<Lock<K>>() <= align_of::<Place>()) };
    let place = PLACES.with_borrow_mut(|(places, used)| {
        if *used == places.len() {
            places.push(Box::into_raw(Box::new(Place(MaybeUninit::uninit()))));
        }
        *used += 1;
        places[*used - 1]
    });
    let lock: *mut Lock<K> = place.cast();
    // SAFETY: the place is large enough, was never freed, and the locks of earlier executions, which nobody uses any more,
    // need no drop.
    unsafe {
        lock.write(Lock::new());
        &*lock
    }
}

impl Machine {
    /// A machine with `N` vCPUs for this execution; the caller becomes vCPU 0.
    pub fn new<const N: usize>(config: Config) -> &'static Self {
        if let Some(last) = MACHINE.take() {
            // SAFETY: it was leaked below. The threads of that execution have ended, or will never run again because it
            // failed; the references that they had are not used any more, and no other thread ever had one.
            drop(unsafe { Box::from_raw(std::ptr::from_ref(last).cast_mut()) });
        }
        PLACES.with_borrow_mut(|(_, used)| *used = 0);
        let memory = Box::new(Guest::<N>::new());
        // SAFETY: the box is dropped with the machine, see above; until then it is only shared.
        let guest = unsafe { &*std::ptr::from_ref(&*memory) }.as_ref();
        let vcpu = |id| Vcpu {
            id,
            latches: AtomicU32::new(0),
            thread: RefCell::new(None),
            interrupts: Cell::new(config.interrupts),
            in_handler: Cell::new(false),
            looks: Cell::new(0),
            clock_looks: Cell::new(0),
            sleeping: Cell::new(false),
        };
        let vcpus = ids::<N>().map(vcpu).collect();
        let start = config.start;
        let machine: &'static Self = Box::leak(Box::new(Self {
            guest,
            memory,
            vcpus,
            ticks: Cell::new(0),
            interrupt: RefCell::new(None),
            config,
            halts: Cell::new(0),
            released: AtomicU32::new(0),
            releases: Cell::new(0),
            interrupted: Cell::new(false),
        }));
        debug_assert!(machine.memory.is::<Guest<N>>());
        MACHINE.set(Some(machine));
        machine.run_as(0);
        if start == Start::Halting {
            machine.register(ids::<N>());
            for vcpu in 0..N {
                machine.online(vcpu);
            }
        }
        machine
    }

    fn get() -> &'static Self {
        MACHINE.get().expect("a model makes its machine first")
    }

    /// The guest's state.
    pub fn guest(&self) -> GuestRef<'static> {
        self.guest
    }

    /// Times that any vCPU has halted, the halts that its latch ended at once included.
    pub fn halts(&self) -> usize {
        self.halts.get()
    }

    /// This loom thread is vCPU `vcpu` from now on.
    fn run_as(&'static self, vcpu: usize) {
        let vcpu = &self.vcpus[vcpu];
        VCPU.with(|current| current.set(Some(vcpu.id)));
        *vcpu.thread.borrow_mut() = Some(loom::thread::current());
    }

    /// Starts a vCPU.
    pub fn spawn(&'static self, vcpu: usize, code: impl FnOnce() + 'static) -> JoinHandle<()> {
        spawn(move || {
            self.run_as(vcpu);
            code();
        })
    }

    /// Registers the region with the machine's host.
    pub fn register(&'static self, running: impl IntoIterator<Item = VcpuId>) {
        let accepted = self.guest.register(&self.host(), 1, running).expect("the host accepts");
        assert!(accepted.contains(Features::HALT));
    }

    /// Switches the locks over without a host: halts and kicks are the machine's own.
    pub fn switch_over(&'static self, running: impl IntoIterator<Item = VcpuId>) {
        self.guest.switch_over(running);
    }

    /// Brings a vCPU online.
    pub fn online(&'static self, vcpu: usize) {
        self.guest.online(&self.host(), self.vcpus[vcpu].id).expect("the host accepts");
    }

    fn host(&'static self) -> impl Ring {
        Direct(|access| {
            if let hypercalls::Access::Ring(word) = access
                && let Some(Doorbell::Register { .. }) = Doorbell::decode(word)
            {
                self.guest.region().header.accepted.store(Features::HALT.bits(), Ordering::Relaxed);
            }
            Status::Ok.encode()
        })
    }

    /// Whether the interrupt has come in this execution.
    pub fn interrupted(&self) -> bool {
        self.interrupted.get()
    }

    /// Has `handler` run as an interrupt.
    pub fn interrupt(&self, at: InterruptAt, handler: impl Fn() + 'static) {
        let interrupt = Interrupt { at, passed: Cell::new(0), handler: Box::new(handler) };
        *self.interrupt.borrow_mut() = Some(Rc::new(interrupt));
    }

    /// Somebody has released a lock: whoever sleeps instead of spinning looks again. Who has halted goes on sleeping.
    fn released(&self) {
        if self.config.spin == Wait::Sleep {
            self.released.fetch_add(1, Ordering::Release);
            self.releases.set(self.releases.get() + 1);
            self.vcpus.iter().for_each(Vcpu::wake);
        }
    }

    /// The calling vCPU has slept.
    pub(crate) fn has_slept(&self) {
        self.vcpu().clock_looks.set(0);
    }

    fn vcpu(&self) -> &Vcpu {
        &self.vcpus[VCPU.with(Cell::get).expect("only vCPUs run guest code").index()]
    }

    /// A point at which an interrupt can come if interrupts are enabled. Says whether it came.
    fn interruptible(&self) -> bool {
        let Some(interrupt) = self.interrupt.borrow().clone() else { return false };
        let vcpu = self.vcpu();
        if vcpu.id.index() != interrupt.at.vcpu || !vcpu.interrupts.get() || vcpu.in_handler.get() {
            return false;
        }
        let passed = interrupt.passed.get();
        interrupt.passed.set(passed + 1);
        if passed != interrupt.at.step {
            return false;
        }
        self.interrupted.set(true);
        interrupt.at.came.store(true, Ordering::Relaxed);
        vcpu.interrupts.set(false);
        vcpu.in_handler.set(true);
        let looks = vcpu.looks.replace(0);
        (interrupt.handler)();
        vcpu.looks.set(looks);
        vcpu.in_handler.set(false);
        vcpu.interrupts.set(true);
        true
    }
}

/// Looks at the clock that a waiter gets before it has slept. One that looks more often may not halt, and polls: then
/// somebody else has to do a step first.
const CLOCK_LOOKS: u32 = 32;

fn ids<const N: usize>() -> impl Iterator<Item = VcpuId> {
    (0..N).filter_map(VcpuId::new)
}

impl<K: Kick> Platform for OnMachine<K> {
    const KICK: KickKind = K::KIND;

    fn guest() -> GuestRef<'static> {
        Machine::get().guest
    }

    fn current() -> Option<VcpuId> {
        VCPU.with(Cell::get)
    }

    fn step() {
        Machine::get().interruptible();
    }

    fn ticks() -> u64 {
        let machine = Machine::get();
        machine.interruptible();
        let looks = &machine.vcpu().clock_looks;
        looks.set(looks.get() + 1);
        if looks.get() > CLOCK_LOOKS {
            loom::thread::yield_now();
        }
        // More than any budget: each deadline has passed when it is looked at.
        machine.ticks.set(machine.ticks.get() + (1 << 32));
        machine.ticks.get()
    }

    // Its loads are Relaxed, weaker than the contract: exclusion rests on the locks' own looks.
    fn wait_while(word: &Word, value: u64, _deadline: u64) -> u64 {
        let machine = Machine::get();
        machine.interruptible();
        let vcpu = machine.vcpu();
        let looks = vcpu.looks.get();
        vcpu.looks.set(looks + 1);
        if looks < machine.config.looks {
            return if machine.config.blind { value } else { word.load(Ordering::Relaxed) };
        }
        // No `interruptible` from here on: a step that can repeat is no step to count.
        match machine.config.spin {
            Wait::Poll => {
                loom::thread::yield_now();
                word.load(Ordering::Relaxed)
            }
            Wait::Sleep => loop {
                // A load may return an old value: sleep only if no release has come since one was certainly seen.
                machine.released.fetch_add(0, Ordering::Acquire);
                let seen = machine.releases.get();
                let now = word.load(Ordering::Relaxed);
                if now != value {
                    return now;
                }
                if machine.releases.get() == seen {
                    vcpu.sleep();
                }
            },
        }
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        let machine = Machine::get();
        let vcpu = machine.vcpu();
        machine.halts.set(machine.halts.get() + 1);
        let latch = match K::KIND {
            KickKind::SlotLatch if !active(Mutation::LatchesShared) => 1 << slot.index(),
            _ => 1,
        };
        if K::KIND == KickKind::SlotLatch {
            if machine.interruptible() && machine.config.interrupt_ends_halt {
                return;
            }
        } else if interrupts {
            // The instant in which interrupts are enabled and the vCPU halts: an interrupt that was pending ends the halt.
            let before = vcpu.interrupts.get();
            if before && K::KIND == KickKind::Interrupt {
                // They were enabled all along: a kick is an interrupt that has been taken already.
                vcpu.latches.store(0, Ordering::Relaxed);
            }
            vcpu.interrupts.set(true);
            let came = machine.interruptible();
            vcpu.interrupts.set(before);
            if came && (!before || machine.config.interrupt_ends_halt) {
                return;
            }
        }
        // All Relaxed: a doorbell orders nothing.
        while vcpu.latches.fetch_and(!latch, Ordering::Relaxed) & latch == 0 || (K::KIND == KickKind::Interrupt && !interrupts) {
            match machine.config.halt {
                Wait::Sleep => vcpu.sleep(),
                Wait::Poll => loom::thread::yield_now(),
            }
        }
        vcpu.looks.set(1);
        machine.has_slept();
    }

    fn kick(vcpu: VcpuId) {
        let vcpu = &Machine::get().vcpus[vcpu.index()];
        vcpu.latches.fetch_or(0b1111, Ordering::Relaxed);
        vcpu.wake();
    }

    fn interrupts_enabled() -> bool {
        Machine::get().vcpu().interrupts.get()
    }

    fn disable_interrupts() {
        let vcpu = Machine::get().vcpu();
        vcpu.interrupts.set(false);
        if K::KIND == KickKind::Interrupt {
            // Kicks that came until now were taken as interrupts.
            vcpu.latches.store(0, Ordering::Relaxed);
        }
    }

    fn enable_interrupts() {
        Machine::get().vcpu().interrupts.set(true);
    }
}

/// A lock and what it protects.
#[derive(Debug)]
pub struct WorkOn<K: Kick> {
    lock: &'static Lock<K>,
    /// Loom notices accesses that are not ordered.
    data: UnsafeCell<u32>,
    /// The tickets in the order in which their owners came in.
    order: RefCell<Vec<Ticket>>,
}

impl<K: Kick> WorkOn<K> {
    /// A free lock.
    #[allow(clippy::new_without_default, reason = "loom objects have no default")]
    pub fn new() -> Rc<Self> {
        Rc::new(Self { lock: lock_in_place(), data: UnsafeCell::new(0), order: RefCell::new(Vec::new()) })
    }

    /// The lock itself.
    pub fn lock(&self) -> &Lock<K> {
        self.lock
    }

    /// Takes the lock, works, releases it.
    pub fn once(&self) {
        self.begin();
        self.end();
    }

    /// Takes the lock and works.
    pub fn begin(&self) {
        Machine::get().vcpu().looks.set(0);
        let ticket = self.lock.lock();
        self.work(ticket);
    }

    /// Works, if the lock is free.
    pub fn try_once(&self) -> bool {
        let Some(ticket) = self.lock.try_lock() else { return false };
        self.work(ticket);
        self.end();
        true
    }

    /// Releases the lock.
    pub fn end(&self) {
        let ticket = *self.order.borrow().last().expect("the owner is inside");
        // SAFETY: `begin` or `try_once` has taken the lock with this ticket, which is the last one that came in.
        unsafe { self.lock.unlock(ticket) };
        Machine::get().released();
    }

    /// The critical section.
    fn work(&self, ticket: Ticket) {
        // SAFETY: loom panics if another thread is inside, or has been without happening before.
        self.data.with_mut(|data| unsafe { *data += 1 });
        self.order.borrow_mut().push(ticket);
    }

    /// How often somebody has been inside.
    pub fn times(&self) -> u32 {
        self.order.borrow().len() as u32
    }

    /// Everybody has left: as many have been inside as `times` says, in the order of their tickets.
    pub fn finish(&self, times: u32) {
        let served: Vec<u32> = self.order.borrow().iter().map(|ticket| ticket.number()).collect();
        assert_eq!(served, (0..times).collect::<Vec<_>>(), "tickets in the order in which they were served");
        // SAFETY: as in `work`.
        self.data.with(|data| assert_eq!(unsafe { *data }, times));
        assert!(!self.lock.is_locked(), "every ticket drawn has been served");
    }
}
