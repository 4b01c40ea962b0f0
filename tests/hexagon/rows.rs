//! Rows by number from tables of every type, as ggml stores them: the values that ggml's own
//! dequantizers give, bit for bit.

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, GraphError, Stream};
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
        let buffer = buffer_with(&device, &table, Place::Device);
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
        src[..2].copy_from_slice(&[Some(&buffer), Some(&memory)]);
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

/// When the last of the commands fails, nothing is left to map. So its number is the largest one.
#[test]
fn a_row_that_is_not_there_fails_its_node_and_leaves_the_device() {
    let device = device();
    let stream = HexStream::new(Arc::clone(&device));
    let table = Weight::random(&mut Numbers::new(40), KINDS[0], [N, ROWS, 1, 1]);
    let buffer = buffer_with(&device, &table, Place::Device);
    let memory = HexBuffer::new(&device, 4 * N * 4, false).unwrap();
    let dst = tensor("row", DType::F32, [N, 1, 1, 1], 0);
    let number_at = |index: usize| tensor("number", DType::I32, [1, 1, 1, 1], N * 4 + 128 * index);
    let compute = |last: i32| {
        for (index, row) in [3, 5, last].into_iter().enumerate() {
            let row = Content::Bytes(&i32::to_le_bytes(row));
            memory.write(&number_at(index), 0, 4, row).unwrap();
        }
        let mut src = [None; MAX_SOURCES];
        src[..2].copy_from_slice(&[Some(&buffer), Some(&memory)]);
        let mut nodes = [0, 1, 2].map(|index| {
            let operation = Operation {
                op: Op::GetRows,
                params: [0; PARAMS],
                dst,
                src: sources(&[table.tensor(0, Place::Device), number_at(index)]),
            };
            node(operation, Some(&memory), src)
        });
        stream.submit(0, &mut nodes)?;
        let mut have = vec![0.0_f32; N];
        let bytes = bytemuck::cast_slice_mut(&mut have);
        memory.read(&dst, 0, bytes).unwrap();
        assert!(have == table.values[N * last.unsigned_abs() as usize..][..N]);
        Ok::<(), GraphError>(())
    };
    compute(7).unwrap();
    for missing in [11, -1, i32::MAX] {
        let failed = compute(missing).unwrap_err();
        assert_eq!(failed.node, Some(2), "{missing}: {failed:?}");
        compute(10).unwrap();
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
