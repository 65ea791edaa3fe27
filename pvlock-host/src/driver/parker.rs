//! A thread's sleep: a token on a futex.
//!
//! Unlike `std::thread::park`, condition variables and other parkers it reports that a signal came, which VMMs send to stop
//! or pause a vCPU, and it uses nothing but FUTEX_WAIT and FUTEX_WAKE on private memory, which strict seccomp filters allow.

use super::futex::{Futex, Signal};
use crate::Unpark;
use crate::mutation::{Mutation, active, weakened};
use core::sync::atomic::Ordering;
use std::time::Instant;

const EMPTY: u32 = 0;
const TOKEN: u32 = 1;
const ASLEEP: u32 = 2;

/// `EMPTY → ASLEEP → EMPTY` by the sleeper, `EMPTY/ASLEEP → TOKEN` by a waker, `TOKEN → EMPTY` by the sleeper.
#[allow(unreachable_pub, reason = "public in models")]
pub struct Parker {
    state: Futex,
}

#[allow(unreachable_pub, clippy::new_without_default, missing_docs, reason = "public in models")]
impl Parker {
    pub fn new() -> Self {
        Self { state: Futex::new(EMPTY) }
    }

    /// Sleeps until a token is there, a signal comes, or `deadline` passes; takes the token. Only the vCPU's thread calls it.
    pub fn park(&self, deadline: Instant) -> Unpark {
        let mut how = Unpark::Woken;
        if self.sleeps() {
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    how = Unpark::Deadline;
                    break;
                }
                let result = self.state.wait(ASLEEP, left);
                if self.state.word.load(Ordering::Relaxed) == TOKEN {
                    break;
                }
                match result {
                    Err(Signal) => {
                        how = Unpark::Signal;
                        break;
                    }
                    // Awake without a token: another user of a recycled address, or the timeout, which is checked above.
                    Ok(()) => continue,
                }
            }
        }
        // Acquire: pairs with `unpark`. A token that came just now counts as well.
        match self.state.word.swap(EMPTY, weakened(Mutation::TokenTakenRelaxed, Ordering::Acquire, Ordering::Relaxed)) {
            TOKEN => Unpark::Woken,
            _ => how,
        }
    }

    /// Notes that the thread sleeps, unless there is a token.
    fn sleeps(&self) -> bool {
        if active(Mutation::AsleepByStore) {
            let empty = self.state.word.load(Ordering::Relaxed) == EMPTY;
            if empty {
                self.state.word.store(ASLEEP, Ordering::Relaxed);
            }
            return empty;
        }
        self.state.word.compare_exchange(EMPTY, ASLEEP, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Leaves a token, and wakes the sleeper if there is one.
    pub fn unpark(&self) {
        // Release: what was done before is visible to the sleeper.
        let order = weakened(Mutation::TokenLeftRelaxed, Ordering::Release, Ordering::Relaxed);
        let before = if active(Mutation::TokenByStore) {
            let before = self.state.word.load(Ordering::Relaxed);
            self.state.word.store(TOKEN, order);
            before
        } else {
            self.state.word.swap(TOKEN, order)
        };
        if before == ASLEEP {
            self.state.wake();
        }
    }
}

#[cfg(all(test, not(pvlock_loom)))]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;
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

    fn wait_until_asleep(parker: &Parker) {
        while parker.state.word.load(Ordering::Relaxed) != ASLEEP {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_sleeper_is_woken() {
        let parker = Parker::new();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| parker.park(in_a_minute()));
            wait_until_asleep(&parker);
            parker.unpark();
            assert_eq!(sleeper.join().unwrap(), Unpark::Woken);
        });
    }

    /// Makes SIGUSR1 do nothing but interrupt system calls.
    fn catch_signals() {
        extern "C" fn nothing(_: libc::c_int) {}
        // SAFETY: all zeros is a valid `sigaction`.
        let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
        // Without SA_RESTART, as a VMM's is.
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        // SAFETY: `action` is initialised, and its handler does nothing, which is safe in a signal.
        assert_eq!(unsafe { libc::sigaction(libc::SIGUSR1, &action, core::ptr::null_mut()) }, 0);
    }

    #[test]
    fn a_signal_ends_a_sleep_and_says_so() {
        catch_signals();
        let parker = Parker::new();
        let left = core::sync::atomic::AtomicBool::new(false);
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                // SAFETY: names the calling thread.
                send.send(unsafe { libc::pthread_self() }).unwrap();
                let how = parker.park(in_a_minute());
                left.store(true, Ordering::Relaxed);
                how
            });
            let thread = receive.recv().unwrap();
            wait_until_asleep(&parker);
            // A signal between the note that it sleeps and the sleep is not seen: send until one is.
            while !left.load(Ordering::Relaxed) {
                // SAFETY: the thread has not been joined yet, so its id is valid.
                assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(sleeper.join().unwrap(), Unpark::Signal);
        });
        assert_eq!(parker.park(Instant::now()), Unpark::Deadline, "nothing is left of it");
    }

    #[test]
    fn a_token_counts_before_a_signal_or_the_deadline() {
        catch_signals();
        let parker = Parker::new();
        parker.unpark();
        // SAFETY: signals the calling thread, whose handler does nothing.
        assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
        assert_eq!(parker.park(Instant::now()), Unpark::Woken);
        assert_eq!(parker.park(Instant::now()), Unpark::Deadline);
    }

    #[test]
    fn no_token_is_lost_between_two_threads_that_take_turns() {
        const TURNS: u32 = 20_000;
        let parkers = [Parker::new(), Parker::new()];
        let turn = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for id in 0..2 {
                let (parkers, turn) = (&parkers, &turn);
                scope.spawn(move || {
                    for mine in (0..TURNS).filter(|n| n % 2 == id) {
                        while turn.load(Ordering::Relaxed) != mine {
                            assert_eq!(parkers[id as usize].park(in_a_minute()), Unpark::Woken);
                        }
                        turn.store(mine + 1, Ordering::Relaxed);
                        parkers[1 - id as usize].unpark();
                    }
                });
            }
        });
        assert_eq!(turn.into_inner(), TURNS);
    }
}
