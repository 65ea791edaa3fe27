//! One wait: a slot claimed, published, perhaps halted, and given back. Shared by all locks.

use crate::mutation::{Mutation, active};
use crate::sync::{AtomicU64, Ordering, compiler_fence, model_failed};
use crate::{GuestRef, KickKind, Platform, waiters};
use core::marker::PhantomData;
use pvlock_protocol::{LockId, Record, SlotIndex, VcpuId, Wait, WaitState};

/// A wait in progress on this vCPU. Dropping it empties the slot and the table entry.
pub(crate) struct Waiter<P: Platform> {
    guest: GuestRef<'static>,
    record: &'static Record,
    vcpu: VcpuId,
    slot: SlotIndex,
    wait: Wait,
    /// Our entry in the table of waiters, once we have one.
    entry: Option<&'static AtomicU64>,
    platform: PhantomData<P>,
}

impl<P: Platform> Waiter<P> {
    /// Claims the slot of this nesting level and publishes the wait. `None` where that is impossible: no host, a vCPU that
    /// is not set up, an NMI, more nested waits than slots. Such a waiter only spins.
    pub(crate) fn begin(lock: LockId, ticket: u32, holder: Option<VcpuId>, is_next: bool) -> Option<Self> {
        let guest = P::guest();
        if guest.is_native() || P::in_nmi() {
            return None;
        }
        let vcpu = P::current()?;
        let record = guest.region.record(vcpu)?;
        let depth = &guest.vcpus.get(vcpu.index())?.depth;
        let level = depth.load(Ordering::Relaxed);
        let slot = SlotIndex::new(level as usize)?;
        // An interrupt from here on uses the next slot: it can neither fill ours half-way nor find it half filled. Only this
        // vCPU writes `depth`, and an interrupt restores it, so a load and a store do.
        if !active(Mutation::SlotShared) {
            depth.store(level + 1, Ordering::Relaxed);
        }
        compiler_fence(Ordering::SeqCst);
        P::step();
        let predecessor = if is_next { holder } else { Self::find(guest, lock, ticket.wrapping_sub(1)).map(|(vcpu, _)| vcpu) };
        let wait = Wait { lock, ticket, state: WaitState::Spinning, predecessor, holder };
        record.slot(slot).publish(&wait);
        P::step();
        let entry = waiters::enter(guest.waiters, lock, ticket, vcpu);
        Some(Self { guest, record, vcpu, slot, wait, entry, platform: PhantomData })
    }

    /// Who waits for `lock` with `ticket`, and how, if it is in the table. Exact for waiters that halted before the caller
    /// acquired the lock's word.
    pub(crate) fn find(guest: GuestRef<'static>, lock: LockId, ticket: u32) -> Option<(VcpuId, WaitState)> {
        waiters::find(guest.waiters, lock, ticket).find_map(|vcpu| {
            let record = guest.region.record(vcpu)?;
            let wait =
                record.slots.iter().filter_map(|slot| slot.read()).find(|wait| wait.lock == lock && wait.ticket == ticket)?;
            Some((vcpu, wait.state))
        })
    }

    /// Notes a hand-over that the waiter saw while spinning.
    pub(crate) fn holder_is(&mut self, holder: Option<VcpuId>) {
        if self.wait.holder != holder {
            self.wait.holder = holder;
            self.record.slot(self.slot).update(&self.wait);
        }
    }

    /// Halts once, if that is allowed here and `announce` agrees.
    ///
    /// The slot says "halting" before `announce` runs, which tells the releaser (or makes sure that the next owner will
    /// see the slot) by a read-modify-write on the lock's word and returns whether there is still something to wait for.
    /// `is_next`: whether the releaser will be told directly; otherwise the waiter must be in the table.
    ///
    /// False if a halt is not allowed here: then the caller has to spin.
    pub(crate) fn halt(&mut self, is_next: bool, announce: impl FnOnce(VcpuId) -> bool) -> bool {
        let interrupts = P::interrupts_enabled();
        let deaf = P::KICK == KickKind::Interrupt && !interrupts && !active(Mutation::HaltDeaf);
        let unseen = !is_next && self.entry.is_none() && !active(Mutation::HaltOutsideTable);
        if deaf || unseen || !self.guest.may_halt() {
            return false;
        }
        if !active(Mutation::AnnounceBeforeState) {
            self.set_state(WaitState::Halting);
        }
        P::step();
        let masked = interrupts && P::KICK != KickKind::SlotLatch && !active(Mutation::HaltUnmasked);
        if masked {
            P::disable_interrupts();
        }
        let announced = announce(self.vcpu);
        if active(Mutation::AnnounceBeforeState) {
            self.set_state(WaitState::Halting);
        }
        P::step();
        if announced {
            P::halt(self.slot, interrupts);
        }
        if masked {
            P::enable_interrupts();
        }
        P::step();
        self.set_state(WaitState::Spinning);
        P::step();
        true
    }

    fn set_state(&mut self, state: WaitState) {
        self.wait.state = state;
        self.record.slot(self.slot).update(&self.wait);
    }
}

impl<P: Platform> Drop for Waiter<P> {
    fn drop(&mut self) {
        if model_failed() {
            return;
        }
        P::step();
        if let Some(entry) = self.entry {
            waiters::leave(entry);
        }
        self.record.slot(self.slot).clear();
        compiler_fence(Ordering::SeqCst);
        P::step();
        // `begin` found the vCPU in range.
        if let Some(private) = self.guest.vcpus.get(self.vcpu.index()) {
            private.depth.store(self.slot.index() as u32, Ordering::Relaxed);
        }
    }
}
