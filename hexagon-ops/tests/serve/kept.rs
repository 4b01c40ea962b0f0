//! Commands of lists that run again: they give the same results, and are checked again when
//! anything changed.

use hexagon_ops::layout::{Line, Tile, WeightType};
use hexagon_ops::serve::{BOUNDS, EXPERT, ROW, UNMAPPED};
use hexagon_ops::wire::{
    self, Command, Completion, List, Map, MatMul, MatMulId, RowsF32, TensorOp, Unmap, Weights,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::driver::{Host, Memory};
use crate::seed::{self, BYTES};

/// A host with three buffers of operands and one with a list.
struct Kept {
    host: Host,
    memory: Vec<Memory>,
    list: Memory,
}

impl Kept {
    fn new() -> Self {
        let mut host = Host::new();
        let memory = (0..3).map(|_| host.buffer(BYTES).1).collect();
        let list = host.buffer(4 * size_of::<Command>()).1;
        Self { host, memory, list }
    }

    /// Fills the operands; buffer 1 with zeros, if it holds numbers of rows.
    fn fill(&self, has_numbers: bool) {
        for (i, memory) in self.memory.iter().enumerate() {
            let elems: Vec<f32> = (0_u16..2048)
                .map(|k| match i == 1 && has_numbers {
                    true => 0.0,
                    false => f32::from(k % 23) * 0.25 - 2.0,
                })
                .collect();
            memory.put(0, &elems);
        }
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        let memory = self.memory.iter();
        memory.map(|memory| memory.get(0, BYTES)).collect()
    }

    /// Runs a command of the ring. The list holds it too: a damaged command may read the list's
    /// buffer.
    fn direct(&mut self, command: Command, has_numbers: bool) -> (Completion, Vec<Vec<u8>>) {
        self.fill(has_numbers);
        self.list.put(0, &[command]);
        let completion = self.host.run(&[command]);
        (completion, self.bytes())
    }

    /// Runs the list of one command.
    fn listed(&mut self, command: Command, has_numbers: bool) -> (Completion, Vec<Vec<u8>>) {
        self.fill(has_numbers);
        self.list.put(0, &[command]);
        let list = List {
            buffer: 3,
            count: 1,
            offset: 0,
        };
        let completion = self.host.run(&[Command::new(0, &list)]);
        (completion, self.bytes())
    }

    fn change(&mut self, command: Command) {
        assert_eq!(self.host.run(&[command]).status, wire::STATUS_OK);
    }
}

/// Products with experts, of one and of three rows, of four planes on two slices; attentions; a
/// product with an epilogue.
fn products() -> Vec<Command> {
    let rows_f32 = |buffer, strides| RowsF32 {
        buffer,
        reserved: 0,
        offset: 0,
        strides,
    };
    let product = |m, planes, slices, dots| MatMul {
        weights: Weights {
            buffer: 0,
            layout: WeightType::Q4_0.layout_id().0,
            offset: 0,
            k: 64,
            n: 32,
            slices,
        },
        act: rows_f32(1, [256, 768, 1536]),
        dst: rows_f32(2, [128, 512, 1024]),
        m,
        planes,
        dots,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let experts = MatMulId {
        weights: Weights {
            buffer: 0,
            layout: WeightType::Q4_0.layout_id().0,
            offset: 0,
            k: 64,
            n: 32,
            slices: [2, 1],
        },
        act: rows_f32(0, [256, 512, 0]),
        dst: rows_f32(2, [128, 256, 0]),
        ids: rows_f32(1, [8, 0, 0]),
        slots: 1,
        act_slots: 1,
        tokens: 3,
        dots: 2,
    };
    let mut combined = product(3, [1, 1], [1, 1], 2);
    combined.epilogue.kernel = wire::KERNEL_ADD;
    combined.epilogue.other = rows_f32(1, [128, 0, 0]);
    vec![
        Command::new(0, &experts),
        Command::new(0, &product(1, [1, 1], [1, 1], 2)),
        Command::new(0, &product(3, [1, 1], [1, 1], 2)),
        Command::new(0, &product(3, [2, 2], [2, 1], 2)),
        Command::new(0, &seed::attention(1)),
        Command::new(0, &seed::attention(9)),
        Command::new(0, &combined),
    ]
}

fn status(completion: &Completion) -> (u32, u32) {
    (completion.status, completion.detail)
}

#[test]
fn all_kernels_give_the_same_bytes_again() {
    let mut kept = Kept::new();
    let kernels = (0..wire::OPERATIONS.len()).map(|index| seed::command(index, wire::TYPE_F32));
    let mut executed = 0;
    for (i, command) in kernels.chain(products()).enumerate() {
        for has_numbers in [false, true] {
            let (want, want_bytes) = kept.direct(command, has_numbers);
            executed += usize::from(want.status == wire::STATUS_OK);
            for turn in 0..3 {
                let (have, bytes) = kept.listed(command, has_numbers);
                assert_eq!(status(&have), status(&want), "command {i}, turn {turn}");
                assert!(bytes == want_bytes, "command {i}, turn {turn}");
            }
        }
    }
    assert!(executed > 2 * wire::OPERATIONS.len() - 20, "{executed}");
}

/// VTCM holds activations, the table of exponentials and whatever the others write there meanwhile.
#[test]
fn vtcm_that_others_had_is_filled_again() {
    let mut kept = Kept::new();
    for (i, command) in products().into_iter().enumerate() {
        let (want, want_bytes) = kept.direct(command, false);
        kept.fill(false);
        kept.host.submit(&[command, command]);
        kept.host.submit(&[command]);
        kept.host.around().is_vtcm_wanted = true;
        // The server stops after the first submission, although the second one is already there.
        assert_eq!(kept.host.serve(), Err(wire::ERROR_LATER), "command {i}");
        assert_eq!(kept.host.shared.load(wire::STATE), wire::STATE_PARKED);
        assert_eq!(status(&kept.host.collect().unwrap()), status(&want));
        assert_eq!(kept.host.collect(), None);
        kept.host
            .server
            .units()
            .vtcm
            .fill(Tile([Line([0x7d; 128]); 16]));
        assert_eq!(kept.host.serve(), Ok(()), "command {i}");
        assert_eq!(kept.host.shared.load(wire::STATE), wire::STATE_PARKED);
        assert_eq!(status(&kept.host.collect().unwrap()), status(&want));
        assert!(kept.bytes() == want_bytes, "command {i}");
        kept.host.around().is_vtcm_wanted = false;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_command_that_changed_is_checked_as_a_new_one(
        index in 0..wire::OPERATIONS.len() + 7,
        damage in vec((0_usize..124, prop_oneof![
            any::<u32>(), 0_u32..40, Just(u32::MAX), Just(1 << 31), Just(0x1000), Just(0x4000),
        ]), 1..3),
    ) {
        let (mut kept, mut fresh) = (Kept::new(), Kept::new());
        let command = match index.checked_sub(wire::OPERATIONS.len()) {
            Some(product) => products()[product],
            None => seed::command(index, wire::TYPE_F32),
        };
        kept.listed(command, true);
        let mut damaged = command;
        for (word, value) in damage {
            damaged.body[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
        }
        let (have, bytes) = kept.listed(damaged, true);
        let (want, want_bytes) = fresh.direct(damaged, true);
        prop_assert_eq!(status(&have), status(&want));
        prop_assert!(bytes == want_bytes);
    }
}

/// The seed of a kernel.
fn of_kernel(kernel: u32) -> Command {
    let index = wire::OPERATIONS.iter().position(|row| row.kernel == kernel);
    seed::command(index.unwrap(), wire::TYPE_F32)
}

#[test]
fn a_buffer_that_is_unmapped_or_another_is_noticed() {
    for command in [of_kernel(wire::KERNEL_ADD), products()[1], products()[3]] {
        let mut kept = Kept::new();
        for _ in 0..2 {
            assert_eq!(kept.listed(command, false).0.status, wire::STATUS_OK);
        }
        let (_, want) = kept.listed(command, false);
        kept.change(Command::new(
            0,
            &Unmap {
                buffer: 2,
                reserved: 0,
            },
        ));
        let (refused, _) = kept.listed(command, false);
        assert_eq!(status(&refused), (wire::STATUS_BAD_COMMAND, UNMAPPED));

        let (fd, other) = kept.host.file(BYTES);
        let map = |bytes| {
            Command::new(
                0,
                &Map {
                    buffer: 2,
                    fd,
                    bytes,
                },
            )
        };
        let unmap = Command::new(
            0,
            &Unmap {
                buffer: 2,
                reserved: 0,
            },
        );
        kept.change(map(64));
        let (refused, _) = kept.listed(command, false);
        assert_eq!(status(&refused), (wire::STATUS_BAD_COMMAND, BOUNDS));
        kept.change(unmap);
        kept.change(map(BYTES as u64));
        let earlier = std::mem::replace(&mut kept.memory[2], other);
        earlier.put(0, &[0_u8; BYTES]);
        assert!(kept.listed(command, false).1 == want);
        assert!(earlier.get::<u8>(0, BYTES) == [0; BYTES]);
    }
}

#[test]
fn numbers_of_rows_and_experts_are_checked_in_every_run() {
    let kernels = [
        wire::KERNEL_SET_ROWS,
        wire::KERNEL_GET_ROWS,
        wire::KERNEL_ROPE_SET_ROWS,
    ];
    let rows = kernels.map(|kernel| (of_kernel(kernel), ROW));
    for (command, detail) in rows.into_iter().chain([(products()[0], EXPERT)]) {
        let mut kept = Kept::new();
        for _ in 0..2 {
            assert_eq!(kept.listed(command, true).0.status, wire::STATUS_OK);
        }
        let list = List {
            buffer: 3,
            count: 1,
            offset: 0,
        };
        for wrong in [9_i32, -1, i32::MIN] {
            kept.fill(true);
            kept.memory[1].put(0, &[wrong]);
            let refused = kept.host.run(&[Command::new(0, &list)]);
            let want = (wire::STATUS_BAD_COMMAND, detail);
            assert_eq!(status(&refused), want, "{command:?} {wrong}");
        }
        assert_eq!(kept.listed(command, true).0.status, wire::STATUS_OK);
    }
}

#[test]
fn a_command_that_changed_twice_by_the_same_amount_is_another() {
    let mut kept = Kept::new();
    let seed = of_kernel(wire::KERNEL_ADD);
    let body: TensorOp = *bytemuck::from_bytes(&seed.body[..size_of::<TensorOp>()]);
    let mut changed = Vec::new();
    for step in [4, 128, 1024] {
        let mut both_sources = body;
        both_sources.src[0].offset += step;
        both_sources.src[1].offset += step;
        let mut result_too = body;
        result_too.dst.offset += step;
        result_too.src[1].offset += step;
        changed.extend([both_sources, result_too]);
    }
    for changed in changed {
        let changed = Command::new(0, &changed);
        let (_, want) = kept.direct(changed, false);
        let (completion, earlier) = kept.listed(seed, false);
        assert_eq!(completion.status, wire::STATUS_OK);
        let (completion, have) = kept.listed(changed, false);
        assert_eq!(completion.status, wire::STATUS_OK);
        assert!(have == want && have != earlier, "{changed:?}");
    }
}

/// Commands at other places of a buffer may be kept at the same place of the table.
#[test]
fn commands_far_into_a_buffer_are_kept_too() {
    const COUNT: usize = 3;
    let mut kept = Kept::new();
    let bytes = size_of::<Command>();
    let (buffer, memory) = kept.host.buffer(2500 * bytes);
    let x = seed::tensor(0, wire::TYPE_F32, [4, 1, 1, 1]);
    let scale = |factor: f32| {
        let mut body = TensorOp {
            kernel: wire::KERNEL_SCALE,
            dst: x,
            src: [
                x,
                bytemuck::Zeroable::zeroed(),
                bytemuck::Zeroable::zeroed(),
            ],
            ..bytemuck::Zeroable::zeroed()
        };
        body.params[0] = factor.to_bits();
        Command::new(0, &body)
    };
    let lists = [
        (0, 2.0),
        (1022, 0.5),
        (1024, 3.0),
        (2047, -1.0),
        (2497, 4.0),
    ];
    for (first, factor) in [lists, lists].concat() {
        memory.put(first * bytes, &[scale(factor); COUNT]);
        kept.memory[0].put(0, &[1.0_f32, 2.0, -3.0, 4.0]);
        let list = List {
            buffer,
            count: 3,
            offset: (first * bytes) as u64,
        };
        let completion = kept.host.run(&[Command::new(0, &list)]);
        assert_eq!((completion.status, completion.done), (wire::STATUS_OK, 3));
        let cube = factor * factor * factor;
        let want = [1.0, 2.0, -3.0, 4.0].map(|x| x * cube);
        assert_eq!(kept.memory[0].get::<f32>(0, 4), want, "from {first}");
    }
}
