//! Operations on tensors in buffers 0, 1 and 2 that each kernel accepts with f32, for tests that
//! damage them.

use hexagon_ops::wire::*;

/// Bytes that each of the buffers must have at least.
pub const BYTES: usize = 1 << 13;
/// Types' numbers are below it.
pub const TYPES: u32 = TYPE_IQ4_XS + 1;

/// A tensor without gaps at the start of a buffer.
pub fn tensor(buffer: u32, dtype: u32, ne: [u32; 4]) -> Tensor {
    let (block, size) = match dtype {
        TYPE_I8 => (1, 1),
        TYPE_F16 | TYPE_BF16 | TYPE_I16 => (1, 2),
        TYPE_I64 => (1, 8),
        TYPE_MXFP4 => (32, 17),
        TYPE_Q4_0 | TYPE_IQ4_NL => (32, 18),
        TYPE_Q4_1 => (32, 20),
        TYPE_Q5_0 => (32, 22),
        TYPE_Q5_1 => (32, 24),
        TYPE_Q8_0 => (32, 34),
        TYPE_Q2_K => (256, 84),
        TYPE_Q3_K => (256, 110),
        TYPE_Q4_K => (256, 144),
        TYPE_Q5_K => (256, 176),
        TYPE_Q6_K => (256, 210),
        TYPE_IQ4_XS => (256, 136),
        _ => (1, 4),
    };
    let [n0, n1, n2, _] = ne.map(u64::from);
    let row = n0 / block * size;
    Tensor {
        buffer,
        dtype,
        offset: 0,
        ne,
        nb: [size, row, row * n1, row * n1 * n2],
    }
}

