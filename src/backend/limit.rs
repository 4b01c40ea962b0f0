//! What bounds a multiplication on a chip.

use super::AnyDevice;
use crate::graph::Tensor;
use crate::plan;
use crate::plan::hexagon::WeightLayout;

/// What a chip has to do for a multiplication, and how fast it could at best.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Bytes of the packed weights, which are read once.
    pub weight_bytes: usize,
    /// Bytes read in a nanosecond, by all cores.
    pub bytes_per_ns: f64,
    /// Operations in a nanosecond, by all cores, a multiplication and an addition being two.
    pub ops_per_ns: f64,
}

impl Limit {
    /// Nanoseconds that `ops` operations take at least: those of the weights' way, or of the arithmetic if that is
    /// longer.
    #[must_use]
    pub fn least_ns(&self, ops: f64) -> f64 {
        self.memory_ns().max(ops / self.ops_per_ns)
    }

    /// Nanoseconds of the weights' way.
    #[must_use]
    pub fn memory_ns(&self) -> f64 {
        self.weight_bytes as f64 / self.bytes_per_ns
    }
}

impl AnyDevice {
    /// The limit of multiplications with these weights; `None` if the device does not pack them.
    #[must_use]
    pub fn limit(&self, weights: &Tensor) -> Option<Limit> {
        match self {
            Self::Rockchip(device) => {
                let layout = plan::weight_layout(&device.target, weights)?;
                let (caps, precision) = (device.target.caps, layout.precision);
                let cores = caps.cores.count() as f64;
                let ops_per_ns = caps.cost.ops_per_ns(precision) / precision.rows() as f32;
                Some(Limit {
                    weight_bytes: layout.bytes(),
                    bytes_per_ns: f64::from(caps.cost.bytes_per_ns) * cores,
                    ops_per_ns: f64::from(ops_per_ns) * cores,
                })
            }
            Self::Hexagon(device) => {
                let caps = device.npu().caps();
                Some(Limit {
                    weight_bytes: WeightLayout::new(weights)?.bytes(),
                    bytes_per_ns: caps.rates.dma_gb_per_s,
                    ops_per_ns: caps.rates.hmx_gflops,
                })
            }
        }
    }
}
