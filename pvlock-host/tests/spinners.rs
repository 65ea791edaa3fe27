//! Sleepers whom nobody will kick, and sleepers over a limit: what ends their sleep, and what it may not lead to.
#![cfg(not(pvlock_loom))]

mod common;
use common::machine::*;
use common::*;
use pvlock_host::Decision::{Park as P, Resume as R, Yield as Y};
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::{HostFlags, VcpuId, Wait};
use pvlock_host::{
    Config, Decision, Limits, Park, PauseLoop, Queue, Rate, Resume, Scheduler, Sleep, SleepKind, Unpark, Verdict, Waker, Yield,
};
use std::cell::Cell;
use std::sync::atomic::Ordering::SeqCst;

#[test]
fn the_end_of_the_owners_absence_wakes_every_spinner_in_order_and_halted_ones_as_configured() {
    for (wake_ahead, halted) in [(0, vec![]), (1, vec![4]), (9, vec![4, 3])] {
        let machine = Machine::new(Config { wake_ahead, queue: Queue::Holder, ..config(PauseLoop::ParkOnHolder) }, 6);
        machine.off_cpu(5);
        // Tickets 3, 1, 2 spin; 6 and 4 have halted.
        for (id, ticket) in [(0, 3), (1, 1), (2, 2)] {
            assert_eq!(machine.decide(id, waits_for(ticket, None, Some(5))), P(Sleep::OnHolder));
            assert_eq!(machine.rig.run_state(id) & 1, 1, "it is off-CPU itself now");
        }
        machine.rig.sleep(3, held_by(1, 6, 5), Some(5));
        machine.rig.sleep(4, held_by(1, 4, 5), Some(5));
        assert_eq!(machine.rig.queues()[5], [4, 3, 1, 2, 0]);
        machine.on_cpu(5);
        assert_eq!(machine.rig.woken(), [vec![1, 2, 0], halted].concat(), "wake-ahead {wake_ahead}");
        assert_eq!(machine.rig.engine.statistics().drained, 3);
        for id in 0..3 {
            machine.rig.unparked(id, Unpark::Woken);
            assert_eq!(machine.decide(id, waits_for(3, None, Some(5))), R(Resume::HolderRunning));
        }
    }
}

#[test]
fn whatever_ends_the_owners_absence_leaves_no_spinner_behind() {
    type End = (&'static str, fn(&Machine));
    let ends: [End; 8] = [
        ("scheduled in", |machine| machine.on_cpu(1)),
        ("reset", |machine| machine.rig.engine.reset(vcpu(1), machine)),
        ("offline", |machine| assert_eq!(machine.rig.call(3, Doorbell::Offline(vcpu(1))), Status::Ok)),
        ("online again", |machine| assert_eq!(machine.rig.call(3, Doorbell::Online(vcpu(1))), Status::Ok)),
        ("unregister", |machine| assert_eq!(machine.rig.call(3, Doorbell::Unregister), Status::Ok)),
        ("VM reset", |machine| machine.rig.engine.reset_vm(machine)),
        ("pause", |machine| machine.rig.engine.pause(machine)),
        ("shut down", |machine| machine.rig.engine.shut_down(machine)),
    ];
    for (name, end) in ends {
        let machine = Machine::new(config(PauseLoop::ParkOnHolder), 4);
        machine.off_cpu(1);
        assert_eq!(machine.decide(0, waits_for(1, None, Some(1))), P(Sleep::OnHolder));
        assert_eq!(machine.decide(2, waits_for(2, None, Some(1))), P(Sleep::OnHolder));
        assert_eq!(machine.asleep().len(), 2);
        end(&machine);
        let mut woken = machine.rig.woken();
        woken.sort_unstable();
        assert_eq!((woken, machine.asleep()), (vec![0, 2], vec![]), "{name}");
        for id in [0, 2] {
            machine.rig.unparked(id, Unpark::Woken);
        }
        assert_eq!(machine.rig.queues().concat(), [], "{name}");
        let counts = machine.rig.engine.statistics();
        assert_eq!((counts.woken, counts.spurious, counts.forced), (2, 0, 0), "{name}");
    }
}

/// A vCPU that, once it is woken, is back in the engine before who woke it goes on: it waits again and is parked again.
struct BackAtOnce<'a> {
    machine: &'a Machine,
    id: usize,
    wait: Option<Wait>,
    back: Cell<bool>,
}

