//! The C ABI of librknnrt's matmul API: structs, constants and the table of functions.
//!
//! Types, numbers and signatures on which the vendor's library and its stand-in ([`crate::sim`])
//! must agree. This module neither loads a library (the host crate does that) nor has behaviour.
//!
//! Names stay close to the C ones: `rknn_matmul_info` is [`MatmulInfo`]. Enumerations are
//! transparent newtypes, not Rust enums, because the library may return values this file does not
//! know.
//!
//! SOURCE: airockchip/rknn-toolkit2, `librknn_api/include/rknn_api.h` and `rknn_matmul_api.h`,
//! version 2.3.2; sizes and offsets as printed by a C compiler for LP64 little endian.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};

pub(crate) mod attr;
pub mod code;
pub mod export;
mod table;

pub use code::error_name;
pub use table::{Api, SYMBOLS};

/// Handle of a matmul context (`rknn_matmul_ctx`); the same handle is accepted where the C API
/// expects `rknn_context`.
pub type MatmulCtx = u64;

/// Largest number of dimensions in a tensor attribute (`RKNN_MAX_DIMS`).
pub const MAX_DIMS: usize = 16;
/// Bytes of a name field, terminator included (`RKNN_MAX_NAME_LEN`).
pub const MAX_NAME_LEN: usize = 256;
/// Largest number of shapes of a dynamic context (`RKNN_MAX_DYNAMIC_SHAPE_NUM`).
pub const MAX_DYNAMIC_SHAPES: usize = 512;
/// `rknn_query` command that fills an [`SdkVersion`] (`RKNN_QUERY_SDK_VERSION`).
pub const QUERY_SDK_VERSION: c_int = 5;

