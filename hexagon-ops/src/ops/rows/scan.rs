//! CUMSUM and SSM_CONV: sums along a row, and of a window that moves over rows.

use crate::error::{Error, Result};
use crate::hvx;
use crate::ops::elementwise::{load, same_shape};
use crate::ops::tensor::{CHUNK, Chunk, Row, Source, Type, View, ViewMut};
use crate::rt::Engine;

/// Sums each element and all before it, in ggml's order: one sum in f32 along a row.
///
/// # Errors
/// `Operand` unless source and result are floats of one shape.
pub fn cumulate(engine: &Engine, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    same_shape(&dst.shape, src)?;
    dst.for_rows(engine, |mut row| {
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

/// The arguments of [`convolve`] for one token of one sequence: a row of channels.
struct ConvolveRow<'a> {
    row: Row<'a>,
    input: &'a View<'a>,
    weights: &'a View<'a>,
}

impl hvx::Kernel for ConvolveRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (channels, [token, sequence, _]) = (self.row.len(), self.row.at);
        let taps = self.weights.shape.ne[0];
        for start in (0..channels).step_by(CHUNK) {
            let len = CHUNK.min(channels - start);
            let mut sums: Chunk = [0.0; CHUNK];
            for tap in 0..taps {
                let (mut x, mut w): (Chunk, Chunk) = ([0.0; CHUNK], [0.0; CHUNK]);
                for (i, (x, w)) in x.iter_mut().zip(&mut w).enumerate().take(len) {
                    *x = self.input.element(token + tap, [start + i, sequence, 0]);
                    *w = self.weights.element(tap, [start + i, 0, 0]);
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
    dst.for_rows(engine, |row| {
        hvx::widest(ConvolveRow {
            row,
            input,
            weights,
        });
    });
    Ok(())
}
