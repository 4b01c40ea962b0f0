//! The Hexagon NPU: every tensor in its own buffers, a graph as one list of commands.
//!
//! | file | holds |
//! |---|---|
//! | [`caps`] | the capabilities of each architecture |
//! | [`layout`], [`pack`] | packed weights: where they lie, and how they are made |
//! | [`plan`] | which nodes the NPU computes, as which commands, and at which cost |
//! | [`buffer`], [`stream`] | ggml's buffers and graphs |
//! | [`device`] | the NPU: a session, its command ring and its address space |
//! | [`discovery`] | whether there is one |
//! | [`driver`] | safe calls to libcdsprpc or its stand-in |
//! | [`selftest`] | small graphs that an NPU must compute right before it is offered, and how fast it is |

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::Duration;

use hexagon_ops::wire::Power;

use self::buffer::Beside;
use self::caps::{HexCaps, HexRates};
use self::device::{DeviceBuffer as Memory, Domain, Floats, HexNpu, Serving, SessionOptions};
use self::driver::FastRpc;
use self::layout::{Conversion, WeightLayout};
use self::selftest::rates;
use self::selftest::rates::kept;
use self::stream::trace::Trace;
use crate::backend::{Buffer, Buffers, Device, Limit, Share, Stream};
use crate::config::{ActivationBits, Repack};
use crate::error::Result;
use crate::graph::{Op, Operation, Place, Refusal, Tensor};
use crate::host_memory::system_memory;
use crate::packfile::Packs;
use crate::tensor::DType;

pub use self::buffer::{ALIGN_BYTES, HexBuffer};
pub use self::stream::HexStream;

pub mod buffer;
pub mod caps;
pub mod device;
pub mod discovery;
pub mod driver;
pub mod layout;
pub mod pack;
pub mod plan;
pub mod selftest;
pub mod stream;

/// Largest buffer.
// SOURCE: ggml-hexagon of ggml 0.25.3 keeps buffers at 1 GiB, so that several fit into an address
// space of 3 GB.
pub const MAX_BUFFER_BYTES: usize = 1 << 30;

/// Longest row that is expected: weights of models of up to a few billion parameters have no longer
/// ones.
const COMMON_ROW: usize = 8192;

/// Most names that are remembered so that a log line appears once for each.
const MAX_LOGGED: usize = 1000;

/// Returns the largest tensor for a session of so many addresses. Vendor functions have lengths of
/// 32 bits with a sign, a buffer has a guard page, and a third of the addresses is for the other
/// operands of a command: activations, results.
#[must_use]
pub fn max_tensor_bytes(address_bytes: u64) -> usize {
    let part = address_bytes / 3 * 2;
    usize::try_from(part.min(u64::from(i32::MAX.unsigned_abs()) - 2 * 4096)).unwrap_or(usize::MAX)
}

/// The refusal of an operation with an operand that [`too_large`] returns.
pub const TOO_LARGE: Refusal = "a tensor is larger than a buffer can be";

/// Returns the size of a tensor in a buffer for weights, in bytes: that of ggml's layout or of the
/// packed form, whichever is larger.
fn packed_bytes(tensor: &Tensor) -> usize {
    let ggml_bytes = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
    let packed = WeightLayout::new(tensor).filter(|_| tensor.shape.is_contiguous(tensor.dtype));
    packed.map_or(ggml_bytes, |layout| layout.bytes().max(ggml_bytes))
}

/// Returns an operand that needs more than `max_bytes` in a buffer for weights; `None` if each
/// fits.
#[must_use]
pub fn too_large<'o, 't>(operation: &'o Operation<'t>, max_bytes: usize) -> Option<&'o Tensor<'t>> {
    let operands = operation.src.iter().flatten().chain([&operation.dst]);
    let mut operands = operands.into_iter();
    operands.find(|tensor| packed_bytes(tensor) > max_bytes)
}

