//! Kinds of numbers, and products of them.

use half::f16;

use super::Error;
use super::register::Registers;

/// Channels of one weight line, in each arithmetic.
// SOURCE: native layout of B, comment of rknn_matmul_set_io_mem in rknn_matmul_api.h 1.5.0.
pub const LINE: usize = 32;

/// Codes of IN_PRECISION, PROC_PRECISION and OUT_PRECISION.
// SOURCE: precision fields of CNA_CONV_CON1 and DPU_DATA_FORMAT as public notes on the RK3588 list
// them (int8 0, int16 1, fp16 2, int32 4, fp32 5, int4 6); librknnrt 1.5.2 gives right products
// with those of INT8 and FP16.
mod precision {
    pub const INT8: u32 = 0;
    pub const INT16: u32 = 1;
    pub const FP16: u32 = 2;
    pub const INT32: u32 = 4;
    pub const FP32: u32 = 5;
    pub const INT4: u32 = 6;
}

/// GROUP_LINE_OFF of CNA_CONV_CON1.
pub const GROUP_LINE_OFF: u32 = 1 << 29;

/// Numbers that are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    Int4,
    Int8,
    Fp16,
}

/// Numbers that are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    /// Saturated.
    Int16,
    Int32,
    Fp16,
    Fp32,
}

/// Kinds of numbers of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    pub operand: Operand,
    stored: Stored,
}

/// Operands, widened.
pub enum Values {
    Whole(Vec<i8>),
    Float(Vec<f32>),
}

impl Arithmetic {
    /// Returns the arithmetic that the registers select.
    ///
    /// # Errors
    /// `Unwritten`, or `Value` for a combination that is not known.
    pub fn new(registers: &Registers) -> Result<Self, Error> {
        let wrong = |name, value, expected| {
            Err(Error::Value {
                name,
                value,
                expected,
            })
        };
        let con1 = registers.get("CNA_CONV_CON1")?;
        // IN_PRECISION.
        let code = con1 >> 4 & 7;
        let operand = match code {
            precision::INT4 => Operand::Int4,
            precision::INT8 => Operand::Int8,
            precision::FP16 => Operand::Fp16,
            _ => return wrong("CNA_CONV_CON1", con1, "INT4, INT8 or FP16"),
        };
        if con1 & !GROUP_LINE_OFF != code << 7 | code << 4 {
            return wrong(
                "CNA_CONV_CON1",
                con1,
                "a direct convolution in one precision",
            );
        }
        let misc = registers.get("CORE_MISC_CFG")?;
        // QD_EN, bit 0, sums up the features for asymmetric weights, which DPU_BS_OW_OP = 0 does
        // not use.
        if misc & !1 != code << 8 {
            return wrong(
                "CORE_MISC_CFG",
                misc,
                "the precision of CNA_CONV_CON1, and no depthwise convolution",
            );
        }
        let format = registers.get("DPU_DATA_FORMAT")?;
        let stored = match (operand, format >> 29) {
            (Operand::Int4, precision::INT16) => Stored::Int16,
            (Operand::Int8, precision::INT32) => Stored::Int32,
            (Operand::Fp16, precision::FP16) => Stored::Fp16,
            (Operand::Int8 | Operand::Fp16, precision::FP32) => Stored::Fp32,
            _ => return wrong("DPU_DATA_FORMAT", format, "a known kind of results"),
        };
        if format & 0x1fff_ffff != code << 26 | code {
            return wrong("DPU_DATA_FORMAT", format, "the precision of CNA_CONV_CON1");
        }
        // FP32TOFP16_EN is the bit above the scale, which is 1.
        let scale = registers.get("DPU_OUT_CVT_SCALE")?;
        if scale != 1 | u32::from(stored == Stored::Fp16) << 16 {
            return wrong(
                "DPU_OUT_CVT_SCALE",
                scale,
                "results times 1, rounded to FP16 if stored so",
            );
        }
        Ok(Self { operand, stored })
    }

    /// Returns the bytes of `k` elements of an operand.
    pub fn operand_bytes(self, k: usize) -> usize {
        match self.operand {
            Operand::Int4 => k / 2,
            Operand::Int8 => k,
            Operand::Fp16 => 2 * k,
        }
    }

    /// Returns the bytes of a result.
    pub fn result_bytes(self) -> usize {
        match self.stored {
            Stored::Int16 | Stored::Fp16 => 2,
            Stored::Int32 | Stored::Fp32 => 4,
        }
    }

