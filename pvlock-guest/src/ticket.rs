//! The strict ticket lock: first come, first served, nobody is ever overtaken.
//!
//! # The word
//!
//! `next` counts the tickets drawn. `word` says who is served and whom the releaser has to kick:
//!
//! | bits | field | written by |
//! |---|---|---|
//! | 0–31 | ticket that is served; the lock is free if it equals `next` | the owner, on release |
//! | 32–45 | vCPU + 1 of the next waiter if it has halted, else 0 | the next waiter, or the owner in its place |
//! | 46–63 | zero | |
//!
//! # States
//!
//! | `next - serving` | vCPU field | meaning |
//! |---|---|---|
//! | 0 | 0 | free |
//! | 1 | 0 | held, nobody waits |
//! | n > 1 | 0 | held, n − 1 wait; the next one spins, or is about to be noted |
//! | n > 1 | v | held, n − 1 wait; the next one has halted on v |
//!
//! # Why no wake-up is lost
//!
//! A waiter halts only after a read-modify-write on `word` that told the releaser, or that the next owner must see:
//!
//! ```text
//! next waiter (serving + 1 == ticket)          owner
//!   slot := halting                              old := swap(word, serving + 1)   (R)
//!   CAS word {serving, 0} -> {serving, me}  (N)  if old.vcpu: kick(old.vcpu)
//!   success: halt                                (one word: either (N) precedes (R) and the owner kicks,
//!   failure: look again                           or (R) precedes (N), which fails, and the waiter is served)
//!
//! any other waiter                             predecessor, when it becomes owner
//!   enter table; slot := halting                 load word = {its ticket, ..} Acquire, written by (R)
//!   fetch_or(word, 0)  AcqRel               (O)  if next != ticket + 1: find successor; if halting: CAS it into word
//!   still not next: halt                         ((O) precedes (R) in the word's order and (R) is a read-modify-write, so
//!                                                 the predecessor's Acquire load sees everything before (O))
//! ```
//!
//! (If every halter wrote its vCPU, the second would overwrite the first; if the others did only a load, nothing would order
//! their slot before the predecessor's look at it.)
//!
//! Nothing touches the lock after (R): the next owner may free its memory.

use crate::budget::Budget;
use crate::mutation::{Mutation, active, weakened};
use crate::scoped::RawLock;
use crate::sync::{AtomicU32, AtomicU64, Ordering, const_unless_loom};
use crate::waiter::Waiter;
use crate::{Platform, Word, passed};
use core::marker::PhantomData;
use pvlock_protocol::{LockId, VcpuId, WaitState};

/// Bit position of the vCPU field in the word.
const VCPU_SHIFT: u32 = 32;
/// How long a waiter spins before it publishes itself, in ticks: most waits of a lock that is held by a running vCPU end
/// sooner. Well below the smallest pause-loop window in use (4096 cycles).
const UNPUBLISHED_SPIN: u64 = 1 << 10;

/// Ticks between two looks at the word for each place further back than the next: less than a hand-over of a short section
/// takes.
const TICKS_PER_PLACE: u64 = 64;
/// Places that count for this: a hand-over must not go unseen for long where many vCPUs run.
const MOST_PLACES: u32 = 16;

/// A place in the queue, needed to release the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a lock whose `Ticket` is lost stays locked"]
pub struct Ticket(u32);

impl Ticket {
    /// The ticket's number; wraps.
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// A spinlock that serves strictly in the order of arrival; bare, without data. See the [module](self) for how it works.
///
/// The waiter must stay on one vCPU from draw to release; [`Scoped`](crate::Scoped) takes care of that.
///
/// `BITS` is the width of a ticket; fewer than 32 only serve to test that wrapping is safe.
#[repr(C, align(16))]
pub struct TicketLock<P, const BITS: u32 = 32> {
    word: AtomicU64,
    next: AtomicU32,
    /// vCPU + 1 of the last owner that was in paravirtual mode; a hint for waiters to publish.
    holder: AtomicU32,
    platform: PhantomData<fn() -> P>,
}

impl<P: Platform, const BITS: u32> TicketLock<P, BITS> {
    const MASK: u32 = u32::MAX >> (32 - BITS);

