//! One matrix multiplication: checks the arguments, then runs GEMV or GEMM.

use super::epilogue::{Epilogue, Finish};
use super::{gemm, gemv_driver};
use crate::error::{Error, Result};
use crate::hmx::Hmx;
use crate::layout::{LINE_BYTES, Line, MatrixLayout, Tile};
use crate::rt::Engine;

/// The units that a driver uses.
#[derive(Debug)]
pub struct Machine<'a> {
    /// Threads, and copies beside them.
    pub engine: &'a Engine,
    /// The whole VTCM that was acquired.
    pub vtcm: &'a mut [Tile],
    /// The matrix unit.
    pub hmx: &'a mut Hmx,
}

impl Machine<'_> {
    /// Borrows the same units for a part of the work.
    #[must_use]
    pub fn reborrow(&mut self) -> Machine<'_> {
        Machine {
            engine: self.engine,
            vtcm: &mut *self.vtcm,
            hmx: &mut *self.hmx,
        }
    }
}

/// Start of each row, in elements.
#[derive(Clone, Copy, Debug)]
pub enum RowStarts<'a> {
    /// Row m starts at m times this stride.
    Strided(usize),
    /// Row m starts at the m-th of these offsets: the rows of one expert.
    Listed(&'a [usize]),
}

impl RowStarts<'_> {
    /// Returns the start of row `m`.
    #[inline(always)]
    pub(super) fn start(self, m: usize) -> usize {
        match self {
            Self::Strided(stride) => m * stride,
            Self::Listed(starts) => starts[m],
        }
    }

    /// Checks that `m` rows of `row` elements lie within `elems` elements.
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

/// One product `dst[M,N] = act[M,K] · w[K,N]` with f32 activations and results.
#[derive(Debug)]
pub struct MatMul<'a> {
    /// Layout of the weights.
    pub layout: MatrixLayout,
    /// The packed weights, in DDR.
    pub weights: &'a [Line],
    /// Number of rows of activations (M).
    pub m: usize,
    /// Most rows for which dot products are used, if the weight type has them; at most
    /// [`DOT_ROWS`].
    pub dot_rows: usize,
    /// Activations; a row is K elements.
    pub act: &'a [f32],
    /// Starts of the activations' rows.
    pub act_rows: RowStarts<'a>,
    /// Results; a row is N elements. Elements outside the rows keep their values.
    pub dst: &'a mut [f32],
    /// Starts of the results' rows, which must not overlap.
    pub dst_rows: RowStarts<'a>,
    /// Function applied to the results before they are written.
    pub epilogue: Option<Epilogue<'a>>,
}

/// Activations that a product left in VTCM, in the form that it needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    m: usize,
    k: usize,
    /// `true` if quantized for dot products, `false` if packed into tiles.
    quantized: bool,
}

/// Most rows for which dot products are used.
pub const DOT_ROWS: usize = 2;

impl<'a> MatMul<'a> {
    /// Returns the function to apply to the results of row `m`.
    pub(super) fn finish(&self, m: usize) -> Finish<'a> {
        let n = self.layout.n();
        (self.epilogue).map_or(Finish::WRITE, |epilogue| epilogue.of_row(m, 0, n))
    }

    /// Computes the product.
    ///
    /// # Errors
    /// `Length` if a slice or list does not match; `VtcmFull` if K is too large for the VTCM;
    /// `Fault` if the matrix unit's stand-in saw a violation that hardware would not report.
    pub fn run(self, machine: Machine<'_>) -> Result<()> {
        self.run_after(None, machine).map(drop)
    }

    /// Computes the product, and returns the activations that remain in VTCM for a following
    /// product.
    ///
    /// - `prepared`: what an earlier product with the same activations returned, if VTCM has not
    ///   been used since
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
