use super::*;
use crate::graph::{PARAMS, Place, Role, sources};
use crate::tensor::{Format, Shape};

/// Most VTCM that a chip has.
const VTCM_BYTES: usize = 8 << 20;

type Change = fn([&mut Tensor<'static>; 4]);

fn tensor(dtype: DType, ne: [usize; 4]) -> Tensor<'static> {
    let step = dtype.step_bytes().unwrap();
    let row = dtype.row_bytes(ne[0]).unwrap();
    Tensor {
        name: "tensor",
        dtype,
        format: None,
        shape: Shape {
            ne,
            nb: [step, row, row * ne[1], row * ne[1] * ne[2]],
        },
        place: Place::Device,
        role: Role::State,
        memory: None,
        packed_offset: 0,
        dequantize: None,
    }
}

fn operation<'a>(op: Op, params: &[i32], dst: Tensor<'a>, src: &[Tensor<'a>]) -> Operation<'a> {
    let mut all = [0; PARAMS];
    all[..params.len()].copy_from_slice(params);
    Operation {
        op,
        params: all,
        dst,
        src: sources(src),
    }
}

/// Plans a product of packed weights with each change alone.
fn check(op: Op, base: [Tensor<'static>; 4], changes: &[(&str, bool, Change)]) {
    let is_planned = |[dst, src @ ..]: [Tensor<'static>; 4]| {
        command(VTCM_BYTES, &operation(op, &[], dst, &src), true).is_ok()
    };
    assert!(is_planned(base), "{op:?}");
    for (what, fits, change) in changes {
        let mut tensors = base;
        change(tensors.each_mut());
        assert_eq!(is_planned(tensors), *fits, "{op:?}: {what}");
    }
}

#[test]
fn products_whose_operands_do_not_fit_are_refused() {
    let ids = tensor(DType::I32, [3, 7, 1, 1]);
    let both: &[(&str, bool, Change)] = &[
        ("another K", false, |[_, _, act, _]| act.shape.ne[0] = 96),
        ("transposed weights", false, |[_, w, ..]| {
            w.shape.nb[0] = 128
        }),
        ("a result of integers", false, |[dst, ..]| {
            dst.dtype = DType::I32
        }),
        ("a result with gaps", false, |[dst, ..]| dst.shape.nb[0] = 8),
        ("odd steps of results", false, |[dst, ..]| {
            dst.shape.nb[1] += 2
        }),
        ("activations with gaps", false, |[_, _, act, _]| {
            act.shape.nb[0] = 8
        }),
        ("odd steps of activations", false, |[_, _, act, _]| {
            act.shape.nb[1] += 2
        }),
        ("activations of integers", false, |[_, _, act, _]| {
            act.dtype = DType::I32
        }),
    ];
    let dst = tensor(DType::F32, [32, 4, 4, 4]);
    let w = tensor(DType::F16, [64, 32, 2, 2]);
    let act = tensor(DType::F32, [64, 4, 4, 4]);
    check(Op::MulMat, [dst, w, act, ids], both);
    check(
        Op::MulMat,
        [dst, w, act, ids],
        &[
            ("another M", false, |[dst, ..]| dst.shape.ne[1] = 5),
            ("planes that are no multiple", false, |[dst, _, act, _]| {
                (dst.shape.ne[2], act.shape.ne[2]) = (3, 3);
            }),
            ("volumes that are no multiple", false, |[dst, _, act, _]| {
                (dst.shape.ne[3], act.shape.ne[3]) = (3, 3);
            }),
            ("no planes of weights", false, |[_, w, ..]| {
                w.shape.ne[2] = 0
            }),
            ("no volumes of weights", false, |[_, w, ..]| {
                w.shape.ne[3] = 0
            }),
            ("activations in F16", true, |[_, _, act, _]| {
                *act = tensor(DType::F16, [64, 4, 4, 4]);
            }),
        ],
    );
    let dst = tensor(DType::F32, [32, 3, 7, 1]);
    let w = tensor(DType::F16, [64, 32, 5, 1]);
    let act = tensor(DType::F32, [64, 1, 7, 1]);
    check(Op::MulMatId, [dst, w, act, ids], both);
    check(
        Op::MulMatId,
        [dst, w, act, ids],
        &[
            ("no rows", false, |[_, _, act, _]| act.shape.ne[1] = 0),
            ("rows that are no divisor", false, |[_, _, act, _]| {
                act.shape.ne[1] = 2
            }),
            ("a choice of floats", false, |[.., ids]| {
                ids.dtype = DType::F32
            }),
            ("a choice with gaps", false, |[.., ids]| ids.shape.nb[0] = 8),
            ("odd steps of the choice", false, |[.., ids]| {
                ids.shape.nb[1] += 2
            }),
            ("a choice for more tokens", false, |[.., ids]| {
                ids.shape.ne[1] = 8
            }),
            ("two volumes", false, |[_, _, act, _]| act.shape.ne[3] = 2),
            ("4096 choices", true, |[dst, _, _, ids]| {
                (*dst, *ids) = (
                    tensor(DType::F32, [32, 4096, 7, 1]),
                    tensor(DType::I32, [4096, 7, 1, 1]),
                );
            }),
            ("4097 choices", false, |[dst, _, _, ids]| {
                (*dst, *ids) = (
                    tensor(DType::F32, [32, 4097, 7, 1]),
                    tensor(DType::I32, [4097, 7, 1, 1]),
                );
            }),
        ],
    );
}

/// The VTCM must hold a panel of weights and the rows of activations at the same time.
#[test]
fn rows_that_the_vtcm_does_not_take_are_refused() {
    let is_planned = |vtcm_bytes, k| {
        let dst = tensor(DType::F32, [32, 4, 1, 1]);
        let w = tensor(DType::F16, [k, 32, 1, 1]);
        let act = tensor(DType::F32, [k, 4, 1, 1]);
        command(
            vtcm_bytes,
            &operation(Op::MulMat, &[], dst, &[w, act]),
            true,
        )
        .is_ok()
    };
    assert!(is_planned(VTCM_BYTES, 32_768));
    assert!(!is_planned(VTCM_BYTES, 65_536));
    assert!(is_planned(2 * VTCM_BYTES, 65_536));
}

#[test]
fn the_longest_row_is_the_last_that_is_planned() {
    for vtcm_bytes in [192 << 10, 960 << 10, VTCM_BYTES] {
        let k = longest_row(vtcm_bytes);
        let is_planned = |k| {
            let dst = tensor(DType::F32, [32, 4, 1, 1]);
            let blocks = DType::Quantized {
                block_elems: 32,
                block_bytes: 34,
            };
            let w = Tensor {
                format: Some(Format::Q8_0),
                ..tensor(blocks, [k, 32, 1, 1])
            };
            let act = tensor(DType::F32, [k, 4, 1, 1]);
            command(
                vtcm_bytes,
                &operation(Op::MulMat, &[], dst, &[w, act]),
                true,
            )
            .is_ok()
        };
        assert!(is_planned(k), "{k} of {vtcm_bytes}");
        assert!(!is_planned(k + 32), "{k} of {vtcm_bytes}");
    }
}

/// A product of packed weights does not accept BF16 activations.
#[test]
fn what_packed_weights_do_not_take_is_a_product_of_plain_tensors() {
    let plan = |place, dtype| {
        let w = Tensor {
            place,
            ..tensor(dtype, [64, 32, 1, 1])
        };
        let act = tensor(DType::Bf16, [64, 4, 1, 1]);
        let dst = tensor(DType::F32, [32, 4, 1, 1]);
        question(
            VTCM_BYTES,
            &operation(Op::MulMat, &[], dst, &[w, act]),
            true,
        )
    };
    for (place, dtype, is_planned) in [
        (Place::Unknown, DType::F16, true),
        (Place::Packed, DType::Bf16, true),
        (Place::Packed, DType::F16, false),
    ] {
        let planned = plan(place, dtype);
        assert_eq!(
            matches!(planned, Ok(Command::Tensor(_))),
            is_planned,
            "{dtype:?}"
        );
        assert_eq!(planned.is_ok(), is_planned, "{dtype:?}");
    }
}

/// The loader asks for packed memory first: the refusal has it load the kernel into plain memory,
/// where the product with the kernel's other shape takes the matrix unit.
#[test]
fn a_kernel_with_one_value_of_k_is_in_plain_memory() {
    let kernel = |place, k| Tensor {
        place,
        role: Role::Weights,
        ..tensor(DType::F16, [k, 128, 64, 1])
    };
    let plan = |place, k| {
        let act = tensor(DType::F32, [k, 4, 64, 1]);
        let dst = tensor(DType::F32, [128, 4, 64, 1]);
        let product = operation(Op::MulMat, &[], dst, &[kernel(place, k), act]);
        question(VTCM_BYTES, &product, true)
    };
    assert_eq!(
        plan(Place::Packed, 1).err(),
        Some("weights are not in packed memory")
    );
    // The loader's question about plain memory is one about memory of the host.
    for place in [Place::Host, Place::Device, Place::Unknown] {
        assert!(matches!(plan(place, 1), Ok(Command::Tensor(_))));
    }
    for place in [Place::Packed, Place::Device] {
        assert!(matches!(plan(place, 2), Ok(Command::MulMat(..))));
    }
    let is_beside = [1, 2].map(|k| beside_layout(&kernel(Place::Device, k)).is_some());
    assert_eq!(is_beside, [false, true]);
}

#[test]
fn operations_reach_their_kernels_with_their_parameters() {
    let f32 = |ne| tensor(DType::F32, ne);
    let tensor_op = |operation: &Operation| match command(VTCM_BYTES, operation, false) {
        Ok(Command::Tensor(body)) => Some(body),
        _ => None,
    };
    // TOP_K sorts in descending order: parameter 0 is 1.
    let largest = tensor(DType::I32, [8, 4, 1, 1]);
    let body = tensor_op(&operation(Op::TopK, &[], largest, &[f32([64, 4, 1, 1])])).unwrap();
    assert_eq!(body.params[0], 1);

    // Older versions of ggml pass no factor; without this check their results would be zero.
    let (streams, weights) = (f32([64, 4, 3, 1]), f32([4, 3, 1, 1]));
    let sum = |factor: f32| {
        let params = [factor.to_bits().cast_signed()];
        tensor_op(&operation(
            Op::Dsv4HcPre,
            &params,
            f32([64, 3, 1, 1]),
            &[streams, weights],
        ))
    };
    assert!(sum(1.0).is_some() && sum(0.0).is_none());

    let q = f32([64, 4, 4, 1]);
    let [k, v] = [(); 2].map(|()| tensor(DType::F16, [64, 32, 2, 1]));
    let scale = 0.125_f32.to_bits().cast_signed();
    let attention = operation(Op::FlashAttnExt, &[scale], f32([64, 4, 4, 1]), &[q, k, v]);
    let Ok(Command::Attention(body)) = command(VTCM_BYTES, &attention, false) else {
        panic!("no attention")
    };
    assert_eq!(body.scale, 0.125_f32.to_bits());
    let operands = [body.dst, body.q, body.k, body.v].map(|operand| operand.buffer);
    assert_eq!(operands, [0, 1, 2, 3]);

    // A window of 3 × 2, or of 3 × 2 × 5, over two channels. The size of the result is the number
    // of windows.
    let plane = [1, 1, 0, 0, 1, 1, 1];
    let line = [1, 0, 0, 0, 1, 0, 0];
    let volume = [1, 1, 1, 0, 0, 0, 1, 1, 1, 2];
    for (op, params, weights, image, ne, window) in [
        (
            Op::Im2col,
            &plane[..],
            [3, 2, 2, 7],
            [8, 6, 2, 1],
            [12, 6, 5, 1],
            [3, 2, 1],
        ),
        (
            Op::Im2col,
            &line,
            [3, 2, 7, 1],
            [8, 2, 1, 1],
            [6, 6, 1, 1],
            [3, 1, 1],
        ),
        (
            Op::Im2col3d,
            &volume,
            [3, 2, 5, 14],
            [8, 6, 9, 2],
            [60, 6, 5, 5],
            [3, 2, 5],
        ),
    ] {
        let from = [tensor(DType::F16, weights), f32(image)];
        let body = tensor_op(&operation(op, params, f32(ne), &from)).unwrap();
        assert_eq!(body.params[13..], window, "{op:?}");
        assert_eq!(body.src[0].buffer, 2, "the image alone is read");
    }

    for dtype in [DType::I8, DType::I16, DType::I32, DType::I64] {
        let whole = tensor(dtype, [64, 4, 1, 1]);
        let copy = operation(Op::Cpy, &[], whole, &[whole, whole]);
        let kind = match dtype {
            DType::I8 => wire::TYPE_I8,
            DType::I16 => wire::TYPE_I16,
            DType::I32 => wire::TYPE_I32,
            _ => wire::TYPE_I64,
        };
        let body = tensor_op(&copy).unwrap();
        assert_eq!((body.dst.dtype, body.src[0].dtype), (kind, kind));
    }

    let sum = operation(Op::Sum, &[], f32([1; 4]), &[f32([8, 4, 1, 1])]);
    assert!(tensor_op(&sum).is_some());
    let mut apart = sum;
    apart.src[0].as_mut().unwrap().shape.nb = [8, 64, 256, 256];
    assert!(tensor_op(&apart).is_none());

    // ggml rounds the intermediate result to BF16.
    let bf16 = |ne| tensor(DType::Bf16, ne);
    let [wide, narrow] = [[64, 4, 1, 1], [32, 4, 1, 1]];
    for (op, dst, from, is_planned) in [
        (Op::Swiglu, f32(narrow), f32(wide), true),
        (Op::Swiglu, f32(narrow), bf16(wide), false),
        (Op::Swiglu, bf16(narrow), f32(wide), false),
        (Op::Reglu, bf16(narrow), bf16(wide), true),
    ] {
        let planned = tensor_op(&operation(op, &[], dst, &[from])).is_some();
        assert_eq!(
            planned, is_planned,
            "{op:?} {:?} {:?}",
            dst.dtype, from.dtype
        );
    }

    let q8_0 = DType::Quantized {
        block_elems: 32,
        block_bytes: 34,
    };
    for (place, is_planned) in [
        (Place::Device, true),
        (Place::Packed, false),
        (Place::Foreign, false),
    ] {
        let table = Tensor {
            format: Some(Format::Q8_0),
            place,
            ..tensor(q8_0, [64, 10, 1, 1])
        };
        let ids = tensor(DType::I32, [5, 1, 1, 1]);
        let rows = operation(Op::GetRows, &[], f32([64, 5, 1, 1]), &[table, ids]);
        assert_eq!(tensor_op(&rows).is_some(), is_planned, "{is_planned}");
    }
}

#[test]
fn groups_are_normalized_as_rows() {
    let eps = 1e-5_f32.to_bits().cast_signed();
    let all = tensor(DType::F32, [4, 3, 6, 2]);
    let norm = |groups, dst, src| operation(Op::GroupNorm, &[groups, eps], dst, &[src]);
    let Ok(Command::Tensor(body)) = command(VTCM_BYTES, &norm(2, all, all), false) else {
        panic!("no groups")
    };
    assert_eq!(body.kernel, wire::KERNEL_NORM);
    assert_eq!(body.params[0], eps.cast_unsigned());
    for tensor in [&body.dst, &body.src[0]] {
        assert_eq!(tensor.ne, [36, 2, 2, 1]);
        assert_eq!(tensor.nb, [4, 144, 288, 576]);
    }
    let mut apart = all;
    apart.shape.nb[1] = 20;
    for (what, groups, dst, src) in [
        ("4 groups of 6 channels", 4, all, all),
        ("no groups", 0, all, all),
        ("a source with gaps", 2, all, apart),
        ("a result with gaps", 2, apart, all),
    ] {
        assert!(
            command(VTCM_BYTES, &norm(groups, dst, src), false).is_err(),
            "{what}"
        );
    }
}
