//! The Rockchip NPU: multiplies rows of activations with weights that are packed in device memory.
//!
//! ```text
//! rows of F32 --(1) rotate, quantize----> rows of INT8 --(2) interleave--> native A, one buffer for each K segment
//!                                                                              |  shared by all cores
//!            core 0: chunks 0..   core 1: chunks ..   core 2: chunks ..        v
//!            (3) for each chunk of N: for each segment of K: run(A, B block, C)
//!            (4) C of all segments --sum, scale--> columns of the F32 result
//! ```
//!
//! Cores run at the same time, and nothing else happens in the library meanwhile: contexts and
//! memory for (3) are made and bound for all cores before, and the results of all are fetched after
//! it (`wave`).
//!
//! A turn and then a lock cover every operation, because several backends on several threads, and
//! other processes, share one NPU. A thread that needs both gets the turn first.
//!
//! An error puts the device out of use: its results so far may be incomplete, so it refuses further
//! work. A shape that the library refuses is an error of its call alone, as a lack of memory is,
//! and a turn that another process does not give back.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rknpu_ops::ffi::CoreMask;
use rknpu_ops::pack::Rows;
use task_pool::{Pool, chunks};

use self::activation::{Activations, SharedActivations};
use self::attention::AttentionState;
pub use self::attention::{Cache, HeadOperands, HeadSizes};
use self::core::{Core, CoreCall};
use self::domain::Domains;
use self::wave::Wave;
pub use self::weight::{PackedWeights, WeightMemory, WeightSlice};
use crate::error::{Error, Result};
use crate::host_memory::RowsMut;
use crate::rockchip::caps::{self, Precision, RkCaps};
use crate::rockchip::driver::process;
use crate::rockchip::driver::{self, Rknn, Turn};
use crate::rockchip::layout::WeightLayout;

mod activation;
mod attention;
mod core;
mod domain;
mod geometry;
mod recent;
mod scratch;
mod wave;
mod weight;

/// Cores of the largest NPU.
const MAX_CORES: usize = 3;

/// Threads for the host stages, including the caller: as many as a chip has big CPUs.
const MAX_HOST_THREADS: usize = 4;

/// Name of the device in ggml.
pub const NAME: &str = "RKNPU0";

fn lost(cause: &str) -> Error {
    Error::DeviceLost {
        device: NAME.into(),
        cause: cause.into(),
    }
}

/// Most results that one thread unpacks faster than several are woken.
const FEW_RESULTS: usize = 16 * 1024;

/// The cores that a multiplication may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// All at the same time.
    AllCores,
    /// The first one, chunk after chunk.
    OneCore,
}

/// A core's share of a call.
struct CoreShare<'a> {
    core: &'a mut Core,
    /// The columns of the result that are not written yet.
    dst: RowsMut<'a>,
    result: Result<()>,
}

/// An NPU that passed its self-test.
#[derive(Debug)]
pub struct RkNpu {
    caps: &'static RkCaps,
    rknn: Arc<Rknn>,
    domains: Domains,
    versions: (String, String),
    threads: Pool,
    state: Mutex<NpuState>,
    /// Cores run one after the other, because they disturb each other.
    one_core: AtomicBool,
    /// The first results of each shape are compared with the CPU's.
    proves: AtomicBool,
    /// Reason why the device is out of use.
    lost: OnceLock<String>,
}

/// State that changes from call to call.
#[derive(Debug)]
struct NpuState {
    activations: Activations,
    cores: Vec<Core>,
    attention: AttentionState,
}

impl NpuState {
    /// Drops everything that calls can create again.
    fn drop_caches(&mut self) {
        self.activations.drop_caches();
        self.attention.drop_caches();
        self.cores.iter_mut().for_each(Core::drop_caches);
    }
}

