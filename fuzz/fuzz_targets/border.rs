//! The functions of `include/npu.h` in any order, with arbitrary fields in tensors, on both
//! families' stand-ins. Pointers are valid, as the contract requires; nothing else is.
//!
//! ```text
//! input = { step }     step = kind, then
//!   0      a buffer: slot, device, whether shared, size
//!   1..=3  a tensor of a buffer is written, filled or read: slot, tensor, part
//!   4      a buffer is cleared, or the program's own memory is written in place if there is none: slot, value
//!   5..=7  questions about a node
//!   8..=11 a graph of 1 to 4 nodes
//!   12     the last graph again
//! ```
//!
//! There must be no panic, not even a caught one, and at the end both devices must still compute a
//! product correctly.
#![no_main]

use std::cell::RefCell;
use std::ffi::CStr;

use ggml_rust_npu::abi::*;
use ggml_rust_npu_fuzz::Input;
use ggml_rust_npu_fuzz::border::*;
use libfuzzer_sys::fuzz_target;

const KINDS: [Kind; 8] = [F32, F16, BF16, I32, I64, Q4_0, Q8_0, Q6_K];
const SIZES: [usize; 16] = [0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 96, 128, 256];
const OPS: [&CStr; 32] = [
    c"MUL_MAT",
    c"MUL_MAT",
    c"MUL_MAT_ID",
    c"ADD",
    c"SUB",
    c"MUL",
    c"DIV",
    c"SCALE",
    c"SILU",
    c"SWIGLU",
    c"RMS_NORM",
    c"NORM",
    c"SOFT_MAX",
    c"ROPE",
    c"GET_ROWS",
    c"SET_ROWS",
    c"CPY",
    c"CONT",
    c"CONCAT",
    c"REPEAT",
    c"SUM_ROWS",
    c"ARGSORT",
    c"PAD",
    c"IM2COL",
    c"POOL_2D",
    c"FLASH_ATTN_EXT",
    c"FLASH_ATTN_EXT",
    c"SSM_CONV",
    c"ADD_ID",
    c"DIAG_MASK_INF",
    c"TOP_K",
    c"NO_SUCH_OP",
];
const SLOTS: usize = 4;
const LARGEST: usize = 1 << 16;
/// Most elements that are computed, of a tensor with dimensions of up to 2^39 elements.
const MOST_ELEMENTS: i64 = 1 << 20;

/// A tensor with arbitrary fields. Returns it, and whether the memory that it points to has all of
/// its bytes.
fn tensor(
    input: &mut Input,
    device: usize,
    buffers: &[Option<Buffer>],
    memory: &mut [u64],
) -> (Tensor, bool) {
    let [kind, how, flags] = input.array();
    let kind = KINDS[usize::from(kind) % KINDS.len()];
    let ne = [0; 4].map(|_: usize| SIZES[1 + input.below(SIZES.len() - 1)]);
    let ne = if flags & 1 == 0 {
        [ne[0], ne[1], 1, 1]
    } else {
        ne
    };
    let mut tensor = Tensor::dense(kind, ne);
    for change in [how % 16, how / 16] {
        match change {
            // Odd strides, and dimensions in another order.
            0 => tensor.nb[1] += u64::from(input.byte()),
            1 => {
                tensor.ne.swap(0, 1);
                tensor.nb.swap(0, 1);
            }
            2 => tensor.nb[input.below(4)] = u64::from(input.byte()),
            3 => tensor.nb[input.below(4)] = input.long(),
            4 => tensor.ne[input.below(4)] = input.long().cast_signed(),
            5 => tensor.ne[input.below(4)] = 0,
            6 => {
                (tensor.block_elems, tensor.block_bytes) =
                    (input.byte().into(), input.byte().into());
            }
            7 => (tensor.dtype, tensor.format) = (input.word() % 9, input.word() % 7),
            8 => tensor.to_float = None,
            // A view that repeats its elements.
            9 => tensor.nb[input.below(4)] = 0,
            10 => tensor.ne[input.below(4)] = 1 << (input.byte() % 40),
            _ => {}
        }
    }
    tensor.role = input.word() % 4;
    let span = tensor.span();
    let slot = usize::from(flags >> 4) % (SLOTS + 2);
    match buffers.get(slot).and_then(Option::as_ref) {
        Some(buffer) if buffer.device == device => {
            let offset = usize::from(u16::from_le_bytes(input.array()));
            let offset = if flags & 2 == 0 {
                offset / 256 * 256
            } else {
                offset
            };
            // The backend itself checks that the tensor is in the buffer.
            (
                buffer.tensor(tensor, offset % (buffer.bytes + 1), tensor.role),
                true,
            )
        }
        _ => {
            // Rockchip devices use host memory by default, without one of the library's buffers.
            let default = if device == RK {
                NPU_PLACE_DEVICE
            } else {
                NPU_PLACE_HOST
            };
            tensor.place =
                [NPU_PLACE_HOST, default, NPU_PLACE_NONE, NPU_PLACE_OTHER][input.below(4)];
            let room = size_of_val(memory);
            let fits = span.is_some_and(|span| span <= room);
            if fits {
                let at = input.word() as usize % (room - span.unwrap_or(0) + 1);
                let at = if flags & 2 == 0 { at / 8 * 8 } else { at };
                tensor.data = memory.as_mut_ptr().wrapping_byte_add(at).cast();
            }
            (tensor, fits)
        }
    }
}

