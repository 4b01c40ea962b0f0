//! Joins plan and device: finds devices, keeps weight buffers, computes graphs.

use std::path::Path;
use std::sync::Arc;

use rknpu_ops::sim;

use crate::caps::{self, RkCaps};
use crate::config::Config;
use crate::device::rknpu::{self, RkNpu};
use crate::error::Result;
use crate::graph::{Op, Tensor};
use crate::plan;
use crate::selftest;
use crate::vendor::rknn::Rknn;

pub use self::buffer::{PACKED_ALIGN_BYTES, WeightBuffer};

mod buffer;
mod compute;

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
        let device = Self::untested(rknn, caps)?;
        selftest::run(&device.npu)?;
        Ok(device)
    }

    /// Opens an NPU without a test of what it computes: for benchmarks with a stand-in that computes nothing.
    ///
    /// # Errors
    /// As [`RkNpu::open`].
    pub fn untested(rknn: Arc<Rknn>, caps: &'static RkCaps) -> Result<Self> {
        let npu = RkNpu::open(rknn, caps)?;
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

    /// Whether the device computes an operation. Metadata only.
    #[must_use]
    pub fn supports(&self, op: Op, dst: &Tensor, src: &[Tensor]) -> bool {
        let plan = plan::question(self.npu.caps(), op, dst, src);
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
