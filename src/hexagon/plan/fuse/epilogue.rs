//! A product, combined with the operation that follows it.

use hexagon_ops::wire::{self, MatMul, RowsF32, TensorOp};

/// Joins a product and its residual, its bias or its gate to one command; `None` if that is
/// impossible.
///
/// Both name buffers and offsets. The result of the product has no other reader than `second`.
#[must_use]
pub fn fuse_product(product: &MatMul, second: &TensorOp) -> Option<MatMul> {
    let gates = match second.kernel {
        wire::KERNEL_ADD => false,
        wire::KERNEL_SWIGLU
        | wire::KERNEL_GEGLU
        | wire::KERNEL_REGLU
        | wire::KERNEL_GEGLU_ERF
        | wire::KERNEL_GEGLU_QUICK => true,
        _ => return None,
    };
    let ne = [product.weights.n, product.m, 1, 1];
    let is_single = (product.planes, product.weights.slices) == ([1, 1], [1, 1]);
    let [a, b, none] = &second.src;
    let is_product =
        |tensor: &wire::Tensor| tensor.ne == ne && rows_of(tensor, product.m) == Some(product.dst);
    let (other, swapped) = match (is_product(a), is_product(b)) {
        (true, false) => (b, 0),
        // The gate may come first, and then be the factor of the second product.
        (false, true) if a.ne == ne => (a, u32::from(gates)),
        _ => return None,
    };
    let repeats = other.ne[0] == ne[0] && (other.ne[1..] == ne[1..] || other.ne[1..] == [1; 3]);
    let fits = is_single
        && product.epilogue == bytemuck::Zeroable::zeroed()
        && none.dtype == wire::TYPE_NONE
        && second.dst.ne == ne
        && repeats;
    let mut fused = *product;
    fused.dst = rows_of(&second.dst, product.m)?;
    fused.epilogue = wire::Epilogue {
        kernel: second.kernel,
        swapped,
        other: rows_of(other, product.m)?,
    };
    (fits && product_is_apart(&fused)).then_some(fused)
}

/// Returns a matrix of f32 as `m` rows; a single row is all of them.
fn rows_of(tensor: &wire::Tensor, m: u32) -> Option<RowsF32> {
    let [nb0, nb1, nb2, nb3] = tensor.nb;
    if tensor.dtype != wire::TYPE_F32 || nb0 != size_of::<f32>() as u64 {
        return None;
    }
    let step = if tensor.ne[1] == 1 && m > 1 { 0 } else { nb1 };
    Some(RowsF32 {
        buffer: tensor.buffer,
        reserved: 0,
        offset: tensor.offset,
        strides: [step, nb2, nb3],
    })
}

