//! A platform on which vCPUs are threads, interrupts and time are variables, and a host is a mutex.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses a part")]

use pvlock_guest::hypercalls::{Access, Direct, Doorbell, Status};
use pvlock_guest::protocol::{Features, SlotIndex, VcpuId};
use pvlock_guest::{Guest, GuestRef, KickKind, Platform, PreemptableTicketLock, RawLock, TicketLock};
use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Longest that a test waits for something that must happen.
pub const HANG: Duration = Duration::from_secs(30);

/// vCPUs of a machine.
pub const VCPUS: usize = 8;

/// One VM, to be leaked for a test.
pub struct Vm {
    pub guest: Guest<VCPUS>,
    /// A bit for each latch of each vCPU, and who is halted right now.
    latches: Mutex<[(u32, bool); VCPUS]>,
    kicked: Condvar,
}

impl Vm {
    pub fn new() -> &'static Self {
        Box::leak(Box::new(Self { guest: Guest::new(), latches: Mutex::new([(0, false); VCPUS]), kicked: Condvar::new() }))
    }

    /// A VM whose first `vcpus` vCPUs are registered and online.
    pub fn halting(vcpus: usize) -> &'static Self {
        let vm = Self::new();
        vm.register(vcpus);
        (0..vcpus).for_each(|vcpu| vm.online(vcpu));
        vm
    }

    pub fn register(&self, running: usize) {
        self.guest.as_ref().register(&self.host(), 1, (0..running).map(id)).unwrap();
    }

    pub fn online(&self, vcpu: usize) {
        self.guest.as_ref().online(&self.host(), id(vcpu)).unwrap();
    }

    pub fn unregister(&self) {
        self.guest.as_ref().unregister(&self.host()).unwrap();
    }

    fn host(&self) -> Direct<impl Fn(Access) -> u32> {
        Direct(|access| {
            if let Access::Ring(word) = access {
                match Doorbell::decode(word) {
                    Some(Doorbell::Register { .. }) => {
                        let accepted = &self.guest.as_ref().region().header.accepted;
                        accepted.store(Features::HALT.bits(), std::sync::atomic::Ordering::Relaxed);
                    }
                    // Nobody will be kicked any more.
                    Some(Doorbell::Unregister) => (0..VCPUS).for_each(|vcpu| self.kick(vcpu)),
                    _ => {}
                }
            }
            Status::Ok.encode()
        })
    }

    /// The host gives every vCPU this spin budget.
    pub fn budget(&self, ticks: u64) {
        self.guest.as_ref().region().header.spin_budget.store(ticks, std::sync::atomic::Ordering::Relaxed);
    }

    /// Whether `vcpu` is halted right now.
    pub fn is_halted(&self, vcpu: usize) -> bool {
        self.latches.lock().unwrap()[vcpu].1
    }

    /// Waits until `vcpu` has halted.
    pub fn until_halted(&self, vcpu: usize) {
        until(|| self.is_halted(vcpu));
    }

    /// Halts `vcpu`, whose thread calls, until the latch of `slot` is set.
    pub fn halt(&self, vcpu: usize, slot: SlotIndex) {
        let mut latches = self.latches.lock().unwrap();
        latches[vcpu].1 = true;
        while latches[vcpu].0 & 1 << slot.index() == 0 {
            let (again, timeout) = self.kicked.wait_timeout(latches, HANG).unwrap();
            latches = again;
            assert!(!timeout.timed_out(), "vCPU {vcpu} was never kicked");
        }
        latches[vcpu].0 &= !(1 << slot.index());
        latches[vcpu].1 = false;
    }

    /// Sets the latches of `vcpu`.
    pub fn kick(&self, vcpu: usize) {
        self.latches.lock().unwrap()[vcpu].0 = !0;
        self.kicked.notify_all();
    }
}

/// The vCPU with this number.
pub fn id(vcpu: usize) -> VcpuId {
    VcpuId::new(vcpu).unwrap()
}

/// Waits until something is so; panics if it never is.
pub fn until(mut what: impl FnMut() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < HANG, "it never happened");
        std::thread::yield_now();
    }
}

