//! The preemptable ticket lock: waiters are served in the order of their tickets, but a free lock does not wait for a head of
//! the queue that is not running.
//!
//! # Contract
//!
//! Waiters are served in ticket order. The whole queue may be bypassed by a newcomer (who has no ticket) only after the
//! queue's head was seen off-CPU, or has left a free lock unclaimed for [`CLAIM`] ticks. A head that polls says so, and is from
//! then on bypassed at most once per other vCPU (by those who looked before it said so).
//!
//! # The word
//!
//! | bits | field | |
//! |---|---|---|
//! | 0 | `LOCKED` | somebody owns the lock |
//! | 1 | `AWAY` | the head of the queue does not run: newcomers may take a free lock |
//! | 2 | `HALTED` | the head has halted: whoever releases kicks it, once |
//! | 3 | `FAIR` | released by `unlock_fair`: no bypass until the head has claimed |
//! | 4–17 | vCPU + 1 of the head, valid with `HALTED` | |
//! | 18–33 | `serving`: ticket of the head | |
//! | 34–49 | `next`: tickets drawn; the queue is empty if it equals `serving` | |
//! | 50–63 | acquisitions, wraps: tells a watcher that the free lock it sees is not the one it saw | |
//!
//! # States
//!
//! | LOCKED | queue | AWAY | HALTED | meaning |
//! |---|---|---|---|---|
//! | 0 | empty | 0 | 0 | free |
//! | 1 | empty | 0 | 0 | held, nobody waits with a ticket |
//! | 1 | n | 0 | 0 | held, the head polls (or was preempted, which nobody has noticed) |
//! | 1 | n | 1 | 1 | held, the head has halted |
//! | 0 | n | 0 | 0 | free for the head |
//! | 0 | n | 1 | 0 | free for the head and for newcomers; the head has been kicked, or was silent for `CLAIM` |
//! | 1 | n | 1 | 0 | the same, held by a newcomer |
//!
//! # Who does what
//!
//! ```text
//! newcomer            free, and queue empty or AWAY and not FAIR:  CAS -> LOCKED
//!                     free but not for us, CLAIM ticks long:       CAS -> LOCKED | AWAY
//!                     held for the whole budget:                   CAS -> next + 1, a ticket is drawn
//! head                free:   CAS -> LOCKED, serving + 1, flags and vCPU cleared    (T)
//!                     AWAY:   CAS -> flags and vCPU cleared ("I am here")
//!                     budget over and still LOCKED: CAS -> AWAY | HALTED, vCPU      (H), halt
//! other waiters       slot := halting; fetch_or(0) AcqRel                           (O); still not head: halt
//! served head         looks at its successor after (T); if halting: CAS -> AWAY | HALTED, successor's vCPU
//! owner               CAS -> LOCKED, HALTED and vCPU cleared                        (R); if HALTED was set: kick
//! ```
//!
//! No wake-up is lost: (H) succeeds only while `LOCKED` is set, so an (R) follows it and sees `HALTED`. For another waiter, (O)
//! either precedes (T), and (T), an Acquire operation later in the same word's order, sees its slot; or follows it, and the
//! waiter sees that it is the head. Only who advances `serving` looks, and only what (T) makes the head can need it.
//!
//! A queued waiter never takes out of turn: its ticket would stay behind. Nothing touches the lock after (R).

use crate::budget::Budget;
use crate::mutation::{Mutation, active, weakened};
use crate::scoped::RawLock;
use crate::sync::{AtomicU32, AtomicU64, Ordering, const_unless_loom};
use crate::waiter::Waiter;
use crate::{Platform, passed};
use core::marker::PhantomData;
use pvlock_protocol::{LockId, VcpuId, WaitState};

/// Ticks for which a free lock stays reserved for the head of the queue. A head that runs takes it within a few hundred
/// (a cache-line transfer and a PAUSE); more than a few microseconds would leave the lock idle.
pub const CLAIM: u64 = 1 << 11;

const LOCKED: u64 = 1;
const AWAY: u64 = 1 << 1;
const HALTED: u64 = 1 << 2;
const FAIR: u64 = 1 << 3;
const VCPU_SHIFT: u32 = 4;
const SERVING_SHIFT: u32 = VCPU_SHIFT + VcpuId::BITS;
const TICKET_BITS: u32 = 16;
const NEXT_SHIFT: u32 = SERVING_SHIFT + TICKET_BITS;
const ACQUIRED_SHIFT: u32 = NEXT_SHIFT + TICKET_BITS;
/// What is true only of the present head.
const OF_HEAD: u64 = AWAY | HALTED | FAIR | ((1 << VcpuId::BITS) - 1) << VCPU_SHIFT;
const TICKET_MASK: u64 = (1 << TICKET_BITS) - 1;
/// A change of the topmost field: wraps without touching another.
const ONE_ACQUISITION: u64 = 1 << ACQUIRED_SHIFT;

