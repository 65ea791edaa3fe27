//! REGISTER, UNREGISTER, ONLINE, OFFLINE, and doorbells that make no sense.
#![cfg(not(pvlock_loom))]

mod common;
use common::*;
use pvlock_host::hypercalls::{Doorbell, Status};
use pvlock_host::protocol::offset::{header, record};
use pvlock_host::protocol::{ABI_VERSION, MAGIC, MAX_VCPUS, PAGE_SIZE, RECORD_STRIDE};
use pvlock_host::{Config, ConfigError, Engine, EngineError, Queue, Resume, RunStates, Unpark, Verdict};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

#[test]
fn an_engine_that_could_hang_or_that_nobody_can_name_is_not_made() {
    let new = |config, vcpus| Engine::<_, parking_lot::RawMutex>::new(config, vcpus, Memory(Arc::new(Ram::new(1)))).err();
    let no_deadline = Config { deadline_ns: 0, ..Config::default() };
    assert_eq!(new(no_deadline, 1), Some(EngineError::Config(ConfigError::NoDeadline)));
    assert_eq!(new(Config::default(), 0), Some(EngineError::Config(ConfigError::Vcpus)));
    assert_eq!(new(Config::default(), MAX_VCPUS + 1), Some(EngineError::Config(ConfigError::Vcpus)));
    assert_eq!(new(Config::default(), MAX_VCPUS), None);
}

#[test]
fn each_fault_of_a_registration_has_its_status() {
    let rig = Rig::bare(Config::default(), 3);
    let page = RAM / PAGE_SIZE as u64;
    let mut refused = 0;
    let mut with = |offset: usize, value: u64, expected: Status| {
        let good = rig.ram.word(offset).swap(value, SeqCst);
        assert_eq!(rig.register(), expected, "{value:#x} at {offset}");
        assert_eq!(rig.ram.stores(), 0, "a region that is refused is not written to");
        rig.ram.word(offset).store(good, SeqCst);
        refused += 1;
    };
    with(header::MAGIC, MAGIC ^ 1, Status::BadMagic);
    with(header::VERSION, 3 << 32 | u64::from(ABI_VERSION + 1), Status::BadVersion);
    for vcpus in [0, 1, 2, MAX_VCPUS as u64 + 1] {
        with(header::VERSION, vcpus << 32 | u64::from(ABI_VERSION), Status::BadVcpus);
    }
    for stride in [0, 128, 257, 1 << 20] {
        with(header::STRIDE, stride, Status::BadStride);
    }
    // Right in itself, but more than there is RAM.
    with(header::VERSION, 16 << 32 | u64::from(ABI_VERSION), Status::OutOfRange);
    with(header::STRIDE, 4096, Status::OutOfRange);
    for low in [0, page - 1, page + 1, (1 << 28) - 1] {
        assert_eq!(rig.call(0, Doorbell::Register { low: low as u32 }), Status::OutOfRange);
        refused += 1;
    }
    assert_eq!(rig.call(0, Doorbell::Unregister), Status::NotRegistered);
    assert_eq!(rig.call(0, Doorbell::Online(vcpu(0))), Status::NotRegistered);
    assert_eq!(rig.register(), Status::Ok);
    assert_eq!(rig.register(), Status::AlreadyRegistered);
    assert_eq!(rig.call(1, Doorbell::Unregister), Status::Ok);
    assert_eq!(rig.call(1, Doorbell::Unregister), Status::NotRegistered);
    assert_eq!(rig.engine.statistics().refused, refused + 4);
}

#[test]
fn a_page_frame_number_comes_in_two_words_and_only_once() {
    let rig = Rig::bare(Config::default(), 1);
    let low = (RAM / PAGE_SIZE as u64) as u32;
    let high = |id, high| assert_eq!(rig.ring(id, Doorbell::RegisterHigh { high }.encode()), Verdict::Resume(Resume::Done));
    for bits in [1, (1 << 24) - 1] {
        high(0, bits);
        assert_eq!(rig.call(0, Doorbell::Register { low }), Status::OutOfRange, "the upper half counts");
        assert_eq!(rig.call(0, Doorbell::Register { low }), Status::Ok, "once");
        assert_eq!(rig.call(0, Doorbell::Unregister), Status::Ok);
        high(0, bits);
        high(0, 0);
        assert_eq!(rig.call(0, Doorbell::Register { low }), Status::Ok, "the last upper half counts, for one Register");
        assert_eq!(rig.call(0, Doorbell::Unregister), Status::Ok);
    }
    high(0, 1);
    rig.engine.reset(vcpu(0), &rig.waker());
    assert_eq!(rig.call(0, Doorbell::Register { low }), Status::Ok, "a reset forgets it");
}

