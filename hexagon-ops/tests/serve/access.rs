//! The instructions for which cache operations of each operand are made: for scalar ones, an
//! operation for each 32 bytes is needed.
//!
//! Results that scalar stores write, and numbers that scalar loads read, would otherwise be old
//! bytes on one of the sides. Large rows of floats need a cache operation for each 128 bytes, a
//! quarter of the packets.

use std::ops::Range;

use hexagon_ops::layout::{MatrixLayout, WeightType};
use hexagon_ops::rt::cache::Access::{self, Scalar, Vector};
use hexagon_ops::wire::*;

use crate::driver::Host;
use crate::seed::tensor;

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
const BUFFER_BYTES: usize = 1 << 17;

/// A host whose operands have a buffer each: the result has buffer 0, and source i has buffer
/// i + 1. A cache operation: `true` if lines are cleaned, the buffer, its bytes, and the
/// instructions.
type Operation = (bool, usize, Range<usize>, Access);

struct Bench {
    host: Host,
    addresses: Vec<usize>,
}

impl Bench {
    fn new(buffers: usize) -> Self {
        let mut host = Host::new();
        let mut addresses = Vec::new();
        for number in 0..buffers {
            let (buffer, memory) = host.buffer(BUFFER_BYTES);
            assert_eq!(buffer as usize, number);
            addresses.push(memory.address());
        }
        Self { host, addresses }
    }

    /// Runs commands as one submission, and returns its cache operations.
    fn run(&mut self, commands: &[Command]) -> Vec<Operation> {
        self.host.around().cache_operations.clear();
        let completion = self.host.run(commands);
        assert_eq!((completion.status, completion.detail), (STATUS_OK, 0));
        let around = self.host.around();
        let operations = around.cache_operations.iter();
        let buffer = |base| self.addresses.iter().position(|at| *at == base).unwrap();
        operations
            .map(|it| (it.is_clean, buffer(it.base), it.range.clone(), it.access))
            .collect()
    }

    /// Runs a command, and checks that all operations on each buffer are for these instructions,
    /// and that the result is cleaned and each source invalidated.
    fn check(&mut self, what: &str, command: Command, want: &[Access]) {
        let operations = self.run(&[command]);
        for (number, access) in want.iter().enumerate() {
            let mut of_buffer = operations
                .iter()
                .filter(|(_, buffer, ..)| *buffer == number);
            let is_result = number == 0;
            let has_operation = of_buffer.clone().any(|it| it.0 == is_result);
            assert!(has_operation, "{what}: buffer {number} has no operation");
            let all = of_buffer.all(|(.., have)| have == access);
            assert!(
                all,
                "{what}: buffer {number} is not for {access:?}: {operations:?}"
            );
        }
    }

    fn check_op(
        &mut self,
        what: &str,
        op: (u32, &[(usize, u32)]),
        tensors: &[Tensor],
        want: &[Access],
    ) {
        assert_eq!(tensors.len(), want.len(), "{what}");
        self.check(what, Command::new(0, &operation(op, tensors)), want);
    }
}

/// An operation, whose result is the first tensor.
fn operation((kernel, params): (u32, &[(usize, u32)]), tensors: &[Tensor]) -> TensorOp {
    let mut op = TensorOp {
        kernel,
        dst: tensors[0],
        ..bytemuck::Zeroable::zeroed()
    };
    params.iter().for_each(|(at, word)| op.params[*at] = *word);
    op.src[..tensors.len() - 1].copy_from_slice(&tensors[1..]);
    op
}

/// Tensors of one shape, one in each buffer, by their types.
fn alike<const N: usize>(types: [u32; N], ne: [u32; 4]) -> [Tensor; N] {
    let mut buffers = 0..;
    types.map(|dtype| tensor(buffers.next().unwrap(), dtype, ne))
}

