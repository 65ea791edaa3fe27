//! Signals to threads, at any moment of theirs: whoever gets one sleeps in its handler for a time that the sender chooses.
//!
//! A nap of no length is a signal and nothing else: it ends system calls with EINTR, and takes a vCPU out of the guest. A longer
//! one is a vCPU that does not run for a while, wherever it was: with a lock held, between two steps of a halt, inside the host.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

/// The second real-time signal that is free for applications; the VMM has the first.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

/// Sleeps for as many µs as the sender said.
extern "C" fn sleep(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo; this signal is only sent with a value.
    let us = unsafe { (*info).si_value().sival_ptr }.addr();
    if us == 0 {
        return;
    }
    let time = libc::timespec { tv_sec: (us / 1_000_000) as i64, tv_nsec: (us % 1_000_000 * 1000) as i64 };
    // SAFETY: nanosleep is safe in a signal handler, and so is errno, which is the thread's own and has to be what it was.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::nanosleep(&raw const time, ptr::null_mut());
        *errno = before;
    }
}

/// A signal with the time to sleep.
#[derive(Clone, Copy, Debug)]
pub struct Nap(Duration);

impl Nap {
    /// Installs the handler, once for the process.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new(time: Duration) -> io::Result<Self> {
        static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
        let install = || {
            // SAFETY: an all-zero sigaction is a valid one (empty mask).
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            // No SA_RESTART: system calls end with EINTR, as they do for the signals of a VMM.
            action.sa_flags = libc::SA_SIGINFO;
            action.sa_sigaction = sleep as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) as usize;
            // SAFETY: `action` is initialised, and its handler does only what is safe in a signal.
            match unsafe { libc::sigaction(signal(), &raw const action, ptr::null_mut()) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
            }
        };
        INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error).map(|()| Self(time))
    }

    /// Sends it. A thread that has ended is no error.
    pub fn send<T>(self, thread: &JoinHandle<T>) {
        let value = libc::sigval { sival_ptr: ptr::without_provenance_mut(self.0.as_micros() as usize) };
        // SAFETY: the thread has not been joined, so its id is valid, even if it has ended.
        unsafe { libc::pthread_sigqueue(thread.as_pthread_t(), signal(), value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nap_ends_a_system_call() {
        let nap = Nap::new(Duration::from_micros(10)).expect("a handler");
        let thread = std::thread::spawn(|| {
            let time = libc::timespec { tv_sec: 60, tv_nsec: 0 };
            // SAFETY: the pointer is to a valid timespec.
            let slept = unsafe { libc::nanosleep(&raw const time, ptr::null_mut()) };
            (slept, io::Error::last_os_error().raw_os_error())
        });
        // One before the sleep ends nothing.
        while !thread.is_finished() {
            nap.send(&thread);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(thread.join().expect("no panic"), (-1, Some(libc::EINTR)));
    }
}
