//! The library half of the `pvlock` command: a small VMM on KVM.

pub mod vm;

/// The freestanding guest program, built together with this crate.
pub static GUEST_IMAGE: &[u8] = include_bytes!(env!("PVLOCK_GUEST_IMAGE"));
