//! The system's memory that weights of a Rockchip device use, and which of ggml's bytes are kept.

use super::super::RkDevice;
use super::super::device::NAME;
use super::super::plan::{self, Keep};
use crate::backend::{Device, Share};
use crate::graph::Tensor;
use crate::host_memory::system_memory;

impl RkDevice {
    /// Returns the free and total bytes for buffers of weights: the device's share of the system's
    /// memory, as far as the NPU's address spaces reach, and half of it if each weight is kept in
    /// both forms.
    #[must_use]
    pub(in crate::rockchip) fn weight_memory(&self, (free, total): Share) -> Share {
        let (free_space, space) = self.npu.address_space();
        let copies = if self.target.keeps_all() { 2 } else { 1 };
        ((free / copies).min(free_space), (total / copies).min(space))
    }

    /// Returns the memory of a weight in bytes: its part of a buffer, and its bytes in ggml's
    /// layout if these are kept.
    #[must_use]
    pub fn resident_bytes(&self, tensor: &Tensor) -> usize {
        let ggml_bytes = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
        let kept = match plan::weight_layout(&self.target, tensor) {
            Some(_) if plan::keep(&self.target, tensor) == Keep::Never => 0,
            _ => ggml_bytes,
        };
        self.packed_bytes(tensor) + kept
    }

    /// Returns `true` if the bytes of a packed weight stay, for the CPU or for reading. Bytes with
    /// which the CPU would only be faster stay as long as an eighth of the system's memory is free.
    pub(super) fn keeps(&self, weights: &Tensor) -> bool {
        match plan::keep(&self.target, weights) {
            Keep::Always => true,
            Keep::Never => false,
            Keep::IfThereIsRoom => self.keeps_with(weights, system_memory()),
        }
    }

    /// As [`RkDevice::keeps`], for narrow weights, with the system's free and total memory.
    fn keeps_with(&self, weights: &Tensor, (free, total): (usize, usize)) -> bool {
        let has_room = free >= total / 8;
        let (name, chip, narrow) = (weights.name, NAME, self.target.min_m_narrow);
        let [kept, released] = &self.kept_logged;
        if has_room {
            kept.call_once(|| {
                log::info!(
                    "{chip}: weights that packing makes larger ({name} is the first) stay in memory as they are, and the \
                     CPU multiplies fewer than {narrow} rows with them; GGML_RUST_NPU_MIN_M=1 has the NPU do it"
                );
            });
        } else {
            released.call_once(|| {
                log::info!(
                    "{chip}: no memory to keep {name} as it is for the CPU: the NPU multiplies all rows with weights that are loaded now"
                );
            });
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Op, Operation, PARAMS, Place, Role, sources};
    use crate::rockchip::caps;
    use crate::rockchip::driver::Rknn;
    use crate::rockchip::plan::Target;
    use crate::tensor::{DType, Shape};
    use rknpu_ops::sim;

    #[test]
    fn narrow_weights_are_kept_while_there_is_room() {
        let rknn = Rknn::simulate(sim::Options::new(caps::RK3588.soc)).unwrap();
        let target = Target {
            min_m_narrow: 32,
            ..Target::from(&caps::RK3588)
        };
        let device = RkDevice::untested(rknn, target).unwrap();
        let tensor = |dtype: DType, ne: [usize; 4]| {
            let row = dtype.row_bytes(ne[0]).unwrap();
            let nb = [dtype.step_bytes().unwrap(), row, row * ne[1], row * ne[1]];
            Tensor {
                name: "blk.0.ffn_up.weight",
                dtype,
                format: None,
                shape: Shape { ne, nb },
                place: Place::Host,
                memory: None,
                packed_offset: 0,
                role: Role::State,
                dequantize: None,
            }
        };
        let q4_0 = DType::Quantized {
            block_elems: 32,
            block_bytes: 18,
        };
        let weights = Tensor {
            place: Place::Packed,
            ..tensor(q4_0, [4096, 4096, 1, 1])
        };
        let act = tensor(DType::F32, [4096, 1, 1, 1]);
        let decode = Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst: act,
            src: sources(&[weights, act]),
        };
        let size = weights.shape.span_bytes(q4_0).unwrap();
        assert_eq!(
            device.resident_bytes(&weights),
            device.packed_bytes(&weights) + size
        );
        for (free, is_kept) in [(100, true), (99, false), (100, true)] {
            assert_eq!(device.keeps_with(&weights, (free, 800)), is_kept, "{free}");
        }
        // The CPU computes with weights whose ggml bytes are still there.
        assert!(device.prefers_cpu(&decode));
    }
}
