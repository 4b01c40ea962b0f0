//! Devices, tensors and multiplications for these tests.

use std::sync::Arc;
use std::time::Duration;

use ggml_rust_npu::backend::{Buffer, Content, Device, GraphError, Node, Stream};
use ggml_rust_npu::config::Repack;
use ggml_rust_npu::dequantize;
use ggml_rust_npu::error::Result;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::caps;
use ggml_rust_npu::hexagon::device::Serving;
use ggml_rust_npu::hexagon::driver::{Domain, FastRpc};
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::host_memory::RegionMut;
use ggml_rust_npu::tensor::{DType, Format, Shape};
use half::{bf16, f16};
use hexagon_ops::sim::{self, Coherence};
pub use test_kit::Numbers;

/// Returns the options of a stand-in with strict coherence, in which a forgotten cache operation
/// shows.
pub fn strict(arch: u32) -> sim::Options {
    let mut options = sim::Options::new(arch);
    options.coherence = Coherence::Strict;
    options
}

pub const OPTIONS: Options<'static> = Options {
    dsp: Domain::Cdsp,
    session: 0,
    repack: Repack::Weights,
    timeout: Duration::from_secs(20),
    address_bytes: None,
    threads: None,
    activations: ggml_rust_npu::config::ActivationBits::Eight,
    power: hexagon_ops::wire::Power::Burst,
    serving: Serving::Thread,
    trace: None,
};

pub fn device_with(sim: sim::Options, options: Options<'_>) -> Result<Arc<HexDevice>> {
    let arch = sim.arch;
    let rpc = FastRpc::simulate(sim)?;
    HexDevice::start("HEX0", &rpc, caps::by_arch(arch).unwrap(), options)
}

pub fn device() -> Arc<HexDevice> {
    device_with(strict(75), OPTIONS).unwrap()
}

/// Type of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F16,
    Bf16,
    F32,
    Blocks(Format),
}

pub const KINDS: [Kind; 16] = [
    Kind::F16,
    Kind::Blocks(Format::Q4_0),
    Kind::Blocks(Format::Q4_1),
    Kind::Blocks(Format::Q8_0),
    Kind::Blocks(Format::Iq4Nl),
    Kind::Blocks(Format::Mxfp4),
    Kind::Blocks(Format::Q4K),
    Kind::Blocks(Format::Q5_0),
    Kind::Blocks(Format::Q6K),
    Kind::Blocks(Format::Q5_1),
    Kind::Blocks(Format::Q5K),
    Kind::Blocks(Format::Iq4Xs),
    Kind::Blocks(Format::Q3K),
    Kind::Blocks(Format::Q2K),
    Kind::Bf16,
    Kind::F32,
];

// SOURCE: ggml-common.h, kvalues_iq4nl.
const IQ4_NL: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
// SOURCE: ggml-common.h, kvalues_mxfp4: twice the values of E2M1.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A random weight: bytes in ggml's layout, and their values.
pub struct Weight {
    pub kind: Kind,
    pub ne: [usize; 4],
    pub bytes: Vec<u8>,
    pub values: Vec<f32>,
}

impl Kind {
    pub fn dtype(self) -> DType {
        let block_bytes = match self {
            Self::F16 => return DType::F16,
            Self::Bf16 => return DType::Bf16,
            Self::F32 => return DType::F32,
            Self::Blocks(Format::Q4_0 | Format::Iq4Nl) => 18,
            Self::Blocks(Format::Q4_1) => 20,
            Self::Blocks(Format::Q8_0) => 34,
            Self::Blocks(Format::Mxfp4) => 17,
            Self::Blocks(Format::Q4K) => return GgmlType::Q4_K.tensor_type().0,
            Self::Blocks(Format::Q5_0) => return GgmlType::Q5_0.tensor_type().0,
            Self::Blocks(Format::Q6K) => return GgmlType::Q6_K.tensor_type().0,
            Self::Blocks(Format::Q5_1) => return GgmlType::Q5_1.tensor_type().0,
            Self::Blocks(Format::Q5K) => return GgmlType::Q5_K.tensor_type().0,
            Self::Blocks(Format::Iq4Xs) => return GgmlType::IQ4_XS.tensor_type().0,
            Self::Blocks(Format::Q3K) => return GgmlType::Q3_K.tensor_type().0,
            Self::Blocks(Format::Q2K) => return GgmlType::Q2_K.tensor_type().0,
        };
        DType::Quantized {
            block_elems: 32,
            block_bytes,
        }
    }

