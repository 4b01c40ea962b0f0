//! Tensors in the memory of a host: strides, gaps, types; operations on them through the ring, and
//! the bytes that they must not change.

use half::{bf16, f16};
use hexagon_ops::layout::LINE_BYTES;
use hexagon_ops::wire::{
    self, Body, Command, NarrowTensor, SOURCES, TensorOp, WIDE_SOURCES, WideOp,
};
use test_kit::nmse;

use crate::block::{self, block};
use crate::common::Numbers;
use crate::driver::{Host, Memory};

/// Bytes of the buffer that all tensors of a case are in.
const BYTES: usize = 1 << 21;
/// The byte in memory to which nothing was written.
const UNTOUCHED: u8 = 0xa5;

/// A tensor and its exact values in ggml's order.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub wire: wire::Tensor,
    pub ne: [usize; 4],
    pub values: Vec<f64>,
    bytes: Vec<u8>,
}

/// Placement of a tensor's elements.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Dimensions from the smallest stride to the largest.
    pub order: [usize; 4],
    /// Elements (blocks) that are left out after each dimension.
    pub gap: usize,
}

pub const DENSE: Place = Place {
    order: [0, 1, 2, 3],
    gap: 0,
};
pub const GAPS: Place = Place {
    order: [0, 1, 2, 3],
    gap: 3,
};
pub const PERMUTED: Place = Place {
    order: [0, 2, 1, 3],
    gap: 0,
};
pub const TRANSPOSED: Place = Place {
    order: [1, 0, 2, 3],
    gap: 0,
};

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(dtype: u32, ne: [usize; 4], place: Place) -> Self {
        let (elems, size) = block(dtype);
        let counts = [ne[0] / elems, ne[1], ne[2], ne[3]];
        let mut nb = [0; 4];
        let mut stride = size;
        for dim in place.order {
            nb[dim] = stride;
            stride = stride * counts[dim] + place.gap * size;
            // Gaps are between rows and planes, not between elements.
            if dim == 0 && place.gap > 0 {
                stride = stride.next_multiple_of(size);
            }
        }
        let bytes = size + (0..4).map(|i| (counts[i] - 1) * nb[i]).sum::<usize>();
        Self {
            wire: wire::Tensor {
                buffer: 0,
                dtype,
                offset: 0,
                ne: ne.map(|n| u32::try_from(n).unwrap()),
                nb: nb.map(|n| n as u64),
            },
            ne,
            values: vec![0.0; ne.iter().product()],
            bytes: vec![UNTOUCHED; bytes],
        }
    }

    /// A source that is absent.
    pub fn none() -> Self {
        Self {
            values: Vec::new(),
            ..Self::zeros(wire::TYPE_F32, [1; 4], DENSE)
        }
    }

    /// A tensor of numbers that `f` gives.
    pub fn of(dtype: u32, ne: [usize; 4], place: Place, mut f: impl FnMut() -> f32) -> Self {
        let mut tensor = Self::zeros(dtype, ne, place);
        for index in 0..tensor.values.len() {
            let at = tensor.at(index);
            let x = f();
            let (value, bytes): (f64, Vec<u8>) = match dtype {
                wire::TYPE_F32 => (f64::from(x), x.to_le_bytes().to_vec()),
                wire::TYPE_F16 => {
                    let half = f16::from_f32(x);
                    (half.to_f64(), half.to_le_bytes().to_vec())
                }
                wire::TYPE_BF16 => {
                    let half = bf16::from_f32(x);
                    (half.to_f64(), half.to_le_bytes().to_vec())
                }
                #[expect(clippy::cast_possible_truncation, reason = "small numbers")]
                wire::TYPE_I8 => (f64::from(x as i8), (x as i8).to_le_bytes().to_vec()),
                #[expect(clippy::cast_possible_truncation, reason = "small numbers")]
                wire::TYPE_I16 => (f64::from(x as i16), (x as i16).to_le_bytes().to_vec()),
                #[expect(clippy::cast_possible_truncation, reason = "numbers of rows")]
                wire::TYPE_I32 => (f64::from(x.trunc()), (x as i32).to_le_bytes().to_vec()),
                #[expect(clippy::cast_possible_truncation, reason = "numbers of rows")]
                wire::TYPE_I64 => (f64::from(x.trunc()), (x as i64).to_le_bytes().to_vec()),
                _ => unreachable!("blocks are random"),
            };
            tensor.values[index] = value;
            tensor.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        tensor
    }

    /// A tensor of numbers in [-scale, scale).
    pub fn random(
        dtype: u32,
        ne: [usize; 4],
        place: Place,
        scale: f32,
        numbers: &mut Numbers,
    ) -> Self {
        if block(dtype).0 == 1 {
            return Self::of(dtype, ne, place, || scale * numbers.float());
        }
        let mut tensor = Self::zeros(dtype, ne, place);
        for index in (0..tensor.values.len()).step_by(block(dtype).0) {
            let at = tensor.at(index);
            let bytes = block::random(dtype, numbers);
            let values = block::values(dtype, &bytes);
            tensor.values[index..index + values.len()].copy_from_slice(&values);
            tensor.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        tensor
    }

    /// The tensor with the f16 scales of its blocks, and minima, `by` times as large.
    pub fn scaled(&self, by: f32) -> Self {
        let mut tensor = self.clone();
        let dtype = self.wire.dtype;
        let (elems, size) = block(dtype);
        let halves = if dtype == wire::TYPE_Q5_1 { 2 } else { 1 };
        for index in (0..tensor.values.len()).step_by(elems) {
            let at = tensor.at(index);
            let bytes = &mut tensor.bytes[at..at + size];
            for half in bytes.as_chunks_mut::<2>().0[..halves].iter_mut() {
                *half = f16::from_f32(f16::from_le_bytes(*half).to_f32() * by).to_le_bytes();
            }
            let values = block::values(dtype, bytes);
            tensor.values[index..index + elems].copy_from_slice(&values);
        }
        tensor
    }

    /// Byte of element (block) `index` in ggml's order.
    fn at(&self, index: usize) -> usize {
        let mut rest = index;
        let mut at = 0;
        for (i, (n, nb)) in self.ne.into_iter().zip(self.wire.nb).enumerate() {
            let unit = if i == 0 { block(self.wire.dtype).0 } else { 1 };
            at += rest % n / unit * usize::try_from(nb).unwrap();
            rest /= n;
        }
        at
    }

    /// The value at an index, which wraps around at each dimension.
    pub fn value(&self, at: [usize; 4]) -> f64 {
        let [n0, n1, n2, n3] = self.ne;
        let [i0, i1, i2, i3] = [at[0] % n0, at[1] % n1, at[2] % n2, at[3] % n3];
        self.values[((i3 * n2 + i2) * n1 + i1) * n0 + i0]
    }

    /// Stores `x` at `at`, for blocks as the scale, and leaves `values` unchanged.
    pub fn poison(&mut self, at: [usize; 4], x: f32) {
        let [n0, n1, n2, _] = self.ne;
        let byte = self.at(((at[3] * n2 + at[2]) * n1 + at[1]) * n0 + at[0]);
        let bytes = match self.wire.dtype {
            wire::TYPE_F32 => x.to_le_bytes().to_vec(),
            _ => f16::from_f32(x).to_le_bytes().to_vec(),
        };
        self.bytes[byte..byte + bytes.len()].copy_from_slice(&bytes);
    }

    /// Values that bytes of this tensor's form hold.
    fn decode(&self, bytes: &[u8]) -> Vec<f32> {
        let decode = |index: usize| {
            let at = self.at(index);
            match self.wire.dtype {
                wire::TYPE_F32 => f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()),
                wire::TYPE_F16 => {
                    f16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32()
                }
                wire::TYPE_BF16 => {
                    bf16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32()
                }
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                wire::TYPE_I32 => i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as f32,
                #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                wire::TYPE_I64 => i64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as f32,
                wire::TYPE_I16 => {
                    f32::from(i16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()))
                }
                wire::TYPE_I8 => f32::from(bytes[at].cast_signed()),
                dtype => {
                    let values = block::values(dtype, &bytes[at..at + block(dtype).1]);
                    #[expect(clippy::cast_possible_truncation, reason = "for comparison")]
                    let value = values[index % values.len()] as f32;
                    value
                }
            }
        };
        (0..self.values.len()).map(decode).collect()
    }
}

