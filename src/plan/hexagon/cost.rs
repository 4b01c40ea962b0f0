//! What a command costs the DSP, as modelled: packets of the kernels that read the weights, bytes of weights, and tile
//! products of the matrix unit. Kernels were counted under an emulator; nothing here was measured on a device.

use std::ops::AddAssign;

use hexagon_ops::layout::{F16_TILE_BYTES, WeightType};
use hexagon_ops::ops::matmul::{GEMV_MAX_ROWS, GemmPlan};

use super::{Command, WeightLayout};

/// Modelled cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Packets of the kernels that read the weights: dot products, or dequantizing.
    pub weight_packets: f64,
    /// Bytes of weights that come from memory.
    pub weight_bytes: u64,
    /// Products of two tiles on the matrix unit.
    pub tile_products: u64,
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.weight_packets += other.weight_packets;
        self.weight_bytes += other.weight_bytes;
        self.tile_products += other.tile_products;
    }
}

/// Packets per 32 × 32 tile of weights.
struct Packets {
    /// Dot products with one row, strips two by two.
    one_row: f64,
    /// Dot products with two rows.
    two_rows: f64,
    /// Dequantizing.
    dequantize: f64,
}

// SOURCE: hexagon-ops/tests/packets.txt, `gemv_2x1`, `gemv_1x2` and `dequantize` of v73-ieee and v79-qfloat. F16 weights
// go to the matrix unit as they are.
fn packets(arch: u32, weight: WeightType) -> Packets {
    let [one_row, two_rows, dequantize] = match (weight, arch >= 79) {
        (WeightType::F16, _) => [0.0, 0.0, 0.0],
        (WeightType::Q4_0, false) => [9.88, 19.13, 21.09],
        (WeightType::Q4_0, true) => [10.91, 18.13, 30.22],
        (WeightType::Q4_1, false) => [10.66, 18.97, 24.25],
        (WeightType::Q4_1, true) => [11.11, 20.0, 46.25],
        (WeightType::Q8_0, false) => [9.88, 16.66, 25.06],
        (WeightType::Q8_0, true) => [11.06, 18.28, 36.13],
        (WeightType::Iq4Nl, false) => [11.36, 20.59, 21.09],
        (WeightType::Iq4Nl, true) => [10.94, 19.03, 30.22],
        (WeightType::Mxfp4, false) => [13.91, 23.91, 24.78],
        (WeightType::Mxfp4, true) => [15.25, 20.78, 34.5],
    };
    Packets {
        one_row,
        two_rows,
        dequantize,
    }
}

/// The cost of a command on architecture `arch` with `vtcm_bytes` of VTCM.
///
/// Which experts a multiplication with a choice of experts reads is not known here: as many different ones as it can.
#[must_use]
pub fn of(arch: u32, vtcm_bytes: usize, command: &Command) -> Cost {
    let (weights, matrices, rows) = match command {
        Command::MulMat(command) => {
            let planes = command.planes[0] * command.planes[1];
            (&command.weights, planes, command.m)
        }
        Command::MulMatId(command) => {
            let rows = command.slots * command.tokens;
            let matrices = rows.min(command.weights.count());
            (&command.weights, matrices, rows.div_ceil(matrices.max(1)))
        }
        Command::Tensor(_) => return Cost::default(),
    };
    let mut cost = matrix(arch, vtcm_bytes, weights, rows);
    // CAST: an estimate; numbers of matrices are small.
    #[expect(clippy::cast_precision_loss, reason = "see above")]
    let times = matrices as f64;
    cost.weight_packets *= times;
    cost.weight_bytes *= matrices as u64;
    cost.tile_products *= matrices as u64;
    cost
}

/// The cost of one matrix and `rows` rows of activations.
fn matrix(arch: u32, vtcm_bytes: usize, weights: &WeightLayout, rows: usize) -> Cost {
    let (layout, weight) = (weights.matrix, weights.weight());
    let tiles = layout.k_tiles() * layout.n_strips();
    let packets = packets(arch, weight);
    // CAST: an estimate; tiles of a matrix are fewer than 2^52.
    #[expect(clippy::cast_precision_loss, reason = "see above")]
    let per_tile = |packets: f64, times: usize| packets * tiles as f64 * times as f64;
    let bytes = layout.matrix_bytes() as u64;
    if rows <= GEMV_MAX_ROWS && weight != WeightType::F16 {
        let each = if rows == 1 {
            packets.one_row
        } else {
            packets.two_rows
        };
        return Cost {
            weight_packets: per_tile(each, 1),
            weight_bytes: bytes,
            tile_products: 0,
        };
    }
    let m_tiles = rows.div_ceil(32);
    // Weights are read and dequantized once for each part of M that fits into VTCM.
    let at_once = GemmPlan::new(layout, rows, vtcm_bytes / F16_TILE_BYTES)
        .map_or(m_tiles, |plan| plan.m_tiles);
    let times = m_tiles.div_ceil(at_once.max(1));
    Cost {
        weight_packets: per_tile(packets.dequantize, times),
        weight_bytes: bytes * times as u64,
        tile_products: (tiles * m_tiles) as u64,
    }
}

#[cfg(test)]
mod tests {
    use hexagon_ops::layout::MatrixLayout;

    use super::*;
    use crate::plan::hexagon::{Form, MulMat};

    #[test]
    fn weights_cost_the_same_from_three_rows_to_thirty_two() {
        let weights = WeightLayout {
            matrix: MatrixLayout::new(WeightType::Q4_0, 1536, 576).unwrap(),
            slices: [1, 1],
            form: Form::Lossless,
        };
        let cost = |m| {
            let command = Command::MulMat(MulMat {
                weights,
                m,
                planes: [1, 1],
            });
            of(75, 8 << 20, &command)
        };
        assert!((4..=32).all(|m| cost(m) == cost(3)));
        assert!(cost(1).weight_packets < cost(2).weight_packets);
        assert!(cost(2).weight_packets < cost(3).weight_packets);
        assert_eq!(cost(33).tile_products, 2 * cost(32).tile_products);
        assert_eq!(cost(33).weight_packets, cost(32).weight_packets);
        assert_eq!(cost(1).weight_bytes, (576 * 1536 / 32 * 18) as u64);
    }
}