    /// Elements of a block; of a tile's row for floats.
    pub fn block_elems(self) -> usize {
        match self.dtype() {
            DType::Quantized { block_elems, .. } => block_elems,
            _ => 32,
        }
    }

    /// One block with f16 numbers at `halves`, and the values that the golden tests of
    /// `dequantize` prove to be ggml's.
    fn known_block(
        dtype: GgmlType,
        halves: &[usize],
        numbers: &mut Numbers,
        bytes: &mut Vec<u8>,
        values: &mut Vec<f32>,
    ) {
        let mut block: Vec<u8> = (0..dtype.block_bytes())
            .map(|_| numbers.bits() as u8)
            .collect();
        let elems = dtype.block_elems() as f32;
        for at in halves {
            let small = f16::from_f32(numbers.float() / elems);
            block[*at..at + 2].copy_from_slice(&small.to_le_bytes());
        }
        let first = values.len();
        values.resize(first + dtype.block_elems(), 0.0);
        let known = dequantize::of(dtype).unwrap();
        known.dequantize(&block, &mut values[first..]);
        bytes.extend(block);
    }

    /// One block, after ggml's definitions of its types.
    fn block(self, numbers: &mut Numbers, bytes: &mut Vec<u8>, values: &mut Vec<f32>) {
        let known: Option<(_, &[usize])> = match self {
            Self::Blocks(Format::Q4K) => Some((GgmlType::Q4_K, &[0, 2])),
            Self::Blocks(Format::Q5_0) => Some((GgmlType::Q5_0, &[0])),
            Self::Blocks(Format::Q6K) => Some((GgmlType::Q6_K, &[208])),
            Self::Blocks(Format::Q5_1) => Some((GgmlType::Q5_1, &[0, 2])),
            Self::Blocks(Format::Q5K) => Some((GgmlType::Q5_K, &[0, 2])),
            Self::Blocks(Format::Iq4Xs) => Some((GgmlType::IQ4_XS, &[0])),
            Self::Blocks(Format::Q3K) => Some((GgmlType::Q3_K, &[108])),
            Self::Blocks(Format::Q2K) => Some((GgmlType::Q2_K, &[80, 82])),
            _ => None,
        };
        if let Some((dtype, halves)) = known {
            return Self::known_block(dtype, halves, numbers, bytes, values);
        }
        let scale = f16::from_f32(numbers.float() / 8.0);
        let min = f16::from_f32(numbers.float());
        let d = scale.to_f32();
        let quants: [u8; 32] = std::array::from_fn(|_| numbers.bits() as u8);
        let level = |i: usize| {
            let byte = quants[i % 16];
            usize::from(if i < 16 { byte & 15 } else { byte >> 4 })
        };
        match self {
            Self::F16 => {
                for _ in 0..32 {
                    let value = f16::from_f32(numbers.float());
                    bytes.extend(value.to_le_bytes());
                    values.push(value.to_f32());
                }
                return;
            }
            Self::Bf16 => {
                for _ in 0..32 {
                    let value = bf16::from_f32(numbers.float());
                    bytes.extend(value.to_le_bytes());
                    values.push(value.to_f32());
                }
                return;
            }
            Self::F32 => {
                for _ in 0..32 {
                    let value = numbers.float();
                    bytes.extend(value.to_le_bytes());
                    values.push(value);
                }
                return;
            }
            Self::Blocks(Format::Mxfp4) => {
                // E8M0 stands for 2^(e - 127). The table has doubled values, so the exponent is one
                // less.
                let e = 120 + (numbers.bits() % 8) as u8;
                bytes.push(e);
                let d = f32::from_bits(u32::from(e - 1) << 23);
                values.extend((0..32).map(|i| f32::from(E2M1_DOUBLED[level(i)]) * d));
            }
            Self::Blocks(format) => {
                bytes.extend(scale.to_le_bytes());
                match format {
                    Format::Q4_0 => values.extend((0..32).map(|i| (level(i) as f32 - 8.0) * d)),
                    Format::Q4_1 => {
                        bytes.extend(min.to_le_bytes());
                        values.extend((0..32).map(|i| level(i) as f32 * d + min.to_f32()));
                    }
                    Format::Iq4Nl => {
                        values.extend((0..32).map(|i| f32::from(IQ4_NL[level(i)]) * d / 16.0));
                        let at = bytes.len() - 2;
                        let small = f16::from_f32(d / 16.0);
                        bytes[at..].copy_from_slice(&small.to_le_bytes());
                        let count = values.len();
                        for (i, value) in values[count - 32..].iter_mut().enumerate() {
                            *value = f32::from(IQ4_NL[level(i)]) * small.to_f32();
                        }
                    }
                    Format::Q8_0 => {
                        let small = f16::from_f32(d / 16.0);
                        let at = bytes.len() - 2;
                        bytes[at..].copy_from_slice(&small.to_le_bytes());
                        let signed = quants.map(|byte| (byte as i8).max(-127));
                        bytes.extend(signed.map(i8::cast_unsigned));
                        values.extend(signed.map(|q| f32::from(q) * small.to_f32()));
                        return;
                    }
                    _ => unreachable!("above"),
                }
            }
        }
        bytes.extend(&quants[..16]);
    }
}

