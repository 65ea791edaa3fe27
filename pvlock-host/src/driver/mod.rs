//! What a host in user space needs around the engine: threads that sleep, a clock, and the way from a doorbell to a sleep.
//!
//! [`Driver`] is the same for vCPUs that are plain threads ([`threads`]) and for those that run in KVM ([`kvm`]).

mod parker;

#[cfg(feature = "kvm")]
pub mod kvm;
#[cfg(feature = "threads")]
pub mod threads;

use crate::{Config, Engine, EngineError, GuestMemory, Sleeper, Statistics, Unpark, Verdict};
use crossbeam_utils::CachePadded;
use parker::Parker;
use pvlock_hypercalls::Access;
use pvlock_protocol::VcpuId;
use std::boxed::Box;
use std::time::{Duration, Instant};

/// How a doorbell ended for the thread that rang it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Go back to the guest.
    Resume,
    /// The same, but a signal ended a sleep: see to whatever it was sent for first.
    Signal,
}

/// An engine whose vCPUs are threads of this process.
pub struct Driver<M> {
    engine: Engine<M, parking_lot::RawMutex>,
    parkers: Box<[CachePadded<Parker>]>,
    started: Instant,
}

impl<M: GuestMemory> Driver<M> {
    /// A driver for a VM with this many vCPUs.
    ///
    /// # Errors
    ///
    /// See [`Engine::new`].
    pub fn new(config: Config, vcpus: usize, memory: M) -> Result<Self, EngineError> {
        Ok(Self {
            engine: Engine::new(config, vcpus, memory)?,
            parkers: (0..vcpus).map(|_| CachePadded::new(Parker::new())).collect(),
            started: Instant::now(),
        })
    }

    /// The thread of `vcpu` decoded this access to the doorbell. Sleeps if the engine says so. `answer` is called with the
    /// word that a read returns.
    pub fn access(&self, vcpu: VcpuId, access: Access, answer: impl FnOnce(u32)) -> Outcome {
        match access {
            Access::Ring(word) => self.ring(vcpu, word),
            Access::Answer => {
                answer(self.engine.answer(vcpu));
                Outcome::Resume
            }
            // A word that is no doorbell: refused and counted.
            Access::Malformed => self.ring(vcpu, 0),
        }
    }

    /// The thread of `vcpu` rang this word. Sleeps if the engine says so.
    pub fn ring(&self, vcpu: VcpuId, word: u32) -> Outcome {
        let waker = |vcpu: VcpuId| self.wake(vcpu);
        let (Verdict::Park(park), Some(parker)) =
            (self.engine.doorbell(vcpu, word, self.now(), &waker), self.parkers.get(vcpu.index()))
        else {
            return Outcome::Resume;
        };
        let how = parker.park(self.started + Duration::from_nanos(park.until));
        self.engine.unparked(vcpu, how, self.now(), &waker);
        if how == Unpark::Signal { Outcome::Signal } else { Outcome::Resume }
    }

    fn wake(&self, vcpu: VcpuId) {
        if let Some(parker) = self.parkers.get(vcpu.index()) {
            parker.unpark();
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// An interrupt was injected into `vcpu`: ends its sleep if it takes interrupts.
    pub fn interrupt(&self, vcpu: VcpuId) {
        self.engine.interrupt(vcpu, &|vcpu| self.wake(vcpu));
    }

    /// `vcpu` was reset.
    pub fn reset(&self, vcpu: VcpuId) {
        self.engine.reset(vcpu, &|vcpu| self.wake(vcpu));
    }

    /// The VM was reset: forgets the region and everything about the vCPUs. Call it before the guest's memory is reused.
    pub fn reset_vm(&self) {
        self.engine.reset_vm(&|vcpu| self.wake(vcpu));
    }

    /// Ends all sleeps, and lets nobody sleep until [`Driver::resume`]: before pausing or saving the VM.
    pub fn pause(&self) {
        self.engine.pause(&|vcpu| self.wake(vcpu));
    }

    /// The VM runs again.
    pub fn resume(&self) {
        self.engine.resume();
    }

    /// Ends all sleeps for good.
    pub fn shut_down(&self) {
        self.engine.shut_down(&|vcpu| self.wake(vcpu));
    }

    /// See [`Engine::check_queues`].
    #[doc(hidden)]
    pub fn check_queues(&self) -> Result<std::vec::Vec<std::vec::Vec<VcpuId>>, &'static str> {
        self.engine.check_queues()
    }

    /// Counts of all vCPUs.
    pub fn statistics(&self) -> Statistics {
        self.engine.statistics()
    }

    /// Counts of one vCPU.
    pub fn vcpu_statistics(&self, vcpu: VcpuId) -> Statistics {
        self.engine.vcpu_statistics(vcpu)
    }

    /// Every sleeper and why it sleeps.
    pub fn dump(&self) -> impl Iterator<Item = Sleeper> {
        self.engine.dump(self.now())
    }
}
