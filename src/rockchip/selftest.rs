//! Small multiplications that a device must compute right before it is offered: each arithmetic,
//! from decode to prefill size, against the reference. An arithmetic with one wrong M is used
//! without calls of this M.

use std::sync::LazyLock;

use rknpu_ops::calibrate::Method;
use rknpu_ops::pack::Rows;

use crate::config::rules::{Choice, Rules};
use crate::error::{Error, Result};
use crate::host_memory::RegionMut;
use crate::reference;
use crate::rockchip::caps::Precision;
use crate::rockchip::device::{NAME, PackedWeights, RkNpu, WeightMemory, WeightSlice};
use crate::rockchip::layout::WeightLayout;
use crate::rockchip::pack::RowSource;
use crate::rockchip::plan::Buckets;
use crate::tensor::{DType, Dequantize};

/// N covers three chunks, so that every core of every chip takes part.
const N: usize = 96;
/// K is 33 tiles of 32: longer than what one pass of the NPU's input buffers takes, and no power of
/// two.
const K: usize = 1056;
/// M of decode, of two rows (which librknnrt 1.5.2 computes wrong), of small batches and of
/// prefill.
const ROWS: [usize; 5] = [1, 2, 4, 16, 128];

/// The numbers of every multiplication: the same each time.
static CASE: LazyLock<Case> = LazyLock::new(|| {
    let mut numbers = reference::uniform();
    let act: Vec<f32> = numbers.by_ref().take(128 * K).collect();
    let weights: Vec<f32> = numbers.take(N * K).collect();
    Case {
        want: reference::mul_mat(&act, &weights, K),
        bytes: weights.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        act,
    }
});

/// Operands and their product, for the largest M.
struct Case {
    act: Vec<f32>,
    /// Weights, as [`PlainWeights`] stores them.
    bytes: Vec<u8>,
    want: Vec<f64>,
}

/// The M that calls may have in each arithmetic.
#[derive(Clone, Debug, Default)]
pub struct Passed(Vec<(Precision, Buckets)>);

impl Passed {
    /// Returns the M that calls may have: all in an arithmetic that was not tested. Calls without a
    /// rotation are those of INT8.
    #[must_use]
    pub fn buckets(&self, precision: Precision) -> Buckets {
        let mut tested = self.0.iter();
        tested
            .find(|(tested, _)| tested.matmul_type() == precision.matmul_type())
            .map_or(Buckets::ALL, |(_, buckets)| *buckets)
    }
}

/// Returns the largest normalized mean square error.
///
/// INT8 rows with a scale of absmax/127 have an error of scale/sqrt(12) for each element. With
/// uniform numbers, whose absmax after the transform is at most about 4 standard deviations, that
/// is (4/127)^2/12 = 8e-5 for each operand. FP16 rounds to 2^-11, which is below 1e-7. INT4
/// weights: 16 levels over about 2.5 standard deviations to each side have an error of 0.012
/// (measured in rknpu-ops/tests/int4); three times that is a wrong layout.
fn limit(precision: Precision) -> f64 {
    match precision {
        Precision::Int8 | Precision::Int8Plain => 3e-4,
        Precision::Fp16 => 1e-6,
        Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => 4e-2,
    }
}

/// Weights that are F32 in disguise, so that the test needs no ggml.
struct PlainWeights;

impl Dequantize for PlainWeights {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        for (value, bytes) in out.iter_mut().zip(blocks.as_chunks::<4>().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
    }
}

/// Tests `npu`, in INT4 only if a rule asks for it, and returns the M that it may be called with.
///
/// # Errors
/// `SelfTest` if an arithmetic is wrong with more than one M, or the error of the call that failed.
pub fn run(npu: &RkNpu, rules: &Rules) -> Result<Passed> {
    let mut passed = Passed::default();
    for choice in [Choice::Fp16, Choice::Int8, Choice::Int4, Choice::Int4Fp16] {
        let opt_in = matches!(choice, Choice::Int4 | Choice::Int4Fp16);
        if !opt_in || rules.ask_for(choice) {
            passed.0.push(arithmetic(npu, choice)?);
        }
    }
    Ok(passed)
}

/// Tests one arithmetic.
fn arithmetic(npu: &RkNpu, choice: Choice) -> Result<(Precision, Buckets)> {
    let dtype = DType::Quantized {
        block_elems: 1,
        block_bytes: 4,
    };
    let Some(layout) = WeightLayout::new(npu.caps(), Some(choice), dtype, [K, N, 1, 1]) else {
        unreachable!("every chip takes FP16 and INT8, and rules for INT4 were checked");
    };
    let memory = npu.allocate(layout.bytes())?;
    let mut packed = memory.place(layout, 0)?;
    let source = RowSource {
        dtype,
        rows: &CASE.bytes,
        dequantize: Some(&PlainWeights),
        calibration: Method::default(),
        feedback: &[],
    };
    memory.pack(&mut packed, 0, source, 0..N);

    let (precision, limit) = (layout.precision, limit(layout.precision));
    let mut wrong = Vec::new();
    for m in ROWS {
        let have = multiply(npu, &memory, &packed, m)?;
        // An error that is not a number is over the limit, too.
        if have.is_nan() || have > limit {
            wrong.push((m, have));
        }
    }
    match wrong[..] {
        [] => Ok((precision, Buckets::ALL)),
        [(m, have)] => {
            log::warn!(
                "{}: {precision:?} with M={m} gives wrong results (error {have:.1e} is over {limit:.1e}); other M take \
                 their place",
                NAME
            );
            Ok((precision, Buckets::ALL.without(m)))
        }
        [(m, have), ..] => Err(Error::SelfTest {
            test: format!("{precision:?} M={m} K={K} N={N}"),
            have,
            limit,
        }),
    }
}

/// Multiplies `m` rows in calls of just this M, and returns the normalized mean square error.
fn multiply(npu: &RkNpu, memory: &WeightMemory, weights: &PackedWeights, m: usize) -> Result<f64> {
    let w = WeightSlice {
        memory,
        weights,
        slice: 0,
    };
    let mut have = vec![0.0f32; m * N];
    let mut region = RegionMut::from(&mut have[..]);
    let rows = Rows::new(&CASE.act[..m * K], m, K, K);
    npu.mul_mat(w, rows, m, None, region.rows(0, [m, N], N * 4))?;
    // Numbers with 9 bits are exact in FP16, so the reference is the same for all arithmetics.
    Ok(reference::nmse(&have, &CASE.want[..m * N]))
}
