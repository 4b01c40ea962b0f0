//! The modelled cost of a command for the DSP: packets, bytes to and from memory, and tile products
//! of the matrix unit. Kernels were counted under an emulator; nothing here was measured on a
//! device.

use std::ops::AddAssign;

use hexagon_ops::layout::{F16_TILE_BYTES, TILE_DIM, WeightType};
use hexagon_ops::ops::matmul::{Dots, GemmPlan};
use hexagon_ops::serve;
use hexagon_ops::wire;

use super::super::layout::WeightLayout;
use super::Command;
use crate::config::ActivationBits;
use crate::hexagon::caps::HexRates;

/// Modelled cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Packets of the kernels that read the weights: dot products, or dequantizing and the other
    /// work for a tile on the matrix unit.
    pub weight_packets: f64,
    /// Bytes of weights that come from memory.
    pub weight_bytes: u64,
    /// Packets of other kernels, as far as they have been counted.
    pub other_packets: f64,
    /// Bytes of other operands and of results.
    pub other_bytes: u64,
    /// Products of two tiles on the matrix unit.
    pub tile_products: u64,
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.weight_packets += other.weight_packets;
        self.weight_bytes += other.weight_bytes;
        self.other_packets += other.other_packets;
        self.other_bytes += other.other_bytes;
        self.tile_products += other.tile_products;
    }
}

impl Cost {
    /// Returns the microseconds on `threads` HVX threads: memory, vector units and matrix unit work
    /// at the same time, so the slowest determines the cost.
    #[must_use]
    pub fn microseconds(&self, rates: &HexRates, threads: u32) -> f64 {
        let [memory, vector, matrix] = self.unit_microseconds(rates, threads);
        memory.max(vector).max(matrix)
    }

    /// Returns the microseconds of memory, vector units and matrix unit.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn unit_microseconds(&self, rates: &HexRates, threads: u32) -> [f64; 3] {
        let memory = (self.weight_bytes + self.other_bytes) as f64 / (1e3 * rates.dma_gb_per_s);
        let packets = self.weight_packets + self.other_packets;
        let vector = packets / (rates.packets_per_us * f64::from(threads.max(1)));
        let operations = self.tile_products as f64 * 2.0 * (TILE_DIM * TILE_DIM * TILE_DIM) as f64;
        let matrix = operations / (1e3 * rates.hmx_gflops);
        [memory, vector, matrix]
    }
}

/// Packets per 32 × 32 tile of weights.
struct Packets {
    /// Dot products with one row (strips two by two), and with two rows.
    dots: [f64; Dots::MOST_ROWS],
    /// Dequantizing.
    dequantize: f64,
}

impl Packets {
    /// Returns the packets of a product on the matrix unit.
    fn on_tiles(&self) -> f64 {
        self.dequantize + PACKETS_BESIDE_TILE
    }
}

