//! Plans FLASH_ATTN_EXT: which shapes the device computes, into which products, and whether that is
//! faster than the CPU.

use std::ops::Range;

use rknpu_ops::attention::Scaling;

use super::bucket::Buckets;
use super::readable;
use crate::graph::{Operation, Refusal, Tensor};
use crate::rockchip::caps::{self, Precision, RkCaps};
use crate::tensor::DType;

/// Most cells of one product.
// SOURCE: PV with K = 2048 runs at 574 GFLOPS on RK3588, with 4096 at a sixth of that
// (unimatrix099's fork of rk-llama.cpp).
const CELLS: usize = 2048;

/// Most elements of a head.
const MAX_HEAD: usize = 1024;

/// Fewest rows of queries in a product, if there are as many.
const FEW_ROWS: usize = 32;

/// The attention of all heads: `dst = softmax(scale · q · k + mask) · v`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Elements of a key, and of a value.
    pub head: [usize; 2],
    /// Heads of queries, and of keys and values.
    pub heads: [usize; 2],
    /// Sequences of queries, and of keys and values.
    pub sequences: [usize; 2],
    /// Queries of a head.
    pub queries: usize,
    /// Cells of a head.
    pub cells: usize,
    /// The function between scores and probabilities.
    pub scaling: Scaling,
    /// ALiBi's bias; 0 for none.
    pub max_bias: f32,
}

impl Attention {
    /// Plans a node.
    ///
    /// # Errors
    /// The reason why the device cannot compute the operation.
    pub fn new(operation: &Operation) -> Result<Self, Refusal> {
        let [Some(q), Some(k), Some(v), mask, sinks, ..] = &operation.src else {
            return Err("an operand of attention is missing");
        };
        check_rows(q, k, v, &operation.dst)?;
        let ([dk, queries, heads, s], [dk2, cells, kv_heads, kv_s]) = (q.shape.ne, k.shape.ne);
        let [dv, cells2, v_heads, v_s] = v.shape.ne;
        let divides = |many: usize, few: usize| few > 0 && many.is_multiple_of(few);
        let fits = (dk, cells) == (dk2, cells2)
            && [v_heads, v_s] == [kv_heads, kv_s]
            && divides(heads, kv_heads)
            && divides(s, kv_s)
            && operation.dst.shape.ne == [dv, heads, queries, s];
        if !fits {
            return Err("shapes do not fit");
        }
        if dk > MAX_HEAD || dv > MAX_HEAD {
            return Err("heads of attention are too long");
        }
        if let Some(mask) = mask {
            let [of_cells, of_queries, of_heads, of_s] = mask.shape.ne;
            if mask.dtype != DType::F16 || mask.shape.nb[0] != 2 || !readable(mask) {
                return Err("mask is not F16 in host memory");
            }
            let aligned = mask.shape.nb.iter().all(|step| step.is_multiple_of(2));
            let fits = of_cells >= cells && of_queries >= queries;
            if !fits || !aligned || !divides(heads, of_heads) || !divides(s, of_s) {
                return Err("mask does not fit");
            }
        }
        if let Some(sinks) = sinks
            && (sinks.dtype != DType::F32
                || sinks.shape.ne != [heads, 1, 1, 1]
                || sinks.shape.nb[0] != 4
                || !readable(sinks))
        {
            return Err("sinks are not an F32 for each head in host memory");
        }
        let [scale, max_bias, softcap, ..] = operation.params;
        let [scale, max_bias, softcap] =
            [scale, max_bias, softcap].map(|bits| f32::from_bits(bits.cast_unsigned()));
        Ok(Self {
            head: [dk, dv],
            heads: [heads, kv_heads],
            sequences: [s, kv_s],
            queries,
            cells,
            scaling: Scaling { scale, softcap },
            max_bias,
        })
    }

    /// Returns the heads of queries that share one of keys and values.
    #[must_use]
    pub fn shared(&self) -> usize {
        self.heads[0] / self.heads[1]
    }

