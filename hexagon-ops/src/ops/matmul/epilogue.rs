//! The epilogue of a product: a residual or a bias is added, or a gate is applied, before results
//! are written.
//!
//! At that point the results are in registers or in VTCM. A separate operation would have to read
//! them from memory again.

use super::driver::RowStarts;
use crate::error::Result;
use crate::hvx::{self, RowGroups, Vector};
use crate::layout::TILE_DIM;
use crate::ops::math;

/// A function of two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// The sum of both.
    Add,
    /// [`math::silu`] of the first, times the second.
    Swiglu,
    /// [`math::gelu`] of the first, times the second.
    Geglu,
    /// [`math::gelu_erf`] of the first, times the second.
    GegluErf,
    /// [`math::gelu_quick`] of the first, times the second.
    GegluQuick,
    /// The first if it is positive, else 0, times the second.
    Reglu,
}

/// Rows that go through a gate together. With qfloat, four rows would need too many registers.
pub(super) const GATE_ROWS: usize = if hvx::HAS_IEEE { 4 } else { 2 };

/// Returns `f` of each of `x`, times the same one of `y`.
#[inline(always)]
fn gated<const N: usize>(
    x: [Vector; N],
    mut y: [Vector; N],
    f: impl Fn(Vector) -> Vector,
) -> [Vector; N] {
    for (y, x) in y.iter_mut().zip(x) {
        *y = hvx::mul_f32(f(x), *y);
    }
    y
}

impl Combine {
    #[inline(always)]
    fn lanes<const N: usize>(self, x: [Vector; N], y: [Vector; N]) -> [Vector; N] {
        match self {
            Self::Add => {
                let mut sums = y;
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = hvx::add_f32(x, *sum);
                }
                sums
            }
            Self::Swiglu => gated(x, y, math::silu),
            Self::Geglu => gated(x, y, math::gelu),
            Self::GegluErf => gated(x, y, math::gelu_erf),
            Self::GegluQuick => gated(x, y, math::gelu_quick),
            Self::Reglu => gated(x, y, |x| hvx::max_f32(x, hvx::splat_w(0))),
        }
    }
}

/// An epilogue `dst = f(result, other)`, or `dst = f(other, result)`.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// The function f.
    pub f: Combine,
    /// `true` if the result is the second operand of `f`.
    pub is_swapped: bool,
    /// Rows of the other operand, N elements each. `None`: the values that `dst` holds before.
    pub other: Option<(&'a [f32], RowStarts<'a>)>,
}

impl<'a> Epilogue<'a> {
    /// Checks that there are `m` rows of `n` elements.
    pub(super) fn check(&self, m: usize, n: usize) -> Result<()> {
        match self.other {
            Some((elems, rows)) => rows.check("the epilogue's rows", m, n, elems.len()),
            None => Ok(()),
        }
    }

    /// Writes `groups` groups of rows of `results` combined with those of `other`, or with those
    /// that `out` holds before; both with the vectors from one row to the next. Returns `false` and
    /// writes nothing if there are not so many.
    #[inline(always)]
    pub(super) fn put_groups(
        self,
        results: &[[f32; TILE_DIM]; TILE_DIM],
        (out, step): (&mut [[f32; TILE_DIM]], usize),
        other: Option<(&[[f32; TILE_DIM]], usize)>,
        groups: usize,
    ) -> bool {
        let Some(results) = RowGroups::<GATE_ROWS>::new(results, 1, groups) else {
            return false;
        };
        let other = match other {
            None => None,
            Some((elems, step)) => match RowGroups::<GATE_ROWS>::new(elems, step, groups) {
                None => return false,
                some => some,
            },
        };
        // A separate function for each gate, so that each loop has instructions of one kind.
        macro_rules! by {
            ($($f:path),+) => {
                match self.f {
                    $($f => hvx::update_rows::<GATE_ROWS>(out, step, groups, |group, before| {
                        let (x, y) = (results.load(group), other.map_or(before, |it| it.load(group)));
                        let (x, y) = if self.is_swapped { (y, x) } else { (x, y) };
                        $f.lanes(x, y)
                    }),)+
                }
            };
        }
        by!(
            Combine::Add,
            Combine::Swiglu,
            Combine::Geglu,
            Combine::GegluErf,
            Combine::GegluQuick,
            Combine::Reglu
        )
    }

    /// Returns the function with part of a row as the other operand. With `None` the operand is the
    /// values that the memory of the results has before.
    #[inline(always)]
    pub(super) fn finish<'b>(self, other: Option<&'b [f32]>) -> Finish<'b> {
        Finish {
            f: Some((self.f, self.is_swapped)),
            other,
        }
    }

    /// Returns the function for columns `n0..n` of row `m`.
    #[inline(always)]
    pub(super) fn of_row(self, m: usize, n0: usize, n: usize) -> Finish<'a> {
        let row = |(elems, rows): (&'a [f32], RowStarts<'_>)| &elems[rows.start(m)..][n0..n];
        self.finish(self.other.map(row))
    }
}

/// The function to apply to part of a row, and its other operand.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    /// `None` if the results are written unchanged.
    f: Option<(Combine, bool)>,
    /// The other operand, one element for each result. With `None` it is the values that `out` has
    /// before.
    other: Option<&'a [f32]>,
}

impl Finish<'_> {
    /// Writes the results unchanged.
    pub(super) const WRITE: Self = Self {
        f: None,
        other: None,
    };

    /// Returns `true` if the results are written unchanged.
    #[inline(always)]
    pub(super) fn writes_unchanged(&self) -> bool {
        self.f.is_none()
    }

    /// Splits into one for the first `columns` columns and one for those after them.
    #[inline(always)]
    pub(super) fn split_at(self, columns: usize) -> [Self; 2] {
        let (first, second) = match self.other {
            Some(other) => {
                let (first, second) = other.split_at(columns.min(other.len()));
                (Some(first), Some(second))
            }
            None => (None, None),
        };
        [first, second].map(|other| Self { f: self.f, other })
    }

    /// Writes as many of the results as `out` has columns.
    #[inline(always)]
    pub(super) fn put(self, results: &[f32; TILE_DIM], out: &mut [f32]) {
        let count = out.len().min(TILE_DIM);
        match self.f {
            None => hvx::copy_f32(&mut out[..count], results),
            Some(f) => with_other(f, results, self.other, &mut out[..count]),
        }
    }
}

/// Writes results combined with `other`, or with the values of `out` without `other`.
#[cfg_attr(target_arch = "hexagon", inline(never))]
fn with_other(
    f: (Combine, bool),
    results: &[f32; TILE_DIM],
    other: Option<&[f32]>,
    out: &mut [f32],
) {
    let mut lanes = [0.0; TILE_DIM];
    let other = other.unwrap_or(out);
    let count = out.len().min(other.len());
    lanes[..count].copy_from_slice(&other[..count]);
    hvx::widest(Lanes {
        f,
        results,
        lanes: &mut lanes,
    });
    out[..count].copy_from_slice(&lanes[..count]);
}

/// Computes `lanes = f(results, lanes)`, or `lanes = f(lanes, results)`.
struct Lanes<'a> {
    f: (Combine, bool),
    results: &'a [f32; TILE_DIM],
    lanes: &'a mut [f32; TILE_DIM],
}

impl hvx::Kernel for Lanes<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (x, y) = (hvx::load_f32(self.results), hvx::load_f32(self.lanes));
        let (f, is_swapped) = self.f;
        let (x, y) = if is_swapped { (y, x) } else { (x, y) };
        let [lanes] = f.lanes([x], [y]);
        hvx::store_f32(self.lanes, lanes);
    }
}
