//! Rows of `f32` into ggml's blocks, with or without a weight for the error of each column.
//!
//! Q8_0, and Q4_0, Q4_1 and Q5_0 without weights, are those of ggml's own reference quantizers, bit
//! for bit. Otherwise candidates for the scale of a block are compared by `sum(w * (x - d * l)^2)`,
//! where each is first refined to the scale that fits its levels best. Super-blocks are always
//! searched.

use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use half::{bf16, f16};

mod iq4_nl;
mod q3_k;
mod q4_1;
mod q4_k;
mod super_block;
mod symmetric;

pub use self::symmetric::{push_nibbles, push_q4_0, push_q8_0};

/// Elements of a block, of every type here without super-blocks.
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
    /// 5 bits, 22 bytes for 32 weights
    #[value(name = "q5_0")]
    Q5_0,
    /// 8 bits, 34 bytes for 32 weights
    #[value(name = "q8_0")]
    Q8_0,
    /// 4 bits of an uneven scale, 18 bytes for 32 weights
    #[value(name = "iq4_nl")]
    Iq4Nl,
    /// 3 bits in super-blocks of 256 weights, 110 bytes each
    #[value(name = "q3_k")]
    Q3K,
    /// 4 bits in super-blocks of 256 weights, 144 bytes each
    #[value(name = "q4_k")]
    Q4K,
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
            Self::Q5_0 => GgmlType::Q5_0,
            Self::Q8_0 => GgmlType::Q8_0,
            Self::Q3K => GgmlType::Q3_K,
            Self::Q4K => GgmlType::Q4_K,
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
            Self::Q5_0 => 8,
            // Files whose blocks have a single type for all matrices: Q3_K_S and Q4_K_S.
            Self::Q3K => 11,
            Self::Q4K => 14,
            Self::Iq4Nl => 25,
        }
    }

    /// Returns the type for rows of `k` weights: itself if rows are whole blocks of it, otherwise
    /// the one with blocks of 32 that llama-quantize uses instead; `None` if rows are not whole
    /// blocks of that either.
    // SOURCE: tensor_type_fallback, llama-quant.cpp of llama.cpp 0.5.0.
    pub fn fitting(self, k: usize) -> Option<Self> {
        let fits = |format: Self| {
            let dtype = format.dtype();
            !dtype.is_quantized() || k.is_multiple_of(dtype.block_elems())
        };
        let instead = match self {
            Self::Q4K => Self::Q5_0,
            Self::Q3K => Self::Q4_0,
            other => other,
        };
        [self, instead].into_iter().find(|format| fits(*format))
    }

    /// Returns `true` if the importance of inputs decides how a row is quantized.
    pub fn uses_importance(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Q8_0)
    }

    /// Quantizes a row.
    ///
    /// - `row`: K elements, whole blocks unless the format is F16 or F32
    /// - `importance`: mean square of each of the K inputs, if known
    /// - `out`: gets the row's bytes appended
    pub fn quantize_row(self, row: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
            Self::F16 => out.extend(row.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
            Self::Q8_0 => row.as_chunks().0.iter().for_each(|x| push_q8_0(x, out)),
            Self::Q3K | Self::Q4K => {
                let weights = search_weights(row, importance);
                let blocks = row.as_chunks().0.iter().zip(weights.as_chunks().0);
                match self {
                    Self::Q3K => blocks.for_each(|(x, weights)| q3_k::push(x, weights, out)),
                    _ => blocks.for_each(|(x, weights)| q4_k::push(x, weights, out)),
                }
            }
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Iq4Nl => {
                let weigh = importance.map(|importance| ErrorWeights::new(row, importance));
                for (index, x) in row.as_chunks().0.iter().enumerate() {
                    let weights = weigh.as_ref().map(|weigh| weigh.block(index));
                    match self {
                        Self::Q4_0 => push_q4_0(x, weights.as_ref(), out),
                        Self::Q5_0 => symmetric::push_q5_0(x, weights.as_ref(), out),
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
            // For Q4_1 the least value of a block is stored as F16, too.
            Self::F16 | Self::Q4_1 => largest,
            // The search may choose a scale that is larger by up to a tenth of a level, times 9; so
            // 7 instead of 8.
            Self::Q4_0 => largest * 7.0,
            Self::Q5_0 => largest * 15.0,
            Self::Q8_0 => largest * 127.0,
            Self::Iq4Nl => largest * 100.0,
            // Q4_K has minima of up to 63. Q3_K has scales of up to 32 and levels of up to 4, less
            // the tenth that the search may add.
            Self::Q4K => largest * 60.0,
            Self::Q3K => largest * 90.0,
        }
    }

    /// Computes the values of a row, quantized, for searches that do so many times: those of
    /// [`Format::quantize_row`] for super-blocks, and of the absolute maximum without any weights,
    /// which is many times cheaper, for all others. Plain formats round as Q4_0, towards which they
    /// are a step.
    ///
    /// - `row`, `importance`, `out`: K elements; those after the last whole block are not rounded
    pub fn round_row(self, row: &[f32], importance: &[f32], out: &mut [f32]) {
        if self.has_super_blocks() {
            let dtype = self.dtype();
            let mut bytes =
                Vec::with_capacity(row.len() / dtype.block_elems() * dtype.block_bytes());
            self.quantize_row(row, Some(importance), &mut bytes);
            // PANIC: the library's table has every type that can be quantized to.
            let dequantize = dequantize::of(dtype).expect("a dequantizer");
            return dequantize.dequantize(&bytes, out);
        }
        out.copy_from_slice(row);
        let blocks = out.as_chunks_mut().0.iter_mut();
        blocks.for_each(|x| *x = self.round_block(x));
    }

    /// Returns `true` if a block has 256 elements.
    pub fn has_super_blocks(self) -> bool {
        matches!(self, Self::Q3K | Self::Q4K)
    }

    fn round_block(self, x: &[f32; BLOCK]) -> [f32; BLOCK] {
        match self {
            Self::Q4_1 => q4_1::quantize(x, None).values(),
            Self::Q5_0 => symmetric::rounded_q5_0(x),
            Self::Iq4Nl => {
                let d =
                    f16::from_f32(symmetric::extreme(x) / f32::from(iq4_nl::VALUES[0])).to_f32();
                let inverse = if d == 0.0 { 0.0 } else { d.recip() };
                iq4_nl::levels(x, inverse).0.map(|level| level * d)
            }
            Self::Q8_0 => symmetric::rounded_q8_0(x),
            _ => symmetric::rounded_q4_0(x),
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

/// Returns the weights of the errors of a row's columns for a search that is also made without
/// statistics: the weight of a column is then its magnitude plus the row's root mean square, which
/// of nine such rules gives the lowest KL divergence on SmolLM2 in groups (0.2601; ggml's root of
/// the sum of both squares: 0.2614, all the same: 0.2780, squares: 0.2768).
pub fn search_weights(row: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    if let Some(importance) = importance {
        return ErrorWeights::new(row, importance).row();
    }
    let squares: f32 = row.iter().map(|x| x * x).sum();
    let root_mean_square = (squares / row.len() as f32).sqrt();
    row.iter().map(|x| x.abs() + root_mean_square).collect()
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
        let mut out = vec![f32::NAN; BLOCK];
        let dequantize = dequantize::of(format.dtype()).unwrap();
        dequantize.dequantize(bytes, &mut out);
        out
    }

    fn weighted_error(x: &[f32], have: &[f32], weights: &[f32]) -> f64 {
        let terms = x.iter().zip(have).zip(weights);
        terms
            .map(|((x, y), w)| f64::from((x - y) * (x - y) * w))
            .sum()
    }

    #[test]
    fn a_weighted_block_is_better_where_it_counts() {
        for format in [Format::Q4_0, Format::Q4_1, Format::Q5_0] {
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
            // These numbers give about 0.7; without a search the ratio would be 1.
            assert!(weighted < 0.8 * plain, "{format:?} {weighted} {plain}");
        }
    }

    #[test]
    fn blocks_of_each_format_are_near_what_they_were_made_of() {
        for seed in 0..50 {
            let x = numbers(seed);
            for format in [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Iq4Nl] {
                for importance in [None, Some(&[1.0; BLOCK][..])] {
                    let mut bytes = Vec::new();
                    format.quantize_row(&x, importance, &mut bytes);
                    for (x, y) in x.iter().zip(values(format, &bytes)) {
                        // One and a half steps of the coarsest grid.
                        assert!((x - y).abs() < 0.25, "{format:?} {seed}: {x} {y}");
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_and_columns_that_do_not_count_are_blocks_like_any() {
        for format in [
            Format::Q4_0,
            Format::Q4_1,
            Format::Q5_0,
            Format::Iq4Nl,
            Format::Q8_0,
        ] {
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
