//! The vector work between the products of a chunk. Every kernel reads and writes whole lines in VTCM.
//!
//! A matrix for the unit is two FP16 tiles of each 32 × 32 elements: the rounded elements, and what rounding left. Line p of a
//! tile has rows 2p and 2p + 1, so that kernels take two tokens at a time.

use super::TOKENS;
use super::unit::{Halves, HalvesMut};
use crate::hvx::{self, Accumulator, Vector, larger_f16, larger_f32, mul_f32, splat_f32, sub_f32};
use crate::layout::{Line, TILE_DIM, Tile};
use crate::ops::square::{GROUP, Gathered, columns};

/// f16 1.0.
const ONE: u16 = 0x3c00;
/// Lines of a row with a column for each token.
pub(super) const TOKEN_LINES: usize = TOKENS / TILE_DIM;

/// Rows with a column for each token.
pub(super) type TokenRows = [[Line; TOKEN_LINES]; TOKENS];
/// A number for each token.
pub(super) type PerToken = [f32; TOKENS];

/// Returns two rows as f16, and as f16 what that leaves of them.
#[inline(always)]
fn split(a: Vector, b: Vector) -> (Vector, Vector) {
    let high = hvx::narrow_f32(a, b);
    let (x, y) = hvx::widen_mul_f16(high, hvx::splat_h(ONE));
    (high, hvx::narrow_f32(sub_f32(a, x), sub_f32(b, y)))
}

/// Returns the two rows of a line.
#[inline(always)]
fn join(high: Vector, low: &Line) -> (Vector, Vector) {
    let sums = Accumulator::widen_mul(high, hvx::splat_h(ONE));
    let (a, b) = Accumulator::add_f16(sums, hvx::load(low));
    (a.to_f32(), b.to_f32())
}

/// Returns `largest` after two more rows.
#[inline(always)]
fn larger(largest: Vector, a: Vector, b: Vector) -> Vector {
    larger_f32(larger_f32(largest, a), b)
}

/// Splits rows of `L` lines.
pub(super) struct SplitRows<'a, const L: usize> {
    pub(super) rows: &'a [[Line; L]],
    pub(super) to: HalvesMut<'a>,
    /// Tiles from 32 rows to the next, and from 32 columns to the next.
    pub(super) steps: [usize; 2],
    /// Receives the largest magnitudes, beside those that it has.
    pub(super) largest: &'a mut Line,
}

impl<const L: usize> hvx::Kernel for SplitRows<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest);
        for (block, rows) in self.rows.as_chunks::<TILE_DIM>().0.iter().enumerate() {
            for column in 0..L {
                let tile = block * self.steps[0] + column * self.steps[1];
                let (high, low) = (&mut self.to.high[tile], &mut self.to.low[tile]);
                let lines = high.0.iter_mut().zip(&mut low.0);
                for ([even, odd], (high, low)) in rows.as_chunks::<2>().0.iter().zip(lines) {
                    let (a, b) = (hvx::load(&even[column]), hvx::load(&odd[column]));
                    largest = larger(largest, a, b);
                    let (x, y) = split(a, b);
                    hvx::store(high, x);
                    hvx::store(low, y);
                }
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Splits the columns of 32 gathered rows.
pub(super) struct SplitColumns<'a> {
    pub(super) gathered: &'a Gathered,
    pub(super) high: &'a mut Tile,
    pub(super) low: &'a mut Tile,
}

impl hvx::Kernel for SplitColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let high = self.high.0.as_chunks_mut::<{ GROUP / 2 }>().0.iter_mut();
        let low = self.low.0.as_chunks_mut::<{ GROUP / 2 }>().0.iter_mut();
        for (group, (high, low)) in high.zip(low).enumerate() {
            let columns = columns(self.gathered, group);
            let pairs = columns.as_chunks::<2>().0.iter();
            for ([a, b], (high, low)) in pairs.zip(high.iter_mut().zip(low)) {
                let (x, y) = split(*a, *b);
                hvx::store(high, x);
                hvx::store(low, y);
            }
        }
    }
}

