//! What the guest program and the VMM agree on before the first instruction runs.
//!
//! The VMM loads the freestanding binary `pvlock-guest`, fills in one
//! [`BootPage`] for the VM and one [`VcpuBlock`] for each vCPU, and starts every
//! vCPU at the entry point with
//!
//! | register | value |
//! |---|---|
//! | `rdi` | index of the vCPU, from 0 |
//! | `rsi` | address of the [`BootPage`] (guest-physical and virtual: memory is mapped one to one) |
//! | `rsp` | top of a stack of its own, 16-byte aligned |
//! | GS base | address of the vCPU's [`VcpuBlock`] |
//!
//! What it then does is described by a [`Job`]: a workload over a lock, with the results beside it. The same [`work`] runs on
//! host threads when there is no VM.

#![no_std]

#[cfg(feature = "std")]
extern crate std;

pub mod bare;
pub mod boot;
mod hostile;
pub mod job;
pub mod layout;
pub mod life;
pub mod locks;
pub mod pause_loop;
pub mod pauses;
pub mod port;
pub mod work;

pub use bare::Bare;
pub use boot::{BootPage, VcpuBlock};
pub use job::{HaltBy, Job};
pub use locks::{Arena, LockKind};
pub use pauses::CountPauses;
