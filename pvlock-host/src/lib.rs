//! The host's side of paravirtual spinlocks.
//!
//! [`Engine`] takes events (a vCPU halts, kicks, was woken, is reset, …) and returns verdicts (resume it, park it until …).
//! It does no I/O, never blocks, allocates nothing after construction, and works in `no_std` hypervisors. A [`driver`]
//! (feature `threads` or `kvm`) does the sleeping.
//!
//! The guest is not trusted: each word of its memory is read once and checked, work per event is bounded by the number of
//! vCPUs, and nothing it writes or rings can do more than wake or delay vCPUs of its own VM.

#![no_std]

extern crate alloc;
#[cfg(any(test, feature = "std", pvlock_loom))]
extern crate std;

mod check;
mod config;
mod decision;
mod dump;
mod engine;
mod event;
mod memory;
#[cfg(pvlock_loom)]
pub mod mutation;
#[cfg(not(pvlock_loom))]
mod mutation;
mod notify;
mod pause_loop;
mod policy;
mod queue;
mod registration;
mod scheduler;
mod statistics;
mod sync;
mod vcpu;

#[cfg(feature = "std")]
pub mod driver;

pub use config::{Config, ConfigError, Queue, RunStates};
pub use decision::Decision;
pub use dump::{SleepKind, Sleeper};
pub use engine::{Engine, EngineError};
pub use event::{Boost, Park, Resume, Sleep, Unpark, Verdict, Waker, Yield};
#[cfg(not(pvlock_loom))]
pub use memory::Mapped;
pub use memory::{GuestMemory, Nested};
pub use policy::{Actuator, Limits, PauseLoop, Pivot, Policy, Poller, Polling, Rate, Setting, Undercommit, Window};
pub use pvlock_hypercalls as hypercalls;
pub use pvlock_protocol as protocol;
pub use scheduler::{Placement, Scheduler, Unknown, Yields};
pub use statistics::{SLEEP_BUCKETS, Statistics};