/// What a test does in place of the host.
type HaltHook = Box<dyn FnMut(SlotIndex, bool)>;

/// This thread's vCPU and what it has been asked to do.
#[derive(Default)]
pub struct Cpu {
    pub vm: Cell<Option<&'static Vm>>,
    pub vcpu: Cell<Option<usize>>,
    pub ticks: Cell<u64>,
    /// Ticks that one `relax` takes.
    pub relax_ticks: Cell<u64>,
    pub relaxes: Cell<u64>,
    /// Looks at the clock.
    pub looks: Cell<u64>,
    /// When the thread became this vCPU.
    pub began: Cell<Option<Instant>>,
    pub halts: Cell<u64>,
    pub kicks: Cell<u64>,
    pub interrupts: Cell<bool>,
    pub preemption_disabled: Cell<u32>,
    pub nmi: Cell<bool>,
    /// Calls of the platform, if they are recorded.
    pub trace: RefCell<Option<Vec<&'static str>>>,
    /// Called in `halt` in place of the host, until it is gone.
    pub on_halt: RefCell<Option<HaltHook>>,
    /// Called in each `relax`.
    pub on_relax: RefCell<Option<Box<dyn FnMut()>>>,
    /// Called in each `kick`, before the host is.
    pub on_kick: RefCell<Option<Box<dyn FnMut()>>>,
}

thread_local! {
    static CPU: Cpu = Cpu::default();
}

pub fn cpu<R>(f: impl FnOnce(&Cpu) -> R) -> R {
    CPU.with(f)
}

/// This thread is `vcpu` of `vm` from now on, with all counters at zero.
pub fn run_as(vm: &'static Vm, vcpu: Option<usize>) {
    cpu(|cpu| {
        cpu.vm.set(Some(vm));
        cpu.vcpu.set(vcpu);
        cpu.ticks.set(0);
        cpu.relax_ticks.set(1 << 10);
        cpu.relaxes.set(0);
        cpu.began.set(Some(Instant::now()));
        cpu.halts.set(0);
        cpu.kicks.set(0);
        cpu.interrupts.set(true);
        cpu.preemption_disabled.set(0);
        cpu.nmi.set(false);
        cpu.trace.replace(None);
        cpu.on_halt.replace(None);
        cpu.on_relax.replace(None);
        cpu.on_kick.replace(None);
    });
}

fn trace(call: &'static str) {
    cpu(|cpu| {
        if let Some(trace) = &mut *cpu.trace.borrow_mut() {
            trace.push(call);
        }
    });
}

fn vm() -> &'static Vm {
    cpu(|cpu| cpu.vm.get()).expect("the thread is a vCPU")
}

fn add(cell: &Cell<u64>, n: u64) {
    cell.set(cell.get().wrapping_add(n));
}

/// What a kick is, as a type.
pub trait Kick: 'static {
    const KIND: KickKind;
}

#[derive(Debug)]
pub enum SlotLatches {}
impl Kick for SlotLatches {
    const KIND: KickKind = KickKind::SlotLatch;
}

#[derive(Debug)]
pub enum VcpuLatch {}
impl Kick for VcpuLatch {
    const KIND: KickKind = KickKind::VcpuLatch;
}

#[derive(Debug)]
pub enum InterruptKick {}
impl Kick for InterruptKick {
    const KIND: KickKind = KickKind::Interrupt;
}

/// The platform.
#[derive(Debug)]
pub struct Threads<K = SlotLatches>(PhantomData<K>);

impl<K: Kick> Platform for Threads<K> {
    const KICK: KickKind = K::KIND;

