//! The parts of the hypervisor that need no bare machine: what a VMCB is, who runs next, which PAUSE is one too many, whether
//! wakes come in order, and what is run. The rest is the freestanding program `pvlock-hv`; `cargo xtask hv` builds and boots it.

#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod cells;
pub mod pause_filter;
pub mod scheduler;
pub mod vmcb;
pub mod wake_order;
