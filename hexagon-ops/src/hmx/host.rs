//! The matrix unit on the host: results within one unit in the last place, and checks that hardware
//! does not make.
//!
//! Products of two f16 are exact in f32; sums are f32 (the unit: 22 fraction bits and sticky).
//! Stores round to nearest even.
//!
//! SOURCE: against exact sums, f32 accumulation and the unit's own differ in under 1 % of outputs,
//! each by one f16 ulp (measured with a model of the documented accumulator, 2026-11-20).

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "calls code for a detected target feature")]
mod avx512;

use core::ops::Range;

use super::{Fault, Form, MAX_DEEP, ScaleBlock};
use crate::hvx::host::widen_f16;
use crate::hvx::{self, Kernel, widest};
use crate::layout::{Line, TILE_DIM, Tile};

/// 32 rows of 32 columns, f32.
type Matrix = [[f32; TILE_DIM]; TILE_DIM];

/// A matrix unit with its two accumulators.
#[derive(Debug)]
pub struct Hmx {
    form: Form,
    clips: bool,
    vtcm: Range<usize>,
    accumulators: Box<[Matrix; 2]>,
    current: usize,
    scale: ScaleBlock,
    fault: Option<Fault>,
}

/// Returns the address range of `bytes` bytes at `start`.
fn span<T>(start: *const T, bytes: usize) -> Range<usize> {
    let start = start.addr();
    start..start + bytes
}

impl Hmx {
    /// Returns a unit that accepts operands inside `vtcm` only.
    #[must_use]
    pub fn new(vtcm: &[Tile]) -> Self {
        Self::of_form(Form::Scaling, vtcm)
    }

    /// As [`Self::new`], for a unit of some form, or none.
    #[must_use]
    pub fn of_form(form: Form, vtcm: &[Tile]) -> Self {
        Self {
            form,
            clips: false,
            vtcm: span(vtcm.as_ptr(), size_of_val(vtcm)),
            accumulators: Box::new([[[0.0; TILE_DIM]; TILE_DIM]; 2]),
            current: 0,
            scale: form.unchanged(),
            fault: None,
        }
    }

    /// Makes stores clip results to less than 2, as a unit without scales does if it gets the
    /// control block of a unit with scales.
    #[must_use]
    pub fn clipping(mut self) -> Self {
        self.clips = true;
        self
    }

    /// Returns the form of the unit that computes the products. With [`Form::Vectors`], every
    /// method below is a fault.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// Makes the vector units compute all products from now on.
    pub fn leave_alone(&mut self) {
        self.form = Form::Vectors;
    }

    /// Remembers the first fault.
    fn fail(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }

    /// Returns `true` if a slice is in VTCM, and remembers a fault if not.
    fn check<T>(&mut self, operand: &[T]) -> bool {
        let operand = span(operand.as_ptr(), size_of_val(operand));
        let inside = self.vtcm.start <= operand.start && operand.end <= self.vtcm.end;
        if !inside {
            self.fail(Fault::OutsideVtcm);
        }
        inside
    }

    /// Sets both accumulators to zero: `mxclracc.hf`.
    pub fn clear(&mut self) {
        *self.accumulators = [[[0.0; TILE_DIM]; TILE_DIM]; 2];
    }

    /// Sets the scale of the following stores: `bias = mxmem2(Rs)`.
    pub fn load_scale(&mut self, block: &ScaleBlock) {
        if self.form == Form::RoundOnly && *block != ScaleBlock::ZERO {
            return self.fail(Fault::Control);
        }
        if self.check(core::slice::from_ref(block)) {
            self.scale = *block;
        }
    }

    /// Multiplies up to 32 tiles:
    /// `{ activation.hf = mxmem(Rs,Rt):deep; weight.hf = mxmem(Rs,Rt) }`.
    ///
    /// - `act`: 32 rows, tiles of K one after the other
    /// - `weights`: as many tiles of one strip
    pub fn multiply(&mut self, act: &[Tile], weights: &[Tile]) {
        if self.form == Form::Vectors {
            return self.fail(Fault::Missing);
        }
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
        #[cfg(target_arch = "x86_64")]
        if avx512::multiply(act, weights, accumulator) {
            return;
        }
        widest(Multiply {
            act,
            weights,
            accumulator,
        });
    }

