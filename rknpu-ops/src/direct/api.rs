//! The C functions: find the context or machine, check pointers, catch panics.
//!
//! An unknown context gives `CTX_INVALID` (or null) before anything else; a null pointer gives
//! `PARAM_INVALID`.
#![expect(
    unsafe_code,
    reason = "these are the C functions; their pointers come from the caller"
)]

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::context::{self, Context};
use super::{MACHINES, Shared, VERSION};
use crate::ffi::{
    Api, CoreMask, IoAttr, MatmulCtx, MatmulInfo, MatmulShape, MemSync, QUERY_SDK_VERSION,
    QuantParams, SdkVersion, TensorAttr, TensorMem, code,
};
use crate::stream::Arithmetic;

/// Runs the body of a C function: an error becomes its code, a panic `FAIL`.
fn guarded(body: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => code::SUCC,
        Ok(Err(code)) => code,
        Err(_) => code::FAIL,
    }
}

/// As [`guarded`], for functions that return a pointer.
fn guarded_mem(body: impl FnOnce() -> Result<*mut TensorMem, c_int>) -> *mut TensorMem {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(memory)) => memory,
        _ => std::ptr::null_mut(),
    }
}

fn of_context(handle: MatmulCtx) -> Result<Arc<Context>, c_int> {
    context::find(handle).ok_or(code::CTX_INVALID)
}

fn of_slot_number(slot: usize) -> Result<Arc<Shared>, c_int> {
    MACHINES.get(slot).ok_or(code::DEVICE_UNAVAILABLE)
}

/// Reads the target of a C pointer.
///
/// # Safety
/// - `pointer` is null or points at a valid `T`.
unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, c_int> {
    if pointer.is_null() {
        return Err(code::PARAM_INVALID);
    }
    // SAFETY: not null, so the caller guarantees that it is valid.
    Ok(unsafe { pointer.read() })
}

/// Says that a function of the library does not exist here.
fn refused(symbol: &str) -> c_int {
    log::error!("{symbol}: not for an NPU that is driven directly");
    code::PARAM_INVALID
}

/// Creates a context.
///
/// The safety contract of each C function is that of the C API: pointers are null or point at valid
/// objects of their types, and nothing else uses bound memory during a run.
unsafe extern "C" fn matmul_create<const SLOT: usize>(
    ctx: *mut MatmulCtx,
    info: *mut MatmulInfo,
    io_attr: *mut IoAttr,
) -> c_int {
    guarded(|| {
        let shared = of_slot_number(SLOT)?;
        if ctx.is_null() || io_attr.is_null() {
            return Err(code::PARAM_INVALID);
        }
        // SAFETY: the C contract of `info`.
        let info = unsafe { read(info) }?;
        let (handle, attrs) = context::create(&shared, &info)?;
        // SAFETY: the C contract of `ctx`; checked for null.
        unsafe { ctx.write(handle) };
        // SAFETY: the C contract of `io_attr`; checked for null.
        unsafe { io_attr.write(attrs) };
        Ok(())
    })
}

unsafe extern "C" fn matmul_create_dynamic_shape(
    _: *mut MatmulCtx,
    _: *mut MatmulInfo,
    _: c_int,
    _: *mut MatmulShape,
    _: *mut IoAttr,
) -> c_int {
    refused("rknn_matmul_create_dynamic_shape")
}

unsafe extern "C" fn matmul_set_dynamic_shape(_: MatmulCtx, _: *mut MatmulShape) -> c_int {
    refused("rknn_matmul_set_dynamic_shape")
}

unsafe extern "C" fn matmul_set_quant_params(_: MatmulCtx, _: *mut QuantParams) -> c_int {
    refused("rknn_matmul_set_quant_params")
}

unsafe extern "C" fn b_normal_layout_to_native_layout(
    input: *mut c_void,
    output: *mut c_void,
    k: c_int,
    n: c_int,
    info: *mut MatmulInfo,
) -> c_int {
    guarded(|| {
        if input.is_null() || output.is_null() {
            return Err(code::PARAM_INVALID);
        }
        // SAFETY: the C contract of `info`.
        let info = unsafe { read(info) }?;
        let arithmetic = Arithmetic::of(info.matmul_type).ok_or(code::PARAM_INVALID)?;
        let b = arithmetic.layout.b;
        let [k, n] = [k, n].map(|size| usize::try_from(size).unwrap_or(0));
        if k == 0 || !k.is_multiple_of(b.gk) || n == 0 || !n.is_multiple_of(b.gn) {
            log::error!(
                "rknn_B_normal_layout_to_native_layout: B has no tiles in K = {k}, N = {n}"
            );
            return Err(code::PARAM_INVALID);
        }
        let bytes = b.normal_bytes(k, n);
        // SAFETY: the C contract of `input`: K * N elements, a byte each if they have 4 bits.
        let normal = unsafe { std::slice::from_raw_parts(input.cast::<u8>(), bytes) };
        let native = b.from_normal([k, n], normal, false);
        // SAFETY: the C contract of `output`: as large as the native B.
        unsafe { output.cast::<u8>().copy_from(native.as_ptr(), native.len()) };
        Ok(())
    })
}

