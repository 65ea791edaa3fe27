//! Kicks without doorbells: while a poller is awake, guests only count them in the kick words of their records.
//!
//! ```text
//! guest that kicks v                         poller that goes to sleep
//!   v.kick_word += 1                           flags := without POLLER
//!   fence(SeqCst)                              fence(SeqCst)
//!   POLLER still set?  no: ring                looks at every kick word once more
//! ```
//!
//! One of the fences comes first: either the guest sees that the poller is gone and rings, or the last look sees its kick. Both
//! may happen; a kick too many is a spurious return.

use crate::mutation::{Mutation, active};
use crate::statistics::Counters;
use crate::sync::{Ordering, fence};
use crate::{Engine, GuestMemory, Waker};
use pvlock_protocol::{Features, HostFlags, VcpuId};

impl<M: GuestMemory, R: lock_api::RawMutex> Engine<M, R> {
    /// A poller is awake from now on: it calls [`Engine::poll`] again and again until [`Engine::poller_sleeps`]. `false` if
    /// the guest does not count its kicks, or no region is registered: then there is nothing to poll for.
    pub fn poller_wakes(&self) -> bool {
        let accepted = Features::from_bits(self.policies.accepted.load(Ordering::Relaxed));
        let counts = self.config.policy.poller.is_some() && accepted.contains(Features::KICK_WORD) && self.registered().is_some();
        if counts {
            self.change_flags(|flags| flags.union(HostFlags::POLLER));
        }
        counts
    }

    /// Delivers what has been counted since the last look, once for each vCPU; returns how many that were. One thread at a
    /// time calls it. One load for each vCPU.
    pub fn poll(&self, waker: &impl Waker) -> usize {
        // The guest after a reset counts from 0, and may come to what was seen of the one before. Asked for before the region is:
        // at worst this region's words are taken for news once more.
        let life = self.registrations_ended();
        let Some(region) = self.registered() else { return 0 };
        let mut kicked = 0;
        for vcpu in self.vcpus() {
            let Some(own) = self.vcpu(vcpu) else { break };
            // The guest's word, read once. Any change is a kick, whatever it says.
            if self.policies.kicks_are_news(vcpu, life, region.kick_word(vcpu)) {
                kicked += 1;
                Counters::count(&own.counters.polled);
                self.kicked(vcpu, waker);
            }
        }
        kicked
    }

    /// `target` was kicked, and nobody knows by whom: the kick was seen by a poller, or came through an eventfd. Counts in no
    /// limit, as kicks that come together are one.
    ///
    /// A target that sleeps on its holder's queue is kicked by that holder; others hand no queue over.
    pub fn kicked(&self, target: VcpuId, waker: &impl Waker) {
        let Some(own) = self.vcpu(target) else { return };
        Counters::count(&own.counters.kicks);
        // Before the kick lets it wait for something else.
        let (lock, from) = (own.link.lock.load(Ordering::Relaxed), own.link.owner());
        if own.kick() {
            waker.wake(target);
        }
        if let Some(from) = from {
            self.hand_over(from, target, lock, waker);
        }
    }

    /// The poller goes to sleep: guests ring again, and what they counted until they saw that is delivered.
    pub fn poller_sleeps(&self, waker: &impl Waker) {
        self.change_flags(|flags| flags.without(HostFlags::POLLER));
        // SeqCst: pairs with the guest's in `RegionRef::announce_kick`.
        if !active(Mutation::PollerNotFenced) {
            fence(Ordering::SeqCst);
        }
        if !active(Mutation::NoLastLook) {
            self.poll(waker);
        }
    }
}
