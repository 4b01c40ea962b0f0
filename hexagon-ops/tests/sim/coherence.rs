//! Strict coherence: a product is right with all cache operations, and wrong without any one of
//! them.

use bytemuck::Zeroable;
use hexagon_ops::layout::WeightType;
use hexagon_ops::sim::{Coherence, Machine, Options};
use hexagon_ops::wire::{Command, KERNEL_COPY, MatMul, RowsF32, TYPE_I8, Tensor, TensorOp, Unmap};
use test_kit::nmse;

use crate::common::Numbers;
use crate::host::{Memory, Session, start};
use crate::product::{DST_OFFSET, Product};

const NMSE: f64 = 5e-4;

/// Runs a product on a chip with strict coherence, leaving out the cache operation that `skip`
/// names. Returns the error.
fn error_without(skip: &str, weight: WeightType, m: usize, numbers: &mut Numbers) -> f64 {
    let machine = start(Options {
        coherence: Coherence::Strict,
        ..Options::new(75)
    });
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let product = Product::new(&mut session, weight, m, numbers);
    product.load();
    let clean = |what: &str, memory: crate::host::Memory| {
        if what != skip {
            session.cache.clean(memory.base, memory.bytes);
        }
    };
    clean("weights", product.weights);
    clean("activations", product.act);
    let completion = session.run(&[product.command]);
    // Poisoned activations make the FP16 kernel overflow, which the DSP may report.
    assert!(completion.status == 0 || skip == "activations" || skip == "weights");
    if skip != "results" {
        let results = product.dst.at(DST_OFFSET);
        session.cache.invalidate(results, product.dst_bytes());
    }
    product.error()
}

#[test]
fn a_missing_cache_operation_of_the_host_spoils_the_result() {
    let mut numbers = Numbers::default();
    for weight in WeightType::ALL {
        for m in [1, 5] {
            let error = error_without("nothing", weight, m, &mut numbers);
            assert!(error < NMSE, "{weight:?} M {m}: {error:e}");
            for skip in ["weights", "activations", "results"] {
                let error = error_without(skip, weight, m, &mut numbers);
                // Written so that NaN counts as wrong.
                let right = error < 0.1;
                assert!(
                    !right,
                    "{weight:?} M {m} without cleaning {skip}: {error:e}"
                );
            }
        }
    }
}

#[test]
fn results_of_one_command_are_activations_of_the_next() {
    let mut numbers = Numbers::default();
    let machine = start(Options {
        coherence: Coherence::Strict,
        ..Options::new(79)
    });
    let mut session = Session::new(&machine, 79);
    session.start().unwrap();
    let product = Product::new(&mut session, WeightType::Q8_0, 3, &mut numbers);
    product.load();
    session
        .cache
        .clean(product.weights.base, product.weights.bytes);
    session.cache.clean(product.act.base, product.act.bytes);
    // The second product reads 64 of the 120 results of the first product, which the host never
    // reads.
    let second = MatMul {
        m: 1,
        act: product.body.dst,
        dst: RowsF32 {
            offset: 2048,
            ..product.body.dst
        },
        ..product.body
    };
    let completion = session.run(&[product.command, Command::new(0, &second)]);
    assert_eq!((completion.status, completion.done), (0, 2));
    session
        .cache
        .invalidate(product.dst.base, product.dst.bytes);
    assert!(product.error() < NMSE);
    let inputs: Vec<f32> = product.dst.get(DST_OFFSET, 64);
    let chained: Vec<f32> = product.dst.get(2048, product.n);
    assert!(nmse(&chained, &product.reference(&inputs)) < NMSE);
}

#[test]
fn what_the_host_wrote_beside_results_survives() {
    let mut numbers = Numbers::default();
    let machine = start(Options {
        coherence: Coherence::Strict,
        ..Options::new(75)
    });
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let product = Product::new(&mut session, WeightType::Q4_0, 1, &mut numbers);
    product.load();
    for memory in [product.weights, product.act] {
        session.cache.clean(memory.base, memory.bytes);
    }
    for turn in 1..4_u8 {
        // In the lines of the first and last result, and in the neighbouring lines.
        let end = DST_OFFSET + product.dst_bytes();
        let before = [turn; DST_OFFSET];
        let after = [turn; 200];
        product.dst.put(0, &before);
        product.dst.put(end, &after);
        session.cache.clean(product.dst.base, product.dst.bytes);
        assert_eq!(session.run(&[product.command]).status, 0);
        session
            .cache
            .invalidate(product.dst.base, product.dst.bytes);
        assert_eq!(product.dst.get::<u8>(0, DST_OFFSET), before);
        assert_eq!(product.dst.get::<u8>(end, 200), after);
        assert!(product.error() < NMSE);
    }
}

/// Bytes without gaps.
fn bytes(buffer: u32, offset: usize, count: usize) -> Tensor {
    rows(buffer, offset, [count, 1], count)
}

/// Rows of bytes, `stride` apart.
fn rows(buffer: u32, offset: usize, [n, count]: [usize; 2], stride: usize) -> Tensor {
    let number = |value: usize| u32::try_from(value).unwrap();
    let plane = (stride * count) as u64;
    Tensor {
        buffer,
        dtype: TYPE_I8,
        offset: offset as u64,
        ne: [number(n), number(count), 1, 1],
        nb: [1, stride as u64, plane, plane],
    }
}