/// Returns an operation of row `index` of [`OPERATIONS`]; `dtype` is the type of src0, or of the
/// result of SET_ROWS.
pub fn operation(index: usize, dtype: u32) -> TensorOp {
    let Operation {
        kernel,
        ref sources,
        ..
    } = OPERATIONS[index];
    const NE: [u32; 4] = [32, 3, 2, 1];
    let none: Tensor = bytemuck::Zeroable::zeroed();
    let f32 = |buffer, ne| tensor(buffer, TYPE_F32, ne);
    let ids = tensor(1, TYPE_I32, [3, 2, 1, 1]);
    let mut params = [0; 16];
    let (dst, src): (Tensor, [Tensor; SOURCES]) = match kernel {
        KERNEL_SET_ROWS => (
            tensor(2, dtype, [32, 9, 2, 1]),
            [f32(0, NE), tensor(1, TYPE_I64, [3, 2, 1, 1]), none],
        ),
        KERNEL_GET_ROWS => {
            // Rows of whole blocks or whole super-blocks.
            let n = if dtype >= TYPE_Q2_K { 256 } else { 32 };
            (
                f32(2, [n, 3, 2, 1]),
                [tensor(0, dtype, [n, 9, 2, 1]), ids, none],
            )
        }
        KERNEL_MUL_MAT_UNPACKED => (
            f32(2, [5, 3, 2, 1]),
            [tensor(0, dtype, [32, 5, 1, 1]), f32(1, NE), none],
        ),
        KERNEL_OUT_PROD => {
            let n = if dtype >= TYPE_Q2_K { 256 } else { 32 };
            (
                f32(2, [n, 5, 2, 1]),
                [tensor(0, dtype, [n, 3, 1, 1]), f32(1, [5, 3, 2, 1]), none],
            )
        }
        KERNEL_TIMESTEP_EMBEDDING => {
            (params[0], params[1]) = (33, 10_000);
            (
                f32(2, [33, 6, 1, 1]),
                [tensor(0, dtype, [6, 1, 1, 1]), none, none],
            )
        }
        KERNEL_COUNT_EQUAL => (
            tensor(2, TYPE_I64, [1; 4]),
            [tensor(0, TYPE_I32, NE), tensor(1, TYPE_I32, NE), none],
        ),
        KERNEL_ACC | KERNEL_SET => {
            (params[0], params[1], params[2], params[3]) = (128, 384, 384, 132);
            (
                f32(2, NE),
                [tensor(0, dtype, NE), f32(1, [20, 2, 1, 1]), none],
            )
        }
        KERNEL_ADD_ID => (
            f32(2, NE),
            [tensor(0, dtype, NE), f32(0, [32, 5, 1, 1]), ids],
        ),
        KERNEL_ROPE | KERNEL_ROPE_BACK | KERNEL_ROPE_SET_ROWS => {
            (params[1], params[5], params[6], params[8]) =
                (16, 1e4_f32.to_bits(), 1_f32.to_bits(), 1_f32.to_bits());
            (params[11], params[12], params[13]) = (3, 3, 2);
            let positions = tensor(1, TYPE_I32, [8, 1, 1, 1]);
            if kernel == KERNEL_ROPE_SET_ROWS {
                let cells = tensor(1, TYPE_I32, [2, 1, 1, 1]);
                (
                    f32(2, [32, 3, 9, 1]),
                    [tensor(0, dtype, NE), positions, cells],
                )
            } else {
                (f32(2, NE), [tensor(0, dtype, NE), positions, none])
            }
        }
        KERNEL_CONCAT => {
            params[0] = 1;
            (
                f32(2, [32, 6, 2, 1]),
                [tensor(0, dtype, NE), f32(1, NE), none],
            )
        }
        KERNEL_PAD => {
            (params[0], params[3]) = (3, 1);
            (
                tensor(2, dtype, [35, 4, 2, 1]),
                [tensor(0, dtype, NE), none, none],
            )
        }
        KERNEL_ROLL => (tensor(2, dtype, NE), [tensor(0, dtype, NE), none, none]),
        KERNEL_SUM_ROWS | KERNEL_MEAN => (f32(2, [1, 3, 2, 1]), [tensor(0, dtype, NE), none, none]),
        KERNEL_SUM => (f32(2, [1; 4]), [tensor(0, dtype, NE), none, none]),
        KERNEL_ARGSORT => (
            tensor(2, TYPE_I32, [7, 3, 2, 1]),
            [tensor(0, dtype, NE), none, none],
        ),
        KERNEL_SSM_CONV => (
            f32(2, [3, 2, 2, 1]),
            [tensor(0, dtype, [5, 3, 2, 1]), f32(1, [4, 3, 1, 1]), none],
        ),
        KERNEL_DIAG => (
            f32(2, [32, 32, 2, 1]),
            [tensor(0, dtype, [32, 1, 2, 1]), none, none],
        ),
        KERNEL_IM2COL | KERNEL_IM2COL_3D => {
            params[..10].copy_from_slice(&[1, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
            params[13..].copy_from_slice(&[3, 2, 1]);
            // The two channels are in dimension 2 or 3.
            let image = if kernel == KERNEL_IM2COL {
                [8, 3, 2, 1]
            } else {
                [8, 3, 1, 2]
            };
            (f32(2, [12, 8, 3, 1]), [tensor(0, dtype, image), none, none])
        }
        KERNEL_POOL_1D | KERNEL_POOL_2D => {
            params[..7].copy_from_slice(&[1, 2, 1, 1, 1, 0, 0]);
            (f32(2, [31, 3, 2, 1]), [tensor(0, dtype, NE), none, none])
        }
        KERNEL_ARGMAX => (
            tensor(2, TYPE_I32, [3, 1, 1, 1]),
            [tensor(0, dtype, [32, 3, 1, 1]), none, none],
        ),
        KERNEL_SOLVE_TRI => (
            f32(2, [5, 4, 2, 1]),
            [tensor(0, dtype, [4, 4, 2, 1]), f32(1, [5, 4, 2, 1]), none],
        ),
        KERNEL_PAD_REFLECT_1D => {
            params[0] = 3;
            (f32(2, [40, 3, 2, 1]), [tensor(0, dtype, NE), none, none])
        }
        KERNEL_COL2IM_1D => {
            params[..3].copy_from_slice(&[2, 4, 1]);
            (
                f32(2, [10, 4, 1, 1]),
                [tensor(0, dtype, [16, 5, 1, 1]), none, none],
            )
        }
        KERNEL_UPSCALE => {
            params[0] = 1;
            (f32(2, [40, 7, 4, 1]), [tensor(0, dtype, NE), none, none])
        }
        KERNEL_DSV4_HC_PRE => (
            f32(2, [32, 2, 1, 1]),
            [tensor(0, dtype, [32, 3, 2, 1]), f32(1, [3, 2, 1, 1]), none],
        ),
        KERNEL_DSV4_HC_COMB => {
            params[1] = 2;
            (
                f32(2, [4, 4, 5, 1]),
                [
                    tensor(0, dtype, [24, 5, 1, 1]),
                    f32(1, [3, 1, 1, 1]),
                    f32(1, [24, 1, 1, 1]),
                ],
            )
        }
        KERNEL_FILL => (tensor(2, dtype, NE), [none; SOURCES]),
        // Operations on elements and rows; SOFT_MAX may lack its third source.
        _ => {
            let second = if sources.len() > 1 { f32(1, NE) } else { none };
            (f32(2, NE), [tensor(0, dtype, NE), second, none])
        }
    };
    TensorOp {
        kernel,
        reserved: 0,
        params,
        dst,
        src,
    }
}

/// Returns a command of row `index` of [`OPERATIONS`]; `dtype` as for [`operation`].
pub fn command(index: usize, dtype: u32) -> Command {
    if is_wide(OPERATIONS[index].kernel, &OPERATIONS[index].sources) {
        Command::new(0, &wide(OPERATIONS[index].kernel, dtype))
    } else {
        Command::new(0, &operation(index, dtype))
    }
}

/// Returns an operation with more sources: two sequences of three tokens, 4 heads of 8 rows.
pub fn wide(kernel: u32, dtype: u32) -> WideOp {
    const S: u32 = 8;
    let heads = [S, 4, 3, 2];
    let all = [S, 4, 6, 1];
    let states = [S * S * 4, 2, 1, 1];
    let line = |elems| [elems, 1, 1, 1];
    let (result, src): ([u32; 4], &[[u32; 4]]) = match kernel {
        KERNEL_SSM_SCAN => (
            line(4 * S * 6 + 4 * S * 5 * 2),
            &[
                [5, S, 4, 3],
                heads,
                [4, 3, 2, 1],
                [5, 4, 1, 1],
                [5, 2, 3, 2],
                [5, 2, 3, 2],
                [2, 1, 1, 1],
            ],
        ),
        KERNEL_GATED_DELTA_NET => (
            line(4 * S * 6 + 4 * S * S * 6),
            &[
                [S, 2, 3, 2],
                [S, 2, 3, 1],
                heads,
                [1, 4, 3, 2],
                [1, 4, 3, 2],
                [S, S, 4, 2],
            ],
        ),
        KERNEL_GATED_LINEAR_ATTN => (line(704), &[all, all, all, all, states]),
        KERNEL_RWKV_WKV6 => (line(704), &[all, all, all, [S, 4, 1, 1], all, states]),
        KERNEL_RWKV_WKV7 => (line(704), &[all, all, all, all, all, all, states]),
        KERNEL_DSV4_HC_POST => (
            [S, 4, 3, 1],
            &[[S, 3, 1, 1], [S, 4, 3, 1], [4, 3, 1, 1], [4, 4, 3, 1]],
        ),
        KERNEL_LIGHTNING_INDEXER => (
            [9, 3, 1, 2],
            &[[32, 4, 3, 2], [32, 1, 9, 2], [4, 3, 1, 2], [9, 3, 1, 1]],
        ),
        // A window of 2 × 3 elements in 4 channels, 5 filters.
        KERNEL_CONV_2D => ([7, 5, 5, 2], &[[2, 3, 4, 5], [8, 7, 4, 2]]),
        KERNEL_CONV_2D_DW => ([7, 5, 4, 2], &[[2, 3, 1, 4], [8, 7, 4, 2]]),
        KERNEL_CONV_3D => ([7, 5, 3, 10], &[[2, 3, 2, 20], [8, 7, 4, 8]]),
        KERNEL_CONV_TRANSPOSE_1D => ([10, 5, 1, 1], &[[3, 5, 4, 1], [8, 4, 1, 1]]),
        KERNEL_CONV_TRANSPOSE_2D => ([9, 9, 5, 2], &[[2, 3, 5, 4], [8, 7, 4, 2]]),
        _ => panic!("kernel {kernel}"),
    };
    let narrow = |buffer, dtype, ne| {
        NarrowTensor::new(&tensor(buffer, dtype, ne)).unwrap_or_else(|| panic!("{ne:?}"))
    };
    let mut body = WideOp {
        kernel,
        dst: narrow(2, TYPE_F32, result),
        ..bytemuck::Zeroable::zeroed()
    };
    match kernel {
        // As many states as tokens, because with fewer states ggml defines only the last one.
        KERNEL_GATED_DELTA_NET => body.params[0] = 3,
        KERNEL_CONV_2D | KERNEL_CONV_2D_DW => body.params[..6].copy_from_slice(&[1, 1, 0, 0, 1, 1]),
        KERNEL_CONV_3D => {
            body.params[..10].copy_from_slice(&[1, 1, 1, 0, 0, 0, 1, 1, 1, 4]);
        }
        KERNEL_CONV_TRANSPOSE_1D => body.params[..3].copy_from_slice(&[1, 0, 1]),
        _ => body.params[0] = 1,
    }
    for (i, (source, ne)) in body.src.iter_mut().zip(src).enumerate() {
        let dtype = match (kernel, i) {
            (KERNEL_SSM_SCAN, 6) => TYPE_I32,
            (KERNEL_LIGHTNING_INDEXER, 3) => TYPE_F16,
            (KERNEL_LIGHTNING_INDEXER, 1) => dtype,
            (KERNEL_LIGHTNING_INDEXER, _) => TYPE_F32,
            (_, 0) => dtype,
            _ => TYPE_F32,
        };
        *source = narrow(u32::from(i % 2 == 1), dtype, *ne);
    }
    body
}

/// An attention of 4 heads with 2 of keys and 70 positions. The number of queries decides between
/// two code paths.
pub fn attention(queries: u32) -> Attention {
    let mask = tensor(0, TYPE_F16, [70, queries, 1, 1]);
    let k = tensor(0, TYPE_F16, [8, 70, 2, 1]);
    Attention {
        scale: 1_f32.to_bits(),
        max_bias: 0,
        softcap: 0,
        reserved: 0,
        dst: tensor(2, TYPE_F32, [8, 4, queries, 1]),
        q: tensor(1, TYPE_F32, [8, queries, 4, 1]),
        k,
        v: k,
        mask,
        sinks: bytemuck::Zeroable::zeroed(),
    }
}
