//! The C interface as C sees it: the structs of `include/npu.h` with every field open, buffers and
//! streams that free themselves, and both families' stand-ins under strict coherence.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use ggml_rust_npu::abi::*;
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::tensor::Dequantize;

/// Index of the Rockchip device.
pub const RK: usize = 0;
/// Index of the Hexagon device.
pub const HEX: usize = 1;

/// `npu_tensor.to_float`.
pub type ToFloat = unsafe extern "C" fn(*const c_void, *mut f32, i64);

/// `npu_tensor`.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "include/npu.h says it")]
pub struct Tensor {
    pub dtype: u32,
    pub format: u32,
    pub place: u32,
    pub block_elems: u32,
    pub block_bytes: u32,
    pub role: u32,
    pub ne: [i64; 4],
    pub nb: [u64; 4],
    pub data: *mut c_void,
    pub buffer: *mut NpuBuffer,
    pub to_float: Option<ToFloat>,
    pub name: *const c_char,
}
const _: () = assert!(size_of::<Tensor>() == size_of::<NpuTensor>());

/// `npu_node`.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "include/npu.h says it")]
pub struct Node {
    pub op: *const c_char,
    pub op_params: [i32; NPU_OP_PARAMS],
    pub dst: Tensor,
    pub src: [Tensor; NPU_MAX_SRC],
    pub feeds_next: bool,
}
const _: () = assert!(size_of::<Node>() == size_of::<NpuNode>());

impl Tensor {
    /// A tensor that is absent.
    pub const NONE: Self = Self {
        dtype: NPU_DTYPE_NONE,
        format: NPU_FORMAT_NONE,
        place: NPU_PLACE_NONE,
        block_elems: 1,
        block_bytes: 0,
        role: NPU_ROLE_RESULT,
        ne: [0; 4],
        nb: [0; 4],
        data: null_mut(),
        buffer: null_mut(),
        to_float: None,
        name: c"none".as_ptr(),
    };

    /// A tensor of a type, without gaps. The caller fills in its memory.
    #[must_use]
    pub fn dense(kind: Kind, ne: [usize; 4]) -> Self {
        let row = ne[0].div_ceil(kind.block_elems as usize) * kind.block_bytes as usize;
        let nb = [
            kind.block_bytes as usize,
            row,
            row * ne[1],
            row * ne[1] * ne[2],
        ];
        Self {
            dtype: kind.dtype,
            format: kind.format,
            block_elems: kind.block_elems,
            block_bytes: kind.block_bytes,
            ne: ne.map(|n| i64::try_from(n).expect("small")),
            nb: nb.map(|n| n as u64),
            to_float: kind.to_float,
            name: kind.name.as_ptr(),
            ..Self::NONE
        }
    }

    /// Elements and bytes of a block, as the library counts them: for plain types it uses its own
    /// numbers and ignores the fields.
    #[must_use]
    pub fn block(&self) -> (u64, u64) {
        match self.dtype {
            NPU_DTYPE_I8 => (1, 1),
            NPU_DTYPE_F16 | NPU_DTYPE_BF16 | NPU_DTYPE_I16 => (1, 2),
            NPU_DTYPE_F32 | NPU_DTYPE_I32 => (1, 4),
            NPU_DTYPE_I64 => (1, 8),
            _ => (u64::from(self.block_elems).max(1), self.block_bytes.into()),
        }
    }

    /// Bytes from the first element to the end of the last, or of 8 bytes, if the numbers make
    /// sense.
    #[must_use]
    pub fn span(&self) -> Option<usize> {
        let ne = self.ne.map(u64::try_from);
        let [Ok(n0), Ok(n1), Ok(n2), Ok(n3)] = ne else {
            return None;
        };
        if [n0, n1, n2, n3].contains(&0) {
            return Some(0);
        }
        let (block_elems, block_bytes) = self.block();
        let steps = n0.div_ceil(block_elems) - 1;
        let mut bytes = block_bytes.max(8);
        for (n, nb) in [steps, n1 - 1, n2 - 1, n3 - 1].into_iter().zip(self.nb) {
            bytes = bytes.checked_add(n.checked_mul(nb)?)?;
        }
        usize::try_from(bytes).ok()
    }
}

/// A type of elements.
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "as the fields of a tensor")]
pub struct Kind {
    pub dtype: u32,
    pub format: u32,
    pub block_elems: u32,
    pub block_bytes: u32,
    pub to_float: Option<ToFloat>,
    pub name: &'static CStr,
}

