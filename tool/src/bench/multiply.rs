//! One multiplication on a device, as llama.cpp would request it: weights are packed once,
//! activations and results are in the backend's usual memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ggml_rust_npu::backend::{Buffer, Buffers, Content, Device, Limit, Node, Stream};
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::host_memory::{Region, RegionMut};
use ggml_rust_npu::reference;
use ggml_rust_npu::tensor::{DType, Dequantize, Shape};
use half::f16;

use super::random;
use crate::ToolError;
use crate::power::PowerSource;
use crate::quantize::Format;

/// Number of runs that are not timed, in which memory is mapped and contexts are created.
const WARM_UP: usize = 2;
/// Numbers of runs. The least time counts, since other work only adds to a run's time.
const RUNS: std::ops::RangeInclusive<usize> = 3..=15;
/// After this time, the smaller number of runs is enough.
const ENOUGH: Duration = Duration::from_millis(500);

/// Largest normalized mean square error against FP32 of the same weights: that of calibrated INT4
/// weights, as in the self-test. A completely wrong result has 1.
const LIMIT: f64 = 4e-2;

/// Rows of weights that are random; the others repeat them.
const RANDOM_ROWS: usize = 32;

/// Time for which power is measured.
const POWER_TIME: Duration = Duration::from_secs(1);

/// Time and energy of a multiplication.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredCost {
    /// Least time of a run.
    pub time: Duration,
    /// Mean power while runs follow each other, and the energy of one, if there is a source.
    pub energy: Option<Energy>,
}

/// Power and energy of the whole system that a source measures.
#[derive(Clone, Copy, Debug)]
pub struct Energy {
    /// Mean power.
    pub watts: f64,
    /// Energy of a run.
    pub joules: f64,
}

/// Weights in a device's memory.
pub struct TimedWeights<'a> {
    device: &'a Arc<dyn Device>,
    stream: Box<dyn Stream>,
    buffer: Box<dyn Buffer>,
    dtype: GgmlType,
    k: usize,
    n: usize,
    /// Values of the first rows.
    values: Vec<f32>,
    way: Option<&'static dyn Dequantize>,
}

/// Reason why there is nothing to time.
pub enum Refused {
    /// The device leaves such multiplications to the CPU.
    NotIts,
    /// Something failed.
    Failed(ToolError),
}

impl<E: Into<ToolError>> From<E> for Refused {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl<'a> TimedWeights<'a> {
    /// Returns the random weights of `n` rows of `k`, packed.
    ///
    /// # Errors
    /// `NotIts`, or the device's.
    pub fn new(
        device: &'a Arc<dyn Device>,
        format: Format,
        k: usize,
        n: usize,
    ) -> Result<Self, Refused> {
        let dtype = format.dtype();
        let row_bytes = dtype.row_bytes(k).ok_or(Refused::NotIts)?;
        let n_random = RANDOM_ROWS.min(n);
        let mut rows = Vec::new();
        for row in random(1, n_random * k).chunks_exact(k) {
            format.quantize_row(row, None, &mut rows);
        }
        let way = dequantize::of(dtype);
        let mut values = vec![0.0; n_random * k];
        for (row, values) in rows.chunks_exact(row_bytes).zip(values.chunks_exact_mut(k)) {
            match way {
                Some(way) => way.dequantize(row, values),
                None => {
                    for (value, bytes) in values.iter_mut().zip(row.as_chunks().0) {
                        *value = f16::from_le_bytes(*bytes).to_f32();
                    }
                }
            }
        }
        let bytes: Vec<u8> = rows.iter().copied().cycle().take(n * row_bytes).collect();
        let weights = weights(dtype, way, k, n);
        let buffer = Arc::clone(device).allocate(device.packed_bytes(&weights), false)?;
        buffer.write(&weights, 0, bytes.len(), Content::Bytes(&bytes))?;
        Ok(Self {
            device,
            stream: Arc::clone(device).stream(),
            buffer,
            dtype,
            k,
            n,
            values,
            way,
        })
    }

    /// Returns the limit of the multiplication.
    pub fn limit(&self) -> Option<Limit> {
        self.device
            .limit(&weights(self.dtype, self.way, self.k, self.n))
    }

