//! FLASH_ATTN_EXT: walks sequences and heads of keys and values, and finds the rows of each.

use std::ops::Range;
use std::sync::atomic::Ordering;

use half::{bf16, f16};

use super::{CallTimes, memory, operand, refused};
use crate::backend::Node;
use crate::error::{Error, Result};
use crate::graph::{Operation, Tensor};
use crate::host_memory::Region;
use crate::rockchip::RkDevice;
use crate::rockchip::caps::Precision;
use crate::rockchip::device::{HeadOperands, HeadSizes, NAME};
use crate::rockchip::plan::Attention;
use crate::tensor::DType;

/// A tensor with its bytes.
#[derive(Clone, Copy)]
struct Operand<'a> {
    tensor: Tensor<'a>,
    region: Region<'a>,
}

impl<'a> Operand<'a> {
    fn new(tensor: Tensor<'a>) -> Result<Self> {
        let region = memory(&tensor)?;
        Ok(Self { tensor, region })
    }

    /// Returns the bytes of the first `len` elements of row `[i1, i2, i3]`.
    fn row(&self, [i1, i2, i3]: [usize; 3], len: usize) -> &'a [u8] {
        let nb = self.tensor.shape.nb;
        let bytes = self.tensor.dtype.row_bytes(len).unwrap_or(0);
        self.region
            .bytes(i1 * nb[1] + i2 * nb[2] + i3 * nb[3], bytes)
    }

    /// Writes a row times `factor` as FP16.
    fn halves(&self, row: [usize; 3], factor: f32, work: &mut [f32], out: &mut [f16]) {
        let bytes = self.row(row, out.len());
        match (self.tensor.dtype, self.tensor.dequantize) {
            (DType::F16, _) if factor == 1.0 => {
                bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
                return;
            }
            (DType::F16, _) => {
                for (value, pair) in work.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f16::from_le_bytes(*pair).to_f32();
                }
            }
            (DType::Bf16, _) => {
                for (value, pair) in work.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_le_bytes(*pair).to_f32();
                }
            }
            (DType::Quantized { .. }, Some(dequantize)) => dequantize.dequantize(bytes, work),
            _ => bytemuck::cast_slice_mut(work).copy_from_slice(bytes),
        }
        for (value, out) in work.iter().zip(out) {
            *out = f16::from_f32(*value * factor);
        }
    }
}

/// The operands of one head of keys and values of one sequence. A row is a query of one head of queries, and the heads of
/// a query follow each other.
struct Head<'a> {
    plan: &'a Attention,
    q: Operand<'a>,
    k: Operand<'a>,
    v: Operand<'a>,
    mask: Option<Operand<'a>>,
    sinks: Option<Operand<'a>>,
    /// The head of keys and values, the sequence of queries, and that of keys and values.
    at: [usize; 3],
}

impl Head<'_> {
    /// Returns the query and the head of a row.
    fn place(&self, row: usize) -> (usize, usize) {
        let shared = self.plan.shared();
        (row / shared, self.at[0] * shared + row % shared)
    }

    /// Returns the cells from the first to the last one that any query sees.
    fn visible(&self) -> Range<usize> {
        let cells = self.plan.cells;
        let Some(mask) = self.mask else {
            return 0..cells;
        };
        let of_heads = mask.tensor.shape.ne[2];
        let heads = (0..self.plan.shared().min(of_heads)).map(|head| self.place(head).1 % of_heads);
        let sequence = self.at[1] % mask.tensor.shape.ne[3];
        let mut all = cells..0;
        for head in heads {
            for query in 0..self.plan.queries {
                let row = mask.row([query, head, sequence], cells);
                let is_seen = |pair: &[u8; 2]| f16::from_le_bytes(*pair) != f16::NEG_INFINITY;
                let row = row.as_chunks().0;
                let before = row.iter().take(all.start).position(is_seen);
                all.start = before.unwrap_or(all.start);
                let after = row[all.end..].iter().rposition(is_seen);
                all.end += after.map_or(0, |last| last + 1);
            }
        }
        all.start.min(all.end)..all.end
    }
}

