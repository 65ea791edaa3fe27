//! Where time goes, computed by hand; and that nothing but the scenario decides it.

use pvlock_host::{Policy, Queue};
use pvlock_sim::locks::LockKind;
use pvlock_sim::outcome::Outcome;
use pvlock_sim::params::{DEFAULT, Params};
use pvlock_sim::run;
use pvlock_sim::scenario::{Contender, Pins, Scenario, VmSpec};
use pvlock_sim::workload::Workload;

const MS: u64 = 1_000_000;
/// Cycles in a ms.
const MS_CYCLES: u64 = 2_400_000;
/// Cycles of a context switch.
const SWITCH: u64 = 4_800;

fn scenario(cpus: usize, vcpus: usize, workload: Workload) -> Scenario {
    Scenario {
        cpus,
        vms: vec![VmSpec { vcpus, pins: Pins::Free, workload }],
        others: 0,
        contender: Contender::new("test", LockKind::PlainTicket),
        warm_up_ns: MS,
        run_ns: 80 * MS,
        seed: 7,
        params: Params::default(),
        record_ns: None,
    }
}

fn micro(inside_ns: u64, outside_ns: u64) -> Workload {
    Workload::Micro { locks: 1, inside_ns, outside_ns }
}

/// A busy scenario in which everything happens: parks, kicks, yields, migrations.
fn crowded(seed: u64) -> Scenario {
    let mut scenario = scenario(2, 6, micro(2_000, 5_000));
    scenario.contender = Contender::new("test", LockKind::Preemptable).policy(Policy::named("park-on-previous").unwrap());
    scenario.contender.queue = Queue::Previous;
    scenario.others = 1;
    scenario.record_ns = Some((0, 50 * MS));
    scenario.seed = seed;
    scenario
}

#[test]
fn a_vcpu_alone_computes_all_the_time() {
    let outcome = run(&scenario(1, 1, Workload::Busy)).unwrap();
    let (counts, spent) = (outcome.vms[0].counts[0], outcome.vms[0].spent[0]);
    assert_eq!((spent.computing, spent.spinning, spent.host), (80 * MS_CYCLES, 0, 0));
    assert_eq!((counts.work, counts.switches), (80, 0));
}

#[test]
fn two_hogs_share_a_cpu_in_slices_that_end_at_ticks() {
    let mut scenario = scenario(1, 2, Workload::Busy);
    // The seed decides who is behind, and so begins: the one that is woken first, or there would be a switch more.
    scenario.seed = 3;
    scenario.record_ns = Some((0, 80 * MS));
    let outcome = run(&scenario).unwrap();
    let recording = outcome.recording.as_ref().unwrap();
    // A latency of 6 ms makes slices of 3 ms, which have passed at the fourth tick: 4 ms each, but for the first and last,
    // which begin and end with the recording, one cycle after the warm-up.
    let spans: Vec<_> = recording.spans.iter().map(|span| (span.task, (span.end - span.start).div_ceil(MS_CYCLES))).collect();
    let (first, length) = spans[0];
    assert_eq!(length, 3);
    assert!(spans[1..20].iter().enumerate().all(|(n, span)| *span == ((n + 1 + first) % 2, 4)), "{spans:?}");
    // Each of the 20 switches costs 2 us.
    let spent = outcome.spent();
    assert_eq!(spent.total(), 80 * MS_CYCLES);
    assert_eq!((spent.host, outcome.total().switches), (20 * SWITCH, 20));
}

#[test]
fn two_hogs_on_two_cpus_do_not_meet() {
    let outcome = run(&scenario(2, 2, Workload::Busy)).unwrap();
    assert_eq!(outcome.spent().computing, 160 * MS_CYCLES);
    assert_eq!(outcome.total().switches, 0);
}

#[test]
fn a_vcpu_that_has_another_task_beside_it_gets_half() {
    let mut scenario = scenario(1, 1, Workload::Busy);
    scenario.others = 1;
    let outcome = run(&scenario).unwrap();
    // 3 ms, then 4 of 8.
    assert_eq!(outcome.spent().total(), (3 + 9 * 4) * MS_CYCLES + MS_CYCLES);
}

#[test]
fn uncontended_sections_cost_what_they_last_and_two_operations() {
    let mut scenario = scenario(1, 1, micro(1_000, 1));
    scenario.warm_up_ns = 0;
    scenario.run_ns = 10 * MS;
    let outcome = run(&scenario).unwrap();
    let counts = outcome.total();
    let atomic = scenario.params.cycles(scenario.params.guest.atomic);
    // The time outside is a few cycles, exponentially distributed about 2, at least 1.
    let cycles = 10 * MS_CYCLES / counts.acquisitions;
    assert!((2_400 + 2 * atomic + 1..=2_400 + 2 * atomic + 4).contains(&cycles), "{cycles}");
    assert_eq!((outcome.spent().spinning, counts.parks), (0, 0));
}

#[test]
fn a_spin_is_one_event_however_long_it_is() {
    // Two vCPUs on a CPU each; the second spins for as long as the first is in its section.
    let wall = |inside_ns| {
        let mut scenario = scenario(2, 2, micro(inside_ns, 1));
        (scenario.warm_up_ns, scenario.run_ns) = (0, 2_000 * inside_ns);
        run(&scenario).unwrap()
    };
    let (short, long) = (wall(1_000), wall(1_000_000));
    // A thousand times the spinning in as many operations. Were it steps, this would run for an hour.
    assert!(long.spent().spinning > 900 * short.spent().spinning);
    assert!(long.operations.abs_diff(short.operations) < 400, "{} {}", long.operations, short.operations);
}

#[test]
fn the_same_scenario_gives_the_same_outcome_on_any_thread() {
    let here = run(&crowded(1)).unwrap();
    let threads: Vec<_> = (0..3).map(|_| std::thread::spawn(|| run(&crowded(1)).unwrap())).collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), here);
    }
    let recording = here.recording.as_ref().unwrap();
    assert!(here.total().parks > 0 && here.total().wakes > 0 && recording.spans.len() > 100 && recording.holds.len() > 100);
    let other: Outcome = run(&crowded(2)).unwrap();
    assert_ne!(other, here, "another seed is another run");
}

#[test]
fn a_run_leaves_nothing_behind_for_the_next() {
    let first = run(&crowded(3)).unwrap();
    run(&scenario(2, 5, micro(500, 700))).unwrap();
    assert_eq!(run(&crowded(3)).unwrap(), first);
}

#[test]
fn time_is_conserved_when_cpus_are_never_idle() {
    let mut scenario = crowded(4);
    scenario.contender = Contender::new("test", LockKind::PlainTicket);
    scenario.others = 0;
    let outcome = run(&scenario).unwrap();
    assert_eq!(outcome.spent().total(), 2 * 80 * MS_CYCLES, "spinners never leave a CPU idle");
}

#[test]
fn slower_pauses_and_dearer_exits_are_only_parameters() {
    let with = |settings: &[&str]| {
        let settings: Vec<_> = settings.iter().map(ToString::to_string).collect();
        let mut scenario = crowded(5);
        scenario.params = Params::with(DEFAULT, &settings).unwrap();
        run(&scenario).unwrap()
    };
    assert_eq!(with(&[]), with(&["guest.pause_cycles=10"]));
    assert_ne!(with(&[]), with(&["exits.exit=2400"]));
}
