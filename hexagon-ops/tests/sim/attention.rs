//! Keys, values and masks that the DMA engine copies: with strict coherence, the copies hold the
//! results of earlier commands of the submission, as on a system where all memory is coherent.

use bytemuck::Zeroable;
use half::{bf16, f16};
use hexagon_ops::sim::{Coherence, Options};
use hexagon_ops::wire::{
    Attention, Command, KERNEL_COPY, KERNEL_SET_ROWS, TYPE_BF16, TYPE_F16, TYPE_F32, TYPE_I64,
    Tensor, TensorOp,
};

use crate::common::Numbers;
use crate::host::{Memory, Session, start};

/// Elements of a head; heads of keys, and of queries.
const HEAD: usize = 64;
const KV_HEADS: usize = 2;
const HEADS: usize = 4;
/// Positions of the cache, two blocks, and those that a command writes.
const POSITIONS: usize = 1100;
const WRITTEN: [usize; 3] = [7, 8, 1090];
/// Columns of the mask.
const COLUMNS: usize = 1152;

/// The operands that commands write before the attention.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Nothing,
    /// Some rows of keys and values.
    Rows,
    /// The whole mask.
    Mask,
}

fn tensor(buffer: u32, dtype: u32, ne: [usize; 4], nb: [usize; 4]) -> Tensor {
    Tensor {
        buffer,
        dtype,
        offset: 0,
        ne: ne.map(|n| u32::try_from(n).unwrap()),
        nb: nb.map(|n| n as u64),
    }
}

/// A matrix without gaps whose elements have `size` bytes.
fn matrix(buffer: u32, dtype: u32, size: usize, [n, rows]: [usize; 2]) -> Tensor {
    let plane = n * rows * size;
    tensor(
        buffer,
        dtype,
        [n, rows, 1, 1],
        [size, n * size, plane, plane],
    )
}

fn operation(kernel: u32, dst: Tensor, src: [Tensor; 2]) -> Command {
    let body = TensorOp {
        kernel,
        reserved: 0,
        params: [0; 16],
        dst,
        src: [src[0], src[1], Zeroable::zeroed()],
    };
    Command::new(0, &body)
}