unsafe extern "C" fn matmul_set_io_mem(
    ctx: MatmulCtx,
    memory: *mut TensorMem,
    attr: *mut TensorAttr,
) -> c_int {
    guarded(|| {
        let context = of_context(ctx)?;
        // SAFETY: the C contract of `attr`.
        let attr = unsafe { read(attr) }?;
        let [name, end, ..] = attr.name.map(|char| char.to_ne_bytes()[0]);
        let operand = (b"ABC".iter())
            .position(|known| [*known, 0] == [name, end])
            .ok_or(code::PARAM_INVALID)?;
        context.bind(operand, memory, attr.size)
    })
}

unsafe extern "C" fn matmul_set_core_mask(ctx: MatmulCtx, mask: CoreMask) -> c_int {
    guarded(|| of_context(ctx)?.set_core(mask))
}

unsafe extern "C" fn matmul_run(ctx: MatmulCtx) -> c_int {
    guarded(|| {
        let context = of_context(ctx)?;
        // SAFETY: the C contract: nothing else uses bound memory.
        unsafe { context.run() }
    })
}

unsafe extern "C" fn matmul_destroy(ctx: MatmulCtx) -> c_int {
    guarded(|| context::destroy(ctx))
}

unsafe extern "C" fn create_mem(ctx: MatmulCtx, bytes: u32) -> *mut TensorMem {
    guarded_mem(|| {
        let context = of_context(ctx)?;
        (context.shared.memories).create(&context.space.driver, bytes)
    })
}

unsafe extern "C" fn create_mem_from_fd(
    ctx: MatmulCtx,
    descriptor: i32,
    start: *mut c_void,
    bytes: u32,
    offset: i32,
) -> *mut TensorMem {
    guarded_mem(|| {
        let context = of_context(ctx)?;
        let driver = &context.space.driver;
        (context.shared.memories).view(driver, descriptor, start, bytes, offset)
    })
}

unsafe extern "C" fn destroy_mem(ctx: MatmulCtx, memory: *mut TensorMem) -> c_int {
    guarded(|| of_context(ctx)?.shared.memories.destroy(memory))
}

unsafe extern "C" fn mem_sync(ctx: MatmulCtx, memory: *mut TensorMem, mode: MemSync) -> c_int {
    guarded(|| of_context(ctx)?.shared.memories.sync(memory, mode))
}

unsafe extern "C" fn query(ctx: MatmulCtx, command: c_int, info: *mut c_void, bytes: u32) -> c_int {
    guarded(|| {
        let context = of_context(ctx)?;
        // CAST: usize has at least 32 bits.
        let is_version = command == QUERY_SDK_VERSION && bytes as usize == size_of::<SdkVersion>();
        if info.is_null() || !is_version {
            return Err(code::PARAM_INVALID);
        }
        let version = SdkVersion::new(VERSION, &context.space.driver.version_text());
        // SAFETY: the C contract of `info`, which is `bytes` long; unaligned writes are allowed.
        unsafe { info.cast::<SdkVersion>().write_unaligned(version) };
        Ok(())
    })
}

/// Returns the table of functions of the machine in a slot.
fn table<const SLOT: usize>() -> Api {
    Api {
        matmul_create: matmul_create::<SLOT>,
        matmul_create_dynamic_shape,
        matmul_set_dynamic_shape,
        matmul_set_io_mem,
        matmul_set_core_mask,
        matmul_set_quant_params,
        matmul_run,
        matmul_destroy,
        create_mem,
        create_mem_from_fd,
        destroy_mem,
        mem_sync,
        query,
        b_normal_layout_to_native_layout,
    }
}

/// Returns the [`table`] of a slot that is known at run time.
pub(super) fn of_slot(slot: usize) -> Api {
    sim_common::of_slot!(table, Api, slot)
}
