use super::*;
use crate::graph::{PARAMS, Role, sources};
use crate::tensor::Shape;

fn contiguous(place: Place, dtype: DType, ne: [usize; 4]) -> Tensor<'static> {
    let step = dtype.step_bytes().unwrap_or(4);
    let row = dtype.row_bytes(ne[0]).unwrap_or(step * ne[0]);
    Tensor {
        name: "tensor",
        dtype,
        format: None,
        shape: Shape {
            ne,
            nb: [step, row, row * ne[1], row * ne[1] * ne[2]],
        },
        place,
        memory: None,
        packed_offset: 0,
        role: Role::State,
        dequantize: None,
    }
}

#[test]
fn few_rows_are_left_to_the_cpu_where_it_can_read_the_weights() {
    let host = |dtype, ne| contiguous(Place::Host, dtype, ne);
    let mut target = Target::from(&caps::RK3588);
    for (min_m, m, left) in [(1, 1, false), (2, 1, true), (2, 2, false), (8, 7, true)] {
        target.min_m = min_m;
        let weights = |place| contiguous(place, DType::F16, [64, 32, 4, 1]);
        let prefers_cpu = |op, dst, src: &[Tensor<'static>]| {
            let operation = Operation {
                op,
                params: [0; PARAMS],
                dst: host(DType::F32, dst),
                src: sources(src),
            };
            prefers_cpu(&target, &operation)
        };
        // For MUL_MAT, planes are not counted as rows; for MUL_MAT_ID, slots are not counted as
        // tokens.
        let planes = |place| {
            let act = host(DType::F32, [64, m, 4, 3]);
            prefers_cpu(Op::MulMat, [32, m, 4, 3], &[weights(place), act])
        };
        let tokens = |place| {
            let act = host(DType::F32, [64, 2, m, 1]);
            let ids = host(DType::I32, [2, m, 1, 1]);
            prefers_cpu(Op::MulMatId, [32, 2, m, 1], &[weights(place), act, ids])
        };
        assert_eq!(planes(Place::Packed), left, "{min_m} {m}");
        assert_eq!(tokens(Place::Packed), left, "{min_m} {m}");
        assert!(!planes(Place::Foreign));
    }
}

#[test]
fn nodes_that_the_device_does_not_compute_are_left_to_the_cpu() {
    let mut target = Target::from(&caps::RK3588);
    target.repack = Repack::Always;
    let tensor = |dtype, ne| contiguous(Place::Host, dtype, ne);
    let left = |op, weights: &[Tensor<'static>]| {
        let operation = Operation {
            op,
            params: [0; PARAMS],
            dst: tensor(DType::F32, [32, 4, 1, 1]),
            src: sources(weights),
        };
        prefers_cpu(&target, &operation)
    };
    let act = tensor(DType::F32, [64, 4, 1, 1]);
    let weights = tensor(DType::F16, [64, 32, 1, 1]);
    assert!(!left(Op::MulMat, &[weights, act]));
    assert!(left(Op::Add, &[act, act]));
    assert!(left(Op::RmsNorm, &[act]));
    let indices = tensor(DType::I32, [64, 32, 1, 1]);
    assert!(left(Op::MulMat, &[indices, act]));
    let numbers = tensor(DType::I32, [64, 4, 1, 1]);
    assert!(left(Op::MulMat, &[weights, numbers]), "activations");
}

#[test]
fn operands_that_would_be_packed_at_each_use_are_left_to_the_cpu() {
    let mut target = Target::from(&caps::RK3588);
    let tensor = |dtype, ne| contiguous(Place::Host, dtype, ne);
    let act = tensor(DType::F32, [64, 512, 1, 1]);
    let operation = Operation {
        op: Op::MulMat,
        params: [0; PARAMS],
        dst: tensor(DType::F32, [32, 512, 1, 1]),
        src: sources(&[tensor(DType::F16, [64, 32, 1, 1]), act]),
    };
    assert!(prefers_cpu(&target, &operation));
    let mut of_slices = operation;
    of_slices.src[0].as_mut().unwrap().place = Place::Unknown;
    assert!(!prefers_cpu(&target, &of_slices));
    target.repack = Repack::Always;
    assert!(!prefers_cpu(&target, &operation));
}

#[test]
fn weights_that_packing_makes_larger_are_the_cpu_s_below_32_rows() {
    let mut target = Target::from(&caps::RK3588);
    target.min_m_narrow = caps::MIN_M_NARROW;
    let block = |block_elems, block_bytes| DType::Quantized {
        block_elems,
        block_bytes,
    };
    // Q4_0, Q5_0, Q4_K; Q8_0, F16.
    for (dtype, narrow) in [
        (block(32, 18), true),
        (block(32, 22), true),
        (block(256, 144), true),
        (block(32, 34), false),
        (DType::F16, false),
    ] {
        let weights = contiguous(Place::Packed, dtype, [4096, 4096, 1, 1]);
        for (m, few) in [(1, true), (31, true), (32, false), (512, false)] {
            let act = contiguous(Place::Host, DType::F32, [4096, m, 1, 1]);
            let operation = Operation {
                op: Op::MulMat,
                params: [0; PARAMS],
                dst: act,
                src: sources(&[weights, act]),
            };
            let left = |target: &Target| prefers_cpu(target, &operation);
            assert_eq!(left(&target), narrow && few, "{dtype:?} M={m}");
            // With MIN_M=1.
            assert!(!left(&Target::from(&caps::RK3588)));
        }
        let kept = if narrow {
            Keep::IfThereIsRoom
        } else {
            Keep::Never
        };
        assert_eq!(keep(&target, &weights), kept, "{dtype:?}");
        for (wish, kept) in [(true, Keep::Always), (false, Keep::Never)] {
            let target = Target {
                keep: Some(wish),
                ..Target::from(&caps::RK3588)
            };
            assert_eq!(keep(&target, &weights), kept);
        }
        let all = Target {
            min_m: 2,
            ..Target::from(&caps::RK3588)
        };
        assert_eq!(keep(&all, &weights), Keep::Always);
    }
}

