//! One matrix multiplication: checks the arguments, then runs GEMV or GEMM.

use super::epilogue::{Epilogue, Finish};
use super::gemv::act_form;
use super::quantize::ActForm;
use super::{gemm, gemv_driver, rows_driver};
use crate::error::{Error, Result};
use crate::hmx::{Form, Hmx};
use crate::layout::{LINE_BYTES, Line, MatrixLayout, Tile};
use crate::rt::Engine;

/// The units that a driver uses.
#[derive(Debug)]
pub struct Machine<'a> {
    /// Threads, and copies that run at the same time.
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

    /// Checks that `m` rows of `row` elements are within `elems` elements.
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
    /// Rows for which dot products are used, if the weight type has them.
    pub dots: Dots,
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
    /// Quantizations for dot products; 0 if packed into tiles.
    digits: usize,
    /// The form for dot products.
    act_form: Option<ActForm>,
}

/// The products that dot products with quantized activations compute. The matrix unit computes the
/// others, and those with weights of a type that has no dot product; without one, dot products with
/// activations of 16 bits compute the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Dots {
    /// No products.
    #[default]
    None = 0,
    /// Products of one row, with activations of 8 bits.
    OneRow = 1,
    /// Products of one or two rows, with activations of 8 bits.
    TwoRows = 2,
    /// Products of one row, with activations of 16 bits: 8 bits, and 8 for the remainder.
    TwoDigits = 3,
}

impl Dots {
    /// Most rows of all choices.
    pub const MOST_ROWS: usize = 2;

    /// Returns the choice with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::None),
            1 => Some(Self::OneRow),
            2 => Some(Self::TwoRows),
            3 => Some(Self::TwoDigits),
            _ => None,
        }
    }

    /// Returns the most rows.
    #[must_use]
    pub const fn rows(self) -> usize {
        match self {
            Self::None => 0,
            Self::OneRow | Self::TwoDigits => 1,
            Self::TwoRows => Self::MOST_ROWS,
        }
    }

    /// Returns the quantizations of a row.
    pub(super) const fn digits(self) -> usize {
        match self {
            Self::TwoDigits => 2,
            Self::None | Self::OneRow | Self::TwoRows => 1,
        }
    }
}

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
    /// - `prepared`: the result of an earlier product with the same activations, if VTCM has not
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
        let has_dots = self.layout.panel().weight().has_dot_product();
        let by_dots = self.m <= self.dots.rows() && has_dots;
        if !by_dots && has_dots && machine.hmx.form() == Form::Vectors {
            rows_driver::run(self, machine)?;
            return Ok(None);
        }
        let form = Prepared {
            m: self.m,
            k,
            digits: if by_dots { self.dots.digits() } else { 0 },
            act_form: by_dots.then(|| act_form(self.layout.panel().weight())),
        };
        let is_prepared = prepared == Some(form);
        let is_left = if by_dots {
            gemv_driver::run(self, is_prepared, machine)?;
            true
        } else {
            gemm::run(self, is_prepared, machine)?
        };
        Ok(is_left.then_some(form))
    }
}
