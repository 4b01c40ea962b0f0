//! Planes of a product that follow one another are one product of all their rows, and others are
//! not.
//!
//! Rows computed by dot products, at most two, differ in bits from rows computed by tiles. So the
//! bits show how many rows a product had.

use bytemuck::Zeroable;
use hexagon_ops::layout::{MatrixLayout, WeightType};
use hexagon_ops::wire::{self, Command, MatMul, RowsF32};

use crate::common::Numbers;
use crate::driver::Host;
use crate::matmul::load_weights;

const K: usize = 64;
const N: usize = 40;

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

fn rows_f32(buffer: u32, strides: [usize; 3]) -> RowsF32 {
    RowsF32 {
        buffer,
        reserved: 0,
        offset: 0,
        strides: strides.map(|stride| 4 * stride as u64),
    }
}

/// A product of `m` rows in each plane.
struct Case {
    m: usize,
    planes: [usize; 2],
    slices: [usize; 2],
    /// Elements between rows, between planes of dimension 2, and between those of dimension 3 that
    /// belong to none of them.
    act_gaps: [usize; 3],
    dst_gaps: [usize; 3],
    /// Rows that are one product.
    joined: usize,
}

impl Case {
    /// Returns the strides of rows with `row` elements.
    fn strides(&self, row: usize, gaps: [usize; 3]) -> [usize; 3] {
        let s1 = row + gaps[0];
        let s2 = self.m * s1 + gaps[1];
        [s1, s2, self.planes[0] * s2 + gaps[2]]
    }

    /// Returns the indices of all rows, in order, and the number of each row's slice.
    fn rows(&self) -> Vec<([usize; 3], usize)> {
        let ratio = [0, 1].map(|i| self.planes[i] / self.slices[i]);
        let mut rows = Vec::new();
        for i3 in 0..self.planes[1] {
            for i2 in 0..self.planes[0] {
                let slice = i2 / ratio[0] + self.slices[0] * (i3 / ratio[1]);
                rows.extend((0..self.m).map(|i1| ([i1, i2, i3], slice)));
            }
        }
        rows
    }
}

const WHOLE: [usize; 3] = [0; 3];

fn case(m: usize, planes: [usize; 2], joined: usize) -> Case {
    Case {
        m,
        planes,
        slices: [1, 1],
        act_gaps: WHOLE,
        dst_gaps: WHOLE,
        joined,
    }
}

fn cases() -> Vec<Case> {
    let gaps = |case: Case, act_gaps, dst_gaps| Case {
        act_gaps,
        dst_gaps,
        ..case
    };
    let slices = |case: Case, slices| Case { slices, ..case };
    vec![
        case(1, [3, 2], 6),
        gaps(case(1, [3, 2], 6), [8, 0, 0], WHOLE),
        gaps(case(1, [3, 2], 6), [0, 8, 0], [0, 4, 0]),
        gaps(case(1, [2, 2], 2), [0, 0, 8], WHOLE),
        gaps(case(1, [2, 2], 2), WHOLE, [0, 0, 8]),
        gaps(case(1, [3, 2], 3), [0, 0, 8], [0, 0, 8]),
        // Products of one or two rows are dot products, whose results show whether the third
        // dimension was joined.
        case(1, [2, 2], 4),
        case(2, [1, 2], 4),
        case(2, [2, 2], 8),
        gaps(case(2, [2, 2], 8), [8, 0, 0], [4, 0, 0]),
        gaps(case(2, [3, 1], 2), [0, 8, 0], WHOLE),
        gaps(case(2, [3, 1], 2), WHOLE, [0, 8, 0]),
        gaps(case(2, [2, 2], 4), [0, 0, 8], WHOLE),
        gaps(case(2, [2, 2], 4), WHOLE, [0, 0, 8]),
        // Planes of two slices are two products.
        slices(case(1, [4, 1], 2), [2, 1]),
        slices(case(1, [6, 1], 3), [2, 1]),
        slices(case(1, [3, 4], 6), [1, 2]),
        slices(case(2, [2, 3], 2), [2, 1]),
        slices(case(2, [2, 2], 4), [1, 2]),
    ]
}

