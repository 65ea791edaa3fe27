//! What a host in user space needs around the engine: threads that sleep, a clock, and the way from a doorbell to a sleep.
//!
//! [`Driver`] is the same for vCPUs that are plain threads ([`threads`]) and for those that run in KVM ([`kvm`]).

mod futex;
mod parker;
mod poller;

#[cfg(feature = "kvm")]
mod kicker;
#[cfg(feature = "kvm")]
pub mod kvm;
#[cfg(feature = "threads")]
pub mod threads;

use crate::{
    Config, Decision, Engine, EngineError, GuestMemory, Placement, Scheduler, Sleeper, Statistics, Unpark, Verdict, Waker, Yields,
};
use crossbeam_utils::CachePadded;
#[cfg(pvlock_loom)]
pub use parker::Parker;
#[cfg(not(pvlock_loom))]
use parker::Parker;
use parking_lot::Mutex;
use pvlock_hypercalls::{Access, Doorbell};
use pvlock_protocol::{HostFlags, VcpuId};
use std::boxed::Box;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How a doorbell ended for the thread that rang it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Go back to the guest.
    Resume,
    /// The same, but a signal ended a sleep: see to whatever it was sent for first.
    Signal,
}

/// An engine whose vCPUs are threads of this process. Dropping it ends its own threads, if it has any.
pub struct Driver<M> {
    inner: Arc<Inner<M>>,
    poller: Mutex<Option<JoinHandle<()>>>,
    #[cfg(feature = "kvm")]
    kicker: Mutex<Option<kicker::Kicker>>,
}

/// What the vCPUs' threads share with the driver's own.
struct Inner<M> {
    engine: Engine<M, parking_lot::RawMutex>,
    parkers: Box<[CachePadded<Parker>]>,
    started: Instant,
    placement: OnceLock<Box<dyn Fn(VcpuId) -> Placement + Send + Sync>>,
    /// Tells the poller.
    bell: poller::Bell,
}

/// The driver as the engine sees it. User space cannot yield to one thread, and knows no run queues; of vCPUs that do not sleep
/// here it knows what the VMM has told it to ask.
struct Machine<'a, M>(&'a Inner<M>);

impl<M: GuestMemory> Scheduler for Machine<'_, M> {
    fn placement(&self, vcpu: VcpuId) -> Placement {
        self.0.placement.get().map_or(Placement::Unknown, |placement| placement(vcpu))
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

impl<M: GuestMemory + 'static> Driver<M> {
    /// A driver for a VM with this many vCPUs. Starts a poller's thread if the policy asks for one.
    ///
    /// # Errors
    ///
    /// See [`Engine::new`]; or that thread cannot be started.
    pub fn new(config: Config, vcpus: usize, memory: M) -> Result<Self, EngineError> {
        let inner = Inner {
            engine: Engine::new(config, vcpus, memory)?,
            parkers: (0..vcpus).map(|_| CachePadded::new(Parker::new())).collect(),
            started: Instant::now(),
            placement: OnceLock::new(),
            bell: poller::Bell::new(),
        };
        let driver = Self {
            inner: Arc::new(inner),
            poller: Mutex::new(None),
            #[cfg(feature = "kvm")]
            kicker: Mutex::new(None),
        };
        driver.start_poller().map_err(|error| EngineError::Thread(error.kind()))?;
        Ok(driver)
    }

    fn start_poller(&self) -> std::io::Result<()> {
        let mut poller = self.poller.lock();
        if let (None, Some(settings)) = (&*poller, self.inner.engine.config().policy.poller) {
            *poller = Some(poller::start(&self.inner, settings)?);
        }
        Ok(())
    }

    /// The VM runs again.
    pub fn resume(&self) {
        self.inner.engine.resume();
        // Without it every kick is rung, as before the pause: slower, no worse.
        let _ = self.start_poller();
    }
}

impl<M> Driver<M> {
    fn end_poller(&self) {
        if let Some(poller) = self.poller.lock().take() {
            self.inner.bell.stop();
            // It has panicked at worst; then kicks that it has not seen end in deadlines.
            let _ = poller.join();
        }
    }

    fn end_threads(&self) {
        self.end_poller();
        #[cfg(feature = "kvm")]
        if let Some(kicker) = self.kicker.lock().take() {
            kicker.end();
        }
    }
}

impl<M> Drop for Driver<M> {
    fn drop(&mut self) {
        self.end_threads();
    }
}