    /// Returns the kernels that are computed at once.
    // SOURCE: as for `LINE`; INT4, RKNN SDK User Guide 2.3.0 section 3.5.
    pub fn group(self) -> usize {
        match self.operand {
            Operand::Int4 => 64,
            Operand::Int8 => 32,
            Operand::Fp16 => 16,
        }
    }

    /// Returns operands that are in `bytes`.
    pub fn widen(self, bytes: &[u8]) -> Values {
        match self.operand {
            // The first value is in the low half.
            // SOURCE: gregordinary's notes: HILO = 0.
            Operand::Int4 => Values::Whole(
                bytes
                    .iter()
                    .flat_map(|byte| [byte << 4, *byte].map(|high| high.cast_signed() >> 4))
                    .collect(),
            ),
            Operand::Int8 => Values::Whole(bytes.iter().map(|byte| byte.cast_signed()).collect()),
            Operand::Fp16 => Values::Float(
                (bytes.as_chunks::<2>().0.iter())
                    .map(|bytes| f16::from_le_bytes(*bytes).to_f32())
                    .collect(),
            ),
        }
    }

    /// Multiplies positions with the kernels of one group; returns the results position by
    /// position, in their stored form.
    ///
    /// `weights` are lines, kernel by kernel, for each [`LINE`] channels.
    pub fn multiply(self, positions: &Values, weights: &Values, k: usize) -> Vec<u8> {
        match (positions, weights) {
            (Values::Whole(positions), Values::Whole(weights)) => {
                let sums = products(positions, weights, k, |a, b| {
                    a.zip(b).map(|(a, b)| dot_i8(a, b)).sum::<i32>()
                });
                self.store(sums, |sum| sum, |sum| sum as f32)
            }
            (Values::Float(positions), Values::Float(weights)) => {
                let sums = products(positions, weights, k, |a, b| {
                    a.zip(b).fold(0.0, |sum, (a, b)| sum + dot_f32(a, b))
                });
                self.store(sums, |_| 0, |sum| sum)
            }
            _ => unreachable!("both operands are of one kind"),
        }
    }

    fn store<S: Copy>(
        self,
        sums: Vec<S>,
        whole: impl Fn(S) -> i32,
        float: impl Fn(S) -> f32,
    ) -> Vec<u8> {
        let bytes = |sum: S| match self.stored {
            Stored::Int16 => {
                let limits = i32::from(i16::MIN)..=i32::from(i16::MAX);
                whole(sum)
                    .clamp(*limits.start(), *limits.end())
                    .to_le_bytes()
            }
            Stored::Int32 => whole(sum).to_le_bytes(),
            Stored::Fp16 => {
                let [low, high] = f16::from_f32(float(sum)).to_le_bytes();
                [low, high, 0, 0]
            }
            Stored::Fp32 => float(sum).to_le_bytes(),
        };
        sums.into_iter()
            .flat_map(|sum| bytes(sum).into_iter().take(self.result_bytes()))
            .collect()
    }
}

/// Returns the product of each position with each kernel, as `sum` computes it from their lines.
fn products<T: Copy, S>(
    positions: &[T],
    weights: &[T],
    k: usize,
    sum: impl Fn(std::slice::Iter<[T; LINE]>, std::iter::StepBy<std::slice::Iter<[T; LINE]>>) -> S,
) -> Vec<S> {
    let weights = weights.as_chunks::<LINE>().0;
    let group = weights.len() * LINE / k;
    let mut sums = Vec::with_capacity(positions.len() / k * group);
    for position in positions.chunks_exact(k) {
        let lines = position.as_chunks::<LINE>().0;
        sums.extend((0..group).map(|n| sum(lines.iter(), weights[n..].iter().step_by(group))));
    }
    sums
}

/// Returns the product of two lines.
fn dot_i8(a: &[i8; LINE], b: &[i8; LINE]) -> i32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| i32::from(*a) * i32::from(*b))
        .sum()
}

/// As [`dot_i8`]: the products of a line are summed exactly and rounded to FP32 once; lines are
/// added in FP32.
// SOURCE: chips/rk3588.md of gregordinary's rocket-userspace, which measured it; the order is not
// documented.
#[expect(clippy::cast_possible_truncation, reason = "rounding is the purpose")]
fn dot_f32(a: &[f32; LINE], b: &[f32; LINE]) -> f32 {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum::<f64>() as f32
}