impl Waker for BackAtOnce<'_> {
    fn wake(&self, woken: VcpuId) {
        self.machine.wake(woken);
        if woken == vcpu(self.id) && !self.back.replace(true) {
            let machine = self.machine;
            machine.rig.unparked(self.id, Unpark::Woken);
            // Only a reset has made a difference.
            assert_eq!(machine.rig.call(self.id, Doorbell::Online(vcpu(self.id))), Status::Ok);
            assert!(matches!(machine.decide(self.id, self.wait), P(_)));
        }
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self.machine
    }
}

/// Found by a soak, as sleeps that lasted until their deadline: who had slept again was taken off its queue to break a circle.
#[test]
fn row_14_the_new_holder_is_parked_again_before_the_queue_is_its_own() {
    for polled in [false, true] {
        let config = Config { queue: Queue::Holder, ..config(PauseLoop::ParkOnPrevious) };
        let machine = Machine::new(config, 3);
        machine.rig.sleep(1, held_by(1, 1, 0), Some(0));
        machine.rig.sleep(2, held_by(1, 2, 0), Some(0));
        let waker = BackAtOnce { machine: &machine, id: 1, wait: waits_for(3, Some(2), Some(1)), back: Cell::new(false) };
        if polled {
            machine.rig.engine.kicked(vcpu(1), &waker);
        } else {
            assert_eq!(machine.rig.engine.kick(vcpu(0), vcpu(1), &waker), Verdict::Resume(Resume::Done));
        }
        assert_eq!(machine.asleep(), [(2, SleepKind::Halted, Some(1))], "nothing else would wake 1");
        assert_eq!(machine.rig.woken(), [1, 1]);
    }
}

#[test]
fn row_06_a_vcpu_that_is_parked_again_while_it_is_reset_or_comes_online_stays_on_its_queue() {
    for doorbell in [Some(Doorbell::Online(vcpu(0))), Some(Doorbell::Offline(vcpu(0))), None] {
        let machine = Machine::new(config(PauseLoop::ParkOnHolder), 3);
        machine.off_cpu(1);
        let wait = waits_for(1, None, Some(1));
        assert_eq!(machine.decide(0, wait), P(Sleep::OnHolder));
        let waker = BackAtOnce { machine: &machine, id: 0, wait, back: Cell::new(false) };
        match doorbell {
            Some(doorbell) => {
                let verdict = machine.rig.engine.doorbell(vcpu(2), doorbell.encode(), 0, &waker);
                assert_eq!(verdict, Verdict::Resume(Resume::Done));
            }
            None => machine.rig.engine.reset(vcpu(0), &waker),
        }
        machine.rig.woken();
        assert_eq!(machine.asleep(), [(0, SleepKind::Spun, Some(1))], "{doorbell:?}");
        machine.on_cpu(1);
        assert_eq!(machine.rig.woken(), [0], "{doorbell:?}");
    }
}

