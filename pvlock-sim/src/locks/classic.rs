//! The paravirtual ticket lock as it was first published: spin for a threshold, halt; the releaser kicks who has the next
//! ticket, if somebody has said that it halted.

use crate::platform::Sim;
use pvlock_guest::{Platform, Word};
use pvlock_host::protocol::{SlotIndex, VcpuId};
use std::cell::RefCell;
use std::sync::atomic::Ordering;

/// Looks before a waiter halts, each with a PAUSE: as in the first series.
const SPIN_THRESHOLD: u64 = 1 << 11;
/// Cycles of such a look beside its PAUSE.
const LOOK: u64 = 4;
/// PAUSE of the processors of that time, in cycles.
const PAUSE: u64 = 10;

/// The lock.
#[derive(Debug, Default)]
pub(crate) struct ClassicTicket {
    next: Word,
    serving: Word,
    /// Halted waiters. A vCPU operates on it without letting time pass.
    halted: RefCell<Vec<(u64, VcpuId)>>,
}

impl ClassicTicket {
    pub(crate) fn lock(&self) {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = SlotIndex::new(0);
        loop {
            let deadline = Sim::ticks() + SPIN_THRESHOLD * (PAUSE + LOOK);
            // Acquire: pairs with the release in `unlock`.
            let mut serving = self.serving.load(Ordering::Acquire);
            while serving != ticket && Sim::ticks() < deadline {
                serving = Sim::wait_while(&self.serving, serving, deadline);
            }
            if serving == ticket {
                return;
            }
            let (Some(vcpu), Some(slot)) = (Sim::current(), slot) else { continue };
            self.halted.borrow_mut().push((ticket, vcpu));
            if self.serving.load(Ordering::Acquire) != ticket {
                Sim::halt(slot, true);
            }
            self.halted.borrow_mut().retain(|&(halted, _)| halted != ticket);
        }
    }

    pub(crate) fn unlock(&self) {
        let next = self.serving.fetch_add(1, Ordering::Release) + 1;
        let kicked = self.halted.borrow().iter().find(|&&(ticket, _)| ticket == next).map(|&(_, vcpu)| vcpu);
        if let Some(vcpu) = kicked {
            Sim::kick(vcpu);
        }
    }
}
