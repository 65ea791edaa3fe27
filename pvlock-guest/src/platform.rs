//! The contract between the locks and the machine they run on.

use crate::GuestRef;
use crate::sync::{AtomicU64, Ordering};
use pvlock_protocol::{LockId, SlotIndex, VcpuId};

/// The atomic word that waiters watch: `core`'s `AtomicU64`, or loom's in a model.
pub type Word = AtomicU64;

/// What a kick is on this machine, and so when a waiter may halt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KickKind {
    /// A latch for each wait slot; a kick sets them all, a halt consumes its own. pvlock's doorbells. A waiter may halt
    /// with interrupts on or off, and an interrupt handler that halts cannot eat the kick of what it interrupted.
    SlotLatch,
    /// One latch for the whole vCPU, which works with interrupts off (KVM's PV_UNHALT). Interrupts stay off from the last
    /// check to the halt, and [`Platform::halt`] enables them, if they were on, in the same instant it halts.
    VcpuLatch,
    /// A maskable interrupt: as [`KickKind::VcpuLatch`], and a waiter that has interrupts off may not halt at all.
    Interrupt,
}

/// Whether the tick counter has come to `deadline`. Wrapping: the counter may start anywhere.
#[inline]
pub(crate) fn passed(now: u64, deadline: u64) -> bool {
    now.wrapping_sub(deadline) as i64 >= 0
}

/// The machine, as far as the locks need it.
///
/// Methods are static so that a lock in a `static` costs nothing; on a platform with several VMs in one process they find
/// the current vCPU in thread-local state.
///
/// A waiter must stay on one vCPU from the draw of its ticket to the release: [`Scoped`](crate::Scoped) sees to it by
/// disabling preemption or interrupts; whoever uses a bare lock does so itself.
pub trait Platform: Sized + 'static {
    /// What a kick is here.
    const KICK: KickKind = KickKind::SlotLatch;

    /// The state of the VM that this code runs in.
    fn guest() -> GuestRef<'static>;

    /// The vCPU that this code runs on; `None` while it is not set up. Such a vCPU spins and never halts.
    fn current() -> Option<VcpuId>;

    /// A monotonic counter, in ticks: the time-stamp counter or what the machine has.
    fn ticks() -> u64;

    /// Tells the CPU that this is a spin-wait loop (PAUSE, YIELD). What hardware counts for pause-loop exits.
    #[inline]
    fn relax() {
        core::hint::spin_loop();
    }

    /// Spins until `ticks()` reaches `deadline`, for who knows that there is nothing to see before. A platform with TPAUSE or
    /// simulated time puts it here.
    #[inline]
    fn delay(deadline: u64) {
        while !passed(Self::ticks(), deadline) {
            Self::relax();
        }
    }

    /// Waits while `word` is `value`, at most until `ticks()` reaches `deadline`, and returns what `word` is now (loaded with
    /// Acquire). May return early. A platform with UMWAIT, WFE or simulated time puts it here.
    #[inline]
    fn wait_while(word: &Word, value: u64, deadline: u64) -> u64 {
        loop {
            Self::relax();
            // Acquire: pairs with the releasing operation of whichever lock this word belongs to.
            let now = word.load(Ordering::Acquire);
            if now != value || passed(Self::ticks(), deadline) {
                return now;
            }
        }
    }

    /// The identity under which waiters of a lock are published: opaque to the host, and different for locks that are in use at
    /// the same time. By default the lock's address; a kernel that does not show its addresses has it here.
    #[inline]
    fn lock_id<T>(lock: &T) -> LockId {
        LockId::of(lock)
    }

    /// Stops the vCPU until the latch of `slot` is set, and consumes it. `interrupts`: whether they are (or, where
    /// [`Platform::KICK`] has one latch for the vCPU, were) enabled; then an interrupt may end the halt. May return
    /// spuriously, must return if the kick came before.
    fn halt(slot: SlotIndex, interrupts: bool);

    /// Sets all latches of `vcpu` and ends its halt. Harmless if it runs.
    fn kick(vcpu: VcpuId);

    /// Whether this vCPU takes interrupts now. A platform without interrupts keeps the default.
    #[inline]
    fn interrupts_enabled() -> bool {
        false
    }

    /// Disables interrupts.
    #[inline]
    fn disable_interrupts() {}

    /// Enables interrupts.
    #[inline]
    fn enable_interrupts() {}

    /// Keeps the running task on this vCPU until [`Platform::enable_preemption`]; nests.
    #[inline]
    fn disable_preemption() {}

    /// Undoes one [`Platform::disable_preemption`].
    #[inline]
    fn enable_preemption() {}

    /// Whether this code runs in a non-maskable interrupt (or anything else that must not stop): then it only spins.
    #[inline]
    fn in_nmi() -> bool {
        false
    }

    /// Between two steps of a slow path on memory that others see. Does nothing, but on platforms that inject something there:
    /// a model's interrupt, a simulator's preemption.
    #[inline(always)]
    fn step() {}
}