/// Returns the result of an attention after commands that write its operands.
///
/// - `largest`: a number among the values
fn attend(
    coherence: Coherence,
    dtype: u32,
    queries: usize,
    before: Before,
    largest: f32,
) -> Vec<u32> {
    let machine = start(Options {
        coherence,
        ..Options::new(75)
    });
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let mut numbers = Numbers::new(5);
    let half = |x: f32| match dtype {
        TYPE_BF16 => bf16::from_f32(x).to_bits(),
        _ => f16::from_f32(x).to_bits(),
    };
    let mut buffer = |bytes: &[u8]| -> (Memory, u32) {
        let (memory, buffer) = session.buffer(bytes.len());
        memory.put(0, bytes);
        session.cache.clean(memory.base, memory.bytes);
        (memory, buffer)
    };
    let row = HEAD * KV_HEADS;
    let mut caches = [(); 2].map(|()| -> Vec<u16> {
        let elems = numbers.floats(row * POSITIONS);
        elems.into_iter().map(half).collect()
    });
    caches[1][row * 500] = half(largest);
    let [k, v] = caches.map(|cache| buffer(bytemuck::cast_slice(&cache)).1);
    let elems = numbers.floats(HEAD * HEADS * queries);
    let (_, q) = buffer(bytemuck::cast_slice(&elems));
    let elems = numbers.floats(row * WRITTEN.len());
    let (_, rows) = buffer(bytemuck::cast_slice(&elems));
    let (_, ids) = buffer(bytemuck::cast_slice(&WRITTEN.map(|it| it as i64)));
    let mask: Vec<u16> = (0..queries * COLUMNS)
        .map(|i| {
            let is_seen = i % COLUMNS <= POSITIONS - queries + i / COLUMNS;
            f16::from_f32(if is_seen { 0.0 } else { f32::NEG_INFINITY }).to_bits()
        })
        .collect();
    let (_, source) = buffer(bytemuck::cast_slice(&mask));
    let (_, mask) = match before {
        Before::Mask => buffer(&vec![0; 2 * mask.len()]),
        _ => buffer(bytemuck::cast_slice(&mask)),
    };
    let (result, dst) = buffer(&vec![0; 4 * HEAD * HEADS * queries]);

    let mut commands = Vec::new();
    match before {
        Before::Nothing => {}
        Before::Rows => {
            for cache in [k, v] {
                let rows = matrix(rows, TYPE_F32, 4, [row, WRITTEN.len()]);
                let ids = matrix(ids, TYPE_I64, 8, [WRITTEN.len(), 1]);
                let cache = matrix(cache, dtype, 2, [row, POSITIONS]);
                commands.push(operation(KERNEL_SET_ROWS, cache, [rows, ids]));
            }
        }
        Before::Mask => {
            let [to, from] = [mask, source].map(|it| matrix(it, TYPE_F16, 2, [COLUMNS, queries]));
            commands.push(operation(KERNEL_COPY, to, [from, Zeroable::zeroed()]));
        }
    }
    // As in llama.cpp's cache, all heads of a position are adjacent.
    let cached = |buffer| {
        let ne = [HEAD, POSITIONS, KV_HEADS, 1];
        tensor(
            buffer,
            dtype,
            ne,
            [2, 2 * row, 2 * HEAD, 2 * row * POSITIONS],
        )
    };
    let ne = [HEAD, queries, HEADS, 1];
    let row = 4 * HEAD * HEADS;
    let body = Attention {
        scale: 0.125_f32.to_bits(),
        max_bias: 0,
        softcap: 0,
        reserved: 0,
        dst: tensor(
            dst,
            TYPE_F32,
            [HEAD, HEADS, queries, 1],
            [4, 4 * HEAD, row, row * queries],
        ),
        q: tensor(q, TYPE_F32, ne, [4, row, 4 * HEAD, row * queries]),
        k: cached(k),
        v: cached(v),
        mask: matrix(mask, TYPE_F16, 2, [COLUMNS, queries]),
        sinks: Zeroable::zeroed(),
    };
    commands.push(Command::new(0, &body));
    let completion = session.run(&commands);
    assert_eq!((completion.status, completion.detail), (0, 0));
    session.cache.invalidate(result.base, result.bytes);
    result.get(0, HEAD * HEADS * queries)
}

/// Compares strict with relaxed coherence.
fn compare(dtype: u32, queries: usize, before: Before, largest: f32) {
    let [have, want] = [Coherence::Strict, Coherence::Relaxed]
        .map(|coherence| attend(coherence, dtype, queries, before, largest));
    assert!(have == want, "type {dtype}, {queries} queries, {before:?}");
    let is_finite = |bits: &u32| f32::from_bits(*bits).is_finite();
    assert!(have.iter().all(is_finite));
}

#[test]
fn copies_have_what_earlier_commands_wrote() {
    for queries in [1, 5, 40] {
        for before in [Before::Nothing, Before::Rows, Before::Mask] {
            compare(TYPE_F16, queries, before, 1.0);
        }
    }
    // The two results must differ, otherwise the test would prove nothing.
    let [with, without] = [Before::Rows, Before::Nothing]
        .map(|before| attend(Coherence::Strict, TYPE_F16, 1, before, 1.0));
    assert!(with != without);
}

/// A number beyond FP16's range leads to dot products, which read keys and values by loads.
#[test]
fn dot_products_after_copies_read_what_was_written() {
    for queries in [1, 40] {
        for before in [Before::Nothing, Before::Rows, Before::Mask] {
            compare(TYPE_BF16, queries, before, 1e30);
        }
    }
}
