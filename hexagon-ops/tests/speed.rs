//! Measures the cost of kernels on this machine, one thread:
//! `cargo test --release -p hexagon-ops --test speed -- --ignored --nocapture`.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

mod common;

use std::time::Instant;

use common::Numbers;
use half::f16;
use hexagon_ops::hmx::Hmx;
use hexagon_ops::layout::Tile;
use hexagon_ops::ops::attention::{Attention, ExpTable, Sources, TABLE_TILES, attention};
use hexagon_ops::ops::matmul::Machine;
use hexagon_ops::ops::tensor::{Shape, Type, View, ViewMut};
use hexagon_ops::rt::Engine;

/// Smallest time of a few calls, microseconds.
fn best(mut f: impl FnMut()) -> f64 {
    let times = (0..20).map(|_| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64() * 1e6
    });
    times.fold(f64::INFINITY, f64::min)
}

/// Strides in elements, smallest first, of dimensions that are in `order`.
fn strides(ne: [usize; 4], order: [usize; 4], bytes: usize) -> [usize; 4] {
    let mut nb = [0; 4];
    let mut stride = bytes;
    for dim in order {
        nb[dim] = stride;
        stride *= ne[dim];
    }
    nb
}

/// An attention of one layer of a model with `heads` heads of queries and of keys, of length `d`.
fn layer(name: &str, d: usize, [heads, kv_heads]: [usize; 2], queries: usize, positions: usize) {
    let mut numbers = Numbers::default();
    let shape = |dtype: Type, ne: [usize; 4], order| Shape {
        dtype,
        ne,
        nb: strides(ne, order, dtype.block_bytes()),
    };
    let cache = [0, 2, 1, 3];
    let q_shape = shape(Type::F32, [d, queries, heads, 1], cache);
    let kv_shape = shape(Type::F16, [d, positions, kv_heads, 1], cache);
    let mask_shape = shape(Type::F16, [positions, queries, 1, 1], [0, 1, 2, 3]);
    let dst_shape = shape(Type::F32, [d, heads, queries, 1], [0, 1, 2, 3]);
    let q: Vec<f32> = (0..d * queries * heads).map(|_| numbers.float()).collect();
    let mut halves = |count: usize| -> Vec<u16> {
        (0..count)
            .map(|_| f16::from_f32(numbers.float()).to_bits())
            .collect()
    };
    let k = halves(d * positions * kv_heads);
    let v = halves(d * positions * kv_heads);
    let past = positions - queries;
    let mask: Vec<u16> = (0..positions * queries)
        .map(|i| {
            if i % positions > past + i / positions {
                0xfc00
            } else {
                0
            }
        })
        .collect();
    let mut dst = vec![0.0_f32; d * heads * queries];
    let mut vtcm = vec![Tile::ZERO; 4096];
    let mut hmx = Hmx::new(&vtcm);
    let engine = Engine::new(1);
    let (vtcm, place) = vtcm.split_at_mut(4096 - TABLE_TILES);
    let mut table = ExpTable::new();
    let table = table.resident(place);
    let src = Sources {
        q: View::new(bytemuck::cast_slice(&q), q_shape).unwrap(),
        k: View::new(bytemuck::cast_slice(&k), kv_shape).unwrap(),
        v: View::new(bytemuck::cast_slice(&v), kv_shape).unwrap(),
        mask: Some(View::new(bytemuck::cast_slice(&mask), mask_shape).unwrap()),
        sinks: None,
    };
    let params = Attention {
        scale: 0.125,
        max_bias: 0.0,
        softcap: 0.0,
    };
    let us = best(|| {
        let machine = Machine {
            engine: &engine,
            vtcm: &mut *vtcm,
            hmx: &mut hmx,
        };
        let dst = ViewMut::new(bytemuck::cast_slice_mut(&mut dst), dst_shape).unwrap();
        attention(machine, &params, dst, &src, table).unwrap();
    });
    println!("{name}: {queries} queries over {positions} positions: {us:.0} us");
}

#[test]
#[ignore = "a benchmark"]
fn attention_of_a_decode_step() {
    for positions in [256, 1024] {
        layer("SmolLM2-135M", 64, [9, 3], 1, positions);
    }
    layer("TinyLlama-1.1B", 64, [32, 4], 1, 1024);
    layer("gemma-3-270m", 256, [4, 1], 1, 1024);
}

#[test]
#[ignore = "a benchmark"]
fn attention_of_a_prompt_or_many_sequences() {
    for (queries, positions) in [(2, 1024), (4, 1024), (8, 1024), (128, 128), (512, 512)] {
        layer("SmolLM2-135M", 64, [9, 3], queries, positions);
    }
    layer("TinyLlama-1.1B", 64, [32, 4], 128, 128);
    layer("gemma-3-270m", 256, [4, 1], 128, 128);
}
