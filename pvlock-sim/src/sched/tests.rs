//! Hand-computed cases. Times in units of which a latency has 120, so that slices come out even.

use super::*;
use State::{Runnable, Running, Sleeping};

const TIMES: Times = Times {
    latency: 120,
    min_granularity: 20,
    wakeup_granularity: 30,
    tick: 10,
    migration_cost: 50,
    balance_busy: 640,
    balance_idle: 40,
};

/// A host with so many CPUs, and tasks that begin near these.
fn host(rule: Rule, cpus: usize, near: &[usize]) -> Sched {
    let mut sched = Sched::new(TIMES, rule, cpus);
    let everywhere: Arc<[usize]> = (0..cpus).collect();
    for (group, &cpu) in near.iter().enumerate() {
        sched.add(group, Arc::clone(&everywhere), cpu, 0);
    }
    sched
}

/// As [`host`] with one CPU, whose tasks have all been woken at 0 and the first of which runs.
fn one_cpu(tasks: usize) -> Sched {
    let mut sched = host(Rule::Fair, 1, &vec![0; tasks]);
    (0..tasks).for_each(|task| _ = sched.wake(task, None, 0));
    assert_eq!(sched.pick(0, 0), Some(0));
    sched
}

/// The CPU chooses anew.
fn switch(sched: &mut Sched, cpu: CpuId, now: u64) -> Option<TaskId> {
    sched.put(cpu, now);
    sched.pick(cpu, now)
}

fn vruntime(sched: &Sched, task: TaskId) -> u64 {
    sched.tasks[task].vruntime
}

// ---- slices ----------------------------------------------------------------------------------------------------------

#[test]
fn a_slice_is_a_share_of_the_latency_and_ends_at_the_first_tick_after_it() {
    let mut sched = one_cpu(2);
    // 120 / 2 = 60: not over at 60, as nothing is more than it, but at the next tick.
    assert_eq!(
        (10..=70).step_by(10).map(|now| sched.tick(0, now)).collect::<Vec<_>>(),
        [false, false, false, false, false, false, true]
    );
    assert_eq!(switch(&mut sched, 0, 70), Some(1));
    assert_eq!((sched.state(0), sched.state(1)), (Runnable, Running));
    assert_eq!([80, 130, 140].map(|now| sched.tick(0, now)), [false, false, true]);
    assert_eq!(switch(&mut sched, 0, 140), Some(0), "equal run times: the first one");
}

#[test]
fn a_slice_is_never_shorter_than_the_least_granularity() {
    let mut sched = one_cpu(12);
    // 120 / 12 = 10 is less than 20.
    assert_eq!([10, 20, 30].map(|now| sched.tick(0, now)), [false, false, true]);
}

#[test]
fn who_is_a_slice_ahead_of_the_first_in_line_makes_room_after_the_least_granularity() {
    let mut sched = one_cpu(2);
    sched.tasks[0].vruntime = 100;
    // Ahead by 100 + 10 > 60, but 10 < 20; at 20 it is both.
    assert_eq!([10, 20].map(|now| sched.tick(0, now)), [false, true]);
}

#[test]
fn who_is_alone_runs_on() {
    let mut sched = one_cpu(1);
    assert!((1..100).all(|tick| !sched.tick(0, tick * 10)));
    assert_eq!(switch(&mut sched, 0, 1_000), Some(0));
    assert_eq!(vruntime(&sched, 0), 1_000);
}

// ---- waking ----------------------------------------------------------------------------------------------------------

#[test]
fn a_woken_task_preempts_who_is_more_than_the_granularity_ahead_and_not_at_exactly_it() {
    for (ran, preempts) in [(30, false), (31, true)] {
        let mut sched = host(Rule::Fair, 1, &[0, 0]);
        sched.wake(0, None, 0);
        sched.pick(0, 0);
        // min_vruntime follows the one that runs; a credit of 60 would put the woken one below zero: its own 0 counts.
        assert_eq!(sched.wake(1, None, ran), Placed { cpu: 0, preempts }, "{ran}");
    }
}

#[test]
fn a_sleeper_is_at_most_half_a_latency_behind_the_queue() {
    let mut sched = host(Rule::Fair, 1, &[0, 0]);
    sched.wake(0, None, 0);
    sched.pick(0, 0);
    assert!(sched.wake(1, None, 1_000).preempts);
    assert_eq!(vruntime(&sched, 1), 1_000 - 60);
    // Who slept for less than that keeps what it has.
    assert_eq!(switch(&mut sched, 0, 1_000), Some(1));
    sched.block(0, 1_040);
    assert_eq!((sched.state(1), vruntime(&sched, 1)), (Sleeping, 980));
    assert_eq!(sched.pick(0, 1_040), Some(0));
    assert!(!sched.wake(1, None, 1_050).preempts, "1010 is not more than 980 + 30");
    assert_eq!(vruntime(&sched, 1), 980);
}

