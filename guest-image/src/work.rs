//! The workloads, for vCPUs of a VM and for threads alike.

use crate::bare::Bare;
use crate::hostile;
use crate::job::{Done, Job, LogEntry, MAX_LOCKS, Protected, Workload, phase, wait_bucket};
use crate::life::Life;
use crate::locks::{Arena, LockKind, TestLock};
use core::cell::Cell;
use core::hint::black_box;
use core::sync::atomic::Ordering;
use crossbeam_utils::CachePadded;

/// The part of one vCPU, from where it was before its last reset. `log` holds the job's log entries, for all locks; it may be empty.
pub fn run<P: Bare>(job: &Job, arena: &Arena<P>, log: &[LogEntry], vcpu: usize) {
    let Some(done) = job.done.get(vcpu) else { return };
    // Acquire: pairs with the VMM's Release: everything is set up.
    if job.phase.load(Ordering::Acquire) == phase::READY {
        job.ready.fetch_add(1, Ordering::AcqRel);
        while job.phase.load(Ordering::Acquire) == phase::READY {
            P::relax();
        }
    }
    match LockKind::from_number(job.lock.load(Ordering::Relaxed)) {
        Some(LockKind::SpinTicket) => Worker::<P, _>::new(job, &arena.spin_ticket, log, done, vcpu).run(),
        Some(LockKind::SpinTas) => Worker::<P, _>::new(job, &arena.spin_tas, log, done, vcpu).run(),
        Some(LockKind::Ticket) => Worker::<P, _>::new(job, &arena.ticket, log, done, vcpu).run(),
        Some(LockKind::Preemptable) => Worker::<P, _>::new(job, &arena.preemptable, log, done, vcpu).run(),
        Some(LockKind::Mcs) => Worker::<P, _>::new(job, &arena.mcs, log, done, vcpu).run(),
        #[cfg(feature = "std")]
        Some(LockKind::ParkingLot) => Worker::<P, _>::new(job, &arena.parking_lot, log, done, vcpu).run(),
        #[cfg(feature = "std")]
        Some(LockKind::Std) => Worker::<P, _>::new(job, &arena.std, log, done, vcpu).run(),
        #[cfg(not(feature = "std"))]
        Some(LockKind::ParkingLot | LockKind::Std) => panic!("the job names a lock that needs an operating system"),
        None => panic!("the job names a lock that this image does not have"),
    }
    // Release: who sees that all have ended sees their results.
    job.ended.fetch_add(1, Ordering::Release);
}

struct Worker<'a, P, L> {
    job: &'a Job,
    locks: &'a [CachePadded<L>],
    /// Log entries of each lock.
    logs: core::slice::ChunksExact<'a, LogEntry>,
    done: &'a Done,
    vcpu: u64,
    vcpus: u64,
    inside: u64,
    outside: u64,
    /// PAUSEs that have been accounted for.
    pauses: Cell<u64>,
    platform: core::marker::PhantomData<fn() -> P>,
}

impl<'a, P: Bare, L: TestLock> Worker<'a, P, L> {
    fn new(job: &'a Job, locks: &'a [CachePadded<L>; MAX_LOCKS], log: &'a [LogEntry], done: &'a Done, vcpu: usize) -> Self {
        let count = (job.locks.load(Ordering::Relaxed) as usize).clamp(1, MAX_LOCKS);
        let capacity = job.log_capacity.load(Ordering::Relaxed) as usize;
        Self {
            job,
            locks: &locks[..count],
            logs: log.chunks_exact(capacity.max(1)),
            done,
            vcpu: vcpu as u64,
            vcpus: u64::from(job.vcpus.load(Ordering::Relaxed)),
            inside: job.inside.load(Ordering::Relaxed),
            outside: job.outside.load(Ordering::Relaxed),
            pauses: Cell::new(P::pauses()),
            platform: core::marker::PhantomData,
        }
    }

