//! The Rockchip NPU: weights are in packed buffers, everything else is in host memory, and each
//! multiplication is computed at once.
//!
//! | file | holds |
//! |---|---|
//! | [`caps`] | the capabilities of each chip |
//! | [`layout`], [`pack`] | packed weights: where they lie, and how they are made |
//! | [`plan`] | which nodes the NPU computes, and how each is cut up |
//! | [`buffer`], [`stream`] | ggml's buffers and graphs |
//! | [`device`] | the NPU: quantizes activations, runs the cores, writes results |
//! | [`discovery`] | whether there is one |
//! | [`driver`] | safe calls to librknnrt or its stand-in |
//! | [`selftest`] | multiplications that an NPU must compute right before it is offered |

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

use self::buffer::Beside;
use self::device::{NAME, RkNpu};
use self::driver::Rknn;
use self::plan::Target;
use crate::backend::{Buffer, Buffers, Device, Limit, Share, Stream};
use crate::error::Result;
use crate::graph::{Op, Operation, Place, Refusal, Tensor};
use crate::packfile::Packs;
use crate::timeline::{DeviceTracks, Timeline};

pub use self::buffer::RkBuffer;
pub use self::stream::RkStream;

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

/// A Rockchip NPU as ggml sees it.
#[derive(Debug)]
pub struct RkDevice {
    npu: RkNpu,
    target: Target,
    /// The M that calls may have.
    passed: selftest::Passed,
    rows: Mutex<stream::RowScratch>,
    /// `true` if the CPU computes attention, because there was no room for it once, or the library
    /// refused a shape.
    attention_left: AtomicBool,
    /// Number of the next graph.
    submissions: AtomicU64,
    packs: OnceLock<Arc<Packs>>,
    /// Packed copies of weights in host memory.
    beside: Beside,
    /// The timeline to which nodes are written.
    tracks: Option<DeviceTracks>,
    /// Logs once that weights are kept for the CPU, and once that there is no memory for more of
    /// them.
    kept_logged: [Once; 2],
    /// Weights that were logged as too large.
    too_large_logged: Mutex<BTreeSet<String>>,
}

impl RkDevice {
    /// Opens and tests an NPU.
    ///
    /// # Errors
    /// As [`RkNpu::open`]; `SelfTest` if it computes something wrong.
    pub fn start(rknn: Arc<Rknn>, target: impl Into<Target>) -> Result<Self> {
        let mut device = Self::untested(rknn, target)?;
        device.passed = selftest::run(&device.npu, &device.target.rules)?;
        device.npu.prove_shapes();
        Ok(device)
    }

    /// Opens an NPU without a self-test: for benchmarks with a stand-in that computes nothing.
    ///
    /// # Errors
    /// As [`RkNpu::open`].
    pub fn untested(rknn: Arc<Rknn>, target: impl Into<Target>) -> Result<Self> {
        let mut target = target.into();
        // CPU numbers mean something only on the chip itself.
        let here = discovery::chip_of_this_machine().filter(|caps| caps.soc == target.caps.soc);
        let cpus = here.map_or(&[][..], |caps| caps.big_cpus);
        let npu = RkNpu::open(rknn, target.caps, &target.precisions(), cpus)?;
        target.caps = npu.caps();
        Ok(Self {
            kept_logged: [const { Once::new() }; 2],
            too_large_logged: Mutex::default(),
            npu,
            target,
            passed: selftest::Passed::default(),
            rows: Mutex::default(),
            attention_left: AtomicBool::new(false),
            submissions: AtomicU64::new(0),
            packs: OnceLock::new(),
            beside: Beside::default(),
            tracks: None,
        })
    }

    /// Writes each node to a file. If the file cannot be written, or is a table, which only Hexagon
    /// has, a log line reports it and nothing is written.
    #[must_use]
    pub fn traced(mut self, path: Option<&Path>) -> Self {
        let file = (path.filter(|path| Timeline::is_for(path))).and_then(Timeline::open);
        let remark =
            "host and vectors (of the CPU) are measured, queue, DMA and matrix unit are modelled";
        self.tracks =
            file.map(|file| DeviceTracks::new(file, NAME, self.npu.is_simulated(), remark));
        self
    }

    /// Returns the NPU.
    #[must_use]
    pub fn npu(&self) -> &RkNpu {
        &self.npu
    }

    /// Logs, once for each weight, that it is larger than a buffer can be.
    fn report_too_large(&self, operation: &Operation) {
        let Some(bytes) = plan::too_large(&self.target, operation) else {
            return;
        };
        let name = operation.src[0].map_or("", |weights| weights.name);
        let mut logged = (self.too_large_logged.lock()).unwrap_or_else(PoisonError::into_inner);
        if logged.insert(name.to_owned()) {
            log::warn!(
                "{}: {name} stays on the CPU: it takes {bytes} bytes, and a buffer has at most {}",
                NAME,
                caps::DOMAIN_WEIGHT_BYTES
            );
        }
    }