impl RkNpu {
    /// Opens the NPU of `rknn`.
    ///
    /// - `precisions`: the arithmetics that weights may have
    /// - `cpus`: the CPUs for the threads that serve it; all for an empty list
    ///
    /// # Errors
    /// `Busy` if another process does not give its turn back, `Version` for a library that is too
    /// old, `Geometry` for one with unknown layouts, `Vendor` if a first context cannot be made.
    pub fn open(
        rknn: Arc<Rknn>,
        caps: &'static RkCaps,
        precisions: &[Precision],
        cpus: &[usize],
    ) -> Result<Self> {
        let library = Arc::clone(&rknn);
        let _turn = library.turn()?;
        let domains = Domains::new(&rknn)?;
        let versions = domains.first_anchor().versions()?;
        if let Some(spaces) = rknn.direct_spaces() {
            domains.limit(spaces);
        } else {
            driver::check_version(&versions.0)?;
            if driver::version(&versions.1) < caps::MIN_DRIVER_FOR_DOMAINS {
                domains.limit(1);
            }
        }
        let anchor = domains.first_anchor();
        let version = driver::version(&versions.0);
        let caps = geometry::learn(&rknn, &anchor, caps, precisions, version)?;
        let threads = threads(caps.cores.count(), rknn.stand_in().is_some());
        let threads = Pool::new(threads, "rknpu", cpus).map_err(|source| Error::Thread {
            device: "the Rockchip NPU".into(),
            source,
        })?;
        // A chip with one core refuses a mask. SOURCE: RKNN SDK User Guide 2.3.0,
        // rknn_matmul_set_core_mask.
        let masks = [CoreMask::CORE_0, CoreMask::CORE_1, CoreMask::CORE_2];
        let has_masks = caps.soc.cores() > 1;
        let limit = recent::contexts_per_core(process::file_limit(), caps.cores.count());
        let results = caps::RESULT_BYTES / caps.cores.count().max(1);
        let cores = (caps.cores.iter())
            .filter_map(|core| masks.get(core).copied())
            .map(|mask| Core::new(has_masks.then_some(mask), limit, results));
        let state = NpuState {
            activations: Activations::default(),
            cores: cores.collect(),
            attention: AttentionState::default(),
        };
        Ok(Self {
            caps,
            rknn,
            domains,
            versions,
            threads,
            state: Mutex::new(state),
            one_core: AtomicBool::new(false),
            proves: AtomicBool::new(false),
            lost: OnceLock::new(),
        })
    }

