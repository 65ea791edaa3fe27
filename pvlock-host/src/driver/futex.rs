//! A word that a thread sleeps on: a private futex, or in a model (`--cfg pvlock_loom`) a mutex and a condition variable, which
//! order what the kernel orders: the last look at the word before a sleep, and a wake.

use crate::sync::AtomicU32;
#[cfg(pvlock_loom)]
use crate::sync::{Condvar, Mutex};
use std::time::Duration;

pub(super) struct Futex {
    pub(super) word: AtomicU32,
    #[cfg(pvlock_loom)]
    queue: (Mutex<()>, Condvar),
}

/// A signal ended a sleep.
pub(super) struct Signal;

impl Futex {
    pub(super) fn new(value: u32) -> Self {
        Self {
            word: AtomicU32::new(value),
            #[cfg(pvlock_loom)]
            queue: (Mutex::new(()), Condvar::new()),
        }
    }
}

#[cfg(not(pvlock_loom))]
impl Futex {
    /// Sleeps if the word is `value`, until woken, for `time` at most, or for no reason at all.
    pub(super) fn wait(&self, value: u32, time: Duration) -> Result<(), Signal> {
        use rustix::io::Errno;
        use rustix::thread::futex::{Flags, Timespec, wait};
        let timeout = Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() };
        match wait(&self.word, Flags::PRIVATE, value, Some(&timeout)) {
            Err(Errno::INTR) => Err(Signal),
            _ => Ok(()),
        }
    }

    /// Wakes the sleeper.
    pub(super) fn wake(&self) {
        use rustix::thread::futex::{Flags, wake};
        // An error would mean that the address is not mapped; it is our own memory.
        let _ = wake(&self.word, Flags::PRIVATE, 1);
    }
}

#[cfg(pvlock_loom)]
impl Futex {
    /// As above; neither time nor signals.
    pub(super) fn wait(&self, value: u32, _time: Duration) -> Result<(), Signal> {
        let (queue, woken) = &self.queue;
        let guard = queue.lock().unwrap();
        if self.word.load(core::sync::atomic::Ordering::Relaxed) == value {
            drop(woken.wait(guard).unwrap());
        }
        Ok(())
    }

    /// As above.
    pub(super) fn wake(&self) {
        let (queue, woken) = &self.queue;
        drop(queue.lock().unwrap());
        woken.notify_one();
    }
}
