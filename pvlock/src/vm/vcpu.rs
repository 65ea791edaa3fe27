//! One vCPU: its run loop, and the state that others may look at meanwhile.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

use kvm_ioctls::{VcpuExit, VcpuFd};
use pvlock_guest_image::boot::PANIC_TEXT;
use pvlock_guest_image::{VcpuBlock, port};

use super::counters::{ExitCounters, ExitKind};
use super::cpu;
use super::dump::{LastExit, Registers, VcpuState};
use super::kick::{self, ImmediateExit};
use super::layout;
use super::memory::GuestMemory;
use super::running::{Shared, lock};

/// What the caller's handler wants after an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Back into the guest.
    Resume,
    /// This vCPU is done; the others go on.
    Finish,
    /// All vCPUs are done: the VM stops.
    Stop,
    /// This vCPU is reset: it starts again as it first did, while memory stays as it is.
    Reset,
    /// The handler does not know this exit: the VM ends with [`VcpuError::Unhandled`].
    Unhandled,
}

/// How a vCPU ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VcpuEnd {
    /// The guest wrote its exit code.
    Exited(u32),
    /// The handler said [`Next::Finish`].
    Finished,
    /// Somebody stopped the VM.
    Stopped,
    /// It was the cause of a [`VmFailure`](super::VmFailure), or failed after another one.
    Failed,
}

/// Why a vCPU cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// An exception, and no IDT to take it.
    #[error("triple fault: the guest took an exception, and it has no handler for any (see rip)")]
    TripleFault,
    /// KVM gave up.
    #[error(
        "KVM internal error {suberror} (data {data:x?}): an instruction that this KVM cannot run; on software KVM \
         that is most of CPL 0, use --cpl 3"
    )]
    Internal {
        /// `KVM_INTERNAL_ERROR_*`; 1 is a failed emulation.
        suberror: u32,
        /// What KVM adds; for a failed emulation flags and instruction bytes.
        data: Vec<u64>,
    },
    /// The processor refused the guest's state.
    #[error("the processor refused to enter the guest: reason {reason:#x} on CPU {cpu}")]
    EntryFailed {
        /// The processor's reason.
        reason: u64,
        /// Host CPU.
        cpu: u32,
    },
    /// The guest program panicked.
    #[error("the guest panicked: {text}")]
    GuestPanic {
        /// Its message, without control characters.
        text: String,
    },
    /// An exit that the caller's handler does not know.
    #[error("no handler for {kind} at {place:#x}, {bytes} bytes wide", kind = kind.name())]
    Unhandled {
        /// Kind of exit.
        kind: ExitKind,
        /// Port or address; 0 for kinds without one.
        place: u64,
        /// Width of the access in bytes.
        bytes: usize,
    },
    /// An exit that no guest of ours can cause.
    #[error("unexpected exit from KVM: {exit}")]
    Unexpected {
        /// As KVM reports it.
        exit: String,
    },
    /// Its registers could not be set for a reset.
    #[error(transparent)]
    Reset(#[from] super::VmError),
    /// `KVM_RUN` itself failed.
    #[error("KVM_RUN failed: {source}")]
    Run {
        /// What the kernel said.
        source: kvm_ioctls::Error,
    },
    /// The caller's handler panicked; a bug on our side.
    #[error("the exit handler panicked")]
    HandlerPanicked,
}

/// What others see of a vCPU while its thread runs.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) exits: ExitCounters,
    immediate_exit: ImmediateExit,
    /// The thread to signal, while there is one.
    tid: Mutex<Option<libc::pid_t>>,
    state: AtomicU8,
    /// `LastExit` in one word: present bit, kind, place.
    last_exit: AtomicU64,
    dump_wanted: AtomicBool,
    answer: Mutex<Answer>,
    answered: Condvar,
}

#[derive(Debug, Default)]
struct Answer {
    fresh: bool,
    registers: Option<Registers>,
    end: Option<VcpuEnd>,
}

impl Slot {
    pub(super) fn new(immediate_exit: ImmediateExit) -> Self {
        Self {
            exits: ExitCounters::default(),
            immediate_exit,
            tid: Mutex::new(None),
            state: AtomicU8::new(VcpuState::Starting as u8),
            last_exit: AtomicU64::new(0),
            dump_wanted: AtomicBool::new(false),
            answer: Mutex::new(Answer::default()),
            answered: Condvar::new(),
        }
    }

    /// Gets the thread out of the guest, or out of a blocking system call of its handler, to look at
    /// its flags. The caller has set the flag. See [`kick`].
    pub(super) fn kick(&self) {
        self.immediate_exit.set();
        // The thread takes its id back under this lock before it ends, so the signal cannot go
        // to a newer thread with the same id.
        if let Some(tid) = *lock(&self.tid) {
            kick::send(tid);
        }
    }

