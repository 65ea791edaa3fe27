//! One vCPU as the engine keeps it: a word of latches and reasons to wake, its wait queue, its place on another's.

use crate::dump::SleepKind;
use crate::mutation::{Mutation, active, weakened};
use crate::queue::{Link, List};
use crate::statistics::Counters;
use crate::sync::{AtomicU32, AtomicU64, Lock, Ordering};
use pvlock_protocol::{SlotIndex, WAIT_SLOTS, Wait};

/// Host-private state of a vCPU.
pub(crate) struct Vcpu<R> {
    /// See [`bits`].
    word: AtomicU32,
    /// Who sleeps on this vCPU. The lock also serialises the host's writes to this vCPU's record, so that UNREGISTER can wait
    /// for them. Two of these locks are taken in the order of their vCPUs.
    pub(crate) queue: Lock<R, List>,
    /// Its own place on a queue.
    pub(crate) link: Link,
    /// Since when it sleeps, in ns of the driver's clock.
    pub(crate) parked_at: AtomicU64,
    /// The wait in which it was woken ahead of its turn last.
    pub(crate) early: OneWait,
    /// The outermost wait of those in which it was interrupted last.
    interrupted: OneWait,
    /// Whether it may be in an interrupt handler at its last pause-loop exit. As in `OneWait`, no part of any model.
    handler: core::sync::atomic::AtomicBool,
    /// Answer to its last doorbell.
    pub(crate) answer: AtomicU32,
    /// Argument of its last `RegisterHigh`.
    pub(crate) pfn_high: AtomicU32,
    pub(crate) counters: Counters,
}

/// One wait, as a lock and a ticket. For decisions, or by the vCPU's own thread alone: `core`'s atomics, no part of any model.
#[derive(Default)]
pub(crate) struct OneWait {
    lock: core::sync::atomic::AtomicU64,
    ticket: core::sync::atomic::AtomicU32,
}

impl OneWait {
    /// Notes the wait.
    pub(crate) fn set(&self, lock: u64, ticket: u32) {
        self.lock.store(lock, core::sync::atomic::Ordering::Relaxed);
        self.ticket.store(ticket, core::sync::atomic::Ordering::Relaxed);
    }

    /// Whether it is this one.
    pub(crate) fn is(&self, lock: u64, ticket: u32) -> bool {
        self.lock.load(core::sync::atomic::Ordering::Relaxed) == lock
            && self.ticket.load(core::sync::atomic::Ordering::Relaxed) == ticket
    }
}

/// The vCPU's word. Every transition is one read-modify-write, so a wake and a halt cannot miss each other:
///
/// ```text
/// halt:    own latch (or a pending interrupt, if it takes them) set?  clear it, resume     : set PARKED, park
/// wake:    set latches / WAKE / INTERRUPT; if PARKED and nothing that ends this park was set before: call the waker
/// unpark:  clear PARKED and what ended the park (only the latch of the slot that halted)
/// ```
pub(crate) mod bits {
    /// Bits 0–3: one latch per wait slot. A kick sets all.
    pub(crate) const LATCHES: u32 = (1 << super::WAIT_SLOTS) - 1;
    /// The vCPU sleeps, or is about to.
    pub(crate) const PARKED: u32 = 1 << 4;
    /// Bits 5–6: the slot that halted.
    pub(crate) const SLOT_SHIFT: u32 = 5;
    /// The sleeper takes interrupts.
    pub(crate) const INTERRUPTS_ON: u32 = 1 << 7;
    /// End the park for a reason that is no kick; never set without PARKED.
    pub(crate) const WAKE: u32 = 1 << 8;
    /// An interrupt was injected; stays until a halt or park consumes it.
    pub(crate) const INTERRUPT: u32 = 1 << 9;
    /// The guest said ONLINE.
    pub(crate) const ONLINE: u32 = 1 << 10;
    /// With PARKED: nobody will kick the sleeper, who did not halt but spun; see `spin_park`.
    pub(crate) const SPUN: u32 = 1 << 11;
    /// With PARKED: the sleeper is over a limit; see `limit_park`.
    pub(crate) const LIMITED: u32 = 1 << 12;
    /// An interrupt was injected since the last halt or pause-loop exit.
    pub(crate) const NEW_INTERRUPT: u32 = 1 << 13;
    /// An interrupt was injected since `note_interrupts`.
    pub(crate) const UNNOTED_INTERRUPT: u32 = 1 << 14;
}
use bits::*;

