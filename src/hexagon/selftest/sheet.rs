//! Small tensors that share one buffer, commands on them, and the expected results.

use bytemuck::Zeroable;
use half::f16;
use hexagon_ops::wire::{
    self, Attention, Command, NarrowTensor, SOURCES, TYPE_F16, TYPE_F32, TYPE_I32, TYPE_NONE,
    Tensor, TensorOp, WideOp,
};

use super::Outcome;
use crate::error::Result;
use crate::hexagon::device::{Batch, DeviceBuffer, HexNpu};
use crate::reference;

/// Bytes of the buffer, which the largest family does not fill.
const BYTES: usize = 64 << 10;
/// Tensors start at vectors.
const ALIGN_BYTES: usize = 128;

/// Tensors, commands and expected results of a family.
#[derive(Debug)]
pub(super) struct Sheet {
    buffer: DeviceBuffer,
    bytes: Vec<u8>,
    batch: Batch,
    checks: Vec<Check>,
}

/// A result and its expected value.
#[derive(Debug)]
struct Check {
    test: String,
    result: Tensor,
    want: Vec<f64>,
    limit: f64,
}

impl Sheet {
    /// Allocates the buffer.
    ///
    /// # Errors
    /// As [`HexNpu::allocate`].
    pub(super) fn new(npu: &HexNpu) -> Result<Self> {
        Ok(Self {
            buffer: npu.allocate(BYTES)?,
            bytes: Vec::with_capacity(BYTES),
            batch: Batch::default(),
            checks: Vec::new(),
        })
    }

    /// Returns a tensor without gaps that starts with these bytes.
    fn place(&mut self, dtype: u32, ne: &[usize], bytes: &[u8]) -> Tensor {
        let start = self.bytes.len().next_multiple_of(ALIGN_BYTES);
        let (block, block_bytes) = block_of(dtype);
        let mut tensor = NONE;
        (tensor.buffer, tensor.dtype) = (self.buffer.number(), dtype);
        (tensor.offset, tensor.ne) = (start as u64, [1; 4]);
        let mut stride = block_bytes;
        tensor.nb[0] = stride as u64;
        for dim in 0..4 {
            let count = ne.get(dim).copied().unwrap_or(1);
            tensor.ne[dim] = u32::try_from(count).unwrap_or(u32::MAX);
            stride *= if dim == 0 { count / block } else { count };
            if dim < 3 {
                tensor.nb[dim + 1] = stride as u64;
            }
        }
        self.bytes.resize(start, 0);
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(start + stride, 0);
        tensor
    }

    /// Returns a tensor of f32.
    pub(super) fn floats(&mut self, ne: &[usize], values: &[f32]) -> Tensor {
        self.place(TYPE_F32, ne, bytemuck::cast_slice(values))
    }

    /// Returns a tensor of f16, from values that f16 can hold.
    pub(super) fn halves(&mut self, ne: &[usize], values: &[f32]) -> Tensor {
        let halves: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
        self.place(TYPE_F16, ne, bytemuck::cast_slice(&halves))
    }

    /// Returns a tensor of i32.
    pub(super) fn numbers(&mut self, values: &[i32]) -> Tensor {
        self.place(TYPE_I32, &[values.len()], bytemuck::cast_slice(values))
    }

    /// Adds an operation, its result and the values this should have.
    pub(super) fn op(
        &mut self,
        test: &str,
        (kernel, params): (u32, [u32; 16]),
        (dtype, ne): (u32, &[usize]),
        sources: &[Tensor],
        (want, limit): (Vec<f64>, f64),
    ) {
        let dst = self.place(dtype, ne, &[]);
        let mut src = [NONE; SOURCES];
        src[..sources.len()].copy_from_slice(sources);
        let body = TensorOp {
            kernel,
            reserved: 0,
            params,
            dst,
            src,
        };
        self.check(test, Command::new(0, &body), dst, want, limit);
    }

    /// Adds an operation with more sources, its result and the values this should have.
    pub(super) fn wide(
        &mut self,
        test: &str,
        (kernel, word): (u32, u32),
        ne: &[usize],
        sources: &[Tensor],
        (want, limit): (Vec<f64>, f64),
    ) {
        let dst = self.place(TYPE_F32, ne, &[]);
        // Never fails here: all tensors are in one buffer, so their strides fit.
        let narrow = |tensor| NarrowTensor::new(tensor).unwrap_or(NarrowTensor::zeroed());
        let mut body = WideOp {
            kernel,
            dst: narrow(&dst),
            ..WideOp::zeroed()
        };
        body.params[0] = word;
        for (src, source) in body.src.iter_mut().zip(sources) {
            *src = narrow(source);
        }
        self.check(test, Command::new(0, &body), dst, want, limit);
    }

    /// Adds an attention without sinks, its result and the values this should have.
    pub(super) fn attention(
        &mut self,
        test: &str,
        ne: &[usize],
        [q, k, v, mask]: [Tensor; 4],
        scale: f32,
        (want, limit): (Vec<f64>, f64),
    ) {
        let dst = self.place(TYPE_F32, ne, &[]);
        let body = Attention {
            scale: scale.to_bits(),
            max_bias: 0,
            softcap: 0,
            reserved: 0,
            dst,
            q,
            k,
            v,
            mask,
            sinks: NONE,
        };
        self.check(test, Command::new(0, &body), dst, want, limit);
    }

    fn check(&mut self, test: &str, command: Command, result: Tensor, want: Vec<f64>, limit: f64) {
        self.batch.push(command, &[self.buffer.number()]);
        self.checks.push(Check {
            test: test.into(),
            result,
            want,
            limit,
        });
    }

    /// Has the device compute everything in one submission, and compares.
    ///
    /// # Errors
    /// An error of the device.
    pub(super) fn run(self, npu: &HexNpu) -> Result<Vec<Outcome>> {
        let used = 0..self.bytes.len();
        self.buffer
            .write(used.clone(), |out| out.copy_from_slice(&self.bytes));
        npu.submit(&self.batch).map_err(|failed| failed.error)?;
        let bytes = self.buffer.read(used, <[u8]>::to_vec);
        let outcomes = self.checks.into_iter().map(|check| Outcome {
            have: reference::nmse(
                &values(&check.result, &bytes, check.want.len()),
                &check.want,
            ),
            test: check.test,
            limit: check.limit,
        });
        Ok(outcomes.collect())
    }
}

/// No tensor.
pub(super) const NONE: Tensor = Tensor {
    buffer: 0,
    dtype: TYPE_NONE,
    offset: 0,
    ne: [0; 4],
    nb: [0; 4],
};

/// Returns the elements and bytes of a block.
fn block_of(dtype: u32) -> (usize, usize) {
    match dtype {
        TYPE_F16 => (1, 2),
        wire::TYPE_Q8_0 => (32, 34),
        _ => (1, 4),
    }
}

/// Returns the first `count` elements of a tensor without gaps.
fn values(tensor: &Tensor, bytes: &[u8], count: usize) -> Vec<f32> {
    let start = usize::try_from(tensor.offset).unwrap_or(usize::MAX);
    let bytes = bytes.get(start..).unwrap_or_default();
    let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    match tensor.dtype {
        TYPE_F16 => bytes.chunks_exact(2).take(count).map(half).collect(),
        wire::TYPE_Q8_0 => (bytes.chunks_exact(34).take(count.div_ceil(32)))
            .flat_map(|block| {
                let levels = block[2..].iter();
                levels.map(move |level| f32::from(level.cast_signed()) * half(block))
            })
            .collect(),
        _ => (bytes.as_chunks::<4>().0.iter().take(count))
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect(),
    }
}
