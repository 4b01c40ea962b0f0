//! The table of librknnrt's functions that the host code calls, filled by a loader or by the
//! stand-in.
#![expect(
    unsafe_code,
    reason = "a symbol's address becomes a typed function pointer here"
)]

use std::ffi::{c_int, c_void};

use super::{
    CoreMask, IoAttr, MatmulCtx, MatmulInfo, MatmulShape, MemSync, QuantParams, TensorAttr,
    TensorMem,
};

/// Declares [`Api`], [`SYMBOLS`] and [`Api::from_symbols`] from one list of
/// `field = "symbol": type`.
macro_rules! api_table {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: $ty:ty;)*) => {
        /// The functions of librknnrt's matmul API. Every one returns a [`super::code`] or a
        /// pointer that may be null.
        #[derive(Clone, Copy, Debug)]
        pub struct Api {
            $($(#[$doc])* pub $field: $ty,)*
        }

        /// The vendor's names of the functions, in the order of the fields of [`Api`].
        pub const SYMBOLS: &[&str] = &[$($symbol),*];

        impl Api {
            /// Fills the table by asking `lookup` for the address of each of [`SYMBOLS`].
            ///
            /// # Errors
            /// The error that `lookup` returns for the first name that it cannot find.
            ///
            /// # Safety
            /// - An address that `lookup` returns is not null and is that of the librknnrt function
            ///   of that name.
            /// - The functions stay callable for as long as the table or a copy of it is used.
            pub unsafe fn from_symbols<E>(
                mut lookup: impl FnMut(&'static str) -> Result<*const c_void, E>,
            ) -> Result<Self, E> {
                Ok(Self {
                    $($field: {
                        let address = lookup($symbol)?;
                        // SAFETY: the caller vouches that this is the function of that name, whose
                        // C prototype is the field's type.
                        unsafe { std::mem::transmute::<*const c_void, $ty>(address) }
                    },)*
                })
            }
        }
    };
}

api_table! {
    /// Creates a context and fills the attributes of its three tensors.
    matmul_create = "rknn_matmul_create":
        unsafe extern "C" fn(*mut MatmulCtx, *mut MatmulInfo, *mut IoAttr) -> c_int;
    /// Creates a context for several M; `info.m/k/n` are ignored.
    matmul_create_dynamic_shape = "rknn_matmul_create_dynamic_shape":
        unsafe extern "C" fn(*mut MatmulCtx, *mut MatmulInfo, c_int, *mut MatmulShape, *mut IoAttr) -> c_int;
    /// Selects one of the shapes of a dynamic context.
    matmul_set_dynamic_shape = "rknn_matmul_set_dynamic_shape":
        unsafe extern "C" fn(MatmulCtx, *mut MatmulShape) -> c_int;
    /// Binds a native tensor, or rearranges a copy of any other.
    matmul_set_io_mem = "rknn_matmul_set_io_mem":
        unsafe extern "C" fn(MatmulCtx, *mut TensorMem, *mut TensorAttr) -> c_int;
    /// Selects the core.
    matmul_set_core_mask = "rknn_matmul_set_core_mask": unsafe extern "C" fn(MatmulCtx, CoreMask) -> c_int;
    /// Sets the scale of one tensor.
    matmul_set_quant_params = "rknn_matmul_set_quant_params":
        unsafe extern "C" fn(MatmulCtx, *mut QuantParams) -> c_int;
    /// Multiplies, and returns when C is written.
    matmul_run = "rknn_matmul_run": unsafe extern "C" fn(MatmulCtx) -> c_int;
    /// Destroys a context.
    matmul_destroy = "rknn_matmul_destroy": unsafe extern "C" fn(MatmulCtx) -> c_int;
    /// Allocates memory in the context's I/O domain.
    create_mem = "rknn_create_mem": unsafe extern "C" fn(MatmulCtx, u32) -> *mut TensorMem;
    /// Makes a view of an allocation: (ctx, fd, start of the mapping without the offset, bytes,
    /// offset).
    create_mem_from_fd = "rknn_create_mem_from_fd":
        unsafe extern "C" fn(MatmulCtx, i32, *mut c_void, u32, i32) -> *mut TensorMem;
    /// Frees the result of either of the two functions above.
    destroy_mem = "rknn_destroy_mem": unsafe extern "C" fn(MatmulCtx, *mut TensorMem) -> c_int;
    /// Flushes or invalidates the CPU cache over an allocation; does nothing through a view.
    mem_sync = "rknn_mem_sync": unsafe extern "C" fn(MatmulCtx, *mut TensorMem, MemSync) -> c_int;
    /// Asks for a property; see [`super::QUERY_SDK_VERSION`].
    query = "rknn_query": unsafe extern "C" fn(MatmulCtx, c_int, *mut c_void, u32) -> c_int;
    /// Rearranges a row-major B into the native layout: (in, out, K, N, info).
    b_normal_layout_to_native_layout = "rknn_B_normal_layout_to_native_layout":
        unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut MatmulInfo) -> c_int;
}
