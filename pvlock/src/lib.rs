//! The library half of the `pvlock` command: a small VMM on KVM, threads that stand in for one, and measurements on both.

pub mod backend;
pub mod doctor;
pub mod measure;
pub mod order;
pub mod plot;
pub mod report;
pub mod run;
pub mod session;
pub mod sim;
pub mod sweep;
pub mod vm;

/// The freestanding guest program, built together with this crate.
pub static GUEST_IMAGE: &[u8] = include_bytes!(env!("PVLOCK_GUEST_IMAGE"));
