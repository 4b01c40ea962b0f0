//! Every operation gives the same bytes on any number of threads: with the sizes of other tests,
//! with sizes at which all threads get a part, and with one row, few rows and many rows.

use hexagon_ops::layout::WeightType;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::driver::{Host, Memory};
use crate::seed::{self, operation, tensor};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
/// Bytes of each of four buffers.
const BYTES: usize = 1 << 20;
/// The buffer of numbers: zeros in the first half, then [`NAMES`] as i32.
const NUMBERS: u32 = 3;
/// Numbers of rows: cells of a ring, the later ones before the earlier.
const NAMES: [i32; 12] = [25, 26, 27, 28, 29, 30, 0, 1, 2, 3, 4, 5];

/// A session with the four buffers.
struct Session {
    host: Host,
    memory: Vec<Memory>,
}

impl Session {
    fn new(threads: usize) -> Self {
        let mut host = Host::of_threads(threads);
        let memory = (0..=NUMBERS).map(|_| host.buffer(BYTES).1).collect();
        Self { host, memory }
    }

    /// Runs a command on operands that are always the same; returns the buffer of results, or the
    /// refusal.
    fn run(&mut self, operands: &[Vec<f32>; 3], command: Command) -> Result<Vec<u8>, (u32, u32)> {
        for (memory, elems) in self.memory.iter().zip(operands) {
            memory.put(0, elems);
        }
        self.memory[3].put(BYTES / 2, &NAMES);
        let completion = self.host.run(&[command]);
        match completion.status {
            STATUS_OK => Ok(self.memory[2].get(0, BYTES)),
            status => Err((status, completion.detail)),
        }
    }
}

/// A tensor of row numbers: [`NAMES`], or zeros.
fn numbers(ne: [u32; 4], are_zeros: bool) -> Tensor {
    Tensor {
        offset: if are_zeros { 0 } else { BYTES as u64 / 2 },
        ..tensor(NUMBERS, TYPE_I32, ne)
    }
}

/// The operations of the other tests, with their numbers in the buffer of numbers.
fn small() -> Vec<(String, Command)> {
    let commands = (0..OPERATIONS.len()).map(|index| {
        let name = format!("kernel {}", OPERATIONS[index].kernel);
        if is_wide(OPERATIONS[index].kernel, &OPERATIONS[index].sources) {
            let mut op = seed::wide(OPERATIONS[index].kernel, F);
            for src in op.src.iter_mut().filter(|src| src.dtype == TYPE_I32) {
                src.buffer = NUMBERS;
            }
            return (name, Command::new(0, &op));
        }
        let mut op = operation(index, F);
        for src in &mut op.src {
            if matches!(src.dtype, TYPE_I32 | TYPE_I64) {
                src.buffer = NUMBERS;
            }
        }
        (name, Command::new(0, &op))
    });
    commands.collect()
}

/// Operations whose operands all have the result's shape, with other shapes.
fn of_one_shape() -> Vec<(String, Command)> {
    const SEED: [u32; 4] = [32, 3, 2, 1];
    let mut commands = Vec::new();
    for (index, row) in OPERATIONS.iter().enumerate() {
        if is_wide(row.kernel, &row.sources) {
            continue;
        }
        let op = operation(index, F);
        let present = |tensor: &&Tensor| tensor.ne[0] != 0;
        let mut all = op.src.iter().filter(present).chain([&op.dst]);
        if !all.all(|tensor| tensor.ne == SEED && tensor.dtype == F) {
            continue;
        }
        // A single token of odd length, a few long rows, and many rows.
        for ne in [[50_021, 1, 1, 1], [16_384, 3, 1, 1], [160, 40, 4, 1]] {
            for dtype in [F, H] {
                let mut op = op;
                op.dst = tensor(2, F, ne);
                for (i, src) in op.src.iter_mut().enumerate() {
                    if present(&&*src) {
                        let dtype = if i == 0 { dtype } else { F };
                        *src = tensor(src.buffer, dtype, ne);
                    }
                }
                let name = format!("kernel {} of {ne:?}, type {dtype}", row.kernel);
                // Moves elements of one type to another place than the source.
                let is_move = row.kernel == KERNEL_ROLL;
                if dtype == F || !is_move {
                    commands.push((name.clone(), Command::new(0, &op)));
                }
                if dtype == F && !is_move {
                    op.src[0] = op.dst;
                    commands.push((format!("{name} in place"), Command::new(0, &op)));
                }
            }
        }
    }
    assert!(commands.len() > 40 * 9, "{} commands", commands.len());
    commands
}

