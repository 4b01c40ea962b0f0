//! The C functions: find the context or machine, count the call, inject faults, check pointers,
//! catch panics.
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

use super::context::{self, MatmulContext, TensorName};
use super::domain::Attached;
use super::traffic::{Alone, UnderWay};
use super::{ChipState, MACHINES, profile, vendor_error};
use crate::ffi::{
    Api, CoreMask, IoAttr, MAX_DYNAMIC_SHAPES, MatmulCtx, MatmulInfo, MatmulShape, MemSync,
    QUERY_SDK_VERSION, QuantParams, SdkVersion, TensorAttr, TensorMem, code,
};

/// Runs the body of a C function: an error becomes its code, a panic `FAIL`.
fn guarded(body: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => code::SUCC,
        Ok(Err(code)) => code,
        Err(_) => code::FAIL,
    }
}

/// Runs the body of a function that returns a pointer, as [`guarded`] does.
fn guarded_mem(body: impl FnOnce() -> Result<*mut TensorMem, c_int>) -> *mut TensorMem {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(mem)) => mem,
        _ => std::ptr::null_mut(),
    }
}

/// Exclusive access to a context or machine during a call.
struct Entered<T> {
    inner: Arc<T>,
    _alone: Alone,
}

impl<T> std::ops::Deref for Entered<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.inner
    }
}

/// Returns the context for a call of `symbol`, and counts the call, which may fail on request.
fn running(handle: MatmulCtx, symbol: &str) -> Result<Arc<MatmulContext>, c_int> {
    let Some(context) = context::find(handle) else {
        vendor_error!("{symbol}: the context is invalid");
        return Err(code::CTX_INVALID);
    };
    context.state.injector.call(symbol)?;
    Ok(context)
}

/// As [`running`], for calls that must be alone.
fn entered(handle: MatmulCtx, symbol: &str) -> Result<Entered<MatmulContext>, c_int> {
    let inner = running(handle, symbol)?;
    let alone = Alone::enter(&inner.state, symbol)?;
    Ok(Entered {
        inner,
        _alone: alone,
    })
}

/// Returns the machine for a call of `symbol` through a slot's table, and counts the call.
fn entered_slot(slot: usize, symbol: &str) -> Result<Entered<ChipState>, c_int> {
    let Some(inner) = MACHINES.get(slot) else {
        vendor_error!("{symbol}: no device");
        return Err(code::DEVICE_UNAVAILABLE);
    };
    inner.injector.call(symbol)?;
    let alone = Alone::enter(&inner, symbol)?;
    Ok(Entered {
        inner,
        _alone: alone,
    })
}

fn null_pointer() -> c_int {
    vendor_error!("pointer is nullptr, please check parameters.");
    code::PARAM_INVALID
}

/// Reads the target of a C pointer.
///
/// # Safety
/// - `pointer` is null or points at a valid `T`.
unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, c_int> {
    if pointer.is_null() {
        return Err(null_pointer());
    }
    // SAFETY: not null, so the caller guarantees that it is valid.
    Ok(unsafe { pointer.read() })
}

/// Attaches the domain of a memory, which may differ from that of the context.
fn attached_to(context: &MatmulContext, mem: *mut TensorMem) -> Result<Attached<'_>, c_int> {
    let state = &context.state;
    let region = state.mems.region(mem).ok_or(code::PARAM_INVALID)?;
    state.attachment.attach(region.domain())
}

/// Creates a context.
///
/// The safety contract of each C function is that of the C API: pointers are null or point at valid
/// objects of their types (arrays have the stated number of elements), and nothing else uses bound
/// memory during a run.
unsafe extern "C" fn matmul_create<const SLOT: usize>(
    ctx: *mut MatmulCtx,
    info: *mut MatmulInfo,
    io_attr: *mut IoAttr,
) -> c_int {
    guarded(|| {
        let state = entered_slot(SLOT, "rknn_matmul_create")?;
        if ctx.is_null() || io_attr.is_null() {
            return Err(null_pointer());
        }
        // SAFETY: the C contract of `info`.
        let info = unsafe { read(info) }?;
        let shape = MatmulShape {
            m: info.m,
            k: info.k,
            n: info.n,
        };
        let (handle, attrs) = context::create(&state, &info, &[shape])?;
        // SAFETY: the C contract of `ctx`; checked for null.
        unsafe { ctx.write(handle) };
        // SAFETY: the C contract of `io_attr`; checked for null.
        unsafe { io_attr.write(attrs[0]) };
        Ok(())
    })
}

