//! Products with packed weights of every type, through the dot products with activations of 8 and
//! of 16 bits (M of 1 and 2), and the matrix unit (M up to 65).

use hexagon_ops::layout::{MatrixLayout, WeightType};
use hexagon_ops::ops::matmul::Dots;
use hexagon_ops::wire::{self, Command, RowsF32, Weights};

use super::{Outcome, weights};
use crate::error::Result;
use crate::hexagon::device::{Batch, DeviceBuffer, HexNpu};
use crate::reference;
use crate::reference::uniform;

/// Three panels of columns, and six blocks along K.
const N: usize = 96;
const K: usize = 192;
/// One panel of columns, for types that differ from the first in their dequantizer only.
const FEWER_COLUMNS: usize = 32;
/// Elements of a row: as many as the longest rows of models have, and not many more.
const LONG_K: usize = 16 * 1024;
/// Rows of activations: one and two for the dot products; on the matrix unit few rows, which some
/// devices' libraries got wrong from five on, one tile of 32, and the first rows of the next ones.
///
/// SOURCE: llama.cpp #26123, wrong results with 5 to 16 rows.
const ROWS: [usize; 9] = [1, 2, 3, 5, 8, 16, 32, 33, 65];
/// One row and two for the dot products, and one more for the matrix unit.
const FEWER_ROWS: [usize; 3] = [1, 2, 3];

/// Returns the largest normalized mean square error.
///
/// Dot products use activations of 8 bits in groups of 32: with uniform numbers the step is 1/127
/// of the group's largest, an error of (1/127)^2/12 / (1/3) = 1.5e-5; a second digit divides it by
/// 254^2. The matrix unit reads and writes FP16, with an error below 1e-6.
fn limit(m: usize, weight: WeightType, dots: Dots) -> f64 {
    if m <= Dots::MOST_ROWS && weight != WeightType::F16 && dots != Dots::TwoDigits {
        1e-4
    } else {
        1e-6
    }
}

/// Tests all products.
///
/// # Errors
/// The error of the call that failed.
pub(super) fn test(npu: &HexNpu) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for m in ROWS {
        outcomes.push(multiply(npu, WeightType::Q4_0, [m, K, N], Dots::TwoRows)?);
    }
    for weight in WeightType::ALL {
        let k = 2 * weight.block_elems();
        for m in FEWER_ROWS {
            outcomes.push(multiply(npu, weight, [m, k, FEWER_COLUMNS], Dots::TwoRows)?);
        }
        if weight.has_dot_product() {
            outcomes.push(multiply(
                npu,
                weight,
                [1, k, FEWER_COLUMNS],
                Dots::TwoDigits,
            )?);
        }
    }
    let long = [3, LONG_K, FEWER_COLUMNS];
    outcomes.push(multiply(npu, WeightType::Q4_0, long, Dots::TwoRows)?);
    Ok(outcomes)
}

/// A product whose operands are in one buffer: packed weights, activations, results.
#[derive(Clone, Copy, Debug)]
pub struct OneBufferProduct {
    weight: WeightType,
    layout: MatrixLayout,
    m: usize,
    k: usize,
    dots: Dots,
}

impl OneBufferProduct {
    /// Describes a product of `m` rows with a matrix of `n` rows of `k`.
    ///
    /// # Panics
    /// If the type has no layout of such a matrix.
    #[must_use]
    pub fn new(weight: WeightType, m: usize, k: usize, n: usize) -> Self {
        Self {
            weight,
            // PANIC: the caller's promise.
            layout: MatrixLayout::new(weight, n, k).expect("K is whole blocks"),
            m,
            k,
            dots: Dots::TwoRows,
        }
    }

    /// Returns the same product with another choice of dot products.
    #[must_use]
    pub fn with_dots(self, dots: Dots) -> Self {
        Self { dots, ..self }
    }

    /// Returns the layout of the weights, which are at the start of the buffer.
    #[must_use]
    pub fn layout(&self) -> MatrixLayout {
        self.layout
    }

    /// Returns where the activations start.
    #[must_use]
    pub fn act_at(&self) -> usize {
        self.layout.matrix_bytes()
    }

    /// Returns where the results start.
    #[must_use]
    pub fn dst_at(&self) -> usize {
        self.act_at() + self.m * self.k * 4
    }

    /// Returns the bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.dst_at() + self.m * self.layout.n() * 4
    }

    /// Returns the command.
    #[must_use]
    pub fn batch(&self, buffer: &DeviceBuffer) -> Batch {
        let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let rows_f32 = |offset: usize, row: usize| RowsF32 {
            buffer: buffer.number(),
            reserved: 0,
            offset: offset as u64,
            strides: [row * 4, self.m * row * 4, self.m * row * 4].map(|stride| stride as u64),
        };
        let body = wire::MatMul {
            weights: Weights {
                buffer: buffer.number(),
                layout: self.weight.layout_id().0,
                offset: 0,
                k: size(self.k),
                n: size(self.layout.n()),
                slices: [1, 1],
            },
            act: rows_f32(self.act_at(), self.k),
            dst: rows_f32(self.dst_at(), self.layout.n()),
            m: size(self.m),
            planes: [1, 1],
            dots: self.dots as u32,
            epilogue: bytemuck::Zeroable::zeroed(),
        };
        let mut batch = Batch::default();
        batch.push(Command::new(0, &body), &[buffer.number()]);
        batch
    }
}

fn multiply(
    npu: &HexNpu,
    weight: WeightType,
    [m, k, n]: [usize; 3],
    dots: Dots,
) -> Result<Outcome> {
    let mut numbers = uniform();
    let act: Vec<f32> = numbers.by_ref().take(m * k).collect();
    let matrix = weights::random(weight, n, k, &mut numbers);
    let product = OneBufferProduct::new(weight, m, k, n).with_dots(dots);
    let layout = product.layout();
    let buffer = npu.allocate(product.bytes())?;
    let (act_at, dst_at) = (product.act_at(), product.dst_at());
    buffer.write(0..buffer.bytes(), |out| {
        out.fill(0);
        let packed = &mut out[..layout.matrix_bytes()];
        for (row, blocks) in (matrix.bytes.chunks_exact(layout.ggml_row_bytes())).enumerate() {
            // PANIC: rows and their numbers are the layout's.
            layout
                .pack_row(packed, row, blocks)
                .expect("a row of the layout");
        }
        out[act_at..dst_at].copy_from_slice(bytemuck::cast_slice(&act));
    });
    npu.submit(&product.batch(&buffer))
        .map_err(|failed| failed.error)?;
    let mut have = vec![0.0f32; m * n];
    buffer.read(dst_at..buffer.bytes(), |bytes| {
        bytemuck::cast_slice_mut(&mut have).copy_from_slice(bytes);
    });
    let bits = if dots == Dots::TwoDigits {
        " 16 bits"
    } else {
        ""
    };
    Ok(Outcome {
        test: format!("{weight} M={m} K={k} N={n}{bits}"),
        have: reference::nmse(&have, &reference::mul_mat(&act, &matrix.values, k)),
        limit: limit(m, weight, dots),
    })
}
