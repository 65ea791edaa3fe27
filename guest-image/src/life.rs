//! Lives of a vCPU, for a soak: between two critical sections, where it holds no lock and waits for none, it goes offline and
//! comes back, is reset, or (vCPU 0) unregisters the region and registers it anew.

use crate::bare::Bare;
use crate::job::Job;
use core::marker::PhantomData;
use core::sync::atomic::Ordering;
use pvlock_guest::protocol::VcpuId;

/// The present life of one vCPU.
pub(crate) struct Life<'a, P> {
    job: &'a Job,
    vcpu: usize,
    every: u64,
    registrations: u32,
    platform: PhantomData<fn() -> P>,
}

impl<'a, P: Bare> Life<'a, P> {
    pub(crate) fn new(job: &'a Job, vcpu: usize) -> Self {
        let every = job.churn.load(Ordering::Relaxed).into();
        let registrations = job.registrations.load(Ordering::Relaxed);
        Self { job, vcpu, every, registrations, platform: PhantomData }
    }

    /// After so many critical sections of this vCPU: perhaps its life ends, and another begins. `random` says how.
    pub(crate) fn step(&mut self, sections: u64, random: u64) {
        if self.every == 0 {
            return;
        }
        // Acquire: pairs with `register`.
        let registrations = self.job.registrations.load(Ordering::Acquire);
        let (due, seen) = (sections.is_multiple_of(self.every), registrations == self.registrations);
        self.registrations = registrations;
        let (Some(id), Some(doorbell)) = (VcpuId::new(self.vcpu), P::doorbell()) else { return };
        // What the host answers does not matter here: it may have been reset behind our back. Then waiters spin.
        if due {
            match random >> 40 & 3 {
                0 => _ = P::guest().offline(&doorbell, id),
                1 => P::reset(),
                _ if self.vcpu == 0 => self.register(),
                _ => {}
            }
        }
        if due || !seen {
            _ = P::guest().online(&doorbell, id);
        }
    }

    fn register(&mut self) {
        let (guest, Some(doorbell)) = (P::guest(), P::doorbell()) else { return };
        let running = (0..self.job.vcpus.load(Ordering::Relaxed) as usize).filter_map(VcpuId::new);
        _ = guest.unregister(&doorbell);
        _ = guest.register(&doorbell, P::pfn(), running);
        // Release: who sees it comes online after it was listed.
        self.registrations = 1 + self.job.registrations.fetch_add(1, Ordering::Release);
    }
}
