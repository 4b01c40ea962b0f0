//! CUMSUM and SSM_CONV: sums along a row, and of a window that moves over rows.

use crate::error::{Error, Result};
use crate::hvx::{self, Vector};
use crate::ops::elementwise::{load, same_shape};
use crate::ops::tensor::{
    CHUNK, Chunk, FUNCTION, Row, SCALAR, Source, Type, View, ViewMut, row_packets,
};
use crate::rt::Engine;

mod running;
mod window;

/// Sums each element and all before it, in ggml's order: one sum in f32 along a row.
///
/// # Errors
/// `Operand` unless source and result are floats of one shape.
pub fn cumulate(engine: &Engine, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    same_shape(&dst.shape, src)?;
    let n = dst.shape.ne[0];
    if let Source::Apart(view) = src
        && running::is_summed(&dst.shape, &view.shape)
    {
        let packets = || row_packets(n, FUNCTION);
        dst.for_parts(engine, packets, |part| {
            part.for_each_run(|run| running::sum_run(run, view));
        });
        return Ok(());
    }
    let packets = || row_packets(n, SCALAR);
    dst.for_rows(engine, packets, |mut row| {
        let (mut chunk, mut out): (Chunk, Chunk) = ([0.0; CHUNK], [0.0; CHUNK]);
        let (n, mut sum) = (row.len(), 0.0);
        for start in (0..n).step_by(CHUNK) {
            let elems = src.read(&row, start..n.min(start + CHUNK), &mut chunk);
            for (out, x) in out.iter_mut().zip(elems) {
                sum += x;
                *out = sum;
            }
            let len = elems.len();
            row.write(start, &out[..len]);
        }
    });
    Ok(())
}

/// Longest window, in elements, whose vectors of taps are made by exchanging lanes.
const TAPS: usize = 4;

/// The arguments of [`convolve`] for one token of one sequence: a row of channels.
struct ConvolveRow<'a> {
    row: Row<'a>,
    input: &'a View<'a>,
    weights: &'a View<'a>,
}

/// Returns the four columns of a matrix with 32 rows.
#[inline(always)]
fn columns(rows: &[f32; 32 * TAPS]) -> [Vector; TAPS] {
    let lanes: &[[f32; 32]; TAPS] = bytemuck::cast_ref(rows);
    let [a, b, c, d] = lanes.each_ref().map(hvx::load_f32);
    let ((even, odd), (even_rest, odd_rest)) = (hvx::deal_w(a, b), hvx::deal_w(c, d));
    let ((first, third), (second, fourth)) =
        (hvx::deal_w(even, even_rest), hvx::deal_w(odd, odd_rest));
    [first, second, third, fourth]
}

impl ConvolveRow<'_> {
    /// Writes the sums of the first channels if windows of four elements follow each other without
    /// gaps, as those of a single token do; returns the number of channels.
    #[inline(always)]
    fn by_columns(&mut self) -> usize {
        let (n, [_, sequence, _], first) = (self.row.len(), self.row.at, self.row.first);
        if self.weights.shape.ne[0] != TAPS {
            return 0;
        }
        let input = self.input.float_rows([first, sequence, 0], n);
        let weights = self.weights.float_rows([first, 0, 0], n);
        let (Some((x, TAPS)), Some((w, TAPS)), Some(out)) = (input, weights, self.row.floats())
        else {
            return 0;
        };
        let (x, w, out) = (x.as_chunks().0, w.as_chunks().0, out.as_chunks_mut().0);
        for ((x, w), out) in x.iter().zip(w).zip(&mut *out) {
            let (x, w) = (columns(x), columns(w));
            let mut sum = hvx::splat_w(0);
            for (x, w) in x.into_iter().zip(w) {
                sum = hvx::add_f32(sum, hvx::mul_f32(x, w));
            }
            hvx::store_f32(out, sum);
        }
        32 * out.len()
    }
}

impl hvx::Kernel for ConvolveRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let done = self.by_columns();
        let (channels, [token, sequence, _]) = (self.row.len(), self.row.at);
        let taps = self.weights.shape.ne[0];
        for start in (done..channels).step_by(CHUNK) {
            let len = CHUNK.min(channels - start);
            let mut sums: Chunk = [0.0; CHUNK];
            for tap in 0..taps {
                let (mut x, mut w): (Chunk, Chunk) = ([0.0; CHUNK], [0.0; CHUNK]);
                for (i, (x, w)) in x.iter_mut().zip(&mut w).enumerate().take(len) {
                    let channel = self.row.first + start + i;
                    *x = self.input.element(token + tap, [channel, sequence, 0]);
                    *w = self.weights.element(tap, [channel, 0, 0]);
                }
                for (k, sum) in sums.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                    let product = hvx::mul_f32(load(&x, 32 * k), load(&w, 32 * k));
                    hvx::store_f32(sum, hvx::add_f32(hvx::load_f32(sum), product));
                }
            }
            self.row.write(start, &sums[..len]);
        }
    }
}

/// Computes `dst[s][t][c] = sum over k of src0[s][c][t + k] · src1[c][k]`. The window has as many
/// elements as a row of src1.
///
/// # Errors
/// `Operand` unless all are f32, and shapes are as above.
pub fn convolve(engine: &Engine, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    let (input, weights) = (src[0].apart()?, src[1].apart()?);
    let ([channels, tokens, sequences, d3], i, w) =
        (dst.shape.ne, input.shape.ne, weights.shape.ne);
    let types = [dst.shape.dtype, input.shape.dtype, weights.shape.dtype];
    let window = w[0].checked_add(tokens).is_some_and(|n| n - 1 == i[0]);
    let shapes = i[1..] == [channels, sequences, 1] && w[1..] == [channels, 1, 1] && d3 == 1;
    if types != [Type::F32; 3] || !window || !shapes {
        return Err(Error::Operand);
    }
    let (input, weights) = (&input, &weights);
    let Some(dst) = window::convolve(engine, dst, [input, weights]) else {
        return Ok(());
    };
    let packets = || match (i[0], w[0]) {
        (TAPS, TAPS) => row_packets(channels, 2 * FUNCTION),
        (_, taps) => row_packets(channels, taps.saturating_mul(2 * SCALAR)),
    };
    dst.for_row_parts(engine, packets, |row| {
        hvx::widest(ConvolveRow {
            row,
            input,
            weights,
        });
    });
    Ok(())
}
