//! Operations at shapes of whole models, for the table of [`crate::whole`]: many rows, short rows,
//! and routers.

use hexagon_ops::wire::{self, Tensor, TensorOp};

use crate::whole::{FIRST, INDEX, LAYER, MASK, RESULT, SECOND, tensor, tensor_op as op};

/// Elements of the activations that are random numbers.
const RANDOM: usize = 1 << 19;
/// Numbers of rows of a cache, of tokens' experts, and of positions.
const CELLS: u64 = INDEX + (1 << 16);
const EXPERTS: u64 = INDEX + (2 << 16);
const POSITIONS: u64 = INDEX + (3 << 16);
/// Triangular matrices.
const TRIANGLES: u64 = MASK + (1 << 20);

/// Writes the data on which packets depend: keys to be sorted, numbers of rows, and matrices with a
/// diagonal.
pub fn fill(arena: *mut u8) {
    let words = |at: u64, count: usize, value: &dyn Fn(usize) -> u32| {
        for i in 0..count {
            // SAFETY: inside the arena, which the loop does not use now.
            unsafe { arena.wrapping_add(at as usize + 4 * i).cast::<u32>().write(value(i)) };
        }
    };
    words(FIRST, RANDOM, &|i| {
        let bits = (i as u32).wrapping_mul(0x9e37_79b9);
        let bits = (bits ^ bits >> 15).wrapping_mul(0x85eb_ca6b);
        (((bits ^ bits >> 13) >> 8) as f32 / 8_388_608.0 - 1.0).to_bits()
    });
    words(CELLS, 2 * 64, &|i| if i % 2 == 0 { (i as u32 / 2 * 5) % 64 } else { 0 });
    words(EXPERTS, 64, &|i| (i as u32 * 5) % 32);
    words(POSITIONS, 512, &|i| i as u32);
    words(TRIANGLES, 64 * 64 * 32, &|i| {
        if i % 4096 / 64 == i % 64 { 1_f32 } else { 0.01 }.to_bits()
    });
}

fn floats(offset: u64, ne: [usize; 3]) -> Tensor {
    tensor(wire::TYPE_F32, offset, [ne[0], ne[1], ne[2], 1])
}

fn numbers(offset: u64, ne: [usize; 3]) -> Tensor {
    tensor(wire::TYPE_I32, offset, [ne[0], ne[1], ne[2], 1])
}