    const_unless_loom! {
        /// A free lock.
        #[allow(clippy::new_without_default, reason = "Default is implemented for every width")]
        pub const fn new() -> Self {
            Self { word: AtomicU64::new(0), next: AtomicU32::new(0), holder: AtomicU32::new(0), platform: PhantomData }
        }
    }

    /// Takes the lock; returns when it is ours.
    #[inline]
    pub fn lock(&self) -> Ticket {
        self.lock_with(|_| ())
    }

    /// As [`TicketLock::lock`]; `drawn` runs as soon as the place in the queue is fixed, for tracing.
    #[inline]
    pub fn lock_with(&self, drawn: impl FnOnce(Ticket)) -> Ticket {
        // Relaxed: the ticket orders nothing; the word does.
        let ticket = self.next.fetch_add(1, Ordering::Relaxed) & Self::MASK;
        drawn(Ticket(ticket));
        P::step();
        self.drawn(ticket)
    }

    /// Takes the lock if that needs no waiting; otherwise changes nothing.
    #[inline]
    pub fn try_lock(&self) -> Option<Ticket> {
        let next = self.next.load(Ordering::Relaxed);
        // Relaxed: only a guess, see below.
        if serving(self.word.load(Ordering::Relaxed)) != next & Self::MASK {
            if active(Mutation::TryLockDraws) {
                self.next.fetch_add(1, Ordering::Relaxed);
            }
            return None;
        }
        self.next.compare_exchange(next, next.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed).ok()?;
        // The ticket is drawn and cannot be given back. If nobody else has drawn since the first load, it is served, for
        // `serving` never passes `next`. If `next` has gone all the way round meanwhile, it is a ticket like any other.
        Some(self.drawn(next & Self::MASK))
    }

    /// The rest of `lock`, from the draw on.
    #[inline]
    fn drawn(&self, ticket: u32) -> Ticket {
        // Acquire: pairs with the release of the previous owner.
        let order = weakened(Mutation::AcquireRelaxed, Ordering::Acquire, Ordering::Relaxed);
        let ticket = if serving(self.word.load(order)) == ticket { ticket } else { self.wait(ticket) };
        Ticket(self.acquired(ticket))
    }

    /// Gives the lock to the next in line.
    ///
    /// # Safety
    ///
    /// The caller owns the lock, by the `lock` or `try_lock` that returned `ticket`.
    #[inline]
    pub unsafe fn unlock(&self, ticket: Ticket) {
        let next = u64::from(ticket.0.wrapping_add(1) & Self::MASK);
        if P::guest().is_native() {
            // Release: pairs with the Acquire load of the next owner. No field is lost: nobody halts in native mode.
            self.word.store(next, weakened(Mutation::NativeReleaseRelaxed, Ordering::Release, Ordering::Relaxed));
        } else {
            // Release, (R) above: pairs with the Acquire load of the next owner. It also continues the release sequences of
            // the read-modify-writes of waiters that are about to halt.
            let order = weakened(Mutation::ReleaseRelaxed, Ordering::Release, Ordering::Relaxed);
            let old = if active(Mutation::ReleaseByStore) {
                let old = self.word.load(Ordering::Relaxed);
                self.word.store(next, order);
                old
            } else {
                self.word.swap(next, order)
            };
            if let Some(vcpu) = VcpuId::decode(old >> VCPU_SHIFT) {
                if active(Mutation::TouchAfterRelease) {
                    self.word.fetch_and(u64::from(u32::MAX), Ordering::Relaxed);
                }
                if !active(Mutation::NoKick) {
                    kick::<P>(vcpu);
                }
            }
        }
    }

    /// Whether somebody owns the lock or waits for it.
    pub fn is_locked(&self) -> bool {
        let serving = serving(self.word.load(Ordering::Relaxed));
        self.next.load(Ordering::Relaxed) & Self::MASK != serving
    }

