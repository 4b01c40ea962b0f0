//! Mixture of experts (ggml's MUL_MAT_ID): each row of activations is multiplied by the matrices
//! that its token chose.
//!
//! ```text
//! for each expert that at least one token chose
//!   list the rows that chose it              (token, slot) -> starts of activations and results
//!   multiply these rows by its matrix        as any other product: its weights are read once for all
//! ```

use super::driver::{Dots, Machine, MatMul, RowStarts};
use crate::error::{Error, Result};
use crate::layout::{LINE_BYTES, Line, MatrixLayout};

/// The products `dst[token][slot] = act[token][slot] · w[ids[token][slot]]` with f32 activations
/// and results.
#[derive(Debug)]
pub struct ExpertMatMul<'a> {
    /// Layout of each expert's weights.
    pub layout: MatrixLayout,
    /// The packed weights of all experts, one after the other, in DDR.
    pub weights: &'a [Line],
    /// Rows of one expert for which dot products are used, as in [`MatMul`].
    pub dots: Dots,
    /// Chosen experts, `n_slots` per token.
    pub ids: &'a [i32],
    /// Experts that a token chooses.
    pub n_slots: usize,
    /// Activations; a row is K elements.
    pub act: &'a [f32],
    /// Elements from one token's and from one slot's activations to the next; 0 for slots that
    /// share them.
    pub act_strides: [usize; 2],
    /// Results; a row is N elements. Elements outside the rows keep their values.
    pub dst: &'a mut [f32],
    /// Elements from one token's and from one slot's results to the next.
    pub dst_strides: [usize; 2],
}

/// Returns the start of row `row`, which is a pair (token, slot).
fn start(row: usize, n_slots: usize, [token_stride, slot_stride]: [usize; 2]) -> usize {
    let token = (row / n_slots).saturating_mul(token_stride);
    token.saturating_add((row % n_slots).saturating_mul(slot_stride))
}

impl ExpertMatMul<'_> {
    /// Computes all products.
    ///
    /// - `scratch`: twice as many elements as `ids`
    ///
    /// # Errors
    /// `Index` if an id names no expert; `Length` if `scratch` or `weights` does not fit; else as
    /// [`MatMul::run`].
    pub fn run(self, mut machine: Machine<'_>, scratch: &mut [usize]) -> Result<()> {
        let expert_lines = self.layout.matrix_bytes() / LINE_BYTES;
        let n_experts = self.weights.len() / expert_lines.max(1);
        let limit = i32::try_from(n_experts).unwrap_or(i32::MAX);
        if let Some(id) = self.ids.iter().find(|id| !(0..limit).contains(*id)) {
            let index = usize::try_from(*id).unwrap_or(usize::MAX);
            return Err(Error::Index {
                what: "expert",
                index,
                limit: n_experts,
            });
        }
        let want = 2 * self.ids.len();
        if scratch.len() != want {
            return Err(Error::Length {
                what: "scratch",
                have: scratch.len(),
                want,
            });
        }
        let (act_starts, dst_starts) = scratch.split_at_mut(self.ids.len());
        for (id, weights) in (0..limit).zip(self.weights.chunks(expert_lines.max(1))) {
            let mut m = 0;
            for (row, _) in self
                .ids
                .iter()
                .enumerate()
                .filter(|(_, chosen)| **chosen == id)
            {
                act_starts[m] = start(row, self.n_slots, self.act_strides);
                dst_starts[m] = start(row, self.n_slots, self.dst_strides);
                m += 1;
            }
            let product = MatMul {
                layout: self.layout,
                weights,
                m,
                dots: self.dots,
                act: self.act,
                act_rows: RowStarts::Listed(&act_starts[..m]),
                dst: &mut *self.dst,
                dst_rows: RowStarts::Listed(&dst_starts[..m]),
                epilogue: None,
            };
            product.run(machine.reborrow())?;
        }
        Ok(())
    }
}
