//! Joins plan and device: finds devices, keeps weight buffers, computes graphs.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use rknpu_ops::sim;

use crate::caps::{self, RkCaps};
use crate::config::Config;
use crate::device::rknpu::{self, RkNpu, WeightMemory, Weights};
use crate::error::{Error, Result};
use crate::graph::{Node, Op, Tensor};
use crate::plan::{self, MulMat};
use crate::repack::Source;
use crate::selftest;
use crate::vendor::rknn::Rknn;

pub use self::buffer::{PACKED_ALIGN_BYTES, WeightBuffer};

mod buffer;

/// Where the kernel says which board this is.
const DEVICE_TREE: &str = "/proc/device-tree/compatible";

/// A device as ggml sees it.
#[derive(Debug)]
pub struct Device {
    npu: RkNpu,
}

/// Finds the devices that `config` asks for or that the machine has. A device that cannot start is left out, with one
/// log line that says why.
#[must_use]
pub fn find_devices(config: &Config) -> Vec<Arc<Device>> {
    let opened = match (config.sim, config.chip.or_else(chip_of_this_machine)) {
        (Some(caps), _) => simulate(caps, config),
        (None, Some(caps)) => Rknn::load(config.rknn_lib.as_deref()).map(|rknn| (rknn, caps)),
        (None, None) => {
            log::debug!("no NPU: {DEVICE_TREE} names no Rockchip chip with one");
            return Vec::new();
        }
    };
    if let Some(keep) = &config.devices
        && !keep
            .iter()
            .any(|name| name.eq_ignore_ascii_case(rknpu::NAME))
    {
        log::info!(
            "{} is left out: GGML_RUST_NPU_DEVICES={}",
            rknpu::NAME,
            keep.join(",")
        );
        return Vec::new();
    }
    match opened.and_then(|(rknn, caps)| Device::start(rknn, caps)) {
        Ok(device) => {
            log::info!("{}: {}", rknpu::NAME, device.description());
            vec![Arc::new(device)]
        }
        Err(error) => {
            log::error!("{} is not available: {error}", rknpu::NAME);
            Vec::new()
        }
    }
}

fn simulate(caps: &'static RkCaps, config: &Config) -> Result<(Arc<Rknn>, &'static RkCaps)> {
    let mut options = sim::Options::new(caps.soc);
    options.faults.clone_from(&config.faults);
    options.coherence = config.coherence;
    if let Some(version) = &config.sim_api_version {
        options.api_version.clone_from(version);
    }
    Ok((Rknn::simulate(options)?, caps))
}

fn chip_of_this_machine() -> Option<&'static RkCaps> {
    caps::rockchip_by_compatible(&std::fs::read_to_string(Path::new(DEVICE_TREE)).ok()?)
}

impl Device {
    /// Opens and tests an NPU.
    ///
    /// # Errors
    /// As [`RkNpu::open`]; `SelfTest` if it computes something wrong.
    pub fn start(rknn: Arc<Rknn>, caps: &'static RkCaps) -> Result<Self> {
        let npu = RkNpu::open(rknn, caps)?;
        selftest::run(&npu)?;
        Ok(Self { npu })
    }

    /// Chip, library and driver, in one line.
    #[must_use]
    pub fn description(&self) -> String {
        let (library, driver) = self.npu.versions();
        let library = library.split_whitespace().next().unwrap_or("?");
        let chip = self.npu.caps().soc.name().to_uppercase();
        let simulated = if self.npu.is_simulated() {
            " (simulated)"
        } else {
            ""
        };
        format!("Rockchip {chip} NPU, librknnrt {library}, driver {driver}{simulated}")
    }

    /// Whether the device computes `dst = src1 · src0`. Metadata only.
    #[must_use]
    pub fn supports(&self, op: Op, dst: &Tensor, src0: &Tensor, src1: &Tensor) -> bool {
        if op != Op::MulMat {
            return false;
        }
        let plan = plan::question(self.npu.caps(), dst, src0, src1);
        if let Err(reason) = plan {
            log::trace!("{} stays on the CPU: {reason}", dst.name);
        }
        plan.is_ok()
    }

    /// Bytes that a tensor takes in a buffer for packed weights: its own, or those of its packed form if that is
    /// larger.
    #[must_use]
    pub fn packed_bytes(&self, tensor: &Tensor) -> usize {
        let plain = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
        plan::weight_layout(self.npu.caps(), tensor)
            .map_or(plain, |layout| layout.bytes().max(plain))
    }

