//! Random commands in a session of several threads, compared with a session of one thread.

use core::fmt::Write;

use bytemuck::Zeroable;
use hexagon_ops::layout::WeightType;
use hexagon_ops::wire::{self, Command, Tensor, TensorOp};

use crate::whole::{ARENA_BYTES, Arena, FIRST, INDEX, MASK, POSITIONS, RESULT, SECOND, VTCM_BYTES, WEIGHTS, attention, product, tensor};

/// Commands that a session executes; then another one is started.
const COMMANDS_OF_A_SESSION: u32 = 50;
/// Place of the numbers of cells.
const NAMES: u64 = INDEX + 4096;
/// Most elements of a result.
const MAX_ELEMENTS: usize = 16 << 10;

/// A small generator.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as u32
    }

    fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }
}

/// Writes a line with the number of commands that gave the same bytes, and a line for each that did
/// not.
pub fn run(
    text: &mut dyn Write,
    map: &dyn Fn(usize) -> *mut u8,
    threads: usize,
    commands: u32,
    seed: u32,
) {
    let mut rng = Rng(u64::from(seed));
    let Some(mut alone) = Arena::new(0, 1, map) else {
        let _ = writeln!(text, "no session of one thread");
        return;
    };
    fill(alone.start, &mut rng);
    let (mut same, mut left) = (0, commands);
    // Both runs use the same memory for operands and results.
    let (arena, vtcm) = (alone.start, map(VTCM_BYTES));
    let second = |bytes| match bytes {
        ARENA_BYTES => arena,
        VTCM_BYTES => vtcm,
        bytes => map(bytes),
    };
    while left > 0 {
        let Some(mut together) = Arena::new(1, threads, &second) else {
            let _ = writeln!(text, "no session of {threads} threads");
            return;
        };
        for _ in 0..left.min(COMMANDS_OF_A_SESSION) {
            left -= 1;
            let (name, command, bytes) = command(&mut rng);
            let sums = [&mut alone, &mut together].map(|host| {
                clear(host.start, bytes);
                host.submit(command).map(|_| sum(host.start, bytes))
            });
            match sums {
                [Some(a), Some(b)] if a == b => same += 1,
                _ => {
                    let _ = writeln!(text, "{name}, {bytes} bytes: {:x?}", sums);
                }
            }
        }
    }
    let _ = writeln!(text, "{same} same");
}

