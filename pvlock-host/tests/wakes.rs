//! What ends a park, once, and what does not.
#![cfg(not(pvlock_loom))]

mod common;
use common::*;
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::offset::record;
use pvlock_host::protocol::{RECORD_STRIDE, VcpuId, WAIT_SLOTS, Wait};
use pvlock_host::{Config, Park, Queue, Resume, RunStates, Unpark, Verdict};
use std::sync::atomic::Ordering::SeqCst;

const LATCHED: Verdict = Verdict::Resume(Resume::Latched);
const NOT_PARKING: Verdict = Verdict::Resume(Resume::NotParking);

/// Something that happens, and its name.
type Case = (&'static str, fn(&Rig));
/// Something that wakes somebody through the waker.
type Event = fn(&Rig, &dyn Fn(VcpuId));

fn parks(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Park(_))
}

#[test]
fn row_08_row_28_an_interrupt_ends_a_halt_with_interrupts_on_and_no_other() {
    let rig = Rig::new(Config::default(), 2);
    let interrupt = || rig.engine.interrupt(vcpu(0), &rig.waker());
    assert!(parks(rig.halt(0, 1, true)));
    interrupt();
    interrupt();
    assert_eq!(rig.woken(), [0], "once");
    rig.unparked(0, Unpark::Woken);
    assert!(parks(rig.halt(0, 1, true)), "it was consumed");
    rig.kick(1, 0);
    rig.unparked(0, Unpark::Woken);
    assert_eq!(rig.woken(), [0]);

    assert!(parks(rig.halt(0, 1, false)));
    interrupt();
    assert_eq!(rig.woken(), [], "interrupts are off");
    rig.kick(1, 0);
    assert_eq!(rig.woken(), [0], "a kick still ends it");
    rig.unparked(0, Unpark::Woken);
    assert_eq!(rig.halt(0, 1, true), Verdict::Resume(Resume::Interrupt), "the interrupt has waited for one that takes it");
    assert!(parks(rig.halt(0, 1, true)));
    let counts = rig.engine.vcpu_statistics(vcpu(0));
    assert_eq!((counts.interrupted, counts.kicked, counts.spurious, counts.forced), (1, 2, 0, 0));
}

#[test]
fn row_28_each_change_of_mode_wakes_everybody() {
    let changes: [Case; 5] = [
        ("pause", |rig| rig.engine.pause(&rig.waker())),
        ("shut_down", |rig| rig.engine.shut_down(&rig.waker())),
        ("unregister", |rig| assert_eq!(rig.call(3, Doorbell::Unregister), Status::Ok)),
        ("reset_vm", |rig| rig.engine.reset_vm(&rig.waker())),
        ("offline", |rig| (0..3).for_each(|id| assert_eq!(rig.call(3, Doorbell::Offline(vcpu(id))), Status::Ok))),
    ];
    for (name, change) in changes {
        let rig = Rig::new(Config::default(), 4);
        rig.sleep(0, behind(1, 3, 1), Some(1));
        rig.sleep(1, behind(1, 2, 3), Some(3));
        assert!(parks(rig.halt(2, 3, true)));
        change(&rig);
        let mut woken = rig.woken();
        woken.sort_unstable();
        assert_eq!(woken, [0, 1, 2], "{name}: each once, interrupts on or off");
        assert_eq!(parks(rig.halt(3, 0, true)), name == "offline", "{name}: it is still online");
        for id in 0..3 {
            rig.unparked(id, Unpark::Woken);
            assert_eq!(rig.halt(id, 0, true), NOT_PARKING, "{name}");
        }
        assert_eq!(rig.queues().concat(), [], "{name}");
        assert_eq!(rig.engine.statistics().woken, 3, "{name}");
        rig.engine.resume();
        assert_eq!(parks(rig.halt(0, 0, true)), name == "pause", "{name}");
    }
}

#[test]
fn row_16_any_pending_reason_ends_a_park() {
    let reasons: [Case; 5] = [
        ("kick", |rig| rig.kick(1, 0)),
        ("interrupt", |rig| rig.engine.interrupt(vcpu(0), &rig.waker())),
        ("offline", |rig| assert_eq!(rig.call(1, Doorbell::Offline(vcpu(0))), Status::Ok)),
        ("online", |rig| assert_eq!(rig.call(1, Doorbell::Online(vcpu(0))), Status::Ok)),
        ("pause", |rig| rig.engine.pause(&rig.waker())),
    ];
    for (first, one) in reasons {
        for (second, other) in reasons {
            let rig = Rig::new(Config::default(), 2);
            assert!(parks(rig.halt(0, 0, true)));
            one(&rig);
            assert_eq!(rig.woken(), [0], "{first}");
            other(&rig);
            // A new life forgets the latch that had ended the park, so it may wake again; it must not fall asleep.
            assert!(rig.woken().len() <= 1, "{first}, {second}");
            assert!(rig.engine.dump(0).all(|sleeper| sleeper.woken), "{first}, {second}: it stays awake");
            rig.unparked(0, Unpark::Woken);
            let counts = rig.engine.statistics();
            assert_eq!((counts.spurious, counts.forced), (0, 0), "{first}, {second}");
        }
    }
}