    fn run(&self) {
        let Some(workload) = Workload::from_number(self.job.workload.load(Ordering::Relaxed)) else {
            panic!("the job names a workload that this image does not have")
        };
        let limit = self.job.limit.load(Ordering::Relaxed);
        let mut rounds = self.done.sections.load(Ordering::Relaxed);
        // Marsaglia's xorshift64, seeded differently on each vCPU and after each reset.
        let mut random = (self.vcpu + 1).wrapping_add(rounds << 8).wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1);
        let mut life = Life::<P>::new(self.job, self.vcpu as usize);
        while self.job.phase.load(Ordering::Relaxed) != phase::STOP && (limit == 0 || rounds < limit) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            spend(self.outside);
            let index = (random >> 32) as usize % self.locks.len();
            match workload {
                Workload::Counter => self.section(0),
                Workload::PingPong => self.turn(),
                Workload::ManyLocks => self.section(index),
                Workload::Nested => self.nested(index),
                Workload::TryMix if rounds.is_multiple_of(2) => self.try_section(index),
                Workload::TryMix => self.section(index),
                Workload::Stuck => self.holding(0, || {
                    if self.vcpu == 0 {
                        loop {
                            P::relax();
                        }
                    }
                }),
                Workload::Panic => assert!(self.vcpu != 0, "the job asks for a panic"),
                Workload::Scribble if self.vcpu != 0 => self.section(0),
                Workload::Spin => (0..1000).for_each(|_| P::relax()),
                _ => hostile::round::<P>(workload, self.vcpu as usize, self.vcpus as usize, rounds, random),
            }
            rounds += 1;
            self.done.sections.store(rounds, Ordering::Relaxed);
            life.step(rounds, random);
        }
    }

    /// Takes a lock, and does what is to be done with it held.
    fn holding<R>(&self, index: usize, section: impl FnOnce() -> R) -> R {
        let before_draw = self.ticks();
        let after_draw = Cell::new(before_draw);
        self.locks[index].hold(
            || {
                if self.is_logging() {
                    after_draw.set(self.ticks());
                }
            },
            |ticket| {
                let acquired = self.ticks();
                let result = section();
                let left = if self.is_logging() { self.ticks() } else { 0 };
                self.log(index, [ticket, self.vcpu, before_draw, after_draw.get(), acquired, left]);
                self.waited(acquired.saturating_sub(before_draw));
                result
            },
        )
    }

    fn is_logging(&self) -> bool {
        self.logs.len() != 0
    }

    /// The tick counter; in a checking run, not before all earlier instructions are done nor after any later one begins.
    /// (Otherwise a draw that takes long to reach the lock's cache line seems to end before it began.)
    #[inline]
    fn ticks(&self) -> u64 {
        if !self.is_logging() {
            return P::ticks();
        }
        in_order();
        let ticks = P::ticks();
        in_order();
        ticks
    }

    fn section(&self, index: usize) {
        self.holding(index, || {
            Protected::advance_around(&self.job.protected[index].counter, || spend(self.inside));
        });
    }

    fn turn(&self) {
        self.holding(0, || {
            let turn = Protected::advance_around(&self.job.protected[0].counter, || spend(self.inside));
            // The second word is advanced only by the vCPU whose turn it is.
            if turn % self.vcpus == self.vcpu {
                Protected::advance(&self.job.protected[1].counter);
                Protected::advance(&self.done.turns);
            }
        });
    }

    fn nested(&self, index: usize) {
        let inner = index + 1;
        if inner == self.locks.len() {
            return self.section(index);
        }
        // Always in the order of the locks: no deadlock.
        self.holding(index, || {
            Protected::advance_around(&self.job.protected[index].counter, || self.section(inner));
        });
    }

    fn try_section(&self, index: usize) {
        let before_draw = self.ticks();
        let held = self.locks[index].try_hold(|ticket| {
            let acquired = self.ticks();
            Protected::advance_around(&self.job.protected[index].counter, || spend(self.inside));
            // Drawn at some moment of the attempt.
            self.log(index, [ticket, self.vcpu, before_draw, acquired, acquired, self.ticks()]);
            self.waited(0);
        });
        if held.is_none() {
            Protected::advance(&self.done.failed_tries);
            self.section(index);
        }
    }

    fn waited(&self, ticks: u64) {
        Protected::advance(&self.done.acquisitions);
        let pauses = P::pauses();
        let paused = pauses.wrapping_sub(self.pauses.replace(pauses));
        if self.job.phase.load(Ordering::Relaxed) != phase::MEASURE {
            return;
        }
        Protected::advance(&self.done.measured);
        Protected::advance_by(&self.done.pauses, paused);
        Protected::advance(&self.done.waits[wait_bucket(ticks)]);
        if ticks > self.done.longest_wait.load(Ordering::Relaxed) {
            self.done.longest_wait.store(ticks, Ordering::Relaxed);
        }
    }

    fn log(&self, index: usize, [ticket, vcpu, before_draw, after_draw, acquired, left]: [u64; 6]) {
        let Some(entries) = self.logs.clone().nth(index) else { return };
        let position = Protected::advance(&self.job.protected[index].logged);
        // What does not fit is counted but not kept.
        let Some(entry) = entries.get(position as usize) else { return };
        entry.ticket.store(ticket, Ordering::Relaxed);
        entry.vcpu.store(vcpu, Ordering::Relaxed);
        entry.before_draw.store(before_draw, Ordering::Relaxed);
        entry.after_draw.store(after_draw, Ordering::Relaxed);
        entry.acquired.store(acquired, Ordering::Relaxed);
        entry.left.store(left, Ordering::Relaxed);
    }
}

#[inline]
fn in_order() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: LFENCE is part of SSE2, which every x86-64 processor has.
    unsafe {
        core::arch::x86_64::_mm_lfence();
    }
}

/// Some work that the compiler does not remove: about a processor cycle an iteration.
#[inline]
pub fn spend(iterations: u64) {
    for iteration in 0..iterations {
        black_box(iteration);
    }
}
