//! A deterministic simulator of hosts, VMs and schedulers, in which the real guest locks and the real host engine run.
//!
//! * [`scenario`]: what is simulated; [`run()`]: one run of it; [`outcome`]: what it shows.
//! * [`machine`]: CPUs, exits, interrupts, cache lines. [`sched`]: the host's scheduler, a model. [`platform`]: what guest code
//!   may ask for; it runs in coroutines.
//! * [`locks`]: this project's, and the kinds that have been published. [`workload`]: what guests do.
//! * [`faults`]: what can go wrong; [`fuzz()`](fuzz::fuzz): scenarios with faults by the thousand, and what has to hold in them.
//! * [`params`]: what things cost, each with its source.
//! * [`tables`]: what has been published, and what the simulation says of it.
//! * [`parallel`]: many runs at a time. [`schedule`]: who ran where, for [`picture`]s and [`trace`]s.

pub mod event;
pub mod faults;
pub mod fuzz;
mod invariants;
pub mod locks;
pub mod machine;
pub mod outcome;
pub mod parallel;
pub mod params;
pub mod picture;
pub mod platform;
pub mod run;
pub mod scenario;
pub mod sched;
pub mod schedule;
pub mod tables;
pub mod trace;
pub mod workload;

pub use run::run;