/// A Hexagon NPU as ggml sees it.
#[derive(Debug)]
pub struct HexDevice {
    name: Arc<str>,
    dsp: Domain,
    npu: HexNpu,
    /// For choices between kernels.
    rates: HexRates,
    repack: Repack,
    activations: ActivationBits,
    /// Number of changes that invalidate cached submissions: weights packed again, caches that
    /// the CPU begins to use.
    changes: Arc<AtomicU64>,
    /// Streams hold this lock, shared, from planning to results. A stream that puts packed tensors
    /// back into ggml's layout holds it exclusively, because the plans of others may use their
    /// packed form.
    layouts: Arc<RwLock<()>>,
    packs: OnceLock<Arc<Packs>>,
    trace: Option<Trace>,
    shared: SharedBuffers,
    /// The packed copies of weights in each buffer that the CPU uses, and their total size in
    /// bytes.
    forms: Mutex<Vec<Weak<Beside>>>,
    beside_bytes: Arc<AtomicUsize>,
    /// Returns the free and total bytes of the machine's memory.
    machine: fn() -> Share,
    /// Largest tensor that is accepted, and the names of larger ones that were logged.
    max_tensor_bytes: usize,
    logged: Mutex<BTreeSet<String>>,
}

/// The memory that a device shares with the CPU, while it exists.
type SharedBuffers = Arc<Mutex<Vec<Weak<Memory>>>>;

/// Options of a device.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The compute DSP.
    pub dsp: Domain,
    /// Number of the session, from 0.
    pub session: u32,
    /// When weights are packed.
    pub repack: Repack,
    /// Bits of activations in products of few rows.
    pub activations: ActivationBits,
    /// Longest silence of the DSP.
    pub timeout: Duration,
    /// Bytes that can be mapped at a time, if fewer than the chip's.
    pub address_bytes: Option<u64>,
    /// Most threads that compute on the DSP; `None` for one on each vector unit.
    pub threads: Option<u32>,
    /// The power that the DSP's library votes for.
    pub power: Power,
    /// The thread that calls the DSP.
    pub serving: Serving,
    /// File in which commands are noted.
    pub trace: Option<&'a Path>,
}

impl HexDevice {
    /// Opens a session and tests its results. V73's vector units may lack the instructions for
    /// floats that its library has; another library without them is tried when a command ends the
    /// process.
    ///
    /// # Errors
    /// As [`Self::untested`]; `SelfTest` if a result is wrong.
    pub fn start(
        name: &str,
        rpc: &Arc<FastRpc>,
        caps: &'static HexCaps,
        options: Options<'_>,
    ) -> Result<Arc<Self>> {
        let device = Self::open(name, rpc, caps, options, Floats::Usual, true)?;
        let error = match selftest::run(&device.npu) {
            Ok(()) => return device.with_rates(options).map(Arc::new),
            Err(error) => error,
        };
        let has_unsure_unit = caps.arch < 73 && device.npu.info().matrix != 0;
        if has_unsure_unit && !device.npu.is_lost() {
            drop(device);
            log::warn!(
                "{name}: the self-test failed with the matrix unit ({error}); trying without it"
            );
            let device = Self::open(name, rpc, caps, options, Floats::Usual, false)?;
            selftest::run(&device.npu)?;
            return device.with_rates(options).map(Arc::new);
        }
        if caps.arch != 73 || !device.npu.is_lost() {
            return Err(error);
        }
        drop(device);
        log::warn!(
            "{name}: the self-test ended the DSP's process ({error}); trying the library without IEEE floats"
        );
        let device = Self::open(name, rpc, caps, options, Floats::Qfloat, true)?;
        selftest::run(&device.npu)?;
        device.with_rates(options).map(Arc::new)
    }

    /// Returns the device with the rates that were measured, now or earlier. A stand-in has none,
    /// because its speed is unrelated to a chip's.
    fn with_rates(mut self, options: Options<'_>) -> Result<Self> {
        if self.npu.is_simulated() || self.activations != ActivationBits::Auto {
            return Ok(self);
        }
        let file = kept::file();
        self.rates = rates::of(&self.npu, &self.name, options.power, file.as_deref())?;
        Ok(self)
    }

