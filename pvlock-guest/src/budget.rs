//! How long a waiter spins before it halts.
//!
//! The host's word counts first: a budget for the vCPU, else one for the VM. Without one each vCPU adapts its own: it grows by
//! an eighth when spinning got the lock, and shrinks by a quarter when a full budget was spun in vain; so it settles where
//! about one spin in three is in vain, and falls fast when overcommit begins.

use crate::sync::Ordering;
use crate::{GuestRef, Platform};
use core::marker::PhantomData;
use pvlock_protocol::{RunState, VcpuId};

/// Where an adaptive budget begins, in ticks: about 10 µs on a 3 GHz counter, a few times what a halt and a kick cost on
/// hardware KVM (1–2 µs an exit), so that spinning never costs much more than halting would have.
pub const DEFAULT_SPIN_BUDGET: u64 = 1 << 15;
/// It never falls below: a hand-over between two running vCPUs takes a few hundred ticks.
pub(crate) const FLOOR: u64 = 1 << 12;
/// It never grows above: about 40 µs, what a halt and a kick cost on software KVM.
pub(crate) const CEILING: u64 = 1 << 17;

/// The budget of the vCPU that runs.
pub(crate) struct Budget<P> {
    guest: GuestRef<'static>,
    vcpu: Option<VcpuId>,
    ticks: u64,
    /// Whether it is ours to adapt.
    adaptive: bool,
    platform: PhantomData<fn() -> P>,
}

impl<P: Platform> Budget<P> {
    pub(crate) fn new() -> Self {
        let guest = P::guest();
        let vcpu = P::current();
        let header = guest.region.header.spin_budget.load(Ordering::Relaxed);
        let record = vcpu.and_then(|vcpu| guest.region.record(vcpu)).map_or(0, |record| record.spin_budget.load(Ordering::Relaxed));
        let (ticks, adaptive) = match (record, header) {
            (0, 0) => (Self::own(guest, vcpu).unwrap_or(DEFAULT_SPIN_BUDGET), true),
            (0, header) => (header, false),
            (record, _) => (record, false),
        };
        Self { guest, vcpu, ticks, adaptive, platform: PhantomData }
    }

    fn own(guest: GuestRef<'static>, vcpu: Option<VcpuId>) -> Option<u64> {
        match guest.vcpus.get(vcpu?.index())?.budget.load(Ordering::Relaxed) {
            0 => None,
            ticks => Some(ticks.into()),
        }
    }

    /// Ticks to spin.
    pub(crate) fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Spinning got the lock.
    pub(crate) fn was_enough(&self) {
        self.adapt(self.ticks + self.ticks / 8);
    }

    /// It was spun in full, in vain.
    pub(crate) fn was_too_short(&self) {
        self.adapt(self.ticks - self.ticks / 4);
    }

    /// Whether spinning is pointless: the holder is known to be off its CPU, and halting is possible.
    pub(crate) fn is_vain(&self, holder: Option<VcpuId>) -> bool {
        let record = holder.and_then(|holder| self.guest.region.record(holder));
        record.is_some_and(|record| record.run_state() == RunState::NotRunning) && self.guest.may_halt()
    }

    fn adapt(&self, ticks: u64) {
        if let (true, Some(private)) = (self.adaptive, self.vcpu.and_then(|vcpu| self.guest.vcpus.get(vcpu.index()))) {
            // Only this vCPU writes it. An interrupt in between costs one adaptation.
            private.budget.store(ticks.clamp(FLOOR, CEILING) as u32, Ordering::Relaxed);
        }
    }
}