impl HeadOperands for Head<'_> {
    fn query(&self, row: usize, out: &mut [f32]) {
        let (query, head) = self.place(row);
        let bytes = self.q.row([query, head, self.at[1]], out.len());
        bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
    }

    fn key(&self, cell: usize, factor: f32, work: &mut [f32], out: &mut [f16]) {
        let [head, _, sequence] = self.at;
        self.k.halves([cell, head, sequence], factor, work, out);
    }

    fn value(&self, cell: usize, factor: f32, work: &mut [f32], out: &mut [f16]) {
        let [head, _, sequence] = self.at;
        self.v.halves([cell, head, sequence], factor, work, out);
    }

    fn mask(&self, row: usize, cells: &Range<usize>) -> (Option<&[f16]>, f32) {
        let (query, head) = self.place(row);
        let mask = self.mask.map(|mask| {
            let [_, _, of_heads, of_sequences] = mask.tensor.shape.ne;
            let at = [query, head % of_heads, self.at[1] % of_sequences];
            let row = bytemuck::cast_slice(mask.row(at, self.plan.cells));
            &row[cells.clone()]
        });
        (mask, self.plan.slope(head))
    }

    fn sink(&self, row: usize) -> Option<f32> {
        let (_, head) = self.place(row);
        self.sinks
            .map(|sinks| bytemuck::pod_read_unaligned(sinks.region.bytes(head * 4, 4)))
    }
}

impl RkDevice {
    fn sizes(&self, plan: &Attention) -> HeadSizes {
        let buckets = self.passed.buckets(Precision::Fp16);
        HeadSizes {
            dk: plan.head[0],
            dv: plan.head[1],
            rows: plan.rows(),
            bucket: plan.bucket(self.target.caps, buckets),
            scaling: plan.scaling,
        }
    }

    /// Returns `true` if attention that is faster on the NPU can be computed there. What it needs is made now, because the CPU
    /// computes what has no room, or what the library does not take.
    pub(in crate::rockchip) fn has_room_for(&self, operation: &Operation) -> bool {
        let Ok(plan) = Attention::new(operation) else {
            return false;
        };
        if self.attention_left.load(Ordering::Relaxed) {
            return false;
        }
        let ranges = Attention::ranges(0..plan.cells);
        let padded = ranges.iter().map(|(_, padded)| *padded);
        let made = self.npu.prepare_attention(self.sizes(&plan), padded);
        match made {
            Err(error) if error.is_shortage() || error.is_of_shape() => {
                self.leave_attention(&error);
                false
            }
            // Another error shows when the node is computed.
            _ => true,
        }
    }

    /// Leaves attention to the CPU from now on.
    fn leave_attention(&self, error: &Error) {
        if !self.attention_left.swap(true, Ordering::Relaxed) {
            log::warn!("{NAME}: attention is left to the CPU: {error}");
        }
    }

    /// Computes FLASH_ATTN_EXT. Returns the time of its calls.
    pub(super) fn attention(&self, node: &mut Node) -> Result<CallTimes> {
        let Node { operation, out, .. } = node;
        let plan = Attention::new(operation).map_err(refused)?;
        let optional = |index: usize| operation.src[index].map(Operand::new).transpose();
        let [q, k, v] = [0, 1, 2].map(|index| operand(operation, index).and_then(Operand::new));
        let (q, k, v, mask, sinks) = (q?, k?, v?, optional(3)?, optional(4)?);
        if mask.is_some_and(|mask| !mask.region.bytes(0, 0).as_ptr().cast::<f16>().is_aligned()) {
            return Err(refused("the mask's address is not a multiple of 2"));
        }
        let sizes = self.sizes(&plan);
        let mut result = vec![0.0; sizes.rows * sizes.dv];
        let mut times = CallTimes::default();
        let per_sequence = plan.sequences[0] / plan.sequences[1];
        let nb = operation.dst.shape.nb;
        for sequence in 0..plan.sequences[0] {
            for head in 0..plan.heads[1] {
                let operands = Head {
                    plan: &plan,
                    q,
                    k,
                    v,
                    mask,
                    sinks,
                    at: [head, sequence, sequence / per_sequence],
                };
                let ranges = Attention::ranges(operands.visible());
                let ran = (self.npu).attend(sizes, &ranges, &operands, &mut result);
                let ran = ran.inspect_err(|error| {
                    if error.is_shortage() || error.is_of_shape() {
                        self.leave_attention(error);
                    }
                })?;
                times.add(ran, [0.0; 3], 0);
                for (row, values) in result.chunks_exact(sizes.dv).enumerate() {
                    let (query, head) = operands.place(row);
                    out.write_row(head * nb[1] + query * nb[2] + sequence * nb[3], values);
                }
            }
        }
        Ok(times)
    }
}

#[cfg(test)]
mod tests;