    /// What freeing the lock is in a model: it fails if any access, earlier or later, is not ordered against it.
    #[cfg(all(pvlock_loom, not(pvlock_shuttle)))]
    pub fn retire(&mut self) {
        self.word.with_mut(|_| ());
        self.next.with_mut(|_| ());
        self.holder.with_mut(|_| ());
    }

    fn id(&self) -> LockId {
        P::lock_id(self)
    }

    fn holder(&self) -> Option<VcpuId> {
        VcpuId::decode(u64::from(self.holder.load(Ordering::Relaxed)))
    }

    /// What an owner in paravirtual mode does first: says who it is, and notes a successor that halted before it was next.
    ///
    /// Returns the ticket, as everything on the way to it does that is not inlined, so that no register has to be saved for
    /// it on the fast path.
    #[inline]
    fn acquired(&self, ticket: u32) -> u32 {
        if P::guest().is_native() {
            return ticket;
        }
        self.holder.store(VcpuId::encode(P::current()) as u32, Ordering::Relaxed);
        let successor = ticket.wrapping_add(1);
        // Relaxed: a successor that halted before it was next drew before (O), which happens before us.
        if self.next.load(Ordering::Relaxed) & Self::MASK == successor & Self::MASK || active(Mutation::NoSuccessorLookup) {
            return ticket;
        }
        self.note_successor(ticket)
    }

    #[cold]
    #[inline(never)]
    fn note_successor(&self, ticket: u32) -> u32 {
        let successor = ticket.wrapping_add(1) & Self::MASK;
        P::step();
        if let Some((vcpu, WaitState::Halting)) = Waiter::<P>::find(P::guest(), self.id(), successor) {
            self.note_halted(ticket, vcpu);
        }
        ticket
    }

