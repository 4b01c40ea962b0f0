//! One NPU core: runs its share of a call and writes its columns of the result.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rknpu_ops::ffi::{CoreMask, MatmulInfo};
use rknpu_ops::int4::{self, Digits, Product, ScaledOutput, SumElem};
use rknpu_ops::pack::{self, NativeOutput, OutputRows, Rows};
use rknpu_ops::proof::{Comparison, Run};
use rustc_hash::FxHashMap;

use super::activation::Activations;
use super::recent::Recent;
use super::scratch::StageScratch;
use super::wave::{self, Step, Wave};
use super::weight::WeightSlice;
use crate::error::{Error, Result};
use crate::host_memory::RowsMut;
use crate::rockchip::caps::{DIGITS, Precision};
use crate::rockchip::driver::{Context, Memory, MemoryView, Rknn, RunOperands, Turn};
use crate::rockchip::layout::MAX_SEGMENTS;

/// Shape of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CallShape {
    domain: i32,
    precision: Precision,
    m: usize,
    k: usize,
    n: usize,
}

/// One NPU core: its contexts and where its results go.
#[derive(Debug)]
pub(super) struct Core {
    mask: Option<CoreMask>,
    /// For each distinct shape of weights and M, as many as a wave has runs.
    contexts: Recent<(CallShape, usize), Context>,
    results: StageScratch,
    /// Chunks that it computes in this call.
    chunks: Range<usize>,
    /// Shapes whose results agreed with the CPU's, with the most rows for which they did.
    proven: FxHashMap<CallShape, usize>,
    /// Time in the vendor's calls that run it, since [`Self::begin`].
    pub(super) ran: Duration,
}

/// Operands that all cores share in one call.
pub(super) struct CoreCall<'a> {
    pub(super) rknn: &'a Arc<Rknn>,
    pub(super) w: WeightSlice<'a>,
    pub(super) activations: &'a Activations,
    /// Rows with content, and M of the contexts.
    pub(super) rows: usize,
    pub(super) bucket: usize,
}

impl Core {
    /// - `contexts`, `results`: most that it keeps, of results bytes in an address space
    pub(super) fn new(mask: Option<CoreMask>, contexts: usize, results: usize) -> Self {
        Self {
            mask,
            contexts: Recent::new(contexts),
            results: StageScratch::for_results(results),
            chunks: 0..0,
            proven: FxHashMap::default(),
            ran: Duration::ZERO,
        }
    }

    /// Returns the mask of this core, if the chip has several.
    pub(super) fn mask(&self) -> Option<CoreMask> {
        self.mask
    }

    /// Drops everything that can be created again.
    pub(super) fn drop_caches(&mut self) {
        self.contexts.clear();
        self.results.clear();
    }

    /// Begins a call in which this core computes `chunks`.
    pub(super) fn begin(&mut self, chunks: Range<usize>) {
        self.chunks = chunks;
        self.ran = Duration::ZERO;
        self.results.begin();
    }

    /// Divides a call in which this core has the most chunks.
    pub(super) fn waves(&self, call: &CoreCall) -> impl Iterator<Item = Wave> + use<> {
        let (contexts, results) = (self.contexts.limit(), self.results.limit());
        wave::waves(
            &call.w.weights.layout,
            self.chunks.len(),
            contexts,
            call.c_bytes(),
            results,
        )
    }

    /// Makes everything that the runs of a wave need, and binds it. Nothing runs meanwhile.
    pub(super) fn prepare(&mut self, call: &CoreCall, wave: &Wave) -> Result<()> {
        let anchor = call.w.memory.anchor();
        for step in wave.steps(&self.chunks, call.segments()) {
            let c = self.results.reserve(anchor, step.result, call.c_bytes())?;
            let mask = self.mask;
            let key = (call.shape(), step.context);
            let context = self.contexts.get_or_make(key, || call.context(mask))?;
            context.bind(&call.operands(step, c))?;
        }
        Ok(())
    }

    /// Step 3: the runs of a wave, at the same time as those of other cores.
    pub(super) fn run(&mut self, call: &CoreCall, wave: &Wave, turn: &Turn) -> Result<()> {
        let anchor = call.w.memory.anchor();
        let begun = Instant::now();
        for step in wave.steps(&self.chunks, call.segments()) {
            let c = self.results.get_mut(anchor, step.result, call.c_bytes());
            let Some(context) = self.contexts.get_mut((call.shape(), step.context)) else {
                unreachable!("`prepare` makes as many contexts as are kept at least");
            };
            context.run(turn, &mut call.operands(step, c))?;
        }
        self.ran += begun.elapsed();
        Ok(())
    }

