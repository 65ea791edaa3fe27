//! The guest image in a VM on `/dev/kvm`, with the host engine on its doorbell exits.

use super::{Outcome, RunError, Spec, fill, log_bytes, log_entries};
use crate::order::LogView;
use crate::session::{Disturbance, Ended, Limits, Vcpus, disturb_host, watch};
use crate::vm::{
    self, Cpl, ExitCounts, GuestMemory, Next, OutOfRange, Registers, RunningVm, VcpuExit, Vm, VmConfig, VmFailure,
    kvm_cpuid_entry2, layout,
};
use pvlock_guest_image::job::LogEntry;
use pvlock_guest_image::{Job, port};
use pvlock_host::Statistics;
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

/// Guest RAM with a job in it.
struct JobMemory {
    ram: Arc<GuestMemory>,
    /// Entries of the log, for all locks.
    log: usize,
    /// Entries for each.
    each: u64,
}

impl JobMemory {
    const JOB: u64 = layout::SHARED;
    const LOG: u64 = Self::JOB + (size_of::<Job>() as u64).next_multiple_of(4096);

    /// Checks that there is room for what [`job`](Self::job) and [`log`](Self::log) return.
    fn new(ram: Arc<GuestMemory>, spec: &Spec) -> Result<Self, OutOfRange> {
        for (address, len) in [(Self::JOB, size_of::<Job>() as u64), (Self::LOG, log_bytes(spec))] {
            ram.host_ptr(address, len).ok_or(OutOfRange { address, len })?;
        }
        Ok(Self { ram, log: log_entries(spec), each: spec.log })
    }

    fn job(&self) -> &Job {
        let job = self.ram.host_ptr(Self::JOB, size_of::<Job>() as u64).expect("checked by `new`");
        // SAFETY: the range is guest RAM, page aligned, all zeros at first, which is a valid job, and lives as long as `ram`.
        // All of a job is atomic, so the guest may write to it meanwhile.
        unsafe { job.cast().as_ref() }
    }

    fn log(&self) -> LogView<'_> {
        let log = self.ram.host_ptr(Self::LOG, (self.log * size_of::<LogEntry>()) as u64).expect("checked by `new`");
        // SAFETY: as for the job; the entries are atomics too.
        LogView::new(unsafe { std::slice::from_raw_parts(log.cast().as_ptr(), self.log) }, self.each)
    }
}

/// A VM whose guest runs a job. Dropping it ends it.
pub struct Machine {
    running: RunningVm,
    driver: Arc<Driver<Ram>>,
    memory: JobMemory,
}

/// What is left of a VM.
pub struct Remains {
    memory: JobMemory,
    /// What its host counted.
    pub host: Statistics,
    /// Exits of all vCPUs by kind.
    pub exits: ExitCounts,
}

/// Everything that a snapshot of a VM would hold.
pub struct Snapshot {
    /// Of each vCPU, unless KVM would not read them.
    pub registers: Vec<Option<Registers>>,
    /// Guest RAM.
    pub memory: Vec<u8>,
}

impl Machine {
    /// Starts a VM. Its vCPUs wait until the phase of the job says that they may begin.
    ///
    /// # Errors
    ///
    /// Any [`RunError`] of a VM that does not run yet.
    pub fn start(spec: &Spec, cpl: Cpl) -> Result<Self, RunError> {
        let ram_bytes = (JobMemory::LOG + log_bytes(spec)).max(layout::MIN_RAM);
        let transport = Transport::Pio(Pio { port: DEFAULT_PORT });
        let counted = if spec.host.policy.poller.is_some() { Features::KICK_WORD } else { Features::default() };
        let features = Features::HALT.union(Features::PAUSE_LOOP).union(counted);
        let offer = spec.rings().then_some(Offer { features, transport });

        let config = VmConfig { vcpus: spec.vcpus, ram_bytes, cpl, irqchip: spec.pv_unhalt() };
        let vm = Vm::new(&vm::open()?, &config, crate::GUEST_IMAGE, |_, leaves| match offer {
            None if spec.pv_unhalt() => announce_hypervisor(leaves),
            offer => announce(offer, leaves),
        })?;
        vm.set_arg(0, JobMemory::JOB)?;
        let memory = JobMemory::new(Arc::clone(vm.memory()), spec)?;
        let port = if spec.rings() { DEFAULT_PORT.into() } else { 0 };
        fill(memory.job(), spec, port, if spec.log > 0 { JobMemory::LOG } else { 0 });

        let driver = Arc::new(Driver::new(spec.host, spec.vcpus, Ram(Arc::clone(&memory.ram)))?);
        if spec.rings() && spec.ioeventfd {
            driver.kick_by_eventfd(transport, vm.fd()).map_err(RunError::Ioeventfd)?;
        }
        let host = Arc::clone(&driver);
        let running = vm.start(move |vcpu, exit| {
            let Some(vcpu) = VcpuId::new(vcpu) else { return Next::Unhandled };
            match host.exit(transport, vcpu, exit) {
                // After a signal too: the thread itself looks whether it is to stop.
                Ok(_) => Next::Resume,
                Err(VcpuExit::IoOut(port::RESET, _)) => {
                    host.reset(vcpu);
                    Next::Reset
                }
                Err(_) => Next::Unhandled,
            }
        })?;
        Ok(Self { running, driver, memory })
    }

