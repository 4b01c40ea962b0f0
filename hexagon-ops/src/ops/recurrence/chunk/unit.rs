//! Products of matrices in two halves on the matrix unit.

use crate::hmx::Hmx;
use crate::layout::Tile;

/// A matrix for the unit.
#[derive(Clone, Copy)]
pub(super) struct Halves<'a> {
    pub(super) high: &'a [Tile],
    pub(super) low: &'a [Tile],
}

impl<'a> Halves<'a> {
    /// Returns the tiles from number `first` on.
    pub(super) fn from(self, first: usize) -> Self {
        Self {
            high: &self.high[first..],
            low: &self.low[first..],
        }
    }

    /// Returns the product with `weights` of `depth` tiles along K, which follow each other.
    ///
    /// - `act_step`: tiles from one strip of rows to the next
    /// - `steps`: tiles of the weights from one strip of rows of the result to the next, and from
    ///   one strip of its columns to the next
    pub(super) fn times(
        self,
        act_step: usize,
        weights: Halves<'a>,
        steps: [usize; 2],
        depth: usize,
    ) -> Term<'a> {
        Term {
            act: self,
            act_step,
            weights,
            steps,
            depth,
        }
    }

    /// Returns `depth` tiles from number `first` on; `None` if there are fewer.
    #[inline(always)]
    fn part(self, first: usize, depth: usize) -> Option<Self> {
        let end = first + depth;
        Some(Self {
            high: self.high.get(first..end)?,
            low: self.low.get(first..end)?,
        })
    }
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
        self.lend_from(0)
    }

    /// Lends the tiles from number `first` on.
    pub(super) fn lend_from(&mut self, first: usize) -> HalvesMut<'_> {
        HalvesMut {
            high: &mut self.high[first..],
            low: &mut self.low[first..],
        }
    }
}

/// One of the products whose sum is computed: [`Halves::times`].
#[derive(Clone, Copy)]
pub(super) struct Term<'a> {
    act: Halves<'a>,
    act_step: usize,
    weights: Halves<'a>,
    steps: [usize; 2],
    depth: usize,
}

/// The unit, and a tile of its own operands.
pub(super) struct Unit<'a> {
    pub(super) hmx: &'a mut Hmx,
    /// The unit matrix, negated.
    pub(super) negated: &'a Tile,
}

impl Unit<'_> {
    /// Computes a sum of products of `[rows, columns]` tiles.
    ///
    /// - `to_steps`: tiles of the result from one strip of rows to the next, and from one strip of
    ///   columns to the next
    #[inline(never)]
    pub(super) fn multiply(
        &mut self,
        terms: &[Term<'_>],
        [rows, columns]: [usize; 2],
        to: HalvesMut<'_>,
        to_steps: [usize; 2],
    ) {
        for row in 0..rows {
            for column in 0..columns {
                let at = row * to_steps[0] + column * to_steps[1];
                let (high, low) = (&mut to.high[at], &mut to.low[at]);
                self.add(terms, row, column);
                self.hmx.store(high);
                self.add(terms, row, column);
                let high = core::slice::from_ref(&*high);
                self.hmx.multiply(high, core::slice::from_ref(self.negated));
                self.hmx.store(low);
            }
        }
    }

    /// Adds a tile of products.
    #[inline(always)]
    fn add(&mut self, terms: &[Term<'_>], row: usize, column: usize) {
        for term in terms {
            let at = row * term.steps[0] + column * term.steps[1];
            let act = term.act.part(row * term.act_step, term.depth);
            let weights = term.weights.part(at, term.depth);
            if let (Some(act), Some(weights)) = (act, weights) {
                self.hmx.multiply(act.high, weights.low);
                self.hmx.multiply(act.low, weights.high);
                self.hmx.multiply(act.high, weights.high);
            }
        }
    }
}
