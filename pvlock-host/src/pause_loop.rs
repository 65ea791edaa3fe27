//! A vCPU has spun for long: what to do about it.
//!
//! The host knows from the guest's records whom the vCPU waits for, and from itself or the scheduler who is off-CPU. What it
//! does not know it does not guess: see [`Scheduler`], and [`PauseLoop`] for what each policy falls back on.
//!
//! # A sleeper whom nobody will kick
//!
//! A vCPU that is parked here has not announced itself to the lock's releaser. So it sleeps only while the vCPU it waits for
//! is off-CPU, and the end of that has to wake it; and only if that end cannot depend on the sleeper itself: the other is
//! preempted, or sleeps for the same lock with the ticket before. (A hint may be stale. A vCPU that held the lock when the hint
//! was written may sleep by now, in line behind the spinner: to sleep until it runs would be to sleep for good. And a vCPU that
//! was interrupted in its wait may spin for something else, in a handler that holds what the lock's holder waits for: it sleeps
//! behind nobody who sleeps until that wait is over.) Both sides take the lock of that vCPU's queue:
//!
//! ```text
//! spinner                                    the vCPU it waits for (or who resets it, or takes it offline)
//!   word := PARKED                             under the lock: run state := running (or: offline)
//!   under the lock: off-CPU, online, safe?     under the lock, until there is none: take one spinner off
//!     then onto the queue                        wake it
//! ```
//!
//! If the spinner comes first, it is found on the queue; if not, it sees that it must not sleep, and takes its park back.

use crate::config::RunStates;
use crate::decision::Decision;
use crate::event::{Boost, Park, Resume, Sleep, Verdict, Waker, Yield};
use crate::policy::{Metered, PauseLoop, Seen, Setting};
use crate::queue::{Enqueued, Kind};
use crate::scheduler::{Placement, Scheduler, Yields};
use crate::statistics::Counters;
use crate::sync::Ordering;
use crate::vcpu::{Halted, Vcpu};
use crate::{Engine, GuestMemory};
use pvlock_protocol::{HostFlags, RunState, SlotIndex, VcpuId, Wait, WaitState};

/// A verdict and its name.
type Decided = (Verdict, Decision);

fn resume(why: Resume) -> Decided {
    (Verdict::Resume(why), Decision::Resume(why))
}

/// What the records say of those ahead of a waiter.
enum Ahead {
    /// This one waits for a CPU.
    OffCpu(VcpuId, Boost),
    /// Nobody needs help: as far as it matters they run.
    Running(Resume),
    /// They sleep: a CPU would be of no use to them.
    Sleeping,
    /// Nobody can tell.
    Unknown,
    /// The guest has published nothing, or nothing that makes sense.
    Unpublished,
}

impl<M: GuestMemory, R: lock_api::RawMutex> Engine<M, R> {
    /// `vcpu` has spun for a whole window: a pause-loop exit of the hardware, or the guest's own report, at `now` ns of the
    /// driver's clock.
    pub fn pause_loop(&self, vcpu: VcpuId, now: u64, waker: &impl Waker) -> Verdict {
        let Some(own) = self.vcpu(vcpu) else { return Verdict::Resume(Resume::Refused) };
        Counters::count(&own.counters.pause_loops);
        let policy = &self.config.policy;
        let scheduler = waker.scheduler();
        let wanted = policy.window.is_some() || policy.undercommit.is_some();
        let backlog = if wanted { scheduler.backlog(vcpu) } else { None };
        // Whether nobody else wants this CPU.
        let idle = policy.undercommit.is_some() && backlog == Some(0);
        let (verdict, decision) = match policy.pause_loop {
            PauseLoop::Ignore => resume(Resume::Ignored),
            PauseLoop::Yield if idle => resume(Resume::Undercommit),
            PauseLoop::Yield => Self::plain(scheduler, Yield::Policy, Resume::CannotYield),
            PauseLoop::DirectedYield => self.directed(vcpu, self.wait_of(vcpu), idle, now, scheduler),
            PauseLoop::ParkOnHolder => self.park_on(vcpu, own, Sleep::OnHolder, idle, now, scheduler),
            PauseLoop::ParkOnPrevious => self.park_on(vcpu, own, Sleep::OnPrevious, idle, now, scheduler),
        };
        self.learn(vcpu, backlog, decision, now, waker);
        self.settle(vcpu, Metered::PauseLoop, verdict, decision, now, waker)
    }