#[test]
fn the_host_answers_in_the_header() {
    let config = Config { spin_budget: 7, tick_hz: 1_000, ..Config::default() };
    let rig = Rig::bare(config, 1);
    rig.ram.word(header::FEATURES).store(u64::MAX, SeqCst);
    assert_eq!(rig.register(), Status::Ok);
    let word = |offset| rig.ram.word(offset).load(SeqCst);
    assert_eq!(word(header::ACCEPTED), 3, "HALT, PAUSE_LOOP, and nothing this host does not know");
    assert_eq!((word(header::FLAGS), word(header::SPIN_BUDGET), word(header::TICK_HZ)), (0, 7, 1_000));
}

#[test]
fn nonsense_is_refused_and_counted() {
    let rig = Rig::new(Config::default(), 2);
    let known = |word| Doorbell::decode(word).is_some();
    let words = [0, 1, u32::MAX, 1 << 28 | 1 << 24, 3 << 28 | 1, 6 << 28 | 8, 8 << 28 | 1, 9 << 28, 4 << 28 | MAX_VCPUS as u32];
    for word in words {
        assert!(!known(word));
        assert_eq!(rig.ring(1, word), Verdict::Resume(Resume::Refused));
        assert_eq!(Status::decode(rig.engine.answer(vcpu(1))), Status::Unknown);
    }
    for target in [2, MAX_VCPUS - 1] {
        assert_eq!(rig.call(1, Doorbell::Online(vcpu(target))), Status::NoSuchVcpu);
        assert_eq!(rig.call(1, Doorbell::Offline(vcpu(target))), Status::NoSuchVcpu);
        assert_eq!(rig.ring(1, Doorbell::Kick(vcpu(target)).encode()), Verdict::Resume(Resume::Refused));
    }
    assert_eq!(rig.engine.vcpu_statistics(vcpu(1)).refused, words.len() as u64 + 6);
    assert_eq!(rig.ring(1, Doorbell::PauseLoop.encode()), Verdict::Resume(Resume::Ignored));
    assert_eq!(rig.engine.statistics().pause_loops, 1);
    assert_eq!(rig.ring(2, Doorbell::PauseLoop.encode()), Verdict::Resume(Resume::Refused), "an event of a vCPU that is not there");
    for id in [2, MAX_VCPUS - 1] {
        rig.engine.interrupt(vcpu(id), &rig.waker());
        rig.engine.reset(vcpu(id), &rig.waker());
        rig.unparked(id, Unpark::Woken);
        rig.engine.scheduled_in(vcpu(id), &rig.waker());
        rig.engine.scheduled_out(vcpu(id));
        assert_eq!(Status::decode(rig.engine.answer(vcpu(id))), Status::NoSuchVcpu);
    }
    assert_eq!(rig.woken(), []);
}

#[test]
fn row_05_an_offline_vcpu_never_parks_and_does_once_it_is_online() {
    let rig = Rig::bare(Config::default(), 2);
    let not_parking = Verdict::Resume(Resume::NotParking);
    assert_eq!(rig.halt(0, 0, true), not_parking, "nothing is registered");
    assert_eq!(rig.register(), Status::Ok);
    assert_eq!(rig.halt(0, 0, true), not_parking, "registered, but not online");
    rig.kick(1, 0);
    assert_eq!(rig.halt(0, 0, true), not_parking, "whatever is latched");
    for _ in 0..2 {
        assert_eq!(rig.call(1, Doorbell::Online(vcpu(0))), Status::Ok);
        rig.sleep(0, waits(1, 1), None);
        assert_eq!(rig.call(1, Doorbell::Offline(vcpu(0))), Status::Ok);
        assert_eq!(rig.woken(), [0]);
        rig.unparked(0, Unpark::Woken);
        assert_eq!(rig.halt(0, 0, true), not_parking);
    }
    assert_eq!(rig.engine.statistics().parks, 2);
}

