//! Products of matrices in two halves on the matrix unit.

use crate::hmx::Hmx;
use crate::layout::Tile;

/// A matrix for the unit.
#[derive(Clone, Copy)]
pub(super) struct Halves<'a> {
    pub(super) high: &'a [Tile],
    pub(super) low: &'a [Tile],
}

/// A matrix that is written.
pub(super) struct HalvesMut<'a> {
    pub(super) high: &'a mut [Tile],
    pub(super) low: &'a mut [Tile],
}

impl HalvesMut<'_> {
    pub(super) fn get(&self) -> Halves<'_> {
        Halves {
            high: self.high,
            low: self.low,
        }
    }

    pub(super) fn lend(&mut self) -> HalvesMut<'_> {
        HalvesMut {
            high: self.high,
            low: self.low,
        }
    }
}

/// An operand of a product: tiles from one strip of rows (weights: of columns) to the next, and along K.
pub(super) type Operand<'a> = (Halves<'a>, [usize; 2]);

/// The unit, and a tile of its own operands.
pub(super) struct Unit<'a> {
    pub(super) hmx: &'a mut Hmx,
    /// The unit matrix, negated.
    pub(super) negated: &'a Tile,
}

impl Unit<'_> {
    /// Computes a product of `[rows, columns, depth]` tiles.
    pub(super) fn multiply(
        &mut self,
        act: Operand<'_>,
        weights: Operand<'_>,
        ne: [usize; 3],
        to: HalvesMut<'_>,
    ) {
        let [rows, columns, depth] = ne;
        for row in 0..rows {
            for column in 0..columns {
                let at = row * columns + column;
                self.add(act, weights, [row, column, depth]);
                self.hmx.store(&mut to.high[at]);
                self.add(act, weights, [row, column, depth]);
                let high = core::slice::from_ref(&to.high[at]);
                self.hmx.multiply(high, core::slice::from_ref(self.negated));
                self.hmx.store(&mut to.low[at]);
            }
        }
    }

    /// Adds a tile of a product.
    fn add(
        &mut self,
        (act, [row_step, act_step]): Operand<'_>,
        (weights, [column_step, step]): Operand<'_>,
        [row, column, depth]: [usize; 3],
    ) {
        let (act_at, at) = (row * row_step, column * column_step);
        let halves = [
            (act.high, weights.low),
            (act.low, weights.high),
            (act.high, weights.high),
        ];
        for (act, weights) in halves {
            if [act_step, step] == [1, 1] {
                let (act, weights) = (&act[act_at..], &weights[at..]);
                self.hmx.multiply(&act[..depth], &weights[..depth]);
                continue;
            }
            for k in 0..depth {
                let (act, weights) = (&act[act_at + k * act_step], &weights[at + k * step]);
                self.hmx
                    .multiply(core::slice::from_ref(act), core::slice::from_ref(weights));
            }
        }
    }
}