    /// How long `vcpu` should spin until its next pause-loop exit, to be set before it enters the guest; `None` leaves it to
    /// the driver.
    pub fn window(&self, vcpu: VcpuId) -> Option<Setting> {
        self.config.policy.window.map(|window| window.setting(self.policies.window(vcpu)))
    }

    /// Changes the settings that the guest sees while it runs. Everybody is woken, as who sleeps did so under the old ones.
    /// [`HostFlags::POLLER`] is no setting, and stays as it is: a guest that is told of a poller rings nobody.
    pub fn set_flags(&self, flags: HostFlags, waker: &impl Waker) {
        let poller = HostFlags::POLLER;
        self.change_flags(|now| flags.without(poller).union(now.intersection(poller)));
        self.wake_all(waker);
    }

    pub(crate) fn change_flags(&self, change: impl FnOnce(HostFlags) -> HostFlags) {
        // Or UNREGISTER could be answered between the question whether a region is registered and the write to it.
        let _registering = self.registering.lock();
        let flags = change(HostFlags::from_bits(self.policies.flags.load(Ordering::Relaxed))).bits();
        self.policies.flags.store(flags, Ordering::Relaxed);
        if let Some(region) = self.registered() {
            region.set_flags(flags);
        }
    }

    // ---- whom does it wait for? --------------------------------------------------------------------------------------

    /// What `vcpu` waits for, if it spins at its innermost published level. One that halts there does not spin; so the one
    /// that spins is not published.
    fn innermost(&self, vcpu: VcpuId) -> Option<(SlotIndex, Wait)> {
        let region = self.registered().filter(|_| self.is_online(vcpu))?;
        region.innermost(vcpu).filter(|(_, wait)| wait.state == WaitState::Spinning)
    }

    /// What `vcpu` says it waits for, if it spins: for drivers that count or show who waits for whom. A guest's word, of which
    /// nothing is checked but that the vCPU takes part. Six loads of guest memory at most.
    pub fn wait_of(&self, vcpu: VcpuId) -> Option<Wait> {
        self.innermost(vcpu).map(|(_, wait)| wait)
    }

    fn is_online(&self, vcpu: VcpuId) -> bool {
        self.vcpu(vcpu).is_some_and(Vcpu::is_online)
    }

    /// A hint of `vcpu`'s that names another vCPU which takes part.
    fn usable(&self, vcpu: VcpuId, hint: Option<VcpuId>) -> Option<VcpuId> {
        hint.filter(|&other| other != vcpu && self.is_online(other))
    }

    /// Where a vCPU of this VM is, from what the engine knows itself and what the scheduler says. Changes nothing.
    fn placement(&self, vcpu: VcpuId, scheduler: &dyn Scheduler) -> Placement {
        match self.policies.run_state(vcpu) {
            RunState::Running => return Placement::Running,
            RunState::NotRunning => {
                if let Some((_, woken)) = self.vcpu(vcpu).and_then(Vcpu::parked) {
                    return if woken { Placement::Preempted } else { Placement::Sleeping };
                }
            }
            RunState::Unknown => return scheduler.placement(vcpu),
        }
        // Reported as scheduled out; the scheduler may know that it waits for something else.
        match scheduler.placement(vcpu) {
            Placement::Sleeping => Placement::Sleeping,
            _ if self.config.run_states == RunStates::Exact => Placement::Preempted,
            other => other,
        }
    }

    /// Whether yielding to `vcpu` would let it run.
    fn wants_cpu(&self, vcpu: VcpuId, scheduler: &dyn Scheduler) -> bool {
        // Alone on its CPU's run queue it is about to run as it is.
        self.placement(vcpu, scheduler) == Placement::Preempted && scheduler.backlog(vcpu) != Some(0)
    }

