use super::super::{Target, prefers_cpu};
use super::*;
use crate::config::Repack;
use crate::graph::{Op, PARAMS, Place, Role, sources};
use crate::tensor::Shape;

fn tensor(dtype: DType, ne: [usize; 4]) -> Tensor<'static> {
    let row = dtype.row_bytes(ne[0]).unwrap();
    let nb = [
        dtype.step_bytes().unwrap(),
        row,
        row * ne[1],
        row * ne[1] * ne[2],
    ];
    Tensor {
        name: "tensor",
        dtype,
        format: None,
        shape: Shape { ne, nb },
        place: Place::Host,
        role: Role::Result,
        memory: None,
        packed_offset: 0,
        dequantize: None,
    }
}

/// Attention of 24 heads of 128 elements that share 8 of keys and values.
fn operation(queries: usize, cells: usize) -> Operation<'static> {
    Operation {
        op: Op::FlashAttnExt,
        params: [0; PARAMS],
        dst: tensor(DType::F32, [128, 24, queries, 1]),
        src: sources(&[
            tensor(DType::F32, [128, queries, 24, 1]),
            tensor(DType::F16, [128, cells, 8, 1]),
            tensor(DType::F16, [128, cells, 8, 1]),
            tensor(DType::F16, [cells, queries, 1, 1]),
        ]),
    }
}

#[test]
fn what_the_device_does_not_compute_is_refused_by_name() {
    let refusal = |change: fn(&mut Operation<'static>)| {
        let mut operation = operation(64, 256);
        change(&mut operation);
        Attention::new(&operation).err()
    };
    assert_eq!(refusal(|_| ()), None);
    for (change, reason) in [
        (
            (|it| it.src[2] = None) as fn(&mut Operation<'static>),
            "an operand of attention is missing",
        ),
        (
            |it| it.src[1] = Some(tensor(DType::I16, [128, 256, 8, 1])),
            "keys or values are of a type that is not converted",
        ),
        (
            |it| it.src[1].as_mut().unwrap().shape.nb[0] = 256,
            "keys or values are transposed",
        ),
        (
            |it| it.src[1] = Some(tensor(DType::F16, [128, 256, 7, 1])),
            "shapes do not fit",
        ),
        (
            |it| it.src[3] = Some(tensor(DType::F16, [255, 64, 1, 1])),
            "mask does not fit",
        ),
        (
            |it| it.src[3] = Some(tensor(DType::F32, [256, 64, 1, 1])),
            "mask is not F16 in host memory",
        ),
        (
            |it| it.src[4] = Some(tensor(DType::F32, [23, 1, 1, 1])),
            "sinks are not an F32 for each head in host memory",
        ),
        (
            |it| it.src[0].as_mut().unwrap().place = Place::Foreign,
            "operands are in memory of another device",
        ),
        (|it| it.dst.dtype = DType::F16, "result is not rows of F32"),
    ] {
        assert_eq!(refusal(change), Some(reason));
    }
}

#[test]
fn ranges_cover_all_cells_in_at_most_two_shapes() {
    for cells in [1, 32, 2047, 2048, 2049, 4096, 16_384, 16_400] {
        let plan = Attention::new(&operation(64, cells)).unwrap();
        let (mut next, mut shapes) = (0, Vec::new());
        for (range, padded) in plan.ranges() {
            assert_eq!(range.start, next);
            assert!(!range.is_empty() && range.len() <= padded && padded <= CELLS);
            assert!(padded.is_multiple_of(caps::CELLS_ALIGN));
            // Padding is at most a third of a product.
            assert!(
                padded <= 64 || 2 * padded <= 3 * range.len(),
                "{range:?} {padded}"
            );
            next = range.end;
            shapes.push(padded);
        }
        assert_eq!(next, cells);
        shapes.dedup();
        assert!(shapes.len() <= 2, "{shapes:?}");
    }
}

#[test]
fn prompts_are_the_npu_s_and_single_tokens_the_cpu_s() {
    let pays = |queries, cells| {
        let plan = Attention::new(&operation(queries, cells)).unwrap();
        plan.pays(&caps::RK3588)
    };
    for cells in [512, 4096, 32_768] {
        assert!(pays(512, cells), "{cells}");
        assert!(!pays(1, cells) && !pays(31, cells), "{cells}");
    }
    assert!(!pays(32, 64), "two calls for each head take longer");
}

#[test]
fn the_device_s_graph_has_attention_on_the_faster_processor() {
    let of = |repack, queries| {
        let target = Target {
            repack,
            ..(&caps::RK3588).into()
        };
        prefers_cpu(&target, &operation(queries, 512))
    };
    assert!(!of(Repack::Weights, 512));
    assert!(of(Repack::Weights, 1));
    assert!(!of(Repack::Always, 1), "asked for");
}

#[test]
fn all_cores_have_rows() {
    let bucket = |queries| {
        let plan = Attention::new(&operation(queries, 512)).unwrap();
        (plan.rows(), plan.bucket(&caps::RK3588, Buckets::ALL))
    };
    assert_eq!(bucket(512), (1536, 512));
    assert_eq!(bucket(64), (192, 64));
    assert_eq!(bucket(32), (96, 32));
    assert_eq!(bucket(1), (3, 4));
}

#[test]
fn slopes_are_those_of_alibi() {
    let mut plan = Attention::new(&operation(64, 256)).unwrap();
    assert!((plan.slope(3) - 1.0).abs() < f32::EPSILON);
    // 24 heads: 16 is the largest power of two that is not above 24.
    plan.max_bias = 8.0;
    for (head, want) in [(0, -0.5), (15, -8.0), (16, -0.25), (23, -3.75)] {
        let want = f32::exp2(want);
        assert!((plan.slope(head) - want).abs() < 1e-6 * want, "{head}");
    }
}