#[test]
fn row_16_row_18_kicks_and_interrupts_end_a_spinners_sleep_and_are_not_used_up() {
    let parked = || {
        let machine = Machine::new(config(PauseLoop::ParkOnHolder), 3);
        machine.off_cpu(1);
        assert_eq!(machine.decide(0, waits_for(1, None, Some(1))), P(Sleep::OnHolder));
        machine
    };
    let wait = waits_for(1, None, Some(1));
    let machine = parked();
    machine.rig.kick(2, 0);
    assert_eq!(machine.rig.woken(), [0]);
    machine.rig.unparked(0, Unpark::Woken);
    assert_eq!(machine.decide(0, wait), R(Resume::Latched), "it looks first");
    assert_eq!(machine.decide(0, wait), R(Resume::Latched));
    assert_eq!(machine.rig.halt(0, 0, false), Verdict::Resume(Resume::Latched), "the kick was for a halt");
    assert_eq!(machine.decide(0, wait), P(Sleep::OnHolder));
    assert_eq!(machine.rig.engine.statistics().kicked, 1);

    let machine = parked();
    machine.rig.engine.interrupt(vcpu(0), &machine);
    assert_eq!(machine.rig.woken(), [0]);
    machine.rig.unparked(0, Unpark::Woken);
    assert_eq!(machine.rig.engine.statistics().interrupted, 1);
    assert_eq!(machine.decide(0, wait), P(Sleep::OnHolder), "it was in the guest since, which has taken it if it could");
    assert_eq!(machine.asleep().len(), 1, "nor does what is left of it for a halt end the sleep");
    machine.rig.engine.pause(&machine);
    machine.rig.unparked(0, Unpark::Woken);
    machine.rig.engine.resume();
    // An interrupt while it ran: one exit returns for it.
    machine.rig.engine.interrupt(vcpu(0), &machine);
    assert_eq!(machine.decide(0, wait), R(Resume::Interrupt));
    assert_eq!(machine.decide(0, wait), P(Sleep::OnHolder));
    machine.rig.engine.pause(&machine);
    machine.rig.unparked(0, Unpark::Woken);
    machine.rig.engine.resume();
    assert_eq!(machine.rig.halt(0, 0, true), Verdict::Resume(Resume::Interrupt), "a halt still sees it");
}

