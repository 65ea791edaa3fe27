//! What the engine's decisions cost, without the sleeps: at 8 and at 512 vCPUs, half of them asleep on one queue.
//!
//! Each figure is the time of one event, from a batch of events of as many vCPUs.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pvlock_host::hypercalls::Doorbell;
use pvlock_host::protocol::{Features, LockId, Region, SlotIndex, VcpuId, Wait, WaitState};
use pvlock_host::{
    Config, Engine, Nested, PauseLoop, Placement, Policy, Queue, RunStates, Scheduler, Unpark, Verdict, Waker, Yields,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

const MOST: usize = 512;

/// A scheduler that can do everything and is asked nothing.
struct Quiet;

impl Scheduler for Quiet {
    fn placement(&self, _: VcpuId) -> Placement {
        Placement::Unknown
    }

    fn yields(&self) -> Yields {
        Yields::Directed
    }
}

impl Waker for Quiet {
    fn wake(&self, vcpu: VcpuId) {
        black_box(vcpu);
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }
}

struct Vm {
    engine: Engine<Nested, parking_lot::RawMutex>,
    region: &'static Region<MOST>,
    vcpus: usize,
}

fn vcpu(id: usize) -> VcpuId {
    VcpuId::new(id).expect("below the most vCPUs")
}

fn slot() -> SlotIndex {
    SlotIndex::new(0).expect("the first")
}

impl Vm {
    /// Everybody runs; the first half waits, in order of tickets, for a lock that the last holds.
    fn new(vcpus: usize, queue: Queue, pause_loop: PauseLoop) -> Self {
        let region: &'static Region<MOST> = Box::leak(Box::new(Region::new(Features::HALT)));
        let policy = Policy { pause_loop, chain: u32::MAX, ..Policy::default() };
        let config = Config { queue, policy, run_states: RunStates::Exact, ..Config::default() };
        let engine = Engine::new(config, vcpus, Nested(region.as_ref())).expect("a sound configuration");
        let vm = Self { engine, region, vcpus };
        let _: Verdict = black_box(vm.ring(0, Doorbell::Register { low: 0 }));
        for id in 0..vcpus {
            let _: Verdict = black_box(vm.ring(0, Doorbell::Online(vcpu(id))));
            vm.engine.scheduled_in(vcpu(id), &Quiet);
        }
        // The holder waits for nothing.
        for id in 0..vcpus - 1 {
            let previous = id.checked_sub(1).unwrap_or(vcpus - 1);
            vm.publish(id, Some(previous), Some(vcpus - 1), WaitState::Halting);
        }
        vm
    }

    fn publish(&self, id: usize, previous: Option<usize>, holder: Option<usize>, state: WaitState) {
        let lock = LockId::new(64).expect("not 0");
        let wait = Wait { lock, ticket: id as u32, state, predecessor: previous.map(vcpu), holder: holder.map(vcpu) };
        self.region.as_ref().records[id].slot(slot()).publish(&wait);
    }

    fn ring(&self, id: usize, doorbell: Doorbell) -> Verdict {
        self.engine.doorbell(vcpu(id), doorbell.encode(), 0, &Quiet)
    }

    fn batch(&self) -> usize {
        self.vcpus / 2
    }

    /// Halts, then kicks; the time of each.
    fn halts_and_kicks(&self, rounds: u64) -> [Duration; 2] {
        let mut times = [Duration::ZERO; 2];
        for _ in 0..rounds {
            let start = Instant::now();
            for id in 0..self.batch() {
                let _: Verdict = black_box(self.ring(id, Doorbell::Halt { slot: slot(), interrupts: false }));
            }
            times[0] += start.elapsed();
            let start = Instant::now();
            for id in 0..self.batch() {
                let from = if self.engine.config().queue == Queue::Holder && id > 0 { id - 1 } else { self.vcpus - 1 };
                let _: Verdict = black_box(self.ring(from, Doorbell::Kick(vcpu(id))));
            }
            times[1] += start.elapsed();
            for id in 0..self.batch() {
                self.engine.unparked(vcpu(id), Unpark::Woken, 0, &Quiet);
            }
        }
        times.map(|time| time / self.batch() as u32)
    }

    /// On each of so many threads a pair of vCPUs with a lock of its own: one halts behind the other, is kicked, and is back.
    /// The time of one such round.
    fn pairs(&self, threads: usize, rounds: u64) -> Duration {
        let barrier = std::sync::Barrier::new(threads);
        let pair = |thread: usize| {
            let (owner, waiter) = (2 * thread, 2 * thread + 1);
            barrier.wait();
            let start = Instant::now();
            for _ in 0..rounds {
                let _: Verdict = black_box(self.ring(waiter, Doorbell::Halt { slot: slot(), interrupts: false }));
                let _: Verdict = black_box(self.ring(owner, Doorbell::Kick(vcpu(waiter))));
                self.engine.unparked(vcpu(waiter), Unpark::Woken, 0, &Quiet);
            }
            start.elapsed()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|thread| {
                    let pair = &pair;
                    scope.spawn(move || pair(thread))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).max().unwrap_or_default()
        })
    }

    /// Pause-loop exits; `prepare` and `undo` are not timed.
    fn exits(&self, rounds: u64, prepare: impl Fn(), undo: impl Fn()) -> Duration {
        let mut time = Duration::ZERO;
        for _ in 0..rounds {
            prepare();
            let start = Instant::now();
            for id in 0..self.batch() {
                let _: Verdict = black_box(self.engine.pause_loop(vcpu(id), 0, &Quiet));
            }
            time += start.elapsed();
            undo();
        }
        time / self.batch() as u32
    }
}