/// Turns products of keys and queries with keys into how much each token's change of the state weighs for later ones.
pub(super) struct Weigh<'a> {
    pub(super) key_products: Halves<'a>,
    pub(super) query_products: Halves<'a>,
    /// The decay of each token, and the factor of its change.
    pub(super) decays: &'a PerToken,
    pub(super) betas: &'a PerToken,
    /// The unit matrix.
    pub(super) unit: &'a [Line; TILE_DIM],
    /// Receives, negated, what the keys of a token read of the changes of earlier ones.
    pub(super) reads: &'a mut TokenRows,
    /// Receives what the queries of a token read of the changes up to its own.
    pub(super) weights: HalvesMut<'a>,
    /// Receives the decay from each token to the last one.
    pub(super) late: &'a mut [Line; TOKEN_LINES],
}

impl hvx::Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // The decay from each earlier token to the current one.
        let mut decay = [hvx::splat_w(0); TOKEN_LINES];
        let units = self.unit.as_chunks::<2>().0;
        let numbers = self
            .decays
            .as_chunks::<2>()
            .0
            .iter()
            .zip(self.betas.as_chunks::<2>().0);
        let rows = self.reads.as_chunks_mut::<2>().0.iter_mut().zip(numbers);
        for (pair, ([even, odd], ([e0, e1], [b0, b1]))) in rows.enumerate() {
            let (block, line) = (pair / units.len(), pair % units.len());
            let [u0, u1] = units[line].each_ref().map(hvx::load);
            for (column, decay) in decay.iter_mut().enumerate() {
                let tile = block * TOKEN_LINES + column;
                let keys = |of: &Halves<'_>| {
                    join(hvx::load(&of.high[tile].0[line]), &of.low[tile].0[line])
                };
                let (k0, k1) = keys(&self.key_products);
                let (q0, q1) = keys(&self.query_products);
                let before = mul_f32(*decay, splat_f32(*e0));
                hvx::store(
                    &mut even[column],
                    mul_f32(mul_f32(before, k0), splat_f32(-b0)),
                );
                let own = if column == block { u0 } else { hvx::splat_w(0) };
                let with = hvx::or(before, own);
                let p0 = mul_f32(with, q0);
                let before = mul_f32(with, splat_f32(*e1));
                hvx::store(
                    &mut odd[column],
                    mul_f32(mul_f32(before, k1), splat_f32(-b1)),
                );
                let own = if column == block { u1 } else { hvx::splat_w(0) };
                *decay = hvx::or(before, own);
                let (x, y) = split(p0, mul_f32(*decay, q1));
                hvx::store(&mut self.weights.high[tile].0[line], x);
                hvx::store(&mut self.weights.low[tile].0[line], y);
            }
        }
        for (late, decay) in self.late.iter_mut().zip(decay) {
            hvx::store(late, decay);
        }
    }
}

/// Inverts the unit matrix less strictly lower triangular rows, row by row.
pub(super) struct Invert<'a> {
    pub(super) rows: &'a TokenRows,
    pub(super) unit: &'a [Line; TILE_DIM],
    pub(super) inverse: &'a mut TokenRows,
}

