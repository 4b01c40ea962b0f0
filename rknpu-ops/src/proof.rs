//! Compares some sums of a run with those of the CPU, from the very bytes that the NPU read.
//!
//! Checks sums in every row, and in columns over the whole width. A library that computes a shape
//! wrong does so either everywhere (librknnrt 1.5.2 with M = 2), or from some row or column on.

use half::f16;

use crate::layout::{Elem, MatmulLayout};

/// Maximum number of compared columns, in addition to one for each row.
const COLUMNS: usize = 256;

/// Factor of the sum of the products' magnitudes: a float result may be wrong by so much. Sums in
/// FP32 of any order stay far below it, and a foreign number is seldom so near.
const TOLERANCE: f64 = 1.0 / 512.0;

/// Operands and result of a run in their native layouts.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The layouts.
    pub layout: &'a MatmulLayout,
    /// M, K and N.
    pub shape: [usize; 3],
    /// A.
    pub a: &'a [u8],
    /// B.
    pub b: &'a [u8],
    /// C.
    pub c: &'a [u8],
}

/// Outcome of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Sums that were compared.
    pub sums: usize,
    /// Number of compared sums that are not zero on the CPU; a zero proves nothing.
    pub telling: usize,
    /// Number of compared sums that the NPU has computed wrong.
    pub wrong: usize,
}

impl Comparison {
    /// Adds the sums of another run.
    pub fn add(&mut self, other: Self) {
        self.sums += other.sums;
        self.telling += other.telling;
        self.wrong += other.wrong;
    }

    /// Returns `true` if no sum is wrong, and enough of them are not zero.
    #[must_use]
    pub fn proves(&self) -> bool {
        self.wrong == 0 && self.telling > 0 && self.telling * 8 >= self.sums
    }
}

impl Run<'_> {
    /// Compares a sum of each row, and of each column or of columns at equal distances.
    #[must_use]
    pub fn compare(&self) -> Comparison {
        let [rows, _, n] = self.shape;
        let columns = n.min(COLUMNS);
        let of_rows = (0..rows).map(|m| (m, (m * 37 + 11) % n));
        // An odd step, so that every place in an atom of C is compared.
        let of_columns =
            (0..columns).map(|i| ((i * 13 + 5) % rows, (i * n / columns + i % 4).min(n - 1)));
        let mut outcome = Comparison::default();
        for (m, column) in of_rows.chain(of_columns) {
            let (want, magnitude) = self.sum(m, column);
            if !magnitude.is_finite() {
                continue;
            }
            let have = self.result(m, column);
            let (want, limit) = match self.layout.c.elem {
                Elem::F32 | Elem::F16 => (want, magnitude * TOLERANCE),
                Elem::I16 => (want.clamp(f64::from(i16::MIN), f64::from(i16::MAX)), 0.0),
                Elem::I8 => (want.clamp(f64::from(i8::MIN), f64::from(i8::MAX)), 0.0),
                Elem::I32 | Elem::I4 => (want, 0.0),
            };
            outcome.sums += 1;
            outcome.telling += usize::from(want != 0.0);
            // Written so that NaN counts as wrong.
            let right = (have - want).abs() <= limit;
            outcome.wrong += usize::from(!right);
        }
        outcome
    }

    /// Returns the sum of the products, and of their magnitudes. Integers are exact in it.
    fn sum(&self, m: usize, n: usize) -> (f64, f64) {
        let ([rows, k, columns], MatmulLayout { a, b, .. }) = (self.shape, self.layout);
        let (mut sum, mut magnitude) = (0.0, 0.0);
        for k_index in 0..k {
            let product = element(a.elem, self.a, a.index(m, k_index, rows))
                * element(b.elem, self.b, b.index(k_index, n, k, columns));
            sum += product;
            magnitude += product.abs();
        }
        (sum, magnitude)
    }

    fn result(&self, m: usize, n: usize) -> f64 {
        let ([rows, ..], c) = (self.shape, self.layout.c);
        element(c.elem, self.c, c.index(m, n, rows))
    }
}

/// Returns the element at `index`. Of elements of 4 bits, one with an even index is in the low half
/// of its byte.
///
/// # Panics
/// If `index` is not inside `bytes`.
fn element(elem: Elem, bytes: &[u8], index: usize) -> f64 {
    fn at<const BYTES: usize>(bytes: &[u8], index: usize) -> [u8; BYTES] {
        bytes.as_chunks().0[index]
    }
    match elem {
        Elem::I4 => {
            let nibble = bytes[index / 2] >> (index % 2 * 4) << 4;
            f64::from(nibble.cast_signed() >> 4)
        }
        Elem::I8 => f64::from(bytes[index].cast_signed()),
        Elem::I16 => f64::from(i16::from_le_bytes(at(bytes, index))),
        Elem::F16 => f16::from_le_bytes(at(bytes, index)).to_f64(),
        Elem::I32 => f64::from(i32::from_le_bytes(at(bytes, index))),
        Elem::F32 => f64::from(f32::from_le_bytes(at(bytes, index))),
    }
}
