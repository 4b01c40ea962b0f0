//! Operations on tensors whose rows are and are not made of whole vectors, for the guest and for
//! the host test that compares their results: the DSP's vector code is not executed by other host
//! tests.

use hexagon_ops::error::Result;
use hexagon_ops::layout::Line;
use hexagon_ops::ops::elementwise::{Binary, Glu, Unary};
use hexagon_ops::ops::rows::{Norm, Rope, RopePairs, SoftMax};
use hexagon_ops::ops::tensor::{Shape, Source, Type, View, ViewMut};
use hexagon_ops::ops::{Op, run};
use hexagon_ops::rt::Engine;

/// Lines of an operand: 4096 f32.
pub const LINES: usize = 128;

/// Memory of three sources and the result.
pub struct Arena {
    pub src: [[Line; LINES]; 3],
    pub dst: [Line; LINES],
}

/// Number of cases.
#[allow(dead_code, reason = "only the host test asks")]
pub const CASES: usize = 30;

/// An operation, its result and its sources.
struct Case {
    op: Op,
    dst: Shape,
    src: [Option<Shape>; 3],
    /// The first source is the result itself.
    is_in_place: bool,
}

/// Returns the shape of a tensor without gaps.
fn shape(dtype: Type, ne: [usize; 4]) -> Shape {
    let row = ne[0] * dtype.block_bytes();
    Shape {
        dtype,
        ne,
        nb: [dtype.block_bytes(), row, row * ne[1], row * ne[1] * ne[2]],
    }
}

/// Returns a rotation of `n_dims` elements starting at `first`.
fn rope(pairs: RopePairs, n_dims: usize, first: usize) -> Rope {
    Rope {
        pairs,
        sections: None,
        is_inverse: false,
        n_dims,
        first,
        n_ctx_orig: 0,
        freq_base: 10000.0,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    }
}

/// Returns case `number`; rows of 200 end inside a vector, rows of 256 and 2048 do not.
fn case(number: usize) -> Case {
    let f32s = |n, rows| shape(Type::F32, [n, rows, 1, 1]);
    let f16s = |n, rows| shape(Type::F16, [n, rows, 1, 1]);
    let numbers = |n| shape(Type::I32, [n, 1, 1, 1]);
    let new = |op, dst, src: [Option<Shape>; 3]| Case {
        op,
        dst,
        src,
        is_in_place: false,
    };
    let in_place = |case: Case| Case {
        is_in_place: true,
        ..case
    };
    let [a, b] = [f32s(200, 2), f32s(256, 2)];
    let one = |op, row: Shape| new(op, row, [Some(row), None, None]);
    let two = |op, row: Shape| new(op, row, [Some(row), Some(row), None]);
    let soft_max = Op::SoftMax(SoftMax {
        scale: 0.7,
        max_bias: 0.0,
    });
    let turn = |pairs, n, n_dims, first| {
        let heads = shape(Type::F32, [n, 3, 2, 1]);
        let op = Op::Rope(rope(pairs, n_dims, first));
        new(op, heads, [Some(heads), Some(numbers(2)), None])
    };
    let (halves, adjacent) = (RopePairs::Halves, RopePairs::Adjacent);
    let cells = |dtype, n| {
        let heads = shape(Type::F32, [n, 9, 2, 1]);
        let op = Op::RopeSetRows(rope(halves, n, 0));
        let src = [Some(heads), Some(numbers(2)), Some(numbers(2))];
        new(op, shape(dtype, [n, 9, 3, 1]), src)
    };
    let rms = Op::Norm(Norm::Rms(1e-6));
    match number {
        0 => two(rms, a),
        1 => two(rms, f32s(2048, 1)),
        2 => new(
            Op::Norm(Norm::Mean(1e-5)),
            a,
            [Some(a), Some(f32s(200, 1)), Some(a)],
        ),
        3 => in_place(new(rms, a, [None, Some(a), None])),
        4 => one(Op::Norm(Norm::L2(1e-6)), f16s(200, 2)),
        5 => two(Op::Binary(Binary::Add), a),
        6 => in_place(new(Op::Binary(Binary::Mul), a, [None, Some(a), None])),
        7 => new(
            Op::Binary(Binary::Sub),
            b,
            [Some(b), Some(f32s(64, 1)), None],
        ),
        8 => two(Op::Glu(Glu::Swiglu, false), a),
        9 => two(Op::Glu(Glu::Swiglu, false), b),
        10 => one(Op::Unary(Unary::Gelu), a),
        11 => turn(halves, 64, 64, 0),
        12 => turn(halves, 80, 40, 0),
        13 => in_place(turn(halves, 128, 128, 0)),
        14 => in_place(turn(halves, 96, 72, 4)),
        15 => turn(adjacent, 64, 64, 0),
        16 => turn(adjacent, 80, 40, 20),
        17 => in_place(turn(adjacent, 100, 100, 0)),
        18 => cells(Type::F16, 64),
        19 => cells(Type::F32, 40),
        20 => new(soft_max, a, [Some(a), Some(f16s(200, 2)), None]),
        21 => two(soft_max, b),
        22 => in_place(new(soft_max, a, [None, None, None])),
        23 => new(Op::SetRows, f16s(200, 3), [Some(a), Some(numbers(2)), None]),
        24 => new(Op::GetRows, a, [Some(f16s(200, 3)), Some(numbers(2)), None]),
        25 => one(Op::Copy, f16s(200, 3)),
        26 => new(Op::Copy, f16s(200, 3), [Some(f32s(200, 3)), None, None]),
        27 => new(Op::Copy, f32s(100, 6), [Some(f16s(200, 3)), None, None]),
        28 => new(Op::Copy, f16s(64, 32), [Some(f32s(64, 32)), None, None]),
        _ => new(Op::Copy, f16s(72, 5), [Some(f32s(72, 5)), None, None]),
    }
}