/// What ends the park that `word` describes.
fn ends(word: u32) -> u32 {
    if word & LIMITED != 0 {
        return WAKE;
    }
    let latch = 1 << (word >> SLOT_SHIFT & 3);
    let interrupt = match word & (INTERRUPTS_ON | SPUN) {
        0 => 0,
        INTERRUPTS_ON => INTERRUPT,
        _ => NEW_INTERRUPT,
    };
    latch | WAKE | interrupt
}

/// The result of trying to halt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Halted {
    Parked,
    Latched,
    Interrupt,
    /// Not online, or (a driver's mistake) parked already.
    Refused,
}

/// What ended a park.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Kick,
    Interrupt,
    Wake,
    /// It was asleep for being over a limit, for as long as it should be.
    Limit,
    /// Nothing the engine knows of.
    None,
}

impl<R: lock_api::RawMutex> Vcpu<R> {
    pub(crate) fn new() -> Self {
        Self {
            word: AtomicU32::new(0),
            queue: Lock::new(List::EMPTY),
            link: Link::new(),
            parked_at: AtomicU64::new(0),
            early: OneWait::default(),
            interrupted: OneWait::default(),
            handler: core::sync::atomic::AtomicBool::new(false),
            answer: AtomicU32::new(0),
            pfn_high: AtomicU32::new(0),
            counters: Counters::new(),
        }
    }