/// Declares a transparent newtype over a C integer with its known values.
macro_rules! c_values {
    ($(#[$doc:meta])* $name:ident($int:ty) { $($(#[$vdoc:meta])* $value:ident = $number:expr,)* }) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub $int);

        impl $name {
            $($(#[$vdoc])* pub const $value: Self = Self($number);)*
        }
    };
}

c_values! {
    /// Element types of A, B and C (`rknn_matmul_type`).
    MatmulType(c_int) {
        /// f16 x f16 -> f32.
        F16_F16_F32 = 1,
        /// i8 x i8 -> i32.
        I8_I8_I32 = 2,
        /// i8 x i8 -> i8, saturating.
        I8_I8_I8 = 3,
        /// f16 x f16 -> f16.
        F16_F16_F16 = 4,
        /// f16 x i8 -> f32.
        F16_I8_F32 = 5,
        /// f16 x i8 -> f16.
        F16_I8_F16 = 6,
        /// f16 x i4 -> f32.
        F16_I4_F32 = 7,
        /// f16 x i4 -> f16.
        F16_I4_F16 = 8,
        /// i8 x i8 -> f32.
        I8_I8_F32 = 9,
        /// i4 x i4 -> i16, saturating.
        I4_I4_I16 = 10,
        /// i8 x i4 -> i32.
        I8_I4_I32 = 11,
        /// f16 x i4 -> bf16.
        F16_I4_BF16 = 12,
        /// i8 x i4 -> f16.
        I8_I4_F16 = 15,
    }
}

c_values! {
    /// Memory layout of a tensor (`rknn_matmul_layout`), in the 16-bit width of the fields of
    /// [`MatmulInfo`].
    Layout(i16) {
        /// Row-major: A is `[M, K]`, B is `[K, N]`, C is `[M, N]`.
        NORM = 0,
        /// Layout of the matrix unit: see [`crate::layout`].
        NATIVE = 1,
        /// Transposed row-major, B only: `[N, K]`.
        TP_NORM = 2,
    }
}

c_values! {
    /// Quantization granularity (`rknn_quant_type`), in the 16-bit width of the fields of
    /// [`MatmulInfo`].
    QuantType(i16) {
        /// One scale for the tensor.
        PER_LAYER_SYM = 0,
        /// One scale and zero point for the tensor.
        PER_LAYER_ASYM = 1,
        /// One scale for each of the N columns.
        PER_CHANNEL_SYM = 2,
        /// One scale and zero point for each of the N columns.
        PER_CHANNEL_ASYM = 3,
        /// One scale for each group of `group_size` elements along K.
        PER_GROUP_SYM = 4,
        /// One scale and zero point for each group.
        PER_GROUP_ASYM = 5,
    }
}

c_values! {
    /// NPU cores a context may use (`rknn_core_mask`).
    CoreMask(c_int) {
        /// The library picks one core.
        AUTO = 0,
        /// Core 0.
        CORE_0 = 1,
        /// Core 1.
        CORE_1 = 2,
        /// Core 2.
        CORE_2 = 4,
        /// Cores 0 and 1; a matmul still runs on one.
        CORE_0_1 = 3,
        /// Cores 0, 1 and 2; a matmul still runs on one.
        CORE_0_1_2 = 7,
        /// All cores; a matmul still runs on one.
        ALL = 0xffff,
    }
}

c_values! {
    /// Element type of one tensor (`rknn_tensor_type`).
    TensorType(c_int) {
        /// 32-bit float.
        F32 = 0,
        /// 16-bit float.
        F16 = 1,
        /// 8-bit signed integer.
        I8 = 2,
        /// 16-bit signed integer.
        I16 = 4,
        /// 32-bit signed integer.
        I32 = 6,
        /// 4-bit signed integer, two to the byte.
        I4 = 10,
        /// bfloat16.
        BF16 = 11,
    }
}

c_values! {
    /// Direction of a cache operation (`rknn_mem_sync_mode`).
    MemSync(c_int) {
        /// Makes the CPU's writes visible to the device.
        TO_DEVICE = 1,
        /// Makes the device's writes visible to the CPU.
        FROM_DEVICE = 2,
        /// Makes the writes of each visible to the other.
        BIDIRECTIONAL = 3,
    }
}

/// Values of [`TensorMem::flags`] (`rknn_tensor_mem_flags`).
pub mod mem_flags {
    /// Allocated by the library.
    pub const ALLOC_INSIDE: u32 = 1;
    /// Made from a file descriptor.
    pub const FROM_FD: u32 = 2;
    /// Made from a physical address.
    pub const FROM_PHYS: u32 = 3;
}

/// Parameters of a context to create (`rknn_matmul_info`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MatmulInfo {
    /// Rows of A and C.
    pub m: c_int,
    /// Columns of A, rows of B.
    pub k: c_int,
    /// Columns of B and C.
    pub n: c_int,
    /// Types of A, B and C.
    pub matmul_type: MatmulType,
    /// Layout of B.
    pub b_layout: Layout,
    /// Quantization granularity of B.
    pub b_quant_type: QuantType,
    /// Layout of A and C.
    pub ac_layout: Layout,
    /// Quantization granularity of A and C.
    pub ac_quant_type: QuantType,
    /// I/O address space that allocations made with the context go to, 0..=15.
    pub iommu_domain_id: c_int,
    /// Elements of K for each scale, with the per-group types.
    pub group_size: i16,
    /// Must be zero.
    pub reserved: [i8; 34],
}

impl MatmulInfo {
    /// Returns a request with per-layer scales, I/O domain 0 and everything native.
    #[must_use]
    pub const fn native(matmul_type: MatmulType, m: c_int, k: c_int, n: c_int) -> Self {
        Self {
            m,
            k,
            n,
            matmul_type,
            b_layout: Layout::NATIVE,
            b_quant_type: QuantType::PER_LAYER_SYM,
            ac_layout: Layout::NATIVE,
            ac_quant_type: QuantType::PER_LAYER_SYM,
            iommu_domain_id: 0,
            group_size: 0,
            reserved: [0; 34],
        }
    }
}

/// One tensor of a context, in the form in which the library expects it
/// (`rknn_matmul_tensor_attr`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TensorAttr {
    /// `"A"`, `"B"` or `"C"`, zero terminated.
    pub name: [c_char; MAX_NAME_LEN],
    /// Used entries of `dims`.
    pub n_dims: u32,
    /// Dimensions, outermost first.
    pub dims: [u32; MAX_DIMS],
    /// Size in bytes.
    pub size: u32,
    /// Element type.
    pub tensor_type: TensorType,
}

impl TensorAttr {
    /// An attribute with no name and no dimensions, for the library to fill.
    pub const ZERO: Self = Self {
        name: [0; MAX_NAME_LEN],
        n_dims: 0,
        dims: [0; MAX_DIMS],
        size: 0,
        tensor_type: TensorType::F32,
    };
}

/// The three tensors of a context (`rknn_matmul_io_attr`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoAttr {
    /// Activations.
    pub a: TensorAttr,
    /// Weights.
    pub b: TensorAttr,
    /// Result.
    pub c: TensorAttr,
}