const fn plain(dtype: u32, block_bytes: u32, name: &'static CStr) -> Kind {
    Kind {
        dtype,
        format: NPU_FORMAT_NONE,
        block_elems: 1,
        block_bytes,
        to_float: None,
        name,
    }
}

const fn blocks(
    format: u32,
    elems: u32,
    bytes: u32,
    to_float: ToFloat,
    name: &'static CStr,
) -> Kind {
    Kind {
        dtype: NPU_DTYPE_QUANTIZED,
        format,
        block_elems: elems,
        block_bytes: bytes,
        to_float: Some(to_float),
        name,
    }
}

macro_rules! to_float {
    ($($function:ident = $dtype:expr, $elems:expr, $bytes:expr;)*) => {
        $(
            unsafe extern "C" fn $function(src: *const c_void, dst: *mut f32, n: i64) {
                let n = usize::try_from(n).expect("a length");
                // SAFETY: the caller guarantees as many blocks as `n` elements need.
                let blocks = unsafe { std::slice::from_raw_parts(src.cast::<u8>(), n / $elems * $bytes) };
                // SAFETY: the caller guarantees this length.
                let out = unsafe { std::slice::from_raw_parts_mut(dst, n) };
                let known: &dyn Dequantize = dequantize::of($dtype).expect("a quantized type");
                known.dequantize(blocks, out);
            }
        )*
    };
}
to_float! {
    q4_0 = GgmlType::Q4_0, 32, 18;
    q8_0 = GgmlType::Q8_0, 32, 34;
    q6_k = GgmlType::from_number(14).expect("Q6_K"), 256, 210;
}

/// F32.
pub const F32: Kind = plain(NPU_DTYPE_F32, 4, c"f32");
/// F16.
pub const F16: Kind = plain(NPU_DTYPE_F16, 2, c"f16");
/// BF16.
pub const BF16: Kind = plain(NPU_DTYPE_BF16, 2, c"bf16");
/// I32.
pub const I32: Kind = plain(NPU_DTYPE_I32, 4, c"i32");
/// I64.
pub const I64: Kind = plain(NPU_DTYPE_I64, 8, c"i64");
/// Q4_0.
pub const Q4_0: Kind = blocks(NPU_FORMAT_Q4_0, 32, 18, q4_0, c"q4_0");
/// Q8_0.
pub const Q8_0: Kind = blocks(NPU_FORMAT_Q8_0, 32, 34, q8_0, c"q8_0");
/// Q6_K, for which the devices of this target have no layout.
pub const Q6_K: Kind = blocks(NPU_FORMAT_NONE, 256, 210, q6_k, c"q6_k");

extern "C" fn log(_level: u32, text: *const c_char) {
    if std::env::var_os("FUZZ_LOG").is_some() {
        // SAFETY: a text of this crate, which ends in NUL.
        eprintln!("{}", unsafe { CStr::from_ptr(text) }.to_string_lossy());
    }
}

/// Starts both devices, once. The environment may choose another chip of the same family, or
/// whether weights are kept.
///
/// # Panics
/// If one of them does not start.
pub fn start() {
    static STARTED: OnceLock<usize> = OnceLock::new();
    let devices = *STARTED.get_or_init(|| {
        for (name, value) in [
            ("GGML_RUST_NPU_SIM", "rk3588,hexagon-v75"),
            ("GGML_RUST_NPU_SIM_COHERENCE", "strict"),
            ("GGML_RUST_NPU_LOG", "warn"),
            // The targets read weights back, and the CPU takes no part in the graphs.
            ("GGML_RUST_NPU_KEEP", "on"),
        ] {
            if std::env::var_os(name).is_none() {
                // SAFETY: no other thread runs yet.
                unsafe { std::env::set_var(name, value) };
            }
        }
        let host = NpuHost { log: Some(log) };
        // SAFETY: valid, and the function is always there.
        unsafe { npu_start(&raw const host) }
    });
    assert_eq!(devices, 2, "FUZZ_LOG=1 says why");
}

/// A buffer of a device.
pub struct Buffer {
    /// For tensors.
    pub raw: *mut NpuBuffer,
    /// Device that it is of.
    pub device: usize,
    /// Bytes.
    pub bytes: usize,
    /// The memory is used by the CPU, too.
    pub is_shared: bool,
}

impl Buffer {
    /// Allocates one.
    #[must_use]
    pub fn new(device: usize, bytes: usize, is_shared: bool) -> Option<Self> {
        let raw = npu_buffer_new(device, bytes, is_shared);
        (!raw.is_null()).then_some(Self {
            raw,
            device,
            bytes,
            is_shared,
        })
    }