    /// Returns `true` if there may be room for a packed copy of weights; without room a graph would
    /// fail.
    fn has_room_beside(&self, weights: &Tensor) -> bool {
        let (free, _) = self.address_space();
        let layout = plan::weight_layout(&self.target, weights);
        !self.beside.is_full() && layout.is_some_and(|layout| layout.bytes() <= free)
    }

    /// Returns how many bytes of weights the NPU's address spaces can still hold, and how many they
    /// could hold in total.
    #[must_use]
    pub fn address_space(&self) -> (usize, usize) {
        self.npu.address_space()
    }
}

impl Device for RkDevice {
    fn name(&self) -> &str {
        NAME
    }

    fn description(&self) -> String {
        let (library, driver) = self.npu.versions();
        let library = library.split_whitespace().next().unwrap_or("?");
        let chip = self.npu.caps().soc.name().to_uppercase();
        let simulated = if self.npu.is_simulated() {
            " (simulated)"
        } else {
            ""
        };
        // Without librknnrt, the version text already contains the driver's name.
        let name = if self.npu.is_direct() {
            ""
        } else {
            "librknnrt "
        };
        format!("Rockchip {chip} NPU, {name}{library}, driver {driver}{simulated}")
    }

    fn chip(&self) -> &'static str {
        self.npu.caps().soc.name()
    }

    fn is_simulated(&self) -> bool {
        self.npu.is_simulated()
    }

    fn memory(&self, share: Share) -> Share {
        self.weight_memory(share)
    }

    fn buffers(&self) -> Buffers {
        Buffers::HostAndPacked
    }

    fn bytes_beside(&self) -> usize {
        self.beside.bytes()
    }

    fn invalidate(&self, memory: Range<usize>) {
        self.beside.invalidate(&self.npu, &memory);
    }

    fn alignment(&self) -> usize {
        layout::BLOCK_ALIGN_BYTES
    }

    fn max_buffer_bytes(&self) -> usize {
        caps::DOMAIN_WEIGHT_BYTES
    }

    fn packed_bytes(&self, tensor: &Tensor) -> usize {
        let ggml_bytes = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
        plan::weight_layout(&self.target, tensor)
            .map_or(ggml_bytes, |layout| layout.bytes().max(ggml_bytes))
    }

    fn refusal(&self, operation: &Operation) -> Option<Refusal> {
        let reason = plan::question(&self.target, operation).err()?;
        log::trace!("{} stays on the CPU: {reason}", operation.dst.name);
        self.report_too_large(operation);
        Some(reason)
    }

    fn computes(&self, op: Op) -> bool {
        matches!(op, Op::MulMat | Op::MulMatId | Op::FlashAttnExt)
    }

    fn prefers_cpu(&self, operation: &Operation) -> bool {
        let turned = plan::turned(&self.target, operation);
        let weights = turned.as_ref().unwrap_or(operation).src[0].as_ref();
        plan::prefers_cpu(&self.target, operation)
            || weights.is_some_and(|it| it.place == Place::Device && !self.has_room_beside(it))
            || operation.op == Op::FlashAttnExt && !self.has_room_for(operation)
    }

    fn use_packs(&self, packs: Arc<Packs>) {
        // Only the first call has an effect.
        let _ = self.packs.set(packs);
    }

    fn self_test(&self) -> Result<()> {
        let result = selftest::run(&self.npu, &self.target.rules);
        self.npu.release_idle();
        result.map(drop)
    }

    fn limit(&self, weights: &Tensor) -> Option<Limit> {
        let layout = plan::weight_layout(&self.target, weights)?;
        let (caps, precision) = (self.target.caps, layout.precision);
        let cores = caps.cores.count() as f64;
        let ops_per_ns = caps.cost.ops_per_ns(precision) / precision.rows() as f32;
        Some(Limit {
            weight_bytes: layout.bytes(),
            bytes_per_ns: f64::from(caps.cost.bytes_per_ns) * cores,
            ops_per_ns: f64::from(ops_per_ns) * cores,
        })
    }

    fn allocate(self: Arc<Self>, bytes: usize, _shared: bool) -> Result<Box<dyn Buffer>> {
        Ok(Box::new(RkBuffer::new(self, bytes)?))
    }

    fn stream(self: Arc<Self>) -> Box<dyn Stream> {
        Box::new(RkStream::new(self))
    }
}
