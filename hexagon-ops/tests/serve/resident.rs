//! Activations that a product leaves in VTCM for the next one. The next one may have others of the
//! same shape, and commands between the two may write to the activations or use VTCM.

use bytemuck::Zeroable;
use hexagon_ops::layout::{Line, Tile, WeightType};
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::driver::{Host, Meanwhile, Memory};
use crate::matmul::load_weights;
use crate::seed::{self, BYTES, tensor};

const K: usize = 64;
const N: usize = 40;
/// Bytes from the first activations of a buffer to the second.
const APART: usize = BYTES / 2;
/// Bytes of the buffers of results, and of that of a list.
const RESULT_BYTES: usize = 4 * 8 * N;
const LIST_BYTES: usize = 8 * size_of::<Command>();

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

/// A host whose buffers 0, 1 and 2 are those of [`seed`]; activations are in 1 and 2.
struct Bench {
    host: Host,
    memory: Vec<Memory>,
    weights: Weights,
    /// Operands before each run, by buffer.
    operands: Vec<Vec<f32>>,
    results: Vec<(u32, Memory)>,
    list: (u32, Memory),
}

impl Bench {
    fn new(weight: WeightType) -> Self {
        let mut numbers = Numbers::default();
        let mut host = Host::new();
        let memory = (0..3).map(|_| host.buffer(BYTES).1).collect();
        // Both halves of these numbers are ordinary f16, too, because the buffer also serves as
        // keys and values.
        let keys = (0..BYTES / 4).map(|i| [0.5, -1.0, 0.75, 2.0, -0.25][i % 5]);
        let mut random = || (0..BYTES / 4).map(|_| numbers.float()).collect();
        let operands = vec![keys.collect(), random(), random()];
        let (weights, _) = load_weights(&mut host, weight, (N, K), [1, 1], &mut numbers);
        let results = (0..4).map(|_| host.buffer(RESULT_BYTES)).collect();
        let list = host.buffer(LIST_BYTES);
        Self {
            host,
            memory,
            weights,
            operands,
            results,
            list,
        }
    }

    /// Returns a product of `m` rows at a byte of a buffer, whose results are number `result`.
    fn product(&self, m: usize, place: (u32, usize), result: usize) -> Command {
        Command::new(0, &self.body(m, place, result))
    }

    fn body(&self, m: usize, (buffer, offset): (u32, usize), result: usize) -> MatMul {
        let rows = |buffer, offset, row: usize| RowsF32 {
            buffer,
            reserved: 0,
            offset,
            strides: [4 * row as u64, 0, 0],
        };
        MatMul {
            weights: self.weights,
            act: rows(buffer, offset as u64, K),
            dst: rows(self.results[result].0, 0, N),
            m: number(m),
            planes: [1, 1],
            dots: 2,
            epilogue: Zeroable::zeroed(),
        }
    }

    /// Writes all operands, and zeros to the results. Buffer 1 of [`seed`] holds numbers of rows
    /// and experts. Activations left in VTCM by earlier commands might be correct by chance, so
    /// they are overwritten.
    fn fill(&mut self) {
        let garbage = Tile([Line([0x7d; 128]); 16]);
        self.host.server.units().vtcm.fill(garbage);
        for (memory, operands) in self.memory.iter().zip(&self.operands) {
            memory.put(0, operands);
        }
        self.memory[1].put(0, &[0_u8; APART]);
        for (_, memory) in &self.results {
            memory.put(0, &[0_u8; RESULT_BYTES]);
        }
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        let operands = self.memory.iter().map(|memory| memory.get(0, BYTES));
        let results = self.results.iter();
        operands
            .chain(results.map(|(_, memory)| memory.get(0, RESULT_BYTES)))
            .collect()
    }

    fn run(&mut self, commands: &[Command]) {
        let completion = self.host.run(commands);
        assert_eq!((completion.status, completion.detail), (STATUS_OK, 0));
    }

    /// Checks that commands of one submission give the bytes that they give one by one: in the
    /// ring, and twice in a list.
    fn check(&mut self, what: &str, commands: &[Command]) {
        self.fill();
        for command in commands {
            self.run(&[*command]);
        }
        let want = self.bytes();
        self.fill();
        self.run(commands);
        assert!(self.bytes() == want, "{what}: in the ring");
        self.list.1.put(0, commands);
        let list = List {
            buffer: self.list.0,
            count: number(commands.len()),
            offset: 0,
        };
        for turn in 0..2 {
            self.fill();
            self.run(&[Command::new(0, &list)]);
            assert!(self.bytes() == want, "{what}: turn {turn} of a list");
        }
    }
}

