//! Shared by the tests of the whole crate: simulated devices, numbers, and multiplications as ggml
//! would request them.
#![expect(
    dead_code,
    reason = "each test file is a crate of its own and uses a part of this"
)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ggml_rust_npu::backend::{Buffer, Content, Device, Node};
use ggml_rust_npu::dequantize;
use ggml_rust_npu::error::Result;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::host_memory::{Region, RegionMut};
use ggml_rust_npu::rockchip::caps::RkCaps;
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::driver::lock::Nodes;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use ggml_rust_npu::tensor::{DType, Dequantize, Shape};
use half::{bf16, f16};
use rknpu_ops::direct::node::DeviceNode;
use rknpu_ops::layout::Soc;
use rknpu_ops::sim;
pub use test_kit::Numbers;

/// Returns the functions of the stand-in. Where `NPU_TEST_DIRECT` is set (scripts/direct.py), an
/// RK3588 has those of our own command streams, over the driver whose node this process finds.
pub fn functions(options: sim::Options) -> Arc<Rknn> {
    if options.soc == Soc::Rk3588 && std::env::var_os("NPU_TEST_DIRECT").is_some() {
        let node = DeviceNode::find().unwrap();
        return Rknn::direct(Box::new(node), Nodes::Private).unwrap();
    }
    Rknn::simulate(options).unwrap()
}

/// A simulated device of a chip, with the [`functions`] for it.
pub fn device(caps: &'static RkCaps) -> Arc<RkDevice> {
    let rknn = functions(sim::Options::new(caps.soc));
    Arc::new(RkDevice::start(rknn, caps).unwrap())
}

/// Makes a device on the stand-in, with options. Also returns the functions, to inspect the
/// stand-in.
pub fn device_with(
    options: sim::Options,
    caps: &'static RkCaps,
) -> Result<(Arc<RkDevice>, Arc<Rknn>)> {
    let rknn = Rknn::simulate(options)?;
    Ok((Arc::new(RkDevice::start(Arc::clone(&rknn), caps)?), rknn))
}

/// A "quantized" type whose blocks are 32 plain floats, so that the tests need no ggml and no
/// rounding.
pub struct F32InBlocks;

/// The type of [`F32InBlocks`].
pub const F32_IN_BLOCKS: DType = DType::Quantized {
    block_elems: 32,
    block_bytes: 128,
};

/// ggml's Q8_0.
pub const Q8_0: DType = DType::Quantized {
    block_elems: 32,
    block_bytes: 34,
};

/// ggml's Q4_0.
pub const Q4_0: DType = DType::Quantized {
    block_elems: 32,
    block_bytes: 18,
};

impl Dequantize for F32InBlocks {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        assert_eq!(blocks.len(), out.len() * 4);
        bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(blocks);
    }
}

/// Weights as ggml stores them, and their values.
#[derive(Clone)]
pub struct Weight {
    pub dtype: DType,
    pub ne: [usize; 4],
    pub bytes: Vec<u8>,
    pub values: Vec<f32>,
}

impl Weight {
    pub fn random(numbers: &mut Numbers, dtype: DType, ne: [usize; 4]) -> Self {
        let mut values = numbers.floats(ne.iter().product());
        let bytes = match dtype {
            DType::F16 => {
                let halves: Vec<_> = values.iter().map(|x| f16::from_f32(*x)).collect();
                values = halves.iter().map(|x| x.to_f32()).collect();
                halves.iter().flat_map(|x| x.to_le_bytes()).collect()
            }
            DType::Bf16 => {
                let upper: Vec<_> = values.iter().map(|x| bf16::from_f32(*x)).collect();
                values = upper.iter().map(|x| x.to_f32()).collect();
                upper.iter().flat_map(|x| x.to_le_bytes()).collect()
            }
            _ => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        };
        Self {
            dtype,
            ne,
            bytes,
            values,
        }
    }

    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.ne[0]).unwrap()
    }

    /// The tensor at `offset` of a packed buffer, or in host memory.
    pub fn tensor(&self, offset: Option<usize>) -> Tensor<'_> {
        Tensor {
            place: if offset.is_some() {
                Place::Packed
            } else {
                Place::Host
            },
            memory: Some(Region::from(&self.bytes[..])),
            packed_offset: offset.unwrap_or(0),
            role: Role::State,
            dequantize: match self.dtype {
                Q8_0 => dequantize::of(GgmlType::Q8_0),
                Q4_0 => dequantize::of(GgmlType::Q4_0),
                DType::Bf16 => dequantize::of(GgmlType::BF16),
                _ => Some(&F32InBlocks),
            },
            ..tensor("weight", self.dtype, contiguous(self.dtype, self.ne))
        }
    }
}

pub fn contiguous(dtype: DType, ne: [usize; 4]) -> Shape {
    let row = dtype.row_bytes(ne[0]).unwrap();
    Shape {
        ne,
        nb: [
            dtype.step_bytes().unwrap(),
            row,
            row * ne[1],
            row * ne[1] * ne[2],
        ],
    }
}