    pub(super) fn state(&self) -> VcpuState {
        VcpuState::from_u8(self.state.load(Ordering::Relaxed))
    }

    pub(super) fn last_exit(&self) -> Option<LastExit> {
        let word = self.last_exit.load(Ordering::Relaxed);
        let kind = *ExitKind::ALL.get((word >> 32) as usize & 0xff)?;
        (word >> 63 == 1).then_some(LastExit { kind, place: word as u32 })
    }

    pub(super) fn end(&self) -> Option<VcpuEnd> {
        lock(&self.answer).end
    }

    /// Asks the thread for its registers; [`wait_registers`](Self::wait_registers) collects them.
    pub(super) fn ask_registers(&self) {
        lock(&self.answer).fresh = false;
        // Pairs with the Acquire swap in `run`.
        self.dump_wanted.store(true, Ordering::Release);
        self.kick();
    }

    /// The registers of a vCPU that rests, or has ended.
    pub(super) fn registers(&self) -> Option<Registers> {
        lock(&self.answer).registers
    }

    /// The registers asked for, or the last ones of an ended vCPU, or `None` after the deadline.
    pub(super) fn wait_registers(&self, deadline: std::time::Instant) -> Option<Registers> {
        let mut answer = lock(&self.answer);
        while !answer.fresh && answer.end.is_none() {
            let left = deadline.checked_duration_since(std::time::Instant::now())?;
            answer = match self.answered.wait_timeout(answer, left) {
                Ok((answer, _)) => answer,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        answer.registers
    }

    fn note_exit(&self, seen: Seen) {
        let word = 1 << 63 | (seen.kind as u64) << 32 | u64::from(seen.place as u32);
        self.last_exit.store(word, Ordering::Relaxed);
    }

    fn set_state(&self, state: VcpuState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    fn publish(&self, registers: Option<Registers>, end: Option<VcpuEnd>) {
        let mut answer = lock(&self.answer);
        answer.fresh = true;
        answer.registers = registers.or(answer.registers);
        answer.end = end.or(answer.end);
        self.answered.notify_all();
    }

    /// The calling thread is this vCPU's from now on.
    pub(super) fn attach(&self) {
        kick::unblock();
        *lock(&self.tid) = Some(kick::own_tid());
    }

    /// The calling thread is done with this vCPU.
    pub(super) fn detach(&self, registers: Option<Registers>, end: VcpuEnd) {
        *lock(&self.tid) = None;
        self.set_state(VcpuState::Ended);
        self.publish(registers, Some(end));
    }
}

/// What is worth remembering of an exit that the handler consumes.
#[derive(Clone, Copy)]
struct Seen {
    kind: ExitKind,
    place: u64,
    bytes: usize,
}

impl Seen {
    fn of(exit: &VcpuExit<'_>) -> Self {
        let (place, bytes) = match exit {
            VcpuExit::IoIn(port, data) => (u64::from(*port), data.len()),
            VcpuExit::IoOut(port, data) => (u64::from(*port), data.len()),
            VcpuExit::MmioRead(address, data) => (*address, data.len()),
            VcpuExit::MmioWrite(address, data) => (*address, data.len()),
            VcpuExit::X86Rdmsr(msr) => (u64::from(msr.index), 8),
            VcpuExit::X86Wrmsr(msr) => (u64::from(msr.index), 8),
            _ => (0, 0),
        };
        Self { kind: ExitKind::of(exit), place, bytes }
    }
}

/// What to do once the exit no longer borrows the vCPU.
enum After {
    Go,
    End(VcpuEnd),
    Reset,
    StopAll,
    Fail(VcpuError),
    Panicked,
    Internal,
}

/// Runs the vCPU until it ends. Errors are those of the guest or of KVM, never a panic.
pub(super) fn run<H>(fd: &mut VcpuFd, vcpu: usize, shared: &Shared, handler: &H) -> Result<VcpuEnd, VcpuError>
where
    H: Fn(usize, VcpuExit<'_>) -> Next,
{
    let slot = &shared.slots[vcpu];
    loop {
        if shared.stopping() {
            return Ok(VcpuEnd::Stopped);
        }
        if shared.pausing() {
            slot.publish(Registers::read(fd), None);
            shared.rest();
            continue;
        }
        // A plain load first: the swap is a locked instruction, and this loop is the hot path.
        // The swap's Acquire pairs with the Release in `ask_registers`.
        if slot.dump_wanted.load(Ordering::Relaxed) && slot.dump_wanted.swap(false, Ordering::Acquire) {
            slot.publish(Registers::read(fd), None);
        }
        slot.set_state(VcpuState::Guest);
        let after = match fd.run() {
            Ok(exit) => {
                slot.exits.count(ExitKind::of(&exit));
                after_exit(exit, vcpu, slot, handler)
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                slot.exits.count(ExitKind::Interrupted);
                slot.immediate_exit.clear();
                After::Go
            }
            Err(source) => After::Fail(VcpuError::Run { source }),
        };
        match after {
            After::Go => {}
            After::End(end) => return Ok(end),
            After::Reset => {
                // KVM has the rest of the exit's instruction still to do: it must not do that to the new life.
                slot.immediate_exit.set();
                let _ = fd.run();
                slot.immediate_exit.clear();
                let (cpl, entry) = shared.start;
                cpu::set_up(fd, vcpu, cpl, entry)?;
            }
            After::StopAll => {
                shared.request_stop();
                return Ok(VcpuEnd::Stopped);
            }
            After::Fail(error) => return Err(error),
            After::Panicked => {
                return Err(VcpuError::GuestPanic { text: panic_text(&shared.memory, vcpu) });
            }
            After::Internal => return Err(internal_error(fd)),
        }
    }
}

fn after_exit<H>(exit: VcpuExit<'_>, vcpu: usize, slot: &Slot, handler: &H) -> After
where
    H: Fn(usize, VcpuExit<'_>) -> Next,
{
    match exit {
        VcpuExit::IoOut(port::EXIT, data) => {
            let mut code = [0; 4];
            for (to, from) in code.iter_mut().zip(data) {
                *to = *from;
            }
            After::End(VcpuEnd::Exited(u32::from_le_bytes(code)))
        }
        VcpuExit::IoOut(port::PANIC, _) => After::Panicked,
        VcpuExit::IoIn(..)
        | VcpuExit::IoOut(..)
        | VcpuExit::MmioRead(..)
        | VcpuExit::MmioWrite(..)
        | VcpuExit::Hlt
        | VcpuExit::Hypercall(_)
        | VcpuExit::X86Rdmsr(_)
        | VcpuExit::X86Wrmsr(_) => {
            let seen = Seen::of(&exit);
            slot.note_exit(seen);
            slot.set_state(VcpuState::Handler);
            match handler(vcpu, exit) {
                Next::Resume => After::Go,
                Next::Finish => After::End(VcpuEnd::Finished),
                Next::Stop => After::StopAll,
                Next::Reset => After::Reset,
                Next::Unhandled => After::Fail(VcpuError::Unhandled { kind: seen.kind, place: seen.place, bytes: seen.bytes }),
            }
        }
        VcpuExit::Intr => {
            slot.immediate_exit.clear();
            After::Go
        }
        VcpuExit::Shutdown => After::Fail(VcpuError::TripleFault),
        VcpuExit::InternalError => After::Internal,
        VcpuExit::FailEntry(reason, cpu) => After::Fail(VcpuError::EntryFailed { reason, cpu }),
        other => After::Fail(VcpuError::Unexpected { exit: format!("{other:?}") }),
    }
}

/// What KVM wrote about an internal error.
fn internal_error(fd: &mut VcpuFd) -> VcpuError {
    // SAFETY: KVM fills in this member of the union for the exit that was just reported; it is
    // plain numbers, for which every bit pattern is valid.
    let internal = unsafe { fd.get_kvm_run().__bindgen_anon_1.internal };
    let count = (internal.ndata as usize).min(internal.data.len());
    VcpuError::Internal { suberror: internal.suberror, data: internal.data[..count].to_vec() }
}

/// The panic text of a vCPU. The guest wrote it: the length is clipped, and whatever is not
/// printable (terminal escapes!) is replaced.
fn panic_text(memory: &GuestMemory, vcpu: usize) -> String {
    let block = layout::vcpu_block(vcpu);
    let len = memory
        .word(block + std::mem::offset_of!(VcpuBlock, panic_len) as u64)
        .map_or(0, |word| word.load(Ordering::Relaxed))
        .min(PANIC_TEXT as u64);
    let mut bytes = vec![0; len as usize];
    if memory.read(block + std::mem::offset_of!(VcpuBlock, panic_text) as u64, &mut bytes).is_err() {
        return "(its text is outside guest RAM)".to_owned();
    }
    String::from_utf8_lossy(&bytes)
        .chars()
        .map(|c| match c {
            '\n' => ' ',
            c if c.is_control() => '\u{fffd}',
            c => c,
        })
        .collect()
}
