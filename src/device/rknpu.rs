//! The Rockchip NPU: multiplies rows of activations with weights that lie packed in device memory.
//!
//! ```text
//! rows of F32 --(1) Hadamard, quantize--> rows of INT8 --(2) interleave--> native A, one buffer for each K segment
//!                                                                              |  shared by all cores
//!            core 0: chunks 0..   core 1: chunks ..   core 2: chunks ..        v
//!            (3) for each chunk of N: for each segment of K: run(A, B block, C)
//!            (4) C of all segments --sum, scale--> columns of the F32 result
//! ```
//!
//! One lock covers all of it: there is one NPU, and several backends on several threads take turns. An error puts
//! the device out of use: what it computed so far may be incomplete, so it refuses to go on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::f16;
use rayon::prelude::*;
use rknpu_ops::ffi::{CoreMask, MatmulInfo};
use rknpu_ops::pack::{self, NativeOutput, Rows};

use crate::caps::RkCaps;
use crate::error::{Error, Result};
use crate::repack::{self, MAX_SEGMENTS, Precision, Source, WeightLayout};
use crate::shm::RowsMut;
use crate::vendor::rknn::{Context, Memory, Operands, Rknn, View};

/// Name of the device in ggml.
pub const NAME: &str = "RKNPU0";

/// Contexts that a core keeps. A model needs one for each distinct weight shape and M bucket: about 50.
const MAX_CONTEXTS_PER_CORE: usize = 128;

/// Rows from which on the host stages are shared among threads: below, waking them costs more than the work.
const PARALLEL_ROWS: usize = 16;

/// An NPU that passed its self-test.
#[derive(Debug)]
pub struct RkNpu {
    caps: &'static RkCaps,
    rknn: Arc<Rknn>,
    /// Owns the address space that all memory is in; never runs.
    anchor: Arc<Context>,
    versions: (String, String),
    threads: rayon::ThreadPool,
    state: Mutex<State>,
    lost: AtomicBool,
}

/// What changes from call to call.
#[derive(Debug)]
struct State {
    activations: Activations,
    cores: Vec<Core>,
}

/// Shape of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CallShape {
    precision: Precision,
    m: usize,
    k: usize,
    n: usize,
}

/// One NPU core: its contexts and where its results go.
#[derive(Debug)]
struct Core {
    mask: Option<CoreMask>,
    contexts: HashMap<CallShape, Context>,
    results: Scratch,
}

/// Memory by segment and size. A sync covers a whole allocation, so a call gets one of at most twice its size.
#[derive(Debug, Default)]
struct Scratch(HashMap<(usize, usize), Memory>);

impl Scratch {
    fn key(segment: usize, bytes: usize) -> (usize, usize) {
        (segment, bytes.next_power_of_two().max(4096))
    }

    fn reserve(
        &mut self,
        anchor: &Arc<Context>,
        segment: usize,
        bytes: usize,
    ) -> Result<&mut Memory> {
        let key = Self::key(segment, bytes);
        match self.0.entry(key) {
            std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(entry) => {
                Ok(entry.insert(Memory::new(anchor, key.1)?))
            }
        }
    }

    /// PANIC: `reserve` was called for the same segment and size before.
    fn get(&self, segment: usize, bytes: usize) -> &Memory {
        &self.0[&Self::key(segment, bytes)]
    }
}

/// Activations of one call, quantized and packed.
#[derive(Debug, Default)]
struct Activations {
    int8: Vec<i8>,
    fp16: Vec<f16>,
    /// One row of F32.
    work: Vec<f32>,
    /// One factor for each row: the INT8 scale, or the power of two that FP16 rows were divided by.
    scales: Vec<f32>,
    native: Scratch,
}

/// Device memory for packed weights: a ggml buffer, or the weights of one call.
#[derive(Debug)]
pub struct WeightMemory {
    memory: Mutex<Memory>,
    /// The CPU wrote to it since the last sync.
    dirty: AtomicBool,
}

/// One packed weight.
#[derive(Debug)]
pub struct Weights {
    layout: WeightLayout,
    blocks: Vec<View>,
    scales: Vec<f32>,
}

impl WeightMemory {
    fn lock(&self) -> MutexGuard<'_, Memory> {
        // A panic while packing leaves bytes of one tensor unfinished, which its caller reports; the memory is fine.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes views of the blocks of a weight at `offset`; nothing is packed yet.
    ///
    /// # Errors
    /// `OutOfMemory` from the library.
    pub fn place(&self, layout: WeightLayout, offset: usize) -> Result<Weights> {
        let memory = self.lock();
        let blocks = (0..layout.slices * layout.blocks_per_slice())
            .map(|block| memory.view(offset + layout.block_offset(block), layout.block_bytes()))
            .collect::<Result<_>>()?;
        Ok(Weights {
            layout,
            blocks,
            scales: vec![0.0; layout.scales()],
        })
    }