/// A host of four CPUs with tasks 0 to 3 running on CPUs 0 to 3, but for `idle`, and task 4, which ran last on CPU 2.
fn busy_but(idle: &[usize]) -> Sched {
    let mut sched = host(Rule::Fair, 4, &[0, 1, 2, 3, 2]);
    for cpu in (0..4).filter(|cpu| !idle.contains(cpu)) {
        sched.wake(cpu, None, 0);
        assert_eq!(sched.pick(cpu, 0), Some(cpu));
    }
    sched
}

#[test]
fn a_woken_task_goes_to_its_last_cpu_if_idle_then_to_the_next_idle_one_then_to_the_less_loaded_of_wakers_and_last() {
    assert_eq!(busy_but(&[0, 2]).wake(4, Some(0), 0), Placed { cpu: 2, preempts: true });
    assert_eq!(busy_but(&[0, 3]).wake(4, Some(0), 0).cpu, 3, "from the last one on");
    assert_eq!(busy_but(&[0, 1]).wake(4, Some(3), 0).cpu, 0, "and round");
    assert_eq!(busy_but(&[]).wake(4, Some(1), 0).cpu, 1, "ties go to the waker's");
    assert_eq!(busy_but(&[]).wake(4, None, 0).cpu, 2);
    let mut sched = busy_but(&[]);
    let everywhere: Arc<[usize]> = (0..4).collect();
    sched.add(9, everywhere, 1, 0);
    sched.wake(5, Some(1), 0);
    assert_eq!(sched.wake(4, Some(1), 0).cpu, 2, "two on the waker's");
}

#[test]
fn a_pinned_task_is_woken_where_it_may_run() {
    let mut sched = busy_but(&[0]);
    let task = sched.add(9, [3].into(), 3, 0);
    assert_eq!(sched.wake(task, Some(0), 0).cpu, 3);
    let task = sched.add(9, [1, 3].into(), 3, 0);
    assert_eq!(sched.wake(task, Some(2), 0).cpu, 3, "neither the idle one nor the waker's");
}

#[test]
fn run_times_are_translated_between_cpus() {
    let mut sched = host(Rule::Fair, 2, &[0, 1, 1]);
    sched.wake(0, None, 0);
    sched.wake(1, None, 0);
    sched.pick(0, 0);
    sched.pick(1, 0);
    // CPU 1 gets ahead by 500; its task sleeps, and wakes on CPU 0 exactly as far ahead of that queue as it was of its own.
    sched.account(0, 100);
    sched.block(1, 600);
    sched.wake(2, None, 600);
    sched.pick(1, 600);
    sched.tasks[1].vruntime = 610;
    assert_eq!(sched.cpus[1].min_vruntime, 600);
    assert_eq!(sched.wake(1, Some(0), 600).cpu, 0);
    assert_eq!(vruntime(&sched, 1), 600 + 10, "CPU 0 has run for 600 as well");
}

// ---- yields ----------------------------------------------------------------------------------------------------------

#[test]
fn a_plain_yield_lets_the_next_in_line_run_unless_it_is_too_far_ahead() {
    for (ahead, runs) in [(30, 1), (31, 0)] {
        let mut sched = one_cpu(2);
        sched.tasks[1].vruntime = ahead;
        sched.yield_now(0);
        assert_eq!(switch(&mut sched, 0, 0), Some(runs), "{ahead} ahead of the one that yields");
        assert_eq!(switch(&mut sched, 0, 0), Some(0), "the yield is forgotten");
    }
    let mut alone = one_cpu(1);
    alone.yield_now(0);
    assert_eq!(switch(&mut alone, 0, 5), Some(0));
}

#[test]
fn a_plain_yield_does_nothing_for_who_is_not_first_in_line_anyway() {
    let mut sched = one_cpu(3);
    sched.tasks[0].vruntime = 100;
    sched.yield_now(0);
    assert_eq!(switch(&mut sched, 0, 0), Some(1));
}

#[test]
fn a_directed_yield_makes_its_target_the_next_on_its_cpu() {
    let mut sched = one_cpu(4);
    assert_eq!(sched.yield_to(0, 3), Ok(0));
    assert_eq!(switch(&mut sched, 0, 10), Some(3), "though 1 and 2 are before it");
    // On another CPU as well.
    let mut sched = host(Rule::Fair, 2, &[0, 1, 1, 1]);
    for task in [0, 1] {
        sched.wake(task, None, 0);
        sched.pick(task, 0);
    }
    sched.wake(2, None, 0);
    sched.wake(3, None, 0);
    assert_eq!(sched.yield_to(0, 3), Ok(1));
    assert_eq!(switch(&mut sched, 1, 10), Some(3));
    assert_eq!(switch(&mut sched, 0, 10), Some(0), "nobody else is there");
}

