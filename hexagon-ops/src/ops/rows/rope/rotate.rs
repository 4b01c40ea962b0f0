//! Rotation of rows of f32, from memory to memory.

use super::angles::AngleTable;
use super::{RopePairs, Turning};
use crate::hvx::{self, Vector};
use crate::ops::elementwise::put;
use crate::ops::rows::load;

/// Rows of f32 that follow each other, and the table of their token. Each kind is a separate
/// kernel, so that the loop over rows can use all registers.
pub(super) struct RotateRows<'a, 't, const IN_PLACE: bool> {
    pub(super) turning: &'a Turning<'a>,
    pub(super) table: &'a AngleTable<'t>,
    /// The source's rows, and the elements from one to the next.
    pub(super) from: (&'a [f32], usize),
    /// The result's rows, and the elements from one to the next.
    pub(super) to: (&'a mut [f32], usize),
    /// Elements of a row, and the number of rows.
    pub(super) n: usize,
    pub(super) count: usize,
}

impl<const IN_PLACE: bool> hvx::Kernel for RotateRows<'_, '_, IN_PLACE> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let ((x, from_step), (out, step), n) = (self.from, self.to, self.n);
        let rows = out.chunks_mut(step.max(n)).take(self.count).enumerate();
        for (i, out) in rows {
            let x = if IN_PLACE {
                &[]
            } else {
                &x[i * from_step..][..n]
            };
            self.turning
                .rotate::<IN_PLACE>(self.table, x, &mut out[..n]);
        }
    }
}

/// [`RotateRows`] of which every element is rotated, in pairs of halves, 32 pairs of all rows at a
/// time: their angles stay in registers, and the loop has few conditions. If halves are not whole
/// vectors, the last 32 pairs overlap the ones before them, which is possible only if rows are not
/// rotated in place.
pub(super) struct RotateHalves<'a, 't, const IN_PLACE: bool>(
    pub(super) RotateRows<'a, 't, IN_PLACE>,
);

impl<const IN_PLACE: bool> hvx::Kernel for RotateHalves<'_, '_, IN_PLACE> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let ((x, from_step), (out, step), n) = (self.0.from, self.0.to, self.0.n);
        let half = n / 2;
        let mut pair = 0;
        while pair < half {
            let first = pair.min(half - 32);
            let angles = (
                vector(&self.0.table.cosine[..], first),
                vector(&self.0.table.sine[..], first),
            );
            let (Some(c), Some(s)) = angles else { return };
            let turn = (hvx::load_f32(c), hvx::load_f32(s));
            let rows = out.get_mut(first..).unwrap_or_default();
            let mut sources = x.get(first..).unwrap_or_default().chunks(from_step.max(n));
            for out in rows.chunks_mut(step.max(n)).take(self.0.count) {
                let x = match IN_PLACE {
                    true => &*out,
                    false => sources.next().unwrap_or_default(),
                };
                let (Some(x0), Some(x1)) = (vector(x, 0), vector(x, half)) else {
                    return;
                };
                let (y0, y1) = rotate(turn, hvx::load_f32(x0), hvx::load_f32(x1));
                let Some((low, high)) = out.split_at_mut_checked(half) else {
                    return;
                };
                if let (Some(low), Some(high)) = (low.first_chunk_mut(), high.first_chunk_mut()) {
                    hvx::store_f32(low, y0);
                    hvx::store_f32(high, y1);
                }
            }
            pair += 32;
        }
    }
}

/// Returns 32 elements starting at `at`, if there are as many.
#[inline(always)]
fn vector(elems: &[f32], at: usize) -> Option<&[f32; 32]> {
    elems.get(at..)?.first_chunk()
}

/// [`RotateRows`] of which every element is rotated, in pairs of neighbours, 32 pairs at a time.
pub(super) struct RotateAdjacent<'a, 't, const IN_PLACE: bool>(
    pub(super) RotateRows<'a, 't, IN_PLACE>,
);