impl hvx::Kernel for Invert<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (t, row) in self.rows.iter().enumerate() {
            let (done, rest) = self.inverse.split_at_mut(t);
            let Some(out) = rest.first_mut() else { return };
            let numbers: &PerToken = bytemuck::cast_ref(row);
            let unit = hvx::load(&self.unit[t % TILE_DIM]);
            let (first, second) = done.split_at(t.min(TILE_DIM));
            let (early, late) = numbers.split_at(TILE_DIM);
            let start = if t < TILE_DIM { unit } else { hvx::splat_w(0) };
            // Two sums, each with a name: exchanged, they would be copied, and a qfloat value is never.
            let (mut even, mut odd) = (Accumulator::from_f32(start), Accumulator::zero());
            let (pairs, last) = first.as_chunks::<2>();
            for ([one, two], [a, b]) in pairs.iter().zip(early.as_chunks::<2>().0) {
                even = even.mul_add(hvx::load(&one[0]), splat_f32(*a));
                odd = odd.mul_add(hvx::load(&two[0]), splat_f32(*b));
            }
            if let ([done], Some(number)) = (last, early.get(first.len() - last.len())) {
                even = even.mul_add(hvx::load(&done[0]), splat_f32(*number));
            }
            let mut sum = even.plus(odd);
            let start = if t < TILE_DIM { hvx::splat_w(0) } else { unit };
            let mut other = Accumulator::from_f32(start);
            for (done, number) in second.iter().zip(late) {
                let number = splat_f32(*number);
                sum = sum.mul_add(hvx::load(&done[0]), number);
                other = other.mul_add(hvx::load(&done[1]), number);
            }
            hvx::store(&mut out[0], sum.to_f32());
            hvx::store(&mut out[1], other.to_f32());
        }
    }
}

/// Writes `beta · (v - decay · old)` for what the keys read of the state before the chunk, `old`.
pub(super) struct Want<'a, const L: usize> {
    pub(super) values: &'a [[Line; L]; TOKENS],
    pub(super) old: Halves<'a>,
    /// The decay from the state before the chunk to each token.
    pub(super) decays: &'a PerToken,
    pub(super) betas: &'a PerToken,
    pub(super) to: HalvesMut<'a>,
    /// Receive the largest magnitudes of `values` and of what is written, beside those that they have.
    pub(super) largest: [&'a mut Line; 2],
    /// Receives those of `old`, as f16.
    pub(super) largest_product: &'a mut Line,
}

impl<const L: usize> hvx::Kernel for Want<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [mut of_values, mut of_results] = self.largest.each_ref().map(|line| hvx::load(line));
        let mut of_old = hvx::load(self.largest_product);
        let pairs = self.values.as_chunks::<2>().0.iter();
        let numbers = self
            .decays
            .as_chunks::<2>()
            .0
            .iter()
            .zip(self.betas.as_chunks::<2>().0);
        for (pair, ([v0, v1], ([e0, e1], [b0, b1]))) in pairs.zip(numbers).enumerate() {
            let (block, line) = (pair / 16, pair % 16);
            let [e0, e1, b0, b1] = [*e0, *e1, *b0, *b1].map(splat_f32);
            for column in 0..L {
                let tile = block * L + column;
                let high = hvx::load(&self.old.high[tile].0[line]);
                of_old = larger_f16(of_old, high);
                let (r0, r1) = join(high, &self.old.low[tile].0[line]);
                let (v0, v1) = (hvx::load(&v0[column]), hvx::load(&v1[column]));
                of_values = larger(of_values, v0, v1);
                let a = mul_f32(sub_f32(v0, mul_f32(r0, e0)), b0);
                let b = mul_f32(sub_f32(v1, mul_f32(r1, e1)), b1);
                of_results = larger(of_results, a, b);
                let (x, y) = split(a, b);
                let tile = column * TOKEN_LINES + block;
                hvx::store(&mut self.to.high[tile].0[line], x);
                hvx::store(&mut self.to.low[tile].0[line], y);
            }
        }
        let [values, results] = self.largest;
        hvx::store(values, of_values);
        hvx::store(results, of_results);
        hvx::store(self.largest_product, of_old);
    }
}