    /// One read-modify-write of the word. AcqRel throughout: halt, wake and unpark pair with each other through it.
    fn transition<T>(&self, mut step: impl FnMut(u32) -> (u32, T)) -> T {
        let order = weakened(Mutation::VcpuWordRelaxed, Ordering::AcqRel, Ordering::Relaxed);
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let (new, result) = step(word);
            if active(Mutation::VcpuWordByStore) {
                self.word.store(new, Ordering::Release);
                return result;
            }
            match self.word.compare_exchange_weak(word, new, order, Ordering::Relaxed) {
                Ok(_) => return result,
                Err(now) => word = now,
            }
        }
    }

    pub(crate) fn halt(&self, slot: SlotIndex, interrupts: bool) -> Halted {
        self.transition(|word| {
            let latch = 1 << slot.index();
            if word & ONLINE == 0 || word & PARKED != 0 {
                (word, Halted::Refused)
            } else if word & latch != 0 {
                (word & !latch, Halted::Latched)
            } else if interrupts && word & INTERRUPT != 0 {
                (word & !(INTERRUPT | NEW_INTERRUPT), Halted::Interrupt)
            } else {
                let parked = PARKED | (slot.index() as u32) << SLOT_SHIFT | if interrupts { INTERRUPTS_ON } else { 0 };
                (word | parked, Halted::Parked)
            }
        })
    }

    /// Sets `bits`; whether that ends a park which nothing else had ended yet, so that the waker has to be called.
    fn post(&self, bits: u32) -> bool {
        self.transition(|word| {
            let kept = if active(Mutation::KickNotLatched) { 0 } else { !WAKE };
            let bits = if word & PARKED == 0 { bits & kept } else { bits };
            let wakes = word & PARKED != 0 && word & ends(word) == 0 && bits & ends(word) != 0;
            (word | bits, wakes)
        })
    }

    pub(crate) fn kick(&self) -> bool {
        self.post(LATCHES)
    }

    pub(crate) fn interrupt(&self) -> bool {
        self.post(INTERRUPT | NEW_INTERRUPT | UNNOTED_INTERRUPT)
    }

    pub(crate) fn wake(&self) -> bool {
        self.post(WAKE)
    }

    /// The park is over: what ended it?
    pub(crate) fn unpark(&self) -> Reason {
        self.transition(|word| {
            if word & PARKED == 0 {
                return (word, Reason::None);
            }
            let ended = word & ends(word);
            let reason = if ended & LATCHES != 0 {
                Reason::Kick
            } else if ended & (INTERRUPT | NEW_INTERRUPT) != 0 {
                Reason::Interrupt
            } else if ended != 0 {
                Reason::Wake
            } else if word & LIMITED != 0 {
                Reason::Limit
            } else {
                Reason::None
            };
            // A spinner did not ask for a kick: what ended its sleep stays for the halt that will.
            let used = if word & SPUN == 0 { ended } else { ended & WAKE };
            (word & !(used | PARKED | 3 << SLOT_SHIFT | INTERRUPTS_ON | SPUN | LIMITED | NEW_INTERRUPT), reason)
        })
    }

    /// Starts or ends a life of the vCPU: without what was left of the life before. Whoever calls this wakes it afterwards.
    pub(crate) fn set_online(&self, online: bool) {
        self.transition(|word| {
            (word & !(LATCHES | INTERRUPT | NEW_INTERRUPT | UNNOTED_INTERRUPT | ONLINE) | if online { ONLINE } else { 0 }, ())
        });
    }

    /// The slot that halted, if the vCPU is parked, and whether something has ended the park already.
    pub(crate) fn parked(&self) -> Option<(SlotIndex, bool)> {
        // Acquire: pairs with `halt`: who sees the park sees what was noted of it before.
        let word = self.word.load(Ordering::Acquire);
        let slot = SlotIndex::new((word >> SLOT_SHIFT & 3) as usize)?;
        (word & PARKED != 0).then_some((slot, word & ends(word) != 0))
    }

    pub(crate) fn is_online(&self) -> bool {
        self.word.load(Ordering::Relaxed) & ONLINE != 0
    }

    /// Notes, at a pause-loop exit, whether the vCPU may be in an interrupt handler: until `outermost`, the outermost wait that it
    /// publishes, is another one than that in which an interrupt came. Its own thread calls it.
    pub(crate) fn note_interrupts(&self, outermost: Option<Wait>) {
        let (lock, ticket) = outermost.map_or((0, 0), |wait| (wait.lock.get(), wait.ticket));
        if self.word.load(Ordering::Relaxed) & UNNOTED_INTERRUPT != 0 {
            self.transition(|word| (word & !UNNOTED_INTERRUPT, ()));
            self.interrupted.set(lock, ticket);
        }
        self.handler.store(self.interrupted.is(lock, ticket), core::sync::atomic::Ordering::Relaxed);
    }

    /// What was noted last.
    pub(crate) fn may_be_in_handler(&self) -> bool {
        self.handler.load(core::sync::atomic::Ordering::Relaxed)
    }

    /// Parks a vCPU that spun while it waits in `slot`, for interrupts and kicks to end as well. It uses up no latch and no
    /// interrupt: those are for a halt, perhaps of what this vCPU does at another level. An interrupt that came before the
    /// exit refuses one park only, as the guest has been back since and has taken it if it takes any.
    pub(crate) fn spin_park(&self, slot: SlotIndex) -> Halted {
        self.transition(|word| {
            if word & ONLINE == 0 || word & PARKED != 0 {
                (word, Halted::Refused)
            } else if word & 1 << slot.index() != 0 {
                (word, Halted::Latched)
            } else if word & NEW_INTERRUPT != 0 {
                (word & !NEW_INTERRUPT, Halted::Interrupt)
            } else {
                (word | PARKED | SPUN | (slot.index() as u32) << SLOT_SHIFT, Halted::Parked)
            }
        })
    }

    /// Parks a vCPU for a time that nothing but a WAKE cuts short; `false` if it is parked already.
    pub(crate) fn limit_park(&self) -> bool {
        self.transition(|word| if word & PARKED != 0 { (word, false) } else { (word | PARKED | LIMITED, true) })
    }

    /// What kind of sleep it is, if it is asleep.
    pub(crate) fn sleep_kind(&self) -> SleepKind {
        match self.word.load(Ordering::Relaxed) & (SPUN | LIMITED) {
            0 => SleepKind::Halted,
            SPUN => SleepKind::Spun,
            _ => SleepKind::Limited,
        }
    }

    /// Whether a halt could park the vCPU. Asked before anything is noted of the halt: a vCPU that is parked already (a
    /// driver's mistake) may stand on a queue, whose order depends on the notes.
    pub(crate) fn may_park(&self) -> bool {
        self.word.load(Ordering::Relaxed) & (ONLINE | PARKED) == ONLINE
    }
}
