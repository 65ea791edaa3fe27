//! How long a waiter spins before it halts.
//!
//! The host's word counts first: a budget for the vCPU, else one for the VM. Without one each vCPU adapts its own, by what
//! would have been better in hindsight:
//!
//! | the wait | so | the budget |
//! |---|---|---|
//! | ended while spinning, in the first half of the budget | it is long enough | stays |
//! | ended while spinning, in the second half | it was close | grows by an eighth |
//! | outlasted the budget, but was short against a time slice | sections are longer than thought: the sleep was premature | doubles |
//! | outlasted the budget by far | the holder was off its CPU: no spinning would have helped | shrinks by an eighth |

use crate::sync::Ordering;
use crate::{GuestRef, Platform};
use core::marker::PhantomData;
use pvlock_protocol::{RunState, VcpuId};

/// Where an adaptive budget begins, in ticks: about 10 µs on a 3 GHz counter, a few times what a halt and a kick cost on
/// hardware KVM (1–2 µs an exit), so that spinning never costs much more than halting would have.
pub const DEFAULT_SPIN_BUDGET: u64 = 1 << 15;
/// It never falls below: a hand-over between two running vCPUs takes a few hundred ticks, a short section as long.
pub(crate) const FLOOR: u64 = 1 << 13;
/// It never grows above: about 40 µs, what a halt and a kick cost on software KVM.
pub(crate) const CEILING: u64 = 1 << 17;
/// Longest budget taken from a host, in ticks: "for ever".
const LONGEST: u64 = u64::MAX / 8;
/// What tells a wait for a section from a wait for a scheduler: about 350 µs. Time slices are several ms (4 ms observed on
/// the Linux lists), sleeping and waking takes 100 to 200 µs where exits are slowest, and sections under a spinlock less.
pub(crate) const SCHEDULER: u64 = 1 << 20;

/// The budget of the vCPU that runs.
pub(crate) struct Budget<P> {
    guest: GuestRef<'static>,
    vcpu: Option<VcpuId>,
    ticks: u64,
    /// When the wait began.
    began: u64,
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
        // A deadline further ahead than half the counter's range would look as if it had passed.
        Self { guest, vcpu, ticks: ticks.min(LONGEST), began: P::ticks(), adaptive, platform: PhantomData }
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

    /// When the wait began, in ticks.
    pub(crate) fn began(&self) -> u64 {
        self.began
    }

    /// The wait is over: what do we learn for the next?
    pub(crate) fn learn(&self) {
        if self.adaptive {
            self.adapt(adapted(self.ticks, P::ticks().wrapping_sub(self.began)));
        }
    }

    /// Whether spinning is pointless: the holder is known to be off its CPU, and halting is possible.
    pub(crate) fn is_vain(&self, holder: Option<VcpuId>) -> bool {
        let record = holder.and_then(|holder| self.guest.region.record(holder));
        record.is_some_and(|record| record.run_state() == RunState::NotRunning) && self.guest.may_halt()
    }

    fn adapt(&self, ticks: u64) {
        if let Some(private) = self.vcpu.and_then(|vcpu| self.guest.vcpus.get(vcpu.index())) {
            // Only this vCPU writes it. An interrupt in between costs one adaptation.
            private.budget.store(ticks as u32, Ordering::Relaxed);
        }
    }
}

/// The budget after one of `budget` ticks met a wait of `waited`.
fn adapted(budget: u64, waited: u64) -> u64 {
    let adapted = match waited {
        _ if waited <= budget / 2 => budget,
        _ if waited <= budget => budget + budget / 8,
        _ if waited < SCHEDULER => budget * 2,
        _ => budget - budget / 8,
    };
    adapted.clamp(FLOOR, CEILING)
}

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;

    /// Budgets after many waits of the same length.
    fn settled(waited: u64) -> (u64, u64) {
        let mut budget = DEFAULT_SPIN_BUDGET;
        let mut range = (u64::MAX, 0);
        for round in 0..1000 {
            budget = adapted(budget, waited);
            if round > 100 {
                range = (range.0.min(budget), range.1.max(budget));
            }
        }
        range
    }

    #[test]
    fn the_budget_settles_above_the_length_of_sections_and_below_its_ceiling() {
        for waited in [1, 1000, FLOOR, 20_000, 40_000] {
            let (least, most) = settled(waited);
            assert!(least >= waited.max(FLOOR) && most <= CEILING, "{waited}: {least}..{most}");
        }
        assert_eq!(settled(CEILING + 1), (CEILING, CEILING), "sections too long to spin for, but short");
    }

    #[test]
    fn waits_for_a_scheduler_bring_it_down_to_the_floor() {
        assert_eq!(settled(SCHEDULER), (FLOOR, FLOOR));
    }
}