    /// Packs rows of a weight that was placed at `offset`; see [`repack::pack_rows`].
    pub fn pack(
        &self,
        weights: &mut Weights,
        offset: usize,
        source: Source,
        rows: std::ops::Range<usize>,
    ) {
        let mut memory = self.lock();
        let out = &mut memory.bytes_mut()[offset..][..weights.layout.bytes()];
        repack::pack_rows(&weights.layout, source, rows, &mut weights.scales, out);
        self.dirty.store(true, Ordering::Release);
    }

    /// Lets the device see what was packed.
    fn flush(&self) -> Result<()> {
        if self.dirty.load(Ordering::Acquire) {
            let memory = self.lock();
            memory.sync_to_device()?;
            self.dirty.store(false, Ordering::Release);
        }
        Ok(())
    }
}

impl Weights {
    /// Where they lie.
    #[must_use]
    pub fn layout(&self) -> &WeightLayout {
        &self.layout
    }
}

impl RkNpu {
    /// Opens the NPU behind `rknn`.
    ///
    /// # Errors
    /// `Version` for a library that is too old, `Vendor` if a first context cannot be made.
    pub fn open(rknn: Arc<Rknn>, caps: &'static RkCaps) -> Result<Self> {
        // SOURCE: rk-llama.cpp allocates from a 32x32x32 FP16 context as well; every chip takes that shape.
        let info = MatmulInfo::native(Precision::Fp16.matmul_type(), 32, 32, 32);
        let anchor = Arc::new(Context::new(&rknn, info, None)?);
        let versions = anchor.versions()?;
        crate::vendor::rknn::check_version(&versions.0)?;
        let cores = caps.soc.cores();
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(4)
            .max(cores);
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("rknpu-{index}"))
            .build()
            .map_err(|error| Error::Library {
                library: "threads of the device".into(),
                reason: error.to_string(),
            })?;
        // A chip with one core refuses a mask. SOURCE: RKNN SDK User Guide 2.3.0, rknn_matmul_set_core_mask.
        let masks = [CoreMask::CORE_0, CoreMask::CORE_1, CoreMask::CORE_2];
        let cores = masks.into_iter().take(cores).map(|mask| Core {
            mask: (cores > 1).then_some(mask),
            contexts: HashMap::new(),
            results: Scratch::default(),
        });
        let state = State {
            activations: Activations::default(),
            cores: cores.collect(),
        };
        Ok(Self {
            caps,
            rknn,
            anchor,
            versions,
            threads,
            state: Mutex::new(state),
            lost: AtomicBool::new(false),
        })
    }

    /// The chip.
    #[must_use]
    pub fn caps(&self) -> &'static RkCaps {
        self.caps
    }

    /// The versions of the library and of the kernel driver.
    #[must_use]
    pub fn versions(&self) -> &(String, String) {
        &self.versions
    }

    /// Whether a stand-in computes in place of silicon.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.rknn.stand_in().is_some()
    }

    /// Whether an error put the device out of use.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Allocates memory for weights.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn allocate(&self, bytes: usize) -> Result<WeightMemory> {
        let memory = Memory::new(&self.anchor, bytes)?;
        Ok(WeightMemory {
            memory: Mutex::new(memory),
            dirty: AtomicBool::new(false),
        })
    }

    /// Computes `dst = act · w` for at most [`crate::plan::M_BUCKET_MAX`] rows.
    ///
    /// - `slice`: which slice of the weight; `act`: rows of K; `bucket`: M of the contexts, at least `act.count()`
    /// - `dst`: `act.count()` rows of N
    ///
    /// # Errors
    /// `DeviceLost` after an earlier error, else `Vendor` or `OutOfMemory` for the one that has just happened.
    pub fn mul_mat(
        &self,
        memory: &WeightMemory,
        weights: &Weights,
        slice: usize,
        act: Rows<f32>,
        bucket: usize,
        dst: RowsMut,
    ) -> Result<()> {
        // A panic under the lock is caught at the C border; after it, buffers may hold half a call.
        let Ok(mut state) = self.state.lock() else {
            return Err(Error::DeviceLost { device: NAME });
        };
        if self.is_lost() {
            return Err(Error::DeviceLost { device: NAME });
        }
        let result = memory
            .flush()
            .and_then(|()| self.run(&mut state, weights, slice, act, bucket, dst));
        if result.is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
        result
    }

    fn run(
        &self,
        state: &mut State,
        weights: &Weights,
        slice: usize,
        act: Rows<f32>,
        bucket: usize,
        mut dst: RowsMut,
    ) -> Result<()> {
        let layout = &weights.layout;
        state
            .activations
            .pack(&self.anchor, &self.threads, layout, act, bucket)?;

        let State { activations, cores } = state;
        let mut shares: Vec<_> = cores
            .iter_mut()
            .enumerate()
            .map(|(index, core)| {
                let first = (index * layout.chunks_per_core).min(layout.chunks);
                let chunks = first..(first + layout.chunks_per_core).min(layout.chunks);
                let width = chunks
                    .clone()
                    .map(|chunk| layout.chunk_rows(chunk).len())
                    .sum();
                (core, chunks, dst.split_columns(width), Ok(()))
            })
            .filter(|(_, chunks, ..)| !chunks.is_empty())
            .collect();
        let compute = |(core, chunks, dst, result): &mut (
            &mut Core,
            std::ops::Range<usize>,
            _,
            Result<()>,
        )| {
            let call = Call {
                anchor: &self.anchor,
                rknn: &self.rknn,
                weights,
                slice,
                activations,
                rows: act.count(),
                bucket,
            };
            *result = core.run_chunks(&call, chunks.clone(), dst);
        };
        match shares.as_mut_slice() {
            [] => {}
            [only] => compute(only),
            [first, rest @ ..] => self.threads.in_place_scope(|scope| {
                for share in rest {
                    scope.spawn(|_| compute(share));
                }
                compute(first);
            }),
        }
        shares.into_iter().try_for_each(|(.., result)| result)
    }
}

