//! What becomes of a vCPU that spins: each policy's decisions, one row a case, and what no policy may do.
#![cfg(not(pvlock_loom))]

mod common;
use common::machine::*;
use common::*;
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::offset::{header, record};
use pvlock_host::protocol::{HostFlags, RECORD_STRIDE, Wait};
use pvlock_host::{
    Actuator, Boost, Config, Decision, PauseLoop, Pivot, Placement, Resume, RunStates, Setting, Sleep, Undercommit, Verdict,
    Window, Yield, Yields,
};
use std::sync::atomic::Ordering::SeqCst;

use Decision::{Boost as B, Park as P, Resume as R, Yield as Y};

/// vCPU 0 spins; vCPUs 1 and 2 are its hints. Policy, who is off-CPU, who sleeps (as the scheduler says), what is published,
/// the decision.
type Case = (PauseLoop, &'static [usize], &'static [usize], Option<Wait>, Decision);

#[test]
fn row_33_each_policy_decides_by_who_is_off_cpu() {
    use PauseLoop::{DirectedYield, Ignore, ParkOnHolder, ParkOnPrevious};
    let nobody: Option<Wait> = None;
    let halting = || Some(Wait { holder: Some(vcpu(1)), ..behind(1, 9, 2) });
    let cases: Vec<Case> = vec![
        (Ignore, &[1, 2], &[], waits_for(9, Some(2), Some(1)), R(Resume::Ignored)),
        (PauseLoop::Yield, &[], &[], waits_for(9, Some(2), Some(1)), Y(Yield::Policy)),
        (PauseLoop::Yield, &[1], &[], nobody, Y(Yield::Policy)),
        // The holder first, then the one ahead whose turn comes first; nobody who runs or sleeps.
        (DirectedYield, &[1, 2], &[], waits_for(9, Some(2), Some(1)), B(Boost::Holder)),
        (DirectedYield, &[2], &[], waits_for(9, Some(2), Some(1)), B(Boost::Predecessor)),
        (DirectedYield, &[1, 2], &[1], waits_for(9, Some(2), Some(1)), B(Boost::Predecessor)),
        (DirectedYield, &[2], &[], waits_for(9, Some(2), None), B(Boost::Predecessor)),
        (DirectedYield, &[3], &[], waits_for(9, Some(2), Some(1)), R(Resume::HolderRunning)),
        (DirectedYield, &[3], &[], waits_for(9, Some(2), None), R(Resume::PreviousRunning)),
        (DirectedYield, &[1, 2], &[1, 2], waits_for(9, Some(2), Some(1)), Y(Yield::Asleep)),
        // Nothing published, or nonsense: in turn.
        (DirectedYield, &[3], &[], nobody, B(Boost::RoundRobin)),
        (DirectedYield, &[3], &[], halting(), B(Boost::RoundRobin)),
        (DirectedYield, &[3], &[], waits_for(9, Some(0), Some(0)), B(Boost::RoundRobin)),
        (DirectedYield, &[3], &[], waits_for(9, Some(4), Some(16_000)), B(Boost::RoundRobin)),
        (DirectedYield, &[], &[], nobody, R(Resume::NoCandidate)),
        (DirectedYield, &[3], &[3], nobody, R(Resume::NoCandidate)),
        // Parked only while the awaited one is off-CPU, whoever else is.
        (ParkOnHolder, &[1], &[], waits_for(9, Some(2), Some(1)), P(Sleep::OnHolder)),
        // A scheduler that calls a preempted vCPU asleep: what was reported counts.
        (ParkOnHolder, &[1], &[1], waits_for(9, Some(2), Some(1)), P(Sleep::OnHolder)),
        (ParkOnHolder, &[2, 3], &[], waits_for(9, Some(2), Some(1)), R(Resume::HolderRunning)),
        (ParkOnHolder, &[3], &[], waits_for(9, Some(2), None), B(Boost::RoundRobin)),
        (ParkOnHolder, &[3], &[], waits_for(9, Some(2), Some(0)), B(Boost::RoundRobin)),
        (ParkOnPrevious, &[2], &[], waits_for(9, Some(2), Some(1)), P(Sleep::OnPrevious)),
        (ParkOnPrevious, &[1, 3], &[], waits_for(9, Some(2), Some(1)), R(Resume::PreviousRunning)),
        (ParkOnPrevious, &[3], &[], nobody, B(Boost::RoundRobin)),
        (ParkOnPrevious, &[2, 3], &[], halting(), B(Boost::RoundRobin)),
        (ParkOnPrevious, &[], &[], nobody, R(Resume::NoCandidate)),
    ];
    for (n, (policy, off_cpu, sleeping, wait, decision)) in cases.into_iter().enumerate() {
        let mut machine = Machine::new(config(policy), 4);
        off_cpu.iter().for_each(|&id| machine.off_cpu(id));
        sleeping.iter().for_each(|&id| machine.placements[id] = Placement::Sleeping);
        assert_eq!(machine.decide(0, wait), decision, "case {n}: {policy:?}, off-CPU {off_cpu:?}, {wait:?}");
        let counts = machine.rig.engine.statistics();
        assert_eq!((counts.decided(decision), counts.pause_loops), (1, 1), "case {n}: counted");
        assert_eq!(counts.decisions().map(|(_, n)| n).sum::<u64>(), 1, "case {n}: once");
    }
}

