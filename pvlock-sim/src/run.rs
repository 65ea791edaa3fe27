//! One run: from a scenario to what it shows. The same scenario gives the same outcome, bit for bit.

use crate::faults::{Faults, Trial};
use crate::invariants::Order;
use crate::locks::{Lock, LockKind};
use crate::machine::{Activity, Event, Machine, SimEngine, Step, Vm};
use crate::outcome::{Outcome, Recording, VmOutcome};
use crate::platform::{self, Boot, Code, Current};
use crate::scenario::{Pins, RuleKind, Scenario, ScenarioError, VmSpec};
use crate::sched::{Gang, Rule, Sched};
use crate::workload::{Handler, Vcpu};
use crossbeam_utils::CachePadded;
use pvlock_guest::{Guest, GuestRef};
use pvlock_host::protocol::VcpuId;
use pvlock_host::{Nested, PauseLoop};
use rand::RngExt;
use rand::seq::SliceRandom;
use rand_pcg::Pcg64Mcg;
use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the code of one VM's vCPUs refers to. Lives longer than the code.
struct World {
    _guest: Box<dyn Any>,
    locks: Box<[CachePadded<Lock>]>,
    unacknowledged: Box<[AtomicU64]>,
    mail: Box<[AtomicU64]>,
}

/// A guest that has room for so many vCPUs.
fn new_guest(vcpus: usize) -> (Box<dyn Any>, GuestRef<'static>) {
    fn sized<const N: usize>() -> (Box<dyn Any>, GuestRef<'static>) {
        let guest = Box::new(Guest::<N>::new());
        let place: *const Guest<N> = &raw const *guest;
        // SAFETY: the box is kept in `World` until all code and the engine that refer to it are gone (`Simulation`'s order of
        // fields), and what it contains does not move.
        (guest, unsafe { &*place }.as_ref())
    }
    match vcpus {
        0..=4 => sized::<4>(),
        5..=16 => sized::<16>(),
        17..=64 => sized::<64>(),
        _ => sized::<{ crate::scenario::MAX_VCPUS }>(),
    }
}

/// Everything of one run, dropped in this order: code first, what it refers to last.
struct Simulation {
    code: Vec<Option<(Code, Option<Current>)>>,
    machine: Option<Machine>,
    _worlds: Vec<World>,
}

impl Simulation {
    /// Lets the machine that this thread simulates and the code of its vCPUs take turns to the end; false if `interrupt` was
    /// set before.
    fn run(&mut self, interrupt: &AtomicBool) -> bool {
        loop {
            match platform::with(Machine::step) {
                Step::Stop => return true,
                Step::Run(task) => {
                    let ended = self.code[task].as_mut().is_none_or(|(code, current)| platform::resume(code, current));
                    platform::with(|machine| machine.suspended(ended));
                }
            }
            if interrupt.load(Ordering::Relaxed) {
                return false;
            }
        }
    }
}

/// Simulates.
///
/// # Errors
///
/// What cannot be simulated.
pub fn run(scenario: &Scenario) -> Result<Outcome, ScenarioError> {
    run_until(scenario, &AtomicBool::new(false))?.ok_or(ScenarioError::NoVms)
}

/// Simulates, unless `interrupt` is set before the end.
///
/// # Errors
///
/// What cannot be simulated.
pub fn run_until(scenario: &Scenario, interrupt: &AtomicBool) -> Result<Option<Outcome>, ScenarioError> {
    scenario.check()?;
    let mut simulation = build(scenario, None)?;
    let before = platform::exchange(simulation.machine.take());
    let finished = simulation.run(interrupt);
    simulation.machine = platform::exchange(before);
    let outcome = simulation.machine.as_mut().map(|machine| outcome(scenario, machine));
    Ok(outcome.filter(|_| finished))
}

/// How a run with faults ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// What did not hold, if anything.
    pub violation: Option<String>,
    /// The last that happened, and who sleeps.
    pub log: Vec<String>,
    /// Simulated time, in ns.
    pub ns: u64,
    /// Lock operations.
    pub operations: u64,
    /// Things that went wrong.
    pub faults: u64,
}