impl IoAttr {
    /// Three empty attributes, for the library to fill.
    pub const ZERO: Self = Self {
        a: TensorAttr::ZERO,
        b: TensorAttr::ZERO,
        c: TensorAttr::ZERO,
    };
}

/// Scales and zero points of one tensor (`rknn_quant_params`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QuantParams {
    /// `"A"`, `"B"` or `"C"`, zero terminated.
    pub name: [c_char; MAX_NAME_LEN],
    /// `scale_len` scales.
    pub scale: *mut f32,
    /// Number of scales.
    pub scale_len: c_int,
    /// `zp_len` zero points.
    pub zp: *mut c_int,
    /// Number of zero points.
    pub zp_len: c_int,
}

/// One shape of a dynamic context (`rknn_matmul_shape`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// Rows of A and C.
    pub m: c_int,
    /// Columns of A, rows of B.
    pub k: c_int,
    /// Columns of B and C.
    pub n: c_int,
}

/// A piece of memory that the device can reach (`rknn_tensor_mem`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TensorMem {
    /// Start of the CPU mapping; a view's first byte is at `virt_addr + offset`.
    pub virt_addr: *mut c_void,
    /// Physical or I/O address, if known.
    pub phys_addr: u64,
    /// File descriptor of the allocation.
    pub fd: i32,
    /// Bytes from the start of the allocation.
    pub offset: i32,
    /// Size in bytes.
    pub size: u32,
    /// One of [`mem_flags`].
    pub flags: u32,
    /// Private data of the library.
    pub priv_data: *mut c_void,
}

/// Versions as text (`rknn_sdk_version`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SdkVersion {
    /// Library version, such as `2.3.2 (429f97ae6b@2025-04-09T09:09:27)`.
    pub api_version: [c_char; 256],
    /// Kernel driver version, such as `0.9.8`.
    pub drv_version: [c_char; 256],
}

impl SdkVersion {
    /// Returns both versions, cut to fit, with zeros after them.
    #[must_use]
    pub fn new(library: &str, driver: &str) -> Self {
        let c_text = |text: &str| {
            let mut out = [0; 256];
            for (to, from) in out.iter_mut().take(255).zip(text.bytes()) {
                *to = c_char::from_ne_bytes([from]);
            }
            out
        };
        Self {
            api_version: c_text(library),
            drv_version: c_text(driver),
        }
    }
}

/// Fails the build if the compiler lays out a struct differently from the vendor's C compiler.
macro_rules! assert_abi {
    ($name:ident: $size:literal { $($($field:ident).+ @ $offset:literal),* $(,)? }) => {
        const _: () = assert!(size_of::<$name>() == $size);
        $(const _: () = assert!(offset_of!($name, $($field).+) == $offset);)*
    };
}

#[cfg(target_pointer_width = "64")]
mod abi {
    use super::*;

    assert_abi!(MatmulInfo: 64 {
        m @ 0, k @ 4, n @ 8, matmul_type @ 12, b_layout @ 16, b_quant_type @ 18, ac_layout @ 20, ac_quant_type @ 22,
        iommu_domain_id @ 24, group_size @ 28, reserved @ 30,
    });
    assert_abi!(TensorAttr: 332 { name @ 0, n_dims @ 256, dims @ 260, size @ 324, tensor_type @ 328 });
    assert_abi!(IoAttr: 996 { a @ 0, b @ 332, c @ 664 });
    assert_abi!(QuantParams: 288 { name @ 0, scale @ 256, scale_len @ 264, zp @ 272, zp_len @ 280 });
    assert_abi!(MatmulShape: 12 { m @ 0, k @ 4, n @ 8 });
    assert_abi!(TensorMem: 40 {
        virt_addr @ 0, phys_addr @ 8, fd @ 16, offset @ 20, size @ 24, flags @ 28, priv_data @ 32,
    });
    assert_abi!(SdkVersion: 512 { api_version @ 0, drv_version @ 256 });
}
