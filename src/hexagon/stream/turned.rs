//! Products whose weights are the second factor, as a convolution's kernel after IM2COL is. The
//! matrix unit multiplies the packed kernel with the rows of the first factor, and a copy
//! transposes the product.

use hexagon_ops::serve;
use hexagon_ops::wire::{self, Command as Wire};

use super::super::plan::{self, Command, cost};
use super::submission::Step;
use super::{Graphs, OperandBuffer, Result, accepted, no_memory, offset, operand, word};
use crate::graph::{Op, Operation};
use crate::tensor::{DType, Shape};

/// Bytes of a submission's memory for the rows that are transposed at a time.
const BYTES: usize = 4 << 20;
/// Rows of a tile: a block has whole ones.
const TILE_ROWS: usize = 32;

impl Graphs {
    /// Adds a product whose weights are the second factor. Returns `false`, with nothing added, if
    /// its factors cannot be exchanged.
    ///
    /// - `number`: its node's index in the graph
    /// - `turned`: [`Operation::turned`]
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn push_turned(
        &mut self,
        number: usize,
        operation: &Operation,
        turned: &Operation,
        dst: OperandBuffer,
        src: [OperandBuffer; 2],
    ) -> Result<bool> {
        let [rows, kernel] = [operand(operation, 0)?, operand(operation, 1)?];
        let ([k, n, ..], m) = (rows.shape.ne, kernel.shape.ne[1]);
        let (Some(layout), Some(beside)) = (
            plan::beside_layout(&kernel),
            src[1].and_then(super::HexBuffer::beside),
        ) else {
            return Ok(false);
        };
        let block = (BYTES / (4 * (k + m)) / TILE_ROWS * TILE_ROWS).min(n);
        let vtcm_bytes = self.device.npu.info().vtcm_bytes as usize;
        if block == 0
            || layout.bytes() > self.device.max_tensor_bytes
            || src[0].is_none_or(|buffer| buffer.is_packed(&rows))
            || plan::command(vtcm_bytes, &block_of(turned, block), true).is_err()
        {
            return Ok(false);
        }
        let Some(place) = (self.current).beside(&self.device, beside, &kernel, &layout) else {
            return Ok(false);
        };
        let weights = self.current.packed_beside(&place);
        let buffer = src[0].ok_or_else(|| no_memory(&rows))?;
        let from = self.current.input(&rows, buffer);
        let buffer = dst.ok_or_else(|| no_memory(&operation.dst))?;
        let to = self.current.result(&operation.dst, buffer);
        let between = self.current.turning(&self.device.npu, BYTES)?;
        let arch = self.device.npu.caps().arch;
        let step = |op, ne, command: &Command| Step {
            node: number,
            ops: [Some(op), None, None],
            ne,
            cost: cost::of(arch, vtcm_bytes, command),
        };
        for first in (0..n).step_by(block) {
            let count = block.min(n - first);
            let turned = block_of(turned, count);
            let results = (4 * k * count) as u64;
            let mut command = plan::command(vtcm_bytes, &turned, true).map_err(super::refused)?;
            self.choose_kernels(&mut command);
            let copies = [
                Copy {
                    ne: [k, count],
                    from: (
                        from,
                        wire::TYPE_F16,
                        offset(&rows) + (first * rows.shape.nb[1]) as u64,
                    ),
                    from_nb: [2, rows.shape.nb[1]],
                    to: (between, 0),
                    to_nb: [4, 4 * k],
                },
                Copy {
                    ne: [count, m],
                    from: (between, wire::TYPE_F32, results),
                    from_nb: [4 * m, 4],
                    to: (to, offset(&operation.dst) + 4 * first as u64),
                    to_nb: [4, operation.dst.shape.nb[1]],
                },
            ];
            let [before, after] = copies.map(|copy| copy.command());
            for body in [&before, &after] {
                accepted(serve::accepts(body))?;
            }
            let Command::MulMat(body, _) = &mut command else {
                return Ok(false);
            };
            (body.weights.buffer, body.weights.offset) = (weights, place.offset as u64);
            (body.act.buffer, body.act.offset) = (between, 0);
            (body.dst.buffer, body.dst.offset) = (between, results);
            accepted(serve::accepts_product(body))?;
            let multiply = Wire::new(0, &**body);
            let copy = |body: &wire::TensorOp| Command::Tensor(Box::new(*body));
            let [k_rows, m_rows] = [[k, count, 1, 1], [count, m, 1, 1]];
            self.current.push(
                step(Op::Cpy, k_rows, &copy(&before)),
                Wire::new(0, &before),
                &[between, from],
            );
            self.current.push(
                step(Op::MulMat, turned.dst.shape.ne, &command),
                multiply,
                &[weights, between],
            );
            self.current.push(
                step(Op::Cpy, m_rows, &copy(&after)),
                Wire::new(0, &after),
                &[to, between],
            );
        }
        Ok(true)
    }
}

/// The part of a product with exchanged factors that has `count` rows, which a copy has made F32.
fn block_of<'a>(turned: &Operation<'a>, count: usize) -> Operation<'a> {
    let mut block = *turned;
    block.dst.shape = floats(block.dst.shape.ne[0], count);
    if let Some(rows) = &mut block.src[1] {
        (rows.dtype, rows.shape) = (DType::F32, floats(rows.shape.ne[0], count));
    }
    block
}

/// Rows of F32, one after another.
fn floats(k: usize, count: usize) -> Shape {
    Shape {
        ne: [k, count, 1, 1],
        nb: [4, 4 * k, 4 * k * count, 4 * k * count],
    }
}

/// A copy of a matrix to F32.
struct Copy {
    ne: [usize; 2],
    /// Buffer, type and offset.
    from: (u32, u32, u64),
    from_nb: [usize; 2],
    /// Buffer and offset.
    to: (u32, u64),
    to_nb: [usize; 2],
}

impl Copy {
    fn command(&self) -> wire::TensorOp {
        let tensor = |(buffer, dtype, offset), nb: [usize; 2]| {
            let plane = (nb[1] * self.ne[1]) as u64;
            wire::Tensor {
                buffer,
                dtype,
                offset,
                ne: [word(self.ne[0]), word(self.ne[1]), 1, 1],
                nb: [nb[0] as u64, nb[1] as u64, plane, plane],
            }
        };
        let mut body = wire::TensorOp {
            kernel: wire::KERNEL_COPY,
            dst: tensor((self.to.0, wire::TYPE_F32, self.to.1), self.to_nb),
            ..bytemuck::Zeroable::zeroed()
        };
        body.src[0] = tensor(self.from, self.from_nb);
        body
    }
}