    /// The holder, else of the waiters ahead, as far as they are looked at, the one whose turn comes first.
    fn ahead(&self, vcpu: VcpuId, wait: &Wait, scheduler: &dyn Scheduler) -> Ahead {
        let published = |other| self.registered().and_then(|region| region.wait_for(other, wait.lock));
        // Who waits for the lock itself holds it no more: the lock has gone to somebody who has not run since.
        let holder = self.usable(vcpu, wait.holder).filter(|&holder| published(holder).is_none());
        let previous = self.usable(vcpu, wait.predecessor);
        if let Some(holder) = holder
            && self.wants_cpu(holder, scheduler)
        {
            return Ahead::OffCpu(holder, Boost::Holder);
        }
        let (mut at, mut ticket) = (previous, wait.ticket);
        let mut first = None;
        for _ in 0..self.config.policy.look_ahead {
            let Some(other) = at.filter(|&other| Some(other) != holder) else { break };
            if self.wants_cpu(other, scheduler) {
                first = Some(other);
            }
            // Its own record must agree that it is the one before; else it is not, or no longer.
            ticket = ticket.wrapping_sub(1);
            at = published(other).filter(|wait| wait.ticket == ticket).and_then(|wait| self.usable(vcpu, wait.predecessor));
        }
        if let Some(first) = first {
            return Ahead::OffCpu(first, Boost::Predecessor);
        }
        let running = if holder.is_some() { Resume::HolderRunning } else { Resume::PreviousRunning };
        match holder.or(previous).map(|awaited| self.placement(awaited, scheduler)) {
            None => Ahead::Unpublished,
            // Preempted, but about to run.
            Some(Placement::Running | Placement::Preempted) => Ahead::Running(running),
            Some(Placement::Sleeping) => Ahead::Sleeping,
            Some(Placement::Unknown) => Ahead::Unknown,
        }
    }

    // ---- yielding ------------------------------------------------------------------------------------------------------

    fn plain(scheduler: &dyn Scheduler, why: Yield, otherwise: Resume) -> Decided {
        match scheduler.yields() {
            Yields::None => resume(otherwise),
            Yields::Plain | Yields::Directed => (Verdict::Yield(why), Decision::Yield(why)),
        }
    }

    fn directed(&self, vcpu: VcpuId, wait: Option<Wait>, idle: bool, now: u64, scheduler: &dyn Scheduler) -> Decided {
        let policy = &self.config.policy;
        if self.policies.boosts.is_throttled(vcpu.index(), policy.directed_period_ns, now) {
            return if idle { resume(Resume::Undercommit) } else { Self::plain(scheduler, Yield::Throttled, Resume::CannotYield) };
        }
        let ahead = wait.map_or(Ahead::Unpublished, |wait| self.ahead(vcpu, &wait, scheduler));
        match ahead {
            Ahead::OffCpu(target, why) => self.boost(vcpu, target, why, now, scheduler),
            Ahead::Running(why) => resume(why),
            Ahead::Sleeping | Ahead::Unknown | Ahead::Unpublished if idle => resume(Resume::Undercommit),
            Ahead::Sleeping => Self::plain(scheduler, Yield::Asleep, Resume::NoCandidate),
            Ahead::Unknown => Self::plain(scheduler, Yield::Unknown, Resume::Unknown),
            Ahead::Unpublished => self.in_turn(vcpu, now, scheduler),
        }
    }

    /// A directed yield to the next vCPU in turn that waits for a CPU.
    fn in_turn(&self, vcpu: VcpuId, now: u64, scheduler: &dyn Scheduler) -> Decided {
        if scheduler.yields() < Yields::Directed {
            return Self::plain(scheduler, Yield::NotDirected, Resume::CannotYield);
        }
        let mut known = false;
        let picked = self.policies.boosts.pick(self.config.policy.pivot, vcpu.index(), |candidate| {
            let Some(candidate) = VcpuId::new(candidate) else { return false };
            // Most of them, and what a long search costs.
            if self.policies.run_state(candidate) == RunState::Running {
                known = true;
                return false;
            }
            let placement = self.placement(candidate, scheduler);
            known |= placement != Placement::Unknown;
            placement == Placement::Preempted && scheduler.backlog(candidate) != Some(0)
        });
        match picked.and_then(VcpuId::new) {
            Some(target) => self.boost(vcpu, target, Boost::RoundRobin, now, scheduler),
            None if known => resume(Resume::NoCandidate),
            None => Self::plain(scheduler, Yield::Unknown, Resume::Unknown),
        }
    }

