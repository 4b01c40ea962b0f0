//! Random blocks and super-blocks, and their exact values by ggml's formulas.

use half::f16;
use hexagon_ops::layout::WeightType;
use hexagon_ops::wire;

use crate::common::{Numbers, random_block, terms};

/// Returns the elements and bytes of a block, or of an element for types without blocks.
pub fn block(dtype: u32) -> (usize, usize) {
    match dtype {
        wire::TYPE_F32 | wire::TYPE_I32 => (1, 4),
        wire::TYPE_F16 | wire::TYPE_BF16 | wire::TYPE_I16 => (1, 2),
        wire::TYPE_I8 => (1, 1),
        wire::TYPE_I64 => (1, 8),
        wire::TYPE_Q8_0 => (32, 34),
        wire::TYPE_Q4_0 | wire::TYPE_IQ4_NL => (32, 18),
        wire::TYPE_Q4_1 => (32, 20),
        wire::TYPE_Q5_0 => (32, 22),
        wire::TYPE_Q5_1 => (32, 24),
        wire::TYPE_MXFP4 => (32, 17),
        wire::TYPE_Q2_K => (256, 84),
        wire::TYPE_Q3_K => (256, 110),
        wire::TYPE_Q4_K => (256, 144),
        wire::TYPE_Q5_K => (256, 176),
        wire::TYPE_Q6_K => (256, 210),
        wire::TYPE_IQ4_XS => (256, 136),
        _ => unreachable!("no such type"),
    }
}

fn weight_type(dtype: u32) -> Option<WeightType> {
    Some(match dtype {
        wire::TYPE_Q8_0 => WeightType::Q8_0,
        wire::TYPE_Q4_0 => WeightType::Q4_0,
        wire::TYPE_Q4_1 => WeightType::Q4_1,
        wire::TYPE_IQ4_NL => WeightType::Iq4Nl,
        wire::TYPE_MXFP4 => WeightType::Mxfp4,
        wire::TYPE_Q2_K => WeightType::Q2K,
        wire::TYPE_Q3_K => WeightType::Q3K,
        wire::TYPE_IQ4_XS => WeightType::Iq4Xs,
        wire::TYPE_Q4_K => WeightType::Q4K,
        wire::TYPE_Q5_K => WeightType::Q5K,
        wire::TYPE_Q6_K => WeightType::Q6K,
        _ => return None,
    })
}

/// The bytes of a random block.
pub fn random(dtype: u32, numbers: &mut Numbers) -> Vec<u8> {
    if let Some(weight) = weight_type(dtype) {
        return random_block(weight, numbers);
    }
    // Q5_0 and Q5_1 have the scales of Q4_1, then random bits.
    let mut bytes = random_block(WeightType::Q4_1, numbers);
    let scales = if dtype == wire::TYPE_Q5_0 { 2 } else { 4 };
    bytes.truncate(scales);
    bytes.extend((scales..block(dtype).1).map(|_| numbers.bits().to_le_bytes()[0]));
    bytes
}

/// The values of a block.
pub fn values(dtype: u32, bytes: &[u8]) -> Vec<f64> {
    if let Some(weight) = weight_type(dtype) {
        let terms = terms(weight, bytes).into_iter();
        return terms.map(|(value, _)| value).collect();
    }
    let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64();
    let (at, offset, min) = if dtype == wire::TYPE_Q5_0 {
        (2, 16.0, 0.0)
    } else {
        (4, 0.0, half(2))
    };
    let high = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let value = |k: usize| {
        let byte = bytes[at + 4 + k % 16];
        let nibble = if k < 16 { byte & 15 } else { byte >> 4 };
        let quant = u32::from(nibble) + (high >> k & 1) * 16;
        (f64::from(quant) - offset) * half(0) + min
    };
    (0..32).map(value).collect()
}