    /// Writes the next waiter's vCPU into the word, if `serving` is still served and nobody is noted.
    fn note_halted(&self, serving: u32, vcpu: VcpuId) -> bool {
        if active(Mutation::NextNotNoted) {
            return true;
        }
        P::step();
        let noted = u64::from(serving) | VcpuId::encode(Some(vcpu)) << VCPU_SHIFT;
        // Release, (N) above: the slot's "halting" is visible to who reads the note; the owner's own data needs no order.
        self.word.compare_exchange(u64::from(serving), noted, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Waits until `ticket` is served; returns it.
    #[cold]
    #[inline(never)]
    fn wait(&self, ticket: u32) -> u32 {
        let budget = Budget::<P>::new();
        let distance = |word: u64| ticket.wrapping_sub(serving(word)) & Self::MASK;
        let mut word = self.spin(ticket, budget.began().wrapping_add(UNPUBLISHED_SPIN), |_| ());
        let mut waiter = None;
        while distance(word) != 0 {
            let waiter = match &mut waiter {
                Some(waiter) => waiter,
                none => match Waiter::<P>::begin(self.id(), ticket, self.holder(), distance(word) == 1) {
                    Some(waiter) => none.insert(waiter),
                    None => {
                        word = self.spin(ticket, P::ticks().wrapping_add(budget.ticks()), |_| ());
                        continue;
                    }
                },
            };
            let deadline = P::ticks().wrapping_add(budget.ticks());
            word = self.spin(ticket, deadline, |lock| waiter.holder_is(lock.holder()));
            if distance(word) == 0 {
                break;
            }
            let is_next = distance(word) == 1;
            waiter.halt(is_next, |me| {
                if active(Mutation::EveryHalterNotes) {
                    let note = |word| Some(u64::from(serving(word)) | VcpuId::encode(Some(me)) << VCPU_SHIFT);
                    self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, note).is_ok_and(|word| distance(word) != 0)
                } else if is_next {
                    self.note_halted(serving(word), me) || active(Mutation::HaltThoughNotNoted) || {
                        // The owner has noted us already, or the word has moved.
                        let now = self.word.load(Ordering::Acquire);
                        now == u64::from(serving(word)) | VcpuId::encode(Some(me)) << VCPU_SHIFT
                    }
                } else if active(Mutation::HaltAfterLoad) {
                    distance(self.word.load(Ordering::Acquire)) > 1
                } else {
                    // AcqRel, (O) above: our slot happens before the predecessor's look at it.
                    P::step();
                    let order = weakened(Mutation::HaltAfterRelaxed, Ordering::AcqRel, Ordering::Acquire);
                    distance(self.word.fetch_or(0, order)) > 1
                }
            });
            // Acquire: pairs with the release of the previous owner.
            word = self.word.load(weakened(Mutation::AcquireAfterHaltRelaxed, Ordering::Acquire, Ordering::Relaxed));
        }
        budget.learn();
        // Dropping the waiter empties its slot before the caller can release the lock.
        ticket
    }

    /// Spins until `ticket` is served or the deadline has passed; returns the last word seen (loaded with Acquire).
    /// `handed_over` runs whenever another ticket is served.
    fn spin(&self, ticket: u32, deadline: u64, mut handed_over: impl FnMut(&Self)) -> u64 {
        let word: &Word = &self.word;
        let mut now = word.load(weakened(Mutation::FirstLookRelaxed, Ordering::Acquire, Ordering::Relaxed));
        while serving(now) != ticket {
            let before = now;
            // Who is n places back is not served before n hand-overs: it looks that much more rarely, so that each hand-over
            // moves the cache line to few waiters.
            let places = (ticket.wrapping_sub(serving(now)) & Self::MASK) - 1;
            if places > 0 {
                let look = P::ticks().wrapping_add(u64::from(places.min(MOST_PLACES)) * TICKS_PER_PLACE);
                P::delay(if passed(deadline, look) { look } else { deadline });
            }
            now = P::wait_while(word, before, deadline);
            if serving(now) == ticket {
                // Exclusion rests on our own look, not on the platform's. Acquire: pairs with the release of the previous owner.
                now = word.load(weakened(Mutation::ServedLookRelaxed, Ordering::Acquire, Ordering::Relaxed));
            }
            if serving(now) != serving(before) {
                handed_over(self);
            }
            if passed(P::ticks(), deadline) {
                break;
            }
        }
        now
    }
}

impl<P, const BITS: u32> core::fmt::Debug for TicketLock<P, BITS> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { word, next, holder, .. } = self;
        f.debug_struct("TicketLock").field("word", word).field("next", next).field("holder", holder).finish()
    }
}

impl<P: Platform, const BITS: u32> Default for TicketLock<P, BITS> {
    fn default() -> Self {
        Self::new()
    }
}

#[inline]
fn serving(word: u64) -> u32 {
    word as u32
}

#[cold]
#[inline(never)]
fn kick<P: Platform>(vcpu: VcpuId) {
    P::step();
    P::kick(vcpu);
}

// SAFETY: tickets are handed out one by one and served one at a time: between the return of `lock` or `try_lock` and
// `unlock` with that ticket, `serving` equals it and no other ticket's.
unsafe impl<P: Platform, const BITS: u32> RawLock for TicketLock<P, BITS> {
    type Platform = P;
    type Token = Ticket;

    #[cfg(not(pvlock_loom))]
    #[allow(clippy::declare_interior_mutable_const, reason = "an initial value, copied into each lock")]
    const INIT: Self = Self::new();

    #[inline]
    fn lock(&self) -> Ticket {
        self.lock()
    }

    #[inline]
    fn try_lock(&self) -> Option<Ticket> {
        self.try_lock()
    }

    #[inline]
    unsafe fn unlock(&self, token: Ticket) {
        // SAFETY: the caller's contract is the same.
        unsafe { self.unlock(token) }
    }

    #[inline]
    unsafe fn unlock_fair(&self, token: Ticket) {
        // SAFETY: the caller's contract is the same; every release is fair here.
        unsafe { self.unlock(token) }
    }

    fn is_locked(&self) -> bool {
        self.is_locked()
    }
}
