//! One run: some VMs on all CPUs, from their start until all is over.
//!
//! Follows: AMD64 APM volume 2, 15.16 "TLB Control" for vCPUs that change CPUs; the rest is this hypervisor's own.

use crate::enter::enter;
use crate::exits::{self, Do};
use crate::host::Host;
use crate::irq_lock::IrqLock;
use crate::trace::{Mark, Trace};
use crate::vm::{Vcpu, Vm};
use crate::{apic, cpu};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use lock_api::Mutex;
use pvlock_host::{Park, SleepKind, Unpark, Verdict};
use pvlock_hv_testbed::scheduler::{Ended, Next, Scheduler};
use pvlock_hv_testbed::vmcb::Exit;
use pvlock_hv_testbed::wake_order::Sleep;

/// A timer interrupt on each CPU every so many ns. Short, because the emulator changes between its CPUs at interrupts.
pub(crate) const TICK_NS: u64 = 50_000;
/// A vCPU's time slice in ns.
pub(crate) const SLICE_NS: u64 = 1_000_000;

/// A vCPU, and whose it is.
pub(crate) struct Slot {
    pub(crate) vm: usize,
    vcpu: UnsafeCell<Vcpu>,
}

// SAFETY: only the CPU to which the scheduler has given the vCPU takes it out of its cell, and the scheduler's lock orders one
// CPU's turn before the next one's.
unsafe impl Sync for Slot {}

/// Everything that CPUs share while VMs run.
pub(crate) struct Run {
    pub(crate) scheduler: Mutex<IrqLock, Scheduler>,
    pub(crate) vms: Vec<Vm>,
    pub(crate) trace: Trace,
    slots: Box<[Slot]>,
    over: AtomicBool,
}

/// The run that all CPUs take part in.
static CURRENT: AtomicPtr<Run> = AtomicPtr::new(core::ptr::null_mut());
/// CPUs in it, besides the first.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// The CPUs may start their timers.
static TICKING: AtomicBool = AtomicBool::new(false);

/// Whether this CPU goes on after an exit without a PAUSE, for the sake of the emulator.
///
/// QEMU emulates its CPUs one at a time. With a clock that counts instructions, the one that runs does so until it halts, pauses,
/// or some CPU's timer is due; then it is the first CPU's turn again, and the last would never have any. So at each tick, all CPUs
/// let the others have the time until the next, except for one, each in turn.
fn is_own_turn(exit: &Exit) -> bool {
    *exit == Exit::Interrupt && (apic::now() / TICK_NS) as usize % apic::cpus() == cpu::index()
}

impl Run {
    pub(crate) fn new(vms: Vec<Vm>, trace: Trace) -> Self {
        let vcpus = vms.iter().flat_map(|vm| vm.engine.vcpus().map(|id| Slot { vm: vm.id, vcpu: UnsafeCell::new(vm.vcpu(id)) }));
        let slots: Box<[Slot]> = vcpus.collect();
        let scheduler = Mutex::new(Scheduler::new(apic::cpus(), slots.len(), SLICE_NS));
        Self { scheduler, vms, trace, slots, over: AtomicBool::new(false) }
    }

    /// Runs on all CPUs; `watch` is called by the first CPU at each of its ticks, and says when it is over.
    pub(crate) fn go(&self, watch: &mut dyn FnMut(&Self) -> bool) {
        // Release: pairs with `take_part`.
        CURRENT.store(core::ptr::from_ref(self).cast_mut(), Ordering::Release);
        self.schedule(Some(watch));
        CURRENT.store(core::ptr::null_mut(), Ordering::Release);
        // Acquire: pairs with `take_part`: nobody else uses the run any more.
        while INSIDE.load(Ordering::Acquire) > 0 {
            cpu::wait();
        }
    }

    /// Starts the timers of all CPUs, all but together, the first CPU's last: see [`is_own_turn`].
    pub(crate) fn start_ticking() {
        INSIDE.store(apic::cpus() - 1, Ordering::Relaxed);
        TICKING.store(true, Ordering::Relaxed);
        while INSIDE.load(Ordering::Relaxed) > 0 {
            core::hint::spin_loop();
        }
        apic::tick_every(TICK_NS);
    }