/// Operations whose operands have several shapes, of the sizes of models.
fn of_several_shapes() -> Vec<(String, Command)> {
    let mut commands = Vec::new();
    let mut op = |kernel, params: &[(usize, u32)], dst: Tensor, src: &[Tensor]| {
        let mut op = TensorOp {
            kernel,
            dst,
            ..bytemuck::Zeroable::zeroed()
        };
        params.iter().for_each(|(at, word)| op.params[*at] = *word);
        op.src[..src.len()].copy_from_slice(src);
        let name = format!("kernel {kernel} to {:?}", dst.ne);
        commands.push((name, Command::new(0, &op)));
    };
    let [a, b, out] = [0, 1, 2].map(|buffer| move |ne| tensor(buffer, F, ne));
    let half = |ne| tensor(2, H, ne);
    let angles = [
        (1, 64),
        (2, 2),
        (5, 1e4_f32.to_bits()),
        (6, 1_f32.to_bits()),
        (8, 1_f32.to_bits()),
        (9, 32_f32.to_bits()),
        (10, 1_f32.to_bits()),
    ];
    for tokens in [1, 2, 12] {
        let heads = [64, 33, tokens, 1];
        let positions = numbers([tokens, 1, 1, 1], false);
        op(KERNEL_ROPE, &angles, out(heads), &[a(heads), positions]);
        op(KERNEL_ROPE, &angles, out(heads), &[out(heads), positions]);
        for are_zeros in [false, true] {
            let names = numbers([tokens, 1, 1, 1], are_zeros);
            let cells = [64, 33, 32, 1];
            op(
                KERNEL_ROPE_SET_ROWS,
                &angles,
                half(cells),
                &[a(heads), positions, names],
            );
            let rows = [2048, tokens, 1, 1];
            op(
                KERNEL_SET_ROWS,
                &[],
                half([2048, 32, 1, 1]),
                &[a(rows), names],
            );
            op(
                KERNEL_SET_ROWS,
                &[],
                tensor(2, TYPE_Q8_0, [2048, 32, 1, 1]),
                &[a(rows), names],
            );
            op(
                KERNEL_GET_ROWS,
                &[],
                out(rows),
                &[tensor(0, H, [2048, 32, 1, 1]), names],
            );
        }
        // Values that are stored column by column.
        let names = numbers([12, 1, 1, 1], false);
        op(
            KERNEL_SET_ROWS,
            &[],
            half([1, 32, tokens, 1]),
            &[a([1, 12, tokens, 1]), names],
        );
        let eight = tensor(0, TYPE_Q8_0, [8192, 2, 1, 1]);
        let ids = numbers([1, 1, 1, 1], true);
        op(KERNEL_GET_ROWS, &[], out([8192, 1, 1, 1]), &[eight, ids]);
        op(
            KERNEL_SSM_CONV,
            &[],
            out([3000, tokens, 1, 1]),
            &[a([3 + tokens, 3000, 1, 1]), b([4, 3000, 1, 1])],
        );
        op(
            KERNEL_MUL_MAT_UNPACKED,
            &[],
            out([2100, tokens, 1, 1]),
            &[a([96, 2100, 1, 1]), b([96, tokens, 1, 1])],
        );
        op(
            KERNEL_OUT_PROD,
            &[],
            out([2100, tokens, 1, 1]),
            &[a([2100, 32, 1, 1]), b([tokens, 32, 1, 1])],
        );
        op(
            KERNEL_DSV4_HC_PRE,
            &[(0, 1_f32.to_bits())],
            out([5000, tokens, 1, 1]),
            &[a([5000, 4, tokens, 1]), b([4, tokens, 1, 1])],
        );
        for taps in [3, 4] {
            op(
                KERNEL_CONCAT,
                &[(0, 0)],
                out([taps, 3000, tokens, 1]),
                &[a([taps - 1, 3000, tokens, 1]), b([1, 3000, tokens, 1])],
            );
        }
        op(
            KERNEL_CONCAT,
            &[(0, 0)],
            out([192, 16, tokens, 1]),
            &[a([128, 16, tokens, 1]), b([64, 16, tokens, 1])],
        );
        op(
            KERNEL_CONCAT,
            &[(0, 2)],
            out([4096, 2, 1 + tokens, 1]),
            &[a([4096, 2, 1, 1]), b([4096, 2, tokens, 1])],
        );
        op(
            KERNEL_SUM_ROWS,
            &[],
            out([1, tokens, 1, 1]),
            &[a([9000, tokens, 1, 1])],
        );
        op(
            KERNEL_ARGSORT,
            &[],
            tensor(2, TYPE_I32, [64, tokens, 1, 1]),
            &[a([64, tokens, 1, 1])],
        );
        // A part of a state, and a repeated row.
        op(
            KERNEL_COPY,
            &[],
            half([18_432, tokens, 1, 1]),
            &[a([18_432 * tokens, 1, 1, 1])],
        );
        op(
            KERNEL_COPY,
            &[],
            tensor(2, TYPE_Q8_0, [18_432, 1, 1, 1]),
            &[a([18_432, 1, 1, 1])],
        );
        op(
            KERNEL_REPEAT,
            &[],
            out([20_000, tokens, 1, 1]),
            &[a([5000, 1, 1, 1])],
        );
        op(
            KERNEL_MUL,
            &[],
            out([20_000, tokens, 1, 1]),
            &[a([20_000, tokens, 1, 1]), b([1, 1, 1, 1])],
        );
        op(
            KERNEL_SWIGLU,
            &[],
            out([8192, tokens, 1, 1]),
            &[a([16_384, tokens, 1, 1])],
        );
        let mask = tensor(1, H, [1000, tokens, 1, 1]);
        op(
            KERNEL_SOFT_MAX,
            &[(0, 1_f32.to_bits())],
            out([1000, tokens, 9, 1]),
            &[a([1000, tokens, 9, 1]), mask],
        );
        let gaps = Tensor {
            nb: [
                4,
                4 * 20_008,
                4 * 20_008 * u64::from(tokens.min(3)),
                4 * 20_008 * 8,
            ],
            ..a([20_000, tokens.min(3), 1, 1])
        };
        op(KERNEL_GELU, &[], Tensor { buffer: 2, ..gaps }, &[gaps]);
    }
    commands
}

