//! One matrix multiplication from checked arguments to the last column.

use super::epilogue::{Epilogue, Finish};
use super::{gemm, gemv_driver};
use crate::error::{Error, Result};
use crate::hmx::Hmx;
use crate::layout::{LINE_BYTES, Line, MatrixLayout, Tile};
use crate::rt::Engine;

/// The units a driver works with.
#[derive(Debug)]
pub struct Machine<'a> {
    /// Threads and copies.
    pub engine: &'a Engine,
    /// All of the VTCM that was acquired.
    pub vtcm: &'a mut [Tile],
    /// The matrix unit.
    pub hmx: &'a mut Hmx,
}

impl Machine<'_> {
    /// The same units, borrowed for a part of the work.
    #[must_use]
    pub fn reborrow(&mut self) -> Machine<'_> {
        Machine {
            engine: self.engine,
            vtcm: &mut *self.vtcm,
            hmx: &mut *self.hmx,
        }
    }
}

/// Where each row starts, in elements.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Row m at m times this stride.
    Strided(usize),
    /// Row m at the m-th of these offsets: the rows of one expert.
    Listed(&'a [usize]),
}

impl Rows<'_> {
    /// Start of row `m`.
    #[inline(always)]
    pub(super) fn start(self, m: usize) -> usize {
        match self {
            Self::Strided(stride) => m * stride,
            Self::Listed(starts) => starts[m],
        }
    }

    /// Checks that `m` rows of `row` elements lie within `elems`.
    pub(super) fn check(
        self,
        what: &'static str,
        m: usize,
        row: usize,
        elems: usize,
    ) -> Result<()> {
        if let Self::Listed(starts) = self
            && starts.len() != m
        {
            return Err(Error::Length {
                what,
                have: starts.len(),
                want: m,
            });
        }
        let last = match self {
            Self::Strided(stride) => m.checked_sub(1).map(|m| m.saturating_mul(stride)),
            Self::Listed(starts) => starts.iter().copied().max(),
        };
        match last.map(|last| last.saturating_add(row)) {
            Some(want) if want > elems => Err(Error::Length {
                what,
                have: elems,
                want,
            }),
            _ => Ok(()),
        }
    }
}

/// `dst[M,N] = act[M,K] · w[K,N]`, f32 activations and results.
#[derive(Debug)]
pub struct MatMul<'a> {
    /// Layout of the weights.
    pub layout: MatrixLayout,
    /// The packed weights, in DDR.
    pub weights: &'a [Line],
    /// Rows of activations.
    pub m: usize,
    /// Most rows that go through dot products, at most [`DOT_ROWS`], if the weights have such.
    pub dot_rows: usize,
    /// Activations; a row is K elements.
    pub act: &'a [f32],
    /// Where the activations' rows are.
    pub act_rows: Rows<'a>,
    /// Results; a row is N elements, others keep their values.
    pub dst: &'a mut [f32],
    /// Where the results' rows are; they must not overlap.
    pub dst_rows: Rows<'a>,
    /// What is done with the results before they are written.
    pub epilogue: Option<Epilogue<'a>>,
}

/// Activations that a product has left in VTCM, in the form that it needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    m: usize,
    k: usize,
    /// For dot products; else as tiles.
    quantized: bool,
}

/// Most rows that dot products take.
pub const DOT_ROWS: usize = 2;

impl<'a> MatMul<'a> {
    /// What is to be done with row `m`.
    pub(super) fn finish(&self, m: usize) -> Finish<'a> {
        let n = self.layout.n();
        (self.epilogue).map_or(Finish::WRITE, |epilogue| epilogue.of_row(m, 0, n))
    }

    /// Computes the product.
    ///
    /// # Errors
    /// `Length` if a slice or list does not match; `VtcmFull` if K is too large for the VTCM; `Fault` if the matrix unit's
    /// stand-in saw what hardware would let pass.
    pub fn run(self, machine: Machine<'_>) -> Result<()> {
        self.run_after(None, machine).map(drop)
    }

    /// Computes the product; returns what is left in VTCM for a next one with the same activations.
    ///
    /// - `prepared`: what an earlier product with these activations has left, if VTCM has not been used since
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_after(
        self,
        prepared: Option<Prepared>,
        machine: Machine<'_>,
    ) -> Result<Option<Prepared>> {
        let (k, n) = (self.layout.panel().k(), self.layout.n());
        let want = self.layout.matrix_bytes() / LINE_BYTES;
        if self.weights.len() != want {
            return Err(Error::Length {
                what: "weight lines",
                have: self.weights.len(),
                want,
            });
        }
        self.act_rows
            .check("activations", self.m, k, self.act.len())?;
        self.dst_rows.check("results", self.m, n, self.dst.len())?;
        if let Some(epilogue) = &self.epilogue {
            epilogue.check(self.m, n)?;
        }
        if self.m == 0 || n == 0 {
            return Ok(None);
        }
        let most = self.dot_rows.min(DOT_ROWS);
        let form = Prepared {
            m: self.m,
            k,
            quantized: self.m <= most && self.layout.panel().weight().has_dot_product(),
        };
        let is_prepared = prepared == Some(form);
        let is_left = if form.quantized {
            gemv_driver::run(self, is_prepared, machine)?;
            true
        } else {
            gemm::run(self, is_prepared, machine)?
        };
        Ok(is_left.then_some(form))
    }
}