/// Weights whose products of one row have activations of 8 bits in either form, and weights for
/// which there are only tiles.
const WEIGHTS: [WeightType; 3] = [WeightType::Q4_0, WeightType::Q8_0, WeightType::F16];
/// Rows for dot products and for tiles.
const ROWS: [usize; 4] = [1, 2, 5, 8];

#[test]
fn products_of_other_activations_of_the_same_shape_are_what_each_is_alone() {
    for weight in WEIGHTS {
        let mut bench = Bench::new(weight);
        for m in ROWS {
            // The second place shares all but one row with the first. The third is elsewhere, and
            // the fourth is at the same offset of another buffer.
            let places = [(2, 0), (2, 4 * K), (2, APART), (1, APART), (2, 0)];
            for (i, first) in places.into_iter().enumerate() {
                for second in places.into_iter().skip(i + 1) {
                    let commands = [
                        bench.product(m, first, 0),
                        bench.product(m, second, 1),
                        bench.product(m, first, 2),
                    ];
                    let what = format!("{weight:?}, {m} rows at {first:?} and {second:?}");
                    bench.check(&what, &commands);
                }
            }
        }
    }
}

/// One row is quantized to 8 bits, quantized to 16 bits, or packed into a tile; two rows are
/// quantized to 8 bits or packed.
#[test]
fn activations_in_another_form_are_what_each_is_alone() {
    for weight in WEIGHTS {
        let mut bench = Bench::new(weight);
        for m in [1, 2] {
            for first in 0..4 {
                for second in 0..4 {
                    let product = |dots, result| {
                        let mut body = bench.body(m, (2, 0), result);
                        body.dots = dots;
                        Command::new(0, &body)
                    };
                    let commands = [product(first, 0), product(second, 1), product(first, 2)];
                    let what = format!("{weight:?}, {m} rows, forms {first} and {second}");
                    bench.check(&what, &commands);
                }
            }
        }
    }
}

/// `-2 x` in place, x being some elements of a buffer.
fn scale(buffer: u32, first: usize, count: usize) -> Command {
    let x = Tensor {
        offset: 4 * first as u64,
        ..tensor(buffer, TYPE_F32, [number(count), 1, 1, 1])
    };
    let mut body = TensorOp {
        kernel: KERNEL_SCALE,
        dst: x,
        ..Zeroable::zeroed()
    };
    body.params[0] = (-2.0_f32).to_bits();
    body.src[0] = x;
    Command::new(0, &body)
}

#[test]
fn activations_that_a_command_changes_are_read_again() {
    for weight in WEIGHTS {
        let mut bench = Bench::new(weight);
        for m in ROWS {
            let all = m * K;
            // Rows in the middle of the buffer, so that a command may write before and after them.
            let place = (2, 4 * K);
            for (first, count) in [
                (K, all),
                (0, 2048),
                (K, 1),
                (K + all - 1, 1),
                (K + all / 2, 3),
                (K - 1, 2),
                (K + all - 1, 2),
                // Writes that do not touch the activations.
                (K - 1, 1),
                (K + all, 1),
                (2040, 8),
            ] {
                let commands = [
                    bench.product(m, place, 0),
                    scale(2, first, count),
                    bench.product(m, place, 1),
                ];
                let what = format!("{weight:?}, {m} rows, {count} elements from {first}");
                bench.check(&what, &commands);
            }
            // The results of another product, whose activations are elsewhere, replace these
            // activations.
            let mut other = bench.body(1, (1, APART), 3);
            (other.dst.buffer, other.dst.offset) = (2, 4 * K as u64);
            let commands = [
                bench.product(m, place, 0),
                Command::new(0, &other),
                bench.product(m, place, 1),
            ];
            bench.check(&format!("{weight:?}, {m} rows, a product"), &commands);
        }
    }
}

