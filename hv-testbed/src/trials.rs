//! Guests that misbehave, beside one that does not: what they do is reported, and the other one is none the worse for it.

use crate::measure::{Conductor, Times, fill_in, is_exact};
use crate::run::Run;
use crate::serial::line;
use crate::trace::Trace;
use crate::vm::{Program, Vm};
use crate::{apic, memory};
use alloc::vec;
use core::sync::atomic::Ordering;
use pvlock_guest_image::LockKind;
use pvlock_hv_testbed::cells::Cell;

/// vCPUs of the guest that misbehaves; each of them does.
const VCPUS: usize = 2;
/// Critical sections of each vCPU of the other guest.
const SECTIONS: u64 = 200;

/// Name and code. Programs begin in 64-bit mode in CPL 0, without interrupt descriptors: an exception is a triple fault.
const PROGRAMS: [(&str, &[u8]); 7] = [
    // ud2
    ("triple-fault", &[0x0f, 0x0b]),
    // mov eax, 0xdead; vmmcall; hlt
    ("unknown-hypercall", &[0xb8, 0xad, 0xde, 0, 0, 0x0f, 0x01, 0xd9, 0xf4]),
    (
        "nonsense-registration",
        &[
            0xb8, 0x6b, 0x6c, 0x76, 0x70, // mov eax, "pvlk"
            0xbb, 0xff, 0xff, 0xff, 0x2f, 0x0f, 0x01, 0xd9, // mov ebx, REGISTER a page beyond RAM; vmmcall
            0xbb, 0x00, 0x05, 0x00, 0x20, 0x0f, 0x01, 0xd9, // REGISTER a page of zeros
            0xbb, 0x03, 0x00, 0x00, 0x40, 0x0f, 0x01, 0xd9, // ONLINE without a region, of a vCPU that is not there
            0xbb, 0xc8, 0x00, 0x00, 0x70, 0x0f, 0x01, 0xd9, // KICK of one that is not there
            0xbb, 0x00, 0x00, 0x00, 0xf0, 0x0f, 0x01, 0xd9, // no doorbell at all
            0xbb, 0x04, 0x00, 0x00, 0x60, 0x0f, 0x01, 0xd9, // HALT without a region
            0x48, 0x83, 0xcb, 0xff, 0x0f, 0x01, 0xd9, // or rbx, -1; vmmcall: 64 bits long
            0x31, 0xc0, 0x66, 0xba, 0x00, 0x1b, 0xef, // xor eax, eax; out EXIT, eax
        ],
    ),
    // jmp $
    ("never-yields", &[0xeb, 0xfe]),
    // pause; jmp $
    ("only-pauses", &[0xf3, 0x90, 0xeb, 0xfc]),
    // mov ecx, 0x1234; wrmsr
    ("unknown-msr", &[0xb9, 0x34, 0x12, 0, 0, 0x0f, 0x30]),
    // hlt
    ("halts-for-ever", &[0xf4]),
];

/// Runs each program beside a guest that takes a lock so many times.
pub(crate) fn all(image: &[u8], times: &Times) {
    // Long enough for all sections, whatever the other guest does.
    let times = Times { measure: 2_000_000_000, ..*times };
    let cell =
        Cell { lock: LockKind::Ticket, policy: "park-on-previous", wake_ahead: 0, overcommit: 2, halts: true, adapts: false };
    for (name, code) in PROGRAMS {
        let good = Vm::new(0, 0, apic::cpus() * cell.overcommit, Program::Image(image), cell.config());
        fill_in(&good, cell.lock, &times, SECTIONS);
        let bad = Vm::new(1, good.vcpus, VCPUS, Program::Code(code), cell.config());
        line!(r#"{{"trial":{{"name":"{name}","begins":true}}}}"#);
        let mut run = Run::new(vec![good, bad], Trace::new(0));
        let mut conductor = Conductor::new(times);
        run.go(&mut |run| conductor.look(run, &run.vms[0]));

        for vcpu in 0..VCPUS {
            let turns = run.preemptions(1, vcpu);
            if turns > 0 && !run.vms[1].stopped.load(Ordering::Relaxed) {
                line!(r#"{{"report":{{"vm":1,"vcpu":{vcpu},"what":"never ended: the timer took its CPU away {turns} times"}}}}"#);
            }
        }
        let good = &run.vms[0];
        let sections: u64 = good.job().done.iter().map(|done| done.sections.load(Ordering::Relaxed)).sum();
        line!(
            r#"{{"trial":{{"name":"{name}","reports":{},"other_sections":{sections},"other_expected":{},"other_exact":{},"other_stopped":{},"other_forced":{}}}}}"#,
            run.vms[1].events.reports.load(Ordering::Relaxed),
            SECTIONS * good.vcpus as u64,
            is_exact(good),
            good.stopped.load(Ordering::Relaxed),
            good.engine.statistics().forced,
        );
        drop(run);
        // SAFETY: the run was all there was on the heap.
        unsafe { memory::release_all() };
    }
}
