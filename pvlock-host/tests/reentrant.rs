//! What others do in the middle of the engine's actions: each time that the engine wakes somebody, other vCPUs and the host may do
//! anything before the action goes on, as threads of a higher priority would. Whatever that was, nobody stays asleep.
#![cfg(not(pvlock_loom))]

mod common;
use common::machine::spinning;
use common::*;
use proptest::prelude::*;
use pvlock_host::hypercalls::Doorbell;
use pvlock_host::protocol::{HostFlags, VcpuId, Wait};
use pvlock_host::{Config, Park, PauseLoop, Policy, Queue, RunStates, SleepKind, Unpark, Verdict, Waker};
use std::cell::{Cell, RefCell};

const VCPUS: usize = 3;
/// Actions inside actions.
const DEPTH: usize = 3;

/// One step: what, by whom, to whom, and a ticket; 3 for the one after the other's.
type Step = (u8, u8, u8, u8);

struct Vm {
    rig: Rig,
    script: RefCell<std::vec::IntoIter<Step>>,
    depth: Cell<usize>,
    /// In the middle of an action of its own.
    busy: [Cell<bool>; VCPUS],
    asleep: [Cell<bool>; VCPUS],
    token: [Cell<bool>; VCPUS],
    off_cpu: [Cell<bool>; VCPUS],
    ticket: [Cell<u32>; VCPUS],
}

impl Waker for &Vm {
    fn wake(&self, woken: VcpuId) {
        self.token[woken.index()].set(true);
        if self.depth.get() < DEPTH {
            self.depth.set(self.depth.get() + 1);
            // The next step says how many follow here.
            let steps = self.script.borrow_mut().next().map_or(0, |step| step.0 % 8);
            (0..steps).for_each(|_| _ = self.step());
            self.depth.set(self.depth.get() - 1);
        }
    }
}

impl Vm {
    fn new(config: Config, script: Vec<Step>) -> Self {
        let cells = || std::array::from_fn(|_| Cell::new(false));
        Self {
            rig: Rig::new(config, VCPUS),
            script: RefCell::new(script.into_iter()),
            depth: Cell::new(0),
            busy: cells(),
            asleep: cells(),
            token: cells(),
            off_cpu: cells(),
            ticket: Default::default(),
        }
    }

    /// Something happens; `false` at the end of the script.
    fn step(&self) -> bool {
        let Some((what, v, other, ticket)) = self.script.borrow_mut().next() else { return false };
        let (v, other) = (v as usize % VCPUS, other as usize % VCPUS);
        let engine = &self.rig.engine;
        match what % 64 {
            // Of the vCPU's own thread, which does one thing at a time.
            0..50 if self.busy[v].replace(true) => return true,
            what @ 0..50 => {
                match what {
                    _ if self.asleep[v].get() => {
                        if self.token[v].get() || what == 0 {
                            self.comes_back(v);
                        }
                    }
                    0..14 => self.halt(v, other, ticket),
                    14..30 => self.spin(v, other, ticket),
                    30..42 => _ = engine.kick(vcpu(v), vcpu(other), &self),
                    _ if !self.knows_run_states() => {}
                    42..45 => self.scheduled_in(v),
                    _ => {
                        engine.scheduled_out(vcpu(v));
                        self.off_cpu[v].set(true);
                    }
                }
                self.busy[v].set(false);
            }
            50..56 => engine.kicked(vcpu(other), &self),
            56 => engine.interrupt(vcpu(other), &self),
            57..60 => {
                engine.reset(vcpu(other), &self);
                self.online(other);
            }
            60..62 => self.online(other),
            62 => {
                engine.pause(&self);
                engine.resume();
            }
            _ => engine.set_flags(HostFlags::default(), &self),
        }
        true
    }

    fn knows_run_states(&self) -> bool {
        self.rig.engine.config().run_states == RunStates::Exact
    }