/// Returns `true` if the result does not overlap the activations, and if it is either in the same
/// place as the other operand or does not overlap that either.
fn product_is_apart(fused: &MatMul) -> bool {
    let row = |rows: &RowsF32, elems: u32| {
        let reach = rows.strides[0].saturating_mul(u64::from(fused.m.saturating_sub(1)));
        let bytes = reach.saturating_add(u64::from(elems) * size_of::<f32>() as u64);
        rows.offset..rows.offset.saturating_add(bytes)
    };
    let result = row(&fused.dst, fused.weights.n);
    let apart = |rows: &RowsF32, elems: u32| {
        let span = row(rows, elems);
        rows.buffer != fused.dst.buffer || span.end <= result.start || result.end <= span.start
    };
    let other = &fused.epilogue.other;
    let place = |rows: &RowsF32| (rows.buffer, rows.offset, rows.strides[0]);
    apart(&fused.act, fused.weights.k)
        && (place(other) == place(&fused.dst) || apart(other, fused.weights.n))
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: u32 = 48;
    const M: u32 = 3;

    /// Returns rows of N f32 in buffer 1.
    fn rows(offset: u64, m: u32) -> wire::Tensor {
        let row = u64::from(N) * 4;
        wire::Tensor {
            buffer: 1,
            dtype: wire::TYPE_F32,
            offset,
            ne: [N, m, 1, 1],
            nb: [4, row, row * u64::from(m), row * u64::from(m)],
        }
    }

    const PRODUCT: u64 = 0;
    const SIDE: u64 = 4096;
    const SUM: u64 = 8192;
    const ACT: u64 = 16384;

    fn product() -> MatMul {
        let rows_f32 = |tensor: &wire::Tensor| RowsF32 {
            buffer: tensor.buffer,
            reserved: 0,
            offset: tensor.offset,
            strides: [tensor.nb[1], tensor.nb[2], tensor.nb[3]],
        };
        MatMul {
            weights: wire::Weights {
                buffer: 2,
                layout: 7,
                offset: 0,
                k: 64,
                n: N,
                slices: [1, 1],
            },
            act: rows_f32(&rows(ACT, M)),
            dst: rows_f32(&rows(PRODUCT, M)),
            m: M,
            planes: [1, 1],
            ..bytemuck::Zeroable::zeroed()
        }
    }

    fn then(kernel: u32, dst: wire::Tensor, a: wire::Tensor, b: wire::Tensor) -> TensorOp {
        let mut op = TensorOp {
            kernel,
            dst,
            ..bytemuck::Zeroable::zeroed()
        };
        op.src[..2].copy_from_slice(&[a, b]);
        op
    }

    #[test]
    fn residuals_biases_and_gates_become_part_of_the_product() {
        let (x, side) = (rows(PRODUCT, M), rows(SIDE, M));
        let cases = [
            (wire::KERNEL_ADD, x, side, SUM, SIDE, 192),
            (wire::KERNEL_ADD, side, x, SUM, SIDE, 192),
            (wire::KERNEL_ADD, x, rows(SIDE, 1), SUM, SIDE, 0),
            (wire::KERNEL_SWIGLU, x, side, SUM, SIDE, 192),
            (wire::KERNEL_SWIGLU, side, x, SUM, SIDE, 192),
            // The result may replace either operand in place.
            (wire::KERNEL_GEGLU, x, side, PRODUCT, SIDE, 192),
            (wire::KERNEL_ADD, x, side, SIDE, SIDE, 192),
        ];
        for (kernel, a, b, dst, other, stride) in cases {
            let op = then(kernel, rows(dst, M), a, b);
            let fused = fuse_product(&product(), &op).unwrap();
            assert_eq!((fused.dst.offset, fused.epilogue.kernel), (dst, kernel));
            let gated = kernel != wire::KERNEL_ADD && a == side;
            assert_eq!(fused.epilogue.swapped, u32::from(gated));
            let have = fused.epilogue.other;
            assert_eq!((have.offset, have.strides[0]), (other, stride));
            let rest = MatMul {
                dst: product().dst,
                epilogue: bytemuck::Zeroable::zeroed(),
                ..fused
            };
            assert_eq!(rest, product());
            // Only one operation can be combined with a product.
            assert_eq!(
                fuse_product(&fused, &then(kernel, rows(SUM, M), rows(dst, M), b)),
                None
            );
        }
    }

    #[test]
    fn one_row_becomes_part_of_its_product() {
        let mut product = product();
        (product.m, product.dst.strides) = (1, [192; 3]);
        let op = then(
            wire::KERNEL_ADD,
            rows(SUM, 1),
            rows(PRODUCT, 1),
            rows(SIDE, 1),
        );
        let fused = fuse_product(&product, &op).unwrap();
        assert_eq!(fused.epilogue.other.strides[0], 192);
    }

    /// A change that makes commands differ.
    type Change = fn(&mut MatMul, &mut TensorOp);

    #[test]
    fn what_would_give_other_numbers_stays_apart() {
        let add = then(
            wire::KERNEL_ADD,
            rows(SUM, M),
            rows(PRODUCT, M),
            rows(SIDE, M),
        );
        let changes: [(&str, Change); 11] = [
            ("another function", |_, op| op.kernel = wire::KERNEL_MUL),
            ("twice itself", |_, op| op.src[1] = op.src[0]),
            ("neither is the product", |_, op| op.src[0].offset += 4),
            ("a gate of something else", |_, op| {
                op.kernel = wire::KERNEL_SWIGLU;
                op.src[0].offset += 4;
            }),
            ("rounded", |_, op| op.dst.dtype = wire::TYPE_F16),
            ("a column", |_, op| op.src[1].ne = [1, M, 1, 1]),
            ("several planes", |product, _| product.planes = [2, 1]),
            ("over the activations", |_, op| op.dst.offset = ACT + 192),
            ("over part of the other operand", |_, op| {
                op.dst.offset = SIDE + 192;
            }),
            // The other operand ends 64 bytes after the start of its last row.
            ("over its end", |_, op| {
                op.dst.offset = SIDE + u64::from(M - 1) * 192 + 64;
            }),
            ("a larger result", |_, op| op.dst.ne[1] = M + 1),
        ];
        assert!(fuse_product(&product(), &add).is_some());
        for (what, change) in changes {
            let (mut product, mut op) = (product(), add);
            change(&mut product, &mut op);
            assert_eq!(fuse_product(&product, &op), None, "{what}");
        }
    }
}