fn decisions(criterion: &mut Criterion) {
    for (name, queue) in [("previous", Queue::Previous), ("holder", Queue::Holder)] {
        for (event, which) in [("halt", 0), ("kick", 1)] {
            let mut group = criterion.benchmark_group(format!("{event}, queue {name}"));
            for vcpus in [8, MOST] {
                let vm = Vm::new(vcpus, queue, PauseLoop::Ignore);
                group.bench_function(BenchmarkId::from_parameter(vcpus), |bencher| {
                    bencher.iter_custom(|rounds| vm.halts_and_kicks(rounds)[which]);
                });
            }
        }
    }
    let mut group = criterion.benchmark_group("halt, kick and back, on threads that share nothing but the engine");
    for threads in [1, 2] {
        let vm = Vm::new(8, Queue::Previous, PauseLoop::Ignore);
        for id in 0..8 {
            // A lock for each pair.
            let lock = LockId::new(64 * (id as u64 / 2 + 1)).expect("not 0");
            let predecessor = Some(vcpu(id & !1));
            let wait = Wait { lock, ticket: id as u32, state: WaitState::Halting, predecessor, holder: predecessor };
            vm.region.as_ref().records[id].slot(slot()).publish(&wait);
        }
        group.bench_function(BenchmarkId::from_parameter(threads), |bencher| {
            bencher.iter_custom(|rounds| vm.pairs(threads, rounds));
        });
    }
    drop(group);
    let nothing = || ();
    let mut group = criterion.benchmark_group("pause loop, holder runs");
    for vcpus in [8, MOST] {
        let vm = Vm::new(vcpus, Queue::Previous, PauseLoop::DirectedYield);
        (0..vcpus - 1).for_each(|id| vm.publish(id, None, Some(vcpus - 1), WaitState::Spinning));
        group.bench_function(BenchmarkId::from_parameter(vcpus), |bencher| {
            bencher.iter_custom(|rounds| vm.exits(rounds, nothing, nothing))
        });
    }
    drop(group);
    let mut group = criterion.benchmark_group("pause loop, directed yield in turn, nobody waits");
    for vcpus in [8, MOST] {
        let vm = Vm::new(vcpus, Queue::Previous, PauseLoop::DirectedYield);
        (0..vcpus).for_each(|id| vm.publish(id, None, None, WaitState::Spinning));
        group.bench_function(BenchmarkId::from_parameter(vcpus), |bencher| {
            bencher.iter_custom(|rounds| vm.exits(rounds, nothing, nothing))
        });
    }
    drop(group);
    let mut group = criterion.benchmark_group("pause loop, park on holder");
    for vcpus in [8, MOST] {
        let vm = Vm::new(vcpus, Queue::Previous, PauseLoop::ParkOnHolder);
        (0..vcpus - 1).for_each(|id| vm.publish(id, None, Some(vcpus - 1), WaitState::Spinning));
        let holder = vcpu(vcpus - 1);
        let undo = || {
            vm.engine.scheduled_in(holder, &Quiet);
            (0..vm.batch()).for_each(|id| vm.engine.unparked(vcpu(id), Unpark::Woken, 0, &Quiet));
        };
        group.bench_function(BenchmarkId::from_parameter(vcpus), |bencher| {
            bencher.iter_custom(|rounds| vm.exits(rounds, || vm.engine.scheduled_out(holder), undo));
        });
    }
}

criterion_group!(benches, decisions);
criterion_main!(benches);
