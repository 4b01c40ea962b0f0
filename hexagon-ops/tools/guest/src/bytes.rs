//! `memcpy`, `memmove` and `memset` against loops over bytes: every pair of places in two lines,
//! lengths around the edges, and the ends of mapped memory.

use core::ffi::c_void;
use core::fmt::{self, Write};
use core::ptr::{read_volatile, write_volatile};

use crate::scratch::Scratch;

/// Bytes of a buffer: two lines of places, the longest copy, and a line after it.
const BYTES: usize = 1024;
/// Places of the first byte.
const PLACES: usize = 256;
/// Bytes of a page, or of several.
const PAGE: usize = 1 << 16;

/// Lengths; their number has no factor in common with [`PLACES`] and [`TURNS`], so that every
/// number occurs with every place.
const LENGTHS: [usize; 41] = [
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 20, 24, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 136, 140,
    191, 255, 256, 257, 383, 384, 385, 511, 512, 600,
];
/// Lengths of each pair of places.
const TURNS: usize = 4;

unsafe extern "C" {
    fn memcpy(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void;
    fn memmove(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void;
    fn memset(to: *mut c_void, byte: i32, bytes: usize) -> *mut c_void;
}

/// A buffer that starts with a line.
#[repr(C, align(128))]
struct Buffer([u8; BYTES]);

static FROM: Scratch<Buffer> = Scratch::new(Buffer([0; BYTES]));
static HAVE: Scratch<Buffer> = Scratch::new(Buffer([0; BYTES]));
static WANT: Scratch<Buffer> = Scratch::new(Buffer([0; BYTES]));

/// A function to compare.
#[derive(Clone, Copy, Debug)]
enum Function {
    Copy,
    Move,
    Fill,
}

/// Numbers that look random.
struct Noise(u32);

impl Noise {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0.to_be_bytes()[0]
    }
}

/// Writes `value(i)` to each of `bytes` bytes from `to` on, the last one first if `from_end`.
///
/// # Safety
/// The bytes are valid for writes.
unsafe fn each(to: *mut u8, bytes: usize, from_end: bool, value: impl Fn(usize) -> u8) {
    for i in 0..bytes {
        let i = if from_end { bytes - 1 - i } else { i };
        // SAFETY: one of the caller's bytes. A volatile write, so that the compiler does not
        // replace the loop by a call of the function that is tested.
        unsafe { write_volatile(to.wrapping_add(i), value(i)) };
    }
}

/// Runs `function` and its loop, and returns `true` if all of the buffers agree.
///
/// # Safety
/// No reference to the statics of this file is alive.
unsafe fn agrees(function: Function, noise: &mut Noise, at: usize, from: usize, bytes: usize) -> bool {
    // SAFETY: this is the only reference.
    let [source, have, want] = [&FROM, &HAVE, &WANT].map(|buffer| unsafe { buffer.get() });
    let byte = noise.byte();
    source.0[from] = byte;
    have.0[at + bytes] = !byte;
    for (want, have) in want.0.iter_mut().zip(&have.0) {
        *want = *have;
    }
    let to = have.0.as_mut_ptr().wrapping_add(at);
    let loop_to = want.0.as_mut_ptr().wrapping_add(at);
    let start = match function {
        Function::Copy => source.0.as_ptr().wrapping_add(from),
        Function::Move | Function::Fill => have.0.as_ptr().wrapping_add(from),
    };
    let loop_start = match function {
        Function::Copy => start,
        Function::Move | Function::Fill => want.0.as_ptr().wrapping_add(from),
    };
    let returned = match function {
        // SAFETY: the last place plus the longest length is inside the buffer.
        Function::Copy => unsafe { memcpy(to.cast(), start.cast(), bytes) },
        // SAFETY: as above.
        Function::Move => unsafe { memmove(to.cast(), start.cast(), bytes) },
        // SAFETY: as above. Only the low byte counts.
        Function::Fill => unsafe { memset(to.cast(), i32::from(byte) | 0x1200, bytes) },
    };
    // SAFETY: a byte of the buffer; volatile as in `each`.
    let read = |i: usize| unsafe { read_volatile(loop_start.wrapping_add(i)) };
    // SAFETY: as above.
    unsafe {
        each(loop_to, bytes, from < at, |i| match function {
            Function::Fill => byte,
            Function::Copy | Function::Move => read(i),
        });
    }
    returned == to.cast() && have.0.iter().zip(&want.0).all(|(have, want)| have == want)
}

/// Copies and fills the first and the last bytes of a page between two that are not mapped; a byte
/// too far is a fault.
///
/// # Safety
/// `page` is mapped.
unsafe fn stay_inside(page: *mut u8) {
    // SAFETY: this is the only reference.
    let buffer = unsafe { HAVE.get() }.0.as_mut_ptr();
    for bytes in 0..=3 * 128 {
        for at in [page, page.wrapping_add(PAGE - bytes)] {
            for place in [0, 1, 4, 127] {
                let other = buffer.wrapping_add(place);
                // SAFETY: both sides have as many bytes.
                unsafe { memcpy(other.cast(), at.cast(), bytes) };
                // SAFETY: as above.
                unsafe { memcpy(at.cast(), other.cast(), bytes) };
            }
            // SAFETY: as above.
            unsafe { memset(at.cast(), 7, bytes) };
        }
        let shift = bytes / 2;
        let end = page.wrapping_add(PAGE - bytes);
        // SAFETY: the page has these bytes, and as many before them.
        unsafe { memmove(end.cast(), end.wrapping_sub(shift).cast(), bytes) };
        // SAFETY: as above; these are the bytes after those.
        unsafe { memmove(page.wrapping_add(shift).cast(), page.cast(), bytes) };
    }
}

/// Compares, and writes a line per function; `Err` after a difference, which is the last line.
///
/// # Safety
/// `map` maps and returns that many bytes, and `unmap` unmaps that many.
pub unsafe fn run(text: &mut dyn Write, map: impl Fn(usize) -> *mut u8, unmap: impl Fn(*mut u8, usize)) -> fmt::Result {
    let mut noise = Noise(1);
    for buffer in [&FROM, &HAVE] {
        // SAFETY: this is the only reference.
        unsafe { buffer.get() }.0.fill_with(|| noise.byte());
    }
    for function in [Function::Copy, Function::Move, Function::Fill] {
        let mut turn = 0;
        for at in 0..PLACES {
            for from in 0..PLACES {
                for _ in 0..TURNS {
                    let bytes = LENGTHS[turn % LENGTHS.len()];
                    turn += 1;
                    // SAFETY: no reference to the buffers is held here.
                    if !unsafe { agrees(function, &mut noise, at, from, bytes) } {
                        writeln!(text, "{function:?} of {bytes} bytes from {from} to {at} differs")?;
                        return Err(fmt::Error);
                    }
                }
            }
        }
        writeln!(text, "{function:?} {turn}")?;
    }
    let pages = map(3 * PAGE);
    unmap(pages, PAGE);
    unmap(pages.wrapping_add(2 * PAGE), PAGE);
    // SAFETY: the page in the middle is still mapped.
    unsafe { stay_inside(pages.wrapping_add(PAGE)) };
    writeln!(text, "Page {PAGE}")
}