    /// Stores the current accumulator and clears it; the other one becomes current:
    /// `mxmem(Rs,Rt):after.hf = acc`.
    pub fn store(&mut self, out: &mut Tile) {
        if !self.check(core::slice::from_ref(out)) {
            return;
        }
        let accumulator = &mut self.accumulators[self.current];
        let scale = match self.form {
            // The zero block of the older form leaves products unchanged.
            Form::RoundOnly => &ScaleBlock::ONE,
            Form::Scaling | Form::Vectors => &self.scale,
        };
        let overflow = widest(Store {
            accumulator,
            scale,
            out,
        });
        *accumulator = [[0.0; TILE_DIM]; TILE_DIM];
        if self.clips {
            let halves: &mut [[u16; 64]; TILE_DIM / 2] = bytemuck::cast_mut(out);
            for half in halves.as_flattened_mut() {
                // 0x3fff is the largest f16 below 2.
                *half = *half & 0x8000 | (*half & 0x7fff).min(0x3fff);
            }
        }
        self.current ^= 1;
        if overflow {
            self.fail(Fault::Overflow);
        }
    }

    /// Returns the first fault since the last call.
    pub fn take_fault(&mut self) -> Option<Fault> {
        self.fault.take()
    }
}

/// Returns the tile's elements (i, j) as rows of f32.
#[inline(always)]
fn unpack(tile: &Tile) -> Matrix {
    let mut out = [[0.0; TILE_DIM]; TILE_DIM];
    for (line, rows) in tile.0.iter().zip(out.as_chunks_mut::<2>().0) {
        let (even, odd) = widen_f16(hvx::load(line));
        *rows = [bytemuck::cast(even), bytemuck::cast(odd)];
    }
    out
}

/// Returns `true` if all elements are zero, so that these rows add nothing. When M is small, most
/// of a tile is such rows.
#[inline(always)]
fn is_zero(rows: &[[f32; TILE_DIM]]) -> bool {
    (rows.as_flattened().iter()).fold(0, |bits, x| bits | x.to_bits() << 1) == 0
}

/// Arguments of `accumulator += act · weights`, tile by tile.
struct Multiply<'a> {
    act: &'a [Tile],
    weights: &'a [Tile],
    accumulator: &'a mut Matrix,
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (act, weights) in self.act.iter().zip(self.weights) {
            let (act, weights) = (unpack(act), unpack(weights));
            let sums = self.accumulator.as_chunks_mut::<ROWS>().0;
            for (act, sums) in act.as_chunks::<ROWS>().0.iter().zip(sums) {
                if is_zero(act) {
                    continue;
                }
                for n in (0..TILE_DIM).step_by(COLUMNS) {
                    multiply_block(act, &weights, n, sums);
                }
            }
        }
    }
}

/// Rows and columns whose sums stay in registers: 8 vectors of 8 f32.
const ROWS: usize = 4;
const COLUMNS: usize = 16;

/// Returns the sums of a few rows in the columns that start at `n`.
#[inline(always)]
fn multiply_block(
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
                // The product of two f16 is exact in f32, so fusing does not change a bit.
                block[r][c] = act[r][k].mul_add(weights[n + c], block[r][c]);
            }
        }
    }
    for (block, sums) in block.iter().zip(sums) {
        sums[n..n + COLUMNS].copy_from_slice(block);
    }
}

/// Arguments of converting and storing an accumulator. The output is `true` if a result left FP16's
/// range.
struct Store<'a> {
    accumulator: &'a Matrix,
    scale: &'a ScaleBlock,
    out: &'a mut Tile,
}

impl Kernel for Store<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        // Each word of the block holds a scale and a bias.
        let words: &[Line; 2] = bytemuck::cast_ref(self.scale);
        let (scale, bias) = widen_f16(hvx::load(&words[0]));
        let mut overflow = false;
        for (line, [even, odd]) in self
            .out
            .0
            .iter_mut()
            .zip(self.accumulator.as_chunks::<2>().0)
        {
            let [even, odd] = [even, odd].map(hvx::load_f32);
            let even = hvx::add_f32(hvx::mul_f32(even, scale), bias);
            let odd = hvx::add_f32(hvx::mul_f32(odd, scale), bias);
            hvx::store(line, hvx::narrow_f32(even, odd));
            let halves: &[u16; 64] = bytemuck::cast_ref(line);
            overflow |= halves.iter().any(|half| half & 0x7fff >= 0x7c00);
        }
        overflow
    }
}