    /// Opens a session.
    ///
    /// # Errors
    /// As [`HexNpu::open`].
    pub fn untested(
        name: &str,
        rpc: &Arc<FastRpc>,
        caps: &'static HexCaps,
        options: Options<'_>,
    ) -> Result<Self> {
        Self::open(name, rpc, caps, options, Floats::Usual, true)
    }

    fn open(
        name: &str,
        rpc: &Arc<FastRpc>,
        caps: &'static HexCaps,
        options: Options<'_>,
        floats: Floats,
        matrix: bool,
    ) -> Result<Self> {
        let name: Arc<str> = name.into();
        let settings = SessionOptions {
            dsp: options.dsp,
            session: options.session,
            timeout: options.timeout,
            address_bytes: options.address_bytes.unwrap_or(caps.address_bytes),
            threads: options.threads,
            power: options.power,
            serving: options.serving,
            floats,
            matrix,
        };
        let npu = HexNpu::open(&name, rpc, caps, settings)?;
        let vtcm_bytes = npu.info().vtcm_bytes as usize;
        let longest = plan::longest_row(vtcm_bytes);
        if longest < COMMON_ROW {
            log::warn!(
                "{name}: products with rows of more than {longest} elements are left to the CPU: there are {} KiB of VTCM",
                vtcm_bytes / 1024
            );
        }
        let (threads, is_simulated) = (npu.info().threads, npu.is_simulated());
        let trace = (options.trace)
            .and_then(|path| Trace::create(path, &name, caps, threads, is_simulated));
        Ok(Self {
            name,
            dsp: options.dsp,
            npu,
            rates: caps::FITTED,
            repack: options.repack,
            activations: options.activations,
            changes: Arc::default(),
            layouts: Arc::default(),
            packs: OnceLock::new(),
            trace,
            shared: SharedBuffers::default(),
            forms: Mutex::default(),
            beside_bytes: Arc::default(),
            machine: system_memory,
            max_tensor_bytes: max_tensor_bytes(settings.address_bytes),
            logged: Mutex::default(),
        })
    }

    /// Returns the NPU.
    #[must_use]
    pub fn npu(&self) -> &HexNpu {
        &self.npu
    }

    /// Returns the pack files that may contain the weights.
    fn packs(&self) -> Arc<Packs> {
        self.packs.get().cloned().unwrap_or_default()
    }

    /// When weights are packed.
    #[must_use]
    pub fn repack(&self) -> Repack {
        self.repack
    }

    /// Logs, once for each tensor, that it is too large.
    fn log_once(&self, tensor: &Tensor) {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.len() < MAX_LOGGED && logged.insert(tensor.name.to_owned()) {
            log::warn!(
                "{}: {} is left to the CPU: it takes {} bytes, and a buffer has at most {}",
                self.name,
                tensor.name,
                packed_bytes(tensor),
                self.max_tensor_bytes
            );
        }
    }

