//! Random bytes as commands and counters: the loop answers or closes, and never panics or hangs.

use hexagon_ops::layout::WeightType;
use hexagon_ops::wire::{
    self, Body, Command, ERROR_RING, Epilogue, MatMul, MatMulId, RowsF32, Weights,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::driver::Host;
use crate::seed::{self, BYTES};

/// Commands that work with buffers 0, 1 and 2 of [`BYTES`] zero bytes.
fn seeds() -> [Command; 5] {
    let weights = wire::Weights {
        buffer: 0,
        layout: WeightType::Q4_1.layout_id().0,
        offset: 0,
        k: 32,
        n: 32,
        slices: [2, 1],
    };
    let rows_f32 = |buffer, strides| RowsF32 {
        buffer,
        reserved: 0,
        offset: 0,
        strides,
    };
    let product = MatMul {
        weights,
        act: rows_f32(1, [128, 512, 1024]),
        dst: rows_f32(2, [128, 512, 1024]),
        m: 4,
        planes: [2, 1],
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let single = MatMul {
        weights: Weights {
            slices: [1, 1],
            ..weights
        },
        planes: [1, 1],
        epilogue: Epilogue {
            kernel: wire::KERNEL_SWIGLU,
            swapped: 1,
            other: rows_f32(1, [128, 0, 0]),
        },
        ..product
    };
    let experts = MatMulId {
        weights,
        act: rows_f32(1, [128, 256, 0]),
        dst: rows_f32(2, [128, 256, 0]),
        ids: rows_f32(0, [8, 0, 0]),
        slots: 2,
        act_slots: 2,
        tokens: 3,
        dots: 2,
    };
    [
        command(&product),
        command(&single),
        command(&experts),
        command(&seed::attention(1)),
        command(&seed::attention(9)),
    ]
}

fn command<B: Body>(body: &B) -> Command {
    Command::new(0, body)
}

fn host() -> Host {
    let mut host = Host::new();
    for _ in 0..3 {
        host.buffer(BYTES);
    }
    host
}

#[test]
fn seeds_of_all_kernels_are_carried_out() {
    let mut host = host();
    for (index, row) in wire::OPERATIONS.iter().enumerate() {
        let completion = host.run(&[seed::command(index, wire::TYPE_F32)]);
        let have = (completion.status, completion.detail);
        assert_eq!(have, (0, 0), "kernel {}", row.kernel);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn random_commands_are_answered(op in 0_u32..9, flags in 0_u32..3, body in vec(any::<u8>(), wire::BODY_BYTES)) {
        let mut host = host();
        let mut command = seeds()[0];
        command.op = op;
        command.flags = flags;
        command.body.copy_from_slice(&body);
        let completion = host.run(&[command]);
        prop_assert_eq!(completion.done, u32::from(completion.status == 0));
    }

    /// A right command with a few words changed to values that sit at edges.
    #[test]
    fn damaged_commands_are_answered(
        which in 0_usize..4,
        damage in vec((0_usize..100, prop_oneof![
            any::<u32>(), 0_u32..40, Just(u32::MAX), Just(1 << 31), Just(0x1000), Just(0x4000),
        ]), 1..4),
    ) {
        let mut host = host();
        let mut command = seeds()[which];
        for (word, value) in damage {
            command.body[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
        }
        let completion = host.run(&[command]);
        prop_assert_eq!(completion.done, u32::from(completion.status == 0));
        prop_assert_eq!(host.run(&[seeds()[0]]).status, 0);
    }

    /// Damages operations on tensors in the same way: any kernel, any type.
    #[test]
    fn damaged_operations_on_tensors_are_answered(
        index in 0..wire::OPERATIONS.len(),
        dtype in prop_oneof![3 => Just(wire::TYPE_F32), 1 => 0..seed::TYPES],
        damage in vec((0_usize..100, prop_oneof![
            any::<u32>(), 0_u32..40, Just(u32::MAX), Just(1 << 31), Just(0x1000), Just(0x4000),
        ]), 0..4),
    ) {
        let mut host = host();
        let mut command = seed::command(index, dtype);
        for (word, value) in damage {
            command.body[4 * word..][..4].copy_from_slice(&value.to_le_bytes());
        }
        let completion = host.run(&[command]);
        prop_assert_eq!(completion.done, u32::from(completion.status == 0));
        prop_assert_eq!(host.run(&[seeds()[0]]).status, 0);
    }

    #[test]
    fn random_words_in_the_header_page_close_the_ring_or_are_harmless(
        words in vec((0_usize..256, any::<u32>()), 1..8),
    ) {
        let mut host = host();
        for (word, value) in words {
            host.shared.store(4 * word, value);
        }
        let result = host.serve();
        prop_assert!(matches!(result, Ok(()) | Err(ERROR_RING)), "{result:?}");
    }
}
