//! The Hexagon NPU's part: one small graph of each family of operations.
//!
//! A DSP library in which a compiler broke one kernel computes everything else correctly. A test of
//! products alone would not find this.

use crate::error::{Error, Result};
use crate::hexagon::device::HexNpu;

mod family;
mod product;
pub mod rates;
mod sheet;
mod weights;

pub use self::product::OneBufferProduct;

/// Operations that share code, and their test.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// For error messages.
    pub name: &'static str,
    test: fn(&HexNpu) -> Result<Vec<Outcome>>,
}

/// The distance of a result from the reference.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Operation, types and sizes.
    pub test: String,
    /// The error measured, a normalized mean square.
    pub have: f64,
    /// The error allowed.
    pub limit: f64,
}

impl Outcome {
    /// Returns `true` if the result is right. A result that is not finite is not.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.have <= self.limit
    }
}

/// All families, in the order of their tests.
pub const FAMILIES: [Family; 9] = [
    Family {
        name: "products",
        test: product::test,
    },
    Family {
        name: "elementwise",
        test: family::elementwise,
    },
    Family {
        name: "copies",
        test: family::copies,
    },
    Family {
        name: "norms",
        test: family::norms,
    },
    Family {
        name: "gated units",
        test: family::gated,
    },
    Family {
        name: "rope",
        test: family::rope,
    },
    Family {
        name: "soft_max",
        test: family::soft_max,
    },
    Family {
        name: "attention",
        test: family::attention,
    },
    Family {
        name: "recurrences",
        test: family::recurrences,
    },
];

impl Family {
    /// Computes the family's operations and compares them with the reference.
    ///
    /// # Errors
    /// The error of the call that failed. A wrong result is not an error here.
    pub fn test(&self, npu: &HexNpu) -> Result<Vec<Outcome>> {
        (self.test)(npu)
    }
}

/// Tests `npu`.
///
/// # Errors
/// `SelfTest` with the first operation that is wrong, or the error of the call that failed.
pub fn run(npu: &HexNpu) -> Result<()> {
    for family in FAMILIES {
        let outcomes = family.test(npu)?;
        if let Some(wrong) = outcomes.into_iter().find(|outcome| !outcome.is_right()) {
            return Err(Error::SelfTest {
                test: format!("{}: {}", family.name, wrong.test),
                have: wrong.have,
                limit: wrong.limit,
            });
        }
    }
    Ok(())
}
