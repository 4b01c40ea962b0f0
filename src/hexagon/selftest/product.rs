//! Products with packed weights: quantized ones and F16, through the dot products with activations of
//! 8 and of 16 bits (M of 1 and 2), and the matrix unit (M up to 65).

use half::f16;
use hexagon_ops::layout::{MatrixLayout, WeightType};
use hexagon_ops::ops::matmul::Dots;
use hexagon_ops::wire::{self, Command, Plain, Weights};

use super::Outcome;
use crate::error::Result;
use crate::hexagon::device::{Batch, DeviceBuffer, HexNpu};
use crate::reference;
use crate::reference::uniform;

/// Three panels of columns, and six blocks along K.
const N: usize = 96;
const K: usize = 192;

/// Rows of activations: one and two for the dot products; on the matrix unit few rows, which some
/// devices' libraries got wrong from five on, one tile of 32, and the first rows of the next ones.
///
/// SOURCE: llama.cpp #26123, wrong results with 5 to 16 rows.
const ROWS: [usize; 9] = [1, 2, 3, 5, 8, 16, 32, 33, 65];
/// One of each kind, for types that differ from the first in their dequantizer only.
const FEWER_ROWS: [usize; 4] = [1, 2, 5, 33];

/// Returns the largest normalized mean square error.
///
/// Dot products take activations in 8 bits for each group of 32: with uniform numbers the step is
/// 1/127 of the group's largest, an error of (1/127)^2/12 / (1/3) = 1.5e-5; a second digit divides it
/// by 254^2. The matrix unit takes FP16 and gives FP16, below 1e-6.
fn limit(m: usize, weight: WeightType, dots: Dots) -> f64 {
    if m <= Dots::MOST_ROWS && weight != WeightType::F16 && dots != Dots::TwoDigits {
        1e-4
    } else {
        1e-6
    }
}

/// Tests all of them.
///
/// # Errors
/// The error of the call that failed.
pub(super) fn test(npu: &HexNpu) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for weight in [WeightType::Q4_0, WeightType::Q8_0, WeightType::F16] {
        let rows: &[usize] = match weight {
            WeightType::Q4_0 => &ROWS,
            _ => &FEWER_ROWS,
        };
        for m in rows {
            outcomes.push(multiply(npu, weight, *m, Dots::TwoRows)?);
        }
        if weight.has_dot_product() {
            outcomes.push(multiply(npu, weight, 1, Dots::TwoDigits)?);
        }
    }
    Ok(outcomes)
}

/// Returns the random rows in ggml's layout, and their values.
fn rows(weight: WeightType, numbers: &mut impl Iterator<Item = f32>) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    let mut number = || numbers.next().unwrap_or(0.0);
    for _ in 0..N * K / 32 {
        // Exact in FP16, and so are its products with 8-bit integers.
        let scale = f16::from_f32((number() * 4.0).round() / 64.0 + 0.125);
        match weight {
            WeightType::F16 => {
                for _ in 0..32 {
                    let value = f16::from_f32(number());
                    bytes.extend(value.to_le_bytes());
                    values.push(value.to_f32());
                }
            }
            WeightType::Q8_0 => {
                bytes.extend(scale.to_le_bytes());
                for _ in 0..32 {
                    // CAST: between -127 and 127.
                    #[expect(clippy::cast_possible_truncation, reason = "see above")]
                    let level = (number() * 127.0) as i8;
                    bytes.push(level.cast_unsigned());
                    values.push(f32::from(level) * scale.to_f32());
                }
            }
            _ => {
                bytes.extend(scale.to_le_bytes());
                // CAST: between 0 and 15.
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "see above"
                )]
                let levels: [u8; 32] = std::array::from_fn(|_| (number() * 7.9 + 8.0) as u8);
                for i in 0..16 {
                    bytes.push(levels[i] | levels[i + 16] << 4);
                }
                values.extend(levels.map(|level| (f32::from(level) - 8.0) * scale.to_f32()));
            }
        }
    }
    (bytes, values)
}

/// A product whose operands lie in one buffer: packed weights, activations, results.
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
        let plain = |offset: usize, row: usize| Plain {
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
            act: plain(self.act_at(), self.k),
            dst: plain(self.dst_at(), self.layout.n()),
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

fn multiply(npu: &HexNpu, weight: WeightType, m: usize, dots: Dots) -> Result<Outcome> {
    let mut numbers = uniform();
    let act: Vec<f32> = numbers.by_ref().take(m * K).collect();
    let (bytes, values) = rows(weight, &mut numbers);
    let product = OneBufferProduct::new(weight, m, K, N).with_dots(dots);
    let layout = product.layout();
    let buffer = npu.allocate(product.bytes())?;
    let (act_at, dst_at) = (product.act_at(), product.dst_at());
    buffer.write(0..buffer.bytes(), |out| {
        out.fill(0);
        let packed = &mut out[..layout.matrix_bytes()];
        for (n, row) in bytes.chunks_exact(layout.ggml_row_bytes()).enumerate() {
            // PANIC: rows and their numbers are the layout's.
            layout
                .pack_row(packed, n, row)
                .expect("a row of the layout");
        }
        out[act_at..dst_at].copy_from_slice(bytemuck::cast_slice(&act));
    });
    npu.submit(&product.batch(&buffer))
        .map_err(|failed| failed.error)?;
    let mut have = vec![0.0f32; m * N];
    buffer.read(dst_at..buffer.bytes(), |bytes| {
        bytemuck::cast_slice_mut(&mut have).copy_from_slice(bytes);
    });
    let bits = if dots == Dots::TwoDigits {
        " 16 bits"
    } else {
        ""
    };
    Ok(Outcome {
        test: format!("{weight} M={m} K={K} N={N}{bits}"),
        have: reference::nmse(&have, &reference::mul_mat(&act, &values, K)),
        limit: limit(m, weight, dots),
    })
}