impl<const IN_PLACE: bool> hvx::Kernel for RotateAdjacent<'_, '_, IN_PLACE> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let ((x, from_step), (out, step), n) = (self.0.from, self.0.to, self.0.n);
        let groups = n / 64;
        let cosines = &self.0.table.cosine.as_chunks::<32>().0[..groups];
        let sines = &self.0.table.sine.as_chunks::<32>().0[..groups];
        for i in 0..self.0.count {
            let Some(out) = out.get_mut(i * step..i * step + n) else {
                return;
            };
            let x = match IN_PLACE {
                true => &[],
                false => x.get(i * from_step..i * from_step + n).unwrap_or_default(),
            };
            let x = x.as_chunks::<64>().0;
            for (g, out) in out.as_chunks_mut::<64>().0.iter_mut().enumerate() {
                let out: &mut [[f32; 32]; 2] = bytemuck::cast_mut(out);
                let pair = match IN_PLACE {
                    true => &*out,
                    false => match x.get(g) {
                        Some(x) => bytemuck::cast_ref(x),
                        None => return,
                    },
                };
                let (x0, x1) = hvx::deal_w(hvx::load_f32(&pair[0]), hvx::load_f32(&pair[1]));
                let turn = (hvx::load_f32(&cosines[g]), hvx::load_f32(&sines[g]));
                let (y0, y1) = rotate(turn, x0, x1);
                let (low, high) = hvx::interleave_w(y0, y1);
                hvx::store_f32(&mut out[0], low);
                hvx::store_f32(&mut out[1], high);
            }
        }
    }
}

/// Rows of f32 that follow each other, rotated into rows of f16 without gaps.
pub(super) struct RotateNarrow<'a, 't> {
    pub(super) pairs: RopePairs,
    pub(super) table: &'a AngleTable<'t>,
    /// The source's rows, and the elements from one to the next.
    pub(super) from: (&'a [f32], usize),
    pub(super) to: &'a mut [u8],
    /// Elements of a row.
    pub(super) n: usize,
}

impl RotateNarrow<'_, '_> {
    /// Returns `true` if rows of `n` elements, all of them rotated, are whole vectors of f16, and
    /// so are the parts that form pairs.
    pub(super) fn takes(pairs: RopePairs, n: usize) -> bool {
        n == 64
            || match pairs {
                RopePairs::Halves => n.is_multiple_of(128),
                RopePairs::Adjacent => n.is_multiple_of(64),
            }
    }
}

impl hvx::Kernel for RotateNarrow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let ((x, step), n) = (self.from, self.n);
        let cosines = self.table.cosine.as_chunks::<32>().0;
        let sines = self.table.sine.as_chunks::<32>().0;
        let angle = |group: usize| {
            let (c, s) = (cosines.get(group)?, sines.get(group)?);
            Some((hvx::load_f32(c), hvx::load_f32(s)))
        };
        let vectors = n / 64;
        for (i, out) in self.to.chunks_exact_mut(2 * n).enumerate() {
            let x = x.get(i * step..).unwrap_or_default().as_chunks::<32>().0;
            let Some(x) = x.get(..2 * vectors) else {
                return;
            };
            let out = out.as_chunks_mut::<128>().0;
            if self.pairs == RopePairs::Adjacent || vectors == 1 {
                for (g, (out, x)) in out.iter_mut().zip(x.as_chunks::<2>().0).enumerate() {
                    let Some(turn) = angle(g) else { return };
                    let [first, second] = [hvx::load_f32(&x[0]), hvx::load_f32(&x[1])];
                    let (even, odd) = if self.pairs == RopePairs::Adjacent {
                        // The elements of a pair are neighbours in the result, too.
                        let (x0, x1) = hvx::deal_w(first, second);
                        rotate(turn, x0, x1)
                    } else {
                        let (low, high) = rotate(turn, first, second);
                        hvx::deal_w(low, high)
                    };
                    hvx::store_bytes(out, hvx::narrow_f32(even, odd));
                }
                continue;
            }
            let (x0, x1) = x.split_at(vectors);
            let pairs = x0.as_chunks::<2>().0.iter().zip(x1.as_chunks::<2>().0);
            let (low, high) = out.split_at_mut(vectors / 2);
            let outs = low.iter_mut().zip(high);
            for (g, ((low, high), (x0, x1))) in outs.zip(pairs).enumerate() {
                let (Some(a), Some(b)) = (angle(2 * g), angle(2 * g + 1)) else {
                    return;
                };
                let (low_a, high_a) = rotate(a, hvx::load_f32(&x0[0]), hvx::load_f32(&x1[0]));
                let (low_b, high_b) = rotate(b, hvx::load_f32(&x0[1]), hvx::load_f32(&x1[1]));
                let (even, odd) = hvx::deal_w(low_a, low_b);
                hvx::store_bytes(low, hvx::narrow_f32(even, odd));
                let (even, odd) = hvx::deal_w(high_a, high_b);
                hvx::store_bytes(high, hvx::narrow_f32(even, odd));
            }
        }
    }
}

