//! The `pvlock` command. For now it boots the guest program once and says what KVM it found.

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};

use pvlock::vm::{self, Cpl, KvmKind, Next, VcpuExit, Vm, VmConfig};
use pvlock_guest_image::port;

const VCPUS: usize = 4;

fn main() -> ExitCode {
    match boot() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvlock: {error}");
            ExitCode::FAILURE
        }
    }
}

fn boot() -> Result<(), Box<dyn Error>> {
    let kvm = vm::open()?;
    let kind = KvmKind::detect();
    let cpl = Cpl::best_for(kind);
    println!("{kind} KVM, guest in CPL {cpl}, {VCPUS} vCPUs");
    let config = VmConfig { vcpus: VCPUS, ram_bytes: vm::layout::MIN_RAM, cpl };
    let asked: [AtomicU32; VCPUS] = Default::default();
    let running = Vm::new(&kvm, &config, pvlock::GUEST_IMAGE, |_, _| {})?.start(move |vcpu, exit| match exit {
        VcpuExit::IoOut(port::ECHO, &[a, b, c, d]) => {
            asked[vcpu].store(u32::from_le_bytes([a, b, c, d]), Ordering::Relaxed);
            Next::Resume
        }
        VcpuExit::IoIn(port::ECHO, data) if data.len() == 4 => {
            data.copy_from_slice(&port::echo(asked[vcpu].load(Ordering::Relaxed)).to_le_bytes());
            Next::Resume
        }
        _ => Next::Unhandled,
    })?;
    let outcome = running.join()?;
    for (vcpu, (end, exits)) in outcome.ends.iter().zip(&outcome.exits).enumerate() {
        let exits: Vec<_> =
            exits.iter().filter(|(_, count)| *count > 0).map(|(kind, count)| format!("{} {count}", kind.name())).collect();
        println!("vCPU {vcpu}: {end:?} after {}", exits.join(", "));
    }
    Ok(())
}
