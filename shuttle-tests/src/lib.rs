//! The real locks, the real engine and a driver, with 4 to 16 vCPUs: too many for loom, which explores all schedules of two or
//! three. Shuttle explores some: at random, and by PCT (a random order of priorities with a few changes, which finds what
//! needs few preemptions with a known probability).
//!
//! Shuttle takes every operation for sequentially consistent: what a weak ordering breaks, loom has to find.
//!
//! Each model runs a number of schedules of each kind, from a fixed seed. `PVLOCK_SCHEDULES` sets another number,
//! `PVLOCK_SEED` another seed.

#[cfg(pvlock_shuttle)]
mod explore;
#[cfg(pvlock_shuttle)]
mod vm;
#[cfg(pvlock_shuttle)]
mod work;

#[cfg(pvlock_shuttle)]
pub use explore::Model;
#[cfg(pvlock_shuttle)]
pub use vm::{OnVm, Vm, choose};
#[cfg(pvlock_shuttle)]
pub use work::Work;

/// In a test file of models: one ignored test in place of the models where there are none.
#[macro_export]
macro_rules! models_only_under_shuttle {
    () => {
        #[cfg(not(pvlock_shuttle))]
        #[test]
        #[ignore = "NO MODEL WAS RUN: build with RUSTFLAGS=\"--cfg pvlock_loom --cfg pvlock_shuttle\" and --release"]
        fn models() {}
    };
}
