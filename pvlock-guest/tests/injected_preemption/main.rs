//! What a lock promises, whatever is preempted when: vCPUs run one at a time, a schedule says who runs for how long, and the
//! rules judge each step. A schedule that breaks a rule is shortened and printed; it breaks it each time it is run.

#![cfg(not(pvlock_loom))]

#[path = "../common/mod.rs"]
mod common;

#[allow(unreachable_pub, reason = "a test exports nothing")]
mod baton;
#[allow(unreachable_pub, reason = "a test exports nothing")]
mod rules;

use baton::{Event, Log, OnBaton, Plan, Rules, VCPUS, Words, World, point};
use common::{InterruptKick, SlotLatches, VcpuLatch, id};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use pvlock_guest::{Guest, Platform, PreemptableTicketLock, RawLock, TicketLock};
use rules::{Counts, Preemptable, Strict};
use std::fmt::Debug;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// One acquisition in the program of a vCPU, and how many points it lasts.
#[derive(Clone, Debug)]
struct Section {
    outside: u8,
    inside: u8,
    only_try: bool,
    fair: bool,
}

/// What a kick is.
#[derive(Clone, Copy, Debug)]
enum Profile {
    SlotLatches,
    VcpuLatch,
    Interrupt,
}

#[derive(Clone, Debug)]
struct Case {
    programs: Vec<Vec<Section>>,
    profile: Profile,
    /// The host's; 0: adaptive. Without a host: native mode.
    budget: Option<u64>,
    plan: Plan,
}

