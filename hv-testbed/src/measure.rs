//! Runs a cell: starts its guest, moves it through the phases of its job, and prints what came of it.

use crate::boot::MAX_CPUS;
use crate::run::Run;
use crate::serial::line;
use crate::trace::Trace;
use crate::vm::{LOG, Program, Vm};
use crate::{apic, memory};
use alloc::vec;
use core::sync::atomic::Ordering;
use pvlock_guest_image::LockKind;
use pvlock_guest_image::job::{Job, LogEntry, WAIT_BUCKETS, Workload, phase, wait_bucket, wait_of_bucket};
use pvlock_host::Statistics;
use pvlock_hv_testbed::cells::Cell;

/// Entries of a traced run: some 20 ms of it.
const TRACE: usize = 1 << 12;

/// How long everything in a run is.
#[derive(Clone, Copy)]
pub(crate) struct Times {
    /// Iterations of work inside the lock and outside.
    pub(crate) inside: u64,
    pub(crate) outside: u64,
    /// The phases, in ns.
    pub(crate) warm_up: u64,
    pub(crate) measure: u64,
    /// vCPUs that have not ended so long after they were told to never will.
    pub(crate) patience: u64,
}

/// Moves one VM's job through its phases.
pub(crate) struct Conductor {
    times: Times,
    since: u64,
    began: u64,
    stopped: u64,
}

impl Conductor {
    pub(crate) fn new(times: Times) -> Self {
        Self { times, since: apic::now(), began: 0, stopped: 0 }
    }

    /// Looks at the job; whether it has ended, one way or the other.
    pub(crate) fn look(&mut self, run: &Run, vm: &Vm) -> bool {
        let (job, now) = (vm.job(), apic::now());
        let vcpus = vm.vcpus as u32;
        let lasted = now - self.since;
        let mut enter = |phase| {
            // Release: pairs with the vCPUs' Acquire.
            job.phase.store(phase, Ordering::Release);
            self.since = now;
        };
        match job.phase.load(Ordering::Relaxed) {
            _ if vm.stopped.load(Ordering::Relaxed) => return true,
            phase::WARM_UP | phase::MEASURE if job.ended.load(Ordering::Acquire) == vcpus => return true,
            phase::READY if job.ready.load(Ordering::Acquire) == vcpus => enter(phase::WARM_UP),
            phase::WARM_UP if lasted >= self.times.warm_up => {
                self.began = now;
                run.trace.begin();
                enter(phase::MEASURE);
            }
            phase::MEASURE if lasted >= self.times.measure => {
                self.stopped = now;
                enter(phase::STOP);
            }
            phase::STOP if job.ended.load(Ordering::Acquire) == vcpus => return true,
            phase::READY | phase::STOP if lasted >= self.times.patience => {
                line!(
                    r#"{{"report":{{"vm":{},"what":"hangs: {} vCPUs ready, {} ended"}}}}"#,
                    vm.id,
                    job.ready.load(Ordering::Relaxed),
                    job.ended.load(Ordering::Relaxed)
                );
                vm.engine.dump(now).for_each(|sleeper| line!(r#"{{"sleeper":"{sleeper}"}}"#));
                vm.stopped.store(true, Ordering::Relaxed);
                return true;
            }
            _ => {}
        }
        false
    }
}

/// Fills in the job of a VM whose vCPUs all contend for one lock.
pub(crate) fn fill_in(vm: &Vm, lock: LockKind, times: &Times, limit: u64) {
    let job = vm.job();
    job.workload.store(Workload::Counter as u32, Ordering::Relaxed);
    job.lock.store(lock as u32, Ordering::Relaxed);
    job.vcpus.store(vm.vcpus as u32, Ordering::Relaxed);
    job.locks.store(1, Ordering::Relaxed);
    job.inside.store(times.inside, Ordering::Relaxed);
    job.outside.store(times.outside, Ordering::Relaxed);
    job.limit.store(limit, Ordering::Relaxed);
    job.log_capacity.store(LOG as u64, Ordering::Relaxed);
    job.log_address.store(vm.log_address(), Ordering::Relaxed);
}

/// Sum of what the vCPUs of a VM have counted.
fn sum(vm: &Vm, count: fn(&pvlock_guest_image::job::Done) -> u64) -> u64 {
    vm.job().done.iter().take(vm.vcpus).fold(0, |sum, done| sum.wrapping_add(count(done)))
}

/// Whether no critical section was lost: the plainly advanced counter says what the vCPUs say.
pub(crate) fn is_exact(vm: &Vm) -> bool {
    let acquisitions = sum(vm, |done| done.acquisitions.load(Ordering::Relaxed));
    acquisitions > 0 && vm.job().protected[0].counter.load(Ordering::Relaxed) == acquisitions
}

/// From the release to the next acquisition, in ticks.
#[derive(Default)]
struct HandOvers {
    count: u64,
    sum: u64,
    median: u64,
    p99: u64,
    /// Whether each ticket followed the one before.
    in_sequence: bool,
}

impl HandOvers {
    /// Those in the log between two times in ticks.
    fn read(job: &Job, log: &[LogEntry], from: u64, to: u64) -> Self {
        let kept = (job.protected[0].logged.load(Ordering::Relaxed) as usize).min(log.len());
        let mut found = Self { in_sequence: true, ..Self::default() };
        let mut buckets = vec![0u32; WAIT_BUCKETS];
        for two in log[..kept].windows(2) {
            let [left, acquired] = [two[0].left.load(Ordering::Relaxed), two[1].acquired.load(Ordering::Relaxed)];
            let [first, second] = [0, 1].map(|n| two[n].ticket.load(Ordering::Relaxed));
            found.in_sequence &= second as u32 == (first as u32).wrapping_add(1);
            if left < from || acquired > to {
                continue;
            }
            let ticks = acquired.saturating_sub(left);
            found.count += 1;
            found.sum += ticks;
            buckets[wait_bucket(ticks)] += 1;
        }
        let quantile = |share: u64| {
            let mut left = found.count * share / 100;
            let place = buckets.iter().position(|&count| {
                let here = u64::from(count) > left;
                left = left.saturating_sub(count.into());
                here
            });
            place.map_or(0, wait_of_bucket)
        };
        (found.median, found.p99) = (quantile(50), quantile(99));
        found
    }
}

/// Every decision that the engine made, and how often.
struct Decisions<'a>(&'a Statistics);

impl core::fmt::Display for Decisions<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let mut comma = "";
        for (decision, count) in self.0.decisions() {
            write!(f, r#"{comma}"{decision}":{count}"#)?;
            comma = ",";
        }
        Ok(())
    }
}

