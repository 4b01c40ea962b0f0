//! FLASH_ATTN_EXT: goes through sequences and heads of keys and values, and finds the rows of each.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use half::{bf16, f16};

use self::seen::Seen;
use super::{CallTimes, memory, operand, refused};
use crate::backend::Node;
use crate::error::{Error, Result};
use crate::graph::{Operation, Tensor};
use crate::host_memory::Region;
use crate::rockchip::RkDevice;
use crate::rockchip::caps::Precision;
use crate::rockchip::device::{Cache, HeadOperands, HeadSizes, NAME};
use crate::rockchip::plan::Attention;
use crate::tensor::DType;

mod seen;

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

    /// Writes a row.
    fn floats(&self, row: [usize; 3], out: &mut [f32]) {
        let bytes = self.row(row, out.len());
        match (self.tensor.dtype, self.tensor.dequantize) {
            (DType::F16, _) => {
                for (value, pair) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f16::from_le_bytes(*pair).to_f32();
                }
            }
            (DType::Bf16, _) => {
                for (value, pair) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_le_bytes(*pair).to_f32();
                }
            }
            (DType::Quantized { .. }, Some(dequantize)) => dequantize.dequantize(bytes, out),
            _ => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
        }
    }
}

/// The operands of one head of keys and values of one sequence. A row is a query of one head of
/// queries, and the heads of a query follow each other.
struct Head<'a> {
    plan: &'a Attention,
    q: Operand<'a>,
    k: Operand<'a>,
    v: Operand<'a>,
    mask: Option<Operand<'a>>,
    sinks: Option<Operand<'a>>,
    /// For each cell, whether a row sees it; `None` if all do.
    seen: Option<Cow<'a, [bool]>>,
    /// Indices: the head of keys and values, the sequence of queries, and the sequence of keys and
    /// values.
    at: [usize; 3],
}

impl Head<'_> {
    /// Returns the query and the head of a row.
    fn place(&self, row: usize) -> (usize, usize) {
        let shared = self.plan.shared();
        (row / shared, self.at[0] * shared + row % shared)
    }

    /// Returns the operand that holds a cache, and the place of a cell in it.
    fn cell(&self, cache: Cache, cell: usize) -> (&Operand<'_>, [usize; 3]) {
        let [head, _, sequence] = self.at;
        let operand = match cache {
            Cache::Keys => &self.k,
            Cache::Values => &self.v,
        };
        (operand, [cell, head, sequence])
    }
}

impl HeadOperands for Head<'_> {
    fn query(&self, row: usize, out: &mut [f32]) {
        let (query, head) = self.place(row);
        let bytes = self.q.row([query, head, self.at[1]], out.len());
        bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
    }

    fn halves(&self, cache: Cache, cell: usize) -> Option<&[f16]> {
        let (operand, place) = self.cell(cache, cell);
        let [dk, dv] = self.plan.head;
        let len = if cache == Cache::Keys { dk } else { dv };
        (operand.tensor.dtype == DType::F16)
            .then(|| bytemuck::try_cast_slice(operand.row(place, len)).ok())
            .flatten()
    }

    fn floats(&self, cache: Cache, cell: usize, out: &mut [f32]) {
        let (operand, place) = self.cell(cache, cell);
        operand.floats(place, out);
    }

    fn is_seen(&self, cell: usize) -> bool {
        self.seen.as_ref().is_none_or(|seen| seen[cell])
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

    /// Returns `true` if attention that is faster on the NPU can be computed there. Everything it
    /// needs is created now, so that the CPU computes attention if there is no room or the library
    /// refuses the shape.
    pub(in crate::rockchip) fn has_room_for(&self, operation: &Operation) -> bool {
        let Ok(plan) = Attention::new(operation) else {
            return false;
        };
        if self.attention_left.load(Ordering::Relaxed) {
            return false;
        }
        let made = (self.npu).prepare_attention(self.sizes(&plan), &plan.ranges());
        match made {
            Err(error) if self.is_of_attention(&error) => {
                self.leave_attention(&error);
                false
            }
            // Any other error is reported when the node is computed.
            _ => true,
        }
    }

    /// Returns `true` if the device continues with products after an error of attention.
    fn is_of_attention(&self, error: &Error) -> bool {
        !self.npu.is_lost() && !matches!(error, Error::Busy { .. })
    }

    /// Leaves attention to the CPU from now on.
    fn leave_attention(&self, error: &Error) {
        if !self.attention_left.swap(true, Ordering::Relaxed) {
            log::warn!("{NAME}: attention is left to the CPU: {error}");
            self.npu.rest_attention();
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
        let (sizes, ranges) = (self.sizes(&plan), plan.ranges());
        let seen = mask.map(|mask| Seen::new(&plan, &mask));
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
                    seen: seen.as_ref().map(|seen| seen.of(&plan, head, sequence)),
                    at: [head, sequence, sequence / per_sequence],
                };
                let ran = self.head(sizes, &ranges, &operands, &mut result)?;
                times.add(ran, [0.0; 3], 0);
                for (row, values) in result.chunks_exact(sizes.dv).enumerate() {
                    let (query, head) = operands.place(row);
                    out.write_row(head * nb[1] + query * nb[2] + sequence * nb[3], values);
                }
            }
        }
        self.npu.written(&out.addresses());
        Ok(times)
    }

    /// Computes a head on the NPU, or on the CPU if that fails and the device continues without
    /// attention.
    fn head(
        &self,
        sizes: HeadSizes,
        ranges: &[(Range<usize>, usize)],
        operands: &Head,
        out: &mut [f32],
    ) -> Result<Duration> {
        if !self.attention_left.load(Ordering::Relaxed) {
            match self.npu.attend(sizes, ranges, operands, out) {
                Err(error) if self.is_of_attention(&error) => self.leave_attention(&error),
                other => return other,
            }
        }
        (self.npu).attend_on_cpu(sizes, operands.plan.cells, operands, out);
        Ok(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests;
