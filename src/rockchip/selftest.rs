//! Small multiplications that a device must compute right before it is offered: each arithmetic
//! with each M, against the reference. An arithmetic with one wrong M is used without calls of this
//! M. All cores at once must give the bytes of one core, or one core is used.
//!
//! The shapes of a model's own weights are compared at their first use (`device`).

use std::sync::LazyLock;

use rknpu_ops::calibrate::Method;
use rknpu_ops::pack::Rows;

use crate::config::rules::{Choice, Rules};
use crate::error::{Error, Result};
use crate::host_memory::RegionMut;
use crate::reference;
use crate::rockchip::caps::Precision;
use crate::rockchip::device::{NAME, PackedWeights, RkNpu, Spread, WeightMemory, WeightSlice};
use crate::rockchip::layout::{BLOCK_ALIGN_BYTES, WeightLayout};
use crate::rockchip::pack::RowSource;
use crate::rockchip::plan::{Buckets, M_BUCKET_MAX};
use crate::tensor::{DType, Dequantize};

/// N covers three chunks, so that every core of every chip is used.
const N: usize = 96;
/// K is 33 tiles of 32: longer than one pass of the NPU's input buffers can hold, and not a power
/// of two.
const K: usize = 1056;
/// Rows of N that each core multiplies while the others do, and M: long enough for cores to run at
/// the same time.
const WIDE_N: usize = 4 * N;
const WIDE_M: usize = 128;
/// Number of times that all cores multiply at once.
const ROUNDS: usize = 4;

/// The numbers of every multiplication; they are the same in each run.
static CASE: LazyLock<Case> = LazyLock::new(|| {
    let mut numbers = reference::uniform();
    let act: Vec<f32> = numbers.by_ref().take(M_BUCKET_MAX * K).collect();
    let weights: Vec<f32> = numbers.take(WIDE_N * K).collect();
    Case {
        want: reference::mul_mat(&act, &weights[..N * K], K),
        bytes: weights.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        act,
    }
});

/// Operands, and the product of the largest M with the first [`N`] rows of weights.
struct Case {
    act: Vec<f32>,
    /// [`WIDE_N`] rows of weights, as [`F32InBlocks`] stores them.
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
        Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => 3e-4,
        Precision::Fp16 => 1e-6,
        Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => 4e-2,
    }
}

/// Weights that are F32 but appear as a quantized type, so that the test needs no ggml.
struct F32InBlocks;

impl Dequantize for F32InBlocks {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        for (value, bytes) in out.iter_mut().zip(blocks.as_chunks::<4>().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
    }
}

/// Tests `npu`, in INT4 only if a rule contains it, and returns the values of M that it may be
/// called with. Restricts it to one core if several cores disturb each other.
///
/// # Errors
/// `SelfTest` if an arithmetic is wrong with more than one M, or the error of the call that failed.
pub fn run(npu: &RkNpu, rules: &Rules) -> Result<Passed> {
    if npu.caps().cores.count() > 1
        && let Some(differ) = cores(npu)?
    {
        log::warn!(
            "{NAME}: {differ} of {} results of all cores at once are not those of one core: one core is used",
            WIDE_N * WIDE_M
        );
        npu.use_one_core();
    }
    let mut passed = Passed::default();
    for choice in [Choice::Fp16, Choice::Int8, Choice::Int4, Choice::Int4Fp16] {
        let opt_in = matches!(choice, Choice::Int4 | Choice::Int4Fp16);
        if !opt_in || rules.ask_for(choice) {
            passed.0.push(arithmetic(npu, choice)?);
        }
    }
    Ok(passed)
}

