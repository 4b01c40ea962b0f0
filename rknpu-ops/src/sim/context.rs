//! Contexts: creation, binding, run.
//!
//! If the real library's behaviour is unknown, the stricter rule applies, so that host code
//! which passes here passes there: an attribute must have the size of the context's current shape,
//! memory must be in the context's I/O domain, and a new dynamic shape needs A and C bound again.
#![expect(
    unsafe_code,
    reason = "bound memory is shared with the caller by the rules of the C API"
)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::profile::{self, Accepted, Dims};
use super::run::{Operand, RunRequest};
use super::tensor_mem::{DOMAINS, MemoryRange};
use super::traffic::UnderWay;
use super::{ChipState, WrongRows, compute, lock, vendor_error};
use crate::ffi::{
    CoreMask, IoAttr, Layout, MatmulCtx, MatmulInfo, MatmulShape, TensorMem, attr, code,
};
use crate::layout::Elem;

/// One of the three tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorName {
    A,
    B,
    C,
}

impl TensorName {
    /// Returns the tensor's name in the vendor's header.
    const fn name(self) -> &'static str {
        match self {
            Self::A => "A",
            Self::B => "B",
            Self::C => "C",
        }
    }

    /// Returns the tensor that an attribute or quantization parameter names.
    pub(super) fn from_name(name: &[c_char]) -> Option<Self> {
        let [first, second] = *name.first_chunk()?;
        match [first, second].map(|c| c.to_ne_bytes()[0]) {
            [b'A', 0] => Some(Self::A),
            [b'B', 0] => Some(Self::B),
            [b'C', 0] => Some(Self::C),
            _ => None,
        }
    }
}

/// The part of a context that the setters change.
#[derive(Debug)]
struct ContextSettings {
    shape: usize,
    a: Option<Operand>,
    b: Option<Operand>,
    c: Option<MemoryRange>,
    /// Scales of A, B and C.
    scales: [f32; 3],
}

/// A matmul context.
#[derive(Debug)]
pub(super) struct MatmulContext {
    pub(super) state: Arc<ChipState>,
    accepted: Accepted,
    /// The requested domain; with a domain outside 0..=15 only creation works.
    domain: c_int,
    shapes: Vec<Dims>,
    running: AtomicBool,
    settings: Mutex<ContextSettings>,
}

static CONTEXTS: RwLock<BTreeMap<MatmulCtx, Arc<MatmulContext>>> = RwLock::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(0x5_1b00_0001);

/// Returns the attributes of the three tensors of a shape.
fn io_attr(accepted: &Accepted, Dims { m, k, n }: Dims) -> IoAttr {
    let ac = if accepted.native_ac {
        Layout::NATIVE
    } else {
        Layout::NORM
    };
    attr::io(&accepted.layout, [m, k, n], ac, accepted.b_layout)
}

/// Returns the context with a handle; handles of all machines are distinct and never used again.
pub(super) fn find(handle: MatmulCtx) -> Option<Arc<MatmulContext>> {
    let contexts = CONTEXTS.read().unwrap_or_else(PoisonError::into_inner);
    contexts.get(&handle).cloned()
}

/// Implements `rknn_matmul_create*`. Returns the handle, and the attributes for each shape.
pub(super) fn create(
    state: &Arc<ChipState>,
    info: &MatmulInfo,
    shapes: &[MatmulShape],
) -> Result<(MatmulCtx, Vec<IoAttr>), c_int> {
    let accepted = profile::check_info(&state.options, info)?;
    if shapes
        .iter()
        .any(|s| (s.k, s.n) != (shapes[0].k, shapes[0].n))
    {
        vendor_error!("dynamic_shapes K and N must be same!");
        return Err(code::PARAM_INVALID);
    }
    let shapes = shapes
        .iter()
        .map(|shape| profile::check_shape(&state.options, &accepted.layout, *shape))
        .collect::<Result<Vec<_>, _>>()?;
    let ends =
        |shape: &&Dims| profile::ends_the_process(state.options.soc, &accepted.layout, **shape);
    if let Some(Dims { m, k, n }) = shapes.iter().find(ends) {
        vendor_error!("Failed to config layer: 'matmul', Fatal Error");
        let reason = format!("the library ends the process on M = {m}, K = {k}, N = {n}");
        return Err(state.traffic.lock_up(&reason));
    }
    let attrs = shapes
        .iter()
        .map(|shape| io_attr(&accepted, *shape))
        .collect();
    let context = MatmulContext {
        state: Arc::clone(state),
        accepted,
        domain: info.iommu_domain_id,
        shapes,
        running: AtomicBool::new(false),
        settings: Mutex::new(ContextSettings {
            shape: 0,
            a: None,
            b: None,
            c: None,
            scales: [1.0; 3],
        }),
    };
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    state.contexts.fetch_add(1, Ordering::Relaxed);
    let mut contexts = CONTEXTS.write().unwrap_or_else(PoisonError::into_inner);
    contexts.insert(handle, Arc::new(context));
    Ok((handle, attrs))
}