/// Splits the changes of the state: as they are, and as they are after the last token.
pub(super) struct SplitChanges<'a> {
    pub(super) changes: Halves<'a>,
    /// Number of 32 columns.
    pub(super) strips: usize,
    pub(super) late: &'a PerToken,
    pub(super) to: HalvesMut<'a>,
    pub(super) late_to: HalvesMut<'a>,
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for SplitChanges<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest);
        for (pair, [l0, l1]) in self.late.as_chunks::<2>().0.iter().enumerate() {
            let (block, line) = (pair / 16, pair % 16);
            let (l0, l1) = (splat_f32(*l0), splat_f32(*l1));
            for column in 0..self.strips {
                let tile = block * self.strips + column;
                let high = hvx::load(&self.changes.high[tile].0[line]);
                let (a, b) = join(high, &self.changes.low[tile].0[line]);
                largest = larger(largest, a, b);
                let tile = column * TOKEN_LINES + block;
                let (x, y) = split(a, b);
                hvx::store(&mut self.to.high[tile].0[line], x);
                hvx::store(&mut self.to.low[tile].0[line], y);
                let (x, y) = split(mul_f32(a, l0), mul_f32(b, l1));
                hvx::store(&mut self.late_to.high[tile].0[line], x);
                hvx::store(&mut self.late_to.low[tile].0[line], y);
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Writes the outputs as rows: `scale · (decay · old + new)` for each token.
pub(super) struct Outputs<'a, const L: usize> {
    pub(super) old: Halves<'a>,
    pub(super) new: Halves<'a>,
    /// The decay from the state before the chunk to each token.
    pub(super) decays: &'a PerToken,
    pub(super) scale: f32,
    pub(super) to: &'a mut [[Line; L]; TOKENS],
    pub(super) largest_product: &'a mut Line,
}

impl<const L: usize> hvx::Kernel for Outputs<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest_product);
        let scale = splat_f32(self.scale);
        let pairs = self.to.as_chunks_mut::<2>().0.iter_mut();
        for (pair, ([even, odd], [e0, e1])) in pairs.zip(self.decays.as_chunks::<2>().0).enumerate()
        {
            let (block, line) = (pair / 16, pair % 16);
            let (e0, e1) = (splat_f32(e0 * self.scale), splat_f32(e1 * self.scale));
            for column in 0..L {
                let tile = block * L + column;
                let high = hvx::load(&self.old.high[tile].0[line]);
                let (a, b) = join(high, &self.old.low[tile].0[line]);
                largest = larger_f16(largest, high);
                let high = hvx::load(&self.new.high[tile].0[line]);
                let (c, d) = join(high, &self.new.low[tile].0[line]);
                largest = larger_f16(largest, high);
                let (a, b) = (Accumulator::product(a, e0), Accumulator::product(b, e1));
                hvx::store(&mut even[column], a.mul_add(c, scale).to_f32());
                hvx::store(&mut odd[column], b.mul_add(d, scale).to_f32());
            }
        }
        hvx::store(self.largest_product, largest);
    }
}

/// Multiplies rows by a factor, and adds a product.
pub(super) struct Renew<'a, const L: usize> {
    pub(super) rows: &'a mut [[Line; L]],
    pub(super) factor: f32,
    pub(super) add: Halves<'a>,
    pub(super) largest_product: &'a mut Line,
}

impl<const L: usize> hvx::Kernel for Renew<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest_product);
        let factor = splat_f32(self.factor);
        for (pair, [even, odd]) in self.rows.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (block, line) = (pair / 16, pair % 16);
            for column in 0..L {
                let tile = block * L + column;
                let high = hvx::load(&self.add.high[tile].0[line]);
                largest = larger_f16(largest, high);
                let (a, b) = join(high, &self.add.low[tile].0[line]);
                let (x, y) = (hvx::load(&even[column]), hvx::load(&odd[column]));
                let (a, b) = (Accumulator::from_f32(a), Accumulator::from_f32(b));
                hvx::store(&mut even[column], a.mul_add(x, factor).to_f32());
                hvx::store(&mut odd[column], b.mul_add(y, factor).to_f32());
            }
        }
        hvx::store(self.largest_product, largest);
    }
}
