//! Rows by number from tables of every type, as ggml stores them: the values that ggml's own
//! dequantizers give, bit for bit.

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Stream};
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::{HexBuffer, HexStream};
use ggml_rust_npu::tensor::DType;

use crate::common::{KINDS, Numbers, Weight, buffer_with, device, node, tensor};

/// Elements of a row: three super-blocks.
const N: usize = 768;
const ROWS: usize = 11;

#[test]
fn rows_of_a_table_have_the_values_of_ggml() {
    let device = device();
    let stream = HexStream::new(Arc::clone(&device));
    let ids = [10_i32, 0, 3, 3, 7];
    let ids_bytes: &[u8] = bytemuck::cast_slice(&ids);
    for (seed, kind) in (1..).zip(KINDS) {
        let table = Weight::random(&mut Numbers::new(seed), kind, [N, ROWS, 1, 1]);
        let home = buffer_with(&device, &table, Place::Device);
        let dst_bytes = ids.len() * N * 4;
        let memory = HexBuffer::new(&device, dst_bytes + ids_bytes.len(), true).unwrap();
        let dst = Tensor {
            role: Role::Result,
            ..tensor("rows", DType::F32, [N, ids.len(), 1, 1], 0)
        };
        let numbers = tensor("numbers", DType::I32, [ids.len(), 1, 1, 1], dst_bytes);
        (memory.write(&numbers, 0, ids_bytes.len(), Content::Bytes(ids_bytes))).unwrap();
        let operation = Operation {
            op: Op::GetRows,
            params: [0; PARAMS],
            dst,
            src: sources(&[table.tensor(0, Place::Device), numbers]),
        };
        let mut src = [None; MAX_SOURCES];
        src[..2].copy_from_slice(&[Some(&home), Some(&memory)]);
        stream
            .submit(0, &mut [node(operation, Some(&memory), src)])
            .unwrap();
        let mut have = vec![0.0_f32; ids.len() * N];
        let bytes = bytemuck::cast_slice_mut(&mut have);
        memory.read(&dst, 0, bytes).unwrap();
        for (have, id) in have.chunks(N).zip(ids) {
            let want = &table.values[N * id.unsigned_abs() as usize..][..N];
            assert!(have == want, "{kind:?} row {id}");
        }
    }
}

#[test]
fn setting_no_rows_leaves_the_others_as_they_are() {
    let device = device();
    let stream = HexStream::new(Arc::clone(&device));
    let table: Vec<f32> = (0_u16..256).map(f32::from).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&table);
    let memory = HexBuffer::new(&device, bytes.len(), true).unwrap();
    let dst = tensor("cache", DType::F32, [64, 4, 1, 1], 0);
    (memory.write(&dst, 0, bytes.len(), Content::Bytes(bytes))).unwrap();
    let operation = Operation {
        op: Op::SetRows,
        params: [0; PARAMS],
        dst,
        src: sources(&[
            tensor("no rows", DType::F32, [64, 0, 1, 1], 0),
            tensor("no numbers", DType::I64, [0, 1, 1, 1], 0),
        ]),
    };
    let mut src = [None; MAX_SOURCES];
    src[..2].copy_from_slice(&[Some(&memory), Some(&memory)]);
    stream
        .submit(0, &mut [node(operation, Some(&memory), src)])
        .unwrap();
    let mut have = vec![0.0_f32; table.len()];
    let bytes = bytemuck::cast_slice_mut(&mut have);
    memory.read(&dst, 0, bytes).unwrap();
    assert_eq!(have, table);
}