// SOURCE: hexagon-ops/tests/packets.txt, `gemv_2x1`, `gemv_1x2` and `dequantize` of v68, v73 and
// v79. F16 weights go to the matrix unit as they are.
fn packets(arch: u32, weight: WeightType) -> Packets {
    let [one_row, two_rows, dequantize] = match (weight, arch) {
        (WeightType::F16, _) => [0.0, 0.0, 0.0],
        (WeightType::Q4_0, ..73) => [12.25, 23.06, 30.47],
        (WeightType::Q4_0, 73..79) => [8.75, 16.75, 18.47],
        (WeightType::Q4_0, 79..) => [8.55, 17.66, 27.44],
        (WeightType::Q4_1, ..73) => [14.14, 24.63, 38.22],
        (WeightType::Q4_1, 73..79) => [9.08, 18.72, 21.38],
        (WeightType::Q4_1, 79..) => [9.83, 17.19, 36.66],
        (WeightType::Q8_0, ..73) => [12.98, 21.22, 104.81],
        (WeightType::Q8_0, 73..79) => [9.8, 16.16, 21.72],
        (WeightType::Q8_0, 79..) => [10.19, 16.09, 34.22],
        (WeightType::Iq4Nl, ..73) => [15.8, 24.19, 30.5],
        (WeightType::Iq4Nl, 73..79) => [10.84, 17.84, 18.5],
        (WeightType::Iq4Nl, 79..) => [10.52, 19.66, 27.47],
        (WeightType::Mxfp4, ..73) => [18.81, 28.53, 35.16],
        (WeightType::Mxfp4, 73..79) => [13.19, 19.59, 24.38],
        (WeightType::Mxfp4, 79..) => [13.91, 21.38, 31.63],
        (WeightType::Q4K, ..73) => [27.09, 35.72, 47.5],
        (WeightType::Q4K, 73..79) => [11.98, 20.28, 24.31],
        (WeightType::Q4K, 79..) => [12.95, 21.09, 38.56],
        (WeightType::Q5_0, ..73) => [17.66, 33.72, 37.53],
        (WeightType::Q5_0, 73..79) => [12.42, 21.88, 25.97],
        (WeightType::Q5_0, 79..) => [13.08, 24.53, 33.5],
        (WeightType::Q6K, ..73) => [22.69, 38.34, 129.03],
        (WeightType::Q6K, 73..79) => [16.75, 30.03, 35.38],
        (WeightType::Q6K, 79..) => [17.19, 29.97, 47.84],
        (WeightType::Q5_1, ..73) => [19.84, 39.44, 43.72],
        (WeightType::Q5_1, 73..79) => [13.0, 33.13, 31.09],
        (WeightType::Q5_1, 79..) => [16.41, 32.56, 40.72],
        (WeightType::Q5K, ..73) => [31.03, 61.81, 54.81],
        (WeightType::Q5K, 73..79) => [15.61, 37.06, 33.56],
        (WeightType::Q5K, 79..) => [18.41, 36.56, 43.69],
        (WeightType::Iq4Xs, ..73) => [25.17, 31.22, 36.06],
        (WeightType::Iq4Xs, 73..79) => [13.39, 20.88, 21.13],
        (WeightType::Iq4Xs, 79..) => [13.7, 20.5, 30.44],
        (WeightType::Q3K, ..73) => [25.2, 38.88, 41.72],
        (WeightType::Q3K, 73..79) => [15.58, 30.41, 23.41],
        (WeightType::Q3K, 79..) => [18.17, 31.19, 36.0],
        (WeightType::Q2K, ..73) => [24.16, 45.09, 48.19],
        (WeightType::Q2K, 73..79) => [14.92, 34.38, 25.25],
        (WeightType::Q2K, 79..) => [19.39, 32.31, 48.19],
        // Without a dot product every product is one of tiles.
        (WeightType::Q4Tile, ..73) => [0.0, 0.0, 38.25],
        (WeightType::Q4Tile, 73..79) => [0.0, 0.0, 20.59],
        (WeightType::Q4Tile, 79..) => [0.0, 0.0, 34.28],
        (WeightType::Q8Tile, ..73) => [0.0, 0.0, 127.22],
        (WeightType::Q8Tile, 73..79) => [0.0, 0.0, 26.09],
        (WeightType::Q8Tile, 79..) => [0.0, 0.0, 44.03],
    };
    Packets {
        dots: [one_row, two_rows],
        dequantize,
    }
}

/// Returns the packets of dot products of one or two rows of activations for a tile of weights.
#[must_use]
pub fn packets_of_dots(arch: u32, weight: WeightType, rows: usize) -> f64 {
    packets(arch, weight).dots[rows - 1]
}

