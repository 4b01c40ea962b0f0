//! TIMESTEP_EMBEDDING: cosines and sines of a time at frequencies that fall by the same factor.

use super::math::{scalar, sin_cos};
use super::tensor::{CHUNK, Chunk, FUNCTION, Row, Source, Type, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::hvx;
use crate::rt::Engine;

/// Writes the row of one time.
struct EmbedRow<'a, 'b> {
    row: &'a mut Row<'b>,
    time: f32,
    /// Quotient of successive frequencies; the first frequency is 1.
    factor: f64,
}

impl hvx::Kernel for EmbedRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let half = self.row.len() / 2;
        let mut frequency = 1.0;
        for start in (0..half).step_by(CHUNK) {
            let len = CHUNK.min(half - start);
            let (mut angles, mut sines): (Chunk, Chunk) = ([0.0; CHUNK], [0.0; CHUNK]);
            for angle in &mut angles[..len] {
                // Rounded twice, as in ggml: the frequency first, then the product.
                #[expect(clippy::cast_possible_truncation, reason = "see above")]
                let rounded = frequency as f32;
                *angle = self.time * rounded;
                frequency *= self.factor;
            }
            let (angles_32, _) = angles.as_chunks_mut();
            let (sines_32, _) = sines.as_chunks_mut();
            for (angle, sine) in angles_32.iter_mut().zip(sines_32) {
                let (sin, cos) = sin_cos(hvx::load_f32(angle));
                hvx::store_f32(angle, cos);
                hvx::store_f32(sine, sin);
            }
            self.row.write(start, &angles[..len]);
            self.row.write(half + start, &sines[..len]);
        }
        let written = 2 * half;
        self.row.clear(written..self.row.len());
    }
}

/// Writes, for each time t of the source, `cos(t · f[j])`, then `sin(t · f[j])`, with
/// `f[j] = period^(-j / half)` for the first half of the row, then 0 if the row has an odd length.
///
/// # Errors
/// `Operand` unless the source is a row of f32, the result a matrix of floats with a row for each
/// element, and the period at least 1.
pub fn embed_times(engine: &Engine, period: i32, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let times: View<'_> = src.apart()?;
    let [dim, rows, ..] = dst.shape.ne;
    let fits = times.shape.dtype == Type::F32
        && dst.shape.dtype.is_float()
        && times.shape.ne == [rows, 1, 1, 1]
        && dst.shape.ne[2..] == [1, 1];
    if !fits || period < 1 {
        return Err(Error::Operand);
    }
    // CAST: exact, a row has less than 2^32 elements.
    let half = (dim / 2).max(1) as f64;
    let factor = scalar::exp(-scalar::ln(f64::from(period)) / half);
    let packets = || row_packets(dim, 2 * FUNCTION);
    dst.for_rows(engine, packets, |mut row| {
        let time = times.element(row.at[0], [0; 3]);
        hvx::widest(EmbedRow {
            row: &mut row,
            time,
            factor,
        });
    });
    Ok(())
}