impl Weight {
    pub fn random(numbers: &mut Numbers, kind: Kind, ne: [usize; 4]) -> Self {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for _ in 0..ne.iter().product::<usize>() / kind.block_elems() {
            kind.block(numbers, &mut bytes, &mut values);
        }
        Self {
            kind,
            ne,
            bytes,
            values,
        }
    }

    /// Returns the tensor at `offset` of a buffer, whose kind is `place`.
    pub fn tensor(&self, offset: usize, place: Place) -> Tensor<'static> {
        let format = match self.kind {
            Kind::Blocks(format) => Some(format),
            _ => None,
        };
        let dequantize = match self.kind {
            Kind::Bf16 => dequantize::of(GgmlType::BF16),
            Kind::F32 => dequantize::of(GgmlType::F32),
            _ => None,
        };
        Tensor {
            format,
            place,
            role: match place {
                Place::Packed => Role::Weights,
                _ => Role::State,
            },
            dequantize,
            ..tensor("weight", self.kind.dtype(), self.ne, offset)
        }
    }

    /// Values of matrix `slice`.
    pub fn matrix(&self, slice: usize) -> &[f32] {
        let count = self.ne[0] * self.ne[1];
        &self.values[slice * count..][..count]
    }
}

pub fn tensor(name: &str, dtype: DType, ne: [usize; 4], offset: usize) -> Tensor<'_> {
    let row = dtype.row_bytes(ne[0]).unwrap();
    Tensor {
        name,
        dtype,
        format: None,
        shape: Shape {
            ne,
            nb: [
                dtype.step_bytes().unwrap(),
                row,
                row * ne[1],
                row * ne[1] * ne[2],
            ],
        },
        place: Place::Device,
        memory: None,
        packed_offset: offset,
        role: Role::State,
        dequantize: None,
    }
}

/// A buffer that holds `w` at its start.
pub fn buffer_with(device: &Arc<HexDevice>, w: &Weight, place: Place) -> HexBuffer {
    try_buffer_with(device, w, place).unwrap()
}

