//! What the uncontended paths really execute: every instruction is single-stepped and decoded.
//!
//! The trap flag makes the CPU raise SIGTRAP after each instruction; the handler notes the address of the next one.

#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use core::arch::{asm, x86_64::_rdtsc};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
use pvlock_guest::{Guest, GuestRef, Platform, PreemptableTicketLock, TicketLock};
use pvlock_host::hypercalls::{Access, Direct, Status};
use pvlock_host::protocol::{Features, SlotIndex, VcpuId};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

static NATIVE: Guest<1> = Guest::new();
static PARAVIRTUAL: Guest<1> = Guest::new();

/// A kernel with its guest in a static and the vCPU's number in one word, as a per-CPU variable is.
macro_rules! kernel {
    ($name:ident, $guest:ident) => {
        enum $name {}

        impl Platform for $name {
            fn guest() -> GuestRef<'static> {
                $guest.as_ref()
            }

            fn current() -> Option<VcpuId> {
                static CURRENT: AtomicU32 = AtomicU32::new(1);
                VcpuId::decode(CURRENT.load(Ordering::Relaxed).into())
            }

            fn ticks() -> u64 {
                // SAFETY: every x86-64 processor has a time-stamp counter that Linux lets user space read.
                unsafe { _rdtsc() }
            }

            fn halt(_: SlotIndex, _: bool) {}

            fn kick(_: VcpuId) {}
        }
    };
}
kernel!(Native, NATIVE);
kernel!(Paravirtual, PARAVIRTUAL);

fn register() {
    let region = PARAVIRTUAL.as_ref().region();
    let host = Direct(move |access| {
        if let Access::Ring(_) = access {
            region.header.accepted.store(Features::HALT.bits(), Ordering::Relaxed);
        }
        Status::Ok.encode()
    });
    let vcpu = VcpuId::new(0).unwrap();
    PARAVIRTUAL.as_ref().register(&host, 0, [vcpu]).unwrap();
    PARAVIRTUAL.as_ref().online(&host, vcpu).unwrap();
}

/// What a textbook ticket lock does, to compare with.
struct Plain {
    next: AtomicU32,
    serving: AtomicU32,
}

macro_rules! probes {
    ($($name:ident: $lock:ty = $init:expr, |$it:ident| $code:expr;)*) => {
        $(
            #[inline(never)]
            extern "C" fn $name() {
                static LOCK: $lock = $init;
                let $it = &LOCK;
                $code
            }
        )*
    };
}

probes! {
    nothing: () = (), |_lock| ();
    plain: Plain = Plain { next: AtomicU32::new(0), serving: AtomicU32::new(0) }, |lock| {
        let ticket = lock.next.fetch_add(1, Ordering::Relaxed);
        while lock.serving.load(Ordering::Acquire) != ticket {
            core::hint::spin_loop();
        }
        lock.serving.store(ticket.wrapping_add(1), Ordering::Release);
    };
    ticket_native: TicketLock<Native> = TicketLock::new(), |lock| {
        let ticket = lock.lock();
        // SAFETY: locked in the line above.
        unsafe { lock.unlock(ticket) };
    };
    ticket_paravirtual: TicketLock<Paravirtual> = TicketLock::new(), |lock| {
        let ticket = lock.lock();
        // SAFETY: locked in the line above.
        unsafe { lock.unlock(ticket) };
    };
    preemptable_native: PreemptableTicketLock<Native> = PreemptableTicketLock::new(), |lock| {
        let held = lock.lock();
        // SAFETY: locked in the line above.
        unsafe { lock.unlock(held) };
    };
    preemptable_paravirtual: PreemptableTicketLock<Paravirtual> = PreemptableTicketLock::new(), |lock| {
        let held = lock.lock();
        // SAFETY: locked in the line above.
        unsafe { lock.unlock(held) };
    };
}

const MOST: usize = 512;
static ADDRESSES: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];
static STEPS: AtomicUsize = AtomicUsize::new(0);
/// There is one signal handler and one list of addresses.
static TURN: Mutex<()> = Mutex::new(());

extern "C" fn step(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a `ucontext_t` to handlers installed with SA_SIGINFO.
    let rip = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] };
    let at = STEPS.fetch_add(1, Ordering::Relaxed);
    if let Some(address) = ADDRESSES.get(at) {
        address.store(rip as usize, Ordering::Relaxed);
    }
}