// Every vCPU can wait in every slot, and a full queue does not look empty.
static_assertions::const_assert!(pvlock_protocol::MAX_VCPUS * pvlock_protocol::WAIT_SLOTS < TICKET_MASK as usize);

/// The lock's word, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word(u64);

impl Word {
    fn is(self, bits: u64) -> bool {
        self.0 & bits != 0
    }

    fn serving(self) -> u32 {
        (self.0 >> SERVING_SHIFT & TICKET_MASK) as u32
    }

    fn next(self) -> u32 {
        (self.0 >> NEXT_SHIFT & TICKET_MASK) as u32
    }

    fn queue_is_empty(self) -> bool {
        (self.0 >> NEXT_SHIFT ^ self.0 >> SERVING_SHIFT) & TICKET_MASK == 0
    }

    /// Whether nobody owns the lock or waits for it with a ticket: the usual case, in one branch.
    fn is_idle(self) -> bool {
        (self.0 >> NEXT_SHIFT ^ self.0 >> SERVING_SHIFT | self.0 & LOCKED) & TICKET_MASK == 0
    }

    /// Whether a newcomer may take the lock.
    fn is_open(self) -> bool {
        !self.is(LOCKED) && (self.queue_is_empty() || self.0 & (AWAY | FAIR) == AWAY || active(Mutation::BypassPresent))
    }

    /// Taken by a newcomer.
    fn taken(self) -> Self {
        Self((self.0 | LOCKED).wrapping_add(ONE_ACQUISITION))
    }

    /// Taken by the head (T).
    fn served(self) -> Self {
        let serving = (u64::from(self.serving()) + 1) & TICKET_MASK;
        let rest = self.0 & !(OF_HEAD | TICKET_MASK << SERVING_SHIFT);
        Self(rest | serving << SERVING_SHIFT).taken()
    }

    /// One more ticket drawn.
    fn drawn(self) -> Self {
        let next = (u64::from(self.next()) + 1) & TICKET_MASK;
        Self(self.0 & !(TICKET_MASK << NEXT_SHIFT) | next << NEXT_SHIFT)
    }

    /// The head has halted on `vcpu` (H).
    fn halted(self, vcpu: VcpuId) -> Self {
        Self(self.0 & !(OF_HEAD & !FAIR) | AWAY | HALTED | VcpuId::encode(Some(vcpu)) << VCPU_SHIFT)
    }

    /// The head is here.
    fn present(self) -> Self {
        Self(self.0 & !(OF_HEAD & !FAIR))
    }

    /// Released (R).
    fn released(self) -> Self {
        Self(self.0 & !(LOCKED | OF_HEAD & !(AWAY | FAIR)))
    }

    fn vcpu(self) -> Option<VcpuId> {
        VcpuId::decode(self.0 >> VCPU_SHIFT)
    }

    fn acquisitions(self) -> u64 {
        self.0 >> ACQUIRED_SHIFT
    }
}

/// Ownership of a [`PreemptableTicketLock`], needed to release it: the word as it was when the lock was taken.
#[derive(Debug)]
#[must_use = "a lock whose `Held` is lost stays locked"]
pub struct Held(Word);

/// A spinlock whose waiters are served in order, but whose free lock a running newcomer may take while the head of the queue
/// is not running; bare, without data. See the [module](self) for contract and workings.
///
/// The waiter must stay on one vCPU from lock to unlock; [`Scoped`](crate::Scoped) takes care of that.
#[repr(C, align(16))]
pub struct PreemptableTicketLock<P> {
    word: AtomicU64,
    /// vCPU + 1 of the last owner that was in paravirtual mode; a hint.
    holder: AtomicU32,
    platform: PhantomData<fn() -> P>,
}

impl<P: Platform> PreemptableTicketLock<P> {
    const_unless_loom! {
        /// A free lock.
        #[allow(clippy::new_without_default, reason = "Default is implemented")]
        pub const fn new() -> Self {
            Self { word: AtomicU64::new(0), holder: AtomicU32::new(0), platform: PhantomData }
        }
    }

    /// Takes the lock; returns when it is ours.
    #[inline]
    pub fn lock(&self) -> Held {
        self.lock_with(|_| ())
    }

