//! Running a model on many schedules, and seeing it fail.

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Changes of priority in a PCT schedule: a bug that needs fewer than so many is found with a known probability.
const DEPTH: usize = 5;
/// A vCPU that makes no progress ends here: more than any schedule takes.
const MOST_STEPS: usize = 1_000_000;

/// A model, and how many schedules of it are tried.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// What it is called in the output.
    pub name: &'static str,
    /// How many of each kind.
    pub schedules: usize,
}

fn from_environment<T: std::str::FromStr>(name: &str) -> Option<T> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is to be a number, not {value:?}")))
}

impl Model {
    /// Runs the model; panics if a schedule fails, after shuttle has printed it.
    pub fn holds(self, model: impl Fn() + Send + Sync + 'static) {
        let start = Instant::now();
        let schedules = from_environment("PVLOCK_SCHEDULES").unwrap_or(self.schedules);
        let model = Arc::new(model);
        let persistence = FailurePersistence::Print;
        for scheduler in Self::schedulers(schedules) {
            let model = model.clone();
            run(scheduler, persistence.clone(), move || model());
        }
        println!("{}: holds on {schedules} random and {schedules} PCT schedules, {:.2?}", self.name, start.elapsed());
    }

    /// Runs the model until a schedule fails by a panic whose message contains `how`; panics if none does.
    pub fn fails(self, how: &str, model: impl Fn() + Send + Sync + 'static) {
        let start = Instant::now();
        let model = Arc::new(model);
        let tried = Arc::new(AtomicUsize::new(0));
        for scheduler in Self::schedulers(self.schedules) {
            let (model, counter) = (model.clone(), tried.clone());
            let panic = catch_unwind(AssertUnwindSafe(|| {
                run(scheduler, FailurePersistence::None, move || {
                    counter.fetch_add(1, Ordering::Relaxed);
                    model();
                });
            }));
            if let Err(panic) = panic {
                let message = message(&*panic);
                assert!(message.contains(how), "{}: fails, but not by \"{how}\": {message}", self.name);
                let tried = tried.load(Ordering::Relaxed);
                println!("{}: fails on schedule {tried}, {:.2?}: {how}", self.name, start.elapsed());
                return;
            }
        }
        panic!("{}: survives {} schedules", self.name, tried.load(Ordering::Relaxed));
    }

    fn schedulers(schedules: usize) -> [Box<dyn Scheduler + Send>; 2] {
        let seed = from_environment("PVLOCK_SEED").unwrap_or(1);
        [Box::new(RandomScheduler::new_from_seed(seed, schedules)), Box::new(PctScheduler::new_from_seed(seed, DEPTH, schedules))]
    }
}

fn run(scheduler: Box<dyn Scheduler + Send>, persistence: FailurePersistence, model: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = 1 << 17;
    config.failure_persistence = persistence;
    config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
    config.silence_warnings = true;
    Runner::new(scheduler, config).run(model);
}

fn message(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(message), _) => message,
        (_, Some(message)) => message,
        _ => "(no message)",
    }
}