    fn online(&self, v: usize) {
        _ = self.rig.engine.doorbell(vcpu(0), Doorbell::Online(vcpu(v)).encode(), 0, &self);
    }

    fn scheduled_in(&self, v: usize) {
        self.off_cpu[v].set(false);
        self.rig.engine.scheduled_in(vcpu(v), &self);
    }

    fn halt(&self, v: usize, other: usize, ticket: u8) {
        self.rig.publish(v, 0, Some(self.wait(v, other, ticket)));
        let verdict = self.rig.engine.halt(vcpu(v), slot(0), false, 0);
        self.obey(v, verdict);
    }

    fn spin(&self, v: usize, other: usize, ticket: u8) {
        self.rig.publish(v, 0, Some(spinning(self.wait(v, other, ticket))));
        let verdict = self.rig.engine.pause_loop(vcpu(v), 0, &self);
        self.obey(v, verdict);
    }

    fn wait(&self, v: usize, other: usize, ticket: u8) -> Wait {
        let ticket = if ticket == 3 { self.ticket[other].get() + 1 } else { ticket.into() };
        self.ticket[v].set(ticket);
        Wait { predecessor: Some(vcpu(other)), ..held_by(1, ticket, other) }
    }

    fn obey(&self, v: usize, verdict: Verdict) {
        if let Verdict::Park(Park { .. }) = verdict {
            self.asleep[v].set(true);
            self.token[v].set(false);
        }
    }

    fn comes_back(&self, v: usize) {
        self.asleep[v].set(false);
        self.off_cpu[v].set(false);
        let how = if self.token[v].replace(false) { Unpark::Woken } else { Unpark::Signal };
        self.rig.engine.unparked(vcpu(v), how, 0, &self);
    }

    /// Everybody runs again, and who has halted is kicked.
    fn everybody_comes_back(&self) {
        self.depth.set(DEPTH);
        for _ in 0..2 * VCPUS {
            for v in 0..VCPUS {
                if self.asleep[v].get() && self.token[v].get() {
                    self.comes_back(v);
                } else if self.off_cpu[v].get() {
                    self.scheduled_in(v);
                }
            }
            let halted: Vec<_> = self.rig.engine.dump(0).filter(|sleeper| sleeper.kind == SleepKind::Halted).collect();
            halted.iter().for_each(|sleeper| self.rig.engine.kicked(sleeper.vcpu, &self));
        }
    }
}

fn config() -> impl Strategy<Value = Config> {
    let queues = prop_oneof![Just(Queue::None), Just(Queue::Holder), Just(Queue::Previous)];
    let parking = prop_oneof![Just(PauseLoop::ParkOnHolder), Just(PauseLoop::ParkOnPrevious)];
    let run_states = prop_oneof![Just(RunStates::Exact), Just(RunStates::ParkedOnly)];
    (queues, parking, run_states, 0u32..3).prop_map(|(queue, pause_loop, run_states, wake_ahead)| Config {
        queue,
        run_states,
        wake_ahead,
        policy: Policy { pause_loop, ..Policy::default() },
        ..Config::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50_000))]

    #[test]
    fn whatever_happens_in_the_middle_of_an_action_nobody_stays_asleep(
        config in config(),
        script in proptest::collection::vec((any::<u8>(), any::<u8>(), any::<u8>(), 0u8..4), 1..100),
    ) {
        let vm = Vm::new(config, script);
        while vm.step() {
            prop_assert!(vm.rig.engine.check_queues().is_ok());
            for sleeper in vm.rig.engine.dump(0) {
                let v = sleeper.vcpu.index();
                prop_assert_eq!(sleeper.woken, vm.token[v].get(), "vCPU {}: woken, and the waker called", v);
            }
        }
        vm.everybody_comes_back();
        prop_assert_eq!(vm.rig.engine.dump(0).map(|sleeper| sleeper.to_string()).collect::<Vec<_>>(), Vec::<String>::new());
    }
}