/// What a run with faults needs beside its scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trials {
    /// What goes wrong.
    pub faults: Faults,
    /// Longest sleep, in ns.
    pub deadline_ns: u64,
    /// Longest wait for a lock, in ns.
    pub longest_wait_ns: u64,
    /// How many of the last lines to keep.
    pub log: usize,
}

/// Simulates until every vCPU with a number of rounds has done them, or something does not hold that has to.
///
/// # Errors
///
/// What cannot be simulated.
pub fn run_with_faults(scenario: &Scenario, trials: &Trials) -> Result<Ending, ScenarioError> {
    scenario.check()?;
    let mut simulation = build(scenario, Some(trials))?;
    let before = platform::exchange(simulation.machine.take());
    let steps = std::panic::AssertUnwindSafe(|| simulation.run(&AtomicBool::new(false)));
    let panic = std::panic::catch_unwind(steps).err();
    simulation.machine = platform::abandon();
    platform::exchange(before);
    let Some(machine) = &mut simulation.machine else { return Err(ScenarioError::NoVms) };
    if let Some(panic) = panic {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default();
        machine.violated(format!("panicked: {text}"));
    }
    machine.check_end();
    let (ns, operations) = (machine.params.ns(machine.now), machine.operations);
    let dump = machine.dump();
    let Some(trial) = &mut machine.trial else { return Err(ScenarioError::NoVms) };
    let violation = trial.invariants.violation().map(str::to_owned);
    let mut log = trial.log.take();
    if trials.log > 0 {
        log.extend(dump);
    }
    Ok(Ending { violation, log, ns, operations, faults: trial.count })
}

fn rule(scenario: &Scenario, placed: &[Vec<usize>]) -> Rule {
    match scenario.contender.rule {
        RuleKind::Fair => Rule::Fair,
        RuleKind::Clairvoyant => Rule::Clairvoyant,
        RuleKind::Gang => Rule::Gang(Gang::pack(placed, scenario.cpus)),
    }
}

/// On which CPU each vCPU of each VM begins: pinned ones where they must, the others one after the other, round and round.
fn placement(scenario: &Scenario, random: &mut Pcg64Mcg) -> Vec<Vec<usize>> {
    let mut cpus: Vec<usize> = (0..scenario.cpus).collect();
    cpus.shuffle(random);
    let mut next = 0;
    let gang = scenario.contender.rule == RuleKind::Gang;
    scenario
        .vms
        .iter()
        .map(|VmSpec { vcpus, pins, .. }| match pins {
            Pins::Each(pins) => pins.clone(),
            Pins::Among(pins) => (0..*vcpus).map(|vcpu| pins[vcpu % pins.len()]).collect(),
            Pins::Free => {
                if gang && next % scenario.cpus + vcpus > scenario.cpus {
                    // A gang does not wrap round.
                    next = 0;
                }
                (0..*vcpus)
                    .map(|_| {
                        next += 1;
                        cpus[(next - 1) % scenario.cpus]
                    })
                    .collect()
            }
        })
        .collect()
}

