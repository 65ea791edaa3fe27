//! What each exit means.
//!
//! Follows: AMD64 APM volume 2, 15.9 "Instruction Intercepts", 15.14 "Miscellaneous Intercepts" and appendix C "SVM Intercept
//! Exit Codes".

use crate::host::Host;
use crate::run::TICK_NS;
use crate::serial::line;
use crate::vm::Vcpu;
use crate::{apic, cpu};
use core::fmt;
use core::sync::atomic::Ordering;
use pvlock_guest_image::port;
use pvlock_host::hypercalls::{Access, Doorbell, Offer, Status, Transport, Vmcall};
use pvlock_host::protocol::Features;
use pvlock_host::{Resume, Setting, Verdict};
use pvlock_hv_testbed::cells::WINDOW;
use pvlock_hv_testbed::vmcb::Exit;
use x86::cpuid::cpuid;

/// PAUSEs further apart belong to different loops, in ticks: the emulator's CPUs take turns, which are a timer tick long.
const GAP: u64 = 4 * TICK_NS;
/// What a PAUSE is made to take that is intercepted only to be counted, in ns. It bounds how many of them there are: emulating an
/// exit takes 30 us, and counts as no more time than its 300 instructions.
const PAUSE_NS: u64 = 2_000;
/// Reports of one VM that are printed.
const MOST_REPORTS: u64 = 16;
/// Where the hypervisor's CPUID leaves begin.
const LEAVES: u32 = 0x4000_0000;
const HYPERVISOR_PRESENT: u32 = 1 << 31;

/// What becomes of the vCPU.
pub(crate) enum Do {
    /// What the engine says.
    Verdict(Verdict),
    /// It never runs again.
    End,
}

const GO_ON: Do = Do::Verdict(Verdict::Resume(Resume::Done));