unsafe extern "C" fn matmul_create_dynamic_shape<const SLOT: usize>(
    ctx: *mut MatmulCtx,
    info: *mut MatmulInfo,
    shape_num: c_int,
    shapes: *mut MatmulShape,
    io_attrs: *mut IoAttr,
) -> c_int {
    guarded(|| {
        let state = entered_slot(SLOT, "rknn_matmul_create_dynamic_shape")?;
        if ctx.is_null() || shapes.is_null() || io_attrs.is_null() {
            return Err(null_pointer());
        }
        // SAFETY: the C contract of `info`.
        let mut info = unsafe { read(info) }?;
        let count = usize::try_from(shape_num)
            .ok()
            .filter(|count| (1..=MAX_DYNAMIC_SHAPES).contains(count));
        let Some(count) = count else {
            vendor_error!("shape_num is invalid!");
            return Err(code::PARAM_INVALID);
        };
        // SAFETY: the C contract of `shapes`: `shape_num` of them.
        let shapes = unsafe { std::slice::from_raw_parts(shapes, count) };
        info.k = shapes[0].k;
        let (handle, attrs) = context::create(&state, &info, shapes)?;
        // SAFETY: the C contract of `ctx`; checked for null.
        unsafe { ctx.write(handle) };
        // SAFETY: the C contract of `io_attrs`: `shape_num` of them, as many as `attrs` has.
        unsafe { io_attrs.copy_from_nonoverlapping(attrs.as_ptr(), attrs.len()) };
        Ok(())
    })
}

unsafe extern "C" fn b_normal_layout_to_native_layout<const SLOT: usize>(
    input: *mut c_void,
    output: *mut c_void,
    k: c_int,
    n: c_int,
    info: *mut MatmulInfo,
) -> c_int {
    guarded(|| {
        let state = entered_slot(SLOT, "rknn_B_normal_layout_to_native_layout")?;
        if input.is_null() || output.is_null() {
            return Err(null_pointer());
        }
        // SAFETY: the C contract of `info`.
        let info = unsafe { read(info) }?;
        let layout = profile::check_info(&state.options, &info)?.layout;
        let shape = profile::check_shape(&state.options, &layout, MatmulShape { m: 1, k, n })?;
        let in_len = layout.b.normal_bytes(shape.k, shape.n);
        // SAFETY: the C contract of `input`: K * N elements, a byte each if they have 4 bits.
        let norm = unsafe { std::slice::from_raw_parts(input.cast::<u8>(), in_len) };
        let native = layout.b.from_normal([shape.k, shape.n], norm, false);
        // SAFETY: the C contract of `output`: as large as the native B.
        unsafe { output.cast::<u8>().copy_from(native.as_ptr(), native.len()) };
        Ok(())
    })
}

unsafe extern "C" fn matmul_set_dynamic_shape(ctx: MatmulCtx, shape: *mut MatmulShape) -> c_int {
    guarded(|| {
        let context = entered(ctx, "rknn_matmul_set_dynamic_shape")?;
        // SAFETY: the C contract of `shape`.
        context.set_dynamic_shape(unsafe { read(shape) }?)
    })
}

unsafe extern "C" fn matmul_set_io_mem(
    ctx: MatmulCtx,
    mem: *mut TensorMem,
    attr: *mut TensorAttr,
) -> c_int {
    guarded(|| {
        let context = entered(ctx, "rknn_matmul_set_io_mem")?;
        if mem.is_null() {
            return Err(null_pointer());
        }
        // SAFETY: the C contract of `attr`.
        let attr = unsafe { read(attr) }?;
        let Some(tensor) = TensorName::from_name(&attr.name) else {
            vendor_error!("rknn_matmul_set_io_mem, the attr names none of A, B, C");
            return Err(code::PARAM_INVALID);
        };
        // SAFETY: the C contract: the caller does not use the memory during the call.
        unsafe { context.set_io_mem(mem, tensor, attr.size) }
    })
}

unsafe extern "C" fn matmul_set_core_mask(ctx: MatmulCtx, mask: CoreMask) -> c_int {
    guarded(|| entered(ctx, "rknn_matmul_set_core_mask")?.set_core_mask(mask))
}

unsafe extern "C" fn matmul_set_quant_params(ctx: MatmulCtx, params: *mut QuantParams) -> c_int {
    guarded(|| {
        let context = entered(ctx, "rknn_matmul_set_quant_params")?;
        // SAFETY: the C contract of `params`.
        let params = unsafe { read(params) }?;
        let Some(tensor) = TensorName::from_name(&params.name) else {
            vendor_error!("rknn_matmul_set_quant_params, the name is none of A, B, C");
            return Err(code::PARAM_INVALID);
        };
        if params.scale_len <= 0 {
            vendor_error!("scale_len must > 0");
            return Err(code::PARAM_INVALID);
        }
        if params.scale_len != 1 || params.zp_len > 1 {
            vendor_error!(
                "only support per layer quant type in current, scale_len and zp_len must 1"
            );
            return Err(code::PARAM_INVALID);
        }
        // SAFETY: the C contract: `scale_len` scales.
        let scale = unsafe { read(params.scale) }?;
        if params.zp_len == 1 {
            // SAFETY: the C contract: `zp_len` zero points.
            if unsafe { read(params.zp) }? != 0 {
                vendor_error!("zp unsupport, only 0");
                return Err(code::PARAM_INVALID);
            }
        }
        context.set_scale(tensor, scale);
        Ok(())
    })
}

