//! Products of all weight types and forms.

use hexagon_ops::layout::{Line, WeightType};
use hexagon_ops::wire::{self, Command, MatMul, MatMulId, RowsF32};
use test_kit::nmse;

use crate::common::{Numbers, Weights, dot};
use crate::driver::{Host, Memory};

/// ggml's own limit for MUL_MAT (test-backend-ops).
const NMSE: f64 = 5e-4;
/// Content of results before they are computed.
const UNTOUCHED: f32 = -77.0;

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

/// `count` matrices in a buffer, at an offset.
pub(crate) fn load_weights(
    host: &mut Host,
    weight: WeightType,
    (n, k): (usize, usize),
    slices: [usize; 2],
    numbers: &mut Numbers,
) -> (wire::Weights, Vec<Weights>) {
    let matrices: Vec<Weights> = (0..slices[0] * slices[1])
        .map(|_| Weights::random(weight, n, k, numbers))
        .collect();
    let lines: Vec<Line> = matrices.iter().flat_map(|w| w.lines.clone()).collect();
    let offset = 256;
    let (buffer, memory) = host.buffer(offset + size_of_val(&lines[..]));
    memory.put(offset, &lines);
    let weights = wire::Weights {
        buffer,
        layout: weight.layout_id().0,
        offset: offset as u64,
        k: number(k),
        n: number(n),
        slices: slices.map(number),
    };
    (weights, matrices)
}

/// Elements in a buffer at byte 4, with strides in elements.
fn rows_f32(buffer: u32, strides: [usize; 3]) -> RowsF32 {
    RowsF32 {
        buffer,
        reserved: 0,
        offset: 4,
        strides: strides.map(|stride| 4 * stride as u64),
    }
}

/// Elements from the first to the last of a region.
fn extent(row: usize, counts: [usize; 3], strides: [usize; 3]) -> usize {
    let reach = |(count, stride): (usize, usize)| (count - 1) * stride;
    row + counts.into_iter().zip(strides).map(reach).sum::<usize>()
}

struct Shape {
    weight: WeightType,
    m: usize,
    k: usize,
    n: usize,
    slices: [usize; 2],
    planes: [usize; 2],
    /// Elements between rows and between planes that belong to neither, of activations and of
    /// results.
    gaps: [usize; 2],
    /// `true` if dimension 1 has the largest stride.
    permuted: bool,
}

impl Shape {
    fn strides(&self, row: usize, gap: usize) -> [usize; 3] {
        let [p2, p3] = self.planes;
        let row = row + gap;
        if self.permuted {
            return [row * p2 * p3, row, row * p2];
        }
        let plane = self.m * row + gap;
        [row, plane, plane * p2 + gap]
    }
}