#[test]
fn rows_of_whole_lines_are_for_vectors_and_others_for_scalar_instructions() {
    let mut bench = Bench::new(4);
    let no: &[(usize, u32)] = &[];
    for (ne0, access) in [(32, Vector), (256, Vector), (33, Scalar), (8, Scalar)] {
        let ne = [ne0, 3, 1, 1];
        for kernel in [KERNEL_ADD, KERNEL_DIV, KERNEL_SWIGLU] {
            bench.check_op(
                "two sources",
                (kernel, no),
                &alike([F; 3], ne),
                &[access; 3],
            );
        }
        bench.check_op(
            "one source",
            (KERNEL_SILU, no),
            &alike([F; 2], ne),
            &[access; 2],
        );
        bench.check_op(
            "norm",
            (KERNEL_RMS_NORM, no),
            &alike([F; 3], ne),
            &[access; 3],
        );
        bench.check_op("copy", (KERNEL_COPY, no), &alike([F; 2], ne), &[access; 2]);
    }
    // 32 halves are less than a line.
    for (ne0, access) in [(32, Scalar), (64, Vector), (96, Scalar)] {
        let ne = [ne0, 3, 1, 1];
        for dtype in [H, TYPE_BF16] {
            let types = [F, dtype, dtype];
            bench.check_op(
                "halves",
                (KERNEL_MUL, no),
                &alike(types, ne),
                &[Vector, access, access],
            );
        }
        // Elements that move between rows are read and written by the same instructions.
        bench.check_op(
            "narrow",
            (KERNEL_COPY, no),
            &alike([H, F], ne),
            &[access; 2],
        );
    }
    // One element is repeated, and columns are not contiguous.
    let [to, from, mut other] = alike([F; 3], [64, 2, 1, 1]);
    other.ne[0] = 1;
    bench.check_op(
        "repeated",
        (KERNEL_MUL, no),
        &[to, from, other],
        &[Vector, Vector, Scalar],
    );
    let mut turned = tensor(1, F, [64, 64, 1, 1]);
    let to = Tensor {
        buffer: 0,
        ..turned
    };
    turned.nb.swap(0, 1);
    bench.check_op("turned", (KERNEL_NEG, no), &[to, turned], &[Vector, Scalar]);
    bench.check_op(
        "turned copy",
        (KERNEL_COPY, no),
        &[to, turned],
        &[Scalar, Scalar],
    );
    // The second half of a row of f16 may begin in the middle of a line.
    for (n, access) in [(32, Scalar), (64, Vector)] {
        let both = [tensor(0, F, [n, 2, 1, 1]), tensor(1, H, [2 * n, 2, 1, 1])];
        bench.check_op(
            "halves of rows",
            (KERNEL_SWIGLU, no),
            &both,
            &[Vector, access],
        );
    }
}

#[test]
fn numbers_and_sinks_are_for_scalar_loads() {
    let mut bench = Bench::new(4);
    let no: &[(usize, u32)] = &[];
    let ids = |buffer| tensor(buffer, TYPE_I32, [64, 1, 1, 1]);
    for (dtype, access) in [(F, Vector), (H, Vector), (TYPE_Q8_0, Scalar)] {
        let rows = |buffer, dtype| tensor(buffer, dtype, [128, 64, 1, 1]);
        let read = [rows(0, F), rows(1, dtype), ids(2)];
        bench.check_op(
            "GET_ROWS",
            (KERNEL_GET_ROWS, no),
            &read,
            &[access, access, Scalar],
        );
        let written = [rows(0, dtype), rows(1, F), ids(2)];
        bench.check_op(
            "SET_ROWS",
            (KERNEL_SET_ROWS, no),
            &written,
            &[access, access, Scalar],
        );
    }
    let scale = [(0, 1_f32.to_bits())];
    let [to, from, mask] = alike([F, F, H], [64, 2, 32, 1]);
    let mask = Tensor {
        ne: [64, 2, 1, 1],
        ..mask
    };
    let sinks = tensor(3, F, [32, 1, 1, 1]);
    let operands = [to, from, mask, sinks];
    let want = [Vector, Vector, Vector, Scalar];
    bench.check_op("SOFT_MAX", (KERNEL_SOFT_MAX, &scale), &operands, &want);
}

