//! Contexts: a shape, its plan of tasks, and its bound memory.
#![expect(
    unsafe_code,
    reason = "bound memory is shared with the caller by the rules of the C API"
)]

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use sim_common::lock;

use super::memory::Region;
use super::{CORES, Shared, Space};
use crate::ffi::{
    CoreMask, IoAttr, Layout, MatmulCtx, MatmulInfo, QuantType, TensorMem, attr, code,
};
use crate::stream::{Arithmetic, Plan};

/// A matmul context.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) shared: Arc<Shared>,
    pub(super) space: Arc<Space>,
    plan: Plan,
    core: AtomicUsize,
    /// A, B and C.
    bound: Mutex<[Option<Region>; 3]>,
}

static CONTEXTS: RwLock<BTreeMap<MatmulCtx, Arc<Context>>> = RwLock::new(BTreeMap::new());
/// Handles are never used again, and differ from those of the stand-in.
static NEXT: AtomicU64 = AtomicU64::new(0xd1_0000_0001);

/// Returns the context with a handle.
pub(super) fn find(handle: MatmulCtx) -> Option<Arc<Context>> {
    let contexts = CONTEXTS.read().unwrap_or_else(PoisonError::into_inner);
    contexts.get(&handle).cloned()
}

/// Implements `rknn_matmul_create`.
pub(super) fn create(
    shared: &Arc<Shared>,
    info: &MatmulInfo,
) -> Result<(MatmulCtx, IoAttr), c_int> {
    let refuse = |what: String| {
        log::error!("rknn_matmul_create: {what}");
        Err(code::PARAM_INVALID)
    };
    if info.b_layout != Layout::NATIVE {
        return refuse("only native B is driven directly".into());
    }
    let is_row_major = match info.ac_layout {
        Layout::NATIVE => false,
        Layout::NORM => true,
        other => return refuse(format!("there is no layout {} of A and C", other.0)),
    };
    let symmetric = QuantType::PER_LAYER_SYM;
    if (info.b_quant_type, info.ac_quant_type) != (symmetric, symmetric) {
        return refuse("there are no scales".into());
    }
    let space = match shared.space(info.iommu_domain_id) {
        Ok(space) => space,
        Err(error) => {
            return refuse(format!(
                "there is no address space {}: {error}",
                info.iommu_domain_id
            ));
        }
    };
    let Some(arithmetic) = Arithmetic::of(info.matmul_type) else {
        return refuse(format!(
            "no command stream is known for matmul type {}",
            info.matmul_type.0
        ));
    };
    let [m, k, n] = [info.m, info.k, info.n].map(|size| usize::try_from(size).unwrap_or(0));
    let plan = match Plan::new(arithmetic, [m, k, n]) {
        Ok(plan) if is_row_major => plan.with_row_major(),
        Ok(plan) => plan,
        Err(outside) => return refuse(outside.to_string()),
    };
    let bytes = plan.native_bytes().into_iter().chain(plan.cube_bytes());
    if bytes.into_iter().any(|bytes| u32::try_from(bytes).is_err()) {
        return refuse(format!("M = {m}, K = {k}, N = {n} is more than 4 GiB"));
    }
    let context = Context {
        shared: Arc::clone(shared),
        space,
        plan,
        core: AtomicUsize::new(0),
        bound: Mutex::default(),
    };
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut contexts = CONTEXTS.write().unwrap_or_else(PoisonError::into_inner);
    contexts.insert(handle, Arc::new(context));
    let attrs = attr::io(&arithmetic.layout, [m, k, n], info.ac_layout, info.b_layout);
    Ok((handle, attrs))
}

/// Implements `rknn_matmul_destroy`.
pub(super) fn destroy(handle: MatmulCtx) -> Result<(), c_int> {
    let mut contexts = CONTEXTS.write().unwrap_or_else(PoisonError::into_inner);
    let removed = contexts.remove(&handle);
    // Unlocked first: freeing the context's memory takes time, and other threads look for contexts
    // meanwhile.
    drop(contexts);
    removed.map(drop).ok_or(code::CTX_INVALID)
}

/// Returns the code of a failure of the driver, and logs the reason.
fn failed(call: &str, error: &io::Error) -> c_int {
    log::error!("{call}: {error}");
    match error.kind() {
        ErrorKind::TimedOut => code::TIMEOUT,
        ErrorKind::OutOfMemory => code::MALLOC_FAIL,
        _ => code::FAIL,
    }
}

impl Context {
    /// Implements `rknn_matmul_set_core_mask`.
    pub(super) fn set_core(&self, mask: CoreMask) -> Result<(), c_int> {
        let core = match mask {
            CoreMask::AUTO | CoreMask::CORE_0 => 0,
            CoreMask::CORE_1 => 1,
            CoreMask::CORE_2 => 2,
            other => {
                log::error!(
                    "rknn_matmul_set_core_mask: mask {} is not one of {CORES} cores",
                    other.0
                );
                return Err(code::PARAM_INVALID);
            }
        };
        self.core.store(core, Ordering::Relaxed);
        Ok(())
    }

    /// Implements `rknn_matmul_set_io_mem` for operand 0, 1 or 2: A, B or C. Reserves the memory
    /// that runs on the context's core need.
    pub(super) fn bind(
        &self,
        operand: usize,
        memory: *mut TensorMem,
        attr_bytes: u32,
    ) -> Result<(), c_int> {
        let region = (self.shared.memories.region(memory)).ok_or(code::PARAM_INVALID)?;
        let want = self.plan.native_bytes()[operand];
        // CAST: usize has at least 32 bits.
        let fits = attr_bytes as usize == want && region.len() >= want;
        if !fits || !region.address().is_multiple_of(16) {
            log::error!(
                "rknn_matmul_set_io_mem: {want} bytes are needed, at a multiple of 16; attr has {attr_bytes}, memory {} \
                 at {:#x}",
                region.len(),
                region.address()
            );
            return Err(code::PARAM_INVALID);
        }
        if !region.object().is_of(&self.space.driver) {
            log::error!("rknn_matmul_set_io_mem: the memory is in another address space");
            return Err(code::PARAM_INVALID);
        }
        let core = &self.space.cores[self.core.load(Ordering::Relaxed)];
        lock(core)
            .reserve(&self.space.driver, &self.plan)
            .map_err(|error| failed("rknn_matmul_set_io_mem", &error))?;
        lock(&self.bound)[operand] = Some(region);
        Ok(())
    }

    /// Implements `rknn_matmul_run`.
    ///
    /// # Safety
    /// - Nothing uses bound memory during the call, except to read A and B.
    pub(super) unsafe fn run(&self) -> Result<(), c_int> {
        let bound = lock(&self.bound);
        let [Some(a), Some(b), Some(c)] = &*bound else {
            log::error!("rknn_matmul_run: A, B or C is not bound");
            return Err(code::PARAM_INVALID);
        };
        let mut core = lock(&self.space.cores[self.core.load(Ordering::Relaxed)]);
        // SAFETY: guaranteed by the caller.
        let ran = unsafe { core.run(&*self.space.driver, &self.plan, [a, b, c]) };
        ran.map_err(|error| failed("rknn_matmul_run", &error))
    }
}
