use super::*;
use crate::backend::Device;
use crate::dequantize;
use crate::gguf::GgmlType;
use crate::tensor::Shape;

/// The first weight starts here.
const AT: usize = 4096;
const K: usize = 64;
const N: usize = 40;

/// A weight with `N` rows a matrix. F32 gets two matrices, because a single small one is never
/// packed.
fn weight(dtype: DType, at: usize) -> Tensor<'static> {
    let row = dtype.row_bytes(K).unwrap();
    let matrices = if dtype == DType::F32 { 2 } else { 1 };
    Tensor {
        name: "weight",
        dtype,
        format: None,
        shape: Shape {
            ne: [K, N, matrices, 1],
            nb: [row / K, row, row * N, row * N * matrices],
        },
        place: Place::Packed,
        role: Role::Weights,
        memory: None,
        packed_offset: at,
        dequantize: (dtype == DType::F32)
            .then(|| dequantize::of(GgmlType::F32))
            .flatten(),
    }
}

/// Bytes that are not a weight.
fn bytes(range: Range<usize>) -> Tensor<'static> {
    let count = range.len();
    Tensor {
        name: "bytes",
        dtype: DType::I8,
        shape: Shape {
            ne: [count, 1, 1, 1],
            nb: [1, count, count, count],
        },
        place: Place::Device,
        role: Role::State,
        dequantize: None,
        ..weight(DType::I8, range.start)
    }
}

fn size(tensor: &Tensor) -> usize {
    tensor.shape.span_bytes(tensor.dtype).unwrap()
}

/// Fills a whole tensor.
fn fill(buffer: &HexBuffer, tensor: &Tensor) {
    buffer
        .write(tensor, 0, size(tensor), Content::Fill(0x3c))
        .unwrap();
}

#[test]
fn a_write_ends_the_packed_tensors_that_it_touches_and_no_other() {
    let device = HexDevice::of_tests();
    let step = device.packed_bytes(&weight(DType::F16, AT));
    assert!(
        step > size(&weight(DType::F16, AT)),
        "padding behind the rows"
    );
    let weights = [0, 1, 2].map(|index| weight(DType::F16, AT + index * step));
    let [a, b, c] = [0, 1, 2].map(|index| AT + index * step);
    for (written, still_packed) in [
        (a + 100..b, [false, true, true]),
        (b..c, [true, false, true]),
        (b - 1..b, [false, true, true]),
        (a - 100..a, [true; 3]),
        (c + step..c + 2 * step, [true; 3]),
        (a - 100..c + 1, [false; 3]),
    ] {
        let buffer = HexBuffer::new(&device, c + 2 * step, false).unwrap();
        weights.iter().for_each(|w| fill(&buffer, w));
        fill(&buffer, &bytes(written.clone()));
        let packed = [0, 1, 2].map(|index| buffer.is_packed(&weights[index]));
        assert_eq!(
            packed, still_packed,
            "{written:?}, weights at {a}, {b}, {c}"
        );
    }
}

#[test]
fn a_weight_that_was_written_over_is_packed_from_its_first_part_on() {
    let device = HexDevice::of_tests();
    let w = weight(DType::F16, AT);
    let row = size(&w) / N;
    let buffer = HexBuffer::new(&device, AT + device.packed_bytes(&w), false).unwrap();
    fill(&buffer, &w);
    fill(&buffer, &bytes(AT - 100..AT + size(&w)));
    assert!(!buffer.is_packed(&w));
    buffer.write(&w, row, row, Content::Fill(1)).unwrap();
    assert!(buffer.is_packed(&w));
    // A weight that is overwritten in part stays in ggml's layout until all of it is written again.
    fill(&buffer, &bytes(AT - 100..AT + row));
    buffer.write(&w, row, row, Content::Fill(1)).unwrap();
    assert!(!buffer.is_packed(&w));
    fill(&buffer, &w);
    assert!(buffer.is_packed(&w));
}

#[test]
fn a_write_into_a_packed_weight_leaves_what_replays_rest_on() {
    let device = HexDevice::of_tests();
    let w = weight(DType::F16, AT);
    let buffer = HexBuffer::new(&device, AT + device.packed_bytes(&w), false).unwrap();
    fill(&buffer, &w);
    let before = device.changes();
    buffer.write(&w, 200, 300, Content::Fill(1)).unwrap();
    assert_eq!(device.changes(), before);
    assert!(buffer.is_packed(&w));
}