/// Parameters of ROPE that rotates the first `dims` of each row.
fn angles(dims: u32) -> [(usize, u32); 5] {
    let one = 1_f32.to_bits();
    [
        (1, dims),
        (2, 2),
        (5, 1e4_f32.to_bits()),
        (6, one),
        (8, one),
    ]
}

#[test]
fn rotations_are_for_vectors_if_their_pieces_are_whole_lines() {
    let mut bench = Bench::new(4);
    let positions = tensor(2, TYPE_I32, [4, 1, 1, 1]);
    let factors = tensor(3, F, [64, 1, 1, 1]);
    for (types, head, dims, want) in [
        ([F, F], 64, 64, [Vector, Vector]),
        ([F, F], 128, 64, [Vector, Vector]),
        ([F, F], 128, 80, [Scalar, Scalar]),
        ([F, F], 80, 64, [Scalar, Scalar]),
        ([H, H], 64, 64, [Scalar, Scalar]),
        ([H, F], 128, 128, [Vector, Vector]),
    ] {
        let [to, from] = alike(types, [head, 3, 4, 1]);
        let what = format!("ROPE of {head}, {dims}");
        let operands = [to, from, positions, factors];
        let want = [want[0], want[1], Scalar, Scalar];
        bench.check_op(&what, (KERNEL_ROPE, &angles(dims)), &operands, &want);
    }
    let cells = tensor(3, TYPE_I64, [4, 1, 1, 1]);
    for (types, head, want) in [
        // Rotated rows are written as whole rows.
        ([H, F], 64, [Vector, Vector]),
        ([H, F], 96, [Scalar, Scalar]),
        ([H, H], 64, [Scalar, Scalar]),
        ([H, F], 1024, [Vector, Vector]),
    ] {
        let [to, from] = alike(types, [head, 3, 4, 1]);
        let what = format!("ROPE, SET_ROWS of {head}");
        let operands = [to, from, positions, cells];
        let want = [want[0], want[1], Scalar, Scalar];
        bench.check_op(
            &what,
            (KERNEL_ROPE_SET_ROWS, &angles(head.min(128))),
            &operands,
            &want,
        );
    }
}

#[test]
fn results_that_scalar_stores_write_are_for_them() {
    let mut bench = Bench::new(3);
    let no: &[(usize, u32)] = &[];
    let row = |buffer, dtype| tensor(buffer, dtype, [256, 2, 1, 1]);
    let sorted = [row(0, TYPE_I32), row(1, F)];
    bench.check_op("ARGSORT", (KERNEL_ARGSORT, no), &sorted, &[Scalar; 2]);
    let largest = [tensor(0, TYPE_I32, [2, 1, 1, 1]), row(1, F)];
    bench.check_op("ARGMAX", (KERNEL_ARGMAX, no), &largest, &[Scalar; 2]);
    let count = [
        tensor(0, TYPE_I64, [1; 4]),
        row(1, TYPE_I32),
        row(2, TYPE_I32),
    ];
    bench.check_op(
        "COUNT_EQUAL",
        (KERNEL_COUNT_EQUAL, no),
        &count,
        &[Scalar; 3],
    );
    let sums = [tensor(0, F, [1, 2, 1, 1]), row(1, F)];
    bench.check_op("SUM_ROWS", (KERNEL_SUM_ROWS, no), &sums, &[Scalar; 2]);
    let copied = alike([TYPE_I32; 2], [256, 2, 1, 1]);
    bench.check_op("CPY of numbers", (KERNEL_COPY, no), &copied, &[Scalar; 2]);
}

/// Rows of `n` elements without gaps.
fn rows(buffer: u32, n: u32, count: u32) -> RowsF32 {
    let row = 4 * u64::from(n);
    let all = row * u64::from(count);
    RowsF32 {
        buffer,
        reserved: 0,
        offset: 0,
        strides: [row, all, all],
    }
}