/// Returns the operations of a layer. Activations and results are those of an earlier command, and
/// each layer has its own weights and cache.
pub fn operations(layer: u64) -> [(&'static str, TensorOp); ROWS] {
    let weights = SECOND + layer * LAYER;
    let eps = [(0, 1e-6_f32.to_bits())];
    let norm = |kernel, n, rows| {
        let src = [floats(FIRST, [n, rows, 1]), floats(weights, [n, 1, 1])];
        let count = if kernel == wire::KERNEL_RMS_NORM { 2 } else { 1 };
        op(kernel, &eps, floats(RESULT, [n, rows, 1]), &src[..count])
    };
    let two = |kernel, params: &[(usize, u32)], a: [usize; 2], b: [usize; 2]| {
        let [a, b] = [a, b].map(|[n, rows]| [n, rows, 1]);
        op(kernel, params, floats(RESULT, a), &[floats(FIRST, a), floats(SECOND, b)])
    };
    let one = |kernel, params: [f32; 2], n, rows| {
        let ne = [n, rows, 1];
        let params = [(0, params[0].to_bits()), (1, params[1].to_bits())];
        op(kernel, &params, floats(RESULT, ne), &[floats(FIRST, ne)])
    };
    let function = |kernel| one(kernel, [0.0; 2], 11008, 1);
    let rope = |n: usize, heads, rows| {
        let angles = [
            (1, n as u32),
            (2, 2),
            (5, 1e4_f32.to_bits()),
            (6, 1_f32.to_bits()),
            (8, 1_f32.to_bits()),
            (9, 32_f32.to_bits()),
            (10, 1_f32.to_bits()),
        ];
        let ne = [n, heads, rows];
        let src = [floats(FIRST, ne), numbers(POSITIONS, [rows, 1, 1])];
        op(wire::KERNEL_ROPE, &angles, floats(RESULT, ne), &src)
    };
    let soft_max = |n, rows, mask: &[Tensor]| {
        let ne = [n, rows, 1];
        let mut op = op(wire::KERNEL_SOFT_MAX, &[(0, 0.125_f32.to_bits())], floats(RESULT, ne), &[floats(FIRST, ne)]);
        op.src[1..][..mask.len()].copy_from_slice(mask);
        op
    };
    let sort = |n, k, rows| {
        op(wire::KERNEL_ARGSORT, &[(0, 1)], numbers(RESULT, [k, rows, 1]), &[floats(FIRST, [n, rows, 1])])
    };
    let concat = |name, a: [usize; 2], b: [usize; 2], dim: usize| {
        let mut joined = a;
        joined[dim] += b[dim];
        let [joined, a, b] = [joined, a, b].map(|[n, rows]| [n, rows, 1]);
        (name, op(wire::KERNEL_CONCAT, &[(0, dim as u32)], floats(RESULT, joined), &[floats(FIRST, a), floats(SECOND, b)]))
    };
    let copied = |ne, nb: [u64; 3]| {
        let mut from = floats(FIRST, ne);
        from.nb[..3].copy_from_slice(&nb);
        op(wire::KERNEL_COPY, &[], floats(RESULT, ne), &[from])
    };
    let planes = [64, 64, 32];
    let oai = [(2, 1.702_f32.to_bits()), (3, 7_f32.to_bits())];
    let cells = tensor(wire::TYPE_I64, CELLS, [48, 1, 1, 1]);
    [
        ("rms_norm_mul_128x24", norm(wire::KERNEL_RMS_NORM, 128, 24)),
        ("rms_norm_mul_128x2048", norm(wire::KERNEL_RMS_NORM, 128, 2048)),
        ("rms_norm_mul_5120_48_rows", norm(wire::KERNEL_RMS_NORM, 5120, 48)),
        ("norm_3072_48_rows", norm(wire::KERNEL_NORM, 3072, 48)),
        ("l2_norm_128x16", norm(wire::KERNEL_L2_NORM, 128, 16)),
        ("add_3072_48_rows", two(wire::KERNEL_ADD, &[], [3072, 48], [3072, 48])),
        ("mul_3072_48_rows_by_row", two(wire::KERNEL_MUL, &[], [3072, 48], [3072, 1])),
        ("mul_2880x4_by_element", two(wire::KERNEL_MUL, &[], [2880, 4], [1, 4])),
        ("div_3072", two(wire::KERNEL_DIV, &[], [3072, 1], [3072, 1])),
        ("scale_3072_48_rows", one(wire::KERNEL_SCALE, [0.5, 0.0], 3072, 48)),
        ("neg_11008", function(wire::KERNEL_NEG)),
        ("clamp_11008", one(wire::KERNEL_CLAMP, [-0.5, 0.5], 11008, 1)),
        ("silu_11008", function(wire::KERNEL_SILU)),
        ("sigmoid_11008", function(wire::KERNEL_SIGMOID)),
        ("tanh_11008", function(wire::KERNEL_TANH)),
        ("exp_11008", function(wire::KERNEL_EXP)),
        ("log_11008", function(wire::KERNEL_LOG)),
        ("sqrt_11008", function(wire::KERNEL_SQRT)),
        ("gelu_4096_48_rows", one(wire::KERNEL_GELU, [0.0; 2], 4096, 48)),
        ("swiglu_11008_48_rows", two(wire::KERNEL_SWIGLU, &oai, [11008, 48], [11008, 48])),
        ("geglu_11008", two(wire::KERNEL_GEGLU, &oai, [11008, 1], [11008, 1])),
        ("swiglu_oai_2880x4", two(wire::KERNEL_SWIGLU_OAI, &oai, [2880, 4], [2880, 4])),
        ("rope_neox_128x8_300_rows", rope(128, 8, 300)),
        ("rope_neox_96x24_48_rows", rope(96, 24, 48)),
        (
            "set_rows_f16_1024_48_rows",
            op(
                wire::KERNEL_SET_ROWS,
                &[],
                tensor(wire::TYPE_F16, RESULT + layer * LAYER, [1024, 512, 1, 1]),
                &[floats(FIRST, [1024, 48, 1]), cells],
            ),
        ),
        ("argsort_32_48_rows", sort(32, 32, 48)),
        ("argsort_128_48_rows", sort(128, 128, 48)),
        ("argsort_4096", sort(4096, 4096, 1)),
        ("top_k_128_8_48_rows", sort(128, 8, 48)),
        ("top_k_4096_40", sort(4096, 40, 1)),
        (
            "argmax_32000",
            op(wire::KERNEL_ARGMAX, &[], numbers(RESULT, [1, 1, 1]), &[floats(FIRST, [32000, 1, 1])]),
        ),
        ("soft_max_32_48_rows", soft_max(32, 48, &[])),
        ("soft_max_128_48_rows", soft_max(128, 48, &[])),
        (
            "soft_max_4096_mask_f16_48_rows",
            soft_max(4096, 48, &[tensor(wire::TYPE_F16, MASK, [4096, 48, 1, 1])]),
        ),
        (
            "sum_rows_3072_48_rows",
            op(wire::KERNEL_SUM_ROWS, &[], floats(RESULT, [1, 48, 1]), &[floats(FIRST, [3072, 48, 1])]),
        ),
        (
            "cumsum_64x64x32",
            op(wire::KERNEL_CUMSUM, &[], floats(RESULT, planes), &[floats(FIRST, planes)]),
        ),
        (
            "solve_tri_64x64x32",
            op(wire::KERNEL_SOLVE_TRI, &[], floats(RESULT, planes), &[floats(TRIANGLES, planes), floats(FIRST, planes)]),
        ),
        (
            "tri_64x64x32",
            op(wire::KERNEL_TRI, &[(0, 3)], floats(RESULT, planes), &[floats(FIRST, planes)]),
        ),
        (
            "diag_64x32",
            op(wire::KERNEL_DIAG, &[], floats(RESULT, planes), &[floats(FIRST, [64, 1, 32])]),
        ),
        (
            "fill_3072_48_rows",
            op(wire::KERNEL_FILL, &[(0, 1.5_f32.to_bits())], floats(RESULT, [3072, 48, 1]), &[]),
        ),
        (
            "add_id_2880x4_8_rows",
            op(
                wire::KERNEL_ADD_ID,
                &[],
                floats(RESULT, [2880, 4, 8]),
                &[floats(FIRST, [2880, 4, 8]), floats(SECOND, [2880, 32, 1]), numbers(EXPERTS, [4, 8, 1])],
            ),
        ),
        (
            "im2col_1d_3x80_300",
            op(
                wire::KERNEL_IM2COL,
                &[(0, 1), (2, 1), (4, 1), (13, 3), (14, 1), (15, 1)],
                tensor(wire::TYPE_F16, RESULT, [240, 300, 1, 1]),
                &[floats(FIRST, [300, 80, 1])],
            ),
        ),
        concat("concat_3_1x6144", [3, 6144], [1, 6144], 0),
        concat("concat_3_64x6144", [3, 6144], [64, 6144], 0),
        concat("concat_192_64x32", [192, 32], [64, 32], 0),
        concat("concat_rows_1024x8_8", [1024, 8], [1024, 8], 1),
        ("copy_f32_3072_48_rows", one(wire::KERNEL_COPY, [0.0; 2], 3072, 48)),
        (
            "copy_f16_3072_48_rows",
            op(
                wire::KERNEL_COPY,
                &[],
                tensor(wire::TYPE_F16, RESULT, [3072, 48, 1, 1]),
                &[floats(FIRST, [3072, 48, 1])],
            ),
        ),
        ("copy_permuted_96x48x24", copied([96, 48, 24], [4, 96 * 24 * 4, 96 * 4])),
        ("copy_transposed_256x64", copied([256, 64, 1], [64 * 4, 4, 0])),
        ("roll_3072_48_rows", op(wire::KERNEL_ROLL, &[(0, 5)], floats(RESULT, [3072, 48, 1]), &[floats(FIRST, [3072, 48, 1])])),
        ("pad_128x50x32", op(wire::KERNEL_PAD, &[], floats(RESULT, [128, 64, 32]), &[floats(FIRST, [128, 50, 32])])),
        ("repeat_1x64_to_1024", op(wire::KERNEL_REPEAT, &[], floats(RESULT, [1024, 64, 1]), &[floats(FIRST, [1, 64, 1])])),
        (
            "get_rows_f32_3072_48_rows",
            op(
                wire::KERNEL_GET_ROWS,
                &[],
                floats(RESULT, [3072, 48, 1]),
                &[floats(FIRST, [3072, 64, 1]), numbers(EXPERTS, [48, 1, 1])],
            ),
        ),
    ]
}

/// Number of operations.
const ROWS: usize = 54;