    /// As [`PreemptableTicketLock::lock`]; `drawn` runs with the ticket when one is drawn, for tracing.
    #[inline]
    pub fn lock_with(&self, drawn: impl FnOnce(u32)) -> Held {
        let word = self.load(Ordering::Relaxed);
        let taken = if word.is_idle() { self.take(word).ok() } else { None };
        let held = match taken {
            Some(word) => word,
            None => self.wait(drawn),
        };
        self.acquired(held)
    }

    /// Takes the lock if a newcomer may; otherwise changes nothing.
    #[inline]
    pub fn try_lock(&self) -> Option<Held> {
        let word = self.load(Ordering::Relaxed);
        let taken = if word.is_open() { self.take(word).ok() } else { None };
        if taken.is_none() && active(Mutation::TryLockDraws) {
            let _ = self.change(word, word.drawn());
        }
        taken.map(|word| self.acquired(word))
    }

    /// Gives the lock back: to the head of the queue, or to a newcomer if the head does not run.
    ///
    /// # Safety
    ///
    /// The caller owns the lock, by the call that returned `held`.
    #[inline]
    pub unsafe fn unlock(&self, held: Held) {
        self.release(held, 0);
    }

    /// Gives the lock to the head of the queue, if there is one, whether it runs or not.
    ///
    /// # Safety
    ///
    /// The caller owns the lock, by the call that returned `held`.
    pub unsafe fn unlock_fair(&self, held: Held) {
        self.release(held, if active(Mutation::FairIgnored) { 0 } else { FAIR });
    }

    /// Whether somebody owns the lock; stale at once.
    pub fn is_locked(&self) -> bool {
        self.load(Ordering::Relaxed).is(LOCKED)
    }

    /// What freeing the lock is in a model: it fails if any access, earlier or later, is not ordered against it.
    #[cfg(all(pvlock_loom, not(pvlock_shuttle)))]
    pub fn retire(&mut self) {
        self.word.with_mut(|_| ());
        self.holder.with_mut(|_| ());
    }

    #[inline]
    fn load(&self, order: Ordering) -> Word {
        Word(self.word.load(order))
    }

    /// Acquire on success: pairs with (R), and for the head with (O); what the word held before is Relaxed.
    #[inline]
    fn change(&self, from: Word, to: Word) -> Result<Word, Word> {
        P::step();
        let order = weakened(Mutation::ChangeNotAcquired, Ordering::AcqRel, Ordering::Release);
        self.word.compare_exchange(from.0, to.0, order, Ordering::Relaxed).map(|_| to).map_err(Word)
    }

    /// A newcomer's way in.
    #[inline]
    fn take(&self, word: Word) -> Result<Word, Word> {
        // Acquire: pairs with (R).
        let order = weakened(Mutation::AcquireRelaxed, Ordering::Acquire, Ordering::Relaxed);
        let taken = word.taken();
        self.word.compare_exchange(word.0, taken.0, order, Ordering::Relaxed).map(|_| taken).map_err(Word)
    }

    #[inline]
    fn acquired(&self, word: Word) -> Held {
        if !P::guest().is_native() {
            self.holder.store(VcpuId::encode(P::current()) as u32, Ordering::Relaxed);
        }
        Held(word)
    }

    #[inline]
    fn release(&self, held: Held, fair: u64) {
        let order = weakened(Mutation::ReleaseRelaxed, Ordering::Release, Ordering::Relaxed);
        // Most likely nobody has drawn or halted since. A load would fetch the cache line only to fetch it again for writing.
        let Held(mut word) = held;
        if active(Mutation::ReleaseByStore) {
            word = self.load(Ordering::Relaxed);
        }
        loop {
            let fair = if word.queue_is_empty() { 0 } else { fair };
            let kept = if active(Mutation::NoKick) { word.0 & HALTED } else { 0 };
            let released = word.released().0 | fair | kept;
            if active(Mutation::ReleaseByStore) {
                self.word.store(released, order);
                break;
            }
            // Release, (R): pairs with the Acquire of whoever takes the lock next.
            match self.word.compare_exchange_weak(word.0, released, order, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => word = Word(now),
            }
        }
        if active(Mutation::TouchAfterRelease) {
            self.word.fetch_and(!HALTED, Ordering::Relaxed);
        }
        if word.is(HALTED) && !active(Mutation::NoKick) {
            kick::<P>(word.vcpu());
        }
    }

    fn id(&self) -> LockId {
        P::lock_id(self)
    }

    fn holder(&self) -> Option<VcpuId> {
        VcpuId::decode(u64::from(self.holder.load(Ordering::Relaxed)))
    }

