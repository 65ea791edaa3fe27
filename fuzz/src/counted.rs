//! A lock for the engine that counts, and refuses what would hang.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static TAKEN: Cell<usize> = const { Cell::new(0) };
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// How often this thread has taken a lock since the last call.
pub(crate) fn taken() -> usize {
    TAKEN.take()
}

/// How many locks this thread holds.
pub(crate) fn held() -> usize {
    HELD.get()
}

/// A lock of an engine that one thread drives.
pub(crate) struct Counted(AtomicBool);

// SAFETY: `locked` lets one holder in, and panics for a second one.
unsafe impl lock_api::RawMutex for Counted {
    #[allow(clippy::declare_interior_mutable_const, reason = "how lock_api makes locks")]
    const INIT: Self = Self(AtomicBool::new(false));
    type Guard = lock_api::GuardNoSend;

    fn lock(&self) -> Self::Guard {
        self.try_lock().expect("the engine takes a lock that it holds")
    }

    fn try_lock(&self) -> Option<Self::Guard> {
        let free = !self.0.swap(true, Ordering::Acquire);
        free.then(|| {
            TAKEN.set(TAKEN.get() + 1);
            HELD.set(HELD.get() + 1);
            Self::Guard::new()
        })
    }

    unsafe fn unlock(&self, _: Self::Guard) {
        HELD.set(HELD.get() - 1);
        self.0.store(false, Ordering::Release);
    }

    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