    /// Computes one node.
    ///
    /// - `buffer`: where src0 is, if in one of our buffers
    ///
    /// # Errors
    /// `Graph` if the node is not one that [`Device::supports`] said yes to; else the device's error.
    pub fn compute(&self, node: &mut Node, buffer: Option<&WeightBuffer>) -> Result<()> {
        let (index, name) = (node.index, node.dst.name);
        let refuse = |reason: &str| Error::Graph {
            node: index,
            name: name.into(),
            reason: reason.into(),
        };
        if node.op != Op::MulMat {
            return Err(refuse("operation is not supported"));
        }
        let command =
            plan::mul_mat(self.npu.caps(), &node.dst, &node.src0, &node.src1).map_err(refuse)?;
        if let Some(buffer) = buffer {
            let contents = buffer.contents();
            if let Some(weights) = contents.find(&node.src0) {
                return self.mul_mat(&command, &buffer.memory, weights, node);
            }
        }
        // Not packed before, so for this call only.
        let memory = self.npu.allocate(command.weights.bytes())?;
        let mut weights = memory.place(command.weights, 0)?;
        let rows = gather_rows(&node.src0).ok_or_else(|| refuse("weights have no memory"))?;
        let source = Source {
            dtype: node.src0.dtype,
            rows: &rows,
            dequantize: node.src0.dequantize,
        };
        memory.pack(
            &mut weights,
            0,
            source,
            0..command.weights.n * command.weights.slices,
        );
        self.mul_mat(&command, &memory, &weights, node)
    }

    fn mul_mat(
        &self,
        command: &MulMat,
        memory: &WeightMemory,
        weights: &Weights,
        node: &mut Node,
    ) -> Result<()> {
        let Node {
            dst,
            out,
            src0,
            src1,
            ..
        } = node;
        let Some(act) = src1.memory else {
            let reason = "activations have no memory".into();
            return Err(Error::Graph {
                node: node.index,
                name: dst.name.into(),
                reason,
            });
        };
        let ([k, ..], nb) = (src1.shape.ne, src1.shape.nb);
        let mut converted = Vec::new();
        for i3 in 0..command.planes[1] {
            for i2 in 0..command.planes[0] {
                let slice = command.slice(src0.shape.ne[2], i2, i3);
                for piece in plan::m_pieces(command.m) {
                    let from = piece.first * nb[1] + i2 * nb[2] + i3 * nb[3];
                    let to =
                        piece.first * dst.shape.nb[1] + i2 * dst.shape.nb[2] + i3 * dst.shape.nb[3];
                    let rows = act.rows(from, src1.dtype, [piece.rows, k], nb[1], &mut converted);
                    let columns = out.rows(to, [piece.rows, dst.shape.ne[0]], dst.shape.nb[1]);
                    self.npu
                        .mul_mat(memory, weights, slice, rows, piece.bucket, columns)?;
                }
            }
        }
        Ok(())
    }
}

/// All rows of a weight, one after another: in place if they are, else copied.
fn gather_rows<'a>(weights: &Tensor<'a>) -> Option<Cow<'a, [u8]>> {
    let (memory, shape) = (weights.memory?, weights.shape);
    let row_bytes = weights.dtype.row_bytes(shape.ne[0])?;
    if shape.is_contiguous(weights.dtype) {
        return Some(Cow::Borrowed(memory.bytes(0, row_bytes * shape.rows())));
    }
    let mut rows = Vec::with_capacity(row_bytes * shape.rows());
    for i3 in 0..shape.ne[3] {
        for i2 in 0..shape.ne[2] {
            for i1 in 0..shape.ne[1] {
                let start = i1 * shape.nb[1] + i2 * shape.nb[2] + i3 * shape.nb[3];
                rows.extend_from_slice(memory.bytes(start, row_bytes));
            }
        }
    }
    Some(Cow::Owned(rows))
}

/// Free and total bytes of the system's memory; 0 where the kernel does not tell.
#[must_use]
pub fn system_memory() -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace()
            .next()?
            .parse::<usize>()
            .ok()
            .map(|kib| kib * 1024)
    };
    (
        field("MemAvailable:").unwrap_or(0),
        field("MemTotal:").unwrap_or(0),
    )
}