/// A call of `f` for every index of dimensions `ne`, in ggml's order.
pub fn indices(ne: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let [n0, n1, n2, n3] = ne;
    (0..n0 * n1 * n2 * n3).map(move |i| {
        let rows = i / n0;
        [i % n0, rows % n1, rows / n1 % n2, rows / n1 / n2]
    })
}

/// A host with one buffer.
pub struct Bench {
    pub host: Host,
    pub buffer: u32,
    pub memory: Memory,
    /// Bytes of which tensors start at a multiple.
    align: usize,
}

/// Parameters of an operation, as ggml stores them.
pub type Params = [u32; 16];

/// Parameters that are f32.
pub fn floats(values: &[f32]) -> Params {
    let mut params = [0; 16];
    for (param, value) in params.iter_mut().zip(values) {
        *param = value.to_bits();
    }
    params
}

impl Bench {
    pub fn new() -> Self {
        Self::with(Host::new())
    }

    pub fn with(mut host: Host) -> Self {
        let (buffer, memory) = host.buffer(BYTES);
        Self {
            host,
            buffer,
            memory,
            align: 8,
        }
    }

    /// Places tensors in memory, one after another; an absent one has no elements.
    pub fn put(&mut self, tensors: &[&Tensor]) -> Vec<wire::Tensor> {
        self.memory.put(0, &vec![UNTOUCHED; BYTES]);
        let align = self.align;
        // Not at the start of a line unless all are.
        let mut next = align.max(40);
        let mut put = |tensor: &&Tensor| {
            if tensor.values.is_empty() {
                return bytemuck::Zeroable::zeroed();
            }
            let offset = next;
            self.memory.put(offset, &tensor.bytes);
            next = (offset + tensor.bytes.len()).next_multiple_of(align) + align;
            wire::Tensor {
                buffer: self.buffer,
                offset: offset as u64,
                ..tensor.wire
            }
        };
        tensors.iter().map(&mut put).collect()
    }

