//! The time of a step on a Hexagon NPU.
//!
//! A command lasts as long as the longest of three things that a device does at the same time:
//! bytes from memory, packets of the vector threads, products of the matrix unit. At some rates,
//! the last two follow each other. Commands follow each other.

use std::ops::AddAssign;

use ggml_rust_npu::config::ActivationBits;
use ggml_rust_npu::hexagon::caps::{self, HexCaps};
use ggml_rust_npu::hexagon::plan::cost;
use hexagon_ops::layout::WeightType;
use hexagon_ops::ops::matmul::Dots;

use super::counts::{Counts, as_f64, line};
use super::published::Rates;
use super::shape::{ModelShape, WeightProduct};

/// Rows and columns of a tile.
const TILE: usize = 32;
/// Bytes of an element of a cache.
const CACHE_BYTES: usize = 2;

/// The tokens and caches of a step.
#[derive(Clone, Copy)]
pub struct StepWork {
    /// Tokens.
    pub rows: usize,
    /// Cells of a cache that each token attends to.
    pub cells: usize,
    /// Caches, each of which has its part of the tokens.
    pub caches: usize,
    /// The share of the scores that a mask does not hide.
    pub seen: f64,
    /// Tokens whose logits are wanted.
    pub logits: usize,
}

/// Work, and its duration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCost {
    /// Commands for the DSP.
    pub commands: usize,
    /// Microseconds.
    pub us: f64,
    /// Bytes of weights.
    pub weight_bytes: f64,
    /// Bytes of keys and values.
    pub cache_bytes: f64,
    /// Packets of the vector threads.
    pub packets: f64,
    /// Products of two tiles on the matrix unit.
    pub tile_products: f64,
}

impl AddAssign for StepCost {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.us += other.us;
        self.weight_bytes += other.weight_bytes;
        self.cache_bytes += other.cache_bytes;
        self.packets += other.packets;
        self.tile_products += other.tile_products;
    }
}

/// The rates of a chip, and the cost of each operation on its architecture.
pub struct Model {
    /// Counted packets.
    pub counts: Counts,
    /// Rates of the chip's parts.
    pub rates: Rates,
    /// Vector threads.
    pub threads: usize,
    /// The architecture, such as 75.
    pub arch: u32,
    /// The chip has a matrix unit; otherwise vector units compute its products.
    pub has_matrix: bool,
}

impl Model {
    /// Returns a chip at its own rates, with as many threads as vector units.
    pub fn of(caps: &HexCaps) -> Self {
        Self {
            counts: Counts::of_arch(caps.arch),
            rates: Rates {
                each: caps.rates,
                is_beside: caps.has_matrix,
            },
            threads: caps::VECTOR_UNITS as usize,
            arch: caps.arch,
            has_matrix: caps.has_matrix,
        }
    }

    /// Returns the microseconds that memory, vector threads and matrix unit would need alone.
    pub fn alone(&self, cost: &StepCost) -> [f64; 3] {
        let operations = cost.tile_products * 2.0 * as_f64(TILE * TILE * TILE);
        [
            (cost.weight_bytes + cost.cache_bytes) / (1e3 * self.rates.each.dma_gb_per_s),
            cost.packets / (self.rates.each.packets_per_us * as_f64(self.threads)),
            operations / (1e3 * self.rates.each.hmx_gflops),
        ]
    }

    fn command(&self, work: StepCost) -> StepCost {
        let [memory, vector, matrix] = self.alone(&work);
        let computing = if self.rates.is_beside {
            vector.max(matrix)
        } else {
            vector + matrix
        };
        StepCost {
            commands: 1,
            us: memory.max(computing),
            ..work
        }
    }

    /// Returns the cost of a command whose operands are in the cache.
    fn vectors(&self, packets: f64) -> StepCost {
        self.command(StepCost {
            packets,
            ..StepCost::default()
        })
    }

    /// Returns the products for which a device uses dot products, if no number of bits is set and
    /// no rates are measured.
    fn dots(&self, weight: WeightType) -> Dots {
        // CAST: a number of threads.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let threads = self.threads as u32;
        cost::dots(
            self.arch,
            &caps::FITTED,
            threads,
            weight,
            ActivationBits::Auto,
        )
    }

    fn product(&self, product: &WeightProduct, rows: usize) -> StepCost {
        let (experts, rows) = product.touched(rows);
        let dots = product
            .packed
            .map_or(Dots::None, |packed| self.dots(packed));
        let tiles = product.inputs.div_ceil(TILE) * product.outputs.div_ceil(TILE);
        let tiles = as_f64(tiles) * experts;
        let weight = product.weight;
        let bytes = as_f64(TILE * TILE * weight.block_bytes()) / as_f64(weight.block_elems());
        let on_matrix = if rows <= dots.rows() {
            0
        } else {
            rows.div_ceil(TILE)
        };
        if !self.has_matrix && on_matrix > 0 {
            return self.command(StepCost {
                packets: self.counts.on_vectors(weight, rows) * tiles,
                weight_bytes: bytes * tiles,
                ..StepCost::default()
            });
        }
        self.command(StepCost {
            packets: self.counts.per_tile(weight, rows, dots) * tiles,
            weight_bytes: bytes * tiles,
            tile_products: as_f64(on_matrix) * tiles,
            ..StepCost::default()
        })
    }

    /// Returns the packets of `elems` elements, interpolated between the counted sizes.
    fn between(&self, counted: &[(usize, &str)], elems: usize) -> f64 {
        let points = counted
            .iter()
            .map(|(size, name)| (as_f64(*size), self.counts.whole(name)));
        line(&points.collect::<Vec<_>>(), as_f64(elems))
    }