fn section() -> impl Strategy<Value = Section> {
    (0..6u8, 0..10u8, prop::bool::weighted(0.2), prop::bool::weighted(0.2)).prop_map(|(outside, inside, only_try, fair)| Section {
        outside,
        inside,
        only_try,
        fair,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let programs = prop::collection::vec(prop::collection::vec(section(), 1..6), 2..=VCPUS);
    let profile = prop_oneof![Just(Profile::SlotLatches), Just(Profile::VcpuLatch), Just(Profile::Interrupt)];
    let budget = prop_oneof![
        8 => prop::sample::select(vec![1, 700, 3_000, 9_000]).prop_map(Some),
        1 => Just(Some(0)),
        1 => Just(None),
    ];
    let schedule = prop::collection::vec(any::<u8>(), 0..500);
    let plan = (schedule, 50..700u64, any::<bool>(), any::<bool>()).prop_map(|(schedule, tick, spurious, run_states)| Plan {
        schedule,
        tick,
        spurious,
        run_states,
    });
    (programs, profile, budget, plan).prop_map(|(programs, profile, budget, plan)| Case { programs, profile, budget, plan })
}

/// A lock and its rules.
trait Subject: RawLock + Debug + Sync + 'static {
    fn rules(counts: &'static Counts) -> Box<dyn Rules>;
    /// `drawn` runs with the ticket when one is drawn.
    fn lock_with(&self, drawn: impl FnOnce(u32)) -> Self::Token;
    /// The ticket that `try_lock` has drawn.
    fn ticket(token: &Self::Token) -> Option<u32>;
    /// Whether the lock is free, by all of its fields.
    fn is_free(words: Words) -> bool;
}

impl<P: Platform + Debug> Subject for TicketLock<P> {
    fn rules(counts: &'static Counts) -> Box<dyn Rules> {
        Box::new(Strict::new(counts))
    }

    fn lock_with(&self, drawn: impl FnOnce(u32)) -> Self::Token {
        self.lock_with(|ticket| drawn(ticket.number()))
    }

    fn ticket(token: &Self::Token) -> Option<u32> {
        Some(token.number())
    }

    fn is_free(words: Words) -> bool {
        words.word == u64::from(words.next)
    }
}

impl<P: Platform + Debug> Subject for PreemptableTicketLock<P> {
    fn rules(counts: &'static Counts) -> Box<dyn Rules> {
        Box::new(Preemptable::new(counts))
    }

    fn lock_with(&self, drawn: impl FnOnce(u32)) -> Self::Token {
        self.lock_with(drawn)
    }

    fn ticket(_: &Self::Token) -> Option<u32> {
        None
    }

    fn is_free(words: Words) -> bool {
        words.word & 0x3_ffff == 0 && (words.word >> 18 ^ words.word >> 34) & 0xffff == 0
    }
}

/// The part of a guest's state that is the table of waiters; it has no other window.
fn table(guest: &Guest<VCPUS>) -> String {
    let state = format!("{guest:?}");
    let begin = state.find("waiters: ").expect("a field");
    state[begin..state.find("state: CachePadded").expect("a field")].into()
}

fn run_program<L: Subject>(lock: &L, program: &[Section]) {
    for section in program {
        (0..section.outside).for_each(|_| point(Event::Work));
        let (token, ticket) = if section.only_try {
            point(Event::Trying);
            match lock.try_lock() {
                Some(token) => {
                    let ticket = L::ticket(&token);
                    (token, ticket)
                }
                None => {
                    point(Event::Refused);
                    continue;
                }
            }
        } else {
            let mut drawn = None;
            let token = lock.lock_with(|ticket| {
                drawn = Some(ticket);
                point(Event::Drawn(ticket));
            });
            (token, drawn)
        };
        point(Event::Acquired(ticket));
        (0..section.inside).for_each(|_| point(Event::Work));
        point(Event::Releasing { fair: section.fair });
        // SAFETY: this vCPU owns the lock by `token`.
        unsafe { if section.fair { lock.unlock_fair(token) } else { lock.unlock(token) } };
        point(Event::Released);
    }
}

fn run<L: Subject>(case: &Case, counts: &'static Counts) -> Result<Log, String> {
    let lock: &'static L = Box::leak(Box::new(L::INIT));
    assert_eq!((size_of::<L>(), align_of::<L>()), (16, 16));
    // SAFETY: both locks are `repr(C)` and 16 bytes of atomics: one of eight bytes, then two of four. Memory that is leaked.
    // The second half is only read, while no other thread runs.
    let words = unsafe { &*std::ptr::from_ref(lock).cast::<[AtomicU64; 2]>() };
    let world = World::new(case.programs.len(), case.plan.clone(), words, L::rules(counts));
    let empty = table(&world.guest);
    if let Some(budget) = case.budget {
        world.register(budget);
    }
    let log = world.run(|vcpu| run_program(lock, &case.programs[vcpu]))?;
    let last = log.last().expect("everybody ends").2;
    let slots = (0..VCPUS).flat_map(|vcpu| &world.guest.as_ref().region().record(id(vcpu)).unwrap().slots);
    for (what, holds) in [
        ("the lock is not free", L::is_free(last)),
        ("a slot is still published", slots.into_iter().all(|slot| slot.read().is_none())),
        ("an entry is left in the table of waiters", table(&world.guest) == empty),
        ("a wait slot is in use", format!("{:?}", world.guest).matches("depth: 0").count() == VCPUS),
    ] {
        if !holds {
            return Err(format!("at the end {what}: {last:x?}"));
        }
    }
    Ok(log)
}

/// The same for a type of lock with each kind of kick.
macro_rules! by_profile {
    ($lock:ident, $case:expr, $counts:expr) => {
        match $case.profile {
            Profile::SlotLatches => run::<$lock<OnBaton<SlotLatches>>>($case, $counts),
            Profile::VcpuLatch => run::<$lock<OnBaton<VcpuLatch>>>($case, $counts),
            Profile::Interrupt => run::<$lock<OnBaton<InterruptKick>>>($case, $counts),
        }
    };
}

/// The same cases each time; `PROPTEST_CASES` asks for more of them.
fn for_all(run: impl Fn(&Case) -> Result<Log, String>) {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { 4_000 };
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 2_000, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let result = TestRunner::new_with_rng(config, rng).run(&case(), |case| run(&case).map(drop).map_err(TestCaseError::fail));
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

#[test]
fn whatever_is_preempted_the_strict_lock_is_acquired_in_the_order_of_the_draws() {
    static COUNTS: std::sync::LazyLock<Counts> = std::sync::LazyLock::new(Counts::default);
    for_all(|case| by_profile!(TicketLock, case, &COUNTS));
    println!("{:?}", *COUNTS);
    for counter in [&COUNTS.halts, &COUNTS.kicks, &COUNTS.waits, &COUNTS.fair] {
        assert!(counter.load(Relaxed) > 1_000, "{:?}", *COUNTS);
    }
}

#[test]
fn whatever_is_preempted_the_preemptable_lock_is_bypassed_only_where_its_head_is_away_or_silent() {
    static COUNTS: std::sync::LazyLock<Counts> = std::sync::LazyLock::new(Counts::default);
    for_all(|case| by_profile!(PreemptableTicketLock, case, &COUNTS));
    println!("{:?}", *COUNTS);
    let Counts { halts, kicks, waits, bypasses, silences, presences, fair } = &*COUNTS;
    for counter in [halts, kicks, waits, bypasses, silences, presences, fair] {
        assert!(counter.load(Relaxed) > 100, "{:?}", *COUNTS);
    }
}

#[test]
fn a_schedule_determines_what_happens() {
    static COUNTS: std::sync::LazyLock<Counts> = std::sync::LazyLock::new(Counts::default);
    let config = Config { cases: 50, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)).run(&case(), |case| {
        prop_assert_eq!(by_profile!(TicketLock, &case, &COUNTS), by_profile!(TicketLock, &case, &COUNTS));
        prop_assert_eq!(by_profile!(PreemptableTicketLock, &case, &COUNTS), by_profile!(PreemptableTicketLock, &case, &COUNTS));
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}
