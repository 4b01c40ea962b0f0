//! Cache operations of a submission: lines that the host wrote are invalidated once, lines that the
//! DSP wrote are cleaned once, and there are none between commands.

use hexagon_ops::layout::WeightType;
use hexagon_ops::wire::*;

use crate::driver::Host;
use crate::seed::{self, tensor};

/// Bytes of a tensor.
const BYTES: usize = 1024;

/// A tensor of the only buffer, from its place in the buffer.
fn at(place: usize) -> Tensor {
    Tensor {
        offset: (place * BYTES) as u64,
        ..tensor(0, TYPE_F32, [256, 1, 1, 1])
    }
}

/// `place[dst] = place[a] · place[b]`.
fn multiply(dst: usize, a: usize, b: usize) -> Command {
    let op = TensorOp {
        kernel: KERNEL_MUL,
        dst: at(dst),
        src: [at(a), at(b), bytemuck::Zeroable::zeroed()],
        ..bytemuck::Zeroable::zeroed()
    };
    Command::new(0, &op)
}

#[test]
fn commands_of_a_submission_need_no_cache_operations_on_its_results() {
    let mut host = Host::new();
    let (_, memory) = host.buffer(8 * BYTES);
    memory.put(0, &[2.0_f32; 512]);
    // Reads two operands, writes a result, computes another from it, and writes the first result's
    // place again.
    let commands = [
        multiply(2, 0, 1),
        multiply(3, 2, 1),
        multiply(2, 2, 3),
        multiply(4, 2, 0),
    ];
    for count in 1..=4 {
        host.around().cache_bytes = [0; 2];
        assert_eq!(host.run(&commands[..count]).status, STATUS_OK);
        let results = [1, 2, 2, 3][count - 1];
        let have = host.around().cache_bytes;
        assert_eq!(have, [2 * BYTES, results * BYTES], "{count} commands");
    }
    assert_eq!(memory.get::<f32>(4 * BYTES, 256), [64.0; 256]);
}

#[test]
fn keys_and_values_that_the_dma_engine_reads_need_no_invalidation() {
    let mut host = Host::new();
    for buffer in 0..3 {
        assert_eq!(host.buffer(seed::BYTES).0, buffer);
    }
    // Keys of 2 heads of 8 f16 and 70 positions.
    let cache = 2 * 2 * 8 * 70;
    for queries in [1, 40] {
        let body = Attention {
            v: Tensor {
                offset: 2560,
                ..seed::attention(queries).k
            },
            mask: bytemuck::Zeroable::zeroed(),
            ..seed::attention(queries)
        };
        let query_bytes = (4 * 4 * 8 * queries as usize).next_multiple_of(128);
        let write = TensorOp {
            kernel: KERNEL_MUL,
            dst: at(0),
            src: [at(4), at(5), bytemuck::Zeroable::zeroed()],
            ..bytemuck::Zeroable::zeroed()
        };
        let commands = [Command::new(0, &write), Command::new(0, &body)];
        host.around().cache_bytes = [0; 2];
        assert_eq!(host.run(&commands[1..]).status, STATUS_OK);
        assert_eq!(host.around().cache_bytes, [query_bytes, query_bytes]);
        // The first keys are a result now. They are cleaned before they are copied, so the fence
        // needs no other operation.
        host.around().cache_bytes = [0; 2];
        assert_eq!(host.run(&commands).status, STATUS_OK);
        let have = host.around().cache_bytes;
        assert_eq!(have, [2 * BYTES + query_bytes, BYTES + query_bytes]);
        assert!(cache > BYTES);
    }
}

/// Its mapping is gone when the fence is answered, and another buffer may be mapped at the same
/// address.
#[test]
fn results_in_a_buffer_that_is_unmapped_are_cleaned_before() {
    let mut host = Host::new();
    let (fd, memory) = host.file(8 * BYTES);
    memory.put(0, &[2.0_f32; 512]);
    let map = Map {
        buffer: 0,
        fd,
        bytes: 8 * BYTES as u64,
    };
    let unmap = Unmap {
        buffer: 0,
        reserved: 0,
    };
    let commands = [
        Command::new(0, &map),
        multiply(2, 0, 1),
        Command::new(0, &unmap),
        Command::new(0, &map),
        multiply(3, 0, 1),
    ];
    assert_eq!(host.run(&commands).status, STATUS_OK);
    assert_eq!(host.around().cache_bytes, [4 * BYTES, 2 * BYTES]);
    let around = host.around();
    let cleans = around.cache_operations.iter().map(|it| it.is_clean);
    let want = [false, false, true, false, false, true];
    assert_eq!(cleans.collect::<Vec<_>>(), want);
}

/// The copy of weights to VTCM bypasses the cache.
#[test]
fn weights_that_an_earlier_command_wrote_are_cleaned_before_a_product() {
    let rows = |place: usize, strides| RowsF32 {
        buffer: 0,
        reserved: 0,
        offset: (place * BYTES) as u64,
        strides,
    };
    let weights = Weights {
        buffer: 0,
        layout: WeightType::Q4_0.layout_id().0,
        offset: 2 * BYTES as u64,
        k: 32,
        n: 32,
        slices: [1, 1],
    };
    let product = MatMul {
        weights,
        act: rows(4, [128; 3]),
        dst: rows(5, [128; 3]),
        m: 1,
        planes: [1, 1],
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let experts = MatMulId {
        weights,
        act: rows(4, [128; 3]),
        dst: rows(5, [128; 3]),
        ids: rows(6, [128; 3]),
        slots: 1,
        act_slots: 1,
        tokens: 1,
        dots: 2,
    };
    for command in [Command::new(0, &product), Command::new(0, &experts)] {
        let mut host = Host::new();
        host.buffer(8 * BYTES);
        host.around().cache_operations.clear();
        assert_eq!(host.run(&[multiply(2, 0, 1), command]).status, STATUS_OK);
        let around = host.around();
        let operations = around.cache_operations.iter();
        let places = operations.map(|it| (it.is_clean, it.range.start / BYTES));
        let mut places: Vec<_> = places.collect();
        // The ids of experts are read after the activations.
        places.retain(|it| *it != (false, 6));
        let want = [(false, 0), (false, 1), (true, 2), (false, 4), (true, 5)];
        assert_eq!(places, want, "{command:?}");
    }
}