#[test]
fn a_directed_yield_fails_if_its_target_runs_or_sleeps_or_both_are_alone() {
    let mut sched = busy_but(&[]);
    assert_eq!(sched.yield_to(0, 1), Err(YieldFailed::Running));
    assert_eq!(sched.yield_to(0, 4), Err(YieldFailed::Sleeping));
    // Alone on both: its CPU is about to run it.
    let mut sched = busy_but(&[2]);
    assert_eq!(sched.wake(4, None, 0).cpu, 2);
    assert_eq!(sched.yield_to(0, 4), Err(YieldFailed::Alone));
    // Not if somebody is on that CPU.
    let mut sched = busy_but(&[]);
    assert_eq!(sched.wake(4, None, 0).cpu, 2);
    assert_eq!(sched.yield_to(0, 4), Ok(2));
}

#[test]
fn the_next_buddy_may_be_no_more_than_the_granularity_ahead_of_the_first() {
    for (ahead, runs) in [(30, 2), (31, 1)] {
        let mut sched = one_cpu(3);
        sched.tasks[0].vruntime = 500;
        sched.tasks[2].vruntime = ahead;
        assert_eq!(sched.yield_to(0, 2), Ok(0));
        assert_eq!(switch(&mut sched, 0, 0), Some(runs), "{ahead} ahead of task 1");
    }
}

// ---- balancing -------------------------------------------------------------------------------------------------------

#[test]
fn an_idle_cpu_pulls_from_the_longest_queue_what_ran_last_long_enough_ago() {
    let mut sched = host(Rule::Fair, 3, &[0, 0, 0, 1, 1]);
    let only: Arc<[usize]> = [0].into();
    (0..5).for_each(|task| sched.tasks[task].allowed = if task < 3 { Arc::clone(&only) } else { [1].into() });
    (0..5).for_each(|task| _ = sched.wake(task, None, 0));
    assert_eq!((sched.pick(0, 0), sched.pick(1, 0)), (Some(0), Some(3)));
    (0..5).for_each(|task| sched.tasks[task].allowed = (0..3).collect());
    // Task 0 has just left its CPU; of those that wait, the one with the longest run time is taken first.
    assert_eq!(switch(&mut sched, 0, 1_000), Some(1));
    assert_eq!(vruntime(&sched, 0), 1_000);
    assert!(sched.pull(2, true, 1_049), "task 2 never ran");
    assert_eq!(sched.pick(2, 1_049), Some(2));
    sched.block(2, 1_049);
    // Two tasks each on CPUs 0 and 1 now, and ties go to the lower number: there only task 0 waits, for less than 50.
    assert_eq!((sched.load(0), sched.load(1)), (2, 2));
    assert!(sched.pull(2, true, 1_049));
    assert_eq!(sched.pick(2, 1_049), Some(4), "from the other queue, as task 0 is warm");
    sched.block(2, 1_049);
    assert!(!sched.pull(2, true, 1_049), "warm by one");
    assert!(sched.pull(2, true, 1_050));
    assert_eq!(sched.pick(2, 1_050), Some(0));
}

#[test]
fn nothing_is_pulled_to_where_as_many_are_or_where_it_may_not_run() {
    let mut sched = busy_but(&[]);
    sched.wake(4, None, 0);
    assert!(!sched.pull(0, false, 1_000), "one here, two there");
    sched.block(0, 0);
    sched.tasks[4].allowed = [2].into();
    assert!(!sched.pull(0, false, 1_000));
    sched.tasks[4].allowed = [0, 2].into();
    assert!(sched.pull(0, false, 1_000));
    assert_eq!(sched.pick(0, 1_000), Some(4));
}

#[test]
fn balancing_is_due_every_so_often_more_often_for_idle_cpus() {
    let mut sched = busy_but(&[3]);
    assert_eq!([39, 40, 79, 80].map(|now| sched.balance_due(3, now)), [false, true, false, true]);
    assert_eq!([639, 640, 1_279, 1_280].map(|now| sched.balance_due(0, now)), [false, true, false, true]);
}

#[test]
fn a_periodic_balance_takes_warm_tasks_as_well() {
    let mut sched = one_cpu(2);
    sched.cpus.push(Cpu::default());
    sched.idle.insert(1);
    (0..2).for_each(|task| sched.tasks[task].allowed = [0, 1].into());
    assert_eq!(switch(&mut sched, 0, 70), Some(1));
    assert!(!sched.pull(1, true, 80));
    assert!(sched.pull(1, false, 80));
    assert_eq!(sched.pick(1, 80), Some(0));
}

// ---- gangs -----------------------------------------------------------------------------------------------------------