    /// Returns the cost of the normalization of `rows` rows of `elems` elements.
    fn norm(&self, elems: usize, rows: usize) -> StepCost {
        // Shorter rows are processed several at a time, and cost more for each element.
        const SHORT: usize = 512;
        let counted: &[_] = if elems < SHORT {
            &[
                (128 * 24, "rms_norm_mul_128x24"),
                (128 * 2048, "rms_norm_mul_128x2048"),
            ]
        } else {
            &[
                (576, "rms_norm_mul_576"),
                (4096, "rms_norm_mul_4096"),
                (2048 * 32, "rms_norm_mul_2048_32_rows"),
                (5120 * 48, "rms_norm_mul_5120_48_rows"),
            ]
        };
        self.vectors(self.between(counted, elems * rows))
    }

    /// Returns the cost of an operation that a product applies to its results before it stores
    /// them, so that it needs no command: the packets between two counted sizes, less those of a
    /// command.
    fn epilogue(&self, [few, many]: [(usize, &str); 2], elems: usize) -> StepCost {
        let packets = self.between(&[few, many], elems) - self.between(&[few, many], 0);
        StepCost {
            commands: 0,
            ..self.vectors(packets)
        }
    }

    /// Returns the cost of the gated unit, which is the epilogue of the last of its two products.
    fn gate(&self, elems: usize) -> StepCost {
        self.epilogue([(1536, "swiglu_1536"), (8192, "swiglu_8192")], elems)
    }

    /// Returns the cost of a bias, or of the sum with a layer's input; both are epilogues.
    fn sum(&self, elems: usize) -> StepCost {
        self.epilogue([(2048, "add_2048"), (3072 * 48, "add_3072_48_rows")], elems)
    }

    /// Returns the packets of the rotation of `elems` elements.
    fn rope(&self, elems: usize) -> f64 {
        let counted = [
            (64 * 9, "rope_neox_64x9"),
            (64 * 32, "rope_neox_64x32"),
            (128 * 8 * 300, "rope_neox_128x8_300_rows"),
        ];
        self.between(&counted, elems)
    }

    /// Returns the packets of the rotation of keys, which the command also stores in the cache.
    fn rope_and_store(&self, elems: usize) -> f64 {
        let counted = [
            (64 * 9, "rope_set_rows_64x9"),
            (64 * 9 * 32, "rope_set_rows_64x9_32_rows"),
        ];
        self.between(&counted, elems)
    }

    /// Returns the packets that store `elems` elements in a cache.
    fn store(&self, elems: usize) -> f64 {
        let counted = [
            (512, "set_rows_f16_512"),
            (1024 * 48, "set_rows_f16_1024_48_rows"),
        ];
        self.between(&counted, elems.max(512))
    }

    fn attention(&self, shape: &ModelShape, kv_heads: usize, step: &StepWork) -> StepCost {
        let rows = (step.rows / step.caches).max(1);
        let size = if shape.head <= 64 { 64 } else { 128 };
        let of = |case: &str| self.counts.whole(&format!("attention_f16_h{size}_{case}"));
        // Packets for one cell of one head, for several numbers of query rows that share it.
        let points = [
            (4.0, 4.0 * of("32on8_r1")),
            (32.0, of("1on1_r32")),
            (2048.0, 4.0 * of("4on1_r512")),
        ];
        let queries = rows * shape.heads / kv_heads;
        // Longer heads cost in proportion to their number of parts of 128.
        let parts = (as_f64(shape.head) / as_f64(size)).max(1.0);
        let cell = parts * line(&points, as_f64(queries.max(4)));
        let cells = as_f64(step.cells * step.caches);
        let kv_heads = as_f64(kv_heads);
        let tiles = as_f64(queries.div_ceil(TILE)) * (cells / as_f64(TILE));
        let tiles = tiles * 2.0 * as_f64(shape.head) / as_f64(TILE) * kv_heads;
        let bytes = 2.0 * as_f64(CACHE_BYTES * shape.head) * cells * kv_heads;
        self.command(StepCost {
            packets: cell * cells * kv_heads * step.seen,
            cache_bytes: bytes,
            tile_products: tiles * step.seen,
            ..StepCost::default()
        })
    }

    /// Returns the cost of one graph.
    pub fn step(&self, shape: &ModelShape, step: &StepWork) -> StepCost {
        let queries = shape.heads * shape.head;
        let mut total = StepCost::default();
        for layer in &shape.layers {
            for part in &layer.norms {
                total += self.norm(part.elems, part.rows * step.rows);
            }
            for product in &layer.products {
                total += self.product(product, step.rows);
            }
            for bias in &layer.biases {
                total += self.sum(step.rows * bias);
            }
            if layer.gated > 0 {
                total += self.gate(step.rows * layer.gated);
            }
            // One sum after attention and one after the network.
            total += self.sum(2 * step.rows * shape.embed);
            if layer.kv_heads == 0 {
                continue;
            }
            let keys = layer.kv_heads * shape.head;
            total += self.vectors(self.rope(step.rows * queries));
            total += self.vectors(self.rope_and_store(step.rows * keys));
            total += self.vectors(self.store(step.rows * keys));
            total += self.attention(shape, layer.kv_heads, step);
        }
        total += self.norm(shape.embed, step.logits);
        total += self.product(&shape.output, step.logits);
        total
    }
}

/// Returns the bytes of a cache for each cell: keys and values in F16.
pub fn cell_bytes(shape: &ModelShape) -> usize {
    let kv_heads = shape.layers.iter().map(|layer| layer.kv_heads);
    kv_heads.sum::<usize>() * 2 * CACHE_BYTES * shape.head
}
