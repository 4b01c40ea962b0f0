//! The time of a step on a Hexagon NPU.
//!
//! A command takes the longest of three that a device does side by side: bytes from memory, packets
//! of the vector threads, products of the matrix unit. Commands follow each other.

use std::ops::AddAssign;

use ggml_rust_npu::hexagon::caps::HexRates;

use super::counts::{Counts, as_f64, line};
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
    /// The share of the scores that a mask leaves.
    pub seen: f64,
    /// Tokens whose logits are wanted.
    pub logits: usize,
}

/// Work, and how long it takes.
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

/// The rates of a chip, and what its architecture takes for each operation.
pub struct Model {
    /// Counted packets.
    pub counts: Counts,
    /// Rates of one thread, of memory and of the matrix unit.
    pub rates: HexRates,
    /// Vector threads.
    pub threads: usize,
}

impl Model {
    /// Returns the microseconds that memory, vector threads and matrix unit would take alone.
    pub fn alone(&self, cost: &StepCost) -> [f64; 3] {
        let operations = cost.tile_products * 2.0 * as_f64(TILE * TILE * TILE);
        [
            (cost.weight_bytes + cost.cache_bytes) / (1e3 * self.rates.dma_gb_per_s),
            cost.packets / (self.rates.packets_per_us * as_f64(self.threads)),
            operations / (1e3 * self.rates.hmx_gflops),
        ]
    }

    fn command(&self, work: StepCost) -> StepCost {
        StepCost {
            commands: 1,
            us: self.alone(&work).into_iter().fold(0.0, f64::max),
            ..work
        }
    }

    /// Returns a command whose operands are in the cache.
    fn vectors(&self, packets: f64) -> StepCost {
        self.command(StepCost {
            packets,
            ..StepCost::default()
        })
    }

    fn product(&self, product: &WeightProduct, rows: usize) -> StepCost {
        let (experts, rows) = product.touched(rows);
        let tiles = product.inputs.div_ceil(TILE) * product.outputs.div_ceil(TILE);
        let tiles = as_f64(tiles) * experts;
        let weight = product.weight;
        let bytes = as_f64(TILE * TILE * weight.block_bytes()) / as_f64(weight.block_elems());
        // One and two rows are dot products.
        let on_matrix = if rows <= 2 { 0 } else { rows.div_ceil(TILE) };
        self.command(StepCost {
            packets: self.counts.per_tile(weight, rows) * tiles,
            weight_bytes: bytes * tiles,
            tile_products: as_f64(on_matrix) * tiles,
            ..StepCost::default()
        })
    }

    /// Returns an operation on `elems` elements, from those that were counted.
    fn elements(&self, name: &str, sizes: [usize; 2], elems: usize) -> StepCost {
        let points = sizes.map(|size| (as_f64(size), self.counts.whole(&format!("{name}_{size}"))));
        self.vectors(line(&points, as_f64(elems)))
    }

    /// Returns the gated unit, which the last of its two products does with its results, so that it
    /// is no command.
    fn gate(&self, elems: usize) -> StepCost {
        let [few, many] = [1536, 8192].map(|size| self.counts.whole(&format!("swiglu_{size}")));
        let packets = (many - few) / as_f64(8192 - 1536) * as_f64(elems);
        StepCost {
            commands: 0,
            ..self.vectors(packets)
        }
    }

    /// Returns the rotation of `elems` elements, from 9 and 32 heads of 64.
    fn rope(&self, elems: usize) -> f64 {
        let points = [9, 32].map(|heads| {
            let packets = self.counts.whole(&format!("rope_neox_64x{heads}"));
            (as_f64(64 * heads), packets)
        });
        line(&points, as_f64(elems))
    }

    /// Returns the same of keys, which the command stores in the cache.
    fn rope_and_store(&self, elems: usize) -> f64 {
        let store = self.counts.whole("rope_set_rows_64x9") - self.counts.whole("rope_neox_64x9");
        self.rope(elems) + store * (as_f64(elems) / as_f64(9 * 64)).max(1.0)
    }

    fn attention(&self, shape: &ModelShape, kv_heads: usize, step: &StepWork) -> StepCost {
        let rows = (step.rows / step.caches).max(1);
        let size = if shape.head <= 64 { 64 } else { 128 };
        let of = |case: &str| self.counts.whole(&format!("attention_f16_h{size}_{case}"));
        // Packets for a cell of one head of keys and values, by the rows of queries that share it.
        let points = [
            (4.0, 4.0 * of("32on8_r1")),
            (32.0, of("1on1_r32")),
            (2048.0, 4.0 * of("4on1_r512")),
        ];
        let queries = rows * shape.heads / kv_heads;
        let cell = line(&points, as_f64(queries.max(4)));
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
        let norm = |elems| self.elements("rms_norm_mul", [576, 4096], elems);
        let mut total = StepCost::default();
        for layer in &shape.layers {
            for part in &layer.norms {
                total += norm(step.rows * part.0);
            }
            for product in &layer.products {
                total += self.product(product, step.rows);
            }
            for bias in &layer.biases {
                total += self.elements("add", [576, 2048], step.rows * bias);
            }
            if layer.gated > 0 {
                total += self.gate(step.rows * layer.gated);
            }
            if layer.kv_heads == 0 {
                continue;
            }
            let keys = layer.kv_heads * shape.head;
            let stored = (as_f64(step.rows * keys) / 512.0).max(1.0);
            total += self.vectors(self.rope(step.rows * queries));
            total += self.vectors(self.rope_and_store(step.rows * keys));
            total += self.vectors(self.counts.whole("set_rows_f16_512") * stored);
            total += self.attention(shape, layer.kv_heads, step);
        }
        total += norm(step.logits * shape.embed);
        total += self.product(&shape.output, step.logits);
        total
    }
}

/// Returns the bytes of a cache for each cell: keys and values in F16.
pub fn cell_bytes(shape: &ModelShape) -> usize {
    let kv_heads = shape.layers.iter().map(|layer| layer.kv_heads);
    kv_heads.sum::<usize>() * 2 * CACHE_BYTES * shape.head
}