#[test]
fn gangs_are_packed_into_the_first_in_which_their_cpus_are_free() {
    let gang = Gang::pack(&[vec![0, 1], vec![1, 2], vec![2, 3], vec![0], vec![3]], 4);
    // {0, 2}, {1, 3, 4}
    assert_eq!(gang.len(), 2);
    let active = |gang: &Gang| (0..5).filter(|&group| gang.is_active(group)).collect::<Vec<_>>();
    assert_eq!(active(&gang), [0, 2]);
    let mut next = gang.clone();
    next.rotate();
    assert_eq!(active(&next), [1, 3, 4]);
    next.rotate();
    assert_eq!(active(&next), [0, 2]);
    assert!(gang.is_active(5), "tasks of the host are in every gang");
}

#[test]
fn only_the_gang_whose_turn_it_is_runs() {
    let mut sched = host(Rule::Gang(Gang::pack(&[vec![0], vec![0]], 1)), 1, &[0, 0]);
    assert!(sched.wake(0, None, 0).preempts);
    assert_eq!(sched.pick(0, 0), Some(0));
    assert!(!sched.wake(1, None, 1_000).preempts, "whoever is ahead");
    assert!(!sched.tick(0, 2_000));
    sched.rotate();
    assert!(sched.tick(0, 2_010), "its turn is over");
    assert_eq!(switch(&mut sched, 0, 2_010), Some(1));
    sched.block(0, 2_020);
    assert_eq!(sched.pick(0, 2_020), None, "the CPU is idle rather than give it to the other gang");
    assert!(sched.wake(1, None, 2_030).preempts);
}

#[test]
fn a_gang_with_more_tasks_than_cpus_takes_turns_in_itself() {
    let mut sched = Sched::new(TIMES, Rule::Gang(Gang::pack(&[vec![0, 0]], 1)), 1);
    (0..2).for_each(|_| _ = sched.add(0, [0].into(), 0, 0));
    (0..2).for_each(|task| _ = sched.wake(task, None, 0));
    assert_eq!(sched.pick(0, 0), Some(0));
    assert_eq!([60, 70].map(|now| sched.tick(0, now)), [false, true]);
    assert_eq!(switch(&mut sched, 0, 70), Some(1));
}

#[test]
fn a_cpu_whose_tasks_have_to_wait_for_their_gang_is_not_idle() {
    let mut sched = host(Rule::Gang(Gang::pack(&[vec![0], vec![0]], 1)), 1, &[0, 0]);
    sched.wake(0, None, 0);
    sched.pick(0, 0);
    sched.rotate();
    sched.put(0, 10);
    assert_eq!(sched.pick(0, 10), None);
    assert_eq!(sched.idle().count(), 0);
}

// ---- clairvoyance ----------------------------------------------------------------------------------------------------

#[test]
fn an_urgent_task_runs_at_once_and_for_as_long_as_it_is_urgent() {
    let mut sched = host(Rule::Clairvoyant, 1, &[0, 0]);
    sched.wake(0, None, 0);
    sched.pick(0, 0);
    sched.wake(1, None, 0);
    sched.tasks[1].vruntime = 1_000;
    assert!(sched.set_urgent(1, true), "preempts, however far it is ahead");
    assert_eq!(switch(&mut sched, 0, 5), Some(1));
    assert!((1..100).all(|tick| !sched.tick(0, 5 + tick * 10)), "no slice ends");
    sched.block(0, 1_000);
    sched.pick(0, 1_000);
    assert!(sched.wake(1, None, 1_000).preempts);
    assert!(!sched.set_urgent(1, false));
    assert!(!sched.set_urgent(0, true), "runs already");
    assert!(!sched.preempts(0, 1), "the one that runs is urgent");
}

#[test]
fn an_urgent_task_goes_to_a_cpu_whose_task_is_not() {
    let mut sched = host(Rule::Clairvoyant, 2, &[0, 1, 0]);
    for task in [0, 1] {
        sched.wake(task, None, 0);
        sched.pick(task, 0);
    }
    sched.set_urgent(0, true);
    sched.set_urgent(2, true);
    assert_eq!(sched.wake(2, None, 0), Placed { cpu: 1, preempts: true }, "though its last CPU is 0");
}

// ---- what the engine asks --------------------------------------------------------------------------------------------

#[test]
fn a_backlog_is_who_else_wants_the_cpu() {
    let mut sched = one_cpu(3);
    assert_eq!((sched.backlog(0), sched.backlog(1), sched.waiting(0)), (2, 2, 2));
    sched.block(0, 5);
    assert_eq!((sched.backlog(0), sched.backlog(1)), (2, 1));
    sched.pick(0, 5);
    assert_eq!((sched.current(0), sched.backlog(0), sched.backlog(2)), (Some(1), 2, 1));
}