    fn guest() -> GuestRef<'static> {
        vm().guest.as_ref()
    }

    fn current() -> Option<VcpuId> {
        cpu(|cpu| cpu.vcpu.get()).map(id)
    }

    fn ticks() -> u64 {
        cpu(|cpu| {
            // Whoever should have released the lock may have failed; then this thread must not keep the test from ending.
            add(&cpu.looks, 1);
            if cpu.looks.get().is_multiple_of(1 << 10) {
                assert!(cpu.began.get().is_none_or(|began| began.elapsed() < 2 * HANG), "it spins for good");
            }
            cpu.ticks.get()
        })
    }

    fn relax() {
        cpu(|cpu| {
            add(&cpu.relaxes, 1);
            add(&cpu.ticks, cpu.relax_ticks.get());
        });
        let hook = cpu(|cpu| cpu.on_relax.take());
        if let Some(mut hook) = hook {
            hook();
            cpu(|cpu| cpu.on_relax.replace(Some(hook)));
        }
        std::thread::yield_now();
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        cpu(|cpu| add(&cpu.halts, 1));
        trace("halt");
        match cpu(|cpu| cpu.on_halt.take()) {
            Some(mut hook) => {
                hook(slot, interrupts);
                cpu(|cpu| cpu.on_halt.replace(Some(hook)));
            }
            None => vm().halt(cpu(|cpu| cpu.vcpu.get()).unwrap(), slot),
        }
    }

    fn kick(vcpu: VcpuId) {
        cpu(|cpu| add(&cpu.kicks, 1));
        trace("kick");
        let hook = cpu(|cpu| cpu.on_kick.take());
        if let Some(mut hook) = hook {
            hook();
            cpu(|cpu| cpu.on_kick.replace(Some(hook)));
        }
        vm().kick(vcpu.index());
    }

    fn interrupts_enabled() -> bool {
        cpu(|cpu| cpu.interrupts.get())
    }

    fn disable_interrupts() {
        trace("disable interrupts");
        cpu(|cpu| cpu.interrupts.set(false));
    }

    fn enable_interrupts() {
        trace("enable interrupts");
        cpu(|cpu| cpu.interrupts.set(true));
    }

    fn disable_preemption() {
        trace("disable preemption");
        cpu(|cpu| cpu.preemption_disabled.set(cpu.preemption_disabled.get() + 1));
    }

    fn enable_preemption() {
        trace("enable preemption");
        cpu(|cpu| cpu.preemption_disabled.set(cpu.preemption_disabled.get() - 1));
    }

    fn in_nmi() -> bool {
        cpu(|cpu| cpu.nmi.get())
    }
}

/// A bare lock, for tests that hold for each of them.
pub trait Lock: RawLock + Debug + Send + Sync + 'static {
    /// The ticket of the first who has to wait.
    const FIRST_WAITER: u32;

    /// Ticks that who has come first after the owner spins before it halts, if its budget is `budget`.
    fn before_the_halt(budget: u64) -> u64;
}

impl<K: Kick + Debug> Lock for TicketLock<Threads<K>> {
    // The owner has one too.
    const FIRST_WAITER: u32 = 1;

    fn before_the_halt(budget: u64) -> u64 {
        // Unpublished, then published.
        (1 << 10) + budget
    }
}

impl<K: Kick + Debug> Lock for PreemptableTicketLock<Threads<K>> {
    const FIRST_WAITER: u32 = 0;

    fn before_the_halt(budget: u64) -> u64 {
        // Without a ticket, then as the head of the queue.
        2 * budget
    }
}

/// Releases a lock that the caller has just taken.
pub fn unlock<L: RawLock>(lock: &L, token: L::Token) {
    // SAFETY: whoever has the token owns the lock, and tests do not mix up their locks.
    unsafe { lock.unlock(token) };
}

/// Makes tests of functions that are generic over the lock.
#[allow(unused_macros, reason = "each test file uses a part")]
macro_rules! for_both_locks {
    ($($test:ident)*) => {
        mod ticket {
            $(
                #[test]
                fn $test() {
                    super::$test::<pvlock_guest::TicketLock<super::common::Threads>>();
                }
            )*
        }

        mod preemptable {
            $(
                #[test]
                fn $test() {
                    super::$test::<pvlock_guest::PreemptableTicketLock<super::common::Threads>>();
                }
            )*
        }
    };
}
#[allow(unused_imports, reason = "each test file uses a part")]
pub(crate) use for_both_locks;
