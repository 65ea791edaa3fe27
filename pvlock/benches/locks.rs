//! Every lock side by side: alone, between two threads, and on more threads than CPUs.
//!
//! The paravirtual locks run on a registered guest, whose vCPUs are threads. With several threads, a sample is not so many
//! iterations but a fixed time, of which the average time between two acquisitions is reported: an overcommitted spinlock
//! goes on for milliseconds as if it were alone, so that few iterations would say nothing.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode};
use pvlock_guest::{Guest, GuestRef, Platform, PreemptableTicketLock, TicketLock};
use pvlock_guest_image::work::spend;
use pvlock_host::Config;
use pvlock_host::driver::threads::{Threads, threads};
use pvlock_host::hypercalls::{Doorbell, Ring};
use pvlock_host::protocol::{SlotIndex, VcpuId};
use std::cell::Cell;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

/// Iterations of work inside the lock and outside, where several threads want it: the short sections of `pvlock run`.
const INSIDE: u64 = 200;
const OUTSIDE: u64 = 2000;
/// Threads per CPU in the overcommitted case.
const OVERCOMMIT: usize = 4;
/// vCPUs of the guest.
const VCPUS: usize = 64;

std::thread_local! {
    static CURRENT: Cell<Option<VcpuId>> = const { Cell::new(None) };
}

fn ticks() -> u64 {
    pvlock::session::ticks()
}

/// No host: the locks are native.
enum Native {}

static NATIVE: Guest<1> = Guest::new();

impl Platform for Native {
    #[inline]
    fn guest() -> GuestRef<'static> {
        NATIVE.as_ref()
    }

    #[inline]
    fn current() -> Option<VcpuId> {
        CURRENT.get()
    }

    #[inline]
    fn ticks() -> u64 {
        ticks()
    }

    fn halt(_: SlotIndex, _: bool) {}

    fn kick(_: VcpuId) {}
}

/// A guest that is registered with a host in this process.
enum Paravirtual {}

static GUEST: Guest<VCPUS> = Guest::new();
static HOST: OnceLock<Threads> = OnceLock::new();

impl Paravirtual {
    fn ring(doorbell: Doorbell) {
        if let (Some(host), Some(vcpu)) = (HOST.get(), CURRENT.get()) {
            host.doorbell(vcpu).ring(doorbell.encode());
        }
    }

    /// Registers the guest; the calling thread becomes its first vCPU, and every other vCPU comes online too.
    fn boot() {
        let host = threads(Config::default(), GUEST.as_ref().region(), VCPUS).expect("the default settings are valid");
        let host = HOST.get_or_init(|| host);
        for vcpu in (0..VCPUS).filter_map(VcpuId::new) {
            if vcpu.index() == 0 {
                GUEST.as_ref().register(&host.doorbell(vcpu), 0, [vcpu]).expect("the host accepts the region");
            }
            GUEST.as_ref().online(&host.doorbell(vcpu), vcpu).expect("the host knows the vCPU");
        }
        CURRENT.set(VcpuId::new(0));
    }
}

impl Platform for Paravirtual {
    #[inline]
    fn guest() -> GuestRef<'static> {
        GUEST.as_ref()
    }

    #[inline]
    fn current() -> Option<VcpuId> {
        CURRENT.get()
    }

    #[inline]
    fn ticks() -> u64 {
        ticks()
    }

    fn halt(slot: SlotIndex, interrupts: bool) {
        Self::ring(Doorbell::Halt { slot, interrupts });
    }

    fn kick(vcpu: VcpuId) {
        Self::ring(Doorbell::Kick(vcpu));
    }
}

/// A lock, from nothing to locked and unlocked.
trait Lock: Sync {
    fn new() -> Self;

    fn hold(&self, section: impl FnOnce());
}

impl Lock for spin::mutex::TicketMutex<()> {
    fn new() -> Self {
        Self::new(())
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        let _guard = self.lock();
        section();
    }
}

impl Lock for spin::mutex::SpinMutex<()> {
    fn new() -> Self {
        Self::new(())
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        let _guard = self.lock();
        section();
    }
}

impl Lock for mcslock::raw::spins::Mutex<()> {
    fn new() -> Self {
        Self::new(())
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        self.lock_then(|()| section());
    }
}

impl<P: Platform> Lock for TicketLock<P> {
    fn new() -> Self {
        Self::new()
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        let ticket = self.lock();
        section();
        // SAFETY: the `lock` above returned this ticket.
        unsafe { self.unlock(ticket) };
    }
}

impl<P: Platform> Lock for PreemptableTicketLock<P> {
    fn new() -> Self {
        Self::new()
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        let held = self.lock();
        section();
        // SAFETY: the `lock` above took the lock.
        unsafe { self.unlock(held) };
    }
}

impl Lock for parking_lot::Mutex<()> {
    fn new() -> Self {
        Self::new(())
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        let _guard = self.lock();
        section();
    }
}

impl Lock for std::sync::Mutex<()> {
    fn new() -> Self {
        Self::new(())
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        let _guard = self.lock().expect("no owner panics");
        section();
    }
}

