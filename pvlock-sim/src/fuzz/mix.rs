//! The standard mix: a scenario and its faults from a seed.

use crate::faults::Faults;
use crate::locks::LockKind;
use crate::params::Params;
use crate::run::Trials;
use crate::scenario::{Contender, Pins, RuleKind, Scenario, VmSpec};
use crate::workload::{Guests, Rounds, Workload};
use pvlock_host::{Limits, PauseLoop, Policy, Queue, Rate};
use rand::RngExt;
use rand::seq::IndexedRandom;
use rand_pcg::Pcg64Mcg;

/// No deadline: 11 days. A lost wake-up shows as a sleeper that nobody wakes.
const NO_DEADLINE_NS: u64 = 1_000_000_000_000_000;

/// One of these.
fn one<T: Copy>(random: &mut Pcg64Mcg, of: &[T]) -> T {
    *of.choose(random).unwrap_or(&of[0])
}

/// The scenario of this seed, and what goes wrong in it.
pub fn scenario(seed: u64) -> (Scenario, Trials) {
    let mut random = Pcg64Mcg::new(u128::from(seed) << 64 | 0xbb67_ae85_84ca_a73b);
    let random = &mut random;
    let mut params = params(random);
    let cpus = one(random, &[1, 1, 2, 2, 2, 3, 4]);
    let mut vms: Vec<VmSpec> = (0..one(random, &[1, 1, 1, 2])).map(|_| sane(random, cpus)).collect();
    let contender = contender(random);
    let parks_on_holder = contender.policy.is_some_and(|policy| policy.pause_loop == PauseLoop::ParkOnHolder);
    if parks_on_holder || contender.queue == Queue::Holder && contender.wake_ahead > 0 {
        // A known weakness that would hide others (see the README, "What the seeds have found"): whom the holder wakes when it is
        // scheduled in takes its CPU from it, and sleeps on it again. If that is within the time of the switches, the holder does
        // nothing else.
        params.exits.wake_latency = 50_000;
    }
    if contender.policy.is_some_and(|policy| policy.pause_loop == PauseLoop::DirectedYield) {
        // As well: directed yields of several CPUs to tasks of one, each sooner than the switch before it is over.
        params.exits.pause_loop = 10_000;
    }
    if contender.lock.halts() && random.random_range(0..4) == 0 {
        let rounds = Rounds { guests: Guests::Hostile, locks: 0, rounds: 0, inside_ns: 0, outside_ns: 0 };
        vms.push(VmSpec { vcpus: one(random, &[1, 2, 4]), pins: Pins::Free, workload: Workload::Rounds(rounds) });
    }
    let mut faults = faults(random, seed, &params);
    if !matches!(contender.lock, LockKind::Ticket | LockKind::Preemptable) {
        // Their waits do not nest: they have one latch, and no interrupts between the last check and the halt.
        faults.interrupt = 0;
    }
    // Handlers that are interrupted, and wait in order, take most of the time.
    let patience = if faults.interrupt > 0 { 20_000 } else { 2_000 };
    let trials = Trials {
        faults,
        deadline_ns: NO_DEADLINE_NS,
        // Many rounds of the scheduler for everybody, and everything that can go wrong on the way.
        longest_wait_ns: patience * params.scheduler.latency_base
            + 2_000 * (faults.stall_ns + faults.kick_ns)
            + 100 * faults.pause_ns,
        log: 0,
    };
    let scenario = Scenario {
        cpus,
        vms,
        others: one(random, &[0, 0, 0, 1]),
        contender,
        warm_up_ns: 0,
        // Longer than any run.
        run_ns: NO_DEADLINE_NS / 2,
        seed,
        params,
        record_ns: None,
    };
    (scenario, trials)
}

