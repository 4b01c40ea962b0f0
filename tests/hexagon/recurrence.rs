//! Operations with more sources than most, from ggml's nodes to the results.

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Device, Stream};
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Tensor, sources};
use ggml_rust_npu::hexagon::{HexBuffer, HexStream};
use ggml_rust_npu::reference::{RecurrenceSizes, gated_delta, nmse};
use ggml_rust_npu::tensor::DType;

use crate::common::{Numbers, device, node, tensor};

/// A command named at most six buffers: with the result, a node of six sources was one too many.
#[test]
fn a_node_with_six_sources_is_computed_where_each_has_its_own_buffer() {
    let device = device();
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

    let on_device = |name, ne| Tensor {
        place: Place::Device,
        ..tensor(name, DType::F32, ne, 0)
    };
    let vectors = [n, 2, 3, 1];
    let operands = [
        (on_device("q", vectors), &q),
        (on_device("k", vectors), &k),
        (on_device("v", vectors), &v),
        (on_device("g", [1, 2, 3, 1]), &gates),
        (on_device("beta", [1, 2, 3, 1]), &factors),
        (on_device("state", [n, n, 2, 1]), &state),
    ];
    let buffers = operands.map(|(tensor, values)| {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let buffer = HexBuffer::new(&device, bytes.len(), true).unwrap();
        let content = Content::Bytes(bytes);
        buffer.write(&tensor, 0, bytes.len(), content).unwrap();
        buffer
    });
    let dst = on_device("dst", [2 * n, 3 + n, 1, 1]);
    let mut params = [0; PARAMS];
    params[0] = 1;
    let operation = Operation {
        op: Op::GatedDeltaNet,
        params,
        dst,
        src: sources(&operands.map(|(tensor, _)| tensor)),
    };
    assert!(device.supports(&operation));
    let mut have = vec![0.0f32; want.len()];
    let results = HexBuffer::new(&device, 4 * want.len(), true).unwrap();
    let mut homes = [None; MAX_SOURCES];
    for (home, buffer) in homes.iter_mut().zip(&buffers) {
        *home = Some(buffer);
    }
    let stream = HexStream::new(Arc::clone(&device));
    let mut nodes = [node(operation, Some(&results), homes)];
    stream.submit(0, &mut nodes).unwrap();
    let bytes = bytemuck::cast_slice_mut(&mut have);
    results.read(&dst, 0, bytes).unwrap();
    let error = nmse(&have, &want);
    assert!(error < 1e-10, "{error:e}");
}