    fn boost(&self, vcpu: VcpuId, target: VcpuId, why: Boost, now: u64, scheduler: &dyn Scheduler) -> Decided {
        if scheduler.yields() < Yields::Directed {
            return Self::plain(scheduler, Yield::NotDirected, Resume::CannotYield);
        }
        self.policies.boosts.note(vcpu.index(), target.index(), now);
        (Verdict::YieldTo(target, why), Decision::Boost(why))
    }

    // ---- parking -------------------------------------------------------------------------------------------------------

    fn park_on(&self, vcpu: VcpuId, own: &Vcpu<R>, how: Sleep, idle: bool, now: u64, scheduler: &dyn Scheduler) -> Decided {
        let published = self.innermost(vcpu).and_then(|(slot, wait)| {
            let hint = if how == Sleep::OnHolder { wait.holder } else { wait.predecessor };
            Some((slot, wait, self.usable(vcpu, hint)?))
        });
        // Nobody else wants this CPU; but the awaited vCPU may stand in another one's queue, and could have this one.
        if idle && !published.is_some_and(|(_, _, owner)| self.wants_cpu(owner, scheduler)) {
            return resume(Resume::Undercommit);
        }
        let Some((slot, wait, owner)) = published else { return self.directed(vcpu, None, false, now, scheduler) };
        let running = if how == Sleep::OnHolder { Resume::HolderRunning } else { Resume::PreviousRunning };
        // Cheap questions first; the answer that counts is given under the queue's lock.
        match self.placement(owner, scheduler) {
            Placement::Running => return resume(running),
            Placement::Unknown => return Self::plain(scheduler, Yield::Unknown, Resume::Unknown),
            Placement::Preempted | Placement::Sleeping => {}
        }
        if self.queues().chain_reaches(owner, self.config.policy.chain as usize) {
            return Self::plain(scheduler, Yield::ChainTooLong, Resume::ChainTooLong);
        }
        if !own.may_park() {
            return resume(Resume::NotParking);
        }
        let outermost = if slot.index() == 0 { Some(wait) } else { self.registered().and_then(|region| region.outermost(vcpu)) };
        own.note_interrupts(outermost);
        // Noted before the park becomes visible.
        own.parked_at.store(now, Ordering::Relaxed);
        own.link.lock.store(wait.lock.get(), Ordering::Relaxed);
        own.link.ticket.store(wait.ticket, Ordering::Relaxed);
        match own.spin_park(slot) {
            Halted::Parked => {}
            Halted::Latched => return resume(Resume::Latched),
            Halted::Interrupt => return resume(Resume::Interrupt),
            Halted::Refused => return resume(Resume::NotParking),
        }
        // After the park is visible, as in `halt`.
        let refused = if self.is_stopped() || self.registered().is_none() {
            Some(Resume::NotParking)
        } else {
            match self.queues().enqueue(vcpu, owner, Kind::Spun) {
                Enqueued::Queued => None,
                Enqueued::Circle => {
                    Counters::count(&own.counters.cycles);
                    Some(Resume::Circle)
                }
                Enqueued::NoQueue => Some(Resume::NotParking),
                Enqueued::WouldStrand => {
                    own.unpark();
                    return match self.policies.run_state(owner) {
                        RunState::Running => resume(running),
                        RunState::NotRunning => Self::plain(scheduler, Yield::Asleep, Resume::NoCandidate),
                        RunState::Unknown => Self::plain(scheduler, Yield::Unknown, Resume::Unknown),
                    };
                }
            }
        };
        if let Some(why) = refused {
            own.unpark();
            return resume(why);
        }
        Counters::count(&own.counters.parks);
        Counters::count(&own.counters.queued);
        self.publish(vcpu, Some(RunState::NotRunning));
        let park = Park { until: now.saturating_add(self.config.deadline_ns), on: Some(owner) };
        (Verdict::Park(park), Decision::Park(how))
    }

