//! The functions under the vendor's names, for libraries that replace the vendor's library.

/// Exports the functions of [`Api`](crate::ffi::Api) under the vendor's names.
///
/// - `$machine`: a function that returns an `Option<Api>`: the process's machine. Without one,
///   functions return `DEVICE_UNAVAILABLE` or null
#[macro_export]
macro_rules! export_rknn {
    ($machine:path) => {
        $crate::export_rknn! { @functions $machine;
            rknn_matmul_create => matmul_create(
                ctx: *mut $crate::ffi::MatmulCtx,
                info: *mut $crate::ffi::MatmulInfo,
                io_attr: *mut $crate::ffi::IoAttr,
            ) -> c_int;
            rknn_matmul_create_dynamic_shape => matmul_create_dynamic_shape(
                ctx: *mut $crate::ffi::MatmulCtx,
                info: *mut $crate::ffi::MatmulInfo,
                shape_num: c_int,
                shapes: *mut $crate::ffi::MatmulShape,
                io_attrs: *mut $crate::ffi::IoAttr,
            ) -> c_int;
            rknn_matmul_set_dynamic_shape => matmul_set_dynamic_shape(
                ctx: $crate::ffi::MatmulCtx,
                shape: *mut $crate::ffi::MatmulShape,
            ) -> c_int;
            rknn_matmul_set_io_mem => matmul_set_io_mem(
                ctx: $crate::ffi::MatmulCtx,
                mem: *mut $crate::ffi::TensorMem,
                attr: *mut $crate::ffi::TensorAttr,
            ) -> c_int;
            rknn_matmul_set_core_mask => matmul_set_core_mask(
                ctx: $crate::ffi::MatmulCtx,
                mask: $crate::ffi::CoreMask,
            ) -> c_int;
            rknn_matmul_set_quant_params => matmul_set_quant_params(
                ctx: $crate::ffi::MatmulCtx,
                params: *mut $crate::ffi::QuantParams,
            ) -> c_int;
            rknn_matmul_run => matmul_run(ctx: $crate::ffi::MatmulCtx,) -> c_int;
            rknn_matmul_destroy => matmul_destroy(ctx: $crate::ffi::MatmulCtx,) -> c_int;
            rknn_create_mem => create_mem(
                ctx: $crate::ffi::MatmulCtx,
                size: u32,
            ) -> *mut $crate::ffi::TensorMem;
            rknn_create_mem_from_fd => create_mem_from_fd(
                ctx: $crate::ffi::MatmulCtx,
                fd: i32,
                virt: *mut c_void,
                size: u32,
                offset: i32,
            ) -> *mut $crate::ffi::TensorMem;
            rknn_destroy_mem => destroy_mem(
                ctx: $crate::ffi::MatmulCtx,
                mem: *mut $crate::ffi::TensorMem,
            ) -> c_int;
            rknn_mem_sync => mem_sync(
                ctx: $crate::ffi::MatmulCtx,
                mem: *mut $crate::ffi::TensorMem,
                mode: $crate::ffi::MemSync,
            ) -> c_int;
            rknn_query => query(
                ctx: $crate::ffi::MatmulCtx,
                command: c_int,
                info: *mut c_void,
                size: u32,
            ) -> c_int;
            rknn_B_normal_layout_to_native_layout => b_normal_layout_to_native_layout(
                input: *mut c_void,
                output: *mut c_void,
                k: c_int,
                n: c_int,
                info: *mut $crate::ffi::MatmulInfo,
            ) -> c_int;
        }
    };
    (@functions $machine:path;
        $($symbol:ident => $field:ident($($arg:ident: $ty:ty,)*) -> $ret:ty;)*
    ) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "` of the process's machine.")]
            ///
            /// # Safety
            /// As the C function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> $ret {
                match $machine() {
                    // SAFETY: passed on to the caller.
                    Some(api) => unsafe { (api.$field)($($arg),*) },
                    None => $crate::ffi::export::Unavailable::UNAVAILABLE,
                }
            }
        )*
    };
}

/// A value that functions return without a machine.
pub trait Unavailable {
    /// The value.
    const UNAVAILABLE: Self;
}

impl Unavailable for std::ffi::c_int {
    const UNAVAILABLE: Self = super::code::DEVICE_UNAVAILABLE;
}

impl Unavailable for *mut super::TensorMem {
    const UNAVAILABLE: Self = std::ptr::null_mut();
}
