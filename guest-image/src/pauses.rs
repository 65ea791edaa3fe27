//! Counting of PAUSEs, for our locks and for those we compare with alike.

use core::marker::PhantomData;
use pvlock_guest::Platform;

/// A platform that counts the PAUSEs of each vCPU: its [`Platform::relax`] advances the count.
pub trait CountPauses: Platform {
    /// PAUSEs of the vCPU that runs, so far.
    fn pauses() -> u64;
}

/// The waiting strategy of the locks that are not ours: [`Platform::relax`], which is one PAUSE and counts it.
pub struct Counting<P>(PhantomData<fn() -> P>);

impl<P: CountPauses> spin::RelaxStrategy for Counting<P> {
    #[inline(always)]
    fn relax() {
        P::relax();
    }
}

// SAFETY: neither function panics nor ends the thread: a `relax` is a PAUSE and an addition that wraps.
unsafe impl<P: CountPauses> mcslock::relax::Relax for Counting<P> {
    #[inline(always)]
    fn new() -> Self {
        Self(PhantomData)
    }

    #[inline(always)]
    fn relax(&mut self) {
        P::relax();
    }
}
