//! The C functions under the vendor's names, for a stand-in that is loaded as `librknnrt.so`.
//!
//! There is one machine for the process, started by the first call that needs it: the first
//! Rockchip chip that `GGML_RUST_NPU_SIM` lists, with the options of [`Options::from_env`].
#![expect(unsafe_code, reason = "exported symbols are an unsafe attribute")]

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use super::{Machine, Options, api, start};
use crate::ffi::{
    Api, CoreMask, IoAttr, MatmulCtx, MatmulInfo, MatmulShape, MemSync, QuantParams, TensorAttr,
    TensorMem, code,
};
use crate::layout::Soc;

/// Returns the process's machine, if the environment requests one.
fn machine() -> Option<Api> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    let machine = MACHINE.get_or_init(|| {
        sim_common::from_env("librknnrt", "Rockchip", Soc::from_name, |soc| {
            Options::from_env(soc).and_then(start)
        })
    });
    machine.as_ref().map(Machine::api)
}

/// Exports functions that need the machine's copy.
macro_rules! export_of_machine {
    ($($symbol:ident => $field:ident($($arg:ident: $ty:ty),*);)*) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "` of the process's machine.")]
            ///
            /// # Safety
            /// As the C function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> c_int {
                match machine() {
                    // SAFETY: passed on to the caller.
                    Some(api) => unsafe { (api.$field)($($arg),*) },
                    None => code::DEVICE_UNAVAILABLE,
                }
            }
        )*
    };
}

/// Exports functions that find the machine through a context.
macro_rules! export_of_context {
    ($($symbol:ident => $function:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "`.")]
            ///
            /// # Safety
            /// As the C function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> $ret {
                // SAFETY: passed on to the caller.
                unsafe { api::$function($($arg),*) }
            }
        )*
    };
}

export_of_machine! {
    rknn_matmul_create => matmul_create(ctx: *mut MatmulCtx, info: *mut MatmulInfo, io_attr: *mut IoAttr);
    rknn_matmul_create_dynamic_shape => matmul_create_dynamic_shape(
        ctx: *mut MatmulCtx, info: *mut MatmulInfo, shape_num: c_int, shapes: *mut MatmulShape, io_attrs: *mut IoAttr
    );
    rknn_B_normal_layout_to_native_layout => b_normal_layout_to_native_layout(
        input: *mut c_void, output: *mut c_void, k: c_int, n: c_int, info: *mut MatmulInfo
    );
}

export_of_context! {
    rknn_matmul_set_dynamic_shape => matmul_set_dynamic_shape(ctx: MatmulCtx, shape: *mut MatmulShape) -> c_int;
    rknn_matmul_set_io_mem =>
        matmul_set_io_mem(ctx: MatmulCtx, mem: *mut TensorMem, attr: *mut TensorAttr) -> c_int;
    rknn_matmul_set_core_mask => matmul_set_core_mask(ctx: MatmulCtx, mask: CoreMask) -> c_int;
    rknn_matmul_set_quant_params => matmul_set_quant_params(ctx: MatmulCtx, params: *mut QuantParams) -> c_int;
    rknn_matmul_run => matmul_run(ctx: MatmulCtx) -> c_int;
    rknn_matmul_destroy => matmul_destroy(ctx: MatmulCtx) -> c_int;
    rknn_create_mem => create_mem(ctx: MatmulCtx, size: u32) -> *mut TensorMem;
    rknn_create_mem_from_fd => create_mem_from_fd(
        ctx: MatmulCtx, fd: i32, virt: *mut c_void, size: u32, offset: i32
    ) -> *mut TensorMem;
    rknn_destroy_mem => destroy_mem(ctx: MatmulCtx, mem: *mut TensorMem) -> c_int;
    rknn_mem_sync => mem_sync(ctx: MatmulCtx, mem: *mut TensorMem, mode: MemSync) -> c_int;
    rknn_query => query(ctx: MatmulCtx, command: c_int, info: *mut c_void, size: u32) -> c_int;
}