    /// Returns the chip.
    #[must_use]
    pub fn caps(&self) -> &'static RkCaps {
        self.caps
    }

    /// Returns the versions of the library and of the kernel driver.
    #[must_use]
    pub fn versions(&self) -> &(String, String) {
        &self.versions
    }

    /// Returns `true` if a stand-in computes in place of silicon.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.rknn.stand_in().is_some()
    }

    /// Returns `true` if the device is driven without the vendor's library.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.rknn.direct_spaces().is_some()
    }

    /// Returns `true` if an error put the device out of use.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    /// From now on, only one core is used.
    pub fn use_one_core(&self) {
        self.one_core.store(true, Ordering::Relaxed);
    }

    /// From now on, compares the first results of each shape with the CPU's, so that no wrong
    /// number is used if the library computes a shape wrong.
    pub fn prove_shapes(&self) {
        self.proves.store(true, Ordering::Relaxed);
    }

    /// Returns how many bytes of weights the NPU's address spaces can still hold, and how many they
    /// could hold in total.
    #[must_use]
    pub fn address_space(&self) -> (usize, usize) {
        self.domains.bytes()
    }

    /// Forgets activations that were packed from these addresses, because another node than a
    /// product has written them.
    pub fn written(&self, addresses: &Range<usize>) {
        if let Ok(mut state) = self.state.lock() {
            state.activations.written(addresses);
        }
    }

    /// Calls `attempt`. If it fails, drops the caches of calls and repeats it: the caches use
    /// memory and file descriptors, and contexts may keep freed weights alive that they were last
    /// bound to.
    fn with_room<T>(&self, attempt: impl Fn() -> Result<T>) -> Result<T> {
        let _turn = self.rknn.turn()?;
        attempt().or_else(|_| {
            if let Ok(mut state) = self.state.lock() {
                state.drop_caches();
            }
            attempt()
        })
    }

    /// Releases memory that was freed while contexts were still bound to it. If no weights are
    /// left, nothing of the NPU stays open until weights are allocated again.
    pub fn release_idle(&self) {
        // Nothing can be freed while another process has the turn.
        let Some(turn) = self.rknn.turn_to_free() else {
            return;
        };
        // After a panic the device is not used again, and whatever is open is closed when the
        // process exits.
        if let Ok(mut state) = self.state.lock() {
            state.drop_caches();
            self.domains.release_idle(&turn);
        }
    }

    /// Takes the turn to free several things.
    #[must_use]
    pub fn turn_to_free(&self) -> Option<Turn<'_>> {
        self.rknn.turn_to_free()
    }

    /// Allocates memory for weights.
    ///
    /// # Errors
    /// `OutOfMemory`, `OutOfDescriptors` or `AddressSpace`; `Busy` if another process does not give
    /// its turn back; `Vendor` if an address space cannot be begun.
    pub fn allocate(&self, bytes: usize) -> Result<WeightMemory> {
        let _turn = self.rknn.turn()?;
        let allocated = self.with_room(|| self.domains.allocate(bytes));
        let (memory, share) = allocated.inspect_err(|error| {
            self.report_company(error, bytes);
            self.release_idle();
        })?;
        Ok(WeightMemory::new(memory, share))
    }

    /// Makes a place for a weight at `offset` of `memory`; see `WeightMemory::place`.
    ///
    /// # Errors
    /// `OutOfMemory`, `OutOfDescriptors` or `Busy`.
    pub fn place(
        &self,
        memory: &WeightMemory,
        layout: WeightLayout,
        offset: usize,
    ) -> Result<PackedWeights> {
        let placed = self.with_room(|| memory.place(layout, offset));
        placed.inspect_err(|error| self.report_company(error, layout.bytes()))
    }

    /// Warns of other processes if there was no room for `bytes` bytes of weights.
    fn report_company(&self, error: &Error, bytes: usize) {
        if error.is_shortage() && self.rknn.has_company() {
            log::warn!(
                "{NAME}: {bytes} bytes may not fit beside the memory of {} on the NPU",
                self.rknn.company().as_deref().unwrap_or("another process")
            );
        }
    }

    /// Computes `dst = act · w` in one call for each block of the weights. Returns the time in the
    /// vendor's calls, for the slowest core.
    ///
    /// - `act`: rows of K; `bucket`: M of the contexts, at least `act.count()`
    /// - `graph`: number of the graph that the activations belong to, if they may be shared with
    ///   its other multiplications: nothing else writes them while it is computed
    /// - `dst`: `act.count()` rows of N
    ///
    /// # Errors
    /// `DeviceLost` after an earlier error, `Busy` if another process does not release the turn,
    /// else `Vendor`, `Geometry`, `OutOfMemory` or `WrongSums` for an error of this call.
    pub fn mul_mat(
        &self,
        w: WeightSlice,
        act: Rows<f32>,
        bucket: usize,
        graph: Option<u64>,
        dst: RowsMut,
    ) -> Result<Duration> {
        let proves = self.proves.load(Ordering::Relaxed);
        self.multiply(w, act, bucket, graph, dst, Spread::AllCores, proves)
    }

    /// As [`Self::mul_mat`] for a test, which looks at the results itself.
    ///
    /// # Errors
    /// As [`Self::mul_mat`], but for `WrongSums`.
    pub fn try_mul_mat(
        &self,
        w: WeightSlice,
        act: Rows<f32>,
        bucket: usize,
        dst: RowsMut,
        spread: Spread,
    ) -> Result<Duration> {
        self.multiply(w, act, bucket, None, dst, spread, false)
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "operands, and how they are multiplied"
    )]
    fn multiply(
        &self,
        w: WeightSlice,
        act: Rows<f32>,
        bucket: usize,
        graph: Option<u64>,
        mut dst: RowsMut,
        spread: Spread,
        proves: bool,
    ) -> Result<Duration> {
        self.guarded(|turn, state| {
            w.memory.flush()?;
            let dst = dst.reborrow();
            self.run(turn, state, w, act, bucket, graph, dst, spread, proves)
        })
    }

    /// Runs `run` in a turn, with the caches of calls. The device is lost after an error, unless it
    /// is a shortage or an error of this shape.
    fn guarded<T>(&self, mut run: impl FnMut(&Turn, &mut NpuState) -> Result<T>) -> Result<T> {
        let turn = self.rknn.turn()?;
        // A panic under this lock is caught at the C interface. The buffers may then hold half a
        // call, so the device is lost.
        let Ok(mut state) = self.state.lock() else {
            return Err(lost("an internal error"));
        };
        if let Some(cause) = self.lost.get() {
            return Err(lost(cause));
        }
        let result = match run(&turn, &mut state) {
            // Caches of earlier calls may occupy the memory, so they are dropped as in `allocate`.
            // If memory is still short, only this call fails, because the shortage may pass.
            Err(error) if error.is_shortage() => {
                state.drop_caches();
                run(&turn, &mut state)
            }
            other => other,
        };
        if let Err(error) = &result
            && !error.is_shortage()
            && !error.is_of_shape()
        {
            // The first cause is kept.
            _ = self.lost.set(error.to_string());
        }
        result
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "operands, and how they are multiplied"
    )]
    fn run(
        &self,
        turn: &Turn,
        state: &mut NpuState,
        w: WeightSlice,
        act: Rows<f32>,
        bucket: usize,
        graph: Option<u64>,
        mut dst: RowsMut,
        spread: Spread,
        proves: bool,
    ) -> Result<Duration> {
        let layout = &w.weights.layout;
        let shared = graph.map(|graph| SharedActivations {
            graph,
            addresses: act.addresses(),
        });
        let anchor = w.memory.anchor();
        state
            .activations
            .pack(anchor, &self.threads, layout, act, bucket, shared)?;
        state.activations.written(&dst.addresses());

        let NpuState {
            activations, cores, ..
        } = state;
        let call = CoreCall {
            rknn: &self.rknn,
            w,
            activations,
            rows: act.count(),
            bucket,
        };
        let chunks_per_core = match spread {
            Spread::AllCores if !self.one_core.load(Ordering::Relaxed) => layout.chunks_per_core,
            Spread::AllCores | Spread::OneCore => layout.chunks,
        };
        let mut shares = [const { None }; MAX_CORES];
        for (index, (share, core)) in shares.iter_mut().zip(cores).enumerate() {
            let first = (index * chunks_per_core).min(layout.chunks);
            let chunks = first..(first + chunks_per_core).min(layout.chunks);
            if chunks.is_empty() {
                break;
            }
            let width = chunks.clone().map(|chunk| layout.chunk_rows(chunk).len());
            let dst = dst.split_columns(width.sum());
            core.begin(chunks);
            let result = Ok(());
            *share = Some(CoreShare { core, dst, result });
        }
        let used = shares.iter().flatten().count();
        let shares = &mut shares[..used];
        // Chunks are dealt out in order, so the first core has the most of them.
        let waves = shares
            .iter()
            .flatten()
            .next()
            .map(|first| first.core.waves(&call));
        for wave in waves.into_iter().flatten() {
            self.run_wave(turn, &call, &wave, shares, proves)?;
        }
        let ran = shares.iter().flatten().map(|share| share.core.ran);
        Ok(ran.max().unwrap_or_default())
    }

    /// Runs a wave, which was created and bound for all cores before, and writes the columns that
    /// are complete afterwards.
    fn run_wave(
        &self,
        turn: &Turn,
        call: &CoreCall,
        wave: &Wave,
        shares: &mut [Option<CoreShare>],
        proves: bool,
    ) -> Result<()> {
        for share in shares.iter_mut().flatten() {
            share.core.prepare(call, wave)?;
        }
        self.threads.for_each(chunks(shares, 1), |_, share| {
            for share in share.iter_mut().flatten() {
                share.result = share.core.run(call, wave, turn);
            }
        });
        outcome(shares)?;
        for share in shares.iter_mut().flatten() {
            share.core.fetch(call, wave)?;
        }
        let unproven = |share: &CoreShare| share.core.is_unproven(call);
        let weights =
            (proves && shares.iter().flatten().any(unproven)).then(|| call.w.memory.lock());
        let weights = weights.as_ref().map(|memory| memory.bytes());
        if !wave.is_last && weights.is_none() {
            return Ok(());
        }
        let finish = |share: &mut CoreShare| {
            if let Some(weights) = weights.filter(|_| share.core.is_unproven(call)) {
                share.core.prove(call, wave, weights)?;
            }
            if wave.is_last {
                share.core.unpack(call, wave, &mut share.dst);
            }
            Ok::<_, Error>(())
        };
        let layout = &call.w.weights.layout;
        if weights.is_none()
            && call.rows * layout.chunk_n * wave.chunks.len() * shares.len() <= FEW_RESULTS
        {
            return shares.iter_mut().flatten().try_for_each(finish);
        }
        self.threads.for_each(chunks(shares, 1), |_, share| {
            for share in share.iter_mut().flatten() {
                share.result = finish(share);
            }
        });
        outcome(shares)
    }
}

/// Returns the worst error of the cores: an error that loses the device must not be hidden by one
/// after which the call is repeated or other calls continue.
fn outcome(shares: &mut [Option<CoreShare>]) -> Result<()> {
    let mut lack = None;
    for share in shares.iter_mut().flatten() {
        match std::mem::replace(&mut share.result, Ok(())) {
            Ok(()) => {}
            Err(error) if error.is_shortage() || error.is_of_shape() => lack = Some(error),
            Err(error) => return Err(error),
        }
    }
    lack.map_or(Ok(()), Err)
}

/// Returns the threads that serve the NPU: one for each of its cores, as the vendor's run blocks,
/// and some more for the host stages. A stand-in computes on the CPU, where more threads than CPUs
/// would only wait for each other.
fn threads(cores: usize, simulated: bool) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cpus.min(MAX_HOST_THREADS).max(cores);
    if simulated {
        threads.min(cpus)
    } else {
        threads
    }
}