/// Packets for each tile of weights that a product of few rows needs on the matrix unit in addition
/// to dequantizing: for activations, the unit and results. Dot products do not need them.
///
/// SOURCE: hexagon-ops/tests/packets.txt, `whole_mul_mat_q4_0_m4` less `dequantize_q4_0`, less the
/// same difference of `whole_mul_mat_q4_0_m2` and `gemv_1x2_q4_0`: 5.12 on v73, 5.27 on v79.
const PACKETS_BESIDE_TILE: f64 = 5.2;

/// Returns the products that dot products compute with this type of weights on `threads` threads:
/// those that need fewer packets than tiles on the matrix unit.
///
/// The matrix unit uses FP16 activations, so it also satisfies 16 bits. `Auto` means 16 bits if a
/// row of these is not slower than one of 8 bits at the device's `rates`.
#[must_use]
pub fn dots(
    arch: u32,
    rates: &HexRates,
    threads: u32,
    weight: WeightType,
    bits: ActivationBits,
) -> Dots {
    if !weight.has_dot_product() {
        return Dots::None;
    }
    let packets = packets(arch, weight);
    let (dots, on_tiles) = (packets.dots, packets.on_tiles());
    let of_8_bits = match dots.iter().take_while(|dots| **dots < on_tiles).count() {
        0 => Dots::None,
        1 => Dots::OneRow,
        _ => Dots::TwoRows,
    };
    let of_16_bits = if dots[1] < on_tiles {
        Dots::TwoDigits
    } else {
        Dots::None
    };
    // Products of more rows are rarer, and for three or more rows the matrix unit computes them in
    // either case.
    let is_free = || {
        let [wide, narrow] = [of_16_bits, of_8_bits]
            .map(|dots| tile(arch, weight, 1, dots).microseconds(rates, threads));
        wide <= narrow
    };
    match bits {
        ActivationBits::Eight => of_8_bits,
        ActivationBits::Sixteen => of_16_bits,
        ActivationBits::Auto if is_free() => of_16_bits,
        ActivationBits::Auto => of_8_bits,
    }
}

/// Returns the cost of up to 32 rows of activations with one tile of weights.
fn tile(arch: u32, weight: WeightType, rows: usize, dots: Dots) -> Cost {
    let packets = packets(arch, weight);
    let by_dots = weight.has_dot_product() && (1..=dots.rows()).contains(&rows);
    let weight_packets = match dots {
        _ if !by_dots => packets.on_tiles(),
        Dots::TwoDigits => packets.dots[1],
        _ => packets.dots[rows - 1],
    };
    let blocks = TILE_DIM * TILE_DIM / weight.block_elems();
    Cost {
        weight_packets,
        weight_bytes: (blocks * weight.block_bytes()) as u64,
        tile_products: u64::from(!by_dots),
        ..Cost::default()
    }
}

// SOURCE: hexagon-ops/tests/packets.txt; IEEE arithmetic (V73, V75), then qfloat.
const PACKETS_RMS_NORM: [f64; 2] = [0.784, 0.816];
const PACKETS_SWIGLU: [f64; 2] = [1.22, 1.448];
const PACKETS_ROPE: [f64; 2] = [1.241, 1.277];

/// Returns the packets per element of the result; `None` if they are not counted yet, so that only
/// memory has a cost.
///
/// SOURCE: hexagon-ops/tests/packets.txt, `rms_norm`, `swiglu` and `rope` of v73 and v79.
fn element_packets(arch: u32, kernel: u32) -> Option<f64> {
    let packets = match kernel {
        wire::KERNEL_RMS_NORM => PACKETS_RMS_NORM,
        wire::KERNEL_SWIGLU => PACKETS_SWIGLU,
        wire::KERNEL_ROPE | wire::KERNEL_ROPE_SET_ROWS => PACKETS_ROPE,
        _ => return None,
    };
    Some(of_arch(arch, packets))
}

/// Returns the figure of an architecture, of those for IEEE arithmetic and for qfloat.
fn of_arch(arch: u32, [ieee, qfloat]: [f64; 2]) -> f64 {
    if (73..79).contains(&arch) {
        ieee
    } else {
        qfloat
    }
}

