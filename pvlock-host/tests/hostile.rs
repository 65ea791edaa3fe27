//! A guest that writes anything anywhere and rings anything at any time.
#![cfg(not(pvlock_loom))]

mod common;
use common::*;
use proptest::prelude::*;
use pvlock_host::hypercalls::Doorbell;
use pvlock_host::protocol::{PAGE_SIZE, VcpuId, Wait};
use pvlock_host::{
    Config, Limits, Placement, Policy, Queue, Rate, RunStates, Scheduler, Undercommit, Unpark, Verdict, Waker, Window, Yields,
};
use std::sync::atomic::Ordering::SeqCst;

const VCPUS: usize = 6;

#[derive(Clone, Debug)]
enum Attack {
    Ring(usize, u32),
    Write(usize, u64),
    Scribble(u64),
    Return(usize),
    Outside(usize, u8),
    Spin(usize, u16),
}

/// A scheduler whose answers make no sense together.
struct Machine<'a> {
    rig: &'a Rig,
    seed: u16,
}

impl Scheduler for Machine<'_> {
    fn placement(&self, vcpu: VcpuId) -> Placement {
        let placements = [Placement::Unknown, Placement::Preempted, Placement::Running, Placement::Sleeping];
        placements[(usize::from(self.seed) >> (vcpu.index() * 2)) % 4]
    }

    fn backlog(&self, vcpu: VcpuId) -> Option<u32> {
        u32::from(self.seed).checked_sub(vcpu.index() as u32)
    }

    fn yields(&self) -> Yields {
        [Yields::None, Yields::Plain, Yields::Directed][usize::from(self.seed) % 3]
    }
}

impl Waker for Machine<'_> {
    fn wake(&self, vcpu: VcpuId) {
        self.rig.waker()(vcpu);
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }
}

fn doorbell_word() -> impl Strategy<Value = u32> {
    let region = Doorbell::Register { low: (RAM / PAGE_SIZE as u64) as u32 }.encode();
    prop_oneof![
        2 => any::<u32>(),
        // Known opcodes with small arguments hit more.
        8 => (0u32..10, 0u32..VCPUS as u32 + 2).prop_map(|(opcode, argument)| opcode << 28 | argument),
        1 => Just(region),
    ]
}

fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        Just(0),
        Just(u64::MAX),
        // Waits with hints in range, on few locks.
        (0u64..3, 0u64..8, 0u64..8, any::<u32>()).prop_map(|(_, p, h, ticket)| u64::from(ticket) | p << 32 | h << 46),
        0u64..4,
    ]
}

fn attack() -> impl Strategy<Value = Attack> {
    prop_oneof![
        6 => (0..VCPUS, doorbell_word()).prop_map(|(v, word)| Attack::Ring(v, word)),
        4 => (0usize..PAGE_SIZE / 8, word()).prop_map(|(n, word)| Attack::Write(n, word)),
        1 => any::<u64>().prop_map(Attack::Scribble),
        2 => (0..VCPUS).prop_map(Attack::Return),
        4 => (0..VCPUS, any::<u16>()).prop_map(|(v, ns)| Attack::Spin(v, ns)),
        1 => (0..VCPUS, any::<u8>()).prop_map(|(v, what)| Attack::Outside(v, what)),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    let names = proptest::sample::select(Policy::NAMED.map(|(name, ..)| name).to_vec());
    let rate = || proptest::option::of((1u32..100_000, 1u32..9).prop_map(|(per_second, burst)| Rate { per_second, burst }));
    let limits =
        (rate(), rate(), rate()).prop_map(|(halts, kicks, pause_loops)| Limits { halts, kicks, pause_loops, ..Limits::default() });
    (names, any::<bool>(), any::<bool>(), 0u32..4, 0u32..4, limits).prop_map(|(name, window, tell, look_ahead, chain, limits)| {
        Policy {
            window: window.then(Window::default),
            undercommit: Some(Undercommit { tell, calm: 2, quiet_ns: 1_000 }),
            look_ahead,
            chain,
            limits,
            ..Policy::named(name).unwrap()
        }
    })
}

fn step(rig: &Rig, attack: &Attack) {
    match *attack {
        Attack::Ring(v, word) => {
            let _: Verdict = rig.ring(v, word);
        }
        Attack::Write(n, word) => rig.ram.words()[n].store(word, SeqCst),
        Attack::Scribble(mut seed) => {
            for word in rig.ram.words() {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                word.store(seed.rotate_left(17), SeqCst);
            }
        }
        Attack::Return(v) => rig.unparked(v, Unpark::Woken),
        // Time passes, so that limits let some of it through.
        Attack::Spin(v, ns) => {
            rig.now.fetch_add(ns.into(), SeqCst);
            let _: Verdict = rig.engine.pause_loop(vcpu(v), rig.now.load(SeqCst), &Machine { rig, seed: ns });
        }
        Attack::Outside(v, what) => match what % 8 {
            0 => rig.engine.interrupt(vcpu(v), &rig.waker()),
            1 => rig.engine.reset(vcpu(v), &rig.waker()),
            2 => rig.engine.scheduled_in(vcpu(v), &rig.waker()),
            3 => rig.engine.scheduled_out(vcpu(v)),
            4 => rig.engine.pause(&rig.waker()),
            5 => rig.engine.reset_vm(&rig.waker()),
            _ => rig.engine.resume(),
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn row_15_no_guest_makes_the_host_panic_reach_out_work_without_bound_or_touch_another_vm(
        queue in prop_oneof![Just(Queue::Holder), Just(Queue::Previous)],
        policy in policy(),
        registered: bool,
        attacks in proptest::collection::vec(attack(), 1..200),
    ) {
        let config = Config { queue, wake_ahead: 1, run_states: RunStates::Exact, policy, ..Config::default() };
        let victim = Rig::new(config, 3);
        victim.sleep(0, Wait { holder: Some(vcpu(1)), ..behind(5, 5, 1) }, Some(1));
        victim.kick(1, 2);
        let seen = |rig: &Rig| (rig.queues(), rig.engine.statistics(), rig.ram.words().iter().map(|word| word.load(SeqCst)).collect::<Vec<_>>());
        let before = seen(&victim);

        // `Ram` panics on any access that is not in the registered region.
        let rig = if registered { Rig::new(config, VCPUS) } else { Rig::bare(config, VCPUS) };
        for attack in &attacks {
            rig.ram.forget_accesses();
            step(&rig, attack);
            let loads: u32 = rig.ram.loads().values().sum();
            let most = 8 + VCPUS + if matches!(attack, Attack::Spin(..) | Attack::Ring(..)) { 6 + 12 * policy.look_ahead as usize } else { 0 };
            prop_assert!(loads as usize <= most && rig.ram.stores() <= 8 + 5 * VCPUS, "{:?}", attack);
            prop_assert!(rig.woken().len() <= 2 * VCPUS, "{:?}", attack);
            rig.queues();
        }
        // Whatever it did, it can be paused and shut down.
        rig.engine.shut_down(&rig.waker());
        prop_assert!(rig.engine.dump(0).all(|sleeper| sleeper.woken));
        for v in 0..VCPUS {
            rig.unparked(v, Unpark::Woken);
        }
        prop_assert_eq!(rig.queues().concat(), []);
        prop_assert_eq!(rig.engine.dump(0).count(), 0);

        prop_assert_eq!(victim.woken(), []);
        prop_assert_eq!(seen(&victim), before);
    }
}
