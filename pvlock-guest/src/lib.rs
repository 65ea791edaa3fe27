//! Paravirtual ticket spinlocks for the guest side of a virtual machine.
//!
//! A spinlock waits well while its holder runs. In a VM with more vCPUs than CPUs the holder, or the next waiter in line,
//! is often not running, and everybody else burns time slices. The locks here publish who waits for what in a region
//! shared with the host, halt through a doorbell after a budget of spinning, and are kicked when their turn comes.
//!
//! * [`Platform`] is the contract with your kernel: a dozen short static methods.
//! * [`Guest`] is the state of one VM: the shared region, registration, the mode of its locks.
//! * [`PreemptableTicketLock`] serves waiters in order, but lets a running newcomer take a free lock whose head waiter is
//!   not running: the lock to use.
//! * [`TicketLock`] serves strictly in the order of arrival, for those who need exactly that.
//! * [`Scoped`] wraps a lock so that it disables preemption or interrupts, before it draws a ticket.
//! * With feature `lock_api_05` or `lock_api_04` there is a `Mutex<T>` for each.
//!
//! Without a host, or before registration, the same locks spin. Nothing here allocates, logs or takes another lock.

#![no_std]

#[cfg(any(test, pvlock_loom))]
extern crate std;

mod budget;
pub mod guest;
#[cfg(pvlock_loom)]
pub mod mutation;
#[cfg(not(pvlock_loom))]
mod mutation;
mod platform;
pub mod preemptable;
mod scoped;
mod sync;
pub mod ticket;
mod waiter;
mod waiters;

#[cfg(all(feature = "lock_api_04", not(pvlock_loom)))]
pub mod lock_api_04;
#[cfg(all(feature = "lock_api_05", not(pvlock_loom)))]
pub mod lock_api_05;

pub use budget::DEFAULT_SPIN_BUDGET;
pub use guest::{Guest, GuestRef, Mode};
use platform::passed;
pub use platform::{KickKind, Platform, Word};
pub use preemptable::{CLAIM, Held, PreemptableTicketLock};
pub use pvlock_hypercalls as hypercalls;
pub use pvlock_protocol as protocol;
pub use scoped::{InterruptsOff, PreemptionOff, RawLock, Scope, Scoped};
pub use ticket::{Ticket, TicketLock};
