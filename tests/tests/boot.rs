//! The boot layer on the machine's own KVM.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pvlock::vm::{
    self, Cpl, ExitKind, GuestMemory, KvmKind, Next, VcpuEnd, VcpuError, VcpuExit, VcpuState, Vm, VmConfig, VmError, VmFailure,
};
use pvlock_guest_image::{VcpuBlock, port};

/// Generous: a hang is a failure, a slow machine is not.
const LIMIT: Duration = Duration::from_secs(30);

/// KVM, or a loud note that this test did not run.
fn kvm() -> Option<kvm_ioctls::Kvm> {
    vm::open().inspect_err(pvlock_tests::skip).ok()
}

/// The level that runs natively here.
fn cpl() -> Cpl {
    Cpl::best_for(KvmKind::detect())
}

fn config(vcpus: usize) -> VmConfig {
    VmConfig { vcpus, ram_bytes: 16 << 20, cpl: cpl(), irqchip: false }
}

fn new_vm(kvm: &kvm_ioctls::Kvm, vcpus: usize, image: &[u8]) -> Vm {
    Vm::new(kvm, &config(vcpus), image, |_, _| {}).expect("a VM")
}

/// Answers ECHO, and notes what each vCPU asked.
fn echo_handler(asked: &'static [AtomicU32]) -> impl Fn(usize, VcpuExit<'_>) -> Next + Send + Sync {
    move |vcpu, exit| match exit {
        VcpuExit::IoOut(port::ECHO, data) => {
            let Ok(word) = data.try_into() else {
                return Next::Unhandled;
            };
            asked[vcpu].store(u32::from_le_bytes(word), Ordering::Relaxed);
            Next::Resume
        }
        VcpuExit::IoIn(port::ECHO, data) => {
            let answer = port::echo(asked[vcpu].load(Ordering::Relaxed));
            data.copy_from_slice(&answer.to_le_bytes()[..data.len().min(4)]);
            Next::Resume
        }
        _ => Next::Unhandled,
    }
}

fn word(memory: &GuestMemory, address: u64) -> u64 {
    memory.word(address).expect("in RAM").load(Ordering::Relaxed)
}

fn every_vcpu_completes_the_round_trip(vcpus: usize) {
    let Some(kvm) = kvm() else { return };
    let asked: &'static [AtomicU32] = (0..vcpus).map(|_| AtomicU32::new(0)).collect::<Vec<_>>().leak();
    let vm = new_vm(&kvm, vcpus, pvlock::GUEST_IMAGE);
    let memory = vm.memory().clone();
    let running = vm.start(echo_handler(asked)).expect("threads");
    assert!(running.wait(LIMIT), "the guest hangs: {:#?}", running.dump_all());
    let outcome = running.join().unwrap_or_else(|failure| panic!("{failure}"));
    for (vcpu, asked) in asked.iter().enumerate() {
        assert_eq!(outcome.ends[vcpu], VcpuEnd::Exited(0));
        assert_eq!(asked.load(Ordering::Relaxed), 0x5eed_0000 | vcpu as u32);
        let words = vm::layout::vcpu_block(vcpu) + std::mem::offset_of!(VcpuBlock, words) as u64;
        assert_eq!(word(&memory, words), (vcpus as u64) << 32 | vcpu as u64);
        assert_eq!(outcome.exits[vcpu].get(ExitKind::IoIn), 1);
        assert_eq!(outcome.exits[vcpu].get(ExitKind::IoOut), 2, "the echo and the exit");
    }
}

#[test]
fn one_vcpu_completes_the_round_trip() {
    every_vcpu_completes_the_round_trip(1);
}

#[test]
fn four_vcpus_complete_the_round_trip() {
    every_vcpu_completes_the_round_trip(4);
}

#[test]
fn sixty_four_vcpus_complete_the_round_trip() {
    every_vcpu_completes_the_round_trip(64);
}

#[test]
fn in_cpl_0_the_guest_works_or_says_what_this_kvm_cannot_run() {
    let Some(kvm) = kvm() else {
        return;
    };
    let asked: &'static [AtomicU32] = vec![AtomicU32::new(0), AtomicU32::new(0)].leak();
    let config = VmConfig { cpl: Cpl::Zero, ..config(2) };
    let vm = Vm::new(&kvm, &config, pvlock::GUEST_IMAGE, |_, _| {}).expect("a VM");
    let running = vm.start(echo_handler(asked)).expect("threads");
    assert!(running.wait(LIMIT), "the guest hangs: {:#?}", running.dump_all());
    match running.join() {
        Ok(outcome) => assert_eq!(outcome.ends, [VcpuEnd::Exited(0); 2]),
        // Software KVM emulates CPL 0 and does not know every instruction.
        Err(VmFailure::Vcpu { error: VcpuError::Internal { .. }, .. }) if KvmKind::detect() == KvmKind::Software => {}
        Err(failure) => panic!("{failure}"),
    }
}

#[test]
fn a_guest_panic_names_the_vcpu_and_its_message() {
    let Some(kvm) = kvm() else {
        return;
    };
    // A wrong answer makes the guest's own assertion fail.
    let running = new_vm(&kvm, 2, pvlock::GUEST_IMAGE)
        .start(|vcpu, exit| match exit {
            VcpuExit::IoIn(port::ECHO, data) if vcpu == 1 => {
                data.fill(0);
                Next::Resume
            }
            VcpuExit::IoIn(port::ECHO, _) => {
                // Keep vCPU 0 busy with the first half of the round trip.
                std::thread::sleep(Duration::from_millis(1));
                Next::Finish
            }
            _ => Next::Resume,
        })
        .expect("threads");
    match running.join() {
        Err(VmFailure::Vcpu { vcpu: 1, error: VcpuError::GuestPanic { text }, dumps }) => {
            assert!(text.contains("asked 0x5eed0001, got 0x0"), "{text}");
            assert!(dumps.len() == 2 && dumps.iter().all(|dump| dump.registers.is_some()));
        }
        other => panic!("expected the panic of vCPU 1, got {other:?}"),
    }
}