impl Turning<'_> {
    /// Rotates a row of f32: that of `out`, or `x` into it.
    #[inline(always)]
    fn rotate<const IN_PLACE: bool>(&self, table: &AngleTable<'_>, x: &[f32], out: &mut [f32]) {
        let (rope, half) = (self.rope, self.rope.n_pairs());
        let end = rope.first + 2 * half;
        if !IN_PLACE {
            hvx::copy_f32(&mut out[..rope.first], x);
            hvx::copy_f32(&mut out[end..], &x[end..]);
        }
        let out = &mut out[rope.first..end];
        let x = x.get(rope.first..end).unwrap_or_default();
        let cosines = table.cosine.as_chunks::<32>().0;
        let angles = cosines.iter().zip(table.sine.as_chunks::<32>().0);
        let done = half / 32 * 32;
        match rope.pairs {
            RopePairs::Halves => {
                let (low, high) = out.split_at_mut(half);
                let (x0, x1) = x.split_at(half.min(x.len()));
                let (x0, x1) = (x0.as_chunks::<32>().0, x1.as_chunks::<32>().0);
                let lows = low.as_chunks_mut::<32>().0.iter_mut();
                let pairs = lows.zip(high.as_chunks_mut::<32>().0).zip(angles);
                for (i, ((low, high), (c, s))) in pairs.enumerate() {
                    let (x0, x1) = if IN_PLACE {
                        (hvx::load_f32(low), hvx::load_f32(high))
                    } else {
                        (hvx::load_f32(&x0[i]), hvx::load_f32(&x1[i]))
                    };
                    let (y0, y1) = rotate((hvx::load_f32(c), hvx::load_f32(s)), x0, x1);
                    hvx::store_f32(low, y0);
                    hvx::store_f32(high, y1);
                }
            }
            RopePairs::Adjacent => {
                let x = x.as_chunks::<64>().0;
                let pairs = out.as_chunks_mut::<64>().0.iter_mut().zip(angles);
                for (i, (out, (c, s))) in pairs.enumerate() {
                    let x: &[[f32; 32]; 2] =
                        bytemuck::cast_ref(if IN_PLACE { &*out } else { &x[i] });
                    let (x0, x1) = hvx::deal_w(hvx::load_f32(&x[0]), hvx::load_f32(&x[1]));
                    let (y0, y1) = rotate((hvx::load_f32(c), hvx::load_f32(s)), x0, x1);
                    let (low, high) = hvx::interleave_w(y0, y1);
                    let out: &mut [[f32; 32]; 2] = bytemuck::cast_mut(out);
                    hvx::store_f32(&mut out[0], low);
                    hvx::store_f32(&mut out[1], high);
                }
            }
        }
        if done < half {
            self.rotate_rest::<IN_PLACE>(table, x, out, done);
        }
    }

    /// Rotates the pairs starting at `done`, fewer than 32; `x` and `out` are only the elements
    /// that are rotated.
    #[inline(always)]
    fn rotate_rest<const IN_PLACE: bool>(
        &self,
        table: &AngleTable<'_>,
        x: &[f32],
        out: &mut [f32],
        done: usize,
    ) {
        let half = out.len() / 2;
        let x = if IN_PLACE { &*out } else { x };
        let turn = (load(&table.cosine[..], done), load(&table.sine[..], done));
        match self.rope.pairs {
            RopePairs::Halves => {
                let (y0, y1) = rotate(turn, load(x, done), load(x, half + done));
                put(y0, &mut out[done..half], half - done);
                put(y1, &mut out[half + done..], half - done);
            }
            RopePairs::Adjacent => {
                let (x0, x1) = hvx::deal_w(load(x, 2 * done), load(x, 2 * done + 32));
                let (y0, y1) = rotate(turn, x0, x1);
                let (low, high) = hvx::interleave_w(y0, y1);
                for (out, y) in out[2 * done..].chunks_mut(32).zip([low, high]) {
                    put(y, out, out.len());
                }
            }
        }
    }
}

/// Returns the pairs rotated by angles with cosines `c` and sines `s`.
#[inline(always)]
pub(super) fn rotate((c, s): (Vector, Vector), x0: Vector, x1: Vector) -> (Vector, Vector) {
    (
        hvx::sub_f32(hvx::mul_f32(x0, c), hvx::mul_f32(x1, s)),
        hvx::add_f32(hvx::mul_f32(x0, s), hvx::mul_f32(x1, c)),
    )
}
