//! Locks that keep their owner in place: preemption or interrupts are disabled *before* a ticket is drawn and restored
//! *after* the lock is released, on every path.

use crate::Platform;
use core::marker::PhantomData;

/// A bare lock of this crate.
///
/// # Safety
///
/// Between the return of `lock` (or a successful `try_lock`) and the `unlock` with its token, no other call returns
/// ownership, and all memory operations of earlier owners happen before.
pub unsafe trait RawLock {
    /// The machine.
    type Platform: Platform;
    /// What `unlock` needs to know.
    type Token;

    /// A free lock.
    #[cfg(not(pvlock_loom))]
    #[allow(clippy::declare_interior_mutable_const, reason = "an initial value, copied into each lock")]
    const INIT: Self;

    /// Takes the lock.
    fn lock(&self) -> Self::Token;

    /// Takes the lock if that needs no waiting; otherwise changes nothing.
    fn try_lock(&self) -> Option<Self::Token>;

    /// Releases the lock.
    ///
    /// # Safety
    ///
    /// The caller owns the lock by the call that returned `token`.
    unsafe fn unlock(&self, token: Self::Token);

    /// Releases the lock so that nobody overtakes those who wait.
    ///
    /// # Safety
    ///
    /// As for [`RawLock::unlock`].
    unsafe fn unlock_fair(&self, token: Self::Token);

    /// Whether somebody owns the lock; stale at once. (A strict lock that somebody waits for has an owner.)
    fn is_locked(&self) -> bool;
}

/// What keeps an owner on its vCPU.
pub trait Scope {
    /// What has to be restored.
    type Saved;

    /// Begins the scope on this vCPU.
    fn enter<P: Platform>() -> Self::Saved;

    /// Ends it.
    fn leave<P: Platform>(saved: Self::Saved);
}

/// No preemption while waiting and owning; interrupts stay as they are. For locks that no interrupt handler takes.
#[derive(Debug)]
pub enum PreemptionOff {}

impl Scope for PreemptionOff {
    type Saved = ();

    #[inline]
    fn enter<P: Platform>() {
        P::disable_preemption();
    }

    #[inline]
    fn leave<P: Platform>((): ()) {
        P::enable_preemption();
    }
}

/// No interrupts while waiting and owning; on return they are as they were. For locks that interrupt handlers take too.
#[derive(Debug)]
pub enum InterruptsOff {}

impl Scope for InterruptsOff {
    /// Whether interrupts were enabled.
    type Saved = bool;

    #[inline]
    fn enter<P: Platform>() -> bool {
        let enabled = P::interrupts_enabled();
        if enabled {
            P::disable_interrupts();
        }
        enabled
    }

    #[inline]
    fn leave<P: Platform>(enabled: bool) {
        if enabled {
            P::enable_interrupts();
        }
    }
}

/// A lock `L` whose waiters and owners are in the scope `S`.
///
/// Scopes nest: locks of the scope [`InterruptsOff`] are released in the reverse of the order in which they were taken.
#[derive(Debug)]
pub struct Scoped<L, S = PreemptionOff> {
    lock: L,
    scope: PhantomData<fn() -> S>,
}

impl<L: RawLock + Default, S: Scope> Default for Scoped<L, S> {
    fn default() -> Self {
        Self::new(L::default())
    }
}

impl<L: RawLock, S: Scope> Scoped<L, S> {
    /// Wraps a lock.
    pub const fn new(lock: L) -> Self {
        Self { lock, scope: PhantomData }
    }
}

// SAFETY: ownership is the inner lock's.
unsafe impl<L: RawLock, S: Scope> RawLock for Scoped<L, S> {
    type Platform = L::Platform;
    type Token = (L::Token, S::Saved);

    #[cfg(not(pvlock_loom))]
    #[allow(clippy::declare_interior_mutable_const, reason = "an initial value, copied into each lock")]
    const INIT: Self = Self::new(L::INIT);

    #[inline]
    fn lock(&self) -> Self::Token {
        let saved = S::enter::<L::Platform>();
        (self.lock.lock(), saved)
    }

    #[inline]
    fn try_lock(&self) -> Option<Self::Token> {
        let saved = S::enter::<L::Platform>();
        match self.lock.try_lock() {
            Some(token) => Some((token, saved)),
            None => {
                S::leave::<L::Platform>(saved);
                None
            }
        }
    }

    #[inline]
    unsafe fn unlock(&self, (token, saved): Self::Token) {
        // SAFETY: the caller's contract.
        unsafe { self.lock.unlock(token) };
        S::leave::<L::Platform>(saved);
    }

    #[inline]
    unsafe fn unlock_fair(&self, (token, saved): Self::Token) {
        // SAFETY: the caller's contract.
        unsafe { self.lock.unlock_fair(token) };
        S::leave::<L::Platform>(saved);
    }

    fn is_locked(&self) -> bool {
        self.lock.is_locked()
    }
}