    /// Returns the operation with its operands where they will be when it is computed. If
    /// everything is in buffers that pack (`GGML_RUST_NPU_REPACK=always`), only factors of products
    /// are packed then, by `Graphs::push`.
    fn with_places<'a>(&self, operation: &Operation<'a>) -> Operation<'a> {
        let mut operation = *operation;
        if self.repack != Repack::Always {
            return operation;
        }
        let factors = factors(&operation);
        let others = operation.src.iter_mut().skip(factors).flatten();
        for tensor in others.chain([&mut operation.dst]) {
            if tensor.place == Place::Packed {
                tensor.place = Place::Device;
            }
        }
        operation
    }

    /// Returns the number of threads for which kernels are chosen. For a stand-in, the user chooses
    /// the number of threads for this machine's CPU. Its kernels are those for a chip's threads, so
    /// its results do not depend on that choice.
    fn vector_threads(&self) -> u32 {
        if self.npu.is_simulated() {
            caps::VECTOR_UNITS
        } else {
            self.npu.info().threads
        }
    }

    /// Returns the number of changes that invalidate cached submissions.
    fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Keeps all other streams from putting packed tensors back until it is dropped.
    fn layouts(&self) -> RwLockReadGuard<'_, ()> {
        self.layouts.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts packed tensors back into ggml's layout, while no stream computes with them.
    fn put_back(&self, packed: &[(&HexBuffer, Range<usize>)]) {
        let _alone = (self.layouts.write()).unwrap_or_else(PoisonError::into_inner);
        (packed.iter()).for_each(|(buffer, range)| buffer.unpack(range));
    }

    /// Returns `true` if weights in memory that the CPU also uses get packed copies.
    fn packs_beside(&self) -> bool {
        self.repack == Repack::Weights
    }

    /// Notes the packed copies of a buffer, so that they can be freed when memory is short.
    fn with_forms(&self, beside: Beside) -> Arc<Beside> {
        let beside = Arc::new(beside);
        let mut all = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|forms| forms.strong_count() > 0);
        all.push(Arc::downgrade(&beside));
        beside
    }

    /// Allocates memory for a buffer. Packed copies of weights are freed for it if necessary.
    ///
    /// # Errors
    /// As [`HexNpu::allocate`].
    fn allocate_buffer(&self, bytes: usize) -> Result<Memory> {
        if self.beside_bytes.load(Ordering::Relaxed) == 0 {
            return self.npu.allocate(bytes);
        }
        let (free, _) = (self.machine)();
        if free < bytes {
            self.release_forms();
        }
        self.npu.allocate(bytes).or_else(|_| {
            self.release_forms();
            self.npu.allocate(bytes)
        })
    }

    /// Frees the memory of all packed copies of weights; the next graphs pack them again if there
    /// is room.
    fn release_forms(&self) {
        let _alone = (self.layouts.write()).unwrap_or_else(PoisonError::into_inner);
        let all = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        log::debug!("{}: packed forms beside weights are given back", self.name);
        all.iter()
            .filter_map(Weak::upgrade)
            .for_each(|forms| forms.release());
    }

    /// Returns the size of the largest accepted tensor, in bytes.
    #[must_use]
    pub fn max_tensor_bytes(&self) -> usize {
        self.max_tensor_bytes
    }
}

