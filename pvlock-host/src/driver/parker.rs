//! A thread's sleep: a token on a futex.
//!
//! Unlike `std::thread::park`, condition variables and other parkers it reports that a signal came, which VMMs send to stop
//! or pause a vCPU, and it uses nothing but FUTEX_WAIT and FUTEX_WAKE on private memory, which strict seccomp filters allow.

use crate::Unpark;
use core::sync::atomic::{AtomicU32, Ordering};
use rustix::io::Errno;
use rustix::thread::futex;
use std::time::Instant;

const EMPTY: u32 = 0;
const TOKEN: u32 = 1;
const ASLEEP: u32 = 2;

/// `EMPTY → ASLEEP → EMPTY` by the sleeper, `EMPTY/ASLEEP → TOKEN` by a waker, `TOKEN → EMPTY` by the sleeper.
pub(super) struct Parker {
    state: AtomicU32,
}

impl Parker {
    pub(super) const fn new() -> Self {
        Self { state: AtomicU32::new(EMPTY) }
    }

    /// Sleeps until a token is there, a signal comes, or `deadline` passes; takes the token. Only the vCPU's thread calls it.
    pub(super) fn park(&self, deadline: Instant) -> Unpark {
        let mut how = Unpark::Woken;
        if self.state.compare_exchange(EMPTY, ASLEEP, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    how = Unpark::Deadline;
                    break;
                }
                let timeout = rustix::fs::Timespec {
                    tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                    tv_nsec: left.subsec_nanos().into(),
                };
                let result = futex::wait(&self.state, futex::Flags::PRIVATE, ASLEEP, Some(&timeout));
                if self.state.load(Ordering::Relaxed) == TOKEN {
                    break;
                }
                match result {
                    Err(Errno::INTR) => {
                        how = Unpark::Signal;
                        break;
                    }
                    // Awake without a token: another user of a recycled address, or the timeout, which is checked above.
                    _ => continue,
                }
            }
        }
        // Acquire: pairs with `unpark`. A token that came just now counts as well.
        match self.state.swap(EMPTY, Ordering::Acquire) {
            TOKEN => Unpark::Woken,
            _ => how,
        }
    }

    /// Leaves a token, and wakes the sleeper if there is one.
    pub(super) fn unpark(&self) {
        // Release: what was done before is visible to the sleeper.
        if self.state.swap(TOKEN, Ordering::Release) == ASLEEP {
            // An error would mean that the address is not mapped; it is our own memory.
            let _ = futex::wake(&self.state, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn in_a_minute() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_token_left_before_ends_exactly_one_park() {
        let parker = Parker::new();
        parker.unpark();
        parker.unpark();
        assert_eq!(parker.park(in_a_minute()), Unpark::Woken);
        assert_eq!(parker.park(Instant::now()), Unpark::Deadline);
    }

    #[test]
    fn a_sleeper_is_woken() {
        let parker = Parker::new();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| parker.park(in_a_minute()));
            while parker.state.load(Ordering::Relaxed) != ASLEEP {
                std::thread::yield_now();
            }
            parker.unpark();
            assert_eq!(sleeper.join().unwrap(), Unpark::Woken);
        });
    }
}