/// Returns the elements of a tensor.
fn elems(tensor: &wire::Tensor) -> u64 {
    let ne = tensor.ne.iter().map(|ne| u64::from(*ne));
    ne.fold(1, u64::saturating_mul)
}

/// Returns the bytes of `elems` elements of a tensor, without gaps between them.
fn bytes_of(tensor: &wire::Tensor, elems: u64) -> u64 {
    let Some(kind) = serve::type_of(tensor.dtype) else {
        return 0;
    };
    (elems / kind.block() as u64).saturating_mul(kind.block_bytes() as u64)
}

/// Returns the cost of an operation on tensors: each operand is read or written once.
fn tensor(arch: u32, body: &wire::TensorOp) -> Cost {
    // Only the rows that are named by number are read or written.
    let most = match body.kernel {
        wire::KERNEL_GET_ROWS => elems(&body.dst),
        wire::KERNEL_SET_ROWS | wire::KERNEL_ROPE_SET_ROWS => elems(&body.src[0]),
        _ => u64::MAX,
    };
    let bytes = |tensor: &wire::Tensor| bytes_of(tensor, elems(tensor).min(most));
    // CAST: an estimate.
    #[expect(clippy::cast_precision_loss, reason = "see above")]
    let count = elems(&body.dst).min(most) as f64;
    Cost {
        other_packets: element_packets(arch, body.kernel).unwrap_or(0.0) * count,
        other_bytes: body.src.iter().chain([&body.dst]).map(bytes).sum(),
        ..Cost::default()
    }
}

/// Returns the cost of an operation with more sources: each operand is read or written once.
fn wide(body: &wire::WideOp) -> Cost {
    let tensors = body.src.iter().chain([&body.dst]);
    let bytes = tensors.map(|tensor| {
        let tensor = tensor.widen();
        bytes_of(&tensor, elems(&tensor))
    });
    Cost {
        other_bytes: bytes.sum(),
        ..Cost::default()
    }
}

/// Packets of an attention: [of a position of a head, with 64 elements of keys and values; of a
/// score].
struct AttentionPackets {
    position: [f64; 2],
    score: [f64; 2],
}

// SOURCE: hexagon-ops/tests/packets.txt, `attention_f16_*`. The difference between runs that differ
// by 32 rows is the cost of their scores; the remaining cost of a row is divided by positions.
const ON_TILES: AttentionPackets = AttentionPackets {
    position: [11.78, 12.03],
    score: [1.2, 1.43],
};
// SOURCE: the same, `attention_f32_*`, from one row to eight.
const BY_DOTS: AttentionPackets = AttentionPackets {
    position: [67.12, 66.99],
    score: [20.8, 21.35],
};
/// Query rows that share one read of keys and values by dot products.
const DOT_PASS_ROWS: u64 = 8;

/// Returns the cost of an attention: queries, keys and values are read once. It is computed on
/// tiles if FP16 holds keys and values.
fn attention(arch: u32, body: &wire::Attention) -> Cost {
    let heads = u64::from(body.k.ne[2]) * u64::from(body.q.ne[3]);
    let rows = elems(&body.q) / u64::from(body.q.ne[0]).max(1) / heads.max(1);
    let positions = u64::from(body.k.ne[1]);
    let tiles = |elems: u64| elems.div_ceil(TILE_DIM as u64);
    let depth = tiles(body.k.ne[0].into()) + tiles(body.v.ne[0].into());
    let on_tiles = [&body.k, &body.v]
        .iter()
        .all(|tensor| tensor.dtype != wire::TYPE_F32);
    let (counted, passes, tile_products) = match on_tiles {
        true => (ON_TILES, 1, heads * tiles(rows) * tiles(positions) * depth),
        false => (BY_DOTS, rows.div_ceil(DOT_PASS_ROWS), 0),
    };
    let [position, score] = [counted.position, counted.score].map(|of| of_arch(arch, of));
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    let packets = |position: f64, score: f64| {
        let heads_and_elems = (passes * depth) as f64 / 4.0 * position;
        (heads * positions) as f64 * (heads_and_elems + rows as f64 * score)
    };
    Cost {
        other_packets: packets(position, score),
        other_bytes: ([&body.q, &body.k, &body.v, &body.dst].into_iter())
            .map(|tensor| bytes_of(tensor, elems(tensor)))
            .sum(),
        tile_products,
        ..Cost::default()
    }
}