    #[cold]
    #[inline(never)]
    fn wait(&self, drawn: impl FnOnce(u32)) -> Word {
        // While the head is away, which takes a scheduler's time, newcomers come this way though they need not wait.
        let word = self.load(Ordering::Relaxed);
        if word.is_open()
            && let Ok(taken) = self.take(word)
        {
            return taken;
        }
        let budget = Budget::<P>::new();
        let word = match self.wait_without_ticket(&budget).map_or_else(|| self.draw(), Ok) {
            Ok(word) => word,
            Err(ticket) => {
                drawn(ticket);
                self.wait_in_queue(ticket, &budget)
            }
        };
        budget.learn();
        word
    }

    /// Spins as a newcomer for the budget; the word if that got the lock.
    fn wait_without_ticket(&self, budget: &Budget<P>) -> Option<Word> {
        let deadline = budget.began().wrapping_add(budget.ticks());
        let mut silence = Silence::since(budget.began());
        let mut word = self.load(Ordering::Relaxed);
        loop {
            if word.is_open() {
                P::step();
                match self.take(word) {
                    Ok(word) => return Some(word),
                    Err(now) => word = now,
                }
                continue;
            }
            let now = P::ticks();
            // A free lock that its head leaves alone.
            if silence.lasts(word, now) && !word.is(FAIR) {
                match self.change(word, Word(word.0 | AWAY).taken()) {
                    Ok(word) => return Some(word),
                    Err(now) => word = now,
                }
                continue;
            }
            if passed(now, deadline) || (word.is(LOCKED) && budget.is_vain(self.holder())) {
                return None;
            }
            word = self.wait_while(word, now, deadline);
        }
    }

    /// Waits for a change: of a free lock in steps that are short against [`CLAIM`], of one that is held in steps of twice as
    /// much, as its owner may leave its CPU meanwhile.
    fn wait_while(&self, word: Word, now: u64, deadline: u64) -> Word {
        let step = now.wrapping_add(if word.is(LOCKED) { CLAIM * 2 } else { CLAIM / 4 });
        let until = if deadline.wrapping_sub(step) as i64 > 0 { step } else { deadline };
        Word(P::wait_while(&self.word, word.0, until))
    }

    /// Draws a ticket, unless the lock can be taken instead: then the word, and it is ours.
    fn draw(&self) -> Result<Word, u32> {
        let mut word = self.load(Ordering::Relaxed);
        loop {
            let open = word.is_open();
            match self.change(word, if open { word.taken() } else { word.drawn() }) {
                Ok(taken) => return if open { Ok(taken) } else { Err(word.next()) },
                Err(now) => word = now,
            }
        }
    }

    /// Waits with a ticket until the lock is ours.
    fn wait_in_queue(&self, ticket: u32, budget: &Budget<P>) -> Word {
        let word = self.load(Ordering::Relaxed);
        let mut waiter = Waiter::<P>::begin(self.id(), ticket, self.holder(), word.serving() == ticket);
        let mut may_halt = waiter.is_some();
        let word = loop {
            let distance = ticket.wrapping_sub(self.load(Ordering::Relaxed).serving()) & TICKET_MASK as u32;
            // Who cannot halt has no use for a patience that is over at once: it would look without a pause.
            let patience = if may_halt { patience(budget.ticks(), distance) } else { budget.ticks() };
            if let Some(word) = self.spin_in_queue(ticket, patience) {
                break word;
            }
            let Some(waiter) = &mut waiter else { continue };
            waiter.holder_is(self.holder());
            let is_head = self.load(Ordering::Relaxed).serving() == ticket;
            may_halt = waiter.halt(is_head, |me| if is_head { self.announce_head(me) } else { self.announce(ticket) });
        };
        drop(waiter);
        self.note_successor(word)
    }

    /// Spins with a ticket for so many ticks; the word if that got the lock.
    fn spin_in_queue(&self, ticket: u32, patience: u64) -> Option<Word> {
        let now = P::ticks();
        let deadline = now.wrapping_add(patience);
        let mut silence = Silence::since(now);
        let mut word = self.load(Ordering::Relaxed);
        loop {
            let now = P::ticks();
            let change = if word.serving() == ticket {
                if !word.is(LOCKED) {
                    Some(word.served())
                } else if word.is(AWAY) && !active(Mutation::HeadStaysAway) {
                    Some(word.present())
                } else {
                    None
                }
            } else if word.is_open() && active(Mutation::QueuedBypasses) {
                Some(word.taken())
            } else if !word.is(AWAY) && silence.lasts(word, now) {
                // Not our turn: only tell the newcomers.
                Some(Word(word.0 | AWAY))
            } else {
                None
            };
            if let Some(changed) = change {
                match self.change(word, changed) {
                    Ok(changed) if changed.is(LOCKED) && !word.is(LOCKED) => return Some(changed),
                    Ok(changed) => word = changed,
                    Err(now) => word = now,
                }
                continue;
            }
            if passed(now, deadline) {
                return None;
            }
            word = self.wait_while(word, now, deadline);
        }
    }

