//! The functions of librknnrt, recorded.
#![expect(unsafe_code, reason = "calls into the vendor's library")]

use std::ffi::{c_int, c_void};

use rknpu_ops::ffi::{
    Api, CoreMask, IoAttr, MatmulCtx, MatmulInfo, MemSync, TensorAttr, TensorMem,
};

use crate::driver::trace;

trace::traced! {
    Api {
        matmul_create = "rknn_matmul_create"(ctx: *mut MatmulCtx, info: *mut MatmulInfo, attr: *mut IoAttr) -> c_int,
            shape(info);
        matmul_set_io_mem = "rknn_matmul_set_io_mem"(ctx: MatmulCtx, memory: *mut TensorMem, attr: *mut TensorAttr) -> c_int,
            String::new();
        matmul_set_core_mask = "rknn_matmul_set_core_mask"(ctx: MatmulCtx, mask: CoreMask) -> c_int, format!("mask {}", mask.0);
        matmul_run = "rknn_matmul_run"(ctx: MatmulCtx) -> c_int, String::new();
        matmul_destroy = "rknn_matmul_destroy"(ctx: MatmulCtx) -> c_int, String::new();
        create_mem = "rknn_create_mem"(ctx: MatmulCtx, bytes: u32) -> *mut TensorMem, format!("{bytes} bytes");
        create_mem_from_fd =
            "rknn_create_mem_from_fd"(ctx: MatmulCtx, fd: i32, start: *mut c_void, bytes: u32, offset: i32) -> *mut TensorMem,
            format!("{bytes} bytes");
        destroy_mem = "rknn_destroy_mem"(ctx: MatmulCtx, memory: *mut TensorMem) -> c_int, String::new();
        mem_sync = "rknn_mem_sync"(ctx: MatmulCtx, memory: *mut TensorMem, mode: MemSync) -> c_int, format!("mode {}", mode.0);
        query = "rknn_query"(ctx: MatmulCtx, what: c_int, data: *mut c_void, bytes: u32) -> c_int, format!("query {what}");
    }
    optional {}
}

/// Returns the requested shape.
fn shape(info: *mut MatmulInfo) -> String {
    // SAFETY: the caller passes the same pointer to the library, which reads the struct there.
    super::describe(unsafe { &*info })
}