impl Device for HexDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        let info = self.npu.info();
        let simulated = if self.npu.is_simulated() {
            " (simulated)"
        } else {
            ""
        };
        let which = match self.dsp {
            Domain::Cdsp => String::new(),
            dsp => format!(" {}", dsp.name().to_string_lossy()),
        };
        let unit = if info.matrix == 0 {
            " without a matrix unit"
        } else {
            ""
        };
        format!(
            "Qualcomm Hexagon V{} NPU{which}{unit}, {} KiB VTCM, {} HVX thread(s){simulated}",
            info.arch,
            info.vtcm_bytes / 1024,
            info.threads
        )
    }

    fn chip(&self) -> &'static str {
        self.npu.caps().name
    }

    fn is_simulated(&self) -> bool {
        self.npu.is_simulated()
    }

    fn memory(&self, share: Share) -> Share {
        // The address space is no limit here: buffers that do not fit are mapped in turn.
        share
    }

    fn buffers(&self) -> Buffers {
        match self.repack {
            Repack::Weights => Buffers::SharedAndPacked,
            Repack::Always => Buffers::One,
            Repack::Off => Buffers::Shared,
        }
    }

    fn bytes_beside(&self) -> usize {
        self.beside_bytes.load(Ordering::Relaxed)
    }

    fn alignment(&self) -> usize {
        ALIGN_BYTES
    }

    fn max_buffer_bytes(&self) -> usize {
        MAX_BUFFER_BYTES
    }

    fn packed_bytes(&self, tensor: &Tensor) -> usize {
        packed_bytes(tensor)
    }

    fn refusal(&self, operation: &Operation) -> Option<Refusal> {
        if operation.computes_nothing() {
            // Claimed, because leaving it to the CPU would cut the graph.
            return None;
        }
        if let Some(large) = too_large(operation, self.max_tensor_bytes) {
            self.log_once(large);
            return Some(TOO_LARGE);
        }
        let vtcm_bytes = self.npu.info().vtcm_bytes as usize;
        let reason = match plan::question(
            vtcm_bytes,
            &self.with_places(operation),
            self.packs_beside(),
        ) {
            Err(reason) => reason,
            // A view may repeat its rows, and can then be larger than the buffer that holds it.
            Ok(command) => command
                .weights()
                .filter(|weights| weights.bytes() > self.max_tensor_bytes)
                .map(|_| TOO_LARGE)?,
        };
        let (op, name) = (operation.op.name(), operation.dst.name);
        log::trace!("{}: {op} {name} is left to others: {reason}", self.name);
        Some(reason)
    }

    fn computes(&self, _: Op) -> bool {
        // Each that has a name here is known to the DSP.
        true
    }

    fn prefers_cpu(&self, operation: &Operation) -> bool {
        let operands = operation.src.iter().flatten().chain([&operation.dst]);
        // Packed operands are first put back into ggml's layout for such an operation.
        let readable = |place| matches!(place, Place::Host | Place::Device | Place::Packed);
        self.refusal(operation).is_some() && operands.into_iter().all(|it| readable(it.place))
    }

    fn use_packs(&self, packs: Arc<Packs>) {
        // Only the first call has an effect.
        let _ = self.packs.set(packs);
    }

    fn self_test(&self) -> Result<()> {
        selftest::run(&self.npu)
    }

    fn limit(&self, weights: &Tensor) -> Option<Limit> {
        let rates = self.npu.caps().rates;
        Some(Limit {
            weight_bytes: WeightLayout::new(weights)?.bytes(),
            bytes_per_ns: rates.dma_gb_per_s,
            ops_per_ns: rates.hmx_gflops,
        })
    }

    fn allocate(self: Arc<Self>, bytes: usize, shared: bool) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(HexBuffer::new(&self, bytes, shared)?))
    }

    fn stream(self: Arc<Self>) -> Box<dyn Stream> {
        Box::new(HexStream::new(self))
    }
}

/// Returns the sources of an operation that may be packed when it is computed: those of a product
/// whose weights have a packed form.
fn factors(operation: &Operation) -> usize {
    match (operation.op, &operation.src[0]) {
        (Op::MulMat | Op::MulMatId, Some(src0)) => match WeightLayout::new(src0) {
            // These types may also be multiplied unpacked; then neither operand may be packed.
            Some(layout) if layout.form == Conversion::Halved => 1,
            // The host converts packed F16 activations; other packed activations are read directly.
            Some(_) => match &operation.src[1] {
                Some(src1) if src1.dtype == DType::F16 => 2,
                _ => 1,
            },
            None => 0,
        },
        _ => 0,
    }
}

#[cfg(test)]
impl HexDevice {
    /// Returns a device of the stand-in without a self-test.
    pub(crate) fn of_tests() -> Self {
        use std::time::Duration;

        use self::device::{Domain, Serving};
        use crate::config::ActivationBits;

        let rpc = driver::FastRpc::simulate(hexagon_ops::sim::Options::new(75)).unwrap();
        let options = Options {
            dsp: Domain::Cdsp,
            session: 0,
            repack: Repack::Weights,
            timeout: Duration::from_secs(20),
            address_bytes: None,
            threads: None,
            activations: ActivationBits::Eight,
            power: hexagon_ops::wire::Power::Burst,
            serving: Serving::Thread,
            trace: None,
        };
        Self::untested("HEX0", &rpc, caps::by_arch(75).unwrap(), options).unwrap()
    }
}
