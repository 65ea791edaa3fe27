//! Running a model to the end, and seeing it fail.

use loom::thread::{self, JoinHandle};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// A model with its bounds.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    name: &'static str,
    preemptions: Option<usize>,
}

impl Model {
    /// A model of which every execution is explored.
    pub const fn exhaustive(name: &'static str) -> Self {
        Self { name, preemptions: None }
    }

    /// A model of which the executions with up to `preemptions` preemptions are explored.
    pub const fn bounded(name: &'static str, preemptions: usize) -> Self {
        Self { name, preemptions: Some(preemptions) }
    }

    /// Explores the model; panics if an execution fails.
    pub fn holds(self, model: impl Fn() + Send + Sync + 'static) {
        let start = Instant::now();
        let executions = self.executions(model);
        println!("{}: holds in {executions} executions, {:.2?}", self.name, start.elapsed());
    }

    /// As [`Model::holds`], but says nothing and returns the number of executions.
    pub fn executions(self, model: impl Fn() + Send + Sync + 'static) -> usize {
        let executions = Arc::new(AtomicUsize::new(0));
        self.explore(&executions, model);
        executions.load(Ordering::Relaxed)
    }

    /// Explores the model until an execution fails, by a panic whose message contains `how`; panics if none does.
    pub fn fails(self, how: &str, model: impl Fn() + Send + Sync + 'static) {
        let start = Instant::now();
        let executions = Arc::new(AtomicUsize::new(0));
        let panic = panic_of(|| self.explore(&executions, model));
        let executions = executions.load(Ordering::Relaxed);
        let Some(message) = panic else { panic!("{}: survives {executions} executions", self.name) };
        assert!(message.contains(how), "{}: fails, but not by \"{how}\": {message}", self.name);
        println!("{}: fails at execution {executions}, {:.2?}: {how}", self.name, start.elapsed());
    }

    fn explore(self, executions: &Arc<AtomicUsize>, model: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        // Three vCPUs, and loom's first thread, which only waits.
        builder.max_threads = 4;
        // The longest executions take a few hundred; a loop without progress ends here.
        builder.max_branches = 1_500;
        builder.preemption_bound = self.preemptions;
        let executions = executions.clone();
        let model = Arc::new(model);
        builder.check(move || {
            executions.fetch_add(1, Ordering::Relaxed);
            let model = model.clone();
            spawn(move || model()).join().expect("a panic ends the whole model");
        });
    }
}

/// Words of stack of a loom thread: loom's own choice is too small for a nested wait and a panic in it.
const STACK_WORDS: usize = 1 << 15;

/// Starts a loom thread.
pub(crate) fn spawn(code: impl FnOnce() + 'static) -> JoinHandle<()> {
    let code = OnThisThread(code);
    let builder = thread::Builder::new().stack_size(STACK_WORDS);
    builder.spawn(move || code.call()).expect("loom threads always start")
}

/// What makes loom's `Builder`, which asks for `Send`, as content as its `spawn`, which does not.
struct OnThisThread<F>(F);

// SAFETY: loom runs all threads of a model on the OS thread that called it.
unsafe impl<F> Send for OnThisThread<F> {}

impl<F: FnOnce()> OnThisThread<F> {
    fn call(self) {
        (self.0)();
    }
}

/// The message of the panic in which `model` ends, if it does.
pub fn panic_of(model: impl FnOnce()) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(model)).err()?;
    Some(message(&*panic).to_owned())
}

fn message(panic: &(dyn Any + Send)) -> &str {
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(message), _) => message,
        (_, Some(message)) => message,
        _ => "(no message)",
    }
}