    /// Places the tensors in memory, and returns the operation on them.
    pub fn place(
        &mut self,
        (kernel, params): (u32, Params),
        dst: &Tensor,
        src: &[Tensor],
        in_place: bool,
    ) -> TensorOp {
        let mut tensors: Vec<&Tensor> = src.iter().collect();
        if !in_place {
            tensors.push(dst);
        }
        let placed = self.put(&tensors);
        let mut sources = [bytemuck::Zeroable::zeroed(); SOURCES];
        sources[..src.len()].copy_from_slice(&placed[..src.len()]);
        TensorOp {
            kernel,
            reserved: 0,
            params,
            dst: if in_place {
                sources[0]
            } else {
                placed[src.len()]
            },
            src: sources,
        }
    }

    /// Places the tensors in memory, and returns the operation on them, which has more sources.
    pub fn place_wide(
        &mut self,
        (kernel, params): (u32, Params),
        dst: &Tensor,
        src: &[Tensor],
    ) -> WideOp {
        let tensors: Vec<&Tensor> = src.iter().chain([dst]).collect();
        let placed = self.put(&tensors);
        let narrow = |tensor| NarrowTensor::new(tensor).unwrap();
        let mut sources = [bytemuck::Zeroable::zeroed(); WIDE_SOURCES];
        for (source, tensor) in sources.iter_mut().zip(&placed[..src.len()]) {
            *source = narrow(tensor);
        }
        WideOp {
            kernel,
            reserved: 0,
            params,
            dst: narrow(&placed[src.len()]),
            src: sources,
        }
    }