/// Commands that use VTCM themselves, and write at byte `offset` of buffer 2.
fn users_of_vtcm(weights: Weights, offset: usize) -> Vec<(&'static str, Command)> {
    let attention = |queries| {
        let mut body = seed::attention(queries);
        body.dst.offset = offset as u64;
        Command::new(0, &body)
    };
    let mut recurrence = seed::wide(KERNEL_GATED_LINEAR_ATTN, TYPE_F32);
    recurrence.dst.offset = offset as u64;
    let rows_f32 = |buffer, offset, strides| RowsF32 {
        buffer,
        reserved: 0,
        offset,
        strides,
    };
    let experts = MatMulId {
        weights,
        act: rows_f32(1, APART as u64, [256, 512, 0]),
        dst: rows_f32(2, offset as u64, [160, 320, 0]),
        ids: rows_f32(1, 0, [8, 0, 0]),
        slots: 1,
        act_slots: 1,
        tokens: 3,
        dots: 2,
    };
    vec![
        ("an attention", attention(1)),
        ("an attention of tiles", attention(9)),
        ("a recurrence", Command::new(0, &recurrence)),
        ("experts", Command::new(0, &experts)),
    ]
}

#[test]
fn a_command_that_uses_vtcm_leaves_no_activations_there() {
    for weight in WEIGHTS {
        let mut bench = Bench::new(weight);
        for m in ROWS {
            for (name, offset) in [("beside", APART), ("over the rows", 0)] {
                for (user, command) in users_of_vtcm(bench.weights, offset) {
                    let commands = [
                        bench.product(m, (2, 0), 0),
                        command,
                        bench.product(m, (2, 0), 1),
                    ];
                    let what = format!("{weight:?}, {m} rows, {user} {name}");
                    bench.check(&what, &commands);
                }
            }
        }
    }
}

#[test]
fn activations_that_change_under_another_number_of_their_memory_are_read_again() {
    for m in ROWS {
        let mut bench = Bench::new(WeightType::Q8_0);
        let (fd, memory) = bench.host.file(BYTES);
        for buffer in [50, 51] {
            let map = Map {
                buffer,
                fd,
                bytes: BYTES as u64,
            };
            bench.run(&[Command::new(0, &map)]);
        }
        bench.memory[2] = memory;
        let commands = [
            bench.product(m, (50, 0), 0),
            scale(51, m * K - 1, 1),
            bench.product(m, (50, 0), 1),
        ];
        bench.check(&format!("{m} rows"), &commands);
    }
}

/// The loop does not return between the two submissions, so it has seen the first activations.
#[test]
fn activations_that_the_host_changes_between_submissions_are_read_again() {
    for m in ROWS {
        let mut bench = Bench::new(WeightType::Q8_0);
        bench.fill();
        let [command, of_changed] =
            [((2, 0), 0), ((2, APART), 1)].map(|(place, result)| bench.product(m, place, result));
        bench.run(&[of_changed]);
        let want: Vec<u8> = bench.results[1].1.get(0, 4 * m * N);

        let row_bytes = 4 * m * K;
        let (memory, ring, layout) = (
            bench.memory[2],
            bench.host.memory.shared(),
            bench.host.layout,
        );
        let sequence = bench.host.sequence + 2;
        let mut is_done = false;
        bench.host.around().cache_operations.clear();
        bench.host.around().meanwhile = Some(Meanwhile::new(move || {
            if std::mem::replace(&mut is_done, true) {
                return;
            }
            memory.put(0, &memory.get::<u8>(APART, row_bytes));
            let published = ring.load(PUBLISHED);
            let mut again = command;
            (again.sequence, again.flags) = (sequence, FENCE);
            ring.write(layout.command(published), &again);
            ring.store(PUBLISHED, published.wrapping_add(1));
        }));
        bench.host.submit(&[command]);
        bench.host.serve().unwrap();
        bench.host.around().meanwhile = None;
        for _ in 0..2 {
            assert_eq!(bench.host.collect().unwrap().status, STATUS_OK);
        }
        assert_eq!(bench.results[0].1.get::<u8>(0, 4 * m * N), want, "{m} rows");
        // The data cache may hold old bytes of these operands.
        let around = bench.host.around();
        let reads = around
            .cache_operations
            .iter()
            .filter(|operation| (operation.is_clean, operation.base) == (false, memory.address()));
        assert_eq!(reads.count(), 2, "{m} rows");
    }
}
