//! One NPU core: runs its share of a call and writes its columns of the result.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rknpu_ops::ffi::{CoreMask, MatmulInfo};
use rknpu_ops::int4::{self, Digits, Product, ScaledOutput, SumElem};
use rknpu_ops::pack::{self, NativeOutput, OutputRows, Rows};

use super::activation::Activations;
use super::recent::Recent;
use super::scratch::StageScratch;
use super::weight::WeightSlice;
use crate::error::Result;
use crate::host_memory::RowsMut;
use crate::rockchip::caps::{DIGITS, Precision};
use crate::rockchip::driver::{Context, Rknn, RunOperands};
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
    /// One for each distinct shape of weights and M.
    contexts: Recent<CallShape, Context>,
    results: StageScratch,
    /// Time in the vendor's calls that run it, since [`Self::run_chunks`] began.
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
            results: StageScratch::new(results),
            ran: Duration::ZERO,
        }
    }

    /// Drops what can be made again.
    pub(super) fn let_go(&mut self) {
        self.contexts.clear();
        self.results.clear();
    }

    /// Steps 3 and 4 for the chunks of this core, which are the columns of `dst`.
    pub(super) fn run_chunks(
        &mut self,
        call: &CoreCall,
        chunks: Range<usize>,
        dst: &mut RowsMut,
    ) -> Result<()> {
        let layout = &call.w.weights.layout;
        let a_bytes = layout.native.a.bytes(call.shape().m, layout.segment_k);
        let c_bytes = layout.native.c.bytes(call.shape().m, layout.chunk_n);
        self.ran = Duration::ZERO;
        self.results.begin();
        for chunk in chunks {
            for segment in 0..layout.segments {
                let c = self
                    .results
                    .reserve(call.w.memory.anchor(), segment, c_bytes)?;
                let a = call
                    .activations
                    .native
                    .get(call.w.memory.anchor(), segment, a_bytes);
                let b = &call.w.weights.blocks[layout.block(call.w.slice, chunk, segment)];
                let mask = self.mask;
                let context = self
                    .contexts
                    .get_or_make(call.shape(), || call.context(mask))?;
                let begun = Instant::now();
                context.run(RunOperands { a, b, c })?;
                c.sync_from_device()?;
                self.ran += begun.elapsed();
            }
            let columns = layout.chunk_rows(chunk).len();
            self.unpack(call, chunk, c_bytes, &mut dst.split_columns(columns));
        }
        Ok(())
    }

    /// Step 4: sums the segments of a chunk and scales them into the columns of `dst`.
    fn unpack(&self, call: &CoreCall, chunk: usize, c_bytes: usize, dst: &mut RowsMut) {
        let layout = &call.w.weights.layout;
        let segments = 0..layout.segments;
        let bytes = |segment| {
            &self
                .results
                .get(call.w.memory.anchor(), segment, c_bytes)
                .bytes()[..c_bytes]
        };
        let (c, scales) = (layout.native.c, &call.activations.scales[..]);
        let columns = layout.chunk_rows(chunk).len();
        let w_scales = |set| {
            let range = layout.chunk_scales(call.w.slice, chunk, set);
            &call.w.weights.scales[range][..columns]
        };
        match layout.precision {
            Precision::Int8 | Precision::Int8Plain => {
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
