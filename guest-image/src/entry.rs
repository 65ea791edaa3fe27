//! From the first instruction to [`main`](crate::main): stack, boot page, panics.

use core::arch::{asm, global_asm};
use core::fmt::{self, Write};
use core::panic::PanicInfo;
use core::sync::atomic::Ordering;

use pvlock_guest_image::boot::{self, BootPage, PANIC_TEXT, VcpuBlock};
use pvlock_guest_image::port;
use x86::io::outl;

global_asm!(
    ".section .text.start, \"ax\"",
    ".global _start",
    "_start:",
    // Frame pointer chain ends here; `call` leaves rsp as the C ABI wants it.
    "xor ebp, ebp",
    "and rsp, -16",
    "call {entry}",
    "ud2",
    entry = sym entry,
);

extern "C" fn entry(vcpu: usize, boot: *const BootPage) -> ! {
    // SAFETY: the VMM passes the address of the boot page in rsi. It lies in guest RAM, which is
    // mapped one to one for the life of the guest, and nobody writes the fields outside `args`
    // (atomics) after the start.
    let boot: &'static BootPage = unsafe { &*boot };
    assert!(boot.magic == boot::MAGIC, "boot page has a wrong magic: {:#x}", boot.magic);
    assert!(boot.version == boot::VERSION, "boot page has version {}", boot.version);
    assert!(vcpu_block().vcpu == vcpu as u64, "GS base belongs to another vCPU");
    crate::main(vcpu, boot)
}

/// The block of the vCPU that executes this.
#[inline]
pub(crate) fn vcpu_block() -> &'static VcpuBlock {
    let address: *const VcpuBlock;
    // SAFETY: the VMM points the GS base at this vCPU's block, whose first word is its own
    // address; the guest never changes the GS base. The word never changes either, so the load is pure.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) address, options(pure, readonly, nostack, preserves_flags));
    }
    // SAFETY: the block is a page of guest RAM reserved for this vCPU, mapped for the life of
    // the guest; the fields that change are atomics.
    unsafe { &*address }
}

/// Ends this vCPU with an exit code; 0 is success. The VMM never resumes it.
pub(crate) fn exit(code: u32) -> ! {
    loop {
        // SAFETY: the VMM opens every port to the guest, and writing EXIT touches no memory.
        unsafe { outl(port::EXIT, code) };
    }
}

/// Writes into the panic text of a block and drops what does not fit.
struct PanicText(&'static VcpuBlock, usize);

impl Write for PanicText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            let Some(cell) = self.0.panic_text.get(self.1) else {
                break;
            };
            cell.store(byte, Ordering::Relaxed);
            self.1 += 1;
        }
        Ok(())
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let block = vcpu_block();
    // A panic while formatting a panic: report what is there.
    if block.panic_len.load(Ordering::Relaxed) == 0 {
        block.panic_len.store(1, Ordering::Relaxed);
        let mut text = PanicText(block, 0);
        let _ = write!(text, "{info}");
        block.panic_len.store(text.1.min(PANIC_TEXT) as u64, Ordering::Relaxed);
    }
    // SAFETY: the VMM opens every port to the guest; the port write exits to it, so it
    // sees the text stored before by this same vCPU.
    unsafe { outl(port::PANIC, block.vcpu as u32) };
    exit(1)
}

/// `core` was compiled for unwinding and refers to this; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// As [`rust_eh_personality`].
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    exit(1)
}
