//! Getting a vCPU thread out of the guest without losing the request.
//!
//! A signal alone is not enough: one that lands after the thread looked at its flags and
//! before it entered `KVM_RUN` is gone. `immediate_exit` in the vCPU's shared page closes
//! the gap: while it is set, `KVM_RUN` returns EINTR before any guest instruction.
//!
//! ```text
//! who asks                                vCPU thread
//! flag = true            (Release)
//! immediate_exit = 1     (SeqCst)
//! signal to the thread                    KVM_RUN -> EINTR, either from the signal (it was
//!                                         inside) or from immediate_exit (it was not yet)
//!                                         immediate_exit.swap(0)  (SeqCst, pairs with the store)
//!                                         look at the flags (Acquire, pairs with Release)
//! ```
//!
//! If the swap comes before the store, the next `KVM_RUN` returns at once and the flags are
//! looked at again; if after, it reads the 1 and so sees the flag. The signal handler does nothing.

use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuFd;

/// Length of the mapping: `immediate_exit` is in the first page.
const PAGE: usize = 4096;

const _: () = assert!(offset_of!(kvm_run, immediate_exit) < PAGE);

/// The signal that interrupts `KVM_RUN`: the first real-time signal free for applications.
pub(super) fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn do_nothing(_signal: libc::c_int) {}

/// Installs the handler, once for the process. No SA_RESTART: system calls must end with EINTR.
pub(super) fn install_handler() -> io::Result<()> {
    static RESULT: OnceLock<i32> = OnceLock::new();
    let errno = *RESULT.get_or_init(|| {
        // SAFETY: an all-zero sigaction is a valid one (no flags, empty mask).
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = do_nothing as extern "C" fn(libc::c_int) as usize;
        // SAFETY: `action` is initialised and its handler does nothing, which is async-signal-safe;
        // the old action is not asked for.
        if unsafe { libc::sigaction(signal(), &action, ptr::null_mut()) } == 0 {
            0
        } else {
            io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
        }
    });
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
}

/// Lets the signal through to the calling thread, whatever mask it inherited.
pub(super) fn unblock() {
    // SAFETY: the set is initialised by sigemptyset before use; changing the mask of the calling
    // thread touches no memory but the set.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal());
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, ptr::null_mut());
    }
}

/// Thread id of the caller, for [`send`].
pub(super) fn own_tid() -> libc::pid_t {
    // SAFETY: takes no arguments and cannot fail.
    unsafe { libc::gettid() }
}

/// Signals one thread of this process. A thread that is gone is no error.
pub(super) fn send(tid: libc::pid_t) {
    // SAFETY: tgkill takes plain numbers; at worst there is no such thread and it fails.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, signal()) };
}

/// The `immediate_exit` byte of a vCPU, through a mapping of our own, so that any thread may set
/// it while the vCPU's thread uses the rest of the page.
#[derive(Debug)]
pub(super) struct ImmediateExit {
    page: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value and is only used through one atomic byte.
unsafe impl Send for ImmediateExit {}
// SAFETY: as above.
unsafe impl Sync for ImmediateExit {}

impl ImmediateExit {
    pub(super) fn map(fd: &VcpuFd) -> io::Result<Self> {
        // SAFETY: a new shared mapping of the vCPU's first page at an address of the kernel's choice.
        let raw =
            unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = NonNull::new(raw.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { page })
    }

    fn byte(&self) -> &AtomicU8 {
        // SAFETY: the offset is inside the page (checked at compile time), which stays mapped while
        // `self` lives; the kernel reads the byte as a whole and nobody else in this process
        // touches it through another mapping.
        unsafe { AtomicU8::from_ptr(self.page.as_ptr().add(offset_of!(kvm_run, immediate_exit))) }
    }

    /// From now on `KVM_RUN` returns EINTR at once.
    pub(super) fn set(&self) {
        self.byte().store(1, Ordering::SeqCst);
    }

    /// The thread came out: take the request back before looking at the flags.
    pub(super) fn clear(&self) {
        self.byte().swap(0, Ordering::SeqCst);
    }
}

impl Drop for ImmediateExit {
    fn drop(&mut self) {
        // SAFETY: exactly the page that `map` mapped; nothing borrows it any more.
        unsafe { libc::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::vm::{self, Cpl, Vm, VmConfig, layout};

    #[test]
    fn a_request_made_before_kvm_run_is_not_lost() {
        let kvm = match vm::open() {
            Ok(kvm) => kvm,
            Err(error) => {
                let ci = std::env::var("CI").is_ok_and(|value| value == "true");
                assert!(!(ci && std::path::Path::new("/dev/kvm").exists()), "{error}");
                return eprintln!("SKIPPED: a_request_made_before_kvm_run_is_not_lost: {error}");
            }
        };
        let config = VmConfig { vcpus: 1, ram_bytes: layout::MIN_RAM, cpl: Cpl::Three, irqchip: false };
        let mut vm = Vm::new(&kvm, &config, crate::GUEST_IMAGE, |_, _| {}).expect("a VM");
        let mut fd = vm.fds.remove(0);
        // `jmp $` at the entry point: nothing but the request can end KVM_RUN.
        let entry = fd.get_regs().expect("registers").rip;
        vm.memory.write(entry, &[0xeb, 0xfe]).expect("in RAM");
        install_handler().expect("a signal handler");
        let request = ImmediateExit::map(&fd).expect("a mapping");
        request.set();

        let (tids, tid) = mpsc::channel();
        let (results, result) = mpsc::channel();
        let runner = thread::spawn(move || {
            unblock();
            tids.send(own_tid()).expect("the test waits");
            let errno = fd.run().map(|exit| format!("{exit:?}")).map_err(|error| error.errno());
            results.send(errno).expect("the test waits");
        });
        let tid = tid.recv().expect("the runner starts");
        let got = result.recv_timeout(Duration::from_secs(10));
        if got.is_err() {
            send(tid); // so that the test fails instead of hanging
        }
        runner.join().expect("the runner does not panic");
        assert_eq!(got, Ok(Err(libc::EINTR)), "the request was lost");
    }
}
