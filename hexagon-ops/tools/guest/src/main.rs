//! A program without an operating system's library that qemu-hexagon runs.
//!
//! Reads requests of four lines from standard input: a line whose first words are a number and a
//! scalar, then three vectors. A number of `ops.rs` is answered with two lines; [`BENCH`] and
//! [`WHOLE`] with tables of packet counts, as text; [`MULTIPLY`] with 64 x 64 f32; [`COPY`] with
//! the functions that were compared, as text; [`ROWS`] with the result of the case that the scalar
//! names; [`STEPS`] with the packets of a step, as text.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch, stdarch_hexagon)]

mod bench;
mod bytes;
mod compare;
mod conventional;
mod models;
mod multiply;
mod nan;
mod ops;
#[cfg(feature = "replay")]
mod replay;
mod rows;
mod samples;
mod scratch;
mod steps;
mod threads;
mod tiles;
mod together;
mod whole;

use core::arch::{asm, global_asm};

use hexagon_ops::hvx;
use hexagon_ops::layout::Line;

use crate::scratch::Scratch;

/// Request number of the packet counts.
const BENCH: i32 = -1;
/// Request number of a multiplication on the matrix unit, which no available emulator has.
const MULTIPLY: i32 = -2;
/// Request number of the packet counts of whole operations.
const WHOLE: i32 = -4;
/// Request number of random commands on several threads.
const TOGETHER: i32 = -6;
/// Request number of the packets of steps.
const STEPS: i32 = -9;
/// Request number of an operation on tensors.
const ROWS: i32 = -5;
/// Request number of the comparison of `memcpy`, `memmove` and `memset` with loops.
const COPY: i32 = -3;

/// Request number of the dequantizers of the comparison.
const CONVENTIONAL: i32 = -7;
/// Request number of the exponentials of the comparison.
const EXPONENTIALS: i32 = -8;
/// Request number of a panel's tiles; the panel follows the request.
const TILES: i32 = -10;
/// Request number of products of a row that is not finite.
const NAN: i32 = -11;

/// Request number of a recorded graph, which follows the request.
#[cfg(feature = "replay")]
const REPLAY: i32 = -12;

static ARENA: Scratch<rows::Arena> = Scratch::new(rows::Arena {
    src: [[Line::ZERO; rows::LINES]; 3],
    dst: [Line::ZERO; rows::LINES],
});

// Linux aligns the stack of a process to 8 bytes, but spilled vectors need 128.
global_asm!(
    ".globl _start",
    "_start:",
    "{{ r29 = and(r29, #-128) }}",
    "{{ call {main} }}",
    main = sym main,
);

/// Linux system call with three arguments, and for `mmap` three more: a private mapping without a
/// file.
///
/// # Safety
/// The kernel may use memory as the call specifies.
unsafe fn syscall(number: usize, a: usize, b: usize, c: usize) -> isize {
    const MAP_PRIVATE_ANONYMOUS: usize = 0x22;
    let result;
    // SAFETY: the caller guarantees the system call; trap0(#1) preserves every register but r0.
    unsafe {
        asm!("{{ trap0(#1) }}", in("r6") number, inlateout("r0") a => result, in("r1") b, in("r2") c,
            in("r3") MAP_PRIVATE_ANONYMOUS, in("r4") usize::MAX, in("r5") 0);
    }
    result
}

/// Ends the program.
fn exit(code: usize) -> ! {
    loop {
        // SAFETY: exit_group touches no memory.
        unsafe { syscall(94, code, 0, 0) };
    }
}

/// Fills `to` from standard input; false at its end.
fn read(to: &mut [u8]) -> bool {
    let mut at = 0;
    while at < to.len() {
        let rest = &mut to[at..];
        // SAFETY: the kernel writes at most `rest.len()` bytes to `rest`.
        let count = unsafe { syscall(63, 0, rest.as_mut_ptr() as usize, rest.len()) };
        match usize::try_from(count) {
            Ok(count) if count > 0 => at += count,
            _ => return false,
        }
    }
    true
}

