//! Weights of types without tiles, which become Q8_0 when they are loaded.

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Device, Stream};
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{Op, Place, Tensor};
use ggml_rust_npu::hexagon::{HexBuffer, HexStream};
use ggml_rust_npu::reference;
use ggml_rust_npu::tensor::Format;

use super::common::*;

#[test]
fn a_type_without_tiles_becomes_q8_0_and_reads_back_as_it_was() {
    let device = device();
    let mut numbers = Numbers::new(3);
    let (k, n) = (512, 70);
    let w = Weight::random(&mut numbers, Kind::Blocks(Format::Iq4Xs), [k, n, 1, 1]);
    let tensor = Tensor {
        format: None,
        dequantize: dequantize::of(GgmlType::IQ4_XS),
        ..w.tensor(0, Place::Packed)
    };
    let bytes = device.packed_bytes(&tensor);
    assert_eq!(bytes, n.next_multiple_of(32) * k / 32 * 34);
    let buffer = HexBuffer::new(&device, bytes, false).unwrap();
    (buffer.write(&tensor, 0, w.bytes.len(), Content::Bytes(&w.bytes))).unwrap();
    let mut back = vec![0; w.bytes.len()];
    buffer.read(&tensor, 0, &mut back).unwrap();
    assert!(back == w.bytes);
    for m in [1, 5] {
        let act = numbers.floats(m * k);
        let work = Work::new(&device, &act, [k, m, 1, 1], [n, m, 1, 1], &[]).unwrap();
        let stream = HexStream::new(Arc::clone(&device));
        stream
            .submit(0, &mut [work.node(Op::MulMat, tensor, &buffer)])
            .unwrap();
        let want = reference::mul_mat(&act, &w.values, k);
        let error = reference::nmse(&work.result(), &want);
        // The weights have errors, too: half a step of 1/127 in each block of 32.
        assert!(error <= 2e-4, "M={m}: {error:.2e}");
    }
}
