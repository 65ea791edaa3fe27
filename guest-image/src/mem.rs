//! The memory functions that compiled code calls and that a C library would provide.
//!
//! String instructions, because a loop could be compiled into a call of the very
//! function it implements.

use core::arch::asm;

/// Copies `len` bytes between areas that do not overlap.
///
/// # Safety
/// As C's `memcpy`: `src` is readable and `dest` writable for `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(dest: *mut u8, src: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both areas; the C ABI keeps the direction flag clear.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rdi") dest => _, inout("rsi") src => _,
             options(nostack, preserves_flags));
    }
    dest
}

/// Copies `len` bytes between areas that may overlap.
///
/// # Safety
/// As C's `memmove`: `src` is readable and `dest` writable for `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(dest: *mut u8, src: *const u8, len: usize) -> *mut u8 {
    if (dest as usize).wrapping_sub(src as usize) >= len {
        // SAFETY: `dest` is not inside the source, so an ascending copy reads each byte before
        // it writes over it; the caller vouches for both areas.
        return unsafe { memcpy(dest, src, len) };
    }
    // SAFETY: `dest` lies inside the source, so len > 0 and the copy goes downwards from the last
    // byte; the direction flag is clear again at the end.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") len => _,
             inout("rdi") dest.add(len - 1) => _, inout("rsi") src.add(len - 1) => _,
             options(nostack));
    }
    dest
}

/// Fills `len` bytes with the low byte of `value`.
///
/// # Safety
/// As C's `memset`: `dest` is writable for `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(dest: *mut u8, value: i32, len: usize) -> *mut u8 {
    // SAFETY: the caller vouches for the area; the C ABI keeps the direction flag clear.
    unsafe {
        asm!("rep stosb", inout("rcx") len => _, inout("rdi") dest => _, in("al") value as u8,
             options(nostack, preserves_flags));
    }
    dest
}

/// Compares `len` bytes; the sign of the result is that of the first difference.
///
/// # Safety
/// As C's `memcmp`: both areas are readable for `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, len: usize) -> i32 {
    for at in 0..len {
        // SAFETY: `at` is below `len`, for which the caller vouches. Volatile, so that the loop
        // is not recognised as a memcmp.
        let (l, r) = unsafe { (left.add(at).read_volatile(), right.add(at).read_volatile()) };
        if l != r {
            return i32::from(l) - i32::from(r);
        }
    }
    0
}

/// Compares `len` bytes; 0 means equal.
///
/// # Safety
/// As [`memcmp`].
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, len: usize) -> i32 {
    // SAFETY: same contract.
    unsafe { memcmp(left, right, len) }
}