#[test]
fn products_are_for_vectors_but_chosen_experts_for_scalar_loads() {
    for n in [32, 64, 33] {
        let mut bench = Bench::new(3);
        let layout = MatrixLayout::new(WeightType::Q8_0, n as usize, 64).unwrap();
        let (packed, _) = bench.host.buffer(2 * layout.matrix_bytes());
        let mut weights = Weights {
            buffer: packed,
            layout: WeightType::Q8_0.layout_id().0,
            offset: 0,
            k: 64,
            n,
            slices: [1; 2],
        };
        let of_n = if n == 33 { Scalar } else { Vector };
        for m in [1, 2, 40] {
            let mut product = MatMul {
                weights,
                act: rows(1, 64, m),
                dst: rows(0, n, m),
                m,
                planes: [1; 2],
                dots: 0,
                epilogue: bytemuck::Zeroable::zeroed(),
            };
            let what = format!("{m} × 64 × {n}");
            bench.check(&what, Command::new(0, &product), &[of_n, Vector]);
            product.epilogue.kernel = KERNEL_ADD;
            product.epilogue.other = rows(2, n, m);
            bench.check(&what, Command::new(0, &product), &[of_n, Vector, of_n]);
        }
        weights.slices = [2, 1];
        let experts = MatMulId {
            weights,
            act: rows(1, 64, 2),
            dst: rows(0, n, 2),
            ids: rows(2, 2, 40),
            slots: 2,
            act_slots: 2,
            tokens: 40,
            dots: 0,
        };
        bench.check(
            "experts",
            Command::new(0, &experts),
            &[of_n, Vector, Scalar],
        );
    }
}

#[test]
fn queries_and_results_of_an_attention_are_for_vectors_and_its_sinks_for_scalar_loads() {
    for (head, access) in [(64, Vector), (40, Scalar)] {
        let mut bench = Bench::new(5);
        let attention = Attention {
            scale: 1_f32.to_bits(),
            max_bias: 0,
            softcap: 0,
            reserved: 0,
            dst: tensor(0, F, [head, 32, 1, 1]),
            q: tensor(1, F, [head, 1, 32, 1]),
            k: tensor(3, H, [head, 64, 1, 1]),
            v: tensor(4, H, [head, 64, 1, 1]),
            mask: bytemuck::Zeroable::zeroed(),
            sinks: tensor(2, F, [32, 1, 1, 1]),
        };
        bench.check(
            "attention",
            Command::new(0, &attention),
            &[access, access, Scalar],
        );
    }
}

#[test]
fn states_and_rows_of_a_recurrence_are_for_vectors_and_numbers_of_tokens_for_scalar_loads() {
    for (size, access) in [(64, Vector), (48, Scalar)] {
        let mut bench = Bench::new(7);
        let head = |buffer| tensor(buffer, F, [size, 4, 2, 1]);
        let number = |buffer| tensor(buffer, F, [1, 4, 2, 1]);
        let state = tensor(6, F, [size, size, 4, 1]);
        let sources = [head(1), head(2), head(3), number(4), number(5), state];
        let result = tensor(0, F, [4 * size, 2 + size, 1, 1]);
        let mut op = WideOp {
            kernel: KERNEL_GATED_DELTA_NET,
            dst: NarrowTensor::new(&result).unwrap(),
            ..bytemuck::Zeroable::zeroed()
        };
        op.params[0] = 1;
        for (to, source) in op.src.iter_mut().zip(&sources) {
            *to = NarrowTensor::new(source).unwrap();
        }
        let want = [access, access, access, access, Scalar, Scalar, access];
        bench.check("recurrence", Command::new(0, &op), &want);
    }
}

#[test]
fn windows_over_whole_lines_of_channels_are_for_vectors() {
    let mut bench = Bench::new(3);
    for (taps, channels, tokens, access) in [
        (4, 64, 5, Vector),
        (3, 32, 1, Vector),
        (4, 32, 1, Vector),
        (4, 33, 5, Scalar),
        (5, 64, 5, Scalar),
    ] {
        let result = tensor(0, F, [channels, tokens, 1, 1]);
        let input = tensor(1, F, [taps - 1 + tokens, channels, 1, 1]);
        let weights = tensor(2, F, [taps, channels, 1, 1]);
        let tensors = [result, input, weights];
        bench.check_op("windows", (KERNEL_SSM_CONV, &[]), &tensors, &[access; 3]);
    }
}

