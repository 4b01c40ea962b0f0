//! Cells that the mask of attention does not hide from all queries.

use std::borrow::Cow;

use half::f16;

use super::Operand;
use crate::rockchip::plan::Attention;

/// The cells that some query sees, for each plane of the mask.
pub(super) struct Seen {
    /// Planes of a sequence, and sequences.
    planes: [usize; 2],
    /// `cells` elements of each plane.
    cells: Vec<bool>,
}

impl Seen {
    /// Reads each plane of a mask once.
    pub(super) fn new(plan: &Attention, mask: &Operand) -> Self {
        let [_, _, of_heads, of_sequences] = mask.tensor.shape.ne;
        let mut cells = vec![false; of_sequences * of_heads * plan.cells];
        for (plane, seen) in cells.chunks_exact_mut(plan.cells).enumerate() {
            for query in 0..plan.queries {
                let row = mask.row([query, plane % of_heads, plane / of_heads], plan.cells);
                for (seen, bits) in seen.iter_mut().zip(row.as_chunks().0) {
                    *seen |= u16::from_le_bytes(*bits) != f16::NEG_INFINITY.to_bits();
                }
            }
        }
        Self {
            planes: [of_heads, of_sequences],
            cells,
        }
    }

    /// Returns the cells that any query sees of the heads that share one of keys and values.
    pub(super) fn of(&self, plan: &Attention, head: usize, sequence: usize) -> Cow<'_, [bool]> {
        let [of_heads, of_sequences] = self.planes;
        let plane = |head: usize| {
            let plane = sequence % of_sequences * of_heads + head % of_heads;
            &self.cells[plane * plan.cells..][..plan.cells]
        };
        let heads = head * plan.shared()..(head + 1) * plan.shared();
        let mut seen = Cow::Borrowed(plane(heads.start));
        if of_heads > 1 {
            for head in heads.skip(1).take(of_heads - 1) {
                let both = seen.to_mut().iter_mut().zip(plane(head));
                both.for_each(|(seen, other)| *seen |= other);
            }
        }
        seen
    }
}
