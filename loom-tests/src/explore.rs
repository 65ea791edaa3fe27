//! Running a model to the end.

use loom::thread::{self, JoinHandle};
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

    fn explore(self, executions: &Arc<AtomicUsize>, model: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        // Three vCPUs, and loom's first thread, which only waits.
        builder.max_threads = 4;
        // The longest executions take a few hundred; a loop without progress ends here.
        builder.max_branches = 1_500;
        // `LOOM_MAX_PREEMPTIONS` raises the bound.
        builder.preemption_bound = self.preemptions.map(|least| builder.preemption_bound.map_or(least, |most| most.max(least)));
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
pub fn spawn(code: impl FnOnce() + 'static) -> JoinHandle<()> {
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
