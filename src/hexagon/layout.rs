//! The layout of packed weights in a Hexagon NPU's memory: matrices of panels, one after another.

use hexagon_ops::layout::{MatrixLayout, WeightType};

use crate::graph::Tensor;
use crate::tensor::{DType, Format};

/// Change of a type by packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conversion {
    /// The bytes of the weights, in another order.
    Lossless,
    /// The values in Q8_0, for types without a layout.
    Requantized,
    /// The values in F16, for BF16 and F32: exact for BF16 values of 2^-17 and more in magnitude.
    Halved,
    /// Groups of 2 × 16 that a pack has instead of blocks, quantized from the same values.
    Groups,
}

impl Conversion {
    /// Returns `true` if packing reads the values of the weights, and not only their bytes.
    #[must_use]
    pub fn needs_values(self) -> bool {
        matches!(self, Self::Requantized | Self::Halved)
    }
}

/// Layout of the packed weights of one src0: matrices one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightLayout {
    /// Layout of each matrix.
    pub matrix: MatrixLayout,
    /// Matrices in dimensions 2 and 3.
    pub slices: [usize; 2],
    /// The conversion of the type by packing.
    pub form: Conversion,
}

impl WeightLayout {
    /// Returns the layout of a tensor's packed form; `None` if its type has none, or its rows are
    /// not whole blocks.
    #[must_use]
    pub fn new(tensor: &Tensor) -> Option<Self> {
        let [k, n, s2, s3] = tensor.shape.ne;
        let (weight, form) = weight_type(tensor)?;
        let matrix = MatrixLayout::new(weight, n, k).ok()?;
        (n > 0 && s2 > 0 && s3 > 0).then_some(Self {
            matrix,
            slices: [s2, s3],
            form,
        })
    }

    /// Returns the layout in which a pack may have the weights instead of blocks of Q4_0 or Q8_0:
    /// groups of 2 × 16. `None` for other types.
    #[must_use]
    pub fn groups(&self) -> Option<Self> {
        let panel = self.matrix.panel();
        let weight = match (panel.weight(), self.form) {
            (WeightType::Q4_0, Conversion::Lossless) => WeightType::Q4Tile,
            (WeightType::Q8_0, Conversion::Lossless) => WeightType::Q8Tile,
            _ => return None,
        };
        Some(Self {
            matrix: MatrixLayout::new(weight, self.matrix.n(), panel.k()).ok()?,
            form: Conversion::Groups,
            ..*self
        })
    }

    /// Returns the layout of blocks that [`groups`](Self::groups) replaced; `None` for a layout
    /// without groups.
    #[must_use]
    pub fn without_groups(&self) -> Option<Self> {
        let panel = self.matrix.panel();
        let weight = match panel.weight() {
            WeightType::Q4Tile => WeightType::Q4_0,
            WeightType::Q8Tile => WeightType::Q8_0,
            _ => return None,
        };
        Some(Self {
            matrix: MatrixLayout::new(weight, self.matrix.n(), panel.k()).ok()?,
            form: Conversion::Lossless,
            ..*self
        })
    }

    /// Returns the number of matrices.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slices[0] * self.slices[1]
    }

    /// Returns the bytes of all matrices.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.count() * self.matrix.matrix_bytes()
    }

    /// Returns the type of the packed weights.
    #[must_use]
    pub fn weight(&self) -> WeightType {
        self.matrix.panel().weight()
    }
}

/// Most elements of an F32 weight that stays unpacked and is multiplied in FP32: enough for a
/// router of experts. A layer's weight is larger; in FP32 it would take twice the bytes and could
/// not use the matrix unit.
const MAX_UNPACKED_ELEMS: usize = 1 << 20;

/// Returns `true` for F32 weights that are multiplied in FP32: small ones, unless they are one
/// matrix for each expert.
#[must_use]
pub fn is_left_unpacked(weights: &Tensor) -> bool {
    let [k, n, s2, _] = weights.shape.ne;
    weights.dtype == DType::F32 && s2 == 1 && k * n <= MAX_UNPACKED_ELEMS
}

/// Returns `true` for weights with one value of K, whose products are computed from plain memory.
/// They are kernels of convolutions, which graphs multiply with as matrices of another shape
/// (`WavTokenizer`'s); packed, each would take 32 times its bytes.
#[must_use]
pub fn is_column(weights: &Tensor) -> bool {
    weights.shape.ne[0] == 1
}

fn weight_type(tensor: &Tensor) -> Option<(WeightType, Conversion)> {
    match (tensor.dtype, tensor.format) {
        (DType::F16, _) => Some((WeightType::F16, Conversion::Lossless)),
        (DType::Bf16, _) => Some((WeightType::F16, Conversion::Halved)),
        (DType::F32, _) if !is_left_unpacked(tensor) => Some((WeightType::F16, Conversion::Halved)),
        (DType::Quantized { .. }, Some(format)) => {
            let weight = match format {
                Format::Q4_0 => WeightType::Q4_0,
                Format::Q4_1 => WeightType::Q4_1,
                Format::Q8_0 => WeightType::Q8_0,
                Format::Iq4Nl => WeightType::Iq4Nl,
                Format::Mxfp4 => WeightType::Mxfp4,
                Format::Q4K => WeightType::Q4K,
                Format::Q5_0 => WeightType::Q5_0,
                Format::Q6K => WeightType::Q6K,
                Format::Q5_1 => WeightType::Q5_1,
                Format::Q5K => WeightType::Q5K,
                Format::Iq4Xs => WeightType::Iq4Xs,
                Format::Q3K => WeightType::Q3K,
                Format::Q2K => WeightType::Q2K,
            };
            Some((weight, Conversion::Lossless))
        }
        (DType::Quantized { .. }, None) if tensor.dequantize.is_some() => {
            Some((WeightType::Q8_0, Conversion::Requantized))
        }
        _ => None,
    }
}