#[test]
fn row_14_nobody_is_parked_on_itself_or_in_a_circle() {
    /// Who has halted behind whom, all with the ticket before that of the next, and behind whom vCPU 0 spins.
    type Case = (&'static [(usize, usize)], usize, Decision);
    let cases: [Case; 5] = [
        (&[], 0, R(Resume::NoCandidate)),
        (&[(1, 0)], 1, R(Resume::Circle)),
        (&[(2, 0), (1, 2)], 1, R(Resume::Circle)),
        (&[(2, 3), (1, 2)], 1, P(Sleep::OnPrevious)),
        (&[(2, 3), (1, 2)], 3, R(Resume::PreviousRunning)),
    ];
    for (halted, on, decision) in cases {
        let machine = Machine::new(config(PauseLoop::ParkOnPrevious), 4);
        for (ticket, &(id, on)) in halted.iter().enumerate() {
            machine.rig.sleep(id, behind(1, ticket as u32, on), Some(on));
        }
        let wait = waits_for(halted.len() as u32, Some(on), None);
        assert_eq!(machine.decide(0, wait), decision, "{halted:?} {on}");
        assert_eq!(machine.asleep().len(), halted.len() + usize::from(decision == P(Sleep::OnPrevious)));
        assert_eq!(machine.rig.engine.statistics().cycles, u64::from(decision == R(Resume::Circle)));
    }
}

#[test]
fn a_stale_hint_does_not_park_anybody_on_who_may_wait_for_it() {
    // vCPU 1 sleeps or is away in some way; vCPU 0 spins with ticket 5 for lock 1, and its hint says vCPU 1.
    type Case = (&'static str, fn(&Machine), bool);
    let cases: [Case; 9] = [
        ("preempted", |machine| machine.off_cpu(1), true),
        ("halted right before", |machine| machine.rig.sleep(1, waits(1, 4), None), true),
        ("halted behind", |machine| machine.rig.sleep(1, waits(1, 6), None), false),
        ("halted further ahead: not the one before", |machine| machine.rig.sleep(1, waits(1, 3), None), false),
        ("halted for another lock, perhaps one that vCPU 0 holds", |machine| machine.rig.sleep(1, waits(2, 4), None), false),
        ("idle, perhaps until vCPU 0 sends an interrupt", |machine| machine.rig.engine.idle(vcpu(1)), false),
        (
            "halted right before once, and idle since",
            |machine| {
                machine.rig.sleep(1, waits(1, 4), None);
                machine.rig.kick(2, 1);
                machine.rig.unparked(1, Unpark::Woken);
                machine.rig.engine.idle(vcpu(1));
            },
            false,
        ),
        (
            "preempted once, and halted behind since",
            |machine| {
                machine.off_cpu(1);
                machine.on_cpu(1);
                machine.rig.sleep(1, waits(1, 6), None);
            },
            false,
        ),
        (
            "halted behind, and its CPU was taken away, as the scheduler says",
            |machine| {
                machine.rig.sleep(1, waits(1, 6), None);
                machine.off_cpu(1);
            },
            false,
        ),
    ];
    for policy in [PauseLoop::ParkOnHolder, PauseLoop::ParkOnPrevious] {
        for (name, away, parks) in cases {
            let machine = Machine::new(Config { queue: Queue::None, ..config(policy) }, 4);
            away(&machine);
            let park = P(if policy == PauseLoop::ParkOnHolder { Sleep::OnHolder } else { Sleep::OnPrevious });
            let decision = machine.decide(0, waits_for(5, Some(1), Some(1)));
            assert_eq!(decision, if parks { park } else { Y(Yield::Asleep) }, "{policy:?}: {name}");
        }
    }
}

/// A handler may hold what the lock's holder waits for, and spin without publishing it: in an NMI, as a newcomer, for an answer.
/// Then the wait that it has interrupted is no reason to sleep until somebody is served.
#[test]
fn who_may_be_in_an_interrupt_handler_is_not_parked_behind_a_sleeper() {
    type Interrupt = (&'static str, fn(&Machine));
    let wait = waits_for(5, Some(1), None);
    let interrupts: [Interrupt; 2] = [
        ("while it ran", |machine| {
            machine.rig.engine.interrupt(vcpu(0), machine);
            assert_eq!(machine.decide(0, waits_for(5, Some(1), None)), R(Resume::Interrupt));
        }),
        ("while it slept", |machine| {
            assert_eq!(machine.decide(0, waits_for(5, Some(1), None)), P(Sleep::OnPrevious));
            machine.rig.engine.interrupt(vcpu(0), machine);
            machine.rig.unparked(0, Unpark::Woken);
        }),
    ];
    for (name, interrupt) in interrupts {
        let machine = Machine::new(config(PauseLoop::ParkOnPrevious), 4);
        machine.rig.sleep(1, waits(1, 4), None);
        machine.rig.publish(0, 0, wait);
        interrupt(&machine);
        // vCPU 2 holds lock 1; lock 2 is the handler's.
        machine.rig.sleep(2, waits(2, 1), None);
        for _ in 0..3 {
            assert_eq!(machine.decide(0, wait), Y(Yield::Asleep), "{name}: all would sleep until a deadline");
        }
        // The handler waits for a lock that it publishes, and does not any more.
        machine.rig.publish(0, 1, Some(spinning(behind(3, 9, 3))));
        assert_eq!(machine.decide(0, wait), R(Resume::PreviousRunning), "{name}");
        machine.rig.publish(0, 1, None);
        assert_eq!(machine.decide(0, wait), Y(Yield::Asleep), "{name}");
        // It is over at the latest when the wait is.
        machine.rig.kick(2, 1);
        machine.rig.unparked(1, Unpark::Woken);
        machine.rig.sleep(1, waits(1, 6), None);
        assert_eq!(machine.decide(0, waits_for(7, Some(1), None)), P(Sleep::OnPrevious), "{name}");
    }
    // Who has lost its CPU gets it back, whatever the handler holds.
    let machine = Machine::new(config(PauseLoop::ParkOnPrevious), 2);
    machine.off_cpu(1);
    machine.rig.engine.interrupt(vcpu(0), &machine);
    assert_eq!(machine.decide(0, wait), R(Resume::Interrupt));
    assert_eq!(machine.decide(0, wait), P(Sleep::OnPrevious));
}

#[test]
fn row_10_a_chain_of_sleepers_grows_no_longer_than_allowed() {
    for chain in [1, 2, 5] {
        let mut config = config(PauseLoop::ParkOnPrevious);
        config.policy.chain = chain;
        let machine = Machine::new(config, 10);
        machine.off_cpu(0);
        let parked = (1..10)
            .take_while(|&id| {
                let decision = machine.decide(id, waits_for(id as u32, Some(id - 1), None));
                assert!(decision == P(Sleep::OnPrevious) || decision == Y(Yield::ChainTooLong), "{decision}");
                decision == P(Sleep::OnPrevious)
            })
            .count();
        assert_eq!(parked, chain as usize);
        // Nobody further back sleeps because somebody ahead does.
        for id in parked + 2..10 {
            assert_eq!(machine.decide(id, waits_for(id as u32, Some(id - 1), None)), R(Resume::PreviousRunning));
        }
    }
}

#[test]
fn row_25_a_spinners_sleep_has_a_deadline_that_is_counted() {
    let machine = Machine::new(Config { deadline_ns: 500, ..config(PauseLoop::ParkOnHolder) }, 2);
    machine.off_cpu(1);
    machine.rig.now.store(1_000, SeqCst);
    machine.rig.publish(0, 0, waits_for(1, None, Some(1)));
    assert_eq!(machine.spin(0), Verdict::Park(Park { until: 1_500, on: Some(vcpu(1)) }));
    machine.rig.unparked(0, Unpark::Deadline);
    assert_eq!(machine.rig.engine.statistics().forced, 1);
    assert_eq!(machine.rig.queues().concat(), []);
}

#[test]
fn row_26_the_dump_tells_the_kinds_of_sleep_apart() {
    let mut config = Config { queue: Queue::Holder, ..config(PauseLoop::ParkOnHolder) };
    config.policy.limits = Limits { kicks: Some(Rate { per_second: 1, burst: 1 }), ..Limits::default() };
    let machine = Machine::new(config, 4);
    machine.off_cpu(3);
    machine.decide(0, waits_for(7, None, Some(3)));
    machine.rig.sleep(1, held_by(1, 8, 3), Some(3));
    machine.rig.kick(2, 2);
    assert!(matches!(machine.rig.ring(2, Doorbell::Kick(vcpu(2)).encode()), Verdict::Park(_)));
    let kinds = [(0, SleepKind::Spun, Some(3)), (1, SleepKind::Halted, Some(3)), (2, SleepKind::Limited, None)];
    assert_eq!(machine.asleep(), kinds);
    let lines: Vec<String> = machine.rig.engine.dump(0).map(|sleeper| sleeper.to_string()).collect();
    for (line, part) in lines.iter().zip(["wakes when that vCPU runs", "needs a kick", "held back"]) {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn row_21_a_storm_is_carried_out_counted_and_held_back() {
    let rate = Some(Rate { per_second: 1_000, burst: 2 });
    let longest_ns = 3_000_000;
    let mut config = config(PauseLoop::Ignore);
    config.policy.limits = Limits { halts: rate, kicks: rate, pause_loops: rate, longest_ns };
    let words = [Doorbell::Kick(vcpu(1)), Doorbell::PauseLoop, Doorbell::Halt { slot: slot(0), interrupts: false }];
    for (n, word) in words.into_iter().enumerate() {
        let machine = Machine::new(config, 3);
        machine.rig.now.store(1_000, SeqCst);
        let ring = || {
            if n == 2 {
                // So that the halt returns at once.
                let _: Verdict = machine.rig.engine.kick(vcpu(1), vcpu(0), &|_| ());
            }
            machine.rig.ring(0, word.encode())
        };
        for _ in 0..2 {
            assert!(matches!(ring(), Verdict::Resume(_)), "{word:?}: within the burst");
        }
        let until = 1_000 + 1_000_000;
        assert_eq!(ring(), Verdict::Park(Park { until, on: None }), "{word:?}");
        let counts = machine.rig.engine.vcpu_statistics(vcpu(0));
        assert_eq!(counts.decided(P(Sleep::Limited)), 1);
        assert_eq!((counts.kicks_sent + counts.pause_loops + counts.halts) % 3, 0, "carried out all the same");
        // Neither kicks nor interrupts cut it short.
        let _: Verdict = machine.rig.engine.kick(vcpu(1), vcpu(0), &machine);
        machine.rig.engine.interrupt(vcpu(0), &machine);
        assert_eq!(machine.rig.woken(), []);
        machine.rig.now.store(until, SeqCst);
        machine.rig.unparked(0, Unpark::Deadline);
        let counts = machine.rig.engine.vcpu_statistics(vcpu(0));
        assert_eq!((counts.throttled, counts.forced, counts.spurious), (1, 0, 0), "{word:?}");
        machine.rig.now.store(100 * until, SeqCst);
        assert_eq!(machine.rig.halt(0, 1, true), Verdict::Resume(Resume::Latched), "nor do they get lost");

        // Pause, reset and the end of the VM do.
        let ends: [fn(&Machine); 3] = [
            |machine| machine.rig.engine.pause(machine),
            |machine| machine.rig.engine.reset(vcpu(0), machine),
            |machine| machine.rig.engine.shut_down(machine),
        ];
        for end in ends {
            let machine = Machine::new(config, 3);
            machine.rig.now.store(1_000, SeqCst);
            while !matches!(machine.rig.ring(0, Doorbell::Kick(vcpu(1)).encode()), Verdict::Park(_)) {}
            end(&machine);
            assert_eq!(machine.rig.woken(), [0]);
            machine.rig.unparked(0, Unpark::Woken);
        }
    }
}

#[test]
fn row_34_a_vcpu_that_is_held_back_or_parked_keeps_nobody_from_anything() {
    within_hang_timeout("row 34", || {
        let machine = Machine::new(config(PauseLoop::ParkOnHolder), 3);
        machine.off_cpu(1);
        assert_eq!(machine.decide(0, waits_for(1, None, Some(1))), P(Sleep::OnHolder));
        // Its thread sleeps now; everybody else's events go through.
        machine.rig.kick(2, 1);
        assert_eq!(machine.decide(2, waits_for(2, None, Some(1))), P(Sleep::OnHolder));
        machine.on_cpu(1);
        assert_eq!(machine.rig.woken(), [0, 2]);
    });
}

#[test]
fn row_34_a_halted_vcpu_keeps_nobody_from_anything() {
    within_hang_timeout("row 34, halted", || {
        let rig = Rig::new(Config { queue: Queue::Previous, ..Config::default() }, 3);
        rig.sleep(0, behind(1, 1, 1), Some(1));
        // Its thread sleeps now; everybody else's events go through, those about the sleeper as well.
        rig.sleep(2, behind(1, 2, 0), Some(0));
        rig.engine.interrupt(vcpu(0), &rig.waker());
        assert_eq!(rig.engine.dump(0).count(), 2);
        rig.engine.set_flags(HostFlags::OFF, &rig.waker());
        rig.kick(1, 0);
        rig.engine.reset(vcpu(0), &rig.waker());
        assert_eq!(rig.call(1, Doorbell::Unregister), Status::Ok);
        assert_eq!(rig.register(), Status::Ok);
        rig.engine.pause(&rig.waker());
        assert_eq!(rig.woken(), [0, 2], "once each");
        rig.unparked(0, Unpark::Woken);
        rig.unparked(2, Unpark::Woken);
    });
}

#[test]
fn row_35_a_pause_ends_every_sleep_and_allows_no_new_one() {
    const VCPUS: usize = 255;
    let machine = Machine::new(config(PauseLoop::ParkOnHolder), VCPUS);
    machine.off_cpu(0);
    for id in 1..VCPUS {
        assert_eq!(machine.decide(id, waits_for(id as u32, None, Some(0))), P(Sleep::OnHolder));
    }
    machine.rig.engine.pause(&machine);
    let mut woken = machine.rig.woken();
    woken.sort_unstable();
    assert_eq!(woken, (1..VCPUS).collect::<Vec<_>>());
    for id in 1..VCPUS {
        machine.rig.unparked(id, Unpark::Woken);
        assert_eq!(machine.decide(id, waits_for(id as u32, None, Some(0))), R(Resume::NotParking));
    }
    machine.rig.engine.resume();
    assert_eq!(machine.decide(1, waits_for(1, None, Some(0))), P(Sleep::OnHolder));
}