#[test]
fn what_a_driver_cannot_say_or_do_degrades_and_is_not_guessed() {
    use PauseLoop::{DirectedYield, ParkOnHolder, ParkOnPrevious};
    let known = waits_for(9, Some(2), Some(1));
    // Policy, what the driver can do, whether it knows run states, what is published, the decision. vCPUs 1 to 3 are off-CPU.
    let cases = [
        (PauseLoop::Yield, Yields::None, true, known, R(Resume::CannotYield)),
        (DirectedYield, Yields::Plain, true, known, Y(Yield::NotDirected)),
        (DirectedYield, Yields::Plain, true, None, Y(Yield::NotDirected)),
        (DirectedYield, Yields::None, true, None, R(Resume::CannotYield)),
        (DirectedYield, Yields::Directed, false, known, Y(Yield::Unknown)),
        (DirectedYield, Yields::Directed, false, None, Y(Yield::Unknown)),
        (DirectedYield, Yields::None, false, known, R(Resume::Unknown)),
        (ParkOnHolder, Yields::None, true, known, P(Sleep::OnHolder)),
        (ParkOnHolder, Yields::Plain, false, known, Y(Yield::Unknown)),
        (ParkOnHolder, Yields::None, false, known, R(Resume::Unknown)),
        (ParkOnPrevious, Yields::Directed, false, known, Y(Yield::Unknown)),
        (ParkOnPrevious, Yields::None, false, None, R(Resume::CannotYield)),
    ];
    for (n, (policy, yields, exact, wait, decision)) in cases.into_iter().enumerate() {
        let run_states = if exact { RunStates::Exact } else { RunStates::ParkedOnly };
        let machine = Machine { yields, ..Machine::blind(Config { run_states, ..config(policy) }, 4) };
        if exact {
            (1..4).for_each(|id| machine.off_cpu(id));
        }
        assert_eq!(machine.decide(0, wait), decision, "case {n}: {policy:?}, {yields:?}");
    }
}

#[test]
fn row_33_a_scheduler_that_only_answers_questions_gets_yields_but_no_parking() {
    // The engine would not hear of the holder's return.
    for (policy, decision) in [(PauseLoop::DirectedYield, B(Boost::Holder)), (PauseLoop::ParkOnHolder, Y(Yield::Unknown))] {
        let mut machine = Machine::blind(Config { run_states: RunStates::ParkedOnly, ..config(policy) }, 4);
        machine.yields = Yields::Directed;
        machine.placements[1] = Placement::Preempted;
        assert_eq!(machine.decide(0, waits_for(9, Some(2), Some(1))), decision);
        assert_eq!(machine.asleep(), []);
    }
}

