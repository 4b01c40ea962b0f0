//! Rows of `f32` into ggml's blocks, with or without a weight for the error of each column.
//!
//! Q8_0, and Q4_0 and Q4_1 without weights, are those of ggml's own reference quantizers, bit for bit.
//! Otherwise candidates for the scale of a block are compared by `sum(w * (x - d * l)^2)`, where
//! each is first refined to the scale that fits its levels best.

use ggml_rust_npu::gguf::GgmlType;
use half::{bf16, f16};

mod iq4_nl;
mod q4_1;

/// Elements of a block, of every type here.
pub const BLOCK: usize = 32;

/// A type of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// 4 bits, 18 bytes for 32 weights; the NPUs' favourite
    #[value(name = "q4_0")]
    Q4_0,
    /// 4 bits with a least value, 20 bytes for 32 weights
    #[value(name = "q4_1")]
    Q4_1,
    /// 8 bits, 34 bytes for 32 weights
    #[value(name = "q8_0")]
    Q8_0,
    /// 4 bits of an uneven scale, 18 bytes for 32 weights
    #[value(name = "iq4_nl")]
    Iq4Nl,
    /// No quantization, half precision
    #[value(name = "f16")]
    F16,
    /// No quantization, single precision
    #[value(name = "f32")]
    F32,
}

impl Format {
    /// Returns the ggml's type.
    pub fn dtype(self) -> GgmlType {
        match self {
            Self::Q4_0 => GgmlType::Q4_0,
            Self::Q4_1 => GgmlType::Q4_1,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::Iq4Nl => GgmlType::IQ4_NL,
            Self::F16 => GgmlType::F16,
            Self::F32 => GgmlType::F32,
        }
    }

    /// llama.cpp's number for a file of mostly this type.
    // SOURCE: enum llama_ftype, llama.h of llama.cpp 0.5.0.
    pub fn file_type(self) -> u64 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 7,
            Self::Iq4Nl => 25,
        }
    }

    /// Quantizes a row.
    ///
    /// - `row`: K elements, a multiple of 32 unless the format is F16 or F32
    /// - `importance`: mean square of each of the K inputs, if known
    /// - `out`: gets the row's bytes appended
    pub fn quantize_row(self, row: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
            Self::F16 => out.extend(row.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
            Self::Q8_0 => row.as_chunks().0.iter().for_each(|x| q8_0(x, out)),
            Self::Q4_0 | Self::Q4_1 | Self::Iq4Nl => {
                let weigh = importance.map(|importance| ErrorWeights::new(row, importance));
                for (index, x) in row.as_chunks().0.iter().enumerate() {
                    let weights = weigh.as_ref().map(|weigh| weigh.block(index));
                    match self {
                        Self::Q4_0 => push_q4_0(x, weights.as_ref(), out),
                        Self::Q4_1 => q4_1::quantize(x, weights.as_ref()).push(out),
                        _ => {
                            let (d, codes) = iq4_nl::quantize(x, weights.as_ref());
                            push_nibbles(d, &codes, out);
                        }
                    }
                }
            }
        }
    }
}

impl Format {
    /// Returns the largest magnitude that a weight may have: beyond it, the FP16 scale of its block
    /// or the weight itself would be infinite.
    pub fn range(self) -> f32 {
        let largest = f16::MAX.to_f32();
        match self {
            Self::F32 => f32::MAX,
            // The least value of a block is a half, too.
            Self::F16 | Self::Q4_1 => largest,
            // A weight with an error to minimize may get a scale up to a tenth of a level, times 9,
            // larger.
            Self::Q4_0 => largest * 7.0,
            Self::Q8_0 => largest * 127.0,
            Self::Iq4Nl => largest * 100.0,
        }
    }

    /// Returns the values of a block after the format's absolute-maximum rounding, as a cheap
    /// approximation of [`Format::quantize_row`] inside searches. Plain formats round as Q4_0,
    /// towards which they are a step.
    pub fn round(self, x: &[f32; BLOCK]) -> [f32; BLOCK] {
        match self {
            Self::Q4_0 | Self::F16 | Self::F32 => {
                let (d, codes) = q4_0(x);
                let d = d.to_f32();
                codes.map(|code| (f32::from(code) - 8.0) * d)
            }
            Self::Q4_1 => q4_1::quantize(x, None).values(),
            Self::Iq4Nl => {
                let d = f16::from_f32(extreme(x) / f32::from(iq4_nl::VALUES[0])).to_f32();
                let inverse = if d == 0.0 { 0.0 } else { d.recip() };
                iq4_nl::levels(x, inverse).0.map(|level| level * d)
            }
            Self::Q8_0 => {
                let d = extreme(x).abs() / 127.0;
                let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
                let d = f16::from_f32(d).to_f32();
                x.map(|x| (x * inverse).round() * d)
            }
        }
    }
}