/// The instructions that a call of `probe` executes, without the call itself.
fn trace(probe: extern "C" fn()) -> Vec<Instruction> {
    let _turn = TURN.lock().unwrap();
    // Once without being watched: nothing is to be initialised lazily any more.
    probe();
    STEPS.store(0, Ordering::Relaxed);
    let mut action: libc::sigaction = // SAFETY: all zeros is a valid `sigaction`.
        unsafe { core::mem::zeroed() };
    action.sa_sigaction = step as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    let mut before = action;
    // SAFETY: the handler does nothing but atomic operations; the old one is restored below.
    unsafe {
        assert_eq!(libc::sigaction(libc::SIGTRAP, &action, &mut before), 0);
    }
    // SAFETY: sets and clears only the trap flag, around a call with the C ABI, whose clobbers are declared; the stack
    // pointer is aligned for it and the red zone stepped over.
    unsafe {
        asm!(
            "mov r12, rsp",
            "sub rsp, 256",
            "and rsp, -16",
            "pushfq",
            "pushfq",
            "or qword ptr [rsp], 0x100",
            "popfq",
            "call r13",
            "popfq",
            "mov rsp, r12",
            in("r13") probe,
            out("r12") _,
            clobber_abi("C"),
        );
        libc::sigaction(libc::SIGTRAP, &before, core::ptr::null_mut());
    }
    let steps = STEPS.load(Ordering::Relaxed);
    assert!(steps < MOST, "the probe went into a loop");
    let executed = ADDRESSES[..steps].iter().map(|address| decode(address.load(Ordering::Relaxed)));
    // The first stop is before the call, the last ones are behind the return.
    let executed: Vec<_> = executed.collect();
    let first = executed.iter().position(|instruction| instruction.ip() == probe as usize as u64).expect("the probe ran");
    let mut depth = 0;
    let mut body = Vec::new();
    for instruction in executed.into_iter().skip(first) {
        body.push(instruction);
        match instruction.flow_control() {
            FlowControl::Call | FlowControl::IndirectCall => depth += 1,
            FlowControl::Return if depth == 0 => break,
            FlowControl::Return => depth -= 1,
            _ => {}
        }
    }
    body
}

fn decode(address: usize) -> Instruction {
    // SAFETY: the CPU has just executed code at this address; the 15 bytes an instruction can have at most lie in the
    // program's text, which is readable and longer than that behind any of its functions but the very last.
    let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, 15) };
    Decoder::with_ip(64, bytes, address as u64, DecoderOptions::NONE).decode()
}

#[derive(Debug, PartialEq, Eq)]
struct Counts {
    instructions: usize,
    locked: usize,
    calls: usize,
    conditional: usize,
}

fn counts(probe: extern "C" fn()) -> Counts {
    let body = trace(probe);
    let is_call = |flow| matches!(flow, FlowControl::Call | FlowControl::IndirectCall);
    let implicitly_locked = |i: &&Instruction| i.mnemonic() == iced_x86::Mnemonic::Xchg && i.op_kind(0) == iced_x86::OpKind::Memory;
    for instruction in &body {
        eprintln!("{:#x} {instruction}", instruction.ip());
    }
    // The probe's own frame: a stack slot so that the slow path could be called. Real callers have one anyway.
    let is_frame = |i: &&Instruction| matches!(i.mnemonic(), iced_x86::Mnemonic::Push | iced_x86::Mnemonic::Pop);
    let counts = Counts {
        instructions: body.iter().filter(|i| !is_frame(i)).count(),
        locked: body.iter().filter(|i| i.has_lock_prefix() || implicitly_locked(i)).count(),
        calls: body.iter().filter(|i| is_call(i.flow_control())).count(),
        conditional: body.iter().filter(|i| i.flow_control() == FlowControl::ConditionalBranch).count(),
    };
    eprintln!("{counts:?}");
    counts
}

/// These look at what the optimiser made.
fn optimised() -> bool {
    if cfg!(debug_assertions) {
        pvlock_tests::skip(&"needs optimised code: run with --release");
    }
    !cfg!(debug_assertions)
}

#[test]
fn the_stepper_sees_an_empty_function_as_one_return() {
    if optimised() {
        assert_eq!(counts(nothing), Counts { instructions: 1, locked: 0, calls: 0, conditional: 0 });
    }
}

#[test]
fn row_23_native_ticket_lock_is_a_plain_one_and_a_predictable_branch_each_way() {
    if optimised() {
        let (plain, ours) = (counts(plain), counts(ticket_native));
        assert_eq!((ours.locked, ours.calls), (1, 0), "one locked instruction to lock, a plain store to unlock, no call");
        assert_eq!(ours.conditional, plain.conditional + 2, "one more branch to lock, one to unlock");
        assert_eq!(ours.instructions, plain.instructions + 6, "a branch is load, test, jump: {ours:?} {plain:?}");
    }
}

#[test]
fn paravirtual_ticket_lock_is_two_locked_instructions() {
    register_once();
    if optimised() {
        let ours = counts(ticket_paravirtual);
        assert_eq!((ours.locked, ours.calls), (2, 0), "{ours:?}");
    }
}

#[test]
fn preemptable_lock_is_two_locked_instructions_in_either_mode() {
    register_once();
    if optimised() {
        for probe in [preemptable_native as extern "C" fn(), preemptable_paravirtual] {
            let ours = counts(probe);
            assert_eq!((ours.locked, ours.calls), (2, 0), "{ours:?}");
        }
    }
}

fn register_once() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(register);
}