    /// Runs an operation, checks that nothing else has changed, and returns its results in ggml's
    /// order.
    pub fn run(
        &mut self,
        op: (u32, Params),
        dst: &Tensor,
        src: &[Tensor],
        in_place: bool,
    ) -> Vec<f32> {
        let body = self.place(op, dst, src, in_place);
        let dst = if in_place { &src[0] } else { dst };
        self.run_command(&Command::new(0, &body), dst, body.dst.offset)
    }

    /// Runs a command whose result, in the form of `dst`, is at `offset`, and checks that nothing
    /// else has changed.
    pub fn run_command(&mut self, command: &Command, dst: &Tensor, offset: u64) -> Vec<f32> {
        let before: Vec<u8> = self.memory.get(0, BYTES);
        let completion = self.host.run(std::slice::from_ref(command));
        assert_eq!(
            (completion.status, completion.detail),
            (0, 0),
            "operation {} on {:?}",
            command.op,
            dst.wire
        );
        let after: Vec<u8> = self.memory.get(0, BYTES);
        let start = usize::try_from(offset).unwrap();
        let values = dst.decode(&after[start..start + dst.bytes.len()]);
        // With the result's elements put back, all memory must be as before.
        let mut restored = after;
        let (unit, size) = block(dst.wire.dtype);
        for index in (0..dst.values.len()).step_by(unit) {
            let at = start + dst.at(index);
            restored[at..at + size].copy_from_slice(&before[at..at + size]);
        }
        assert!(restored == before, "wrote beside {:?}", dst.wire);
        values
    }

    /// Returns the elements of a result to whose memory nothing was written.
    pub fn untouched(&self, tensor: &Tensor) -> Vec<f32> {
        tensor.decode(&vec![UNTOUCHED; tensor.bytes.len()])
    }

    /// Runs an operation that must be refused with `detail`; nothing may change.
    pub fn refused(&mut self, op: (u32, Params), dst: &Tensor, src: &[Tensor], detail: u32) {
        let body = self.place(op, dst, src, false);
        self.refused_body(&body, detail, "operands");
    }

    /// As [`Self::refused`], for a body of tensors that have been placed.
    pub fn refused_body<B: Body + std::fmt::Debug>(&mut self, body: &B, detail: u32, what: &str) {
        let before: Vec<u8> = self.memory.get(0, BYTES);
        let completion = self.host.run(&[Command::new(0, body)]);
        assert_eq!(
            (completion.status, completion.detail, completion.done),
            (wire::STATUS_BAD_COMMAND, detail, 0),
            "{what} of {body:?}"
        );
        assert!(self.memory.get::<u8>(0, BYTES) == before, "{what} wrote");
    }

    /// Runs an operation on tensors that do not start with a line, and on some that do, and
    /// compares.
    pub fn check(
        &mut self,
        op: (u32, Params),
        dst: &Tensor,
        src: &[Tensor],
        in_place: bool,
        limit: f64,
    ) {
        for align in [LINE_BYTES, 8] {
            self.align = align;
            let have = self.run(op, dst, src, in_place);
            let error = nmse(&have, &dst.values);
            assert!(
                error <= limit,
                "kernel {} {:?} of {:?} in place {in_place}: {error:e} above {limit:e}, {:?}",
                op.0,
                dst.wire,
                src.iter().map(|s| s.wire).collect::<Vec<_>>(),
                have.iter()
                    .zip(&dst.values)
                    .find(|(h, w)| (f64::from(**h) - **w).abs() > 1e-3 * w.abs() + 1e-3)
            );
        }
    }
}

/// Largest NMSE of a result: rounding to the result's type, or of a few f32 operations (each 2^-24,
/// squared).
pub fn limit(dtype: u32) -> f64 {
    match dtype {
        // Half a unit of f16 (2^-11), squared.
        wire::TYPE_F16 => 1.2e-7,
        // Half a unit of BF16 (2^-8), squared.
        wire::TYPE_BF16 => 1.6e-5,
        _ => 1e-12,
    }
}
