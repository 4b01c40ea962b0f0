//! Operands of multiplications: packed weights, and activations in the form that the kernels need.

use half::f16;
use hexagon_ops::serve;
use hexagon_ops::wire::{self, Command as Wire, RowsF32, Weights};

use super::super::buffer::{PlaceBeside, pack_all, put};
use super::super::layout::WeightLayout;
use super::super::plan::cost::Cost;
use super::super::{HexBuffer, pack};
use super::submission::Step;
use super::{Graphs, OperandBuffer, Result, accepted, no_memory, offset, operand, refused, word};
use crate::graph::{Op, Operation, Role, Tensor};
use crate::tensor::DType;

impl Graphs {
    /// Fills in the place of weights: packed when they were written, a packed copy, or packed now.
    pub(super) fn place_weights(
        &mut self,
        weights: &mut Weights,
        layout: &WeightLayout,
        operation: &Operation,
        buffer: OperandBuffer,
        beside: Option<PlaceBeside>,
    ) -> Result<()> {
        if let Some(place) = beside {
            weights.buffer = self.current.packed_beside(&place);
            weights.offset = place.offset as u64;
            return Ok(());
        }
        let src0 = operand(operation, 0)?;
        let buffer = buffer.ok_or_else(|| no_memory(&src0))?;
        (weights.buffer, weights.offset) = match buffer.find(&src0) {
            // The weight is packed, so the CPU does not read this buffer.
            Some(_) => (self.current.input(&src0, buffer), offset(&src0)),
            None => (self.pack_at_use(layout, &src0, buffer)?, 0),
        };
        Ok(())
    }

    /// Fills in where activations are: F16 ones are converted first.
    pub(super) fn place_activations(
        &mut self,
        act: &mut RowsF32,
        step: Step,
        operation: &Operation,
        buffer: OperandBuffer,
    ) -> Result<()> {
        let src1 = operand(operation, 1)?;
        if src1.dtype == DType::F16 {
            *act = self.convert(step, &src1, buffer)?;
            return Ok(());
        }
        self.place_rows(act, &src1, buffer)
    }

    /// Fills in the place of an operand that is read unpacked.
    pub(super) fn place_rows(
        &mut self,
        rows: &mut RowsF32,
        tensor: &Tensor,
        buffer: OperandBuffer,
    ) -> Result<()> {
        let buffer = buffer.ok_or_else(|| no_memory(tensor))?;
        (rows.buffer, rows.offset) = (self.current.input(tensor, buffer), offset(tensor));
        Ok(())
    }

    /// Fills in the place of the result.
    pub(super) fn place_result(
        &mut self,
        rows: &mut RowsF32,
        tensor: &Tensor,
        buffer: OperandBuffer,
    ) -> Result<()> {
        let buffer = buffer.ok_or_else(|| no_memory(tensor))?;
        (rows.buffer, rows.offset) = (self.current.result(tensor, buffer), offset(tensor));
        Ok(())
    }

    /// Packs weights into memory of the submission; returns the buffer's number.
    fn pack_at_use(
        &mut self,
        layout: &WeightLayout,
        src0: &Tensor,
        buffer: &HexBuffer,
    ) -> Result<u32> {
        // A view may repeat its rows, and be larger than the memory that holds it.
        if layout.bytes() > self.device.max_tensor_bytes {
            return Err(refused(&format!(
                "{} takes {} bytes packed, and a buffer has at most {}",
                src0.name,
                layout.bytes(),
                self.device.max_tensor_bytes
            )));
        }
        // An earlier command of the same graph may compute the weights, for example write a cache
        // that this product reads.
        self.run_pending()?;
        let rows = gather(src0, buffer, pack::row_bytes(layout, src0.dtype));
        // A computed tensor may hold any value and is rounded as on the CPU. A tensor that the
        // program wrote comes here only as expert weights; other products of such values run in
        // FP32. ggml's RPC server marks no tensor as a weight, so the role cannot tell.
        if src0.role != Role::Result
            && let Some(value) = pack::beyond_f16(layout, src0.dtype, &rows)
        {
            return Err(refused(&format!(
                "{} has the value {value}, beyond F16's range, which no product of experts takes",
                src0.name
            )));
        }
        let scratch = self.current.scratch(&self.device.npu, layout.bytes())?;
        pack_all(scratch, layout, 0, &rows, src0.dequantize);
        Ok(scratch.number())
    }

    /// Adds the command that converts activations from F16 to F32, in memory of the submission.
    fn convert(&mut self, mut step: Step, act: &Tensor, buffer: OperandBuffer) -> Result<RowsF32> {
        let buffer = buffer.ok_or_else(|| no_memory(act))?;
        let [k, m, p2, p3] = act.shape.ne;
        let strides = [4, k * 4, k * m * 4, k * m * p2 * 4].map(|stride| stride as u64);
        let rows_f32 = |number| RowsF32 {
            buffer: number,
            reserved: 0,
            offset: 0,
            strides: [strides[1], strides[2], strides[3]],
        };
        let bytes = k * m * p2 * p3 * 4;
        if buffer.is_packed(act) {
            // When everything is packed, activations that the program wrote are packed too, and
            // only the host reads them. No earlier command writes them, because it would have
            // unpacked them.
            let halves = gather(act, buffer, k * 2);
            self.current.once = true;
            let halves = halves.as_chunks().0.iter();
            let floats: Vec<_> = halves
                .map(|half| f16::from_le_bytes(*half).to_f32().to_le_bytes())
                .collect();
            let scratch = self.current.scratch(&self.device.npu, bytes)?;
            put(scratch, 0, floats.as_flattened());
            return Ok(rows_f32(scratch.number()));
        }
        let to = (self.current.scratch(&self.device.npu, bytes)?).number();
        let tensor = |number, dtype, offset, nb| wire::Tensor {
            buffer: number,
            dtype,
            offset,
            ne: act.shape.ne.map(word),
            nb,
        };
        let from = self.current.input(act, buffer);
        let mut body = wire::TensorOp {
            kernel: wire::KERNEL_COPY,
            dst: tensor(to, wire::TYPE_F32, 0, strides),
            ..bytemuck::Zeroable::zeroed()
        };
        let nb = act.shape.nb.map(|nb| nb as u64);
        body.src[0] = tensor(from, wire::TYPE_F16, offset(act), nb);
        accepted(serve::accepts(&body))?;
        step.ops = [Some(Op::Cpy), None, None];
        step.cost = Cost::default();
        self.current.push(step, Wire::new(0, &body), &[to, from]);
        Ok(rows_f32(to))
    }
}

/// Returns the rows of a tensor, one after another.
fn gather(tensor: &Tensor, buffer: &HexBuffer, row_bytes: usize) -> Vec<u8> {
    let mut rows = vec![0; tensor.shape.rows() * row_bytes];
    let ([_, n1, n2, _], nb) = (tensor.shape.ne, tensor.shape.nb);
    if tensor.shape.is_contiguous(tensor.dtype) {
        buffer.get(tensor, 0, &mut rows);
        return rows;
    }
    for (index, row) in rows.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        let (i1, i2, i3) = (index % n1, index / n1 % n2, index / n1 / n2);
        buffer.get(tensor, i1 * nb[1] + i2 * nb[2] + i3 * nb[3], row);
    }
    rows
}