fn any_node(
    input: &mut Input,
    device: usize,
    buffers: &[Option<Buffer>],
    memory: &mut [u64],
) -> (Node, bool) {
    let op = input.one_of(&OPS);
    let (dst, mut fits) = tensor(input, device, buffers, memory);
    let mut src = Vec::new();
    for _ in 0..input.below(NPU_MAX_SRC + 1) {
        let (source, source_fits) = tensor(input, device, buffers, memory);
        fits &= source_fits;
        src.push(source);
    }
    let mut node = node(op, dst, &src);
    for _ in 0..input.below(4) {
        let at = input.below(NPU_OP_PARAMS);
        node.op_params[at] = if input.byte().is_multiple_of(2) {
            i32::from(input.byte())
        } else {
            input.word().cast_signed()
        };
    }
    // In most cases, gives the node a result shape that the operation could have.
    if let (Some(first), 1..) = (src.first(), input.byte() % 4) {
        node.dst.ne = first.ne;
        if let (true, Some(second)) = (op == c"MUL_MAT", src.get(1)) {
            node.dst.ne = [first.ne[1], second.ne[1], second.ne[2], second.ne[3]];
        }
        let step = u64::from(node.dst.block_bytes);
        let sizes = node.dst.ne.map(|n| u64::try_from(n).unwrap_or(0));
        node.dst.nb[0] = step;
        for dim in 1..4 {
            node.dst.nb[dim] = node.dst.nb[dim - 1].wrapping_mul(sizes[dim - 1]);
        }
        if node.dst.buffer.is_null() {
            let room = size_of_val(memory);
            fits &= node.dst.span().is_some_and(|span| span <= room);
            node.dst.data = memory.as_mut_ptr().cast();
        }
    }
    node.feeds_next = input.byte().is_multiple_of(4);
    // The CPU backend would also compute for minutes. Only weights may be large, because results do
    // not grow with all of their elements.
    let elements = |tensor: &Tensor| (tensor.ne.iter()).fold(1, |all, n| n.saturating_mul(all));
    let weights = usize::from(matches!(op.to_bytes(), b"MUL_MAT" | b"MUL_MAT_ID"));
    let others = node.src.iter().skip(weights).chain([&node.dst]);
    fits &= others.map(elements).all(|all| all <= MOST_ELEMENTS);
    (node, fits)
}

/// A product that every device computes correctly after any earlier calls.
struct Product {
    device: usize,
    weights: Weights,
    memory: Option<Buffer>,
    host: Box<[f32; 3 * 64]>,
    node: Node,
}