#[test]
fn a_packed_weight_is_found_by_its_own_type_and_shape_alone() {
    let device = HexDevice::of_tests();
    let w = weight(DType::F16, AT);
    let buffer = HexBuffer::new(&device, AT + device.packed_bytes(&w), false).unwrap();
    fill(&buffer, &w);
    assert!(buffer.find(&w).is_some());
    let mut rows = w;
    rows.shape.ne[1] = 10;
    rows.shape.nb[2..].fill(w.shape.nb[1] * 10);
    let mut apart = w;
    apart.shape.nb[2..].fill(w.shape.nb[2] + w.shape.nb[1]);
    apart.shape.ne[2] = 2;
    for other in [
        rows,
        apart,
        weight(DType::Bf16, AT),
        weight(DType::F16, AT + w.shape.nb[1]),
    ] {
        assert!(buffer.find(&other).is_none(), "{:?}", other.shape);
    }
}

#[test]
fn floats_are_packed_if_they_are_weights() {
    let device = HexDevice::of_tests();
    for (role, is_packed) in [
        (Role::Weights, true),
        (Role::State, false),
        (Role::Result, false),
    ] {
        let w = Tensor {
            role,
            ..weight(DType::F32, AT)
        };
        let buffer = HexBuffer::new(&device, AT + device.packed_bytes(&w), false).unwrap();
        fill(&buffer, &w);
        assert_eq!(buffer.is_packed(&w), is_packed, "{role:?}");
    }
}

/// Regression: the optimizer's step on a packed weight was computed by nothing, and ggml aborts
/// then.
#[test]
fn a_packed_weight_is_put_back_for_the_cpu() {
    let device = HexDevice::of_tests();
    let w = weight(DType::F32, AT);
    let buffer = HexBuffer::new(&device, AT + device.packed_bytes(&w), false).unwrap();
    let values = (0_u16..).map(f32::from).take(size(&w) / 4);
    let content: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    buffer
        .write(&w, 0, content.len(), Content::Bytes(&content))
        .unwrap();
    assert!(buffer.is_packed(&w));
    let before = device.changes();
    buffer.show_to_cpu(&w);
    assert!(!buffer.is_packed(&w));
    assert_ne!(
        device.changes(),
        before,
        "cached graphs name the packed form"
    );
    let mut shown = vec![0; content.len()];
    copy_out(&buffer.memory, AT, &mut shown);
    assert!(shown == content);
    buffer.take_from_cpu(&w);
    assert!(!buffer.is_packed(&w));
}

#[test]
fn one_row_beyond_f16_is_seen_wherever_it_is() {
    let device = HexDevice::of_tests();
    let w = weight(DType::F32, AT);
    let row = w.shape.nb[1];
    for n in [0, 1, 2 * N - 1] {
        let buffer = HexBuffer::new(&device, AT + device.packed_bytes(&w), false).unwrap();
        fill(&buffer, &w);
        assert!(buffer.is_packed(&w));
        let large: Vec<u8> = 1e6_f32.to_le_bytes().repeat(K);
        buffer
            .write(&w, n * row, row, Content::Bytes(&large))
            .unwrap();
        assert!(!buffer.is_packed(&w), "row {n}");
    }
}

#[test]
fn what_is_copied_in_pieces_is_copied_whole() {
    let device = HexDevice::of_tests();
    let all = bytes(100..100 + 2 * COPY_BYTES + 77);
    let content: Vec<u8> = (0..251).cycle().take(size(&all)).collect();
    let buffer = HexBuffer::new(&device, 100 + size(&all), false).unwrap();
    buffer
        .write(&all, 0, size(&all), Content::Bytes(&content))
        .unwrap();
    let mut have = vec![0; size(&all)];
    buffer.read(&all, 0, &mut have).unwrap();
    assert!(have == content);
}

#[test]
fn forms_beside_weights_leave_memory_for_others_and_make_way_for_buffers() {
    let mut device = HexDevice::of_tests();
    let weights = Tensor {
        place: Place::Device,
        ..weight(DType::F16, AT)
    };
    let layout = WeightLayout::new(&weights).unwrap();
    let buffer = HexBuffer::new(&device, AT + size(&weights), true).unwrap();
    fill(&buffer, &weights);
    let beside = buffer.beside().unwrap();
    // Less than an eighth of the memory is free.
    device.machine = || (1 << 20, 16 << 20);
    let found = beside.find(&device, &weights, &layout, &[]);
    assert!(matches!(found, Found::Unpacked), "{found:?}");
    device.machine = || (8 << 20, 16 << 20);
    let Found::Packed(_, used) = beside.find(&device, &weights, &layout, &[]) else {
        panic!("there is room")
    };
    HexBuffer::new(&device, 4096, true).unwrap();
    assert!(beside.is_current(&used));
    assert!(device.bytes_beside() > 0);
    device.machine = || (4095, 16 << 20);
    HexBuffer::new(&device, 4096, true).unwrap();
    assert!(!beside.is_current(&used));
    assert_eq!(device.bytes_beside(), 0);
}
