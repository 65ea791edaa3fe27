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
//! Locks and doorbells are not here: they are in `pvlock-protocol` and
//! `pvlock-hypercalls`. The ports of [`port`] only end and check a guest.

#![no_std]

pub mod boot;
pub mod port;

pub use boot::{BootPage, VcpuBlock};
