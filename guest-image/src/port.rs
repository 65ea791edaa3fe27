//! I/O ports between the boot layer of the VMM and the guest program.
//!
//! Every access is 4 bytes wide. The numbers are our own choice, clear of the
//! ports of PC devices (below 0x0d00) and of the doorbell port of `pvlock-hypercalls`.

/// `out`: this vCPU is done; the value is its exit code (0 is success).
/// The vCPU never runs again.
pub const EXIT: u16 = 0x1b00;

/// `out`: this vCPU panicked; the text is in its [`VcpuBlock`](crate::VcpuBlock).
/// The whole VM ends with an error.
pub const PANIC: u16 = 0x1b04;

/// `out` then `in`: a round trip that checks the doorbell path. The VMM's handler
/// answers the `in` with [`echo`] of what the same vCPU wrote last.
pub const ECHO: u16 = 0x1b08;

/// The answer that an `in` from [`ECHO`] gives after an `out` of `value`:
/// every bit differs from what went in, so a stale register cannot pass for it.
pub const fn echo(value: u32) -> u32 {
    !value
}

/// `out`: resets this vCPU; the value means nothing. It starts again at the entry point, as offline as after power-on.
pub const RESET: u16 = 0x1b0c;