/// As [`buffer_with`], for a device that may be lost.
pub fn try_buffer_with(device: &Arc<HexDevice>, w: &Weight, place: Place) -> Result<HexBuffer> {
    let tensor = w.tensor(0, place);
    let buffer = HexBuffer::new(device, device.packed_bytes(&tensor), false)?;
    buffer
        .write(&tensor, 0, w.bytes.len(), Content::Bytes(&w.bytes))
        .unwrap();
    Ok(buffer)
}

/// A node whose operands are in these buffers.
pub fn node<'a>(
    operation: Operation<'a>,
    dst: Option<&'a HexBuffer>,
    src: [Option<&'a HexBuffer>; MAX_SOURCES],
) -> Node<'a> {
    Node {
        operation,
        out: RegionMut::from(&mut [][..]),
        feeds_next: false,
        dst: dst.map(|buffer| buffer as &dyn Buffer),
        src: src.map(|buffer| Some(buffer? as &dyn Buffer)),
    }
}

/// Activations, room for results and a choice of experts in one buffer.
pub struct Work {
    pub buffer: HexBuffer,
    pub act: Tensor<'static>,
    pub dst: Tensor<'static>,
    pub ids: Tensor<'static>,
}

impl Work {
    pub fn new(
        device: &Arc<HexDevice>,
        act: &[f32],
        act_ne: [usize; 4],
        dst_ne: [usize; 4],
        ids: &[i32],
    ) -> Result<Self> {
        let dst_bytes = dst_ne.iter().product::<usize>() * 4;
        let ids_at = size_of_val(act) + dst_bytes;
        let bytes = ids_at + size_of_val(ids);
        let buffer = HexBuffer::new(device, bytes, false)?;
        let slots = ids.len() / act_ne[2].max(1);
        let work = Self {
            act: tensor("act", DType::F32, act_ne, 0),
            dst: tensor("dst", DType::F32, dst_ne, size_of_val(act)),
            ids: tensor("ids", DType::I32, [slots, act_ne[2], 1, 1], ids_at),
            buffer,
        };
        let bytes: &[u8] = bytemuck::cast_slice(act);
        (work.buffer)
            .write(&work.act, 0, bytes.len(), Content::Bytes(bytes))
            .unwrap();
        (work.buffer)
            .write(&work.dst, 0, dst_bytes, Content::Fill(0xff))
            .unwrap();
        let bytes: &[u8] = bytemuck::cast_slice(ids);
        (work.buffer)
            .write(&work.ids, 0, bytes.len(), Content::Bytes(bytes))
            .unwrap();
        Ok(work)
    }

    /// The node.
    pub fn node<'a>(&'a self, op: Op, src0: Tensor<'a>, buffer: &'a HexBuffer) -> Node<'a> {
        let operation = Operation {
            op,
            params: [0; PARAMS],
            dst: self.dst,
            src: sources(&[src0, self.act, self.ids]),
        };
        let work = Some(&self.buffer);
        let mut src = [None; MAX_SOURCES];
        src[..3].copy_from_slice(&[Some(buffer), work, work]);
        node(operation, work, src)
    }

    pub fn result(&self) -> Vec<f32> {
        let mut result = vec![0.0f32; self.dst.shape.ne.iter().product()];
        (self.buffer)
            .read(&self.dst, 0, bytemuck::cast_slice_mut(&mut result))
            .unwrap();
        result
    }
}

/// `act · w` on the device: `ne` are the activations' dimensions.
pub fn mul_mat(
    device: &Arc<HexDevice>,
    w: &Weight,
    buffer: &HexBuffer,
    act: &[f32],
    ne: [usize; 4],
) -> std::result::Result<Vec<f32>, GraphError> {
    let whole = |error| GraphError { node: None, error };
    let work = Work::new(device, act, ne, [w.ne[1], ne[1], ne[2], ne[3]], &[]).map_err(whole)?;
    let stream = HexStream::new(Arc::clone(device));
    let src0 = w.tensor(0, Place::Device);
    stream.submit(0, &mut [work.node(Op::MulMat, src0, buffer)])?;
    Ok(work.result())
}