    /// (H): the head tells the owner to kick it. False if there is no owner.
    fn announce_head(&self, me: VcpuId) -> bool {
        let mut word = self.load(Ordering::Relaxed);
        while word.is(LOCKED) || active(Mutation::HeadHaltsOnFree) {
            match self.change(word, word.halted(me)) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// (O): another waiter makes sure that whoever is served before it sees its slot. False if it is the head.
    fn announce(&self, ticket: u32) -> bool {
        if active(Mutation::HaltAfterLoad) {
            return self.load(Ordering::Acquire).serving() != ticket;
        }
        P::step();
        let order = weakened(Mutation::HaltAfterRelaxed, Ordering::AcqRel, Ordering::Acquire);
        Word(self.word.fetch_or(0, order)).serving() != ticket
    }

    /// The head that was served looks for the new one, which may have halted before it was the head. Returns the word as it
    /// is then.
    fn note_successor(&self, mut word: Word) -> Word {
        if word.queue_is_empty() || active(Mutation::NoSuccessorLookup) {
            return word;
        }
        P::step();
        let Some((vcpu, WaitState::Halting)) = Waiter::<P>::find(P::guest(), self.id(), word.serving()) else { return word };
        // We own the lock, so `serving` stays; the new head may have woken up and noted itself.
        while !word.is(HALTED) {
            match self.change(word, word.halted(vcpu)) {
                Ok(noted) => return noted,
                Err(now) => word = now,
            }
        }
        word
    }
}

impl<P> core::fmt::Debug for PreemptableTicketLock<P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("PreemptableTicketLock").field("word", &self.word).field("holder", &self.holder).finish()
    }
}

impl<P: Platform> Default for PreemptableTicketLock<P> {
    fn default() -> Self {
        Self::new()
    }
}

/// How long a waiter with `distance` tickets before it spins before it halts, in ticks.
///
/// The head has a whole budget; others have the less reason to expect their turn soon the further back they are.
fn patience(budget: u64, distance: u32) -> u64 {
    budget.checked_shr(2 * distance).unwrap_or(0)
}

/// How long a watcher has seen the lock free without anybody taking it.
struct Silence {
    since: u64,
    last_look: u64,
    acquisitions: Option<u64>,
}

impl Silence {
    fn since(now: u64) -> Self {
        Self { since: now, last_look: now, acquisitions: None }
    }

    /// Whether the lock has been free for [`CLAIM`] ticks, under the watcher's eyes: an acquisition in between, or a gap
    /// between two looks in which the watcher itself may have been off its CPU, starts anew.
    fn lasts(&mut self, word: Word, now: u64) -> bool {
        let acquisitions = if word.is(LOCKED) { None } else { Some(word.acquisitions()) };
        if acquisitions.is_none() || acquisitions != self.acquisitions || now.wrapping_sub(self.last_look) > CLAIM {
            self.acquisitions = acquisitions;
            self.since = now;
        }
        self.last_look = now;
        acquisitions.is_some() && now.wrapping_sub(self.since) >= CLAIM
    }
}

#[cold]
fn kick<P: Platform>(vcpu: Option<VcpuId>) {
    if let Some(vcpu) = vcpu {
        P::step();
        P::kick(vcpu);
    }
}

// SAFETY: `LOCKED` is set by the one compare-exchange that finds it clear, and only the owner clears it, with Release, which
// pairs with the Acquire of that compare-exchange.
unsafe impl<P: Platform> RawLock for PreemptableTicketLock<P> {
    type Platform = P;
    type Token = Held;

    #[cfg(not(pvlock_loom))]
    #[allow(clippy::declare_interior_mutable_const, reason = "an initial value, copied into each lock")]
    const INIT: Self = Self::new();

    #[inline]
    fn lock(&self) -> Held {
        self.lock()
    }

    #[inline]
    fn try_lock(&self) -> Option<Held> {
        self.try_lock()
    }

    #[inline]
    unsafe fn unlock(&self, held: Held) {
        // SAFETY: the caller's contract is the same.
        unsafe { self.unlock(held) }
    }

    #[inline]
    unsafe fn unlock_fair(&self, held: Held) {
        // SAFETY: the caller's contract is the same.
        unsafe { self.unlock_fair(held) }
    }

    fn is_locked(&self) -> bool {
        self.is_locked()
    }
}