    /// Wakes all who sleep until `vcpu` runs. Its run state says that it does, or it is offline: nobody joins them any more.
    /// There were `spinners` of them when that became so.
    pub(crate) fn drain(&self, vcpu: VcpuId, spinners: usize, waker: &impl Waker) {
        for _ in 0..spinners {
            let Some(sleeper) = self.queues().pop(vcpu, Kind::Spun) else { break };
            if self.wake(sleeper, waker)
                && let Some(own) = self.vcpu(sleeper)
            {
                Counters::count(&own.counters.drained);
            }
        }
    }

    // ---- afterwards ----------------------------------------------------------------------------------------------------

    /// What an exit says about overcommit.
    fn learn(&self, vcpu: VcpuId, backlog: Option<u32>, decision: Decision, now: u64, waker: &impl Waker) {
        let seen = match decision {
            _ if backlog.is_some_and(|others| others > 0) => Seen::Overcommit,
            Decision::Boost(_) | Decision::Park(_) => Seen::Overcommit,
            Decision::Yield(Yield::NotDirected | Yield::Asleep | Yield::ChainTooLong) => Seen::Overcommit,
            Decision::Resume(Resume::Undercommit | Resume::HolderRunning | Resume::PreviousRunning) => Seen::NothingToDo,
            _ if backlog == Some(0) => Seen::NothingToDo,
            Decision::Resume(Resume::NoCandidate) => Seen::NothingToDo,
            _ => Seen::Unknown,
        };
        if let Some(window) = &self.config.policy.window {
            let ticks = self.policies.window(vcpu);
            let next = window.next(ticks, seen);
            if next != ticks {
                self.policies.set_window(vcpu, next);
                self.publish(vcpu, None);
            }
        }
        let Some(undercommit) = &self.config.policy.undercommit else { return };
        if seen == Seen::Overcommit || backlog == Some(0) {
            let told = self.policies.calm.see(undercommit, seen == Seen::Overcommit, now);
            if let Some(dedicated) = told {
                self.tell(vcpu, dedicated, waker);
            }
        }
    }

    fn tell(&self, vcpu: VcpuId, dedicated: bool, waker: &impl Waker) {
        self.change_flags(|flags| if dedicated { flags.union(HostFlags::DEDICATED) } else { flags.without(HostFlags::DEDICATED) });
        if let Some(own) = self.vcpu(vcpu) {
            Counters::count(&own.counters.mode_switches);
        }
        if dedicated {
            self.wake_all(waker);
        }
    }

    /// Counts a decision and reports it; holds the vCPU back if its VM is over the limit.
    pub(crate) fn settle(
        &self,
        vcpu: VcpuId,
        what: Metered,
        verdict: Verdict,
        decision: Decision,
        now: u64,
        waker: &impl Waker,
    ) -> Verdict {
        let Some(own) = self.vcpu(vcpu) else { return verdict };
        own.counters.decided(decision);
        waker.decided(vcpu, decision);
        let overdrawn = self.policies.meters.take(&self.config.policy.limits, what, now);
        // Who sleeps anyway rings nothing meanwhile.
        if overdrawn == 0 || matches!(verdict, Verdict::Park(_)) || !self.hold_back(vcpu, own, now) {
            return verdict;
        }
        own.counters.decided(Decision::Park(Sleep::Limited));
        waker.decided(vcpu, Decision::Park(Sleep::Limited));
        Verdict::Park(Park { until: now.saturating_add(overdrawn), on: None })
    }

    fn hold_back(&self, vcpu: VcpuId, own: &Vcpu<R>, now: u64) -> bool {
        // As in `halt`: nothing is noted of a vCPU that is parked already.
        if own.parked().is_some() {
            return false;
        }
        own.parked_at.store(now, Ordering::Relaxed);
        own.link.lock.store(0, Ordering::Relaxed);
        own.link.ticket.store(0, Ordering::Relaxed);
        if !own.limit_park() {
            return false;
        }
        if self.is_stopped() {
            own.unpark();
            return false;
        }
        Counters::count(&own.counters.parks);
        self.publish(vcpu, Some(RunState::NotRunning));
        true
    }
}