/// Multiplies on one core and on all cores at once, with weights that are views with offsets, and
/// compares the bytes. Returns the most results that differed, if any.
///
/// # Errors
/// The error of the call that failed.
// SOURCE: pty819/rk-llama.cpp reports wrong results of such views with two driver threads at once.
pub fn cores(npu: &RkNpu) -> Result<Option<usize>> {
    // The memory begins with an unused page, so that every view has an offset greater than 0.
    let (memory, packed) = pack(npu, Choice::Int8, WIDE_N, BLOCK_ALIGN_BYTES)?;
    let multiply = |spread| {
        let mut have = vec![0.0f32; WIDE_M * WIDE_N];
        multiply(npu, (&memory, &packed), WIDE_M, spread, &mut have)?;
        Ok::<_, Error>(have)
    };
    let one = multiply(Spread::OneCore)?;
    let mut most = 0;
    for _ in 0..ROUNDS {
        let all = multiply(Spread::AllCores)?;
        let differ = all
            .iter()
            .zip(&one)
            .filter(|(all, one)| all.to_bits() != one.to_bits());
        most = most.max(differ.count());
    }
    Ok((most > 0).then_some(most))
}

/// Packs `n` rows of weights at `offset` of memory for them.
fn pack(
    npu: &RkNpu,
    choice: Choice,
    n: usize,
    offset: usize,
) -> Result<(WeightMemory, PackedWeights)> {
    let dtype = DType::Quantized {
        block_elems: 1,
        block_bytes: 4,
    };
    let Some(layout) = WeightLayout::new(npu.caps(), Some(choice), dtype, [K, n, 1, 1]) else {
        unreachable!("every chip takes FP16 and INT8, and rules for INT4 were checked");
    };
    let memory = npu.allocate(offset + layout.bytes())?;
    let mut packed = npu.place(&memory, layout, offset)?;
    let source = RowSource {
        dtype,
        rows: &CASE.bytes[..n * K * 4],
        dequantize: Some(&F32InBlocks),
        calibration: Method::default(),
        feedback: &[],
    };
    memory.pack(&mut packed, offset, source, 0..n);
    Ok((memory, packed))
}

/// Tests one arithmetic.
fn arithmetic(npu: &RkNpu, choice: Choice) -> Result<(Precision, Buckets)> {
    let (memory, packed) = pack(npu, choice, N, 0)?;
    let layout = packed.layout();
    let (precision, limit) = (layout.precision, limit(layout.precision));
    let mut wrong = Vec::new();
    for m in (0..=M_BUCKET_MAX.ilog2()).map(|log| 1 << log) {
        let mut have = vec![0.0f32; m * N];
        multiply(npu, (&memory, &packed), m, Spread::AllCores, &mut have)?;
        // Numbers of 9 bits are exact in FP16, so one reference serves all precisions.
        let have = reference::nmse(&have, &CASE.want[..m * N]);
        // NaN is over the limit, too.
        if have.is_nan() || have > limit {
            wrong.push((m, have));
        }
    }
    match wrong[..] {
        [] => Ok((precision, Buckets::ALL)),
        [(m, have)] => {
            log::warn!(
                "{}: {precision} with M={m} gives wrong results (error {have:.1e} is over {limit:.1e}); other M take \
                 their place",
                NAME
            );
            Ok((precision, Buckets::ALL.without(m)))
        }
        [(m, have), ..] => Err(Error::SelfTest {
            test: format!("{precision} M={m} K={K} N={N}"),
            have,
            limit,
        }),
    }
}

/// Multiplies `m` rows in a call with exactly this M.
fn multiply(
    npu: &RkNpu,
    (memory, weights): (&WeightMemory, &PackedWeights),
    m: usize,
    spread: Spread,
    have: &mut [f32],
) -> Result<()> {
    let w = WeightSlice {
        memory,
        weights,
        slice: 0,
    };
    let n = weights.layout().n;
    let rows = Rows::new(&CASE.act[..m * K], m, K, K);
    let mut region = RegionMut::from(have);
    npu.try_mul_mat(w, rows, m, region.rows(0, [m, n], n * 4), spread)?;
    Ok(())
}
