//! What a device must compute right before it is offered: a small multiplication in each arithmetic, in decode and
//! in prefill size, against the reference.

use rknpu_ops::calibrate::Method;
use rknpu_ops::pack::Rows;

use crate::caps::Precision;
use crate::device::rknpu::{RkNpu, WeightSlice};
use crate::error::{Error, Result};
use crate::plan::Bucketing;
use crate::reference;
use crate::repack::{Source, WeightLayout};
use crate::rules::{Choice, Rules};
use crate::shm::RegionMut;
use crate::tensor::{DType, Dequantize};

pub mod hexagon;

/// N covers three chunks, so that every core of every chip takes part; K has a Hadamard block of 64.
const N: usize = 96;
const K: usize = 192;

/// Largest normalized mean square error.
///
/// INT8 rows with a scale of absmax/127 have an error of scale/sqrt(12) for each element. With uniform numbers, whose
/// absmax after the transform is at most about 4 standard deviations, that is (4/127)^2/12 = 8e-5 for each operand.
/// FP16 rounds to 2^-11, which is below 1e-7. INT4 weights: 16 levels over about 2.5 standard deviations to each side
/// have an error of 0.012 (measured in rknpu-ops/tests/int4); three times that is a wrong layout.
fn limit(precision: Precision) -> f64 {
    match precision {
        Precision::Int8 => 3e-4,
        Precision::Fp16 => 1e-6,
        Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => 4e-2,
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

/// Tests `npu`, in INT4 only if a rule asks for it.
///
/// # Errors
/// `SelfTest` with the first multiplication that is wrong, or the error of the call that failed.
pub fn run(npu: &RkNpu, rules: &Rules) -> Result<()> {
    for choice in [Choice::Fp16, Choice::Int8, Choice::Int4, Choice::Int4Fp16] {
        let opt_in = matches!(choice, Choice::Int4 | Choice::Int4Fp16);
        if opt_in && !rules.ask_for(choice) {
            continue;
        }
        for m in [1, 8] {
            multiply(npu, choice, m)?;
        }
    }
    Ok(())
}

fn multiply(npu: &RkNpu, choice: Choice, m: usize) -> Result<()> {
    let mut numbers = uniform();
    let act: Vec<f32> = numbers.by_ref().take(m * K).collect();
    let weights: Vec<f32> = numbers.take(N * K).collect();
    let dtype = DType::Quantized {
        block_elems: 1,
        block_bytes: 4,
    };
    let bytes: Vec<u8> = weights.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let Some(layout) = WeightLayout::new(npu.caps(), Some(choice), dtype, [K, N, 1, 1]) else {
        unreachable!("every chip takes FP16 and INT8, and rules for INT4 were checked");
    };
    // Numbers with 9 bits are exact in FP16, so the reference is the same for all arithmetics.
    let memory = npu.allocate(layout.bytes())?;
    let mut packed = memory.place(layout, 0)?;
    memory.pack(
        &mut packed,
        0,
        Source {
            dtype,
            rows: &bytes,
            dequantize: Some(&Plain),
            calibration: Method::default(),
            feedback: &[],
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
    for piece in Bucketing::new(&npu.caps().cost, &layout).pieces(m) {
        let rows = Rows::new(&act[piece.first * K..], piece.rows, K, K);
        let columns = region.rows(piece.first * N * 4, [piece.rows, N], N * 4);
        npu.mul_mat(w, rows, piece.bucket, None, columns)?;
    }
    let (have, limit) = (
        reference::nmse(&have, &reference::mul_mat(&act, &weights, K)),
        limit(layout.precision),
    );
    if have <= limit {
        return Ok(());
    }
    Err(Error::SelfTest {
        test: format!("{:?} M={m} K={K} N={N}", layout.precision),
        have,
        limit,
    })
}

/// Uniform numbers in [-1, 1) in steps of 1/256, the same each time: high bits of a linear congruential generator.
// SOURCE: multiplier and increment of Knuth's MMIX.
fn uniform() -> impl Iterator<Item = f32> {
    let mut state = 42u64;
    std::iter::from_fn(move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let high = u16::try_from(state >> 55).unwrap_or(0);
        Some(f32::from(high) / 256.0 - 1.0)
    })
}
