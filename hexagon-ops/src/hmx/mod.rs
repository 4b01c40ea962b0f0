//! The matrix unit (HMX): FP16 tiles in, FP16 tiles out, with an accumulator wider than FP32.
//!
//! ```text
//!   clear                    both accumulators become zero
//!   load_scale               per-column scale and bias of the following stores
//!   multiply(act, weights)   acc[row][n] += Σ over up to 32 tiles of K   act[row][k] · weights[k][n]
//!   store(out)               out = f16(acc · scale + bias); the accumulator is cleared and the other one becomes current
//! ```
//!
//! All operands are in VTCM. The hardware reports neither an unaligned operand, nor one outside
//! VTCM, nor an overflow of FP16. The types [`Tile`] and [`ScaleBlock`] guarantee the alignment;
//! the host version checks the rest and records the first [`Fault`]. Inputs must be finite and at
//! most 65504; the result of larger ones differs between chips.
//!
//! V68 and V69 have an older form, [`Form::RoundOnly`]: stores only round, and their control block
//! is zero. Where the unit is missing, or its self-test fails, [`vectors`] computes the products of
//! the same tiles.
//!
//! SOURCE: encodings and packet rules, public emulators that quote the Hexagon V81 HMX Programmer's
//! Reference Manual 80-N2040-62; checked against the words of Qualcomm's own libraries (V68, V73,
//! V81). Only the deep activation does not occur there: it rests on its 8-bit twin and on llama.cpp
//! using the mnemonic.

#[cfg(target_arch = "hexagon")]
#[expect(
    unsafe_code,
    reason = "matrix instructions exist as words of inline assembly only"
)]
mod hexagon;
#[cfg(target_arch = "hexagon")]
pub use hexagon::Hmx;

#[cfg(not(target_arch = "hexagon"))]
mod host;
#[cfg(not(target_arch = "hexagon"))]
pub use host::Hmx;

pub mod vectors;

use crate::hvx;
use crate::layout::Line;

/// Maximum number of tiles along K in one multiplication.
///
/// SOURCE: a packet multiplies at most 1024 input channels of FP16 and drops the rest silently;
/// 80-N2040-62 as quoted by public emulators of the unit.
pub const MAX_DEEP: usize = 32;

/// The unit that computes the products of tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// The unit of V73 and later, whose stores multiply by a scale.
    #[default]
    Scaling,
    /// The unit of V68 and V69, whose stores only round.
    ///
    /// SOURCE: "HMX feature validation on Snapdragon 888", 87 programs on a V68 phone: FP16 tiles,
    /// deep activations and stores work with a zero control block; V73's block clips results there.
    RoundOnly,
    /// No unit: [`vectors`] computes them.
    Vectors,
}

impl Form {
    /// Returns the form of an architecture's unit.
    #[must_use]
    pub const fn of_arch(arch: u32) -> Self {
        if arch < 73 {
            Self::RoundOnly
        } else {
            Self::Scaling
        }
    }

    /// Returns the control block with which stores leave products unchanged.
    #[must_use]
    pub const fn unchanged(self) -> ScaleBlock {
        match self {
            Self::Scaling | Self::Vectors => ScaleBlock::ONE,
            Self::RoundOnly => ScaleBlock::ZERO,
        }
    }
}

/// Scale and bias of each of the 32 columns, as the unit reads it.
///
/// Word c (low half): f16 scale, f16 output bias. Word 32 + c (high half): further fields and the
/// f16 bias before scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(256))]
pub struct ScaleBlock([u32; 64]);

impl ScaleBlock {
    /// A block with scale 1 and bias 0, which leaves the product unchanged.
    pub const ONE: Self = Self::splat(0x3c00);
    /// The control block of a [`Form::RoundOnly`] unit.
    pub const ZERO: Self = Self([0; 64]);

    /// Returns a block with one scale (bits of an f16) for all columns, bias 0.
    #[must_use]
    pub const fn splat(scale: u16) -> Self {
        let mut words = [0; 64];
        let mut c = 0;
        while c < 32 {
            // The scale is the lower half of a word; the upper half, which is the output bias,
            // stays 0.
            words[c] = scale as u32;
            c += 1;
        }
        Self(words)
    }

    /// Sets one scale (bits of an f16) for all columns, bias 0, by vectors.
    pub fn set(&mut self, scale: u16) {
        let [low, high]: &mut [Line; 2] = bytemuck::cast_mut(self);
        hvx::store(low, hvx::splat_w(i32::from(scale)));
        hvx::store(high, hvx::splat_w(0));
    }
}

/// A violation that the hardware would not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An operand is outside VTCM, wholly or partly.
    #[error("an operand lies outside of VTCM")]
    OutsideVtcm,
    /// Activations and weights differ in length, or are not 1 to 32 tiles.
    #[error("{act} tiles of activations are multiplied by {weights} of weights")]
    Deep {
        /// Tiles of activations.
        act: usize,
        /// Tiles of weights.
        weights: usize,
    },
    /// The control block of a [`Form::RoundOnly`] unit is not zero.
    #[error("the control block of a unit without scales is not zero")]
    Control,
    /// The unit was used on a chip that has none.
    #[error("there is no matrix unit")]
    Missing,
    /// A result exceeded FP16's range.
    #[error("a result is beyond F16's range")]
    Overflow,
}

#[cfg(doc)]
use crate::layout::Tile;