fn build(scenario: &Scenario, trials: Option<&Trials>) -> Result<Simulation, ScenarioError> {
    let params = scenario.params;
    let mut random = Pcg64Mcg::new(u128::from(scenario.seed) << 64 | 0x9e37_79b9_7f4a_7c15);
    let placed = placement(scenario, &mut random);
    let rule = rule(scenario, &placed);
    let gangs = if let Rule::Gang(gang) = &rule { Some(gang.len()) } else { None };
    let sched = Sched::new(params.times(scenario.cpus), rule, scenario.cpus);
    let window = scenario.contender.policy.map(|_| scenario.contender.window.unwrap_or(params.pause_loop.window_cycles));
    let mut machine = Machine::new(params, sched, scenario.cpus, window, Pcg64Mcg::new(random.random()));
    if gangs.is_some_and(|gangs| gangs > 1) {
        machine.gang_slice = Some(params.cycles(params.scheduler.gang_slice));
    }
    if scenario.contender.rule == RuleKind::Clairvoyant {
        machine.clairvoyant = true;
        machine.costs.switch = 0;
    }
    let ahead = params.times(scenario.cpus).latency;
    let (mut code, mut worlds) = (Vec::new(), Vec::new());
    let everywhere: Arc<[usize]> = (0..scenario.cpus).collect();
    for (number, (vm, cpus)) in scenario.vms.iter().zip(&placed).enumerate() {
        add_vm(scenario, trials, number, vm, cpus, &everywhere, &mut machine, &mut code, &mut worlds, &mut random)?;
    }
    for other in 0..scenario.others {
        machine.sched.add(scenario.vms.len(), Arc::clone(&everywhere), other % scenario.cpus, random.random_range(0..ahead));
        machine.add(None, VCPU_0, Activity::Compute { left: u64::MAX / 2 });
        code.push(None);
    }
    let warm_up = params.cycles(scenario.warm_up_ns);
    let end = warm_up + params.cycles(scenario.run_ns);
    if let Some((from, to)) = scenario.record_ns {
        let (from, to) = (warm_up + params.cycles(from), (warm_up + params.cycles(to)).min(end));
        let mut recording = Recording::new(scenario.cpus, from, to);
        recording.tasks = machine.vcpus.iter().map(|vcpu| (vcpu.vm, vcpu.id.index())).collect();
        machine.recording = Some(recording);
    }
    if let Some(trials) = trials {
        let trial = trial(scenario, trials, &machine);
        machine.trial = Some(Box::new(trial));
        (0..machine.vms.len()).for_each(|vm| machine.plan_disturbance(vm));
    }
    machine.at(warm_up, Event::Measure);
    machine.at(end, Event::Stop);
    machine.start();
    Ok(Simulation { code, machine: Some(machine), _worlds: worlds })
}

/// What goes wrong, and what has to hold of the locks of this machine.
fn trial(scenario: &Scenario, trials: &Trials, machine: &Machine) -> Trial {
    let mut trial = Trial::new(trials.faults, trials.log);
    trial.invariants.size(machine.vcpus.len(), machine.lines.len());
    trial.invariants.longest_wait = machine.params.cycles(trials.longest_wait_ns);
    trial.paused_until = vec![0; machine.vms.len()];
    trial.registrations = vec![0; machine.vms.len()];
    let mut line = 0;
    for (vm, spec) in machine.vms.iter().zip(&scenario.vms) {
        let order = match scenario.contender.lock {
            LockKind::Ticket => Order::Strict,
            LockKind::Preemptable => Order::Bounded { most: vm.vcpus },
            _ => Order::None,
        };
        let locks = spec.workload.locks(vm.vcpus);
        (line..line + locks).for_each(|line| trial.invariants.promise(line, order));
        line += locks + vm.vcpus;
        if !vm.hostile {
            trial.busy += vm.vcpus;
        }
    }
    trial
}

const VCPU_0: VcpuId = match VcpuId::new(0) {
    Some(vcpu) => vcpu,
    None => unreachable!(),
};