fn copy(dst: Tensor, src: Tensor) -> Command {
    let body = TensorOp {
        kernel: KERNEL_COPY,
        reserved: 0,
        params: [0; 16],
        dst,
        src: [src, Zeroable::zeroed(), Zeroable::zeroed()],
    };
    Command::new(0, &body)
}

/// A session of a chip with strict coherence.
fn strict_session() -> (Machine, Session) {
    let machine = start(Options {
        coherence: Coherence::Strict,
        ..Options::new(75)
    });
    let session = Session::new(&machine, 75);
    session.start().unwrap();
    (machine, session)
}

/// Writes random bytes to a buffer for the DSP.
fn load(session: &Session, memory: Memory, numbers: &mut Numbers) -> Vec<u8> {
    let values: Vec<u8> = (0..memory.bytes)
        .map(|_| numbers.bits().to_le_bytes()[5])
        .collect();
    memory.put(0, &values);
    session.cache.clean(memory.base, memory.bytes);
    values
}

/// Runs commands and returns a buffer as the host sees it.
fn run(session: &mut Session, commands: &[Command], memory: Memory) -> Vec<u8> {
    let completion = session.run(commands);
    assert_eq!((completion.status, completion.detail), (0, 0));
    session.cache.invalidate(memory.base, memory.bytes);
    memory.get(0, memory.bytes)
}

#[test]
fn a_result_is_read_together_with_bytes_of_the_host() {
    let (_machine, mut session) = strict_session();
    let numbers = &mut Numbers::default();
    let [(a, a_buffer), (b, b_buffer), (c, c_buffer)] = [0; 3].map(|_| session.buffer(4096));
    let a = load(&session, a, numbers);
    let b = load(&session, b, numbers);
    load(&session, c, numbers);
    // Bytes 1000 to 1499 of b are written, then 700 to 2199 are read: both ranges begin and end
    // inside lines.
    let commands = [
        copy(bytes(b_buffer, 1000, 500), bytes(a_buffer, 3, 500)),
        copy(bytes(c_buffer, 10, 1500), bytes(b_buffer, 700, 1500)),
    ];
    let have = run(&mut session, &commands, c);
    let want = [&b[700..1000], &a[3..503], &b[1500..2200]].concat();
    assert_eq!(have[10..1510], want);
}

#[test]
fn a_later_submission_reads_what_the_host_wrote_since() {
    let (_machine, mut session) = strict_session();
    let numbers = &mut Numbers::default();
    let [(a, a_buffer), (b, b_buffer)] = [0; 2].map(|_| session.buffer(4096));
    for _ in 0..3 {
        let values = load(&session, a, numbers);
        let command = copy(bytes(b_buffer, 0, 4096), bytes(a_buffer, 0, 4096));
        assert_eq!(run(&mut session, &[command], b), values);
    }
}

#[test]
fn more_results_than_are_remembered_reach_memory() {
    let (_machine, mut session) = strict_session();
    let numbers = &mut Numbers::default();
    let [(a, a_buffer), (b, b_buffer)] = [0; 2].map(|_| session.buffer(200 * 640));
    let (a, before) = (load(&session, a, numbers), load(&session, b, numbers));
    let shape = [100, 200];
    let command = copy(
        rows(b_buffer, 77, shape, 640),
        rows(a_buffer, 5, shape, 300),
    );
    let have = run(&mut session, &[command], b);
    for (i, have) in have.chunks(640).take(200).enumerate() {
        let row = &a[5 + 300 * i..][..100];
        let want = [
            &before[640 * i..][..77],
            row,
            &before[640 * i + 177..][..463],
        ]
        .concat();
        assert_eq!(have, want, "row {i}");
    }
}

#[test]
fn the_dma_engine_reads_weights_that_a_command_wrote() {
    let numbers = &mut Numbers::default();
    for m in [1, 5] {
        let (_machine, mut session) = strict_session();
        let product = Product::new(&mut session, WeightType::Q8_0, m, numbers);
        product.load();
        let count = product.weights.bytes;
        let (other, other_buffer) = session.buffer(count);
        other.put::<u8>(0, &product.weights.get(0, count));
        product.weights.put(0, &vec![0_u8; count]);
        for memory in [product.weights, other, product.act] {
            session.cache.clean(memory.base, memory.bytes);
        }
        let weights = bytes(product.body.weights.buffer, 0, count);
        let commands = [
            copy(weights, bytes(other_buffer, 0, count)),
            product.command,
        ];
        run(&mut session, &commands, product.dst);
        assert!(product.error() < NMSE, "M {m}: {:e}", product.error());
    }
}

#[test]
fn results_of_a_buffer_that_is_unmapped_reach_memory() {
    let (_machine, mut session) = strict_session();
    let numbers = &mut Numbers::default();
    let [(a, a_buffer), (b, b_buffer)] = [0; 2].map(|_| session.buffer(4096));
    let a = load(&session, a, numbers);
    let unmap = Unmap {
        buffer: b_buffer,
        reserved: 0,
    };
    let commands = [
        copy(bytes(b_buffer, 0, 4096), bytes(a_buffer, 0, 4096)),
        Command::new(0, &unmap),
    ];
    assert_eq!(run(&mut session, &commands, b), a);
}