impl Activations {
    /// Steps 1 and 2 of the module's picture.
    fn pack(
        &mut self,
        anchor: &Arc<Context>,
        threads: &rayon::ThreadPool,
        layout: &WeightLayout,
        act: Rows<f32>,
        bucket: usize,
    ) -> Result<()> {
        let Self {
            int8,
            fp16,
            work,
            scales,
            native,
        } = self;
        scales.clear();
        scales.resize(act.count(), 0.0);
        match layout.precision {
            Precision::Int8 => {
                let block = layout.hadamard_block();
                let quantize = |m: usize, work: &mut Vec<f32>, out: &mut [i8], scale: &mut f32| {
                    work.resize(layout.k, 0.0);
                    pack::quantize_rows_i8(
                        act.rows(m..m + 1),
                        block,
                        work,
                        out,
                        std::slice::from_mut(scale),
                    );
                };
                let rows = each_row(threads, layout.k, int8, scales, work, quantize);
                interleave(native, anchor, threads, layout, rows, bucket)
            }
            Precision::Fp16 => {
                let convert = |m: usize, _: &mut Vec<f32>, out: &mut [f16], factor: &mut f32| {
                    pack::convert_rows_f16(act.rows(m..m + 1), out, std::slice::from_mut(factor));
                };
                let rows = each_row(threads, layout.k, fp16, scales, work, convert);
                interleave(native, anchor, threads, layout, rows, bucket)
            }
        }
    }
}

/// Step 1: fills `out` row by row with `fill(m, scratch, row, scale)`, on several threads if there are many rows.
fn each_row<'a, T: Copy + Default + Send>(
    threads: &rayon::ThreadPool,
    k: usize,
    out: &'a mut Vec<T>,
    scales: &mut [f32],
    work: &mut Vec<f32>,
    fill: impl Fn(usize, &mut Vec<f32>, &mut [T], &mut f32) + Sync,
) -> Rows<'a, T> {
    let count = scales.len();
    out.resize(count * k, T::default());
    if count < PARALLEL_ROWS {
        for (m, (row, scale)) in out.chunks_exact_mut(k).zip(scales).enumerate() {
            fill(m, work, row, scale);
        }
    } else {
        let rows = out
            .par_chunks_exact_mut(k)
            .zip(scales.par_iter_mut())
            .enumerate();
        threads.install(|| {
            rows.for_each_init(Vec::new, |work, (m, (row, scale))| {
                fill(m, work, row, scale)
            })
        });
    }
    Rows::new(out, count, k, k)
}

/// Surfaces of native A that one thread fills at a time.
const SURFACES_PER_TASK: usize = 8;

/// Step 2: row-major rows into the native A of each segment of K.
fn interleave<T: Copy + Default + Send + Sync + bytemuck::Pod>(
    native: &mut Scratch,
    anchor: &Arc<Context>,
    threads: &rayon::ThreadPool,
    layout: &WeightLayout,
    rows: Rows<T>,
    bucket: usize,
) -> Result<()> {
    let a = layout.native.a;
    for segment in 0..layout.segments {
        let bytes = a.bytes(bucket, layout.segment_k);
        let memory = native.reserve(anchor, segment, bytes)?;
        let out: &mut [T] = bytemuck::cast_slice_mut(&mut memory.bytes_mut()[..bytes]);
        let start = (segment * layout.segment_k).min(layout.k);
        let columns = rows.columns(start..(start + layout.segment_k).min(layout.k));
        if bucket < PARALLEL_ROWS {
            pack::interleave_a(columns, a, bucket, out);
        } else {
            let step = SURFACES_PER_TASK * a.s;
            let tasks = out.par_chunks_mut(step * bucket).enumerate();
            threads.install(|| {
                tasks.for_each(|(task, out)| {
                    let range = (task * step).min(columns.row_len())
                        ..((task + 1) * step).min(columns.row_len());
                    pack::interleave_a(columns.columns(range), a, bucket, out);
                });
            });
        }
        memory.sync_to_device()?;
    }
    Ok(())
}