/// Writes `from` to standard output.
fn write(from: &[u8]) {
    let mut at = 0;
    while at < from.len() {
        let rest = &from[at..];
        // SAFETY: the kernel reads at most `rest.len()` bytes of `rest`.
        let count = unsafe { syscall(64, 1, rest.as_ptr() as usize, rest.len()) };
        match usize::try_from(count) {
            Ok(count) if count > 0 => at += count,
            _ => exit(3),
        }
    }
}

/// Standard output as text.
struct Output;

impl core::fmt::Write for Output {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        write(text.as_bytes());
        Ok(())
    }
}

/// Returns new memory, zeroed.
fn map(bytes: usize) -> *mut u8 {
    const READ_WRITE: usize = 3;
    // SAFETY: the memory is new, so nothing else uses it.
    unsafe { syscall(222, 0, bytes, READ_WRITE) as *mut u8 }
}

/// Compares `memcpy`, `memmove` and `memset` with loops; ends the program after a difference.
fn compare_bytes() {
    // SAFETY: `bytes::run` does not use memory that it has unmapped.
    let unmap = |at: *mut u8, bytes: usize| {
        let _ = unsafe { syscall(215, at as usize, bytes, 0) };
    };
    // SAFETY: the closures map and unmap as many bytes as they are asked for.
    if unsafe { bytes::run(&mut Output, map, unmap) }.is_err() {
        exit(4);
    }
}

extern "C" fn main() -> ! {
    let mut request = [Line::ZERO; 4];
    while read(bytemuck::cast_slice_mut(&mut request)) {
        let words: &[i32; 32] = bytemuck::cast_ref(&request[0]);
        if words[0] == BENCH {
            bench::run(&mut |text| write(text.as_bytes()));
            continue;
        }
        if words[0] == WHOLE {
            whole::run(&mut |text| write(text.as_bytes()), &map, words[1]);
            continue;
        }
        if words[0] == TOGETHER {
            let [threads, commands, seed] = [words[1], words[2], words[3]].map(i32::cast_unsigned);
            together::run(&mut Output, &map, threads as usize, commands, seed);
            continue;
        }
        if words[0] == ROWS {
            // SAFETY: the only reference to ARENA.
            let arena = unsafe { ARENA.get() };
            if rows::compute(words[1] as usize, arena).is_err() {
                exit(5);
            }
            write(bytemuck::cast_slice(&arena.dst));
            continue;
        }
        if words[0] == STEPS {
            steps::run(&mut Output, words[1] as usize);
            continue;
        }
        if words[0] == COPY {
            compare_bytes();
            continue;
        }
        if words[0] == CONVENTIONAL {
            if !compare::dequantize(words[1].cast_unsigned(), &mut |bytes| write(bytes)) {
                exit(6);
            }
            continue;
        }
        if words[0] == EXPONENTIALS {
            compare::exponentials(&mut |bytes| write(bytes));
            continue;
        }
        if words[0] == TILES {
            if !tiles::run(words[1] as usize, &mut |to| read(to), &mut |bytes| {
                write(bytes)
            }) {
                exit(7);
            }
            continue;
        }
        if words[0] == NAN {
            if !nan::run(words[1].cast_unsigned(), &mut |bytes| write(bytes)) {
                exit(8);
            }
            continue;
        }
        #[cfg(feature = "replay")]
        if words[0] == REPLAY {
            if replay::run(&mut Output, &map, &mut |to| read(to)).is_none() {
                exit(9);
            }
            continue;
        }
        if words[0] == MULTIPLY {
            multiply::run(&mut |bytes| write(bytes));
            continue;
        }
        let vectors = [
            hvx::load(&request[1]),
            hvx::load(&request[2]),
            hvx::load(&request[3]),
        ];
        let (first, second) = ops::run(words[0] as usize, vectors, words[1]);
        let mut answer = [Line::ZERO; 2];
        hvx::store(&mut answer[0], first);
        hvx::store(&mut answer[1], second);
        write(bytemuck::cast_slice(&answer));
    }
    exit(0)
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(101)
}