/// The memory of a product's weights.
enum Weights {
    /// Weights that are packed when they are written.
    Packed(Buffer),
    /// Weights in memory of the default type, which the CPU uses, too. They are written before each
    /// product.
    Shared(Buffer),
    /// The same, for a device whose default type is host memory.
    Host(Box<[u16; K * K]>),
}

const K: usize = 64;

impl Weights {
    /// Writes a multiple of the unit matrix, of 2 or 3.
    fn write_unit_matrix(&mut self, w: &Tensor, factor: u16) {
        let mut halves = [0u16; K * K];
        // F16 has 2 as 0x4000 and 3 as 0x4200.
        (0..K).for_each(|i| halves[i * (K + 1)] = 0x4000 + (factor - 2) * 0x200);
        match self {
            Self::Packed(buffer) | Self::Shared(buffer) => {
                let status = buffer.set(w, bytemuck::cast_slice(&halves), 0);
                assert_eq!(status, NPU_STATUS_OK);
            }
            Self::Host(memory) => **memory = halves,
        }
    }
}

impl Product {
    /// - `is_shared`: whether its weights are in memory of the default type
    fn new((device, is_shared): (usize, bool)) -> Self {
        let w = Tensor::dense(F16, [K, K, 1, 1]);
        let (mut weights, w) = if device == RK && is_shared {
            let mut memory = Box::new([0; K * K]);
            let w = Tensor {
                place: NPU_PLACE_DEVICE,
                role: NPU_ROLE_WEIGHTS,
                data: memory.as_mut_ptr().cast(),
                ..w
            };
            (Weights::Host(memory), w)
        } else {
            let buffer = Buffer::new(device, alloc_size(device, &w), is_shared);
            let buffer = buffer.expect("a small buffer");
            let w = buffer.tensor(w, 0, NPU_ROLE_WEIGHTS);
            let weights = if is_shared {
                Weights::Shared(buffer)
            } else {
                Weights::Packed(buffer)
            };
            (weights, w)
        };
        weights.write_unit_matrix(&w, 2);
        let mut host = Box::new([0.0; 3 * K]);
        let [act, dst] = [0, 1].map(|_| Tensor::dense(F32, [K, 1, 1, 1]));
        let memory =
            (device == HEX).then(|| Buffer::new(HEX, 2 * K * 4, true).expect("a small buffer"));
        let place = |tensor: Tensor, at: usize, host: &mut [f32]| match &memory {
            Some(memory) => memory.tensor(tensor, at * 4, NPU_ROLE_STATE),
            None => Tensor {
                place: NPU_PLACE_HOST,
                role: NPU_ROLE_STATE,
                data: host[at..].as_mut_ptr().cast(),
                ..tensor
            },
        };
        let (act, dst) = (place(act, 0, &mut *host), place(dst, K, &mut *host));
        Self {
            device,
            weights,
            memory,
            host,
            node: node(c"MUL_MAT", dst, &[w, act]),
        }
    }

    fn check(&mut self, seed: f32, factor: u16) {
        let is_written = !matches!(self.weights, Weights::Packed(_));
        if is_written {
            self.weights.write_unit_matrix(&self.node.src[0], factor);
        }
        let factor = f32::from(if is_written { factor } else { 2 });
        let x: Vec<f32> = (0..K).map(|i| seed + i as f32).collect();
        match &self.memory {
            Some(memory) => {
                assert_eq!(
                    memory.set(&self.node.src[1], bytemuck::cast_slice(&x), 0),
                    NPU_STATUS_OK
                );
            }
            None => self.host[..K].copy_from_slice(&x),
        }
        assert_eq!(
            Stream::new(self.device).compute(0, &[self.node]),
            NPU_STATUS_OK,
            "device {}",
            self.device
        );
        let have: Vec<f32> = match &self.memory {
            Some(memory) => {
                let (status, bytes) = memory.get(&self.node.dst, 0, K * 4);
                assert_eq!(status, NPU_STATUS_OK);
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|word| f32::from_le_bytes(*word))
                    .collect()
            }
            None => self.host[K..2 * K].to_vec(),
        };
        for (have, x) in have.iter().zip(&x) {
            // Eight bits for a row of activations, or FP16.
            assert!(
                (have - factor * x).abs() < factor,
                "device {}: {have} for {factor} * {x}",
                self.device
            );
        }
    }
}