/// No lock at all: two locked instructions, the least a lock can do that has to see its waiters on release.
struct TwoLocked([AtomicU32; 2]);

impl Lock for TwoLocked {
    fn new() -> Self {
        Self([AtomicU32::new(0), AtomicU32::new(0)])
    }

    #[inline]
    fn hold(&self, section: impl FnOnce()) {
        // The value is used, so that this is an XADD.
        black_box(self.0[0].fetch_add(1, Ordering::Acquire));
        section();
        black_box(self.0[1].fetch_add(1, Ordering::Release));
    }
}

fn alone<L: Lock>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str) {
    let lock = crossbeam_utils::CachePadded::new(L::new());
    // Nothing about the lock may be known to the compiler.
    group.bench_function(name, |bencher| bencher.iter(|| black_box(&*lock).hold(|| ())));
}

fn together<L: Lock>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, count: usize, sample: Duration) {
    let lock = crossbeam_utils::CachePadded::new(L::new());
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            let (time, sections) = contend(&*lock, count, sample);
            time.mul_f64(iterations as f64 / sections as f64)
        });
    });
}

/// Lets `count` threads use the lock for a while. Returns how long they did, and how often they got it; both without the time
/// in which some threads have not run yet, which flatters every lock.
fn contend<L: Lock>(lock: &L, count: usize, time: Duration) -> (Duration, u64) {
    let (measure, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let start = Barrier::new(count + 1);
    std::thread::scope(|scope| {
        let worker = |vcpu: usize| {
            CURRENT.set(VcpuId::new(vcpu));
            start.wait();
            let mut sections = 0;
            while !stop.load(Ordering::Relaxed) {
                lock.hold(|| spend(INSIDE));
                spend(OUTSIDE);
                // What ends after the time is over does not count.
                sections += u64::from(measure.load(Ordering::Relaxed));
            }
            sections
        };
        let workers: Vec<_> = (0..count).map(|vcpu| scope.spawn(move || worker(vcpu))).collect();
        start.wait();
        std::thread::sleep(time);
        measure.store(true, Ordering::Relaxed);
        let begun = Instant::now();
        std::thread::sleep(time);
        measure.store(false, Ordering::Relaxed);
        let elapsed = begun.elapsed();
        stop.store(true, Ordering::Relaxed);
        let sections: u64 = workers.into_iter().map(|worker| worker.join().expect("no worker panics")).sum();
        (elapsed, sections.max(1))
    })
}

fn group<'a>(criterion: &'a mut Criterion, name: &str, samples: usize, millis: [u64; 2]) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    let [warm_up, measure] = millis.map(Duration::from_millis);
    group.sample_size(samples).warm_up_time(warm_up).measurement_time(measure);
    group
}

fn main() {
    Paravirtual::boot();
    let mut criterion = Criterion::default().configure_from_args();

    let mut uncontended = group(&mut criterion, "uncontended", 50, [300, 1000]);
    alone::<spin::mutex::TicketMutex<()>>(&mut uncontended, "spin-ticket");
    alone::<spin::mutex::SpinMutex<()>>(&mut uncontended, "spin-tas");
    alone::<mcslock::raw::spins::Mutex<()>>(&mut uncontended, "mcs");
    alone::<TicketLock<Native>>(&mut uncontended, "ticket, native");
    alone::<TicketLock<Paravirtual>>(&mut uncontended, "ticket, paravirtual");
    alone::<PreemptableTicketLock<Native>>(&mut uncontended, "preemptable, native");
    alone::<PreemptableTicketLock<Paravirtual>>(&mut uncontended, "preemptable, paravirtual");
    alone::<TwoLocked>(&mut uncontended, "two locked instructions");
    alone::<parking_lot::Mutex<()>>(&mut uncontended, "parking-lot");
    alone::<std::sync::Mutex<()>>(&mut uncontended, "std");
    uncontended.finish();

    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let overcommitted = (OVERCOMMIT * cpus).min(VCPUS);
    for (name, count, sample) in [("two threads".to_owned(), 2, 20), (format!("{overcommitted} threads"), overcommitted, 100)] {
        let mut group = group(&mut criterion, &name, 10, [1, 10 * sample]);
        group.sampling_mode(SamplingMode::Flat);
        let sample = Duration::from_millis(sample);
        together::<spin::mutex::TicketMutex<()>>(&mut group, "spin-ticket", count, sample);
        together::<spin::mutex::SpinMutex<()>>(&mut group, "spin-tas", count, sample);
        together::<mcslock::raw::spins::Mutex<()>>(&mut group, "mcs", count, sample);
        together::<TicketLock<Native>>(&mut group, "ticket, native", count, sample);
        together::<TicketLock<Paravirtual>>(&mut group, "ticket, paravirtual", count, sample);
        together::<PreemptableTicketLock<Paravirtual>>(&mut group, "preemptable, paravirtual", count, sample);
        together::<parking_lot::Mutex<()>>(&mut group, "parking-lot", count, sample);
        together::<std::sync::Mutex<()>>(&mut group, "std", count, sample);
        group.finish();
    }
    criterion.final_summary();
}