/// Implements `rknn_matmul_destroy`. A run in another thread finishes first.
pub(super) fn destroy(handle: MatmulCtx) -> Result<(), c_int> {
    let mut contexts = CONTEXTS.write().unwrap_or_else(PoisonError::into_inner);
    let context = contexts.remove(&handle).ok_or(code::CTX_INVALID)?;
    context.state.contexts.fetch_sub(1, Ordering::Relaxed);
    Ok(())
}

impl MatmulContext {
    /// Returns the I/O domain, if it exists.
    pub(super) fn domain(&self) -> Option<usize> {
        usize::try_from(self.domain)
            .ok()
            .filter(|domain| *domain < DOMAINS)
    }

    /// Implements `rknn_matmul_set_io_mem`.
    ///
    /// # Safety
    /// - The caller does not write the memory during the call.
    pub(super) unsafe fn set_io_mem(
        &self,
        mem: *mut TensorMem,
        tensor: TensorName,
        attr_bytes: u32,
    ) -> Result<(), c_int> {
        let Some(region) = self.state.mems.region(mem) else {
            vendor_error!("rknn_matmul_set_io_mem, unknown tensor memory {mem:p}");
            return Err(code::PARAM_INVALID);
        };
        if Some(region.domain()) != self.domain() {
            vendor_error!(
                "rknn_matmul_set_io_mem, memory of iommu domain {} in a context of {}",
                region.domain(),
                self.domain
            );
            return Err(code::PARAM_INVALID);
        }
        let mut settings = lock(&self.settings);
        let shape = self.shapes[settings.shape];
        let attrs = io_attr(&self.accepted, shape);
        let want = match tensor {
            TensorName::A => attrs.a.size,
            TensorName::B => attrs.b.size,
            TensorName::C => attrs.c.size,
        };
        // CAST: usize has at least 32 bits.
        let len = want as usize;
        if attr_bytes != want || region.first(len).is_none() {
            vendor_error!(
                "rknn_matmul_set_io_mem, {} needs {want} bytes, attr has {attr_bytes}, memory has {}",
                tensor.name(),
                region.len()
            );
            return Err(code::PARAM_INVALID);
        }
        let layout = &self.accepted.layout;
        let copy = |arrange: &dyn Fn(&[u8]) -> Vec<u8>| {
            // SAFETY: the caller does not write the memory during the call.
            let norm = unsafe { region.cpu_copy(len) }.ok_or(code::PARAM_INVALID)?;
            Ok::<_, c_int>(Operand::Copied(Arc::new(arrange(&norm))))
        };
        match tensor {
            TensorName::A if self.accepted.native_ac => settings.a = Some(Operand::Bound(region)),
            TensorName::A => {
                settings.a = Some(copy(&|norm| compute::native_a(layout, shape, norm))?);
            }
            TensorName::B if self.accepted.b_layout == Layout::NATIVE => {
                settings.b = Some(Operand::Bound(region));
            }
            // SOURCE: reported for NORM-layout int4 B with librknnrt 2.3.2.
            TensorName::B if layout.b.elem == Elem::I4 => {
                vendor_error!("Unsupport type bits 0");
                return Err(code::PARAM_INVALID);
            }
            TensorName::B => {
                let transposed = self.accepted.b_layout == Layout::TP_NORM;
                let size = [shape.k, shape.n];
                settings.b = Some(copy(&|norm| layout.b.from_normal(size, norm, transposed))?);
            }
            TensorName::C => settings.c = Some(region),
        }
        Ok(())
    }