    /// Returns the cost of a multiplication with `m` rows of activations.
    ///
    /// # Errors
    /// `NotIts`, an error of the device, or a text if the result is wrong.
    pub fn time(&self, m: usize, power: Option<&PowerSource>) -> Result<MeasuredCost, Refused> {
        let act = random(2, m * self.k);
        let mut result = vec![0.0f32; m * self.n];
        let (act_bytes, result_bytes) = (size_of_val(&act[..]), size_of_val(&result[..]));
        let weights = weights(self.dtype, self.way, self.k, self.n);
        let is_host = self.device.buffers() == Buffers::HostAndPacked;
        let place = if is_host { Place::Host } else { Place::Device };
        let aligned = act_bytes.next_multiple_of(self.device.alignment());
        let act_tensor = Tensor {
            place,
            memory: is_host.then(|| Region::from(bytemuck::cast_slice(&act))),
            ..f32_tensor("act", [self.k, m], 0)
        };
        let operation = Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst: Tensor {
                place,
                role: Role::Result,
                ..f32_tensor("dst", [self.n, m], aligned)
            },
            src: sources(&[weights, act_tensor]),
        };
        if !self.device.supports(&operation) {
            return Err(Refused::NotIts);
        }
        // The CPU also uses this memory, as it uses llama.cpp's computed tensors.
        let work = (!is_host)
            .then(|| Arc::clone(self.device).allocate(aligned + result_bytes, true))
            .transpose()?;
        if let Some(work) = &work {
            let bytes = bytemuck::cast_slice(&act);
            work.write(&act_tensor, 0, act_bytes, Content::Bytes(bytes))?;
        }
        let work_buffer = work.as_deref();
        let mut buffers = [None; MAX_SOURCES];
        (buffers[0], buffers[1]) = (Some(&*self.buffer), work_buffer);
        let run = |result: &mut [f32]| -> Result<Duration, ToolError> {
            // Each run is a new graph, so that activations are packed each time.
            let mut node = [Node {
                operation,
                out: RegionMut::from(result),
                feeds_next: false,
                dst: work_buffer,
                src: buffers,
            }];
            let start = Instant::now();
            let computed = self.stream.submit(0, &mut node);
            computed.map_err(|failed| failed.error)?;
            Ok(start.elapsed())
        };
        for _ in 0..WARM_UP {
            run(&mut result)?;
        }
        let (start, mut least) = (Instant::now(), Duration::MAX);
        for count in 1..=*RUNS.end() {
            least = least.min(run(&mut result)?);
            if count >= *RUNS.start() && start.elapsed() > ENOUGH {
                break;
            }
        }
        let energy = power.map(|source| {
            let many = || {
                let (start, mut count) = (Instant::now(), 0.0);
                while start.elapsed() < POWER_TIME {
                    run(&mut result)?;
                    count += 1.0;
                }
                Ok(start.elapsed().as_secs_f64() / count)
            };
            let (seconds, watts) = source.mean_while(many)?;
            Ok::<_, ToolError>(Energy {
                watts,
                joules: watts * seconds,
            })
        });
        let energy = energy.transpose()?;
        if let Some(work) = &work {
            let bytes = bytemuck::cast_slice_mut(&mut result);
            work.read(&operation.dst, 0, bytes)?;
        }
        self.check(&act, &result)?;
        Ok(MeasuredCost {
            time: least,
            energy,
        })
    }

    /// Compares the first row of the result with the reference, because wrong results need not be
    /// timed.
    fn check(&self, act: &[f32], result: &[f32]) -> Result<(), ToolError> {
        let n = self.values.len() / self.k;
        let want = reference::mul_mat(&act[..self.k], &self.values, self.k);
        let error = reference::nmse(&result[..n], &want);
        if error <= LIMIT {
            return Ok(());
        }
        let (device, dtype, k) = (self.device.name(), self.dtype.name(), self.k);
        Err(format!(
            "{device} computes {dtype} of K={k} wrong: error {error:.2e}, at most {LIMIT:.0e}"
        )
        .into())
    }
}

fn weights(
    dtype: GgmlType,
    way: Option<&'static dyn Dequantize>,
    k: usize,
    n: usize,
) -> Tensor<'static> {
    let (elements, format) = dtype.tensor_type();
    Tensor {
        format,
        place: Place::Packed,
        role: Role::Weights,
        dequantize: way.map(|way| way as &dyn Dequantize),
        ..tensor("bench.weight", elements, [k, n], 0)
    }
}

fn f32_tensor(name: &str, ne: [usize; 2], offset: usize) -> Tensor<'_> {
    tensor(name, DType::F32, ne, offset)
}

/// Returns the rows that follow each other.
fn tensor(name: &str, dtype: DType, ne: [usize; 2], offset: usize) -> Tensor<'_> {
    let row = dtype.row_bytes(ne[0]).unwrap_or(0);
    Tensor {
        name,
        dtype,
        format: None,
        shape: Shape {
            ne: [ne[0], ne[1], 1, 1],
            nb: [
                dtype.step_bytes().unwrap_or(0),
                row,
                row * ne[1],
                row * ne[1],
            ],
        },
        place: Place::Host,
        role: Role::State,
        memory: None,
        packed_offset: offset,
        dequantize: None,
    }
}