    /// Returns the rows of queries that share a head of keys and values.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shared() * self.queries
    }

    /// Returns the M of products: such that all cores have rows, but at least as many as a call
    /// computes in the time of one.
    #[must_use]
    pub fn bucket(&self, caps: &RkCaps, buckets: Buckets) -> usize {
        let rows = self.rows();
        let of_core = rows.div_ceil(caps.cores.count());
        let largest = buckets.largest();
        let wanted = of_core.max(FEW_ROWS.min(rows)).min(largest);
        buckets.at_least(wanted).unwrap_or(largest)
    }

    /// Divides the cells into ranges for one product each, with the cells of the product. All
    /// products of complete ranges have one shape, so there are at most two shapes.
    #[must_use]
    pub fn ranges(&self) -> Vec<(Range<usize>, usize)> {
        (0..self.cells)
            .step_by(CELLS)
            .map(|first| first..(first + CELLS).min(self.cells))
            .map(|cells| (cells.clone(), padded_cells(cells.len())))
            .collect()
    }

    /// Returns the bias of a head's mask: `2^(-max_bias / heads)` to a power that grows with the
    /// head.
    ///
    /// SOURCE: ggml_compute_forward_flash_attn_ext_f16, ggml-cpu/ops.cpp of llama.cpp 0.5.0.
    #[must_use]
    pub fn slope(&self, head: usize) -> f32 {
        if self.max_bias <= 0.0 {
            return 1.0;
        }
        let [heads, _] = self.heads;
        let lower = 1_usize << heads.max(1).ilog2();
        // CAST: numbers of heads are small.
        let (count, head_of, past) = (lower as f32, head as f32, head as f32 - lower as f32);
        if head < lower {
            (-self.max_bias / count).exp2().powf(head_of + 1.0)
        } else {
            (-self.max_bias / 2.0 / count).exp2().powf(2.0 * past + 1.0)
        }
    }

    /// Returns `true` if the NPU is faster than the CPU by the cost table. All cells are assumed to
    /// be visible.
    #[must_use]
    pub fn pays(&self, caps: &RkCaps) -> bool {
        self.queries >= FEW_ROWS && self.npu_ns(caps) < self.cpu_ns(caps)
    }

    /// Returns the products of rows, cells and elements of a head of keys and values, times two:
    /// operations.
    fn operations(&self, cells: usize) -> f32 {
        let [dk, dv] = self.head;
        // CAST: rounding changes no decision.
        2.0 * self.rows() as f32 * cells as f32 * (dk + dv) as f32
    }

    /// Returns the CPU's time in nanoseconds.
    #[must_use]
    pub fn cpu_ns(&self, caps: &RkCaps) -> f32 {
        // CAST: rounding changes no decision.
        let heads = (self.heads[1] * self.sequences[0]) as f32;
        heads * self.operations(self.cells) / caps.attention.cpu_ops_per_ns
    }

    /// Returns the NPU's time in nanoseconds, including the CPU's stages.
    #[must_use]
    pub fn npu_ns(&self, caps: &RkCaps) -> f32 {
        let ranges = self.ranges();
        let padded: usize = ranges.iter().map(|(_, padded)| padded).sum();
        let bucket = self.bucket(caps, Buckets::ALL);
        let cores = caps.cores.count();
        let blocks = self.rows().div_ceil(bucket);
        // CAST: rounding changes no decision.
        let heads = (self.heads[1] * self.sequences[0]) as f32;
        let rate = caps.cost.ops_per_ns(Precision::Fp16) * cores.min(blocks) as f32;
        let products = self.operations(padded) / rate;
        let calls = (2 * ranges.len() * blocks.div_ceil(cores)) as f32 * caps.cost.call_ns;
        heads * (products * (1.0 + caps.attention.stages) + calls)
    }
}

/// Returns the number of cells of a product for `cells`: `2^i` or `3 · 2^i`, so that few contexts
/// are needed.
fn padded_cells(cells: usize) -> usize {
    let power = cells.next_power_of_two().max(caps::CELLS_ALIGN);
    let between = power / 4 * 3;
    if between >= cells && between.is_multiple_of(caps::CELLS_ALIGN) {
        between
    } else {
        power
    }
}

fn check_rows(q: &Tensor, k: &Tensor, v: &Tensor, dst: &Tensor) -> Result<(), Refusal> {
    if ![q, k, v, dst].into_iter().all(readable) {
        return Err("operands are in memory of another device");
    }
    if q.dtype != DType::F32 || q.shape.nb[0] != 4 {
        return Err("queries are not rows of F32");
    }
    for cache in [k, v] {
        let is_number = match cache.dtype {
            DType::F16 | DType::Bf16 | DType::F32 => true,
            DType::Quantized { .. } => cache.dequantize.is_some(),
            _ => false,
        };
        if !is_number || cache.dtype.row_bytes(cache.shape.ne[0]).is_none() {
            return Err("keys or values are of a type that is not converted");
        }
        if Some(cache.shape.nb[0]) != cache.dtype.step_bytes() {
            return Err("keys or values are transposed");
        }
    }
    let aligned = dst.shape.nb.iter().all(|step| step.is_multiple_of(4));
    if dst.dtype != DType::F32 || dst.shape.nb[0] != 4 || !aligned {
        return Err("result is not rows of F32");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