    /// Implements `rknn_matmul_set_core_mask`.
    pub(super) fn set_core_mask(&self, mask: CoreMask) -> Result<(), c_int> {
        let cores = self.state.options.soc.cores();
        if cores == 1 {
            vendor_error!("rknn_matmul_set_core_mask, only one core on this platform");
            return Err(code::FAIL);
        }
        match mask {
            CoreMask::AUTO | CoreMask::CORE_0 | CoreMask::CORE_1 => Ok(()),
            CoreMask::CORE_2 if cores == 3 => Ok(()),
            CoreMask::CORE_0_1 | CoreMask::CORE_0_1_2 | CoreMask::ALL => {
                if !self.state.mask_warned.swap(true, Ordering::Relaxed) {
                    log::warn!(
                        target: "librknnrt",
                        "For rk3588/rk3576, core mask for matmul api will fall back to RKNN_NPU_CORE_AUTO mode"
                    );
                }
                Ok(())
            }
            other => {
                vendor_error!("rknn_matmul_set_core_mask, invalid core mask: {}", other.0);
                Err(code::PARAM_INVALID)
            }
        }
    }

    /// Sets the scale of one tensor, which is used only for types whose C is narrower than the
    /// accumulator, and for B of the mixed types.
    pub(super) fn set_scale(&self, tensor: TensorName, scale: f32) {
        lock(&self.settings).scales[tensor as usize] = scale;
    }

    /// Returns `true` if a fault makes results of this shape wrong.
    fn is_spoilt(&self, shape: Dims) -> bool {
        let Dims { m, k, .. } = shape;
        [None, Some(k)]
            .map(|k| WrongRows { m, k })
            .iter()
            .any(|wrong| self.state.injector.expects(*wrong))
    }

    /// Implements `rknn_matmul_set_dynamic_shape`.
    pub(super) fn set_dynamic_shape(&self, shape: MatmulShape) -> Result<(), c_int> {
        let equal = |have: &Dims| {
            [(shape.m, have.m), (shape.k, have.k), (shape.n, have.n)]
                .iter()
                .all(|(asked, have)| usize::try_from(*asked) == Ok(*have))
        };
        let Some(index) = self.shapes.iter().position(equal) else {
            vendor_error!(
                "rknn_matmul_set_dynamic_shape, shape {} x {} x {} was not created",
                shape.m,
                shape.k,
                shape.n
            );
            return Err(code::PARAM_INVALID);
        };
        let mut settings = lock(&self.settings);
        if settings.shape != index {
            settings.shape = index;
            settings.a = None;
            settings.c = None;
        }
        Ok(())
    }

    /// Implements `rknn_matmul_run`.
    ///
    /// # Safety
    /// - Nothing else uses the bound memory during the call, and no two concurrent runs write the
    ///   same C, or memory that another one reads.
    pub(super) unsafe fn run(&self, under_way: &UnderWay) -> Result<(), c_int> {
        if self.running.swap(true, Ordering::Acquire) {
            vendor_error!("rknn_matmul_run, the context is running in another thread");
            return Err(code::FAIL);
        }
        let _running = Running(&self.running);
        let Some(domain) = self.domain() else {
            vendor_error!("failed to submit!, op id: 0, op name: MatMul, flags: 0x5, errno 22");
            return Err(code::FAIL);
        };
        let _attached = self.state.attachment.attach(domain)?;
        // Whoever else asks for it has been refused before: nothing but runs is called now, and
        // this context has one.
        let settings = lock(&self.settings);
        let shape = self.shapes[settings.shape];
        let (Some(a), Some(b), Some(c)) = (&settings.a, &settings.b, &settings.c) else {
            vendor_error!(
                "rknn_matmul_run, A, B and C must be set by rknn_matmul_set_io_mem first"
            );
            return Err(code::PARAM_INVALID);
        };
        let mixes_views = self.state.options.mixed_views;
        let mut has_company = mixes_views && under_way.has_company();
        std::thread::sleep(self.state.options.run_time);
        has_company |= mixes_views && under_way.has_company();
        if !self.state.options.compute {
            return Ok(());
        }
        let mixed;
        let b = match b {
            Operand::Bound(view) if has_company => {
                mixed = Operand::Bound(view.without_offset());
                &mixed
            }
            b => b,
        };
        let request = RunRequest {
            shape,
            accepted: &self.accepted,
            scales: settings.scales,
            a,
            b,
            c,
            spoilt: self.is_spoilt(shape),
        };
        // SAFETY: guaranteed by the caller.
        unsafe { request.execute() }
    }
}

/// Marks the end of a run, even when it panics.
struct Running<'a>(&'a AtomicBool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