/// The documented set, often with a scheduler that is faster by as much as makes preemption as likely as anything else.
fn params(random: &mut Pcg64Mcg) -> Params {
    let mut params = Params::default();
    params.guest.pause_cycles = one(random, &[10, 140]);
    let faster = one(random, &[1, 10, 30, 100]);
    let scheduler = &mut params.scheduler;
    for time in [
        &mut scheduler.latency_base,
        &mut scheduler.min_granularity_base,
        &mut scheduler.wakeup_granularity_base,
        &mut scheduler.tick,
        &mut scheduler.migration_cost,
        &mut scheduler.balance_busy,
        &mut scheduler.balance_idle,
        &mut scheduler.gang_slice,
    ] {
        *time /= faster;
    }
    params.pause_loop.window_cycles = one(random, &[4096, 4096, 16_384, 100_000]);
    params
}

fn sane(random: &mut Pcg64Mcg, cpus: usize) -> VmSpec {
    let vcpus = one(random, &[2, 2, 3, 3, 4, 4, 5, 6, 8, 12]);
    let pins = match random.random_range(0..8) {
        0 => Pins::Among((0..cpus.div_ceil(2)).collect()),
        1 => Pins::Each((0..vcpus).map(|_| random.random_range(0..cpus)).collect()),
        _ => Pins::Free,
    };
    let rounds = Rounds {
        guests: Guests::Sane,
        locks: one(random, &[1, 1, 2, 3]),
        rounds: random.random_range(5..=30),
        inside_ns: one(random, &[100, 500, 3_000, 50_000]),
        outside_ns: one(random, &[100, 500, 5_000, 50_000]),
    };
    VmSpec { vcpus, pins, workload: Workload::Rounds(rounds) }
}

fn contender(random: &mut Pcg64Mcg) -> Contender {
    let ours = [LockKind::Ticket, LockKind::Preemptable];
    let lock = if random.random_range(0..10) == 0 {
        one(random, &[LockKind::ClassicTicket, LockKind::Queued])
    } else {
        one(random, &ours)
    };
    let mut contender = Contender::new("fuzz", lock);
    if random.random_range(0..8) > 0 {
        let (name, ..) = one(random, &Policy::NAMED);
        contender.policy = Policy::named(name).map(|policy| Policy {
            undercommit: policy.undercommit.filter(|_| random.random()),
            chain: one(random, &[1, 4, 64]),
            look_ahead: one(random, &[0, 1, 4]),
            limits: limits(random),
            ..policy
        });
    }
    contender.queue = one(random, &[Queue::None, Queue::Holder, Queue::Previous]);
    contender.wake_ahead = random.random_range(0..=2);
    contender.rule = one(random, &[RuleKind::Fair, RuleKind::Fair, RuleKind::Fair, RuleKind::Fair, RuleKind::Fair, RuleKind::Gang]);
    contender
}

fn limits(random: &mut Pcg64Mcg) -> Limits {
    let mut rate = || {
        let rate = Rate { per_second: one(random, &[1_000, 100_000]), burst: one(random, &[1, 10]) };
        (random.random_range(0..8) == 0).then_some(rate)
    };
    Limits { halts: rate(), kicks: rate(), pause_loops: rate(), longest_ns: 100_000 }
}

/// A few kinds of faults at a time, each as likely as to matter, or now and then as unlikely as to come alone.
fn faults(random: &mut Pcg64Mcg, seed: u64, params: &Params) -> Faults {
    let mut chance = |of: &[u32]| one(random, of);
    let mut faults = Faults {
        seed,
        stall: chance(&[0, 5, 20, 100]),
        interrupt: chance(&[0, 0, 10, 50]),
        kick_late: chance(&[0, 2, 10]),
        kick_twice: chance(&[0, 2, 10]),
        wake_for_nothing: chance(&[0, 0, 2, 10]),
        exit_lost: chance(&[0, 0, 2, 10]),
        forbid: chance(&[0, 2, 1]),
        reset: chance(&[0, 0, 4, 20]),
        register: chance(&[0, 0, 0, 4]),
        ..Faults::default()
    };
    let slice = params.scheduler.latency_base;
    faults.stall_ns = one(random, &[2_000, 20_000, slice, 2 * slice]);
    faults.kick_ns = one(random, &[2_000, 20_000, slice]);
    faults.nothing_ns = one(random, &[2_000, slice]);
    faults.pause_every_ns = one(random, &[0, 0, 0, 3 * slice, 20 * slice]);
    faults.pause_ns = one(random, &[10_000, slice]);
    faults
}
