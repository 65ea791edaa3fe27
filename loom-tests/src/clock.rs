//! Time for the preemptable lock, which looks at the clock to decide what a waiter may do: each vCPU has a clock that only
//! its own looks move, at a pace that the model chooses.

use crate::{Machine, OnMachine, SlotLatches, Work};
use pvlock_guest::protocol::{SlotIndex, VcpuId};
use pvlock_guest::{CLAIM, GuestRef, Held, Platform, PreemptableTicketLock, Word};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// How fast a vCPU's clock moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// The budget is over at the first look: the vCPU halts as soon as it may. It never watches a free lock for long, for
    /// it might have been off its CPU between two looks.
    #[default]
    Hasty,
    /// Two looks are `CLAIM` apart: at the second look at a free lock it has been free that long. (Whether its head takes it
    /// meanwhile is loom's choice.) The budget is over at the fourth.
    Watching,
    /// The budget is never over: the vCPU looks again and again, each time after somebody else has done a step. Only one
    /// vCPU of a model may do so: two can look in turns for ever.
    Polling,
}

/// What the host says for all vCPUs, in ticks.
const BUDGET: u64 = 4 * CLAIM;

#[derive(Clone, Copy, Default)]
struct Clock {
    now: u64,
    pace: Pace,
    /// When the pace becomes `Polling`.
    polls_from: Option<PollFrom>,
    has_halted: bool,
    /// Whether the vCPU has polled after a halt.
    present: bool,
}

/// When a hasty vCPU begins to poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollFrom {
    /// When it has drawn its ticket.
    Draw,
    /// When it returns from its first halt.
    Halt,
}

impl Clock {
    fn reached(&mut self, event: PollFrom) {
        if self.polls_from == Some(event) {
            self.pace = Pace::Polling;
        }
    }
}

thread_local! {
    static CLOCKS: RefCell<[Clock; 3]> = RefCell::default();
}

fn clock<R>(with: impl FnOnce(&mut Clock) -> R) -> R {
    let current = OnClock::current().expect("only vCPUs run guest code").index();
    CLOCKS.with_borrow_mut(|clocks| with(&mut clocks[current]))
}

/// Sets the pace of the calling vCPU from now on.
pub fn pace(pace: Pace) {
    clock(|clock| clock.pace = pace);
}

/// The platform of a [`Machine`] with such clocks.
#[derive(Debug)]
pub enum OnClock {}

type Host = OnMachine<SlotLatches>;

impl Platform for OnClock {
    fn guest() -> GuestRef<'static> {
        Host::guest()
    }

    fn current() -> Option<VcpuId> {
        Host::current()
    }

    fn ticks() -> u64 {
        clock(|clock| {
            clock.now += match clock.pace {
                Pace::Hasty => BUDGET,
                Pace::Watching => CLAIM,
                Pace::Polling => 1,
            };
            clock.now
        })
    }

    fn wait_while(word: &Word, _value: u64, _deadline: u64) -> u64 {
        let polls = clock(|clock| {
            // A head that comes here has said that it is back.
            clock.present |= clock.has_halted;
            clock.pace == Pace::Polling
        });
        if polls {
            loom::thread::yield_now();
        }
        // Relaxed: see `Machine`'s.
        word.load(Ordering::Relaxed)
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        Host::halt(slot, interrupts);
        clock(|clock| {
            clock.has_halted = true;
            clock.reached(PollFrom::Halt);
        });
    }

    fn kick(vcpu: VcpuId) {
        Host::kick(vcpu);
    }
}

/// How a vCPU got in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Who.
    pub vcpu: usize,
    /// With which ticket, or none.
    pub ticket: Option<u32>,
    /// Those with tickets drawn before this vCPU came, who were still waiting when it got in without one.
    pub bypassed: Vec<usize>,
    /// Those of them who had said, when it came, that they were back from a halt.
    pub present: Vec<usize>,
}

/// A preemptable lock, what it protects, and who bypassed whom.
///
/// A vCPU reports between two of its loom operations, right after the one that matters: so what is noted here is noted in the
/// order in which it happened.
#[derive(Debug)]
pub struct QueueWork {
    work: Work<PreemptableTicketLock<OnClock>>,
    /// The ticket of each vCPU that waits with one.
    waiting: RefCell<[Option<u32>; 3]>,
    served: Cell<u32>,
    visits: RefCell<Vec<Visit>>,
}

