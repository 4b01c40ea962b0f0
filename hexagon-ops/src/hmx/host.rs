//! The matrix unit on the host: the same results to within one unit in the last place, and the checks it does not make.
//!
//! Products of two f16 are exact in f32; sums are f32 (the unit: 22 fraction bits and sticky). Stores round to nearest even.
//!
//! SOURCE: against exact sums, f32 accumulation and the unit's own differ in under 1 % of outputs, each by one f16 ulp
//! (measured with a model of the documented accumulator, 2026-11-20).

use core::ops::Range;

use super::{Fault, MAX_DEEP, ScaleBlock};
use crate::hvx::{Kernel, f16, widest};
use crate::layout::{TILE_DIM, Tile};

/// 32 rows of 32 columns.
type Matrix = [[f32; TILE_DIM]; TILE_DIM];

/// One matrix unit.
#[derive(Debug)]
pub struct Hmx {
    vtcm: Range<usize>,
    accumulators: Box<[Matrix; 2]>,
    current: usize,
    scale: ScaleBlock,
    fault: Option<Fault>,
}

/// Address range of `bytes` bytes at `start`.
fn span<T>(start: *const T, bytes: usize) -> Range<usize> {
    let start = start.addr();
    start..start + bytes
}

impl Hmx {
    /// A unit that accepts operands inside `vtcm` only.
    #[must_use]
    pub fn new(vtcm: &[Tile]) -> Self {
        Self {
            vtcm: span(vtcm.as_ptr(), size_of_val(vtcm)),
            accumulators: Box::new([[[0.0; TILE_DIM]; TILE_DIM]; 2]),
            current: 0,
            scale: ScaleBlock::ONE,
            fault: None,
        }
    }

    /// Remembers the first fault.
    fn fail(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// Whether a slice lies in VTCM.
    fn check<T>(&mut self, operand: &[T]) -> bool {
        let operand = span(operand.as_ptr(), size_of_val(operand));
        let inside = self.vtcm.start <= operand.start && operand.end <= self.vtcm.end;
        if !inside {
            self.fail(Fault::OutsideVtcm);
        }
        inside
    }

    /// Both accumulators become zero: `mxclracc.hf`.
    pub fn clear(&mut self) {
        *self.accumulators = [[[0.0; TILE_DIM]; TILE_DIM]; 2];
    }

    /// Sets the scale of the following stores: `bias = mxmem2(Rs)`.
    pub fn load_scale(&mut self, block: &ScaleBlock) {
        if self.check(core::slice::from_ref(block)) {
            self.scale = *block;
        }
    }

    /// Multiplies up to 32 tiles: `{ activation.hf = mxmem(Rs,Rt):deep; weight.hf = mxmem(Rs,Rt) }`.
    ///
    /// - `act`: 32 rows, tiles of K one after the other
    /// - `weights`: as many tiles of one strip
    pub fn multiply(&mut self, act: &[Tile], weights: &[Tile]) {
        if act.len() != weights.len() || !(1..=MAX_DEEP).contains(&act.len()) {
            return self.fail(Fault::Deep {
                act: act.len(),
                weights: weights.len(),
            });
        }
        if !self.check(act) || !self.check(weights) {
            return;
        }
        let accumulator = &mut self.accumulators[self.current];
        widest(Multiply {
            act,
            weights,
            accumulator,
        });
    }

    /// Stores the current accumulator and clears it; the other one becomes current: `mxmem(Rs,Rt):after.hf = acc`.
    pub fn store(&mut self, out: &mut Tile) {
        if !self.check(core::slice::from_ref(out)) {
            return;
        }
        let accumulator = &mut self.accumulators[self.current];
        let overflow = widest(Store {
            accumulator,
            scale: &self.scale,
            out,
        });
        *accumulator = [[0.0; TILE_DIM]; TILE_DIM];
        self.current ^= 1;
        if overflow {
            self.fail(Fault::Overflow);
        }
    }

    /// The first fault since the last call.
    pub fn take_fault(&mut self) -> Option<Fault> {
        self.fault.take()
    }
}

/// The tile's elements (i, j) as rows of f32.
#[inline(always)]
fn unpack(tile: &Tile) -> Matrix {
    let words: &[[u32; TILE_DIM]; TILE_DIM / 2] = bytemuck::cast_ref(tile);
    let mut out = [[0.0; TILE_DIM]; TILE_DIM];
    for (line, [even, odd]) in words.iter().zip(out.as_chunks_mut::<2>().0) {
        for j in 0..TILE_DIM {
            even[j] = f16::word_to_f32(line[j] & 0xffff);
            odd[j] = f16::word_to_f32(line[j] >> 16);
        }
    }
    out
}

/// `accumulator += act · weights`, tile by tile.
struct Multiply<'a> {
    act: &'a [Tile],
    weights: &'a [Tile],
    accumulator: &'a mut Matrix,
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        for (act, weights) in self.act.iter().zip(self.weights) {
            let (act, weights) = (unpack(act), unpack(weights));
            let sums = self.accumulator.as_chunks_mut::<ROWS>().0;
            for (act, sums) in act.as_chunks::<ROWS>().0.iter().zip(sums) {
                // Rows past the last one are zero; most of a tile is when M is small.
                if act.as_flattened().iter().all(|x| *x == 0.0) {
                    continue;
                }
                for n in (0..TILE_DIM).step_by(COLUMNS) {
                    multiply_block::<FUSED>(act, &weights, n, sums);
                }
            }
        }
    }
}

