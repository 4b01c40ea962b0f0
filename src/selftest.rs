//! What a device must compute right before it is offered: a small multiplication in each arithmetic, in decode and
//! in prefill size, against the reference.

use rknpu_ops::pack::Rows;

use crate::device::rknpu::{RkNpu, WeightSlice};
use crate::error::{Error, Result};
use crate::plan;
use crate::reference;
use crate::repack::{Precision, Source, WeightLayout};
use crate::shm::RegionMut;
use crate::tensor::{DType, Dequantize};

/// N covers three chunks, so that every core of every chip takes part; K has a Hadamard block of 64.
const N: usize = 96;
const K: usize = 192;

/// Largest normalized mean square error.
///
/// INT8 rows with a scale of absmax/127 have an error of scale/sqrt(12) for each element. With uniform numbers, whose
/// absmax after the transform is at most about 4 standard deviations, that is (4/127)^2/12 = 8e-5 for each operand.
/// FP16 rounds to 2^-11, which is below 1e-7.
fn limit(precision: Precision) -> f64 {
    match precision {
        Precision::Int8 => 3e-4,
        Precision::Fp16 => 1e-6,
    }
}

/// Weights that are F32 in disguise, so that the test needs no ggml.
struct Plain;

impl Dequantize for Plain {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        for (value, bytes) in out.iter_mut().zip(blocks.as_chunks::<4>().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
    }
}

/// Tests `npu`.
///
/// # Errors
/// `SelfTest` with the first multiplication that is wrong, or the error of the call that failed.
pub fn run(npu: &RkNpu) -> Result<()> {
    for precision in [Precision::Fp16, Precision::Int8] {
        for m in [1, 8] {
            multiply(npu, precision, m)?;
        }
    }
    Ok(())
}

fn multiply(npu: &RkNpu, precision: Precision, m: usize) -> Result<()> {
    let mut numbers = uniform();
    let act: Vec<f32> = numbers.by_ref().take(m * K).collect();
    let weights: Vec<f32> = numbers.take(N * K).collect();
    let (dtype, bytes, weights) = match precision {
        Precision::Int8 => {
            let dtype = DType::Quantized {
                block_elems: 1,
                block_bytes: 4,
            };
            (
                dtype,
                weights
                    .iter()
                    .flat_map(|x| x.to_ne_bytes())
                    .collect::<Vec<u8>>(),
                weights,
            )
        }
        Precision::Fp16 => {
            let halves: Vec<_> = weights.into_iter().map(half::f16::from_f32).collect();
            let bytes = halves.iter().flat_map(|x| x.to_le_bytes()).collect();
            (
                DType::F16,
                bytes,
                halves.into_iter().map(half::f16::to_f32).collect(),
            )
        }
    };
    let Some(layout) = WeightLayout::new(npu.caps(), dtype, [K, N, 1, 1]) else {
        unreachable!("every chip takes FP16 and INT8");
    };
    let memory = npu.allocate(layout.bytes())?;
    let mut packed = memory.place(layout, 0)?;
    memory.pack(
        &mut packed,
        0,
        Source {
            dtype,
            rows: &bytes,
            dequantize: Some(&Plain),
        },
        0..N,
    );

    let w = WeightSlice {
        memory: &memory,
        weights: &packed,
        slice: 0,
    };
    let mut have = vec![0.0f32; m * N];
    let mut region = RegionMut::from(&mut have[..]);
    for piece in plan::m_pieces(m) {
        let rows = Rows::new(&act[piece.first * K..], piece.rows, K, K);
        let columns = region.rows(piece.first * N * 4, [piece.rows, N], N * 4);
        npu.mul_mat(w, rows, piece.bucket, columns)?;
    }
    let (have, limit) = (
        reference::nmse(&have, &reference::mul_mat(&act, &weights, K)),
        limit(precision),
    );
    if have <= limit {
        return Ok(());
    }
    Err(Error::SelfTest {
        test: format!("{precision:?} M={m} K={K} N={N}"),
        have,
        limit,
    })
}

/// Uniform numbers in [-1, 1), the same each time: the 24 high bits of a linear congruential generator.
// SOURCE: multiplier and increment of Knuth's MMIX.
fn uniform() -> impl Iterator<Item = f32> {
    let mut state = 42u64;
    std::iter::from_fn(move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let high = u16::try_from(state >> 48).unwrap_or(0);
        Some(f32::from(high) / 32768.0 - 1.0)
    })
}