unsafe extern "C" fn matmul_run(ctx: MatmulCtx) -> c_int {
    guarded(|| {
        let context = running(ctx, "rknn_matmul_run")?;
        let under_way = UnderWay::begin(&context.state.traffic)?;
        // SAFETY: the C contract: nothing else uses bound memory, and concurrent runs write
        // separate memory.
        unsafe { context.run(&under_way) }
    })
}

unsafe extern "C" fn matmul_destroy(ctx: MatmulCtx) -> c_int {
    guarded(|| {
        let _entered = entered(ctx, "rknn_matmul_destroy")?;
        context::destroy(ctx)
    })
}

unsafe extern "C" fn create_mem(ctx: MatmulCtx, size: u32) -> *mut TensorMem {
    guarded_mem(|| {
        let context = entered(ctx, "rknn_create_mem")?;
        let domain = context.domain().ok_or(code::FAIL)?;
        let _attached = context.state.attachment.attach(domain)?;
        Ok(context.state.mems.create(domain, size))
    })
}

unsafe extern "C" fn create_mem_from_fd(
    ctx: MatmulCtx,
    fd: i32,
    virt: *mut c_void,
    size: u32,
    offset: i32,
) -> *mut TensorMem {
    guarded_mem(|| {
        let context = entered(ctx, "rknn_create_mem_from_fd")?;
        let domain = context.domain().ok_or(code::FAIL)?;
        let _attached = context.state.attachment.attach(domain)?;
        Ok(context.state.mems.view(domain, fd, virt, size, offset))
    })
}

unsafe extern "C" fn destroy_mem(ctx: MatmulCtx, mem: *mut TensorMem) -> c_int {
    guarded(|| {
        let context = entered(ctx, "rknn_destroy_mem")?;
        if mem.is_null() {
            return Err(null_pointer());
        }
        let _attached = attached_to(&context, mem)?;
        let known = context.state.mems.destroy(mem);
        known.then_some(()).ok_or(code::PARAM_INVALID)
    })
}

unsafe extern "C" fn mem_sync(ctx: MatmulCtx, mem: *mut TensorMem, mode: MemSync) -> c_int {
    guarded(|| {
        let context = entered(ctx, "rknn_mem_sync")?;
        if mem.is_null() {
            return Err(null_pointer());
        }
        if !(MemSync::TO_DEVICE.0..=MemSync::BIDIRECTIONAL.0).contains(&mode.0) {
            vendor_error!("rknn_mem_sync, invalid mode: {}", mode.0);
            return Err(code::PARAM_INVALID);
        }
        let _attached = attached_to(&context, mem)?;
        let known = context.state.mems.sync(mem, mode);
        known.then_some(()).ok_or(code::PARAM_INVALID)
    })
}

unsafe extern "C" fn query(ctx: MatmulCtx, command: c_int, info: *mut c_void, size: u32) -> c_int {
    guarded(|| {
        let context = entered(ctx, "rknn_query")?;
        if info.is_null() {
            return Err(null_pointer());
        }
        if command != QUERY_SDK_VERSION || size as usize != size_of::<SdkVersion>() {
            vendor_error!("rknn_query, unsupported command {command} with {size} bytes");
            return Err(code::PARAM_INVALID);
        }
        let options = &context.state.options;
        let version = SdkVersion::new(&options.api_version, &options.driver_version);
        // SAFETY: the C contract of `info`, which is `size` bytes long; unaligned writes are
        // allowed.
        unsafe { info.cast::<SdkVersion>().write_unaligned(version) };
        Ok(())
    })
}

/// Returns the table of functions of the machine in a slot.
fn table<const SLOT: usize>() -> Api {
    Api {
        matmul_create: matmul_create::<SLOT>,
        matmul_create_dynamic_shape: matmul_create_dynamic_shape::<SLOT>,
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
        b_normal_layout_to_native_layout: b_normal_layout_to_native_layout::<SLOT>,
    }
}

/// Returns the [`table`] of a slot that is known at run time.
pub(super) fn of_slot(slot: usize) -> Api {
    sim_common::of_slot!(table, Api, slot)
}