impl QueueWork {
    /// A machine with `N` vCPUs, the caller being vCPU 0, and a free lock.
    pub fn new<const N: usize>() -> (&'static Machine, Rc<Self>) {
        let machine = Machine::new::<N>(crate::Config::default());
        machine.guest().region().header.spin_budget.store(BUDGET, Ordering::Relaxed);
        CLOCKS.set([Clock::default(); 3]);
        let work = Rc::new(Self {
            work: Work::new(PreemptableTicketLock::new()),
            waiting: RefCell::default(),
            served: Cell::new(0),
            visits: RefCell::default(),
        });
        (machine, work)
    }

    /// As [`Pace::Hasty`], but from this event on the calling vCPU polls.
    pub fn poll_from(event: PollFrom) {
        clock(|clock| clock.polls_from = Some(event));
    }

    /// Takes the lock and works; the result is for [`QueueWork::end`].
    pub fn begin(&self) -> Held {
        let current = current();
        let before = self.snapshot();
        let mut drawn = None;
        let held = self.work.lock().lock_with(|ticket| {
            drawn = Some(ticket);
            self.waiting.borrow_mut()[current] = drawn;
            clock(|clock| clock.reached(PollFrom::Draw));
        });
        self.visit(before, drawn);
        held
    }

    /// Works, if the lock can be taken at once.
    pub fn try_begin(&self) -> Option<Held> {
        let before = self.snapshot();
        let held = self.work.lock().try_lock();
        if held.is_some() {
            self.visit(before, None);
        }
        held
    }

    /// Releases the lock.
    pub fn end(&self, held: Held) {
        // SAFETY: `begin` or `try_begin` has taken the lock.
        unsafe { self.work.lock().unlock(held) };
    }

    /// Releases the lock to the head of its queue.
    pub fn end_fair(&self, held: Held) {
        // SAFETY: `begin` or `try_begin` has taken the lock.
        unsafe { self.work.lock().unlock_fair(held) };
    }

    /// Takes the lock, works, releases it.
    pub fn once(&self) {
        let held = self.begin();
        self.end(held);
    }

    /// The same, if the lock can be taken at once.
    pub fn try_once(&self) {
        if let Some(held) = self.try_begin() {
            self.end(held);
        }
    }

    /// Who waits with a ticket, and whether it is back from a halt.
    fn snapshot(&self) -> Vec<(usize, bool)> {
        let waiting = self.waiting.borrow();
        let present = |vcpu: usize| CLOCKS.with_borrow(|clocks| clocks[vcpu].present);
        (0..waiting.len()).filter(|&vcpu| waiting[vcpu].is_some()).map(|vcpu| (vcpu, present(vcpu))).collect()
    }

    fn visit(&self, before: Vec<(usize, bool)>, ticket: Option<u32>) {
        self.work.inside();
        let vcpu = current();
        let mut waiting = self.waiting.borrow_mut();
        let mut bypassed = before;
        if let Some(ticket) = ticket {
            assert_eq!(ticket, self.served.get(), "tickets are served in their order");
            self.served.set(ticket + 1);
            waiting[vcpu] = None;
            bypassed.clear();
        }
        bypassed.retain(|&(vcpu, _)| waiting[vcpu].is_some());
        let present = bypassed.iter().filter(|(_, present)| *present).map(|(vcpu, _)| *vcpu).collect();
        let bypassed = bypassed.into_iter().map(|(vcpu, _)| vcpu).collect();
        self.visits.borrow_mut().push(Visit { vcpu, ticket, bypassed, present });
    }

    /// Everybody has left: how they got in, in that order.
    pub fn finish(&self) -> Vec<Visit> {
        assert!(self.work.lock().try_lock().is_some(), "every ticket drawn has been served");
        self.work.inside();
        let visits = self.visits.take();
        assert_eq!(self.work.visits() as usize, visits.len() + 1);
        visits
    }
}

fn current() -> usize {
    OnClock::current().expect("only vCPUs run guest code").index()
}