#[test]
fn row_18_a_latch_ends_exactly_one_halt_of_its_slot() {
    let rig = Rig::new(Config::default(), 2);
    // Before the halt: each slot has its own latch, and many kicks are one.
    rig.kick(1, 0);
    rig.kick(1, 0);
    for level in 0..WAIT_SLOTS {
        assert_eq!(rig.halt(0, level, false), LATCHED);
    }
    for level in 0..WAIT_SLOTS {
        assert!(parks(rig.halt(0, level, false)), "slot {level}");
        assert_eq!(rig.halt(0, level, false), NOT_PARKING, "parked already");
        rig.kick(1, 0);
        assert_eq!(rig.woken(), [0]);
        rig.kick(1, 0);
        assert_eq!(rig.woken(), [], "woken once");
        rig.unparked(0, Unpark::Woken);
        for other in (0..WAIT_SLOTS).filter(|&other| other != level) {
            assert_eq!(rig.halt(0, other, false), LATCHED, "the kick was for all slots");
        }
        assert!(parks(rig.halt(0, level, false)), "and is used up");
        // Woken by something else and kicked before it runs: that was the same return.
        rig.engine.pause(&rig.waker());
        rig.kick(1, 0);
        rig.unparked(0, Unpark::Woken);
        rig.engine.resume();
        assert_eq!(rig.woken(), [0]);
        assert!(parks(rig.halt(0, level, false)), "no latch stays behind");
        rig.engine.reset(vcpu(0), &rig.waker());
        rig.unparked(0, Unpark::Woken);
        assert_eq!(rig.woken(), [0]);
        assert_eq!(rig.call(0, Doorbell::Online(vcpu(0))), Status::Ok);
    }
}

#[test]
fn row_25_a_forced_wake_is_counted_once_and_only_if_nothing_else_ended_the_park() {
    let rig = Rig::new(Config { deadline_ns: 500, ..Config::default() }, 2);
    rig.now.store(1_000, SeqCst);
    let forced = || rig.engine.vcpu_statistics(vcpu(0)).forced;
    assert_eq!(rig.halt(0, 0, true), Verdict::Park(Park { until: 1_500, on: None }));
    rig.now.store(1_512, SeqCst);
    rig.unparked(0, Unpark::Deadline);
    assert_eq!(forced(), 1);
    let counts = rig.engine.vcpu_statistics(vcpu(0));
    assert_eq!((counts.parked_ns, counts.sleeps[9], counts.sleeps.iter().sum::<u64>()), (512, 1, 1));
    let late: [fn(&Rig); 3] =
        [|rig| rig.kick(1, 0), |rig| rig.engine.interrupt(vcpu(0), &rig.waker()), |rig| rig.engine.pause(&rig.waker())];
    for end in late {
        assert!(parks(rig.halt(0, 0, true)));
        end(&rig);
        rig.unparked(0, Unpark::Deadline);
        assert_eq!(forced(), 1, "the deadline came first, but the wake was there");
        rig.engine.resume();
    }
    for how in [Unpark::Woken, Unpark::Signal] {
        assert!(parks(rig.halt(0, 0, true)));
        rig.unparked(0, how);
    }
    assert_eq!((forced(), rig.engine.statistics().spurious), (1, 2));
    rig.now.store(u64::MAX - 1, SeqCst);
    assert_eq!(rig.halt(0, 0, true), Verdict::Park(Park { until: u64::MAX, on: None }), "no overflow");
    rig.now.store(0, SeqCst);
    rig.unparked(0, Unpark::Deadline);
    assert_eq!(rig.engine.dump(0).count(), 0);
}

