//! What a host in user space needs around the engine: threads that sleep, a clock, and the way from a doorbell to a sleep.
//!
//! [`Driver`] is the same for vCPUs that are plain threads ([`threads`]) and for those that run in KVM ([`kvm`]).

mod parker;

#[cfg(feature = "kvm")]
pub mod kvm;
#[cfg(feature = "threads")]
pub mod threads;

use crate::{
    Config, Decision, Engine, EngineError, GuestMemory, Placement, Scheduler, Sleeper, Statistics, Unpark, Verdict, Waker, Yields,
};
use crossbeam_utils::CachePadded;
use parker::Parker;
use pvlock_hypercalls::Access;
use pvlock_protocol::{HostFlags, VcpuId};
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
    placement: Option<Box<dyn Fn(VcpuId) -> Placement + Send + Sync>>,
}

/// The driver as the engine sees it. User space cannot yield to one thread, and knows no run queues; of vCPUs that do not sleep
/// here it knows what the VMM has told it to ask.
struct Machine<'a, M>(&'a Driver<M>);

impl<M: GuestMemory> Scheduler for Machine<'_, M> {
    fn placement(&self, vcpu: VcpuId) -> Placement {
        self.0.placement.as_ref().map_or(Placement::Unknown, |placement| placement(vcpu))
    }

    fn yields(&self) -> Yields {
        Yields::Plain
    }
}

impl<M: GuestMemory> Waker for Machine<'_, M> {
    fn wake(&self, vcpu: VcpuId) {
        if let Some(parker) = self.0.parkers.get(vcpu.index()) {
            parker.unpark();
        }
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }

    fn decided(&self, vcpu: VcpuId, decision: Decision) {
        #[cfg(feature = "tracing")]
        tracing::trace!(target: "pvlock", vcpu = vcpu.index(), decision = decision.name());
        #[cfg(not(feature = "tracing"))]
        let _ = (vcpu, decision);
    }
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
            placement: None,
        })
    }

    /// Asks `placement` where a vCPU is that does not sleep here: on hardware KVM the "preempted" flag of the guest's
    /// steal-time record says so. Without it that is unknown, and nothing is guessed. An answer serves to choose whom to yield
    /// to; nobody is parked because of it, as nobody would say when it ends.
    #[must_use]
    pub fn with_placement(mut self, placement: impl Fn(VcpuId) -> Placement + Send + Sync + 'static) -> Self {
        self.placement = Some(Box::new(placement));
        self
    }

    fn machine(&self) -> Machine<'_, M> {
        Machine(self)
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

    /// The thread of `vcpu` rang this word. Sleeps or yields if the engine says so.
    pub fn ring(&self, vcpu: VcpuId, word: u32) -> Outcome {
        let verdict = self.engine.doorbell(vcpu, word, self.now(), &self.machine());
        self.carry_out(vcpu, verdict)
    }

    /// The thread of `vcpu` has seen a pause-loop exit that was no doorbell. Sleeps or yields if the engine says so.
    pub fn pause_loop(&self, vcpu: VcpuId) -> Outcome {
        let verdict = self.engine.pause_loop(vcpu, self.now(), &self.machine());
        self.carry_out(vcpu, verdict)
    }

    fn carry_out(&self, vcpu: VcpuId, verdict: Verdict) -> Outcome {
        match (verdict, self.parkers.get(vcpu.index())) {
            (Verdict::Park(park), Some(parker)) => {
                let how = parker.park(self.started + Duration::from_nanos(park.until));
                self.engine.unparked(vcpu, how, self.now(), &self.machine());
                if how == Unpark::Signal { Outcome::Signal } else { Outcome::Resume }
            }
            (Verdict::Yield(_) | Verdict::YieldTo(..), _) => {
                std::thread::yield_now();
                Outcome::Resume
            }
            (Verdict::Resume(_) | Verdict::Park(_), _) => Outcome::Resume,
        }
    }

    /// Changes what the guest is told while it runs, and ends all sleeps, as they began under the old settings.
    pub fn set_flags(&self, flags: HostFlags) {
        self.engine.set_flags(flags, &self.machine());
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// An interrupt was injected into `vcpu`: ends its sleep if it takes interrupts.
    pub fn interrupt(&self, vcpu: VcpuId) {
        self.engine.interrupt(vcpu, &self.machine());
    }

    /// `vcpu` was reset.
    pub fn reset(&self, vcpu: VcpuId) {
        self.engine.reset(vcpu, &self.machine());
    }

    /// The VM was reset: forgets the region and everything about the vCPUs. Call it before the guest's memory is reused.
    pub fn reset_vm(&self) {
        self.engine.reset_vm(&self.machine());
    }

    /// Ends all sleeps, and lets nobody sleep until [`Driver::resume`]: before pausing or saving the VM.
    pub fn pause(&self) {
        self.engine.pause(&self.machine());
    }

    /// The VM runs again.
    pub fn resume(&self) {
        self.engine.resume();
    }

    /// Ends all sleeps for good.
    pub fn shut_down(&self) {
        self.engine.shut_down(&self.machine());
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
