//! Random bytes as commands and counters: the loop answers or closes, and never panics or hangs.

use hexagon_ops::layout::WeightType;
use hexagon_ops::wire::{self, Body, Command, ERROR_RING, MatMul, MatMulId, Plain, TensorOp};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::driver::Host;

const BYTES: usize = 1 << 13;

/// Commands that work with buffers 0, 1 and 2 of [`BYTES`] zero bytes.
fn seeds() -> [Command; 4] {
    let weights = wire::Weights {
        buffer: 0,
        layout: WeightType::Q4_1.layout_id().0,
        offset: 0,
        k: 32,
        n: 32,
        slices: [2, 1],
    };
    let plain = |buffer, strides| Plain {
        buffer,
        reserved: 0,
        offset: 0,
        strides,
    };
    let product = MatMul {
        weights,
        act: plain(1, [128, 512, 1024]),
        dst: plain(2, [128, 512, 1024]),
        m: 4,
        planes: [2, 1],
        reserved: 0,
    };
    let experts = MatMulId {
        weights,
        act: plain(1, [128, 256, 0]),
        dst: plain(2, [128, 256, 0]),
        ids: plain(0, [8, 0, 0]),
        slots: 2,
        act_slots: 2,
        tokens: 3,
        reserved: 0,
    };
    let tensor = |buffer, dtype, ne: [u32; 4]| {
        let size = if dtype == wire::TYPE_I64 { 8 } else { 4 };
        let [n0, n1, n2, _] = ne.map(u64::from);
        wire::Tensor {
            buffer,
            dtype,
            offset: 0,
            ne,
            nb: [size, size * n0, size * n0 * n1, size * n0 * n1 * n2],
        }
    };
    let none: wire::Tensor = bytemuck::Zeroable::zeroed();
    let rows = TensorOp {
        kernel: wire::KERNEL_SET_ROWS,
        reserved: 0,
        params: [0; 16],
        dst: tensor(2, wire::TYPE_F32, [16, 9, 2, 1]),
        src: [
            tensor(1, wire::TYPE_F32, [16, 3, 2, 1]),
            tensor(0, wire::TYPE_I64, [3, 2, 1, 1]),
            none,
        ],
    };
    let sum = TensorOp {
        kernel: wire::KERNEL_ADD,
        dst: tensor(2, wire::TYPE_F32, [16, 3, 2, 1]),
        src: [
            tensor(1, wire::TYPE_F32, [16, 3, 2, 1]),
            tensor(1, wire::TYPE_F32, [8, 1, 2, 1]),
            none,
        ],
        ..rows
    };
    [
        command(&product),
        command(&experts),
        command(&rows),
        command(&sum),
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn random_commands_are_answered(op in 0_u32..8, flags in 0_u32..3, body in vec(any::<u8>(), wire::BODY_BYTES)) {
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
        damage in vec((0_usize..84, prop_oneof![
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
