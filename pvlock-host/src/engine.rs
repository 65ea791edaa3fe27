//! The engine: events in, verdicts out.

use crate::config::{Config, ConfigError, Queue, RunStates};
use crate::decision::Decision;
use crate::event::{Park, Resume, Unpark, Verdict, Waker};
use crate::mutation::{Mutation, active};
use crate::policy::{self, Metered};
use crate::queue::{Enqueued, Kind, Queues};
use crate::registration::{Registered, Registration};
use crate::statistics::{Counters, Statistics};
use crate::sync::{AtomicU32, Lock, Ordering};
use crate::vcpu::{Halted, Reason, Vcpu};
use crate::{GuestMemory, Sleeper};
use alloc::boxed::Box;
use crossbeam_utils::CachePadded;
use pvlock_hypercalls::{Doorbell, Status};
use pvlock_protocol::{Geometry, HostFlags, PAGE_SIZE, RunState, SlotIndex, VcpuId, Wait};

/// Bits of [`Engine::stopped`]: nobody parks while one is set.
const PAUSED: u32 = 1;
const SHUT_DOWN: u32 = 2;

/// The paravirtual-lock host of one VM.
///
/// `M` reaches the guest's memory, `R` is the lock around each vCPU's wait queue (see `lock_api`): a futex lock in user
/// space, an interrupt-safe one in a hypervisor.
///
/// A vCPU's own events (doorbells, `unparked`, `scheduled_*`) come from one thread at a time; everything else from anywhere.
pub struct Engine<M, R> {
    pub(crate) config: Config,
    memory: M,
    registration: Registration,
    /// What the policies remember.
    pub(crate) policies: policy::State,
    /// Serialises REGISTER, UNREGISTER, ONLINE and the header's flags. Taken before any queue's lock.
    pub(crate) registering: Lock<R, ()>,
    stopped: AtomicU32,
    vcpus: Box<[CachePadded<Vcpu<R>>]>,
}

/// Why an engine cannot be made, or an event names something that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// See [`ConfigError`].
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A driver cannot start the thread of the poller that the policy asks for.
    #[cfg(feature = "std")]
    #[error("the poller's thread cannot be started: {0}")]
    Thread(std::io::ErrorKind),
}

impl<M: GuestMemory, R: lock_api::RawMutex> Engine<M, R> {
    /// An engine for a VM with this many vCPUs. All allocation happens here.
    ///
    /// # Errors
    ///
    /// A configuration that could put a vCPU to sleep for ever, or a number of vCPUs the protocol cannot name.
    pub fn new(config: Config, vcpus: usize, memory: M) -> Result<Self, EngineError> {
        config.check(vcpus)?;
        Ok(Self {
            config,
            memory,
            registration: Registration::new(),
            policies: policy::State::new(&config, vcpus),
            registering: Lock::new(()),
            stopped: AtomicU32::new(0),
            vcpus: (0..vcpus).map(|_| CachePadded::new(Vcpu::new())).collect(),
        })
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The VM's vCPUs.
    pub fn vcpus(&self) -> impl Iterator<Item = VcpuId> + use<M, R> {
        (0..self.vcpus.len()).filter_map(VcpuId::new)
    }

    pub(crate) fn vcpu(&self, id: VcpuId) -> Option<&Vcpu<R>> {
        self.vcpus.get(id.index()).map(|vcpu| &**vcpu)
    }

    pub(crate) fn queues(&self) -> Queues<'_, R> {
        Queues(&self.vcpus)
    }

