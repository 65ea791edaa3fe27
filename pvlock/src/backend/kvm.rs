//! The guest image in a VM on `/dev/kvm`, with the host engine on its doorbell exits.

use super::{Outcome, RunError, Spec, fill, log_bytes, log_entries};
use crate::order::LogView;
use crate::session::{Ended, Limits, Vcpus, watch};
use crate::vm::{self, Cpl, ExitCounts, GuestMemory, Next, OutOfRange, RunningVm, Vm, VmConfig, kvm_cpuid_entry2, layout};
use pvlock_guest_image::Job;
use pvlock_guest_image::job::LogEntry;
use pvlock_host::driver::Driver;
use pvlock_host::hypercalls::{DEFAULT_PORT, Offer, Pio, Status, Transport};
use pvlock_host::protocol::{Features, VcpuId};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Where pvlock's CPUID leaves stand: the first place, no other hypervisor is announced.
const CPUID_BASE: u32 = 0x4000_0000;
/// CPUID.1:ECX bit 31: a hypervisor is present.
const HYPERVISOR_PRESENT: u32 = 1 << 31;
/// Longest wait for the end of vCPUs whose job is done, or that were told to stop.
const END: Duration = Duration::from_secs(2);

/// The VMM's guest RAM, as the host engine wants it.
struct Ram(Arc<GuestMemory>);

impl pvlock_host::GuestMemory for Ram {
    fn contains(&self, address: u64, length: u64) -> bool {
        self.0.host_ptr(address, length).is_some()
    }

    fn load(&self, address: u64) -> u64 {
        // Acquire: pairs with the guest's Release stores.
        self.0.word(address).map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, address: u64, value: u64) {
        if let Some(word) = self.0.word(address) {
            // Release: what the host did before is visible to a guest that acts on the word.
            word.store(value, Ordering::Release);
        }
    }
}

struct Watched<'a>(&'a RunningVm);

impl Vcpus for Watched<'_> {
    fn count(&self) -> u32 {
        self.0.vcpus() as u32
    }

    fn have_failed(&self) -> bool {
        // A VM that stops while its job runs has failed: nobody else stops it.
        self.0.stopper().is_stopping()
    }
}

pub(super) fn run<T>(
    spec: &Spec,
    cpl: Cpl,
    limits: Limits,
    interrupt: &AtomicBool,
    progress: impl FnMut(Duration),
    read: impl FnOnce(&Outcome<'_>) -> T,
) -> Result<T, RunError> {
    let job_address = layout::SHARED;
    let log_address = job_address + (size_of::<Job>() as u64).next_multiple_of(4096);
    let ram_bytes = (log_address + log_bytes(spec)).max(layout::MIN_RAM);
    let transport = Transport::Pio(Pio { port: DEFAULT_PORT });
    let counted = if spec.host.policy.poller.is_some() { Features::KICK_WORD } else { Features::default() };
    let features = Features::HALT.union(Features::PAUSE_LOOP).union(counted);
    let offer = spec.rings().then_some(Offer { features, transport });

    let config = VmConfig { vcpus: spec.vcpus, ram_bytes, cpl, irqchip: spec.pv_unhalt() };
    let vm = Vm::new(&vm::open()?, &config, crate::GUEST_IMAGE, |_, leaves| match offer {
        None if spec.pv_unhalt() => announce_hypervisor(leaves),
        offer => announce(offer, leaves),
    })?;
    vm.set_arg(0, job_address)?;
    let memory = Arc::clone(vm.memory());
    let job = memory
        .host_ptr(job_address, size_of::<Job>() as u64)
        .ok_or(OutOfRange { address: job_address, len: size_of::<Job>() as u64 })?;
    // SAFETY: the range is guest RAM, page aligned, all zeros, which is a valid job, and lives as long as `memory`. All of a
    // job is atomic, so the guest may write to it meanwhile.
    let job: &Job = unsafe { job.cast().as_ref() };
    let log = memory.host_ptr(log_address, log_bytes(spec)).ok_or(OutOfRange { address: log_address, len: log_bytes(spec) })?;
    // SAFETY: as above; the entries are atomics too.
    let log: &[LogEntry] = unsafe { std::slice::from_raw_parts(log.cast().as_ptr(), log_entries(spec)) };
    fill(job, spec, if spec.rings() { DEFAULT_PORT.into() } else { 0 }, if spec.log > 0 { log_address } else { 0 });

    let driver = Arc::new(Driver::new(spec.host, spec.vcpus, Ram(Arc::clone(&memory)))?);
    if spec.rings() && spec.ioeventfd {
        driver.kick_by_eventfd(transport, vm.fd()).map_err(RunError::Ioeventfd)?;
    }
    let doorbells = Arc::clone(&driver);
    let running = vm.start(move |vcpu, exit| {
        let Some(vcpu) = VcpuId::new(vcpu) else { return Next::Unhandled };
        match doorbells.exit(transport, vcpu, exit) {
            // After a signal too: the thread itself looks whether it is to stop.
            Ok(_) => Next::Resume,
            Err(_) => Next::Unhandled,
        }
    })?;

    let (ended, times) = watch(job, &Watched(&running), limits, interrupt, progress);
    if let Ended::Hung { sections } = ended {
        let dump = dump(&running, &driver);
        // What it failed with is a consequence.
        let _ = finish(running, &driver);
        return Err(RunError::Hung { sections, seconds: limits.watchdog.as_secs_f64(), dump });
    }
    let exits = finish(running, &driver)?;
    match job.registered.load(Ordering::Relaxed) {
        0 | 1 => {}
        status => return Err(RunError::Registration(Status::decode(status - 1))),
    }
    let host = driver.statistics();
    Ok(read(&Outcome { ended, times, job, log: LogView::new(log, spec.log), host, exits: Some(exits) }))
}

/// Ends all vCPUs, and says what exits they made.
fn finish(running: RunningVm, driver: &Driver<Ram>) -> Result<ExitCounts, crate::vm::VmFailure> {
    if !running.wait(END) {
        running.stop();
    }
    driver.shut_down();
    let mut exits = ExitCounts::default();
    for counts in running.join()?.exits {
        exits.add(&counts);
    }
    Ok(exits)
}

fn dump(running: &RunningVm, driver: &Driver<Ram>) -> String {
    let mut text = String::new();
    for sleeper in driver.dump() {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{sleeper}");
    }
    for vcpu in running.dump_all() {
        let _ = writeln!(text, "{vcpu}");
    }
    text
}

/// Puts pvlock's leaves in the place of KVM's.
fn announce(offer: Option<Offer>, leaves: &mut Vec<kvm_cpuid_entry2>) {
    leaves.retain(|leaf| !(CPUID_BASE..CPUID_BASE + 0x1_0000).contains(&leaf.function));
    let Some(offer) = offer else { return };
    announce_hypervisor(leaves);
    leaves.extend(offer.leaves(CPUID_BASE).map(|(function, registers)| kvm_cpuid_entry2 {
        function,
        eax: registers.eax,
        ebx: registers.ebx,
        ecx: registers.ecx,
        edx: registers.edx,
        ..Default::default()
    }));
}

/// Says that there is a hypervisor. Its leaves are KVM's, if nobody has changed them.
fn announce_hypervisor(leaves: &mut [kvm_cpuid_entry2]) {
    for leaf in leaves.iter_mut().filter(|leaf| leaf.function == 1) {
        leaf.ecx |= HYPERVISOR_PRESENT;
    }
}