    /// Makes the results of a wave visible. Nothing runs meanwhile.
    pub(super) fn fetch(&mut self, call: &CoreCall, wave: &Wave) -> Result<()> {
        let anchor = call.w.memory.anchor();
        let begun = Instant::now();
        for step in wave.steps(&self.chunks, call.segments()) {
            let c = self.results.get_mut(anchor, step.result, call.c_bytes());
            c.sync_from_device()?;
        }
        self.ran += begun.elapsed();
        Ok(())
    }

    /// Returns `true` if results of the call's shape, with as many rows, have not been compared
    /// with the CPU's.
    pub(super) fn is_unproven(&self, call: &CoreCall) -> bool {
        let rows = self.proven.get(&call.shape());
        rows.is_none_or(|rows| *rows < call.rows)
    }

    /// Compares results of a wave with the CPU's, from the bytes of the weights' memory.
    ///
    /// # Errors
    /// `WrongSums` if any is wrong.
    pub(super) fn prove(&mut self, call: &CoreCall, wave: &Wave, weights: &[u8]) -> Result<()> {
        let (anchor, shape) = (call.w.memory.anchor(), call.shape());
        let layout = &call.w.weights.layout;
        let mut all = Comparison::default();
        for step in wave.steps(&self.chunks, call.segments()) {
            let run = Run {
                layout: &layout.native,
                shape: [shape.m, shape.k, shape.n],
                a: call.operand_a(step).bytes(),
                b: &weights[call.operand_b(step).range()],
                c: self
                    .results
                    .get(anchor, step.result, call.c_bytes())
                    .bytes(),
            };
            all.add(run.compare());
        }
        if all.wrong > 0 {
            let CallShape { m, k, n, .. } = shape;
            return Err(Error::WrongSums {
                what: format!("{} M={m} K={k} N={n}", shape.precision),
                wrong: all.wrong,
                sums: all.sums,
            });
        }
        if all.proves() {
            self.proven.insert(shape, call.rows);
        }
        Ok(())
    }

    /// Step 4 for the chunks of a last wave, which are the next columns of `dst`.
    pub(super) fn unpack(&self, call: &CoreCall, wave: &Wave, dst: &mut RowsMut) {
        let segments = call.segments();
        for step in wave
            .steps(&self.chunks, segments)
            .filter(|step| step.segment + 1 == segments)
        {
            let columns = call.w.weights.layout.chunk_rows(step.chunk).len();
            let first = step.result + 1 - segments;
            self.unpack_chunk(call, step.chunk, first, &mut dst.split_columns(columns));
        }
    }

    /// Sums the segments of a chunk, whose results begin with number `first`, and scales them into
    /// the columns of `dst`.
    fn unpack_chunk(&self, call: &CoreCall, chunk: usize, first: usize, dst: &mut RowsMut) {
        let layout = &call.w.weights.layout;
        let segments = 0..layout.segments;
        let c_bytes = call.c_bytes();
        let bytes = |segment| {
            let memory = self
                .results
                .get(call.w.memory.anchor(), first + segment, c_bytes);
            &memory.bytes()[..c_bytes]
        };
        let (c, scales) = (layout.native.c, &call.activations.scales[..]);
        let columns = layout.chunk_rows(chunk).len();
        let w_scales = |set| {
            let range = layout.chunk_scales(call.w.slice, chunk, set);
            &call.w.weights.scales[range][..columns]
        };
        match layout.precision {
            Precision::Int8 | Precision::Int8Unrotated => {
                let mut parts: [&[i32]; MAX_SEGMENTS] = [&[]; MAX_SEGMENTS];
                segments
                    .clone()
                    .for_each(|segment| parts[segment] = bytemuck::cast_slice(bytes(segment)));
                let output = NativeOutput::new(&parts[segments], c, call.bucket);
                pack::unpack_i32(output, 0..call.rows, scales, w_scales(0), dst);
            }
            Precision::Fp16 => {
                let mut parts: [&[f32]; MAX_SEGMENTS] = [&[]; MAX_SEGMENTS];
                segments
                    .clone()
                    .for_each(|segment| parts[segment] = bytemuck::cast_slice(bytes(segment)));
                let output = NativeOutput::new(&parts[segments], c, call.bucket);
                pack::unpack_f32(output, 0..call.rows, scales, columns, dst);
                if !call.w.weights.unscaled {
                    scale_columns(dst, call.rows, w_scales(0));
                }
            }
            Precision::Int4 => {
                let mut parts = [ScaledOutput {
                    c: &[],
                    w_scales: &[],
                }; MAX_SEGMENTS];
                for (part, segment) in parts.iter_mut().zip(segments.clone()) {
                    part.c = bytemuck::cast_slice::<_, i16>(bytes(segment));
                    part.w_scales = w_scales(segment);
                }
                unpack_scaled(call, &parts[segments], DIGITS, dst);
            }
            Precision::Int8Wide => {
                let mut parts = [ScaledOutput {
                    c: &[],
                    w_scales: w_scales(0),
                }; MAX_SEGMENTS];
                for (part, segment) in parts.iter_mut().zip(segments.clone()) {
                    part.c = bytemuck::cast_slice::<_, i32>(bytes(segment));
                }
                unpack_scaled(call, &parts[segments], Digits::TwoBytes, dst);
            }
            Precision::Int4Int8 => {
                let mut parts = [ScaledOutput {
                    c: &[],
                    w_scales: &[],
                }; MAX_SEGMENTS];
                for (part, segment) in parts.iter_mut().zip(segments.clone()) {
                    part.c = bytemuck::cast_slice::<_, i32>(bytes(segment));
                    part.w_scales = w_scales(segment);
                }
                unpack_scaled(call, &parts[segments], Digits::One, dst);
            }
            Precision::Int4Fp16 => {
                let mut parts = [ScaledOutput {
                    c: &[],
                    w_scales: &[],
                }; MAX_SEGMENTS];
                for (part, segment) in parts.iter_mut().zip(segments.clone()) {
                    part.c = bytemuck::cast_slice::<_, f32>(bytes(segment));
                    part.w_scales = w_scales(segment);
                }
                unpack_scaled(call, &parts[segments], Digits::One, dst);
            }
        }
    }
}