#[test]
fn products_whose_operands_do_not_fit_are_refused() {
    type Change = fn([&mut Tensor<'static>; 4]);
    let target = Target::from(&caps::RK3588);
    let host = |dtype, ne| contiguous(Place::Host, dtype, ne);
    let plan = |op, tensors: [Tensor<'static>; 4]| {
        let [dst, src @ ..] = tensors;
        command(
            &target,
            &Operation {
                op,
                params: [0; PARAMS],
                dst,
                src: sources(&src),
            },
        )
    };
    let check = |op, base: [Tensor<'static>; 4], changes: &[(&str, bool, Change)]| {
        assert!(plan(op, base).is_ok(), "{op:?}");
        for (what, fits, change) in changes {
            let mut tensors = base;
            change(tensors.each_mut());
            assert_eq!(plan(op, tensors).is_ok(), *fits, "{op:?}: {what}");
        }
    };
    let ids = host(DType::I32, [3, 7, 1, 1]);
    let dst = host(DType::F32, [32, 4, 4, 4]);
    let w = host(DType::F16, [64, 32, 2, 2]);
    let act = host(DType::F32, [64, 4, 4, 4]);
    let both: &[(&str, bool, Change)] = &[
        ("weights elsewhere", false, |[_, w, ..]| {
            w.place = Place::Foreign
        }),
        ("activations elsewhere", false, |[_, _, act, _]| {
            act.place = Place::Foreign
        }),
        ("a packed result", false, |[dst, ..]| {
            dst.place = Place::Packed
        }),
        ("a result of integers", false, |[dst, ..]| {
            dst.dtype = DType::I32
        }),
        ("a result with gaps", false, |[dst, ..]| dst.shape.nb[0] = 8),
        ("transposed weights", false, |[_, w, ..]| {
            w.shape.nb[0] = 128
        }),
        ("activations of integers", false, |[_, _, act, _]| {
            act.dtype = DType::I32
        }),
        ("activations with gaps", false, |[_, _, act, _]| {
            act.shape.nb[0] = 8
        }),
        ("odd steps", false, |[dst, ..]| dst.shape.nb[3] += 2),
        ("rows over each other", false, |[dst, ..]| {
            dst.shape.nb[1] = 64
        }),
        ("rows apart", true, |[dst, ..]| dst.shape.nb[1] = 256),
        ("another K", false, |[_, _, act, _]| act.shape.ne[0] = 96),
    ];
    check(Op::MulMat, [dst, w, act, ids], both);
    check(
        Op::MulMat,
        [dst, w, act, ids],
        &[
            ("another M", false, |[dst, ..]| dst.shape.ne[1] = 5),
            ("another N", false, |[dst, ..]| dst.shape.ne[0] = 31),
            ("planes that are no multiple", false, |[dst, _, act, _]| {
                (dst.shape.ne[2], act.shape.ne[2]) = (3, 3);
            }),
            ("volumes that are no multiple", false, |[dst, _, act, _]| {
                (dst.shape.ne[3], act.shape.ne[3]) = (3, 3);
            }),
            ("one row of one step", true, |[dst, _, act, _]| {
                (dst.shape.ne[1], act.shape.ne[1], dst.shape.nb[1]) = (1, 1, 64);
            }),
        ],
    );
    let dst = host(DType::F32, [32, 3, 7, 1]);
    let w = host(DType::F16, [64, 32, 5, 1]);
    let act = host(DType::F32, [64, 1, 7, 1]);
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
            ("a packed choice", false, |[.., ids]| {
                ids.place = Place::Packed
            }),
            ("a choice for more tokens", false, |[.., ids]| {
                ids.shape.ne[1] = 8
            }),
            ("two volumes", false, |[_, _, act, _]| act.shape.ne[3] = 2),
        ],
    );
}

#[test]
fn a_weight_is_packed_if_it_has_no_gaps_and_a_buffer_takes_it() {
    let target = Target::from(&caps::RK3588);
    let weights = |ne| contiguous(Place::Packed, DType::F16, ne);
    let w = weights([64, 96, 1, 1]);
    let layout = WeightLayout::new(&caps::RK3588, None, DType::F16, w.shape.ne);
    assert!(layout.is_some());
    assert_eq!(weight_layout(&target, &w), layout);
    let mut apart = w;
    apart.shape.nb[1] += 2;
    assert_eq!(weight_layout(&target, &apart), None);
    // A kernel of a convolution, which graphs multiply with as a matrix of another shape.
    assert_eq!(weight_layout(&target, &weights([1, 96, 64, 1])), None);
    // 2 GiB: more than an address space.
    let large = weights([4096, 262_144, 1, 1]);
    assert_eq!(weight_layout(&target, &large), None);
    let operation = |op, w| Operation {
        op,
        params: [0; PARAMS],
        dst: w,
        src: sources(&[w]),
    };
    let bytes = too_large(&target, &operation(Op::MulMat, large)).unwrap();
    assert!(bytes >= 1 << 31, "{bytes}");
    assert_eq!(too_large(&target, &operation(Op::Add, large)), None);
    let fits = weights([4096, 4096, 1, 1]);
    assert_eq!(too_large(&target, &operation(Op::MulMat, fits)), None);
}
