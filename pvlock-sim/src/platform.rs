//! The simulated machine as the guest's platform: what guest code may ask for, and the coroutines that it runs in.

use crate::faults::{Happens, Point};
use crate::machine::{After, Machine};
use crate::workload::{self, Handler};
use corosensei::{Coroutine, Yielder};
use pvlock_guest::{Guest, GuestRef, Platform, Word};
use pvlock_host::hypercalls::{Doorbell, Ring};
use pvlock_host::protocol::{LockId, SlotIndex, VcpuId};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Guest code of one vCPU.
pub(crate) type Code = Coroutine<(), (), ()>;

/// Who the running code is.
#[derive(Clone, Copy)]
pub(crate) struct Current {
    pub(crate) guest: GuestRef<'static>,
    pub(crate) vcpu: VcpuId,
    /// Address of the first lock of its VM: identities of locks count from here, or runs would differ.
    pub(crate) locks: usize,
    /// What handles its interrupts, in runs in which things go wrong.
    pub(crate) handler: Option<Handler>,
    /// What suspends it, once it has begun.
    pub(crate) yielder: Option<*const Yielder<(), ()>>,
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
    static CURRENT: Cell<Option<Current>> = const { Cell::new(None) };
}

/// Something with the machine that this thread simulates. The code of a vCPU must not be resumed in it.
pub(crate) fn with<R>(f: impl FnOnce(&mut Machine) -> R) -> R {
    MACHINE.with_borrow_mut(|machine| f(machine.as_mut().expect("guest code runs only while its machine does")))
}

/// This thread simulates `machine` from now on; returns the one before.
pub(crate) fn exchange(machine: Option<Machine>) -> Option<Machine> {
    MACHINE.replace(machine)
}

/// Lets the code of a vCPU run until it suspends itself; true if it has ended.
pub(crate) fn resume(code: &mut Code, current: &mut Option<Current>) -> bool {
    CURRENT.set(current.take());
    let ended = code.resume(()).as_return().is_some();
    *current = CURRENT.take();
    ended
}

/// Called by a vCPU's code before anything else.
pub(crate) fn begin(yielder: &Yielder<(), ()>) {
    CURRENT.set(CURRENT.get().map(|current| Current { yielder: Some(std::ptr::from_ref(yielder)), ..current }));
}

/// Waits until the machine has done what was asked of it, if it `has` not done so at once.
fn suspend_unless(has: bool) {
    if !has && let Some(yielder) = CURRENT.get().and_then(|current| current.yielder) {
        // SAFETY: the yielder was given to the coroutine that runs now and lives as long as it.
        unsafe { (*yielder).suspend(()) };
    }
}

/// Computes for so many cycles.
pub(crate) fn compute(cycles: u64) {
    suspend_unless(with(|machine| machine.compute(cycles)));
}

/// Leaves the guest.
pub(crate) fn exit(cost: u64, then: After) {
    with(|machine| machine.exit(cost, then));
    suspend_unless(false);
}

/// The running code has come to a point at which something can go wrong.
#[inline]
fn point(point: Point) {
    // None outside of guest code, such as when it is dropped half-way.
    if let Some(Current { handler: Some(handler), .. }) = CURRENT.get() {
        pass(point, handler);
    }
}

#[cold]
fn pass(point: Point, handler: Handler) {
    match with(|machine| machine.happens(point, handler.nested)) {
        Happens::Nothing => {}
        Happens::Stall(time) => exit(0, After::Stolen(time)),
        Happens::Interrupt(time) => {
            let set = |handler| CURRENT.set(CURRENT.get().map(|current| Current { handler: Some(handler), ..current }));
            set(handler.nested(handler.nested + 1));
            workload::interrupt(handler, time);
            set(handler);
        }
    }
}

/// The running code rings the host.
pub(crate) fn ring() -> impl Ring {
    DirectRing
}

/// The guest of the running code.
pub(crate) fn guest() -> GuestRef<'static> {
    CURRENT.get().map_or(NOBODY.as_ref(), |current| current.guest)
}

/// This thread simulates nothing any more, even if its code has panicked.
pub(crate) fn abandon() -> Option<Machine> {
    CURRENT.set(None);
    exchange(None)
}

/// Suspends the code, whose activity has been set.
pub(crate) fn suspend() {
    suspend_unless(false);
}

/// Guest code that is no vCPU's has a guest without a host.
static NOBODY: Guest<1> = Guest::new();

/// The platform.
#[derive(Clone, Copy, Debug)]
pub enum Sim {}

impl Platform for Sim {
    #[inline]
    fn guest() -> GuestRef<'static> {
        point(Point::Call);
        guest()
    }

    #[inline]
    fn current() -> Option<VcpuId> {
        point(Point::Call);
        CURRENT.get().map(|current| current.vcpu)
    }

    #[inline]
    fn ticks() -> u64 {
        point(Point::Call);
        with(|machine| machine.now)
    }

    fn relax() {
        Self::delay(Self::ticks());
    }

    fn delay(deadline: u64) {
        suspend_unless(with(|machine| machine.spin(None, deadline)));
    }

    fn wait_while(word: &Word, value: u64, deadline: u64) -> u64 {
        point(Point::Call);
        suspend_unless(with(|machine| machine.spin(Some((std::ptr::from_ref(word), value)), deadline)));
        // Acquire: pairs with the releasing operation of whichever lock this word belongs to.
        word.load(std::sync::atomic::Ordering::Acquire)
    }

    fn lock_id<T>(lock: &T) -> LockId {
        point(Point::Call);
        let base = CURRENT.get().map_or(0, |current| current.locks);
        let offset = std::ptr::from_ref(lock).addr().wrapping_sub(base) as u64;
        // No lock is at 0.
        LockId::new(offset.wrapping_add(1 << 12)).unwrap_or(LockId::of(lock))
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        point(Point::Step);
        with(Machine::halts);
        exit(0, After::Doorbell(Doorbell::Halt { slot, interrupts }.encode()));
    }

    fn kick(vcpu: VcpuId) {
        point(Point::Step);
        with(|machine| machine.kicks(vcpu));
        if let Some(current) = CURRENT.get() {
            current.guest.kick(&DirectRing, vcpu);
        }
    }

    fn interrupts_enabled() -> bool {
        true
    }

    #[inline]
    fn step() {
        point(Point::Step);
    }
}

/// Rings from guest code: an exit.
struct DirectRing;

impl Ring for DirectRing {
    fn ring(&self, word: u32) {
        exit(0, After::Doorbell(word));
    }

    fn answer(&self) -> u32 {
        with(|machine| machine.answer())
    }
}

/// Rings before the machine runs: takes no time.
pub(crate) struct Boot<'a>(pub(crate) &'a Rc<crate::machine::SimEngine>, pub(crate) VcpuId);

impl Ring for Boot<'_> {
    fn ring(&self, word: u32) {
        let _ = self.0.doorbell(self.1, word, 0, &|_| ());
    }

    fn answer(&self) -> u32 {
        self.0.answer(self.1)
    }
}