/// Multiplies each column by its scale.
fn scale_columns(dst: &mut RowsMut, rows: usize, scales: &[f32]) {
    for m in 0..rows {
        for (value, scale) in dst.row(m).iter_mut().zip(scales) {
            *value *= scale;
        }
    }
}

/// Step 4 for weights with a scale for each segment.
fn unpack_scaled<T: SumElem>(
    call: &CoreCall,
    parts: &[ScaledOutput<T>],
    digits: Digits,
    dst: &mut RowsMut,
) {
    let layout = &call.w.weights.layout;
    let per_row = Activations::scales_per_row(layout);
    let factors = Rows::new(&call.activations.scales, call.rows, per_row, per_row);
    let m = call.bucket * layout.precision.rows();
    let product = Product::new(parts, layout.native.c, m, digits, factors);
    int4::unpack_scaled(product, 0..call.rows, dst);
}

impl CoreCall<'_> {
    fn segments(&self) -> usize {
        self.w.weights.layout.segments
    }

    /// Returns the bytes of the results of one run.
    fn c_bytes(&self) -> usize {
        let layout = &self.w.weights.layout;
        layout.native.c.bytes(self.shape().m, layout.chunk_n)
    }

    fn operand_a(&self, step: Step) -> &Memory {
        let layout = &self.w.weights.layout;
        let bytes = layout.native.a.bytes(self.shape().m, layout.segment_k);
        (self.activations.native).get(self.w.memory.anchor(), step.segment, bytes)
    }

    fn operand_b(&self, step: Step) -> &MemoryView {
        let w = &self.w;
        &w.weights.blocks[w.weights.layout.block(w.slice, step.chunk, step.segment)]
    }

    fn operands<'a>(&'a self, step: Step, c: &'a mut Memory) -> RunOperands<'a> {
        RunOperands {
            a: self.operand_a(step),
            b: self.operand_b(step),
            c,
        }
    }

    /// Makes a context for the call's shape.
    fn context(&self, mask: Option<CoreMask>) -> Result<Context> {
        let shape = self.shape();
        let [m, k, n] =
            [shape.m, shape.k, shape.n].map(|size| i32::try_from(size).unwrap_or(i32::MAX));
        let mut info = MatmulInfo::native(shape.precision.matmul_type(), m, k, n);
        info.iommu_domain_id = shape.domain;
        let context = Context::new(self.rknn, info, mask)?;
        context.expect(&self.w.weights.layout.native)?;
        Ok(context)
    }

    fn shape(&self) -> CallShape {
        let layout = &self.w.weights.layout;
        CallShape {
            domain: self.w.memory.anchor().domain(),
            precision: layout.precision,
            m: self.bucket * layout.precision.rows(),
            k: layout.segment_k,
            n: layout.chunk_n,
        }
    }
}
