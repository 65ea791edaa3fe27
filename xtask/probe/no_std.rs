//! Compiles only if none of these crates brings std: std has a panic handler, and there can be only one.

#![no_std]

use pvlock_guest as _;
use pvlock_host as _;
use pvlock_hypercalls as _;
use pvlock_protocol as _;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