/// Says which vCPU did what.
pub(crate) fn report(host: &Host<'_>, vcpu: &Vcpu, what: fmt::Arguments<'_>) {
    let vm = host.vm;
    if vm.events.reports.fetch_add(1, Ordering::Relaxed) < MOST_REPORTS {
        let (id, rip) = (vcpu.id.index(), vcpu.vmcb.rip);
        line!(r#"{{"report":{{"vm":{},"vcpu":{id},"rip":"{rip:#x}","what":"{what}"}}}}"#, vm.id);
    }
}

/// The whole VM ends: what one of its vCPUs did cannot be gone on with.
fn stop(host: &Host<'_>, vcpu: &Vcpu, what: fmt::Arguments<'_>) -> Do {
    report(host, vcpu, what);
    host.vm.stopped.store(true, Ordering::Relaxed);
    // Everybody who sleeps gets a CPU once more, and sees that.
    host.vm.engine.shut_down(host);
    Do::End
}

/// Deals with the exit that has just happened.
pub(crate) fn handle(host: &Host<'_>, vcpu: &mut Vcpu) -> Do {
    let exit = vcpu.vmcb.exit();
    match exit {
        Exit::Interrupt => GO_ON,
        Exit::Pause => {
            vcpu.vmcb.skip();
            pause(host, vcpu)
        }
        Exit::Hypercall => hypercall(host, vcpu),
        Exit::Cpuid => {
            let [eax, ebx, ecx, edx] = leaf(vcpu);
            vcpu.vmcb.rax = eax.into();
            (vcpu.registers.rbx, vcpu.registers.rcx, vcpu.registers.rdx) = (ebx.into(), ecx.into(), edx.into());
            vcpu.vmcb.skip();
            GO_ON
        }
        Exit::Port { port, input, width: 4, string: false } => self::port(host, vcpu, port, input),
        Exit::Port { port, .. } => stop(host, vcpu, format_args!("used port {port:#x} with another width than 4 bytes")),
        Exit::Msr { write } => {
            let verb = if write { "wrote" } else { "read" };
            report(host, vcpu, format_args!("{verb} MSR {:#x}, which it does not have", vcpu.registers.rcx as u32));
            vcpu.inject_gp();
            GO_ON
        }
        // No interrupt will ever come: there is no interrupt controller.
        Exit::Halt => stop(host, vcpu, format_args!("halted, and nothing can wake it")),
        Exit::Shutdown => stop(host, vcpu, format_args!("triple fault")),
        Exit::NoMemory { address } => stop(host, vcpu, format_args!("used address {address:#x}, where it has no memory")),
        Exit::Invalid => panic!("VMRUN refuses the state of vCPU {} of VM {}", vcpu.id.index(), host.vm.id),
        Exit::Other(code) => {
            report(host, vcpu, format_args!("used an instruction that guests do not have, exit code {code:#x}"));
            vcpu.inject_ud();
            GO_ON
        }
    }
}

/// A PAUSE: often enough it makes a pause-loop exit.
fn pause(host: &Host<'_>, vcpu: &mut Vcpu) -> Do {
    let (vm, events) = (host.vm, &host.vm.events);
    events.pauses.fetch_add(1, Ordering::Relaxed);
    let window = match vm.engine.window(vcpu.id) {
        Some(Setting::Ticks(ticks)) => ticks,
        Some(Setting::Exponent(_)) | None => WINDOW,
    };
    if vcpu.counts_pauses() {
        // This one was one too many. The window may have changed.
        vcpu.count_pauses(window);
    } else if !vcpu.filter.pause(cpu::ticks_now(), window, GAP) {
        apic::pass(PAUSE_NS);
        return GO_ON;
    }
    if let Some(holder) = vm.engine.wait_of(vcpu.id).and_then(|wait| wait.holder)
        && holder != vcpu.id
        && vm.engine.vcpus().any(|known| known == holder)
        && !host.is_running(holder)
    {
        events.holder_preempted.fetch_add(1, Ordering::Relaxed);
    }
    Do::Verdict(vm.engine.pause_loop(vcpu.id, apic::now(), host))
}

/// VMMCALL: a doorbell, or nothing that is known here.
fn hypercall(host: &Host<'_>, vcpu: &mut Vcpu) -> Do {
    let engine = &host.vm.engine;
    let (rax, rbx) = (vcpu.vmcb.rax, vcpu.registers.rbx);
    let Some(access) = Vmcall::decode(rax, rbx) else {
        report(host, vcpu, format_args!("vmmcall {rax:#x} is unknown here"));
        vcpu.inject_ud();
        return GO_ON;
    };
    vcpu.vmcb.skip();
    match access {
        Access::Ring(word) => {
            let verdict = engine.doorbell(vcpu.id, word, apic::now(), host);
            if verdict == Verdict::Resume(Resume::Refused) {
                let why = match Doorbell::decode(word) {
                    None => Status::Unknown,
                    Some(_) => Status::decode(engine.answer(vcpu.id)),
                };
                report(host, vcpu, format_args!("rang {word:#x}: {why}"));
            }
            Do::Verdict(verdict)
        }
        Access::Answer => {
            vcpu.vmcb.rax = engine.answer(vcpu.id).into();
            GO_ON
        }
        Access::Malformed => {
            report(host, vcpu, format_args!("rang {rbx:#x}, which is no doorbell word"));
            vcpu.vmcb.rax = Status::Unknown.encode().into();
            GO_ON
        }
    }
}

/// A CPUID leaf as the guest sees it: the machine's, but with this hypervisor's leaves, and no SVM.
fn leaf(vcpu: &Vcpu) -> [u32; 4] {
    let (leaf, subleaf) = (vcpu.vmcb.rax as u32, vcpu.registers.rcx as u32);
    let offer = Offer { features: Features::HALT.union(Features::PAUSE_LOOP), transport: Transport::Vmcall };
    if let Some((_, own)) = offer.leaves(LEAVES).into_iter().find(|(number, _)| *number == leaf) {
        return [own.eax, own.ebx, own.ecx, own.edx];
    }
    let real = cpuid!(leaf, subleaf);
    let id = vcpu.id.index() as u32;
    match leaf {
        1 => [real.eax, real.ebx & 0xff_ffff | id << 24, real.ecx | HYPERVISOR_PRESENT, real.edx],
        0xb => [real.eax, real.ebx, real.ecx, id],
        0x8000_0001 => [real.eax, real.ebx, real.ecx & !(1 << 2), real.edx],
        0x8000_000a => [0; 4],
        _ if leaf >> 16 == LEAVES >> 16 => [0; 4],
        _ => [real.eax, real.ebx, real.ecx, real.edx],
    }
}

/// The ports of `pvlock_guest_image`.
fn port(host: &Host<'_>, vcpu: &mut Vcpu, number: u16, input: bool) -> Do {
    let value = vcpu.vmcb.rax as u32;
    match (number, input) {
        (port::EXIT, false) => {
            if value != 0 {
                return stop(host, vcpu, format_args!("ended with code {value}"));
            }
            Do::End
        }
        (port::PANIC, false) => {
            let text: alloc::string::String = host.vm.panic_text(vcpu.id).filter(|c| !matches!(c, '"' | '\\')).collect();
            let text = text.replace('\n', " ");
            stop(host, vcpu, format_args!("panicked: {text}"))
        }
        _ => stop(host, vcpu, format_args!("used port {number:#x}, which it does not have")),
    }
}