/// What all cores share in one call.
struct Call<'a> {
    anchor: &'a Arc<Context>,
    rknn: &'a Arc<Rknn>,
    weights: &'a Weights,
    slice: usize,
    activations: &'a Activations,
    /// Rows with content, and M of the contexts.
    rows: usize,
    bucket: usize,
}

impl Core {
    /// Steps 3 and 4 for the chunks of this core, which are the columns of `dst`.
    fn run_chunks(
        &mut self,
        call: &Call,
        chunks: std::ops::Range<usize>,
        dst: &mut RowsMut,
    ) -> Result<()> {
        let layout = &call.weights.layout;
        let a_bytes = layout.native.a.bytes(call.bucket, layout.segment_k);
        let c_bytes = layout.native.c.bytes(call.bucket, layout.chunk_n);
        for chunk in chunks {
            for segment in 0..layout.segments {
                self.context(call)?;
                let c = self.results.reserve(call.anchor, segment, c_bytes)?;
                let a = call.activations.native.get(segment, a_bytes);
                let b = &call.weights.blocks[layout.block(call.slice, chunk, segment)];
                // PANIC: made in the line above; looked up again because the results are borrowed too.
                let context = self
                    .contexts
                    .get_mut(&call.shape())
                    .expect("the context was just made");
                context.run(Operands { a, b, c })?;
                c.sync_from_device()?;
            }
            let columns = layout.chunk_rows(chunk).len();
            self.unpack(call, chunk, c_bytes, &mut dst.split_columns(columns));
        }
        Ok(())
    }

    /// The context for the call's shape, made if need be.
    fn context(&mut self, call: &Call) -> Result<()> {
        let shape = call.shape();
        if self.contexts.contains_key(&shape) {
            return Ok(());
        }
        if self.contexts.len() >= MAX_CONTEXTS_PER_CORE {
            self.contexts.clear();
        }
        let [m, k, n] =
            [shape.m, shape.k, shape.n].map(|size| i32::try_from(size).unwrap_or(i32::MAX));
        let info = MatmulInfo::native(shape.precision.matmul_type(), m, k, n);
        self.contexts
            .insert(shape, Context::new(call.rknn, info, self.mask)?);
        Ok(())
    }

    /// Step 4: sums the segments of a chunk and scales them into the columns of `dst`.
    fn unpack(&self, call: &Call, chunk: usize, c_bytes: usize, dst: &mut RowsMut) {
        let layout = &call.weights.layout;
        let segments = 0..layout.segments;
        let bytes = |segment| &self.results.get(segment, c_bytes).bytes()[..c_bytes];
        let (c, scales) = (layout.native.c, &call.activations.scales);
        match layout.precision {
            Precision::Int8 => {
                let mut parts: [&[i32]; MAX_SEGMENTS] = [&[]; MAX_SEGMENTS];
                segments
                    .clone()
                    .for_each(|segment| parts[segment] = bytemuck::cast_slice(bytes(segment)));
                let rows = layout.chunk_rows(chunk).len();
                let w_scales = &call.weights.scales[layout.chunk_scales(call.slice, chunk)][..rows];
                let output = NativeOutput::new(&parts[segments], c, call.bucket);
                pack::unpack_i32(output, 0..call.rows, scales, w_scales, dst);
            }
            Precision::Fp16 => {
                let mut parts: [&[f32]; MAX_SEGMENTS] = [&[]; MAX_SEGMENTS];
                segments
                    .clone()
                    .for_each(|segment| parts[segment] = bytemuck::cast_slice(bytes(segment)));
                let output = NativeOutput::new(&parts[segments], c, call.bucket);
                pack::unpack_f32(
                    output,
                    0..call.rows,
                    scales,
                    layout.chunk_rows(chunk).len(),
                    dst,
                );
            }
        }
    }
}

impl Call<'_> {
    fn shape(&self) -> CallShape {
        let layout = &self.weights.layout;
        CallShape {
            precision: layout.precision,
            m: self.bucket,
            k: layout.segment_k,
            n: layout.chunk_n,
        }
    }
}