    /// What the other CPUs do for ever.
    pub(crate) fn take_part() -> ! {
        while !TICKING.load(Ordering::Relaxed) {
            core::hint::spin_loop();
        }
        apic::tick_every(TICK_NS);
        INSIDE.fetch_sub(1, Ordering::Relaxed);
        loop {
            cpu::wait();
            // Entered before looking: the first CPU waits for whoever may have seen the run. SeqCst: this store before that load,
            // as its store of null comes before its load of the count.
            INSIDE.fetch_add(1, Ordering::SeqCst);
            let run = CURRENT.load(Ordering::SeqCst);
            // SAFETY: not null, so `go` has not ended, or has not yet seen this CPU leave: the run is alive.
            if let Some(run) = unsafe { run.as_ref() } {
                run.schedule(None);
            }
            INSIDE.fetch_sub(1, Ordering::Release);
        }
    }

    /// How often the timer has ended a turn of a vCPU that has not ended itself. For after the run.
    pub(crate) fn preemptions(&mut self, vm: usize, vcpu: usize) -> u64 {
        let number = self.vms[vm].first + vcpu;
        self.slots[number].vcpu.get_mut().preemptions
    }

    fn schedule(&self, mut watch: Option<&mut dyn FnMut(&Self) -> bool>) {
        let cpu = cpu::index();
        let mut seen = cpu::ticks();
        // When the slice of the vCPU that ran last ends. Who gives its CPU to another gives it the rest of its slice, no more, or
        // two who give it to each other would keep it for ever.
        let mut slice_ends = 0;
        // Acquire: as good as Relaxed, nothing is read that the first CPU has not written before `CURRENT`.
        while !self.over.load(Ordering::Relaxed) {
            let next = self.scheduler.lock().next(cpu);
            match next {
                Some(next) => slice_ends = self.turn(next, slice_ends, &mut watch, &mut seen),
                None => cpu::wait(),
            }
            self.tick(&mut watch, &mut seen);
        }
    }

    /// What is done at each tick.
    fn tick(&self, watch: &mut Option<&mut dyn FnMut(&Self) -> bool>, seen: &mut u64) {
        if core::mem::replace(seen, cpu::ticks()) == *seen {
            return;
        }
        if let Some(watch) = watch {
            self.scheduler.lock().expire(apic::now());
            if watch(self) {
                self.over.store(true, Ordering::Relaxed);
            }
        }
    }