#[test]
fn an_unknown_port_is_a_named_error() {
    let Some(kvm) = kvm() else {
        return;
    };
    let running = new_vm(&kvm, 1, pvlock::GUEST_IMAGE).start(|_, _| Next::Unhandled).expect("threads");
    match running.join() {
        Err(VmFailure::Vcpu { error: VcpuError::Unhandled { kind, place, bytes }, .. }) => {
            assert_eq!((kind, place, bytes), (ExitKind::IoOut, u64::from(port::ECHO), 4))
        }
        other => panic!("expected an unhandled port, got {other:?}"),
    }
}

/// The image with its first instructions replaced.
fn image_starting_with(code: &[u8]) -> Vec<u8> {
    let mut image = pvlock::GUEST_IMAGE.to_vec();
    let u64_at = |at: usize| u64::from_le_bytes(image[at..at + 8].try_into().expect("8 bytes"));
    let (entry, headers) = (u64_at(24), u64_at(32) as usize);
    let (offset, address) = (u64_at(headers + 8), u64_at(headers + 16));
    let at = (offset + entry - address) as usize;
    image[at..at + code.len()].copy_from_slice(code);
    image
}

#[test]
fn a_triple_fault_is_a_named_error_with_registers() {
    let Some(kvm) = kvm() else {
        return;
    };
    let ud2 = image_starting_with(&[0x0f, 0x0b]);
    let running = new_vm(&kvm, 2, &ud2).start(|_, _| Next::Resume).expect("threads");
    let failure = running.join().expect_err("ud2 has no handler");
    assert!(matches!(failure, VmFailure::Vcpu { error: VcpuError::TripleFault, .. }), "{failure}");
    let text = failure.to_string();
    assert!(text.contains("triple fault") && text.contains("vCPU 1: Ended") && text.contains("rip"), "{text}");
}

#[test]
fn a_spinning_guest_is_dumped_and_stopped_in_time() {
    let Some(kvm) = kvm() else {
        return;
    };
    // mov eax, 0x1234567; jmp $
    let spin = image_starting_with(&[0xb8, 0x67, 0x45, 0x23, 0x01, 0xeb, 0xfe]);
    for vcpus in [1, 4, 16] {
        let running = new_vm(&kvm, vcpus, &spin).start(|_, _| Next::Resume).expect("threads");
        assert!(!running.wait(Duration::from_millis(200)), "nothing ends this guest");
        for dump in running.dump_all() {
            let registers = dump.registers.unwrap_or_else(|| panic!("no answer: {dump}"));
            assert_eq!(registers.special.cs.dpl, cpl().number());
            if dump.state != VcpuState::Starting {
                assert_eq!(registers.general.rdi, dump.vcpu as u64);
            }
        }
        assert!(!running.wait(Duration::ZERO), "a dump must not end the guest");
        let asked = Instant::now();
        running.stop();
        let outcome = running.join().unwrap_or_else(|failure| panic!("{failure}"));
        assert!(asked.elapsed() < vm::STOP_LIMIT);
        assert!(outcome.ends.iter().all(|end| *end == VcpuEnd::Stopped));
    }
}

#[test]
fn a_stop_at_any_moment_ends_the_vm() {
    let Some(kvm) = kvm() else {
        return;
    };
    // mov edx, ECHO; out dx, eax; jmp back: the thread crosses KVM_RUN's gap all the time.
    let [low, high] = port::ECHO.to_le_bytes();
    let knock = image_starting_with(&[0xba, low, high, 0, 0, 0xef, 0xeb, 0xfd]);
    for round in 0..100_u64 {
        let running = new_vm(&kvm, 2, &knock).start(|_, _| Next::Resume).expect("threads");
        std::thread::sleep(Duration::from_micros(round * 37));
        running.stop();
        running.join().unwrap_or_else(|failure| panic!("round {round}: {failure}"));
    }
}

#[test]
fn a_handler_that_sleeps_is_woken_by_the_stop() {
    let Some(kvm) = kvm() else {
        return;
    };
    let running = new_vm(&kvm, 2, pvlock::GUEST_IMAGE)
        .start(|_, _| {
            // SAFETY: pause takes nothing and returns after any signal.
            unsafe { libc::pause() };
            Next::Resume
        })
        .expect("threads");
    assert!(!running.wait(Duration::from_millis(100)));
    running.stop();
    running.join().unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn impossible_configurations_are_refused() {
    let Some(kvm) = kvm() else {
        return;
    };
    let refuse = |config: VmConfig| Vm::new(&kvm, &config, pvlock::GUEST_IMAGE, |_, _| {}).expect_err("must be refused");
    assert!(matches!(refuse(config(0)), VmError::VcpuCount(0)));
    assert!(matches!(refuse(config(65)), VmError::VcpuCount(65)));
    assert!(matches!(refuse(VmConfig { ram_bytes: 1 << 20, ..config(1) }), VmError::RamSize(_)));
    assert!(matches!(refuse(VmConfig { ram_bytes: u64::MAX, ..config(1) }), VmError::RamSize(_)));
    let error = Vm::new(&kvm, &config(1), b"no image", |_, _| {}).expect_err("must be refused");
    assert!(matches!(error, VmError::Image(_)));
}