#[test]
fn commands_of_a_list_are_for_vectors() {
    let mut bench = Bench::new(2);
    let (list, memory) = bench.host.buffer(2 * size_of::<Command>());
    bench.addresses.push(memory.address());
    let square = operation((KERNEL_SQR, &[]), &alike([F; 2], [64, 1, 1, 1]));
    memory.put(0, &[Command::new(0, &square); 2]);
    let body = List {
        buffer: list,
        count: 2,
        offset: 0,
    };
    let operations = bench.run(&[Command::new(0, &body)]);
    assert_eq!(operations[0], (false, 2, 0..1024, Vector));
}

/// Number of bytes whose lines all have separate places in the table of known ranges.
const APART_BYTES: usize = 64 * 128;

/// A host with one buffer, and rows of up to 64 elements at eight places in it.
struct Places {
    bench: Bench,
    /// Byte of the first place.
    first: usize,
}

impl Places {
    fn new() -> Self {
        let mut bench = Bench::new(0);
        let (_, memory) = bench.host.buffer(2 * APART_BYTES);
        bench.addresses.push(memory.address());
        let first = memory.address().next_multiple_of(APART_BYTES) - memory.address();
        Self { bench, first }
    }

    /// Returns a row of `n` elements, `offset` bytes after the start of a place.
    fn row(&self, place: usize, offset: usize, dtype: u32, n: u32) -> Tensor {
        Tensor {
            offset: (self.first + 1024 * place + offset) as u64,
            ..tensor(0, dtype, [n, 1, 1, 1])
        }
    }

    /// Squares of a place's row, or the numbers of its elements in sorted order.
    fn command(&self, kernel: u32, to: usize, from: usize, n: u32) -> Command {
        let dtype = if kernel == KERNEL_SQR { F } else { TYPE_I32 };
        let operands = [self.row(to, 0, dtype, n), self.row(from, 0, F, n)];
        Command::new(0, &operation((kernel, &[]), &operands))
    }

    /// Runs commands as one submission, and returns its cache operations: those that invalidate in
    /// order, then those that clean, sorted. Bytes count from the first place.
    fn run(&mut self, commands: &[Command]) -> [Vec<(Range<usize>, Access)>; 2] {
        let mut operations = [Vec::new(), Vec::new()];
        for (is_clean, _, range, access) in self.bench.run(commands) {
            let range = range.start - self.first..range.end - self.first;
            operations[usize::from(is_clean)].push((range, access));
        }
        operations[1].sort_unstable_by_key(|it| it.0.start);
        operations
    }
}

#[test]
fn a_range_that_was_read_for_vectors_is_read_again_for_scalar_loads() {
    let mut places = Places::new();
    let square = places.command(KERNEL_SQR, 0, 1, 64);
    let [sort, sort_squares] = [1, 0].map(|from| places.command(KERNEL_ARGSORT, 2, from, 64));
    let cleans = [(0..256, Vector), (2048..2304, Scalar)];
    for (commands, reads) in [
        ([square, sort], &[Vector, Scalar][..]),
        ([sort, square], &[Scalar]),
        // The DSP keeps its caches consistent for its own writes, so no operation is needed.
        ([square, sort_squares], &[Vector]),
    ] {
        let [have, cleaned] = places.run(&commands);
        let want: Vec<_> = reads.iter().map(|access| (1024..1280, *access)).collect();
        assert_eq!((have, &cleaned[..]), (want, &cleans[..]));
    }
}