/// Products and attentions.
fn others() -> Vec<(String, Command)> {
    let rows_f32 = |buffer, row: u64| RowsF32 {
        buffer,
        reserved: 0,
        offset: 0,
        strides: [4 * row, 64 * row, 64 * row],
    };
    let mut commands = Vec::new();
    for weight in [WeightType::Q4_0, WeightType::Q6K] {
        for m in [1, 2, 5, 16] {
            let body = MatMul {
                weights: Weights {
                    buffer: 0,
                    layout: weight.layout_id().0,
                    offset: 0,
                    k: 256,
                    n: 1120,
                    slices: [1; 2],
                },
                act: rows_f32(1, 256),
                dst: rows_f32(2, 1120),
                m,
                planes: [1; 2],
                dots: 2,
                epilogue: bytemuck::Zeroable::zeroed(),
            };
            commands.push((format!("{weight:?}, {m} rows"), Command::new(0, &body)));
        }
    }
    for (heads, kv, queries) in [(1, 1, 1), (8, 2, 1), (32, 8, 1), (4, 4, 7), (8, 2, 40)] {
        let cache = |buffer| tensor(buffer, H, [64, 700, kv, 1]);
        let body = Attention {
            scale: 0.125_f32.to_bits(),
            max_bias: 0,
            softcap: 0,
            reserved: 0,
            dst: tensor(2, F, [64, heads, queries, 1]),
            q: tensor(1, F, [64, queries, heads, 1]),
            k: cache(0),
            v: cache(1),
            mask: bytemuck::Zeroable::zeroed(),
            sinks: bytemuck::Zeroable::zeroed(),
        };
        let name = format!("attention, {heads} heads on {kv}, {queries} queries");
        commands.push((name, Command::new(0, &body)));
    }
    commands
}

#[test]
#[cfg_attr(miri, ignore = "Miri takes offence at the thread pool")]
fn every_operation_gives_the_same_bytes_on_any_number_of_threads() {
    let mut rng = Numbers::default();
    // Floats below 2 whose two halves are also finite f16.
    let mut elem = || f32::from_bits((rng.bits() >> 32) as u32 & 0x8fff_8fff | 0x3000_3000);
    let operands = [(); 3].map(|()| (0..BYTES / 4).map(|_| elem()).collect());
    let mut sessions = [1, 2, 4, 8].map(Session::new);
    let mut different = Vec::new();
    let all = [small(), of_one_shape(), of_several_shapes(), others()].concat();
    for (name, command) in all {
        let [alone, together @ ..] = &mut sessions;
        let want = alone.run(&operands, command);
        if let Err(refusal) = want {
            different.push(format!("{name}: refused, {refusal:?}"));
            continue;
        }
        for (session, threads) in together.iter_mut().zip([2, 4, 8]) {
            if session.run(&operands, command) != want {
                different.push(format!("{name} on {threads} threads"));
            }
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}
