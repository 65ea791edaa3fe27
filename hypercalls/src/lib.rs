//! How a guest finds its pvlock host and rings it: discovery through CPUID, doorbells over five transports.
//!
//! Encoders (guest) and decoders (host) stand side by side so that they cannot drift apart:
//!
//! * [`Doorbell`]: one 32-bit word, opcode on top, argument below; [`Status`] answers the doorbells that have an answer.
//! * [`Ring`]: the guest's way to send a word. [`Pio`], [`Mmio`], [`Msr`] and [`Vmcall`] encode for the guest and decode for
//!   the host; their `doorbell` (or `mapped`) rings, after a promise that a host is there. [`Direct`] is a function call.
//! * [`discover`]: what hypervisor is there and what it offers, over the [`Cpuid`] trait.
//!
//! HALT and KICK have no answer, because reading one would cost a second exit.

#![no_std]

#[cfg(test)]
extern crate std;

mod discovery;
mod doorbell;
mod transport;

pub use discovery::{Cpuid, Host, Offer, Registers, SIGNATURE, discover};
#[cfg(target_arch = "x86_64")]
pub use discovery::{NativeCpuid, native_instruction};
pub use doorbell::{DEFAULT_PORT, Doorbell, Status};
#[cfg(target_arch = "x86_64")]
pub use transport::kick_cpu;
pub use transport::{Access, Direct, Instruction, Mmio, Msr, NoHost, Operands, Pio, Ring, Transport, Vmcall};