#[test]
fn what_an_operation_in_place_leaves_unwritten_is_read_for_scalar_loads() {
    let mut places = Places::new();
    let row = places.row(1, 0, F, 128);
    let positions = places.row(0, 0, TYPE_I32, 1);
    let rope = operation((KERNEL_ROPE, &angles(64)), &[row, row, positions]);
    let copy = operation((KERNEL_COPY, &[]), &[row, row]);
    for op in [rope, copy] {
        let sort = places.command(KERNEL_ARGSORT, 2, 1, 128);
        let [reads, _] = places.run(&[Command::new(0, &op), sort]);
        let mut of_row = reads.iter().filter(|(range, _)| range.start == 1024);
        assert_eq!(of_row.next(), Some(&(1024..1536, Scalar)), "{reads:?}");
        assert_eq!(of_row.next(), None, "{reads:?}");
    }
}

#[test]
fn edges_of_a_result_are_for_scalar_loads() {
    let mut places = Places::new();
    let operands = [places.row(0, 64, F, 64), places.row(1, 0, F, 64)];
    let square = operation((KERNEL_SQR, &[]), &operands);
    // The row numbers are in the first line of the result.
    let ids = places.row(0, 0, TYPE_I32, 2);
    let table = Tensor {
        ne: [64, 2, 1, 1],
        nb: [4, 256, 512, 512],
        ..places.row(1, 0, F, 64)
    };
    let taken = Tensor {
        offset: places.row(3, 0, F, 64).offset,
        ..table
    };
    let take = operation((KERNEL_GET_ROWS, &[]), &[taken, table, ids]);
    let [reads, cleans] = places.run(&[Command::new(0, &square), Command::new(0, &take)]);
    let of_result: Vec<_> = reads.into_iter().filter(|it| it.0.start < 1024).collect();
    assert_eq!(of_result, [(0..128, Scalar), (256..384, Scalar)]);
    assert_eq!(cleans, [(0..384, Vector), (3072..3584, Vector)]);
}

#[test]
fn a_range_that_both_wrote_is_cleaned_for_scalar_stores() {
    let mut places = Places::new();
    for kernels in [[KERNEL_SQR, KERNEL_ARGSORT], [KERNEL_ARGSORT, KERNEL_SQR]] {
        for lengths in [[64, 32], [32, 64]] {
            let commands = [0, 1].map(|i| places.command(kernels[i], 0, 1, lengths[i]));
            let [_, cleans] = places.run(&commands);
            assert_eq!(cleans, [(0..256, Scalar)], "{kernels:?} {lengths:?}");
        }
    }
}

/// If other ranges were maintained, one side would read old bytes, or bytes of a neighbour would be
/// lost.
#[test]
fn a_product_is_for_the_lines_of_its_rows_and_no_others() {
    let mut bench = Bench::new(3);
    let rows = |buffer, offset, strides| RowsF32 {
        buffer,
        reserved: 0,
        offset,
        strides,
    };
    // 64 F32 of activations are two lines and 32 of results are one line; rows of results have no
    // gaps.
    let product = MatMul {
        weights: Weights {
            buffer: 2,
            layout: WeightType::Q8_0.layout_id().0,
            offset: 0,
            k: 64,
            n: 32,
            slices: [1, 1],
        },
        act: rows(1, 0, [512, 2048, 8192]),
        dst: rows(0, 0, [128, 1024, 4096]),
        m: 2,
        planes: [2, 2],
        ..bytemuck::Zeroable::zeroed()
    };
    let mut have = bench.run(&[Command::new(0, &product)]);
    have.retain(|(_, buffer, ..)| *buffer != 2);
    have.sort_by_key(|(is_clean, _, range, _)| (*is_clean, range.start));
    let mut want = Vec::new();
    for plane in [0, 2048, 8192, 8192 + 2048] {
        for row in [0, 512] {
            want.push((false, 1, plane + row..plane + row + 256, Vector));
        }
    }
    for plane in [0, 1024, 4096, 4096 + 1024] {
        want.push((true, 0, plane..plane + 256, Vector));
    }
    assert_eq!(have, want);

    // Results begin and end inside lines, so these lines are read before.
    let n = 33;
    let edges = MatMul {
        weights: Weights {
            n,
            ..product.weights
        },
        dst: rows(0, 64, [132, 264, 264]),
        planes: [1, 1],
        ..product
    };
    let experts = MatMulId {
        weights: Weights {
            slices: [1, 1],
            ..edges.weights
        },
        act: rows(1, 0, [256; 3]),
        dst: edges.dst,
        ids: rows(1, 4096, [128; 3]),
        slots: 2,
        act_slots: 1,
        tokens: 1,
        dots: 0,
    };
    let want = [
        (false, 0, 0..128, Scalar),
        (false, 0, 256..384, Scalar),
        (true, 0, 0..384, Scalar),
    ];
    for command in [Command::new(0, &edges), Command::new(0, &experts)] {
        let mut have = bench.run(&[command]);
        have.retain(|(_, buffer, ..)| *buffer == 0);
        have.sort_by_key(|(is_clean, _, range, _)| (*is_clean, range.start));
        assert_eq!(have, want, "{command:?}");
    }

    // An epilogue in place reads the whole result.
    let mut in_place = MatMul {
        planes: [1, 1],
        ..product
    };
    in_place.epilogue.kernel = KERNEL_ADD;
    in_place.epilogue.other = in_place.dst;
    let mut have = bench.run(&[Command::new(0, &in_place)]);
    have.retain(|(_, buffer, ..)| *buffer == 0);
    let want = [false, true].map(|is_clean| (is_clean, 0, 0..256, Vector));
    assert_eq!(have, want);
}

