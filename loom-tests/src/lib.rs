//! What the models share: a machine for the guest to run on, and the ways to explore a model.
//!
//! Build with `RUSTFLAGS="--cfg pvlock_loom"`, optimised (`--release`). Without the cfg there are no models, and each test
//! file shows one ignored test that says so.
//!
//! # What a model proves
//!
//! Loom runs a closure again and again, until it has seen every order of its threads' atomic operations that can make a
//! difference, and every value that a weakly ordered load may return. Some models bound the number of preemptions (switches
//! away from a thread that could go on); each says why. `README.md` lists them all, `mutations.md` the faults that make the
//! *same* models at the *same* bounds fail: `cargo xtask mutate` shows it.
//!
//! # What it does not
//!
//! * Loom takes SeqCst for AcqRel except in fences, and does not let a load be delayed behind a later store.
//! * Waking a vCPU (`unpark`) makes what the kicker did visible to it; a doorbell promises no such thing. The order of
//!   operations behind a halt is therefore checked on the paths that do not halt.
//! * Time: every spin budget is over at once, after as many looks at the word as the model grants.

#[cfg(pvlock_loom)]
mod clock;
#[cfg(pvlock_loom)]
mod explore;
#[cfg(pvlock_loom)]
mod host;
#[cfg(pvlock_loom)]
mod machine;
#[cfg(pvlock_loom)]
mod mutation;
#[cfg(pvlock_loom)]
mod work;

#[cfg(pvlock_loom)]
pub use clock::{OnClock, Pace, PollFrom, QueueWork, Visit, pace};
#[cfg(pvlock_loom)]
pub use explore::{Model, spawn};
#[cfg(pvlock_loom)]
pub use host::{Engine, FOREVER, OnEngine, Vm, vcpu};
#[cfg(pvlock_loom)]
pub use machine::{
    Config, InterruptAt, InterruptKick, Kick, Lock, Machine, OnMachine, SlotLatches, Start, VcpuLatch, Wait, WorkOn,
};
#[cfg(pvlock_loom)]
pub use work::Work;

/// In a test file of models: one ignored test in place of the models where there are none.
#[macro_export]
macro_rules! models_only_under_loom {
    () => {
        #[cfg(not(pvlock_loom))]
        #[test]
        #[ignore = "NO MODEL WAS RUN: build with RUSTFLAGS=\"--cfg pvlock_loom\" and --release"]
        fn models() {}
    };
}