#[test]
fn the_nearest_waiter_ahead_is_found_through_the_records_and_no_further_than_allowed() {
    let mut machine_config = config(PauseLoop::DirectedYield);
    for (look_ahead, decision) in [(2, R(Resume::HolderRunning)), (3, B(Boost::Predecessor))] {
        machine_config.policy.look_ahead = look_ahead;
        let machine = Machine::new(machine_config, 6);
        // 0 behind 1 behind 2 behind 3; 5 holds.
        for (id, previous) in [(1, 2), (2, 3), (3, 5)] {
            machine.rig.publish(id, 0, waits_for(9 - id as u32, Some(previous), Some(5)));
        }
        machine.off_cpu(3);
        machine.off_cpu(4);
        assert_eq!(machine.decide(0, waits_for(9, Some(1), Some(5))), decision, "{look_ahead}");
        // A record that does not agree ends the walk.
        machine.rig.publish(1, 0, waits_for(7, Some(2), Some(5)));
        assert_eq!(machine.decide(0, waits_for(9, Some(1), Some(5))), R(Resume::HolderRunning));
    }
    // Kicked, and not yet on a CPU: it waits for one.
    let machine = Machine::new(config(PauseLoop::DirectedYield), 4);
    machine.rig.sleep(1, behind(1, 8, 3), Some(3));
    assert_eq!(machine.decide(0, waits_for(9, Some(1), None)), Y(Yield::Asleep), "asleep");
    machine.rig.kick(3, 1);
    assert_eq!(machine.decide(0, waits_for(9, Some(1), None)), B(Boost::Predecessor));
}

#[test]
fn row_22_directed_yields_in_turn_leave_nobody_out() {
    for pivot in [Pivot::Own, Pivot::LastBoosted] {
        let mut config = config(PauseLoop::DirectedYield);
        config.policy.pivot = pivot;
        let machine = Machine::new(config, 8);
        [1, 4, 6].into_iter().for_each(|id| machine.off_cpu(id));
        let mut turns = vec![];
        for _ in 0..8 {
            let Verdict::YieldTo(target, Boost::RoundRobin) = machine.spin(2) else { panic!() };
            turns.push(target.index());
        }
        turns.sort_unstable();
        turns.dedup();
        assert_eq!(turns, [1, 4, 6], "{pivot:?}");
    }
}

#[test]
fn one_directed_yield_in_a_period_and_plain_ones_in_between() {
    let mut config = config(PauseLoop::DirectedYield);
    config.policy.directed_period_ns = 100;
    let machine = Machine::new(config, 4);
    machine.off_cpu(1);
    let wait = waits_for(9, None, Some(1));
    for (now, decision) in
        [(1_000, B(Boost::Holder)), (1_050, Y(Yield::Throttled)), (1_099, Y(Yield::Throttled)), (1_100, B(Boost::Holder))]
    {
        machine.rig.now.store(now, SeqCst);
        assert_eq!(machine.decide(0, wait), decision, "at {now}");
    }
    assert_eq!(machine.decide(2, wait), B(Boost::Holder), "another vCPU has its own period");
}

#[test]
fn a_directed_yield_is_for_the_first_in_line_and_not_for_who_has_handed_the_lock_on() {
    let machine = Machine::new(config(PauseLoop::DirectedYield), 5);
    // In line: 4, 3, 2, 0. All but 0 are off-CPU.
    (1..5).for_each(|id| machine.off_cpu(id));
    for (id, ticket, previous) in [(4, 6, None), (3, 7, Some(4)), (2, 8, Some(3)), (0, 9, Some(2))] {
        machine.rig.publish(id, 0, waits_for(ticket, previous, Some(1)));
    }
    assert_eq!(machine.spin(0), Verdict::YieldTo(vcpu(1), Boost::Holder));
    // It held the lock, and waits for it again: the lock stands still until the first in line runs.
    machine.rig.publish(1, 0, waits_for(10, Some(0), Some(1)));
    assert_eq!(machine.spin(0), Verdict::YieldTo(vcpu(4), Boost::Predecessor));
    machine.on_cpu(4);
    assert_eq!(machine.spin(0), Verdict::YieldTo(vcpu(3), Boost::Predecessor));
    // Of another lock it may still be the holder.
    machine.rig.publish(1, 0, Some(Wait { lock: waits(2, 1).lock, ..waits_for(1, None, None).unwrap() }));
    assert_eq!(machine.spin(0), Verdict::YieldTo(vcpu(1), Boost::Holder));
}