/// Returns the index of the first element of a plain type that is NaN or infinite.
pub fn not_finite(dtype: GgmlType, bytes: &[u8]) -> Option<usize> {
    let halves = || {
        bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|x| u16::from_le_bytes(*x))
    };
    match dtype {
        GgmlType::F32 => {
            let mut words = bytes.as_chunks::<4>().0.iter();
            words.position(|x| !f32::from_le_bytes(*x).is_finite())
        }
        GgmlType::F16 => halves().position(|x| !f16::from_bits(x).is_finite()),
        GgmlType::BF16 => halves().position(|x| !bf16::from_bits(x).is_finite()),
        _ => None,
    }
}

/// Values of a row of any plain type.
///
/// # Panics
/// If `bytes` are not as many elements of `dtype` as `out` has.
pub fn to_f32(dtype: GgmlType, bytes: &[u8], out: &mut [f32]) {
    let halves = || bytes.as_chunks::<2>().0.iter();
    assert_eq!(
        dtype.row_bytes(out.len()),
        Some(bytes.len()),
        "bytes of a row"
    );
    match dtype {
        GgmlType::F32 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        GgmlType::F16 => {
            for (value, bytes) in out.iter_mut().zip(halves()) {
                *value = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        GgmlType::BF16 => {
            for (value, bytes) in out.iter_mut().zip(halves()) {
                *value = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        _ => unreachable!("other types are refused when the file is opened"),
    }
}

/// Weights of the errors of a row's columns: `E[x^2] * sqrt(mean(row^2) + w^2)`, as in ggml's
/// quantizers.
pub struct ErrorWeights<'a> {
    row: &'a [f32],
    importance: &'a [f32],
    mean_square: f32,
}

impl<'a> ErrorWeights<'a> {
    /// Returns the weights of a row's errors.
    ///
    /// - `importance`: the mean square of the inputs of each column
    pub fn new(row: &'a [f32], importance: &'a [f32]) -> Self {
        let sum: f32 = row.iter().map(|x| x * x).sum();
        Self {
            row,
            importance,
            mean_square: sum / row.len() as f32,
        }
    }

    /// Returns the weights of one block.
    fn block(&self, index: usize) -> [f32; BLOCK] {
        let first = index * BLOCK;
        std::array::from_fn(|i| {
            let x = self.row[first + i];
            self.importance[first + i] * (self.mean_square + x * x).sqrt()
        })
    }

    /// Returns the weights of the whole row.
    pub fn row(&self) -> Vec<f32> {
        (0..self.row.len() / BLOCK)
            .flat_map(|index| self.block(index))
            .collect()
    }
}

/// A block's scale and 4-bit codes.
type Codes = (f16, [u8; BLOCK]);

/// Appends a block of Q4_0: a scale and 4-bit codes.
pub fn push_q4_0(x: &[f32; BLOCK], weights: Option<&[f32; BLOCK]>, out: &mut Vec<u8>) {
    let (d, codes) = weights.map_or_else(|| q4_0(x), |weights| q4_0_weighted(x, weights));
    push_nibbles(d, &codes, out);
}

/// Appends a block of 4-bit codes: first half of the block in the low nibbles, second half in the
/// high ones.
pub fn push_nibbles(d: f16, codes: &[u8; BLOCK], out: &mut Vec<u8>) {
    out.extend(d.to_le_bytes());
    push_codes(codes, out);
}

fn push_codes(codes: &[u8; BLOCK], out: &mut Vec<u8>) {
    let (low, high) = codes.split_at(BLOCK / 2);
    out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
}

/// Returns the element that is largest in magnitude, with its sign.
fn extreme(x: &[f32; BLOCK]) -> f32 {
    let larger = |best: f32, x: &f32| if x.abs() > best.abs() { *x } else { best };
    x.iter().fold(0.0, larger)
}

/// Returns the level next to `x`, from -8 to 7, as a code from 0 to 15.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates, which is the clamp below"
)]
fn q4_0_code(x: f32) -> u8 {
    ((x + 8.5) as u8).min(15)
}

/// Returns the absolute maximum to the level -8, no search.
fn q4_0(x: &[f32; BLOCK]) -> Codes {
    let d = extreme(x) / -8.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    (f16::from_f32(d), x.map(|x| q4_0_code(x * inverse)))
}

/// Sums that tell how well levels fit: with `d = xl / ll`, the error is `sum(w x^2) - xl^2 / ll`.
#[derive(Clone, Copy, Default)]
struct Fit {
    xl: f32,
    ll: f32,
}

impl Fit {
    fn of(x: &[f32; BLOCK], weights: &[f32; BLOCK], levels: &[f32; BLOCK]) -> Self {
        let mut fit = Self::default();
        for ((x, w), l) in x.iter().zip(weights).zip(levels) {
            fit.xl += w * x * l;
            fit.ll += w * l * l;
        }
        fit
    }

    fn gain(self) -> f32 {
        if self.ll > 0.0 {
            self.xl * self.xl / self.ll
        } else {
            0.0
        }
    }

    fn scale(self) -> f32 {
        if self.ll > 0.0 {
            self.xl / self.ll
        } else {
            0.0
        }
    }
}

/// Candidates around the scale that puts the extreme at an end of the levels, in steps of a tenth
/// of a level.
const STEPS: std::ops::RangeInclusive<i8> = -9..=9;

fn q4_0_weighted(x: &[f32; BLOCK], weights: &[f32; BLOCK]) -> Codes {
    let extreme = extreme(x);
    if extreme == 0.0 {
        return (f16::ZERO, [8; BLOCK]);
    }
    let mut best = (Fit::default(), 0.0);
    for step in STEPS {
        let inverse = -(8.0 + 0.1 * f32::from(step)) / extreme;
        let levels = x.map(|x| f32::from(q4_0_code(x * inverse)) - 8.0);
        let fit = Fit::of(x, weights, &levels);
        if fit.gain() > best.0.gain() {
            best = (fit, inverse);
        }
    }
    // No column of the block counts.
    if best.0.gain() == 0.0 {
        return q4_0(x);
    }
    (
        f16::from_f32(best.0.scale()),
        x.map(|x| q4_0_code(x * best.1)),
    )
}

/// Absolute maximum to the level 127.
fn q8_0(x: &[f32; BLOCK], out: &mut Vec<u8>) {
    let d = extreme(x).abs() / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    out.extend(f16::from_f32(d).to_le_bytes());
    // CAST: between -127 and 127.
    #[expect(clippy::cast_possible_truncation, reason = "see above")]
    out.extend(x.map(|x| ((x * inverse).round() as i8).cast_unsigned()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: u32) -> [f32; BLOCK] {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        std::array::from_fn(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(u16::try_from(state >> 16).unwrap()) / 32768.0 - 1.0
        })
    }

    fn values(format: Format, bytes: &[u8]) -> Vec<f32> {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let first = bytes.len() - BLOCK / 2;
        let code = |i: usize| bytes[first + i % 16] >> (i / 16 * 4) & 15;
        let value = |i: usize| match format {
            Format::Q4_0 => (f32::from(code(i)) - 8.0) * d,
            Format::Q4_1 => {
                f32::from(code(i)) * d + f16::from_le_bytes([bytes[2], bytes[3]]).to_f32()
            }
            _ => f32::from(iq4_nl::VALUES[usize::from(code(i))]) * d,
        };
        (0..BLOCK).map(value).collect()
    }

    fn weighted_error(x: &[f32], have: &[f32], weights: &[f32]) -> f64 {
        let terms = x.iter().zip(have).zip(weights);
        terms
            .map(|((x, y), w)| f64::from((x - y) * (x - y) * w))
            .sum()
    }

    #[test]
    fn a_weighted_block_is_better_where_it_counts() {
        for format in [Format::Q4_0, Format::Q4_1] {
            let (mut plain, mut weighted) = (0.0, 0.0);
            for seed in 0..200 {
                let x = numbers(seed);
                let importance = numbers(seed + 1000).map(|x| x.abs() * x.abs() * 10.0);
                let weights = ErrorWeights::new(&x, &importance).block(0);
                for (importance, total) in
                    [(None, &mut plain), (Some(&importance[..]), &mut weighted)]
                {
                    let mut bytes = Vec::new();
                    format.quantize_row(&x, importance, &mut bytes);
                    assert_eq!(bytes.len(), format.dtype().block_bytes());
                    *total += weighted_error(&x, &values(format, &bytes), &weights);
                }
            }
            // About 0.7 with these numbers; a search that did nothing would give 1.
            assert!(weighted < 0.8 * plain, "{format:?} {weighted} {plain}");
        }
    }

    #[test]
    fn blocks_of_each_format_are_near_what_they_were_made_of() {
        for seed in 0..50 {
            let x = numbers(seed);
            for format in [Format::Q4_0, Format::Q4_1, Format::Iq4Nl] {
                for importance in [None, Some(&[1.0; BLOCK][..])] {
                    let mut bytes = Vec::new();
                    format.quantize_row(&x, importance, &mut bytes);
                    for (x, y) in x.iter().zip(values(format, &bytes)) {
                        // One step and a half of the coarsest grid.
                        assert!((x - y).abs() < 0.25, "{format:?} {seed}: {x} {y}");
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_and_columns_that_do_not_count_are_blocks_like_any() {
        for format in [Format::Q4_0, Format::Q4_1, Format::Iq4Nl, Format::Q8_0] {
            for (row, importance) in [([0.0; BLOCK], [1.0; BLOCK]), (numbers(3), [0.0; BLOCK])] {
                let mut bytes = Vec::new();
                format.quantize_row(&row, Some(&importance), &mut bytes);
                assert_eq!(bytes.len(), format.dtype().block_bytes());
                assert!(f16::from_le_bytes([bytes[0], bytes[1]]).is_finite());
            }
        }
        let mut bytes = Vec::new();
        Format::Q4_0.quantize_row(&[0.0; BLOCK], None, &mut bytes);
        assert!(values(Format::Q4_0, &bytes).iter().all(|x| *x == 0.0));
    }
}