/// Returns the bytes that combining a product with the next operation saves: the product is neither
/// written nor read again.
#[must_use]
pub fn passed_on(body: &wire::MatMul) -> u64 {
    2 * u64::from(body.m) * u64::from(body.weights.n) * size_of::<f32>() as u64
}

/// Returns the cost of a command on architecture `arch` with `vtcm_bytes` of VTCM.
///
/// For a product with experts, the chosen experts are not known here. The cost is that of as many
/// different experts as possible.
#[must_use]
pub fn of(arch: u32, vtcm_bytes: usize, command: &Command) -> Cost {
    let (weights, matrices, rows, dots) = match command {
        Command::MulMat(body, weights) => {
            // Planes that share one weight matrix are one product, as if their rows followed one
            // another in memory.
            let rows = body.m as usize * body.planes[0] as usize * body.planes[1] as usize;
            let matrices = weights.count();
            (weights, matrices, rows / matrices.max(1), body.dots)
        }
        Command::MulMatId(body, weights) => {
            let rows = body.slots as usize * body.tokens as usize;
            let matrices = rows.min(weights.count());
            (weights, matrices, rows.div_ceil(matrices.max(1)), body.dots)
        }
        Command::Tensor(body) => return tensor(arch, body),
        Command::Wide(body) => return wide(body),
        Command::Attention(body) => return attention(arch, body),
    };
    let dots = Dots::from_number(dots).unwrap_or_default();
    let mut cost = matrix(arch, vtcm_bytes, weights, rows, dots);
    let (k, n) = (weights.matrix.panel().k(), weights.matrix.n());
    cost.other_bytes = (rows * (k + n) * size_of::<f32>()) as u64;
    // CAST: an estimate; numbers of matrices are small.
    #[expect(clippy::cast_precision_loss, reason = "see above")]
    let times = matrices as f64;
    cost.weight_packets *= times;
    cost.weight_bytes *= matrices as u64;
    cost.other_bytes *= matrices as u64;
    cost.tile_products *= matrices as u64;
    cost
}

/// Returns the cost of one matrix and `rows` rows of activations.
fn matrix(arch: u32, vtcm_bytes: usize, weights: &WeightLayout, rows: usize, dots: Dots) -> Cost {
    let (layout, weight) = (weights.matrix, weights.weight());
    let tiles = layout.k_tiles() * layout.n_strips();
    let of_tile = tile(arch, weight, rows, dots);
    let m_tiles = rows.div_ceil(32);
    // On the matrix unit, weights are read and dequantized once for each part of M that fits into
    // VTCM. Dot products read them once.
    let times = if of_tile.tile_products == 0 {
        1
    } else {
        let at_once = GemmPlan::new(layout, rows, vtcm_bytes / F16_TILE_BYTES)
            .map_or(m_tiles, |plan| plan.m_tiles);
        m_tiles.div_ceil(at_once.max(1))
    };
    // CAST: an estimate; tiles of a matrix are fewer than 2^52.
    #[expect(clippy::cast_precision_loss, reason = "see above")]
    let weight_packets = of_tile.weight_packets * (tiles * times) as f64;
    Cost {
        weight_packets,
        weight_bytes: (layout.matrix_bytes() * times) as u64,
        tile_products: of_tile.tile_products * (tiles * m_tiles) as u64,
        ..Cost::default()
    }
}

#[cfg(test)]
mod tests;