/// Returns a random command, its name and the bytes of its result.
fn command(rng: &mut Rng) -> (&'static str, Command, usize) {
    use wire::{TYPE_F16 as F16, TYPE_F32 as F32, TYPE_I32 as I32};
    // Some rows are so long that the threads divide their columns.
    let longest = [32, 32, 32 * 12][rng.below(3)];
    let n = 32 * (1 + rng.below(longest)) + [0, 0, 4, 17][rng.below(4)];
    let rows = 1 + rng.below((MAX_ELEMENTS / n).min(40));
    let matrix = |offset| tensor(F32, offset, [n, rows, 1, 1]);
    let op = |name, kernel, params: &[(usize, u32)], dst: Tensor, src: &[Tensor]| {
        let mut op = TensorOp {
            kernel,
            dst,
            ..Zeroable::zeroed()
        };
        params.iter().for_each(|(at, word)| op.params[*at] = *word);
        op.src[..src.len()].copy_from_slice(src);
        let bytes = (dst.nb[1] * u64::from(dst.ne[1])) as usize;
        (name, Command::new(0, &op), bytes)
    };
    let [a, b, out] = [FIRST, SECOND, RESULT].map(matrix);
    match rng.below(14) {
        0 => op("add", wire::KERNEL_ADD, &[], out, &[a, b]),
        1 => op("mul", wire::KERNEL_MUL, &[], out, &[a, b]),
        2 => op("swiglu", wire::KERNEL_SWIGLU, &[], out, &[a, b]),
        3 => {
            let weights = tensor(F32, SECOND, [n, 1, 1, 1]);
            op("rms_norm", wire::KERNEL_RMS_NORM, &[(0, 1e-6_f32.to_bits())], out, &[a, weights])
        }
        4 => {
            let scale = (0, 0.5_f32.to_bits());
            op("soft_max", wire::KERNEL_SOFT_MAX, &[scale], out, &[a])
        }
        5 => {
            let half = tensor(F16, RESULT, [n, rows, 1, 1]);
            op("copy", wire::KERNEL_COPY, &[], half, &[a])
        }
        6 => {
            let tokens = 1 + rng.below(4);
            let heads = tensor(F32, FIRST, [64, 16, tokens, 1]);
            let out = Tensor {
                offset: RESULT,
                ..heads
            };
            let params = [
                (1, 64),
                (2, 2),
                (5, 1e4_f32.to_bits()),
                (6, 1_f32.to_bits()),
                (8, 1_f32.to_bits()),
                (9, 32_f32.to_bits()),
                (10, 1_f32.to_bits()),
            ];
            let positions = tensor(I32, INDEX, [tokens, 1, 1, 1]);
            let (name, command, _) = op("rope", wire::KERNEL_ROPE, &params, out, &[heads, positions]);
            (name, command, 4 * 64 * 16 * tokens)
        }
        7 => {
            let tokens = 1 + rng.below(12);
            let heads = tensor(F32, FIRST, [64, 16, tokens, 1]);
            let cells = tensor(F16, RESULT, [64, 16, 16, 1]);
            let params = [
                (1, 64),
                (2, 2),
                (5, 1e4_f32.to_bits()),
                (6, 1_f32.to_bits()),
                (8, 1_f32.to_bits()),
                (9, 32_f32.to_bits()),
                (10, 1_f32.to_bits()),
            ];
            let positions = tensor(I32, INDEX, [tokens, 1, 1, 1]);
            let names = tensor(I32, NAMES + 4 * rng.below(4) as u64, [tokens, 1, 1, 1]);
            let (name, command, _) = op("rope_set_rows", wire::KERNEL_ROPE_SET_ROWS, &params, cells, &[heads, positions, names]);
            (name, command, 2 * 64 * 16 * 16)
        }
        8 => {
            let tokens = 1 + rng.below(12);
            let cells = tensor(F16, RESULT, [512, 16, 1, 1]);
            let names = tensor(I32, NAMES + 4 * rng.below(4) as u64, [tokens, 1, 1, 1]);
            op("set_rows", wire::KERNEL_SET_ROWS, &[], cells, &[tensor(F32, FIRST, [512, tokens, 1, 1]), names])
        }
        9 => {
            let channels = n.div_ceil(4);
            let [x, w] = [FIRST, SECOND].map(|offset| tensor(F32, offset, [4, channels, 1, 1]));
            let row = tensor(F32, RESULT, [channels, 1, 1, 1]);
            op("ssm_conv", wire::KERNEL_SSM_CONV, &[], row, &[x, w])
        }
        10 => {
            let [x, y] = [FIRST, SECOND].map(|offset| tensor(F32, offset, [n, rows.div_ceil(2), 1, 1]));
            let joined = tensor(F32, RESULT, [n, 2 * rows.div_ceil(2), 1, 1]);
            op("concat", wire::KERNEL_CONCAT, &[(0, 1)], joined, &[x, y])
        }
        11 | 12 => {
            let m = 1 + rng.below(2);
            let [k, n] = [(); 2].map(|()| 256 * (1 + rng.below(3)));
            let weight = [WeightType::Q4_0, WeightType::Q8_0, WeightType::Mxfp4][rng.below(3)];
            ("mul_mat", product(weight, [m, k, n], FIRST), 4 * m * n)
        }
        _ => {
            let heads = [1, 4, 8][rng.below(3)];
            let job = attention(0, F16, 64, [heads, 1, 1]);
            ("attention", Command::new(0, &job), 4 * 64 * heads)
        }
    }
}

/// Fills the operands: small floats, small halves in weights and masks, small positions.
fn fill(arena: *mut u8, rng: &mut Rng) {
    let mut words = |offset: u64, bytes: usize, word: &mut dyn FnMut(u32) -> u32| {
        for at in 0..bytes / 4 {
            // SAFETY: inside the arena, which the loop does not use now.
            let place = unsafe { arena.add(offset as usize).cast::<u32>().add(at) };
            // SAFETY: as above.
            unsafe { place.write(word(rng.next())) };
        }
    };
    // Halves of either sign from 2^-3 to 1; scales of packed weights can be such halves, too.
    words(WEIGHTS, 2 << 20, &mut |random| random & 0x8fff_8fff | 0x3000_3000);
    words(MASK, 2 * POSITIONS, &mut |random| random & 0x83ff_83ff | 0x3000_3000);
    // Floats of either sign from 2^-1 to 2, whose two halves are also finite f16.
    words(FIRST, 4 * MAX_ELEMENTS, &mut |random| random & 0x80ff_efff | 0x3f00_0000);
    words(SECOND, 4 * MAX_ELEMENTS, &mut |random| random & 0x80ff_efff | 0x3f00_0000);
    words(INDEX, 64, &mut |random| random & 1023);
    // Cells of a ring of 16 cells.
    let mut cell = 10;
    words(NAMES, 64, &mut |_| {
        cell = (cell + 1) % 16;
        cell
    });
}

/// Overwrites the result, so that an element that nothing writes shows.
fn clear(arena: *mut u8, bytes: usize) {
    // SAFETY: inside the arena, which the loop does not use now.
    unsafe { arena.add(RESULT as usize).write_bytes(0xa5, bytes) };
}

/// Returns a checksum of the result.
fn sum(arena: *mut u8, bytes: usize) -> u64 {
    (0..bytes / 2).fold(0, |sum: u64, at| {
        // SAFETY: inside the arena, which the loop does not use now.
        let place = unsafe { arena.add(RESULT as usize).cast::<u16>().add(at) };
        // SAFETY: as above.
        let half = unsafe { place.read() };
        (sum ^ u64::from(half)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