#[test]
fn row_23_nobody_is_bothered_when_nobody_wants_the_cpu() {
    use PauseLoop::{DirectedYield, ParkOnHolder, ParkOnPrevious};
    let wait = waits_for(9, Some(2), Some(1));
    // Policy, others on the spinner's run queue, on the holder's, published, decision. vCPU 1 is off-CPU.
    let cases = [
        (PauseLoop::Yield, Some(0), None, wait, R(Resume::Undercommit)),
        (PauseLoop::Yield, Some(1), None, wait, Y(Yield::Policy)),
        (PauseLoop::Yield, None, None, wait, Y(Yield::Policy)),
        (ParkOnHolder, Some(0), Some(0), wait, R(Resume::Undercommit)),
        // The holder stands in another CPU's queue: with the spinner asleep, it can have this CPU.
        (ParkOnHolder, Some(0), Some(1), wait, P(Sleep::OnHolder)),
        (ParkOnHolder, Some(0), None, wait, P(Sleep::OnHolder)),
        (ParkOnPrevious, Some(0), Some(1), wait, R(Resume::Undercommit)),
        (DirectedYield, Some(0), Some(0), wait, R(Resume::HolderRunning)),
        (DirectedYield, Some(0), Some(1), wait, B(Boost::Holder)),
        (DirectedYield, Some(1), Some(0), wait, R(Resume::HolderRunning)),
        (DirectedYield, Some(0), Some(1), None, R(Resume::Undercommit)),
        (DirectedYield, Some(1), Some(1), None, B(Boost::RoundRobin)),
        (DirectedYield, Some(1), Some(0), None, R(Resume::NoCandidate)),
    ];
    for (n, (policy, own, holders, wait, decision)) in cases.into_iter().enumerate() {
        let mut machine = Machine::new(config(policy), 4);
        (machine.backlogs[0], machine.backlogs[1]) = (own, holders);
        machine.off_cpu(1);
        assert_eq!(machine.decide(0, wait), decision, "case {n}: {policy:?}");
    }
    // Switched off, it is not asked.
    let mut config = config(PauseLoop::Yield);
    config.policy.undercommit = None;
    let mut machine = Machine::new(config, 2);
    machine.backlogs[0] = Some(0);
    assert_eq!(machine.decide(0, None), Y(Yield::Policy));
}

#[test]
fn row_23_row_28_the_guest_is_told_of_undercommit_and_sleepers_are_woken() {
    let mut config = config(PauseLoop::Yield);
    config.policy.undercommit = Some(Undercommit { tell: true, calm: 3, quiet_ns: 100 });
    let mut machine = Machine::new(config, 3);
    let flags = |machine: &Machine| HostFlags::from_bits(machine.rig.ram.word(header::FLAGS).load(SeqCst));
    machine.backlogs = vec![Some(0); 3];
    machine.rig.now.store(1_000, SeqCst);
    machine.rig.sleep(2, behind(1, 1, 1), Some(1));
    for _ in 0..2 {
        machine.decide(0, None);
        assert_eq!(flags(&machine), HostFlags::default());
    }
    assert_eq!(machine.rig.woken(), []);
    machine.decide(1, None);
    assert_eq!(flags(&machine), HostFlags::DEDICATED);
    assert_eq!(machine.rig.woken(), [2], "it slept under the old settings");
    machine.backlogs[1] = Some(2);
    machine.decide(1, None);
    assert_eq!(flags(&machine), HostFlags::default(), "at the first sign");
    assert_eq!(machine.rig.engine.statistics().mode_switches, 2);

    // It survives a new registration, and what the VMM set stays.
    machine.rig.engine.set_flags(HostFlags::OFF, &machine);
    assert_eq!(flags(&machine), HostFlags::OFF);
    assert_eq!(machine.rig.call(0, Doorbell::Unregister), Status::Ok);
    machine.rig.ram.word(header::FLAGS).store(77, SeqCst);
    machine.rig.engine.set_flags(HostFlags::OFF.union(HostFlags::DEDICATED), &machine);
    assert_eq!(machine.rig.ram.word(header::FLAGS).load(SeqCst), 77, "no region, no write");
    assert_eq!(machine.rig.register(), Status::Ok);
    assert_eq!(flags(&machine), HostFlags::OFF.union(HostFlags::DEDICATED));
}

#[test]
fn row_28_a_guest_that_registers_is_not_promised_what_a_policy_saw_a_moment_ago() {
    let mut config = config(PauseLoop::Yield);
    config.policy.undercommit = Some(Undercommit { tell: true, calm: 1, quiet_ns: 100 });
    let mut machine = Machine::new(config, 2);
    let flags = |machine: &Machine| HostFlags::from_bits(machine.rig.ram.word(header::FLAGS).load(SeqCst));
    machine.backlogs = vec![Some(0); 2];
    machine.rig.now.store(1_000, SeqCst);
    machine.decide(0, None);
    assert_eq!(flags(&machine), HostFlags::DEDICATED);
    assert_eq!(machine.rig.call(0, Doorbell::Unregister), Status::Ok);
    assert_eq!(machine.rig.register(), Status::Ok);
    assert_eq!(flags(&machine), HostFlags::default(), "or it would never halt again");
    machine.decide(0, None);
    assert_eq!(flags(&machine), HostFlags::DEDICATED, "told anew");
}

