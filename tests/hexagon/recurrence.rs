//! Operations with more sources than most, from ggml's nodes to the results.

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Device, Stream};
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Tensor, sources};
use ggml_rust_npu::hexagon::{HexBuffer, HexStream};
use ggml_rust_npu::reference::{RecurrenceSizes, gated_delta, nmse};
use ggml_rust_npu::tensor::DType;

use crate::common::{Numbers, device, node, tensor};

fn on_device(name: &'static str, ne: [usize; 4]) -> Tensor<'static> {
    Tensor {
        place: Place::Device,
        ..tensor(name, DType::F32, ne, 0)
    }
}

/// Computes a node whose operands each have a separate buffer, and compares.
fn check<const N: usize>(
    (op, params): (Op, [i32; PARAMS]),
    operands: [(Tensor<'static>, &[u8]); N],
    dst: Tensor<'static>,
    want: &[f64],
) {
    let device = device();
    let buffers = operands.map(|(tensor, bytes)| {
        let buffer = HexBuffer::new(&device, bytes.len(), true).unwrap();
        let content = Content::Bytes(bytes);
        buffer.write(&tensor, 0, bytes.len(), content).unwrap();
        buffer
    });
    let operation = Operation {
        op,
        params,
        dst,
        src: sources(&operands.map(|(tensor, _)| tensor)),
    };
    assert!(device.supports(&operation));
    let mut have = vec![0.0f32; want.len()];
    let results = HexBuffer::new(&device, 4 * want.len(), true).unwrap();
    let mut sources = [None; MAX_SOURCES];
    for (source, buffer) in sources.iter_mut().zip(&buffers) {
        *source = Some(buffer);
    }
    let stream = HexStream::new(Arc::clone(&device));
    let mut nodes = [node(operation, Some(&results), sources)];
    stream.submit(0, &mut nodes).unwrap();
    let bytes = bytemuck::cast_slice_mut(&mut have);
    results.read(&dst, 0, bytes).unwrap();
    let error = nmse(&have, want);
    assert!(error < 1e-10, "{error:e}");
}

/// Regression: a command named at most six buffers, so a node with six sources and a result had one
/// too many.
#[test]
fn a_node_with_six_sources_is_computed_where_each_has_its_own_buffer() {
    let sizes = RecurrenceSizes {
        n: 32,
        heads: 2,
        tokens: 3,
    };
    let (n, all) = (sizes.n, sizes.n * sizes.heads * sizes.tokens);
    let mut numbers = Numbers::new(80);
    let mut small = |count| -> Vec<f32> {
        let values = numbers.floats(count).into_iter();
        values.map(|x| x / 4.0).collect()
    };
    let [q, k, v] = [all; 3].map(&mut small);
    let [gates, factors] = [6; 2].map(&mut small);
    let state = small(n * n * 2);
    let want = gated_delta(sizes, [&q, &k, &v], [&gates, &factors], &state);

    let vectors = [n, 2, 3, 1];
    let operands = [
        (on_device("q", vectors), bytemuck::cast_slice(&q)),
        (on_device("k", vectors), bytemuck::cast_slice(&k)),
        (on_device("v", vectors), bytemuck::cast_slice(&v)),
        (on_device("g", [1, 2, 3, 1]), bytemuck::cast_slice(&gates)),
        (
            on_device("beta", [1, 2, 3, 1]),
            bytemuck::cast_slice(&factors),
        ),
        (
            on_device("state", [n, n, 2, 1]),
            bytemuck::cast_slice(&state),
        ),
    ];
    let mut params = [0; PARAMS];
    params[0] = 1;
    let dst = on_device("dst", [2 * n, 3 + n, 1, 1]);
    check((Op::GatedDeltaNet, params), operands, dst, &want);
}

#[test]
fn a_node_with_seven_sources_is_computed_where_each_has_its_own_buffer() {
    // The elements of a row of states, rows, heads and tokens. One sequence, which uses the second
    // of two states.
    let [n, dim, heads, tokens] = [16, 4, 2, 3];
    let mut numbers = Numbers::new(81);
    let states = numbers.floats(2 * n * dim * heads);
    let x = numbers.floats(dim * heads * tokens);
    let time = numbers.floats(heads * tokens);
    let decays: Vec<f32> = numbers
        .floats(heads)
        .iter()
        .map(|a| -0.6 - a / 4.0)
        .collect();
    let [b, c] = [n * tokens; 2].map(|count| numbers.floats(count));
    let ids = [1i32];

    let mut state: Vec<f64> = states[n * dim * heads..]
        .iter()
        .map(|x| f64::from(*x))
        .collect();
    let mut want = Vec::new();
    for token in 0..tokens {
        for row in 0..dim * heads {
            let head = row / dim;
            let step = f64::from(time[token * heads + head]).exp().ln_1p();
            let decay = (step * f64::from(decays[head])).exp();
            let input = f64::from(x[token * dim * heads + row]) * step;
            let mut y = 0.0;
            for i in 0..n {
                let kept = &mut state[row * n + i];
                *kept = *kept * decay + f64::from(b[token * n + i]) * input;
                y += *kept * f64::from(c[token * n + i]);
            }
            want.push(y);
        }
    }
    want.extend(state);

    let operands = [
        (
            on_device("s", [n, dim, heads, 2]),
            bytemuck::cast_slice(&states),
        ),
        (
            on_device("x", [dim, heads, tokens, 1]),
            bytemuck::cast_slice(&x),
        ),
        (
            on_device("dt", [heads, tokens, 1, 1]),
            bytemuck::cast_slice(&time),
        ),
        (
            on_device("A", [1, heads, 1, 1]),
            bytemuck::cast_slice(&decays),
        ),
        (on_device("B", [n, 1, tokens, 1]), bytemuck::cast_slice(&b)),
        (on_device("C", [n, 1, tokens, 1]), bytemuck::cast_slice(&c)),
        (
            Tensor {
                place: Place::Device,
                ..tensor("ids", DType::I32, [1, 1, 1, 1], 0)
            },
            bytemuck::cast_slice(&ids),
        ),
    ];
    let mut params = [0; PARAMS];
    params[0] = 1;
    let dst = on_device("dst", [want.len(), 1, 1, 1]);
    check((Op::SsmScan, params), operands, dst, &want);
}