    /// The job.
    pub fn job(&self) -> &Job {
        self.memory.job()
    }

    /// Its guest's RAM.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory.ram
    }

    /// What its host has counted so far.
    pub fn statistics(&self) -> Statistics {
        self.driver.statistics()
    }

    /// Gets all vCPUs to rest, and their registers; `None` if one of them does not come.
    pub fn pause(&self) -> Option<Vec<Option<Registers>>> {
        self.driver.pause();
        self.running.pause()
    }

    /// Copies what a snapshot would hold, while the VM is paused; `None` if it cannot be paused.
    pub fn save(&self) -> Option<Snapshot> {
        let registers = self.pause()?;
        let mut memory = vec![0; self.memory.ram.len() as usize];
        self.memory.ram.read(0, &mut memory).ok()?;
        Some(Snapshot { registers, memory })
    }

    /// Ends a pause.
    pub fn resume(&self) {
        self.driver.resume();
        self.running.resume();
    }

    /// Ends the VM, whatever its guest does.
    ///
    /// # Errors
    ///
    /// What a vCPU failed with, or that one did not end.
    pub fn shut_down(self) -> Result<Remains, VmFailure> {
        self.running.stop();
        self.end()
    }

    /// Waits for vCPUs that are about to end by themselves, and ends those that are not.
    fn finish(self) -> Result<Remains, VmFailure> {
        if !self.running.wait(END) {
            self.running.stop();
        }
        self.end()
    }

    fn end(self) -> Result<Remains, VmFailure> {
        let Self { running, driver, memory } = self;
        driver.shut_down();
        let mut exits = ExitCounts::default();
        for counts in running.join()?.exits {
            exits.add(&counts);
        }
        Ok(Remains { memory, host: driver.statistics(), exits })
    }

    fn dump(&self) -> String {
        let mut text = String::new();
        for sleeper in self.driver.dump() {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{sleeper}");
        }
        for vcpu in self.running.dump_all() {
            let _ = writeln!(text, "{vcpu}");
        }
        text
    }
}

impl Remains {
    /// The job.
    pub fn job(&self) -> &Job {
        self.memory.job()
    }
}

impl Vcpus for Machine {
    fn count(&self) -> u32 {
        self.running.vcpus() as u32
    }

    fn have_failed(&self) -> bool {
        // A VM that stops while its job runs has failed: nobody else stops it.
        self.running.stopper().is_stopping()
    }

    fn disturb(&self, disturbance: Disturbance) -> Result<(), &'static str> {
        if let Disturbance::Signal(vcpu, nap) = disturbance {
            self.running.signal(vcpu, nap);
        }
        disturb_host(&self.driver, disturbance, |time| {
            let rest = self.running.pause();
            std::thread::sleep(time);
            self.running.resume();
            rest.map(drop).ok_or("a vCPU did not come to rest when the VM was paused")
        })
    }
}

pub(super) fn run<T>(
    spec: &Spec,
    cpl: Cpl,
    limits: Limits,
    interrupt: &AtomicBool,
    progress: impl FnMut(Duration, &dyn Vcpus),
    read: impl FnOnce(&Outcome<'_>) -> T,
) -> Result<T, RunError> {
    let machine = Machine::start(spec, cpl)?;
    let (ended, times) = watch(machine.job(), &machine, limits, interrupt, progress);
    if let Ended::Hung { sections } = ended {
        let dump = machine.dump();
        // What it failed with is a consequence.
        let _ = machine.finish();
        return Err(RunError::Hung { sections, seconds: limits.watchdog.as_secs_f64(), dump });
    }
    // Nobody reads the counts of a run that was interrupted.
    let remains = if ended == Ended::Interrupted { machine.shut_down() } else { machine.finish() }?;
    match remains.job().registered.load(Ordering::Relaxed) {
        0 | 1 => {}
        status => return Err(RunError::Registration(Status::decode(status - 1))),
    }
    let Remains { memory, host, exits } = &remains;
    Ok(read(&Outcome { ended, times, job: memory.job(), log: memory.log(), host: *host, exits: Some(*exits) }))
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