#[test]
fn the_window_grows_for_nothing_shrinks_for_overcommit_and_outlives_scheduling() {
    let mut config = config(PauseLoop::DirectedYield);
    config.policy.window = Some(Window { floor: 100, ceiling: 1_000, start: 200, grow: 2, shrink: 4, actuator: Actuator::Ticks });
    let machine = Machine::new(config, 4);
    let window = |machine: &Machine| {
        let published = machine.rig.ram.word(RECORD_STRIDE + record::SPIN_BUDGET).load(SeqCst);
        assert_eq!(machine.rig.engine.window(vcpu(0)), Some(Setting::Ticks(published)), "the guest's budget is the same");
        published
    };
    assert_eq!(window(&machine), 200);
    let wait = waits_for(9, Some(2), Some(1));
    for expected in [400, 800, 1_000, 1_000] {
        assert_eq!(machine.decide(0, wait), R(Resume::HolderRunning));
        assert_eq!(window(&machine), expected);
    }
    for _ in 0..20 {
        machine.off_cpu(0);
        machine.on_cpu(0);
    }
    assert_eq!(window(&machine), 1_000, "no storm of exits at the start of each time slice");
    machine.off_cpu(1);
    for expected in [250, 100, 100] {
        assert_eq!(machine.decide(0, wait), B(Boost::Holder));
        assert_eq!(window(&machine), expected);
    }
    // Somebody wants the CPU: no time to spin, though the holder runs.
    machine.on_cpu(1);
    machine.decide(0, wait);
    let machine = Machine { backlogs: vec![Some(3); 4], ..machine };
    machine.decide(0, wait);
    assert_eq!(window(&machine), 100);
    assert_eq!(machine.rig.engine.window(vcpu(1)), Some(Setting::Ticks(200)), "each vCPU has its own");

    config.policy.window =
        config.policy.window.map(|window| Window { actuator: Actuator::Exponent { offset: 6, highest: 3 }, ..window });
    let machine = Machine::new(config, 4);
    let exponents = [1, 2, 3, 3].map(|_| {
        let before = machine.rig.engine.window(vcpu(0));
        machine.decide(0, wait);
        before
    });
    assert_eq!(exponents, [1, 2, 3, 3].map(|exponent| Some(Setting::Exponent(exponent))));
    assert_eq!(Machine::new(self::config(PauseLoop::Yield), 1).rig.engine.window(vcpu(0)), None);
}

#[test]
fn row_20_row_27_each_guest_word_is_read_once_and_none_outside_the_region() {
    for policy in [PauseLoop::DirectedYield, PauseLoop::ParkOnHolder, PauseLoop::ParkOnPrevious] {
        let machine = Machine::new(config(policy), 8);
        for id in 1..6 {
            machine.rig.publish(id, 3, waits_for(20 - id as u32, Some(id + 1), Some(7)));
        }
        machine.rig.publish(0, 0, waits_for(20, Some(1), Some(7)));
        machine.rig.ram.forget_accesses();
        let _: Verdict = machine.spin(0);
        let loads = machine.rig.ram.loads();
        // The id of a slot that is read once more is compared, not used.
        let ids = |offset: usize| offset % RECORD_STRIDE < record::KICK_WORD && offset.is_multiple_of(16);
        assert!(loads.iter().all(|(&offset, &n)| n == 1 || n == 2 && ids(offset)), "{policy:?}: {loads:?}");
        assert!(loads.values().sum::<u32>() <= 6 + 12 * config(policy).policy.look_ahead);
    }
    // Without a region nothing is read at all.
    let rig = Rig::bare(config(PauseLoop::ParkOnHolder), 2);
    assert_eq!(rig.engine.pause_loop(vcpu(0), 0, &rig.waker()), Verdict::Resume(Resume::CannotYield));
    assert_eq!(rig.ram.loads().len(), 0);
}