impl<M: GuestMemory> Driver<M> {
    /// Asks `placement` where a vCPU is that does not sleep here: on hardware KVM the "preempted" flag of the guest's
    /// steal-time record says so. Without it that is unknown, and nothing is guessed. An answer serves to choose whom to yield
    /// to; nobody is parked because of it, as nobody would say when it ends.
    #[must_use]
    pub fn with_placement(self, placement: impl Fn(VcpuId) -> Placement + Send + Sync + 'static) -> Self {
        // Only the first counts.
        let _ = self.inner.placement.set(Box::new(placement));
        self
    }

    fn machine(&self) -> Machine<'_, M> {
        Machine(&self.inner)
    }

    /// The thread of `vcpu` decoded this access to the doorbell. Sleeps if the engine says so. `answer` is called with the
    /// word that a read returns.
    pub fn access(&self, vcpu: VcpuId, access: Access, answer: impl FnOnce(u32)) -> Outcome {
        match access {
            Access::Ring(word) => self.ring(vcpu, word),
            Access::Answer => {
                answer(self.inner.engine.answer(vcpu));
                Outcome::Resume
            }
            // A word that is no doorbell: refused and counted.
            Access::Malformed => self.ring(vcpu, 0),
        }
    }

    /// The thread of `vcpu` rang this word. Sleeps or yields if the engine says so.
    pub fn ring(&self, vcpu: VcpuId, word: u32) -> Outcome {
        if self.inner.engine.config().policy.poller.is_some()
            && let Some(Doorbell::Kick(_)) = Doorbell::decode(word)
        {
            self.inner.bell.kick();
        }
        let verdict = self.inner.engine.doorbell(vcpu, word, self.now(), &self.machine());
        self.carry_out(vcpu, verdict)
    }

    /// The thread of `vcpu` has seen a pause-loop exit that was no doorbell. Sleeps or yields if the engine says so.
    pub fn pause_loop(&self, vcpu: VcpuId) -> Outcome {
        let verdict = self.inner.engine.pause_loop(vcpu, self.now(), &self.machine());
        self.carry_out(vcpu, verdict)
    }

    fn carry_out(&self, vcpu: VcpuId, verdict: Verdict) -> Outcome {
        match (verdict, self.inner.parkers.get(vcpu.index())) {
            (Verdict::Park(park), Some(parker)) => {
                let how = parker.park(self.inner.started + Duration::from_nanos(park.until));
                self.inner.engine.unparked(vcpu, how, self.now(), &self.machine());
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
        self.inner.engine.set_flags(flags, &self.machine());
    }

    fn now(&self) -> u64 {
        self.inner.started.elapsed().as_nanos() as u64
    }

    /// An interrupt or an NMI was injected into `vcpu`: ends its sleep if it takes interrupts.
    pub fn interrupt(&self, vcpu: VcpuId) {
        self.inner.engine.interrupt(vcpu, &self.machine());
    }

    /// `vcpu` was reset.
    pub fn reset(&self, vcpu: VcpuId) {
        self.inner.engine.reset(vcpu, &self.machine());
    }

    /// The VM was reset: forgets the region and everything about the vCPUs. Call it before the guest's memory is reused.
    pub fn reset_vm(&self) {
        self.inner.engine.reset_vm(&self.machine());
    }

    /// Ends all sleeps, and lets nobody sleep until [`Driver::resume`]: before pausing or saving the VM. Nobody polls
    /// meanwhile, and a saved region says so.
    pub fn pause(&self) {
        self.end_poller();
        self.inner.engine.pause(&self.machine());
    }

    /// Ends all sleeps for good, and the driver's own threads.
    pub fn shut_down(&self) {
        // Who kicks after this rings; who halted before is woken.
        self.end_poller();
        self.inner.engine.shut_down(&self.machine());
        // Nobody halts any more.
        self.end_threads();
    }

    /// See [`Engine::check_queues`].
    #[doc(hidden)]
    pub fn check_queues(&self) -> Result<std::vec::Vec<std::vec::Vec<VcpuId>>, &'static str> {
        self.inner.engine.check_queues()
    }

    /// Counts of all vCPUs.
    pub fn statistics(&self) -> Statistics {
        self.inner.engine.statistics()
    }

    /// Counts of one vCPU.
    pub fn vcpu_statistics(&self, vcpu: VcpuId) -> Statistics {
        self.inner.engine.vcpu_statistics(vcpu)
    }

    /// Every sleeper and why it sleeps.
    pub fn dump(&self) -> impl Iterator<Item = Sleeper> {
        self.inner.engine.dump(self.now())
    }
}
