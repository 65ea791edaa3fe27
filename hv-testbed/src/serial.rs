//! Output: the first serial port (16550, polled), one line at a time.

use crate::irq_lock::IrqLock;
use core::fmt::{self, Write};
use x86::io::{inb, outb};

const PORT: u16 = 0x3f8;
const LINE_STATUS: u16 = PORT + 5;
const EMPTY: u8 = 1 << 5;

struct Serial;

static LINE: lock_api::Mutex<IrqLock, ()> = lock_api::Mutex::new(());

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: COM1 belongs to this module; its registers change no memory.
            unsafe {
                while inb(LINE_STATUS) & EMPTY == 0 {
                    core::hint::spin_loop();
                }
                outb(PORT, byte);
            }
        }
        Ok(())
    }
}

/// 115200 baud, 8 bits, no parity, no interrupts.
pub(crate) fn set_up() {
    for (register, value) in [(3, 0x80), (0, 1), (1, 0), (3, 3), (1, 0), (2, 7), (4, 3)] {
        // SAFETY: as above.
        unsafe { outb(PORT + register, value) };
    }
}

/// Prints one line, whole.
pub(crate) fn print(line: fmt::Arguments<'_>) {
    let _whole = LINE.lock();
    let _ = writeln!(Serial, "{line}");
}

/// The same where the lock may be held by whoever failed.
pub(crate) fn print_last(line: fmt::Arguments<'_>) {
    let _ = writeln!(Serial, "{line}");
}

/// Prints one line to the serial port.
macro_rules! line {
    ($($argument:tt)*) => { $crate::serial::print(format_args!($($argument)*)) };
}
pub(crate) use line;