/// States that are older than the first token are not written. They are cleaned with the rest, so
/// they must not be old bytes of the cache.
#[test]
fn states_that_stay_are_read_with_those_that_are_written() {
    let result = |bench: &mut Bench, op: &WideOp| -> Vec<Operation> {
        let operations = bench.run(&[Command::new(0, op)]);
        let of_result = operations.into_iter().filter(|it| it.1 == 2);
        of_result.collect()
    };
    let mut bench = Bench::new(3);
    // 4 heads of 32, and for each kept token a state of 32 × 32 for each head.
    for (kept, reads) in [(1, None), (2, Some((false, 2, 0..33792, Scalar)))] {
        let head = |buffer| tensor(buffer, F, [32, 4, 2, 1]);
        let number = tensor(0, F, [1, 4, 2, 1]);
        let state = tensor(1, F, [32, 32, 4, 1]);
        let sources = [head(0), head(0), head(0), number, number, state];
        let mut op = WideOp {
            kernel: KERNEL_GATED_DELTA_NET,
            dst: NarrowTensor::new(&tensor(2, F, [128, 2 + 32 * kept, 1, 1])).unwrap(),
            ..bytemuck::Zeroable::zeroed()
        };
        op.params[0] = kept;
        for (to, source) in op.src.iter_mut().zip(&sources) {
            *to = NarrowTensor::new(source).unwrap();
        }
        let have = result(&mut bench, &op);
        let clean = (true, 2, 0..if kept == 1 { 17408 } else { 33792 }, Vector);
        let want: Vec<_> = reads.into_iter().chain([clean]).collect();
        assert_eq!(have, want, "a delta rule, {kept} states");
    }
    // 4 heads of 8 rows and 5 columns, 6 tokens, 2 sequences.
    for kept in [1, 2] {
        let elems = 4 * 8 * 6 + 4 * 8 * 5 * 2 * kept;
        let mut op = crate::seed::wide(KERNEL_SSM_SCAN, F);
        op.src[3] = NarrowTensor::new(&tensor(1, F, [1, 4, 1, 1])).unwrap();
        op.dst = NarrowTensor::new(&tensor(2, F, [elems, 1, 1, 1])).unwrap();
        op.params[0] = kept;
        let have = result(&mut bench, &op);
        let lines = 0..4 * elems as usize;
        assert_eq!(
            have.contains(&(false, 2, lines, Scalar)),
            kept == 2,
            "{have:?}"
        );
    }
}