    /// One turn of a vCPU on this CPU: until it sleeps, gives up, ends, or has had its time.
    /// Takes and returns when the slice ends.
    fn turn(&self, next: Next, ends: u64, watch: &mut Option<&mut dyn FnMut(&Self) -> bool>, seen: &mut u64) -> u64 {
        let number = next.vcpu;
        let vm = &self.vms[self.slots[number].vm];
        // SAFETY: the scheduler has given this vCPU to this CPU.
        let vcpu = unsafe { &mut *self.slots[number].vcpu.get() };
        let host = Host { run: self, vm };
        let start = apic::now();
        let slice = if next.given { ends.saturating_sub(start) } else { SLICE_NS };
        let ran = || apic::now() - start;
        match next.slept {
            None => vm.engine.scheduled_in(vcpu.id, &host),
            Some(how) => self.rises(&host, vcpu, how),
        }
        self.check_drained(vm, vcpu);
        vm.events.switches.fetch_add(1, Ordering::Relaxed);
        // Another CPU's TLB may know an older vCPU by this number.
        vcpu.vmcb.tlb_control = u32::from(core::mem::replace(&mut vcpu.last_cpu, cpu::index()) != cpu::index());
        vcpu.filter.restart(cpu::ticks_now());

        loop {
            if vm.stopped.load(Ordering::Relaxed) || self.over.load(Ordering::Relaxed) {
                vm.engine.idle(vcpu.id);
                self.scheduler.lock().end(number);
                break;
            }
            // SAFETY: `Vm::vcpu` made the VMCB.
            unsafe { enter(&mut vcpu.vmcb, &mut vcpu.registers) };
            vcpu.vmcb.tlb_control = 0;
            let exit = vcpu.vmcb.exit();
            let what = exits::handle(&host, vcpu);
            if !is_own_turn(&exit) {
                // Lets the emulator change to another of its CPUs; a few cycles on a real one.
                core::hint::spin_loop();
            }
            match what {
                Do::Verdict(Verdict::Resume(_)) => {}
                Do::Verdict(Verdict::Yield(_)) => {
                    self.leaves(vm, vcpu);
                    self.scheduler.lock().give_up(number, ran());
                    break;
                }
                Do::Verdict(Verdict::YieldTo(target, _)) => {
                    self.leaves(vm, vcpu);
                    self.scheduler.lock().give_to(number, vm.first + target.index(), ran());
                    break;
                }
                Do::Verdict(Verdict::Park(park)) => {
                    if self.sleeps(&host, vcpu, number, park, ran()) {
                        break;
                    }
                }
                Do::End => {
                    vcpu.preemptions = 0;
                    vm.engine.idle(vcpu.id);
                    self.scheduler.lock().end(number);
                    break;
                }
            }
            self.tick(watch, seen);
            if self.scheduler.lock().has_had_enough(number, ran(), slice) {
                self.leaves(vm, vcpu);
                vcpu.preemptions += 1;
                self.scheduler.lock().preempt(number, ran());
                break;
            }
        }
        self.trace.span(start, vm.id, vcpu.id.index());
        start + slice
    }

    /// The vCPU goes to sleep, if nobody has woken it meanwhile.
    fn sleeps(&self, host: &Host<'_>, vcpu: &Vcpu, number: usize, park: Park, ran: u64) -> bool {
        let vm = host.vm;
        let sleeper = vm.engine.dump(0).find(|sleeper| sleeper.vcpu == vcpu.id);
        if let Some(sleeper) = sleeper.filter(|sleeper| sleeper.lock != 0 && !sleeper.woken) {
            vm.order.lock().sleeps(vcpu.id.index(), Sleep { lock: sleeper.lock, ticket: sleeper.ticket });
        }
        self.trace.mark(Mark::Park, vm.id, vcpu.id.index());
        let asleep = self.scheduler.lock().sleep(number, park.until, ran);
        if !asleep {
            self.rises(host, vcpu, Ended::Woken);
        }
        asleep
    }

    /// The vCPU's sleep is over.
    fn rises(&self, host: &Host<'_>, vcpu: &Vcpu, how: Ended) {
        host.vm.order.lock().is_up(vcpu.id.index());
        let how = match how {
            Ended::Woken => Unpark::Woken,
            Ended::Deadline => Unpark::Deadline,
        };
        host.vm.engine.unparked(vcpu.id, how, apic::now(), host);
    }

    /// The vCPU loses its CPU, which it could use.
    fn leaves(&self, vm: &Vm, vcpu: &Vcpu) {
        vm.engine.scheduled_out(vcpu.id);
        let holds = |other| vm.engine.wait_of(other).is_some_and(|wait| wait.holder == Some(vcpu.id));
        if self.trace.is_on() && vm.engine.vcpus().any(holds) {
            self.trace.mark(Mark::Hold, vm.id, vcpu.id.index());
        }
    }

    /// Whoever sleeps until this vCPU runs has been woken, now that it does.
    fn check_drained(&self, vm: &Vm, vcpu: &Vcpu) {
        let forgotten = vm.engine.dump(0).filter(|sleeper| sleeper.queue == Some(vcpu.id) && sleeper.kind == SleepKind::Spun);
        let forgotten = forgotten.filter(|sleeper| !sleeper.woken).count();
        vm.events.not_drained.fetch_add(forgotten as u64, Ordering::Relaxed);
    }
}
