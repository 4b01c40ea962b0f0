//! One product with its operands and its exact results.

use hexagon_ops::layout::{Line, WeightType};
use hexagon_ops::wire::{Command, MatMul, RowsF32, Weights as WireWeights};
use test_kit::nmse;

use crate::common::{Numbers, Weights, dot};
use crate::host::{Memory, Session};

/// One product, in three buffers.
pub struct Product {
    pub weights: Memory,
    pub act: Memory,
    pub dst: Memory,
    pub body: MatMul,
    pub command: Command,
    values: Weights,
    inputs: Vec<f32>,
    k: usize,
    pub n: usize,
}

/// Byte offset of the results: not the start of a cache line.
pub const DST_OFFSET: usize = 64;

impl Product {
    pub fn new(session: &mut Session, weight: WeightType, m: usize, numbers: &mut Numbers) -> Self {
        // Whole blocks of every type.
        let (k, n) = (weight.block_elems().max(64), 40);
        let values = Weights::random(weight, n, k, numbers);
        let (weights, weights_buffer) = session.buffer(size_of_val(&values.lines[..]));
        let (act, act_buffer) = session.buffer(4 * m * k);
        let (dst, dst_buffer) = session.buffer(4096);
        let rows_f32 = |buffer, offset: usize, row: usize| RowsF32 {
            buffer,
            reserved: 0,
            offset: offset as u64,
            strides: [4 * row as u64, 0, 0],
        };
        let number = |value: usize| u32::try_from(value).unwrap();
        let body = MatMul {
            weights: WireWeights {
                buffer: weights_buffer,
                layout: weight.layout_id().0,
                offset: 0,
                k: number(k),
                n: number(n),
                slices: [1, 1],
            },
            act: rows_f32(act_buffer, 0, k),
            dst: rows_f32(dst_buffer, DST_OFFSET, n),
            m: number(m),
            planes: [1, 1],
            dots: 2,
            epilogue: bytemuck::Zeroable::zeroed(),
        };
        let inputs: Vec<f32> = (0..m * k).map(|_| numbers.float()).collect();
        Self {
            weights,
            act,
            dst,
            body,
            command: Command::new(0, &body),
            values,
            inputs,
            k,
            n,
        }
    }

    /// Writes weights and activations on the host's side.
    pub fn load(&self) {
        self.weights.put::<Line>(0, &self.values.lines);
        self.act.put(0, &self.inputs);
    }

    /// The exact product of one row.
    pub fn reference(&self, act: &[f32]) -> Vec<f64> {
        self.values.values.iter().map(|w| dot(act, w)).collect()
    }

    pub fn dst_bytes(&self) -> usize {
        let m = self.inputs.len() / self.k;
        4 * m * self.n
    }

    /// Returns the error of the results as the host sees them; NaN if there is poison in them.
    pub fn error(&self) -> f64 {
        let have: Vec<f32> = self.dst.get(DST_OFFSET, self.dst_bytes() / 4);
        let rows = self.inputs.chunks(self.k);
        let want: Vec<f64> = rows.flat_map(|act| self.reference(act)).collect();
        nmse(&have, &want)
    }
}