#[test]
fn row_06_a_thousand_resets_and_registrations_leave_nothing_behind() {
    for queue in [Queue::Previous, Queue::Holder] {
        let rig = Rig::new(Config { queue, wake_ahead: 1, run_states: RunStates::Exact, ..Config::default() }, 3);
        let on =
            |lock, ticket, owner| if queue == Queue::Holder { held_by(lock, ticket, owner) } else { behind(lock, ticket, owner) };
        for round in 0..1000u32 {
            rig.sleep(0, on(1, round, 1), Some(1));
            rig.sleep(1, on(1, round, 2), Some(2));
            // Latches that nobody consumes.
            rig.kick(2, 2);
            rig.engine.interrupt(vcpu(2), &rig.waker());
            match round % 3 {
                // The middle of the chain goes: the one behind it wakes.
                0 => rig.engine.reset(vcpu(1), &rig.waker()),
                1 => assert_eq!(rig.call(2, Doorbell::Unregister), Status::Ok),
                _ => rig.engine.reset_vm(&rig.waker()),
            }
            let mut woken = rig.woken();
            woken.sort_unstable();
            assert_eq!(woken, [0, 1], "round {round}: each once");
            assert_eq!(rig.queues(), [[], [], []] as [[usize; 0]; 3], "round {round}: before they run, too");
            rig.unparked(0, Unpark::Woken);
            rig.unparked(1, Unpark::Woken);
            if round % 3 != 0 {
                assert_eq!(rig.register(), Status::Ok);
            }
            for id in 0..3 {
                assert_eq!(rig.call(0, Doorbell::Online(vcpu(id))), Status::Ok);
                assert_eq!(rig.run_state(id) & 1, 0, "round {round}: vCPU {id} runs, whatever an earlier life left in its record");
            }
            // No latch of an earlier life is left.
            for (level, interrupts) in [(0, true), (3, false)] {
                assert!(matches!(rig.halt(2, level, interrupts), Verdict::Park(_)), "round {round}");
                rig.kick(0, 2);
                assert_eq!(rig.woken(), [2]);
                rig.unparked(2, Unpark::Woken);
                rig.engine.reset(vcpu(2), &rig.waker());
                assert_eq!(rig.call(0, Doorbell::Online(vcpu(2))), Status::Ok);
            }
        }
        assert_eq!(rig.engine.statistics().forced, 0);
    }
}

#[test]
fn after_unregister_the_host_writes_nothing() {
    let rig = Rig::new(Config { wake_ahead: 1, run_states: RunStates::Exact, ..Config::default() }, 3);
    rig.sleep(0, behind(1, 2, 1), Some(1));
    let parked = RECORD_STRIDE + record::RUN_STATE;
    assert_eq!(rig.ram.word(parked).load(SeqCst) & 1, 1);
    assert_eq!(rig.call(1, Doorbell::Unregister), Status::Ok);
    rig.ram.forget_accesses();
    rig.unparked(0, Unpark::Woken);
    rig.engine.scheduled_out(vcpu(1));
    rig.engine.scheduled_in(vcpu(1), &rig.waker());
    rig.kick(1, 0);
    let _: Verdict = rig.halt(0, 0, true);
    assert_eq!(rig.call(0, Doorbell::Offline(vcpu(0))), Status::Ok);
    rig.engine.reset_vm(&rig.waker());
    assert_eq!(rig.ram.stores(), 0);
    assert_eq!(rig.ram.loads().len(), 0);
    assert_eq!(rig.ram.word(parked).load(SeqCst) & 1, 1, "what stood there still does");
    assert_eq!(rig.register(), Status::Ok);
    assert_eq!(rig.ram.word(parked).load(SeqCst) & 1, 0, "and is put right by the next registration");
    assert_eq!(rig.call(0, Doorbell::Online(vcpu(1))), Status::Ok);
    assert_eq!(rig.halt(0, 0, true), Verdict::Resume(Resume::NotParking), "vCPUs come online anew after each registration");
}