/// Rows and columns whose sums stay in registers: 8 vectors of 8 f32.
const ROWS: usize = 4;
const COLUMNS: usize = 16;

/// The sums of a few rows and of the columns from `n` on.
#[inline(always)]
fn multiply_block<const FUSED: bool>(
    act: &[[f32; TILE_DIM]; ROWS],
    weights: &Matrix,
    n: usize,
    sums: &mut [[f32; TILE_DIM]; ROWS],
) {
    let mut block = [[0.0; COLUMNS]; ROWS];
    for (block, sums) in block.iter_mut().zip(&*sums) {
        block.copy_from_slice(&sums[n..n + COLUMNS]);
    }
    for (k, weights) in weights.iter().enumerate() {
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                // The product of two f16 is exact in f32, so fusing would not change a bit.
                block[r][c] = if FUSED {
                    act[r][k].mul_add(weights[n + c], block[r][c])
                } else {
                    act[r][k] * weights[n + c] + block[r][c]
                };
            }
        }
    }
    for (block, sums) in block.iter().zip(sums) {
        sums[n..n + COLUMNS].copy_from_slice(block);
    }
}

/// Converts and stores an accumulator; whether any result left FP16's range.
struct Store<'a> {
    accumulator: &'a Matrix,
    scale: &'a ScaleBlock,
    out: &'a mut Tile,
}

impl Kernel for Store<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<const FUSED: bool>(self) -> bool {
        let mut scales = [0.0; TILE_DIM];
        let mut biases = [0.0; TILE_DIM];
        for ((word, scale), bias) in self.scale.0.iter().zip(&mut scales).zip(&mut biases) {
            let [a, b, c, d] = word.to_le_bytes();
            *scale = f16::to_f32(u16::from_le_bytes([a, b]));
            *bias = f16::to_f32(u16::from_le_bytes([c, d]));
        }
        let words: &mut [[u32; TILE_DIM]; TILE_DIM / 2] = bytemuck::cast_mut(self.out);
        let mut largest = 0;
        for (line, [even, odd]) in words.iter_mut().zip(self.accumulator.as_chunks::<2>().0) {
            for j in 0..TILE_DIM {
                let low = u32::from(f16::from_f32(even[j] * scales[j] + biases[j]));
                let high = u32::from(f16::from_f32(odd[j] * scales[j] + biases[j]));
                largest = largest.max(low & 0x7fff).max(high & 0x7fff);
                line[j] = low | high << 16;
            }
        }
        largest >= 0x7c00
    }
}