    /// The address of a byte.
    #[must_use]
    pub fn at(&self, offset: usize) -> *mut c_void {
        // SAFETY: the object is alive.
        unsafe { npu_buffer_base(self.raw) }.wrapping_byte_add(offset)
    }

    /// The tensor at an offset.
    #[must_use]
    pub fn tensor(&self, tensor: Tensor, offset: usize, role: u32) -> Tensor {
        Tensor {
            place: if self.device == HEX && self.is_shared {
                NPU_PLACE_DEVICE
            } else {
                NPU_PLACE_PACKED
            },
            role,
            data: self.at(offset),
            buffer: self.raw,
            ..tensor
        }
    }

    /// Writes a part of a tensor.
    pub fn set(&self, tensor: &Tensor, bytes: &[u8], offset: usize) -> u32 {
        let (tensor, data) = (std::ptr::from_ref(tensor).cast(), bytes.as_ptr().cast());
        // SAFETY: the buffer is alive and has that size.
        unsafe { npu_buffer_set(self.raw, tensor, data, offset, bytes.len()) }
    }

    /// Fills a part of a tensor.
    pub fn fill(&self, tensor: &Tensor, value: u8, offset: usize, size: usize) -> u32 {
        // SAFETY: the object is alive.
        unsafe {
            npu_buffer_fill(
                self.raw,
                std::ptr::from_ref(tensor).cast(),
                value,
                offset,
                size,
            )
        }
    }

    /// Reads a part of a tensor.
    pub fn get(&self, tensor: &Tensor, offset: usize, size: usize) -> (u32, Vec<u8>) {
        let mut out = vec![0; size];
        let (tensor, data) = (std::ptr::from_ref(tensor).cast(), out.as_mut_ptr().cast());
        // SAFETY: the buffer is alive and has that size.
        let status = unsafe { npu_buffer_get(self.raw, tensor, data, offset, size) };
        (status, out)
    }

    /// Fills all of it.
    pub fn clear(&self, value: u8) {
        // SAFETY: the object is alive.
        unsafe { npu_buffer_clear(self.raw, value) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `npu_buffer_new` returned it, and nothing uses it after this.
        unsafe { npu_buffer_free(self.raw) };
    }
}

/// A stream of graphs.
pub struct Stream(*mut NpuBackend);

impl Stream {
    /// Makes a stream on the device with this number.
    #[must_use]
    pub fn new(device: usize) -> Self {
        Self(npu_backend_new(device))
    }

    /// Computes a graph.
    pub fn compute(&self, uid: u64, nodes: &[Node]) -> u32 {
        // SAFETY: alive; the caller guarantees the same for everything that the nodes point to.
        unsafe { npu_backend_compute(self.0, uid, nodes.as_ptr().cast(), nodes.len()) }
    }

    /// Computes a graph again, if it is remembered.
    #[must_use]
    pub fn replay(&self, uid: u64) -> Option<u32> {
        let mut status = 99;
        // SAFETY: as for `compute`.
        unsafe { npu_backend_replay(self.0, uid, &raw mut status) }.then_some(status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: `npu_backend_new` returned it, and nothing uses it after this.
        unsafe { npu_backend_free(self.0) };
    }
}

/// Returns `true` if the device computes the node.
#[must_use]
pub fn supports(device: usize, node: &Node) -> bool {
    // SAFETY: valid, with all that it points to.
    unsafe { npu_supports_op(device, std::ptr::from_ref(node).cast()) }
}

/// Tells a device that host memory of its default type is about to be freed.
pub fn free(device: usize, memory: &[u64]) {
    npu_host_memory_freed(device, memory.as_ptr().cast(), size_of_val(memory));
}

/// Bytes that a tensor occupies in a packed buffer.
#[must_use]
pub fn alloc_size(device: usize, tensor: &Tensor) -> usize {
    // SAFETY: the tensor and its name are valid.
    unsafe { npu_packed_alloc_size(device, std::ptr::from_ref(tensor).cast()) }
}

/// A node without parameters.
#[must_use]
pub fn node(op: &'static CStr, dst: Tensor, src: &[Tensor]) -> Node {
    let mut all = [Tensor::NONE; NPU_MAX_SRC];
    all[..src.len()].copy_from_slice(src);
    Node {
        op: op.as_ptr(),
        op_params: [0; NPU_OP_PARAMS],
        dst,
        src: all,
        feeds_next: false,
    }
}