/// Runs a cell and prints its line, and its schedule if it is one of those whose map is drawn.
pub(crate) fn cell(image: &[u8], cell: &Cell, times: Times) {
    let traced = cell.is_drawn();
    let cpus = apic::cpus().min(MAX_CPUS);
    let vm = Vm::new(0, 0, cpus * cell.overcommit, Program::Image(image), cell.config());
    fill_in(&vm, cell.lock, &times, 0);
    let trace = Trace::new(if traced { TRACE } else { 0 });
    let run = Run::new(vec![vm], trace);
    let mut conductor = Conductor::new(times);
    run.go(&mut |run| conductor.look(run, &run.vms[0]));

    let vm = &run.vms[0];
    let events = |counter: &core::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let counts = vm.engine.statistics();
    let order = vm.order.lock().counts();
    let ticks = |ns: u64| (u128::from(ns) * u128::from(apic::tsc_hz()) / 1_000_000_000) as u64;
    let hand_overs = HandOvers::read(vm.job(), vm.log(), ticks(conductor.began), ticks(conductor.stopped));
    let name = cell.lock.name();
    let Cell { policy, wake_ahead, overcommit, halts, adapts, .. } = *cell;
    let tsc_mhz = apic::tsc_hz() / 1_000_000;
    line!(
        r#"{{"run":{{"lock":"{name}","policy":"{policy}","wake_ahead":{wake_ahead},"halting":{halts},"adapting":{adapts},"overcommit":{overcommit},"vcpus":{},"cpus":{cpus},"ns":{},"acquired":{},"acquired_in_all":{},"hand_overs":{},"hand_over_ns":{},"hand_over_median_ns":{},"hand_over_p99_ns":{},"pauses":{},"pause_loops":{},"holder_preempted":{},"switches":{},"halts":{},"latched":{},"kicks":{},"parks":{},"queued":{},"drained":{},"served":{},"kicked":{},"spurious":{},"forced":{},"cycles":{},"refused":{},"wakes":{},"before_previous":{},"before_earlier":{},"not_drained":{},"exact":{},"in_sequence":{},"stopped":{},"engine_bytes":{},"decisions":{{{}}}}}}}"#,
        vm.vcpus,
        conductor.stopped - conductor.began,
        sum(vm, |done| done.measured.load(Ordering::Relaxed)),
        sum(vm, |done| done.acquisitions.load(Ordering::Relaxed)),
        hand_overs.count,
        hand_overs.sum / hand_overs.count.max(1) * 1_000 / tsc_mhz,
        hand_overs.median * 1_000 / tsc_mhz,
        hand_overs.p99 * 1_000 / tsc_mhz,
        events(&vm.events.pauses),
        counts.pause_loops,
        events(&vm.events.holder_preempted),
        events(&vm.events.switches),
        counts.halts,
        counts.latched,
        counts.kicks,
        counts.parks,
        counts.queued,
        counts.drained,
        counts.served,
        counts.kicked,
        counts.spurious,
        counts.forced,
        counts.cycles,
        counts.refused,
        order.wakes,
        order.before_previous,
        order.before_earlier,
        events(&vm.events.not_drained),
        is_exact(vm),
        hand_overs.in_sequence,
        vm.stopped.load(Ordering::Relaxed),
        vm.engine_bytes,
        Decisions(&counts),
    );
    if traced {
        run.trace.print(policy);
    }
    drop(run);
    // SAFETY: the run was all there was on the heap.
    unsafe { memory::release_all() };
}