/// Fills a tensor with numbers between -4 and 4, and one of row numbers with 0 and 2.
fn fill(memory: &mut [Line], dtype: Type, seed: u32) {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as u16
    };
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(memory);
    match dtype {
        Type::I32 => {
            for (i, word) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let number: u32 = if i.is_multiple_of(2) { 0 } else { 2 };
                *word = number.to_le_bytes();
            }
        }
        Type::F16 => {
            for half in bytes.as_chunks_mut::<2>().0 {
                // Exponents from 2^-6 to 2.
                let bits = next();
                let exponent = 9 + (bits >> 2) % 8;
                *half = (bits & 0x83ff | exponent << 10).to_le_bytes();
            }
        }
        _ => {
            for word in bytes.as_chunks_mut::<4>().0 {
                *word = (f32::from(next()) / 8192.0 - 4.0).to_le_bytes();
            }
        }
    }
}

/// Runs case `number`; returns the result's type. Bytes that it does not write keep their first
/// values.
pub fn compute(number: usize, arena: &mut Arena) -> Result<Type> {
    let case = case(number);
    fill(&mut arena.dst, case.dst.dtype, 77);
    for ((memory, shape), seed) in arena.src.iter_mut().zip(&case.src).zip(5..) {
        let dtype = shape.map_or(Type::F32, |shape| shape.dtype);
        fill(memory, dtype, seed);
    }
    let mut sources = [Source::None; 3];
    for (i, source) in sources.iter_mut().enumerate() {
        *source = match case.src[i] {
            _ if i == 0 && case.is_in_place => Source::InPlace,
            None => Source::None,
            Some(shape) => Source::Apart(View::new(bytemuck::cast_slice(&arena.src[i]), shape)?),
        };
    }
    let dst = ViewMut::new(bytemuck::cast_slice_mut(&mut arena.dst), case.dst)?;
    run(&Engine::new(1), &case.op, dst, &sources)?;
    Ok(case.dst.dtype)
}