#[allow(clippy::too_many_arguments, reason = "everything that a VM is added to")]
fn add_vm(
    scenario: &Scenario,
    trials: Option<&Trials>,
    number: usize,
    vm: &VmSpec,
    cpus: &[usize],
    everywhere: &Arc<[usize]>,
    machine: &mut Machine,
    code: &mut Vec<Option<(Code, Option<Current>)>>,
    worlds: &mut Vec<World>,
    random: &mut Pcg64Mcg,
) -> Result<(), ScenarioError> {
    let contender = &scenario.contender;
    let (owner, guest) = new_guest(vm.vcpus);
    let world = World {
        _guest: owner,
        locks: (0..vm.workload.locks(vm.vcpus)).map(|_| CachePadded::new(Lock::new(contender.lock))).collect(),
        unacknowledged: (0..vm.vcpus).map(|_| AtomicU64::new(0)).collect(),
        mail: (0..vm.vcpus).map(|_| AtomicU64::new(0)).collect(),
    };
    // SAFETY: the boxes do not move and are dropped after the code, see `Simulation`.
    let (locks, unacknowledged, mail) = unsafe {
        let locks: &'static [CachePadded<Lock>] = &*std::ptr::from_ref(&*world.locks);
        let unacknowledged: &'static [AtomicU64] = &*std::ptr::from_ref(&*world.unacknowledged);
        let mail: &'static [AtomicU64] = &*std::ptr::from_ref(&*world.mail);
        (locks, unacknowledged, mail)
    };
    worlds.push(world);
    let ids = || (0..vm.vcpus).filter_map(VcpuId::new);
    let exits = contender.policy.is_some_and(|policy| policy.pause_loop != PauseLoop::Ignore);
    let engine = if contender.lock.halts() || exits {
        let mut config = contender.config();
        if let Some(trials) = trials {
            config.deadline_ns = trials.deadline_ns;
        }
        let engine = SimEngine::new(config, vm.vcpus, Nested(guest.region()));
        Some(Rc::new(engine.map_err(|error| ScenarioError::Engine(error.to_string()))?))
    } else {
        None
    };
    if let (Some(engine), true) = (&engine, contender.lock.halts()) {
        let refused = |status| ScenarioError::Engine(format!("registration was refused: {status:?}"));
        guest.register(&Boot(engine, VCPU_0), 0, [VCPU_0]).map_err(refused)?;
        for vcpu in ids() {
            guest.online(&Boot(engine, vcpu), vcpu).map_err(refused)?;
        }
    }
    let first = machine.vcpus.len();
    // Or all CPUs would change tasks at the same ticks.
    let ahead = scenario.params.times(scenario.cpus).latency;
    let lock_line = machine.lines.len();
    machine.new_lines(locks.len());
    let acknowledge_line = machine.lines.len();
    machine.new_lines(unacknowledged.len());
    let pivot = contender.policy.unwrap_or_default().pivot;
    let (vcpus, last_boosted, in_handler, hostile) = (vm.vcpus, 0, 0, vm.workload.is_hostile());
    machine.vms.push(Vm { first, vcpus, engine, unacknowledged, acknowledge_line, pivot, last_boosted, in_handler, hostile });
    let handler = trials.and_then(|_| Handler::new(locks, lock_line));
    for (id, &cpu) in ids().zip(cpus) {
        let allowed: Arc<[usize]> = match &vm.pins {
            Pins::Free => Arc::clone(everywhere),
            Pins::Each(pins) => [pins[id.index()]].into(),
            Pins::Among(pins) => {
                let mut pins = pins.clone();
                pins.sort_unstable();
                pins.dedup();
                pins.into()
            }
        };
        machine.sched.add(number, allowed, cpu, random.random_range(0..ahead));
        machine.add(Some(number), id, Activity::Ready);
        let workload = vm.workload;
        let vcpu = Vcpu {
            id,
            vcpus: vm.vcpus,
            task: first + id.index(),
            locks,
            lock_line,
            acknowledge_line,
            unacknowledged,
            mail,
            params: scenario.params,
            random: Pcg64Mcg::new(random.random()),
        };
        let current = Current { guest, vcpu: id, locks: locks.as_ptr().addr(), handler, yielder: None };
        code.push(Some((
            Code::new(move |yielder, ()| {
                platform::begin(yielder);
                workload.run(vcpu);
            }),
            Some(current),
        )));
    }
    Ok(())
}

fn outcome(scenario: &Scenario, machine: &mut Machine) -> Outcome {
    let now = machine.now;
    for task in 0..machine.vcpus.len() {
        machine.book_running(task);
    }
    if let Some(recording) = &mut machine.recording {
        recording.finish(now);
    }
    let vms = machine
        .vms
        .iter()
        .map(|vm| {
            let vcpus = &machine.vcpus[vm.first..vm.first + vm.vcpus];
            VmOutcome {
                counts: vcpus.iter().map(|vcpu| vcpu.counts).collect(),
                spent: vcpus.iter().map(|vcpu| vcpu.spent).collect(),
                host: vm.engine.as_ref().map(|engine| engine.statistics()).unwrap_or_default(),
            }
        })
        .collect();
    Outcome { vms, measured_ns: scenario.run_ns, operations: machine.operations, recording: machine.recording.take() }
}