thread_local! {
    static PRODUCTS: RefCell<Vec<Product>> = const { RefCell::new(Vec::new()) };
}

fn run(input: &mut Input) {
    let mut memory = vec![0x3f80_0000_3f00_0001_u64; LARGEST / 8];
    let mut buffers: [Option<Buffer>; SLOTS] = [const { None }; SLOTS];
    let streams = [RK, HEX].map(Stream::new);
    let mut uid = 0;
    let mut last = None;
    while !input.is_empty() {
        let kind = input.byte() % 13;
        let slot = input.below(SLOTS);
        match kind {
            0 => {
                let [device, shared] = input.array();
                let bytes = usize::from(u16::from_le_bytes(input.array()));
                buffers[slot] = None;
                let shared = device % 2 == 1 && shared % 2 == 0;
                buffers[slot] = Buffer::new(usize::from(device % 2), bytes, shared);
                last = None;
            }
            1..=3 => {
                let Some(device) = buffers[slot].as_ref().map(|buffer| buffer.device) else {
                    continue;
                };
                let (tensor, _) = tensor(input, device, &buffers, &mut memory);
                let Some(buffer) = &buffers[slot] else {
                    continue;
                };
                let offset = tensor.data.addr().wrapping_sub(buffer.at(0).addr());
                let span = tensor.span().unwrap_or(usize::MAX);
                // The function's contract requires that the tensor is in the buffer.
                if tensor.buffer != buffer.raw
                    || offset.saturating_add(span) > buffer.bytes
                    || span == 0
                {
                    continue;
                }
                let (_, block_bytes) = tensor.block();
                let all = span - 8.max(block_bytes as usize) + block_bytes as usize;
                let from = input.word() as usize % (all + 1);
                let size = input.word() as usize % (all - from + 1);
                match kind {
                    1 => {
                        buffer.set(&tensor, &vec![input.byte(); size], from);
                    }
                    2 => {
                        buffer.fill(&tensor, input.byte(), from, size);
                    }
                    _ => {
                        buffer.get(&tensor, from, size);
                    }
                }
            }
            4 => {
                let value = input.byte();
                match &buffers[slot] {
                    Some(buffer) => buffer.clear(value),
                    None => bytemuck::cast_slice_mut(&mut memory[slot..]).fill(value),
                }
            }
            5..=7 => {
                let device = input.below(3);
                let (node, _) = any_node(input, device, &buffers, &mut memory);
                let _ = supports(device, &node);
                let _ = alloc_size(device, &node.src[0]);
                // SAFETY: the graph is valid, with all that it points to.
                let _ = unsafe { npu_prefers_cpu(device, (&raw const node).cast()) };
            }
            8..=11 => {
                let device = slot % 2;
                let mut nodes = Vec::new();
                for _ in 0..=input.below(4) {
                    let (node, fits) = any_node(input, device, &buffers, &mut memory);
                    if fits {
                        nodes.push(node);
                    }
                }
                uid += u64::from(!nodes.is_empty());
                let _ = streams[device].compute(uid, &nodes);
                last = Some(device);
            }
            _ => {
                if let Some(device) = last {
                    let _ = streams[device].replay(uid);
                }
            }
        }
    }
    free(RK, &memory);
}

fuzz_target!(|bytes: &[u8]| {
    start();
    run(&mut Input::new(bytes));
    PRODUCTS.with_borrow_mut(|products| {
        if products.is_empty() {
            products.extend([(RK, false), (RK, true), (HEX, false), (HEX, true)].map(Product::new));
        }
        let seed = bytes.first().copied().unwrap_or(0);
        let check = |product: &mut Product| product.check(f32::from(seed), 2 + u16::from(seed % 2));
        products.iter_mut().for_each(check);
    });
});