fn check(shape: &Shape, numbers: &mut Numbers) {
    let Shape { m, k, n, .. } = *shape;
    let mut host = Host::new();
    let (weights, matrices) = load_weights(&mut host, shape.weight, (n, k), shape.slices, numbers);
    let counts = [m, shape.planes[0], shape.planes[1]];
    let [act_strides, dst_strides] = [0, 1].map(|i| shape.strides([k, n][i], shape.gaps[i]));
    let act_len = extent(k, counts, act_strides);
    let dst_len = extent(n, counts, dst_strides);
    let act: Vec<f32> = (0..act_len).map(|_| numbers.float()).collect();
    let (act_buffer, act_memory) = host.buffer(4 + 4 * act_len);
    let (dst_buffer, dst_memory) = host.buffer(8 + 4 * dst_len);
    act_memory.put(4, &act);
    dst_memory.put(0, &vec![UNTOUCHED; dst_len + 2]);
    let body = MatMul {
        weights,
        act: rows_f32(act_buffer, act_strides),
        dst: rows_f32(dst_buffer, dst_strides),
        m: number(m),
        planes: shape.planes.map(number),
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let completion = host.run(&[Command::new(0, &body)]);
    let what = format!(
        "{:?} {m}x{k}x{n} slices {:?} planes {:?} gaps {:?} permuted {}",
        shape.weight, shape.slices, shape.planes, shape.gaps, shape.permuted
    );
    assert_eq!((completion.status, completion.done), (0, 1), "{what}");
    let mut dst: Vec<f32> = dst_memory.get(4, dst_len);
    let ratio = [
        shape.planes[0] / shape.slices[0],
        shape.planes[1] / shape.slices[1],
    ];
    for i3 in 0..counts[2] {
        for i2 in 0..counts[1] {
            let w = &matrices[i2 / ratio[0] + shape.slices[0] * (i3 / ratio[1])];
            let (mut have, mut want) = (Vec::new(), Vec::new());
            for i1 in 0..m {
                let at = |s: [usize; 3]| i1 * s[0] + i2 * s[1] + i3 * s[2];
                let act = &act[at(act_strides)..][..k];
                let row = &mut dst[at(dst_strides)..][..n];
                have.extend_from_slice(row);
                row.fill(UNTOUCHED);
                want.extend(w.values.iter().map(|w| dot(act, w)));
            }
            let error = nmse(&have, &want);
            assert!(error < NMSE, "{what} plane {i2},{i3}: {error:e}");
        }
    }
    assert!(dst.iter().all(|x| *x == UNTOUCHED), "{what}: wrote beside");
    let around: Vec<f32> = dst_memory.get(0, 1);
    let behind: Vec<f32> = dst_memory.get(4 + 4 * dst_len, 1);
    assert_eq!([around[0], behind[0]], [UNTOUCHED; 2], "{what}");
}

#[test]
fn every_type_multiplies_plain_batched_and_broadcast() {
    let mut numbers = Numbers::default();
    for weight in WeightType::ALL {
        for m in [1, 2, 5, 33] {
            for (slices, planes) in [
                ([1, 1], [1, 1]),
                ([1, 1], [3, 2]),
                ([2, 1], [4, 3]),
                ([1, 2], [1, 2]),
                ([2, 2], [4, 6]),
            ] {
                for (gaps, permuted) in [
                    ([0, 0], false),
                    ([3, 3], false),
                    ([3, 0], false),
                    ([0, 3], false),
                    ([0, 0], true),
                ] {
                    check(
                        &Shape {
                            weight,
                            m,
                            k: 64_usize.next_multiple_of(weight.block_elems()),
                            n: 40,
                            slices,
                            planes,
                            gaps,
                            permuted,
                        },
                        &mut numbers,
                    );
                }
            }
        }
    }
}

/// A product whose rows need two parts.
#[test]
fn rows_of_the_second_part_lie_behind_those_of_the_first() {
    let shape = Shape {
        weight: WeightType::F16,
        m: (1 << 16) + 4,
        k: 32,
        n: 2,
        slices: [1, 1],
        planes: [1, 1],
        gaps: [1, 1],
        permuted: false,
    };
    check(&shape, &mut Numbers::default());
}

#[test]
fn f16_weights_need_no_whole_blocks() {
    let mut host = Host::new();
    let layout = hexagon_ops::layout::MatrixLayout::new(WeightType::F16, 2, 5).unwrap();
    let mut lines = vec![Line::ZERO; layout.matrix_bytes() / 128];
    let one = half::f16::ONE.to_le_bytes();
    for row in 0..2 {
        let bytes: Vec<u8> = (0..5).flat_map(|_| one).collect();
        layout
            .pack_row(bytemuck::cast_slice_mut(&mut lines), row, &bytes)
            .unwrap();
    }
    let (buffer, memory) = host.buffer(layout.matrix_bytes());
    memory.put(0, &lines);
    let (act, act_memory) = host.buffer(64);
    act_memory.put(4, &[1.0_f32, 2.0, 3.0, 4.0, 5.0]);
    let (dst, dst_memory) = host.buffer(64);
    let body = MatMul {
        weights: wire::Weights {
            buffer,
            layout: WeightType::F16.layout_id().0,
            offset: 0,
            k: 5,
            n: 2,
            slices: [1, 1],
        },
        act: rows_f32(act, [5, 5, 5]),
        dst: rows_f32(dst, [2, 2, 2]),
        m: 1,
        planes: [1, 1],
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    assert_eq!(host.run(&[Command::new(0, &body)]).status, 0);
    assert_eq!(dst_memory.get::<f32>(4, 2), [15.0, 15.0]);
}

#[test]
fn no_rows_are_no_work() {
    let mut numbers = Numbers::default();
    let mut host = Host::new();
    let (weights, _) = load_weights(&mut host, WeightType::Q4_0, (32, 32), [1, 1], &mut numbers);
    let (buffer, _) = host.buffer(4096);
    let body = MatMul {
        weights,
        act: rows_f32(buffer, [32, 0, 0]),
        dst: rows_f32(buffer, [32, 0, 0]),
        m: 0,
        planes: [1, 1],
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let completion = host.run(&[Command::new(0, &body)]);
    assert_eq!((completion.status, completion.done), (0, 1));
}

/// Dot products quantize activations, and tiles do not: a row that is computed by tiles equals that
/// row of a larger product, bit for bit.
#[test]
fn the_command_says_up_to_how_many_rows_are_dot_products() {
    let mut numbers = Numbers::default();
    let mut host = Host::new();
    let (k, n) = (64, 40);
    let (weights, _) = load_weights(&mut host, WeightType::Q4_0, (n, k), [1, 1], &mut numbers);
    let act: Vec<f32> = (0..3 * k).map(|_| numbers.float()).collect();
    let (act_buffer, act_memory) = host.buffer(4 + 4 * act.len());
    act_memory.put(4, &act);
    let (dst_buffer, dst_memory) = host.buffer(4 + 4 * 3 * n);
    let mut rows = |m: u32, dots: u32| -> Vec<f32> {
        let body = MatMul {
            weights,
            act: rows_f32(act_buffer, [k, 0, 0]),
            dst: rows_f32(dst_buffer, [n, 0, 0]),
            m,
            planes: [1, 1],
            dots,
            epilogue: bytemuck::Zeroable::zeroed(),
        };
        assert_eq!(host.run(&[Command::new(0, &body)]).status, 0);
        dst_memory.get(4, 2 * n)
    };
    let tiles = rows(3, 2);
    assert_eq!(rows(2, 0), tiles);
    assert_eq!(rows(2, 1), tiles);
    let dots = rows(2, 2);
    assert_ne!(dots, tiles);
    let one = rows(1, 1);
    assert_eq!(one[..n], dots[..n]);
    assert_eq!(rows(1, 0)[..n], tiles[..n]);
    // Parameter 3 computes one row with activations of two digits.
    assert_ne!(rows(1, 3)[..n], one[..n]);
    assert_eq!(rows(2, 3), tiles);
}

/// Tokens that choose experts.
struct Choice {
    weight: WeightType,
    tokens: usize,
    slots: usize,
    act_slots: usize,
    n_experts: usize,
}

fn check_experts(choice: &Choice, numbers: &mut Numbers) {
    let Choice {
        tokens,
        slots,
        act_slots,
        n_experts,
        ..
    } = *choice;
    let (k, n) = (choice.weight.block_elems(), 33);
    let mut host = Host::new();
    let (weights, experts) =
        load_weights(&mut host, choice.weight, (n, k), [n_experts, 1], numbers);
    let act: Vec<f32> = (0..tokens * act_slots * k)
        .map(|_| numbers.float())
        .collect();
    let (act_buffer, act_memory) = host.buffer(4 + 4 * act.len());
    act_memory.put(4, &act);
    // Rows of expert ids are longer than their used part.
    let row = slots + 3;
    let mut ids = vec![0; tokens * row];
    let chosen = numbers.choices(tokens, slots, n_experts);
    for (ids, chosen) in ids.chunks_exact_mut(row).zip(chosen.chunks_exact(slots)) {
        ids[..slots].copy_from_slice(chosen);
    }
    let (ids_buffer, ids_memory) = host.buffer(4 + 4 * ids.len());
    ids_memory.put(4, &ids);
    let dst_len = tokens * slots * n;
    let (dst_buffer, dst_memory): (u32, Memory) = host.buffer(4 + 4 * dst_len);
    let body = MatMulId {
        weights,
        act: rows_f32(act_buffer, [k, act_slots * k, 0]),
        dst: rows_f32(dst_buffer, [n, slots * n, 0]),
        ids: rows_f32(ids_buffer, [row, 0, 0]),
        slots: number(slots),
        act_slots: number(act_slots),
        tokens: number(tokens),
        dots: 2,
    };
    let completion = host.run(&[Command::new(0, &body)]);
    assert_eq!((completion.status, completion.detail), (0, 0));
    let dst: Vec<f32> = dst_memory.get(4, dst_len);
    let mut want = Vec::new();
    for t in 0..tokens {
        for s in 0..slots {
            let w = &experts[usize::try_from(ids[t * row + s]).unwrap()];
            let act = &act[(t * act_slots + s % act_slots) * k..][..k];
            want.extend(w.values.iter().map(|w| dot(act, w)));
        }
    }
    let error = nmse(&dst, &want);
    assert!(
        error < NMSE,
        "{:?} {tokens} tokens {slots} slots of {act_slots}: {error:e}",
        choice.weight
    );
}

#[test]
fn tokens_meet_the_experts_they_chose() {
    let mut numbers = Numbers::default();
    for weight in WeightType::ALL {
        for (tokens, slots, act_slots) in [(1, 1, 1), (1, 4, 4), (7, 2, 1), (5, 4, 2), (3, 6, 3)] {
            check_experts(
                &Choice {
                    weight,
                    tokens,
                    slots,
                    act_slots,
                    n_experts: 6,
                },
                &mut numbers,
            );
        }
    }
}

#[test]
fn more_choices_than_fit_at_once_are_taken_in_turns() {
    let mut numbers = Numbers::default();
    for (tokens, slots, act_slots) in [
        (4096, 4, 1),
        (512, 9, 1),
        (33, 128, 128),
        (512, 128, 1),
        (2, 4096, 1),
        (2, 4096, 4096),
    ] {
        check_experts(
            &Choice {
                weight: WeightType::Q8_0,
                tokens,
                slots,
                act_slots,
                n_experts: slots,
            },
            &mut numbers,
        );
    }
}

#[test]
fn products_of_one_source_are_what_each_is_alone() {
    let mut numbers = Numbers::default();
    let mut reused = 0;
    // One row of activations is stored differently for 4-bit weights.
    let mixed = [WeightType::Q4_0, WeightType::Q8_0, WeightType::Q4_1];
    let same = [WeightType::Q8_0, WeightType::Q4_0, WeightType::F16].map(|weight| [weight; 3]);
    for (types, m) in same
        .into_iter()
        .chain([mixed])
        .flat_map(|types| [1, 2, 5, 40].map(|m| (types, m)))
    {
        let mut host = Host::new();
        let k = 96;
        let mut sizes = [(40, k), (72, k), (32, 64)].into_iter();
        let [first, second, narrow] = types.map(|weight| {
            let size = sizes.next().unwrap();
            load_weights(&mut host, weight, size, [1, 1], &mut numbers).0
        });
        let (act, act_memory) = host.buffer(4 + 4 * m * k);
        let sources: Vec<f32> = (0..m * k).map(|_| numbers.float()).collect();
        let mut products = Vec::new();
        let product = |host: &mut Host, products: &mut Vec<_>, weights: wire::Weights| {
            let n = weights.n as usize;
            let (dst, memory) = host.buffer(4 + 4 * m * n);
            products.push((memory, m * n));
            Command::new(
                0,
                &MatMul {
                    weights,
                    act: rows_f32(act, [k, 0, 0]),
                    dst: rows_f32(dst, [n, 0, 0]),
                    m: number(m),
                    planes: [1, 1],
                    dots: 2,
                    epilogue: bytemuck::Zeroable::zeroed(),
                },
            )
        };
        let tensor = wire::Tensor {
            buffer: act,
            dtype: wire::TYPE_F32,
            offset: 4,
            ne: [number(m * k), 1, 1, 1],
            nb: [4, 0, 0, 0],
        };
        let mut scale = wire::TensorOp {
            kernel: wire::KERNEL_SCALE,
            dst: tensor,
            ..bytemuck::Zeroable::zeroed()
        };
        scale.params[0] = (-2.0_f32).to_bits();
        scale.src[0] = tensor;
        let commands = [
            product(&mut host, &mut products, first),
            product(&mut host, &mut products, second),
            product(&mut host, &mut products, narrow),
            product(&mut host, &mut products, second),
            Command::new(0, &scale),
            product(&mut host, &mut products, first),
        ];
        let results = |products: &[(_, usize)]| -> Vec<Vec<f32>> {
            let get = |(memory, len): &(Memory, usize)| memory.get(4, *len);
            products.iter().map(get).collect()
        };
        act_memory.put(4, &sources);
        assert_eq!(host.run(&commands).status, 0);
        let together = results(&products);
        act_memory.put(4, &sources);
        for command in commands {
            assert_eq!(host.run(&[command]).status, 0);
        }
        assert_eq!(together, results(&products), "{types:?}, {m} rows");
        assert_ne!(together[0], together[4]);
        reused += 1;
    }
    assert_eq!(reused, 16);
}
