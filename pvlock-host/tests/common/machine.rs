//! An engine on a scheduler that says what the test wants.

use super::*;
use pvlock_host::{Decision, PauseLoop, Placement, Policy, RunStates, Scheduler, SleepKind, Waker, Yields};
use std::cell::RefCell;

/// A VM on a scheduler that says what the test wants.
pub(crate) struct Machine {
    pub(crate) rig: Rig,
    pub(crate) yields: Yields,
    pub(crate) placements: Vec<Placement>,
    pub(crate) backlogs: Vec<Option<u32>>,
    pub(crate) decisions: RefCell<Vec<(usize, Decision)>>,
}

impl Scheduler for Machine {
    fn placement(&self, vcpu: VcpuId) -> Placement {
        self.placements[vcpu.index()]
    }

    fn backlog(&self, vcpu: VcpuId) -> Option<u32> {
        self.backlogs[vcpu.index()]
    }

    fn yields(&self) -> Yields {
        self.yields
    }
}

impl Waker for Machine {
    fn wake(&self, vcpu: VcpuId) {
        self.rig.waker()(vcpu);
    }

    fn scheduler(&self) -> &dyn Scheduler {
        self
    }

    fn decided(&self, vcpu: VcpuId, decision: Decision) {
        self.decisions.borrow_mut().push((vcpu.index(), decision));
    }
}

pub(crate) fn config(pause_loop: PauseLoop) -> Config {
    let policy = Policy { pause_loop, ..Policy::default() };
    Config { policy, run_states: RunStates::Exact, ..Config::default() }
}

impl Machine {
    /// A scheduler that can do everything; all vCPUs are reported as running.
    pub(crate) fn new(config: Config, vcpus: usize) -> Self {
        let machine = Self::blind(config, vcpus);
        for id in 0..vcpus {
            machine.rig.engine.scheduled_in(vcpu(id), &machine);
        }
        Self { yields: Yields::Directed, ..machine }
    }

    /// A scheduler that can do nothing.
    pub(crate) fn blind(config: Config, vcpus: usize) -> Self {
        Self {
            rig: Rig::new(config, vcpus),
            yields: Yields::None,
            placements: vec![Placement::Unknown; vcpus],
            backlogs: vec![None; vcpus],
            decisions: RefCell::default(),
        }
    }

    pub(crate) fn off_cpu(&self, id: usize) {
        self.rig.engine.scheduled_out(vcpu(id));
    }

    pub(crate) fn on_cpu(&self, id: usize) {
        self.rig.engine.scheduled_in(vcpu(id), self);
    }

    pub(crate) fn spin(&self, id: usize) -> Verdict {
        self.rig.engine.pause_loop(vcpu(id), self.rig.now.load(SeqCst), self)
    }

    /// What was decided of a vCPU that waits for this.
    pub(crate) fn decide(&self, id: usize, wait: Option<Wait>) -> Decision {
        self.rig.publish(id, 0, wait);
        let verdict = self.spin(id);
        let decision = self.decisions.borrow().last().copied().unwrap();
        assert_eq!(decision.0, id);
        match (verdict, decision.1) {
            (Verdict::Resume(a), Decision::Resume(b)) => assert_eq!(a, b),
            (Verdict::Yield(a), Decision::Yield(b)) => assert_eq!(a, b),
            (Verdict::YieldTo(_, a), Decision::Boost(b)) => assert_eq!(a, b),
            (Verdict::Park(_), Decision::Park(_)) => {}
            _ => panic!("{verdict:?} is called {}", decision.1),
        }
        decision.1
    }

    /// Everybody's spinners and halted sleepers.
    pub(crate) fn asleep(&self) -> Vec<(usize, SleepKind, Option<usize>)> {
        let sleepers = self.rig.engine.dump(0).filter(|sleeper| !sleeper.woken);
        sleepers.map(|sleeper| (sleeper.vcpu.index(), sleeper.kind, sleeper.queue.map(VcpuId::index))).collect()
    }
}

pub(crate) fn spinning(wait: Wait) -> Wait {
    Wait { state: WaitState::Spinning, ..wait }
}

/// Waits for lock 1 with this ticket, behind and for these.
pub(crate) fn waits_for(ticket: u32, previous: Option<usize>, holder: Option<usize>) -> Option<Wait> {
    Some(spinning(Wait { predecessor: previous.map(vcpu), holder: holder.map(vcpu), ..waits(1, ticket) }))
}