fn check(case: &Case, weight: WeightType, dots: u32) {
    let mut numbers = Numbers::default();
    let mut host = Host::new();
    let (weights, _) = load_weights(&mut host, weight, (N, K), case.slices, &mut numbers);
    let rows = case.rows();
    let act_strides = case.strides(K, case.act_gaps);
    let dst_strides = case.strides(N, case.dst_gaps);
    let elems = |strides: [usize; 3]| strides[2] * case.planes[1];
    let act: Vec<f32> = (0..elems(act_strides)).map(|_| numbers.float()).collect();
    let (act_buffer, act_memory) = host.buffer(4 * act.len());
    act_memory.put(0, &act);
    let (dst_buffer, dst_memory) = host.buffer(4 * elems(dst_strides));
    let at = |strides: [usize; 3], index: [usize; 3]| -> usize {
        strides.into_iter().zip(index).map(|(s, i)| s * i).sum()
    };
    let body = MatMul {
        weights,
        act: rows_f32(act_buffer, act_strides),
        dst: rows_f32(dst_buffer, dst_strides),
        m: number(case.m),
        planes: case.planes.map(number),
        dots,
        epilogue: Zeroable::zeroed(),
    };
    assert_eq!(host.run(&[Command::new(0, &body)]).status, 0);
    let have: Vec<Vec<u32>> = rows
        .iter()
        .map(|(index, _)| dst_memory.get(4 * at(dst_strides, *index), N))
        .collect();

    // The same rows, multiplied as a single plane.
    let joined = case.joined;
    let (part_act, part_act_memory) = host.buffer(4 * joined * K);
    let (part_dst, part_dst_memory) = host.buffer(4 * joined * N);
    let matrix_bytes = MatrixLayout::new(weight, N, K).unwrap().matrix_bytes();
    let mut want: Vec<Vec<u32>> = Vec::new();
    for part in rows.chunks(joined) {
        let slice = part[0].1;
        for (i, (index, other)) in part.iter().enumerate() {
            assert_eq!(*other, slice, "rows of one product have one slice");
            part_act_memory.put(4 * i * K, &act[at(act_strides, *index)..][..K]);
        }
        let body = MatMul {
            weights: wire::Weights {
                offset: weights.offset + (slice * matrix_bytes) as u64,
                slices: [1, 1],
                ..weights
            },
            act: rows_f32(part_act, [K, 0, 0]),
            dst: rows_f32(part_dst, [N, 0, 0]),
            m: number(part.len()),
            planes: [1, 1],
            dots,
            epilogue: Zeroable::zeroed(),
        };
        assert_eq!(host.run(&[Command::new(0, &body)]).status, 0);
        want.extend((0..part.len()).map(|i| part_dst_memory.get::<u32>(4 * i * N, N)));
    }
    let Case {
        m,
        planes,
        slices,
        act_gaps,
        dst_gaps,
        ..
    } = case;
    assert_eq!(
        have, want,
        "{weight:?}, {m} rows, planes {planes:?}, slices {slices:?}, gaps {act_gaps:?} and {dst_gaps:?}"
    );
}

#[test]
fn planes_are_joined_where_they_follow_one_another_and_only_there() {
    for case in cases() {
        for weight in [WeightType::Q4_0, WeightType::Q8_0] {
            check(&case, weight, 2);
        }
    }
}

/// Tiles compute each row by itself, so the bits of a row do not depend on the other rows.
#[test]
fn joined_planes_have_the_bits_of_separate_ones() {
    for case in cases() {
        let joined = case.m;
        for weight in [WeightType::Q4_0, WeightType::Q8_0, WeightType::F16] {
            check(&Case { joined, ..case }, weight, 0);
        }
    }
}