    pub(crate) fn registered(&self) -> Option<Registered<'_, M>> {
        self.registration.get(&self.memory)
    }

    pub(crate) fn registrations_ended(&self) -> u64 {
        self.registration.ended()
    }

    // ---- doorbells -------------------------------------------------------------------------------------------------

    /// `vcpu` rang this word at `now` ns of the driver's clock. Never fails: what makes no sense is refused and counted.
    pub fn doorbell(&self, vcpu: VcpuId, word: u32, now: u64, waker: &impl Waker) -> Verdict {
        let Some(own) = self.vcpu(vcpu) else { return Verdict::Resume(Resume::Refused) };
        let status = match Doorbell::decode(word) {
            Some(Doorbell::Halt { slot, interrupts }) => {
                let verdict = self.halt(vcpu, slot, interrupts, now);
                return self.settle(vcpu, Metered::Halt, verdict, Decision::of(&verdict), now, waker);
            }
            Some(Doorbell::Kick(target)) => {
                let verdict = self.kick(vcpu, target, waker);
                return self.settle(vcpu, Metered::Kick, verdict, Decision::of(&verdict), now, waker);
            }
            Some(Doorbell::PauseLoop) => return self.pause_loop(vcpu, now, waker),
            Some(Doorbell::RegisterHigh { high }) => {
                own.pfn_high.store(high, Ordering::Relaxed);
                return Verdict::Resume(Resume::Done);
            }
            Some(Doorbell::Register { low }) => {
                let high = own.pfn_high.swap(0, Ordering::Relaxed);
                self.register(Doorbell::pfn(high, low))
            }
            Some(Doorbell::Unregister) => self.unregister(waker),
            Some(Doorbell::Online(target)) => self.set_online(target, true, waker),
            Some(Doorbell::Offline(target)) => self.set_online(target, false, waker),
            None => Status::Unknown,
        };
        own.answer.store(status.encode(), Ordering::Relaxed);
        if status == Status::Ok {
            Verdict::Resume(Resume::Done)
        } else {
            Counters::count(&own.counters.refused);
            Verdict::Resume(Resume::Refused)
        }
    }

    /// What `vcpu` reads as the answer to its last doorbell that has one.
    pub fn answer(&self, vcpu: VcpuId) -> u32 {
        self.vcpu(vcpu).map_or(Status::NoSuchVcpu.encode(), |own| own.answer.load(Ordering::Relaxed))
    }

    fn register(&self, pfn: u64) -> Status {
        let _registering = self.registering.lock();
        if self.registered().is_some() {
            return Status::AlreadyRegistered;
        }
        let Some(base) = pfn.checked_mul(PAGE_SIZE as u64) else { return Status::OutOfRange };
        if !self.memory.contains(base, size_of::<pvlock_protocol::Header>() as u64) {
            return Status::OutOfRange;
        }
        let geometry = match Geometry::read(|offset| self.memory.load(base + offset as u64)) {
            Ok(geometry) => geometry,
            Err(error) => return error.into(),
        };
        if geometry.vcpus < self.vcpus.len() {
            return Status::BadVcpus;
        }
        if !self.memory.contains(base, geometry.size() as u64) {
            return Status::OutOfRange;
        }
        // A poller that was awake for the guest before is asleep for this one.
        let mut flags = HostFlags::from_bits(self.policies.flags.load(Ordering::Relaxed)).without(HostFlags::POLLER);
        // What a policy says of this moment is no promise for a guest that chooses its locks' mode now, for good.
        if self.policies.calm.untell() {
            flags = flags.without(HostFlags::DEDICATED);
        }
        let flags = flags.bits();
        self.policies.flags.store(flags, Ordering::Relaxed);
        let accepted = Registered::answer(&self.memory, base, &geometry, &self.config, flags);
        self.policies.accepted.store(accepted.bits(), Ordering::Relaxed);
        self.registration.set(base, &geometry);
        // The records may be those of an earlier registration.
        for vcpu in self.vcpus() {
            self.publish(vcpu, None);
        }
        Status::Ok
    }

    /// Forgets the region: once this returns, the host writes nothing to it. Takes all vCPUs offline, as they have to come
    /// online anew after the next REGISTER.
    fn unregister(&self, waker: &impl Waker) -> Status {
        let registering = self.registering.lock();
        if self.registered().is_none() {
            return Status::NotRegistered;
        }
        self.registration.clear();
        for vcpu in &self.vcpus {
            // Whoever saw the region registered writes to it under this lock: wait for them.
            drop(vcpu.queue.lock());
            vcpu.set_online(false);
        }
        drop(registering);
        for vcpu in self.vcpus() {
            self.release(vcpu, waker);
        }
        Status::Ok
    }

    fn set_online(&self, target: VcpuId, online: bool, waker: &impl Waker) -> Status {
        let Some(vcpu) = self.vcpu(target) else { return Status::NoSuchVcpu };
        {
            // Or an ONLINE could outlive the UNREGISTER that it overlaps with.
            let _registering = self.registering.lock();
            if online && self.registered().is_none() {
                return Status::NotRegistered;
            }
            vcpu.set_online(online);
        }
        self.release(target, waker);
        Status::Ok
    }

    // ---- halt and kick ---------------------------------------------------------------------------------------------

    /// `vcpu` has nothing to do until the latch of `slot` is set. A latch that is set already is taken, even while the VM is paused;
    /// a vCPU that is offline does not park, and keeps what latches it has.
    ///
    /// Where the policy has a queue for it, and the vCPU that it names there is another one and online, it stands on that vCPU's
    /// queue until it is back: behind those of the same lock whose tickets are not later, and at the end if there are none that
    /// are. Whoever was woken early in this wait stands on none.
    pub fn halt(&self, vcpu: VcpuId, slot: SlotIndex, interrupts: bool, now: u64) -> Verdict {
        let Some(own) = self.vcpu(vcpu) else { return Verdict::Resume(Resume::Refused) };
        Counters::count(&own.counters.halts);
        let Some(region) = self.registered().filter(|_| own.may_park()) else {
            return Verdict::Resume(Resume::NotParking);
        };
        let wait = region.wait(vcpu, slot);
        let stopped = || self.is_stopped() || self.registered().is_none();
        let checked_first = active(Mutation::StoppedCheckedFirst);
        if checked_first && stopped() {
            return Verdict::Resume(Resume::NotParking);
        }
        // Noted before the park becomes visible.
        own.parked_at.store(now, Ordering::Relaxed);
        own.link.lock.store(wait.map_or(0, |wait| wait.lock.get()), Ordering::Relaxed);
        own.link.ticket.store(wait.map_or(0, |wait| wait.ticket), Ordering::Relaxed);
        match own.halt(slot, interrupts) {
            Halted::Parked => {}
            Halted::Latched => {
                Counters::count(&own.counters.latched);
                return Verdict::Resume(Resume::Latched);
            }
            Halted::Interrupt => return Verdict::Resume(Resume::Interrupt),
            Halted::Refused => return Verdict::Resume(Resume::NotParking),
        }
        // After the park is visible: `wake_all` either sees it or has set this before.
        if !checked_first && stopped() {
            own.unpark();
            return Verdict::Resume(Resume::NotParking);
        }
        Counters::count(&own.counters.parks);
        // Who was woken early and halts again stays off queues: woken each time that the holder is scheduled in, it would take
        // the holder's CPU each time.
        let again = |wait: &Wait| own.early.is(wait.lock.get(), wait.ticket);
        let on = wait.filter(|wait| !again(wait)).and_then(|wait| self.queue_for(vcpu, &wait)).filter(|&owner| {
            let enqueued = self.queues().enqueue(vcpu, owner, Kind::Halted);
            match enqueued {
                Enqueued::Queued => Counters::count(&own.counters.queued),
                Enqueued::Circle => Counters::count(&own.counters.cycles),
                Enqueued::NoQueue | Enqueued::WouldStrand => {}
            }
            enqueued == Enqueued::Queued
        });
        self.publish(vcpu, Some(RunState::NotRunning));
        Verdict::Park(Park { until: now.saturating_add(self.config.deadline_ns), on })
    }

    /// On whose queue a waiter should sleep: a hint that names another vCPU. Whether there is one, `enqueue` sees.
    fn queue_for(&self, vcpu: VcpuId, wait: &Wait) -> Option<VcpuId> {
        let owner = match self.config.queue {
            Queue::None => None,
            Queue::Holder => wait.holder,
            Queue::Previous => wait.predecessor,
        };
        owner.filter(|&owner| owner != vcpu)
    }

    /// `vcpu` kicks `target`: all its latches are set, and with [`Queue::Holder`], as the lock is the target's now, those who halted
    /// for the lock that the target halted for last move from the queue of `vcpu` to that of the target.
    pub fn kick(&self, vcpu: VcpuId, target: VcpuId, waker: &impl Waker) -> Verdict {
        let Some(own) = self.vcpu(vcpu) else { return Verdict::Resume(Resume::Refused) };
        let Some(kicked) = self.vcpu(target) else {
            Counters::count(&own.counters.refused);
            return Verdict::Resume(Resume::Refused);
        };
        Counters::count(&own.counters.kicks_sent);
        Counters::count(&kicked.counters.kicks);
        // What the target waited for, before the kick lets it wait for something else.
        let lock = kicked.link.lock.load(Ordering::Relaxed);
        if kicked.kick() {
            waker.wake(target);
        }
        self.hand_over(vcpu, target, lock, waker);
        Verdict::Resume(Resume::Done)
    }

    /// `lock` has passed from `from` to `to`, which was kicked for it: so do those who sleep on the holder.
    pub(crate) fn hand_over(&self, from: VcpuId, to: VcpuId, lock: u64, waker: &impl Waker) {
        let off_queue = self.config.queue == Queue::Holder && self.queues().hand_over(from, to, lock);
        if off_queue && !active(Mutation::OffQueueAsleep) {
            self.wake(to, waker);
        }
    }

    /// The sleep of `vcpu` is over, at `now` ns of the driver's clock.
    pub fn unparked(&self, vcpu: VcpuId, how: Unpark, now: u64, waker: &impl Waker) {
        let Some(own) = self.vcpu(vcpu) else { return };
        let reason = own.unpark();
        Counters::count(match (reason, how) {
            (Reason::Kick, _) => &own.counters.kicked,
            (Reason::Interrupt, _) => &own.counters.interrupted,
            (Reason::Wake, _) => &own.counters.woken,
            (Reason::Limit, _) => &own.counters.throttled,
            (Reason::None, Unpark::Deadline) => &own.counters.forced,
            (Reason::None, Unpark::Woken | Unpark::Signal) => &own.counters.spurious,
        });
        own.counters.slept(now.saturating_sub(own.parked_at.load(Ordering::Relaxed)));
        if !active(Mutation::NotDequeued) {
            self.queues().dequeue(vcpu);
        }
        self.resumed(vcpu, waker);
    }

    // ---- the scheduler, for hosts that have one ----------------------------------------------------------------------

    /// `vcpu` runs on a CPU from now on.
    pub fn scheduled_in(&self, vcpu: VcpuId, waker: &impl Waker) {
        self.resumed(vcpu, waker);
    }

    /// `vcpu` no longer runs, though it would if it had a CPU. (Harmless if it is parked.)
    pub fn scheduled_out(&self, vcpu: VcpuId) {
        self.publish(vcpu, Some(RunState::NotRunning));
        if let Some(own) = self.vcpu(vcpu).filter(|own| own.parked().is_none()) {
            own.queue.lock().preempted = true;
        }
    }

    /// `vcpu` no longer runs, as it waits for something that the engine does not know: an interrupt, an exit's completion.
    /// Nobody is parked at a pause-loop exit until it runs, as that may depend on who would be parked. Reported of a vCPU that runs:
    /// who is parked until a preempted one runs stays parked.
    pub fn idle(&self, vcpu: VcpuId) {
        self.publish(vcpu, Some(RunState::NotRunning));
    }

    /// Marks the vCPU running and serves its queue. Who halts later is not served, even if this vCPU still runs: it has
    /// announced itself to the releaser of its lock.
    fn resumed(&self, vcpu: VcpuId, waker: &impl Waker) {
        if active(Mutation::DrainedFirst) {
            self.drain(vcpu, self.queues().length(vcpu, Kind::Spun), waker);
        }
        let spinners = self.publish(
            vcpu,
            Some(match self.config.run_states {
                RunStates::Exact => RunState::Running,
                RunStates::ParkedOnly => RunState::Unknown,
            }),
        );
        if !active(Mutation::DrainedFirst) && !active(Mutation::NotDrained) {
            self.drain(vcpu, spinners, waker);
        }
        for _ in 0..self.vcpus.len().min(self.config.wake_ahead as usize) {
            let Some(sleeper) = self.queues().pop(vcpu, Kind::Halted) else { break };
            if self.wake(sleeper, waker)
                && let Some(own) = self.vcpu(sleeper)
            {
                own.early.set(own.link.lock.load(Ordering::Relaxed), own.link.ticket.load(Ordering::Relaxed));
                Counters::count(&own.counters.served);
            }
        }
    }

    /// Notes the vCPU's run state, if it has changed, and publishes it and the counters in its record, if there is one.
    /// Returns how many sleep until it runs.
    pub(crate) fn publish(&self, vcpu: VcpuId, state: Option<RunState>) -> usize {
        let Some(own) = self.vcpu(vcpu) else { return 0 };
        // Under this lock, so that UNREGISTER can wait for us; looked up under it for the same reason.
        let seen = if active(Mutation::RegionSeenUnlocked) { self.registered() } else { None };
        let mut list = own.queue.lock();
        list.run_state = state.unwrap_or(list.run_state);
        list.preempted &= state.is_none();
        self.policies.set_run_state(vcpu, list.run_state);
        if let Some(region) = seen.or_else(|| self.registered()) {
            region.set_run_state(vcpu, list.run_state);
            region.set_counters(vcpu, &own.counters);
            if self.config.policy.window.is_some() {
                region.set_spin_budget(vcpu, self.policies.window(vcpu));
            }
        }
        list.spinners()
    }

    // ---- everything else that ends a sleep ---------------------------------------------------------------------------

    /// An interrupt was injected into `vcpu`: its sleep ends if it takes interrupts; if not, or if it does not sleep, the next halt
    /// that takes interrupts returns at once. For an NMI as well, or the vCPU may be parked at a pause-loop exit of its handler.
    pub fn interrupt(&self, vcpu: VcpuId, waker: &impl Waker) {
        if self.vcpu(vcpu).is_some_and(Vcpu::interrupt) {
            waker.wake(vcpu);
        }
    }

    /// `vcpu` was reset: it is offline until it comes online again, has no latches, nobody sleeps on it, and neither half of a
    /// page frame number nor an answer is left. If it was parked it is woken; its driver still reports `unparked`.
    pub fn reset(&self, vcpu: VcpuId, waker: &impl Waker) {
        self.set_online(vcpu, false, waker);
        if let Some(own) = self.vcpu(vcpu) {
            own.pfn_high.store(0, Ordering::Relaxed);
            own.answer.store(Status::Ok.encode(), Ordering::Relaxed);
        }
    }

    /// The VM was reset: unregisters the region and resets all vCPUs. To be called before the guest's memory is reused.
    pub fn reset_vm(&self, waker: &impl Waker) {
        self.unregister(waker);
        for vcpu in self.vcpus() {
            self.reset(vcpu, waker);
        }
    }

    /// Nobody parks from now on, and who is parked returns to its thread: before pausing or saving the VM.
    pub fn pause(&self, waker: &impl Waker) {
        self.stop(PAUSED, waker);
    }

    /// The VM runs again.
    pub fn resume(&self) {
        self.stopped.fetch_and(!PAUSED, Ordering::Relaxed);
    }

    /// The VM ends: as [`Engine::pause`], for good.
    pub fn shut_down(&self, waker: &impl Waker) {
        self.stop(SHUT_DOWN, waker);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        // Acquire: pairs with `stop`.
        self.stopped.load(Ordering::Acquire) != 0
    }

    fn stop(&self, bit: u32, waker: &impl Waker) {
        // Release: pairs with the load in `halt`, through the vCPU's word: see `wake_all`.
        self.stopped.fetch_or(bit, Ordering::Release);
        self.wake_all(waker);
    }

    /// Wakes everybody, spuriously.
    ///
    /// Whoever calls this has first set what makes `halt` refuse. Both sides then do a read-modify-write on the vCPU's word:
    /// either ours comes second and sees the park, or `halt`'s comes second and sees what we set.
    pub(crate) fn wake_all(&self, waker: &impl Waker) {
        if active(Mutation::ModeWakesNobody) {
            return;
        }
        for vcpu in self.vcpus() {
            self.wake(vcpu, waker);
        }
    }

    pub(crate) fn wake(&self, vcpu: VcpuId, waker: &impl Waker) -> bool {
        let wakes = self.vcpu(vcpu).is_some_and(Vcpu::wake);
        if wakes {
            waker.wake(vcpu);
        }
        wakes
    }

    /// Wakes `vcpu` and all who sleep on it, which came online or went offline; none of them is on a queue then.
    fn release(&self, vcpu: VcpuId, waker: &impl Waker) {
        // In this order: it may be back at once, and sleep again, on a queue that has to wake it.
        if active(Mutation::WokenOnQueue) {
            self.wake(vcpu, waker);
        }
        self.queues().dequeue(vcpu);
        if !active(Mutation::ReleasedAsleep) && !active(Mutation::WokenOnQueue) {
            self.wake(vcpu, waker);
        }
        // Bounded. Nobody is left if the vCPU is offline: who comes later sees that under the queue's lock.
        if active(Mutation::ResetLeavesSleepers) {
            return;
        }
        self.drain(vcpu, self.queues().length(vcpu, Kind::Spun), waker);
        for _ in 0..self.queues().length(vcpu, Kind::Halted) {
            let Some(sleeper) = self.queues().pop(vcpu, Kind::Halted) else { break };
            self.wake(sleeper, waker);
        }
    }

    // ---- looking in from outside -------------------------------------------------------------------------------------

    /// Counts of one vCPU; zeros for one that does not exist.
    pub fn vcpu_statistics(&self, vcpu: VcpuId) -> Statistics {
        self.vcpu(vcpu).map(|own| own.counters.read()).unwrap_or_default()
    }

    /// Counts of all vCPUs.
    pub fn statistics(&self) -> Statistics {
        self.vcpus().map(|vcpu| self.vcpu_statistics(vcpu)).fold(Statistics::default(), core::ops::Add::add)
    }

    pub(crate) fn sleeper(&self, id: VcpuId, now: u64) -> Option<Sleeper> {
        let own = self.vcpu(id)?;
        let (slot, woken) = own.parked()?;
        Some(Sleeper {
            vcpu: id,
            slot,
            lock: own.link.lock.load(Ordering::Relaxed),
            ticket: own.link.ticket.load(Ordering::Relaxed),
            queue: own.link.owner(),
            age_ns: now.saturating_sub(own.parked_at.load(Ordering::Relaxed)),
            woken,
            kind: own.sleep_kind(),
        })
    }
}