#[test]
fn row_20_each_guest_word_is_read_once_per_event() {
    let rig = Rig::bare(Config { run_states: RunStates::Exact, wake_ahead: 1, ..Config::default() }, 2);
    let own = |offset| RECORD_STRIDE + offset;
    let reads_of = |event: &dyn Fn()| {
        rig.ram.forget_accesses();
        event();
        rig.ram.loads()
    };
    let reads = reads_of(&|| assert_eq!(rig.register(), Status::Ok));
    assert!(reads.values().all(|&n| n == 1), "{reads:?}");
    assert_eq!(rig.call(0, Doorbell::Online(vcpu(0))), Status::Ok);
    assert_eq!(rig.call(0, Doorbell::Online(vcpu(1))), Status::Ok);
    rig.publish(0, 2, Some(behind(7, 1, 1)));
    let mut reads = reads_of(&|| assert!(parks(rig.halt(0, 2, false))));
    // Once to read it, once to compare it.
    assert_eq!(reads.insert(own(record::slot_id(slot(2))), 1), Some(2));
    assert!(reads.contains_key(&own(record::slot_word(slot(2)))));
    assert!(reads.values().all(|&n| n == 1), "{reads:?}");
    assert!(reads.len() <= 3, "{reads:?}");
    let events: [&dyn Fn(); 3] = [&|| rig.kick(1, 0), &|| rig.unparked(0, Unpark::Woken), &|| rig.engine.scheduled_out(vcpu(1))];
    for event in events {
        let reads = reads_of(event);
        assert!(reads.values().all(|&n| n == 1) && reads.len() <= 1, "{reads:?}");
    }
    assert_eq!(reads_of(&|| assert_eq!(rig.call(0, Doorbell::Unregister), Status::Ok)).len(), 0);
}

#[test]
fn row_26_the_dump_says_of_each_sleeper_why_it_sleeps() {
    let rig = Rig::new(Config { queue: Queue::Previous, ..Config::default() }, 4);
    rig.now.store(5_000, SeqCst);
    rig.sleep(2, behind(0xabc, 42, 3), Some(3));
    rig.now.store(9_000, SeqCst);
    assert!(parks(rig.halt(0, 1, true)));
    rig.kick(3, 0);
    let sleepers: Vec<_> = rig.engine.dump(12_000).collect();
    assert_eq!(sleepers.len(), 2);
    let (woken, sleeper) = (sleepers[0], sleepers[1]);
    assert_eq!((sleeper.vcpu, sleeper.slot, sleeper.lock, sleeper.ticket), (vcpu(2), slot(0), 0xabc, 42));
    assert_eq!((sleeper.queue, sleeper.age_ns, sleeper.woken), (Some(vcpu(3)), 7_000, false));
    assert_eq!((woken.vcpu, woken.slot, woken.lock, woken.queue), (vcpu(0), slot(1), 0, None));
    assert_eq!((woken.age_ns, woken.woken), (3_000, true));
    let line = sleeper.to_string();
    for part in ["vCPU 2", "7 us", "slot 0", "0xabc", "ticket 42", "queue of vCPU 3", "needs a kick"] {
        assert!(line.contains(part), "{part:?} is missing in {line:?}");
    }
    assert!(woken.to_string().contains("on no queue; woken, has not run yet"));
}

#[test]
fn run_states_say_what_the_host_knows() {
    let rig = Rig::new(Config::default(), 1);
    assert_eq!(rig.run_state(0), 0, "unknown");
    assert!(parks(rig.halt(0, 0, true)));
    assert_eq!(rig.run_state(0) & 1, 1, "asleep");
    rig.unparked(0, Unpark::Woken);
    assert_eq!(rig.run_state(0), 0, "it may be preempted at any time");

    let rig = Rig::new(Config { run_states: RunStates::Exact, ..Config::default() }, 1);
    let mut last = rig.run_state(0);
    for _ in 0..10 {
        rig.engine.scheduled_in(vcpu(0), &rig.waker());
        let running = rig.run_state(0);
        rig.engine.scheduled_out(vcpu(0));
        let preempted = rig.run_state(0);
        assert!(running > last && preempted == running + 1 && running.is_multiple_of(2), "a counter");
        last = preempted;
    }
}

#[test]
fn a_waker_may_enter_the_engine() {
    within_hang_timeout("a waker that enters the engine", || {
        let events: [Event; 6] = [
            |rig, waker| rig.engine.pause(&waker),
            |rig, waker| rig.engine.interrupt(vcpu(0), &waker),
            |rig, waker| rig.engine.reset(vcpu(0), &waker),
            |rig, waker| rig.engine.reset_vm(&waker),
            |rig, waker| rig.engine.scheduled_in(vcpu(1), &waker),
            |rig, waker| {
                let _: Verdict = rig.engine.doorbell(vcpu(1), Doorbell::Kick(vcpu(0)).encode(), 0, &waker);
            },
        ];
        for queue in [Queue::Holder, Queue::Previous] {
            for event in events {
                let rig = Rig::new(Config { queue, wake_ahead: 1, ..Config::default() }, 3);
                rig.publish(0, 0, Some(Wait { holder: Some(vcpu(1)), ..behind(1, 1, 1) }));
                assert!(parks(rig.halt(0, 0, true)));
                event(&rig, &|woken| {
                    assert_eq!(woken, vcpu(0));
                    rig.engine.check_queues().unwrap();
                    rig.kick(2, 0);
                    rig.engine.reset_vm(&rig.waker());
                    assert_eq!(rig.register(), Status::Ok);
                });
                assert!(rig.engine.dump(0).all(|sleeper| sleeper.woken));
            }
        }
    });
}