pub fn tensor(name: &str, dtype: DType, shape: Shape) -> Tensor<'_> {
    Tensor {
        name,
        dtype,
        format: None,
        shape,
        place: Place::Host,
        memory: None,
        packed_offset: 0,
        role: Role::State,
        dequantize: None,
    }
}

/// The shape of an absent operand.
pub const NOTHING: Shape = Shape {
    ne: [0; 4],
    nb: [0; 4],
};

/// `act · w` on the device, for activations of dimensions `ne`; F32, contiguous.
pub fn mul_mat(
    device: &RkDevice,
    w: &Weight,
    packed: Option<(&RkBuffer, usize)>,
    act: &[f32],
    ne: [usize; 4],
) -> Result<Vec<f32>> {
    // Each call is a separate graph, because tests write new activations to the same memory.
    let graph = GRAPHS.fetch_add(1, Ordering::Relaxed);
    mul_mat_of_graph(device, w, packed, act, ne, graph)
}

static GRAPHS: AtomicU64 = AtomicU64::new(1 << 32);

/// As [`mul_mat`], as part of a graph that may have other multiplications of the same activations.
pub fn mul_mat_of_graph(
    device: &RkDevice,
    w: &Weight,
    packed: Option<(&RkBuffer, usize)>,
    act: &[f32],
    ne: [usize; 4],
    graph: u64,
) -> Result<Vec<f32>> {
    let nothing = tensor("none", DType::Other, NOTHING);
    let dst = [w.ne[1], ne[1], ne[2], ne[3]];
    compute(
        device,
        Op::MulMat,
        w,
        packed,
        (act, ne),
        nothing,
        dst,
        graph,
    )
}

/// As [`mul_mat`], with the expert for each of `used` slots of each token in `ids`.
pub fn mul_mat_id(
    device: &RkDevice,
    w: &Weight,
    packed: Option<(&RkBuffer, usize)>,
    act: &[f32],
    ne: [usize; 4],
    ids: &[i32],
    used: usize,
) -> Result<Vec<f32>> {
    let ids = Tensor {
        memory: Some(Region::from(bytemuck::cast_slice(ids))),
        ..tensor(
            "ids",
            DType::I32,
            contiguous(DType::I32, [used, ne[2], 1, 1]),
        )
    };
    let dst = [w.ne[1], used, ne[2], 1];
    compute(device, Op::MulMatId, w, packed, (act, ne), ids, dst, 0)
}

#[expect(clippy::too_many_arguments, reason = "one node with everything in it")]
fn compute(
    device: &RkDevice,
    op: Op,
    w: &Weight,
    packed: Option<(&RkBuffer, usize)>,
    (act, ne): (&[f32], [usize; 4]),
    src2: Tensor,
    dst_ne: [usize; 4],
    graph: u64,
) -> Result<Vec<f32>> {
    let mut result = vec![f32::NAN; dst_ne.iter().product()];
    let buffer = packed.map(|(buffer, _)| buffer as &dyn Buffer);
    let mut node = Node {
        operation: Operation {
            op,
            params: [0; PARAMS],
            dst: tensor("result", DType::F32, contiguous(DType::F32, dst_ne)),
            src: sources(&[
                w.tensor(packed.map(|(_, offset)| offset)),
                Tensor {
                    memory: Some(Region::from(bytemuck::cast_slice(act))),
                    ..tensor("activations", DType::F32, contiguous(DType::F32, ne))
                },
                src2,
            ]),
        },
        out: RegionMut::from(&mut result[..]),
        feeds_next: false,
        dst: None,
        src: [buffer, None, None, None, None, None, None],
    };
    device.compute(&mut node, graph).map(|_| result)
}

/// A buffer that holds `w`, packed, at `offset`.
pub fn packed(device: &Arc<RkDevice>, w: &Weight, offset: usize) -> RkBuffer {
    let tensor = w.tensor(Some(offset));
    let buffer = RkBuffer::new(Arc::clone(device), offset + device.packed_bytes(&tensor)).unwrap();
    let bytes = Content::Bytes(&w.bytes);
    buffer.write(&tensor, 0, w.bytes.len(), bytes).unwrap();
    buffer
}

/// Largest normalized mean square error of a product of uniform numbers.
///
/// INT8: each operand is rounded to a grid of absmax/127, an error of (absmax/127)^2/12 in units of
/// its variance. After the Hadamard transform a row is close to normal, and its absmax is below 5
/// standard deviations for rows of up to 10^5 elements (without a transform, K odd multiples of 1,
/// it is sqrt(3)): (5/127)^2/12 = 1.3e-4 for each of two operands. FP16: activations are rounded to
/// 11 bits, (2^-11)^2/12 in the worst binade, 2e-8.
pub fn nmse_limit(dtype: DType) -> f64 {
    match dtype {
        DType::F16 | DType::Bf16 => 2e-7,
        _ => 2.6e-4,
    }
}
