//! Chunks against tokens one by one.

use super::*;
use crate::ops::tensor::View;
use crate::ops::tensor::{Shape, Source, Type};
use crate::wire::WIDE_SOURCES;

const HEADS: usize = 3;
const N_TOKENS: usize = 70;

/// Returns a tensor of numbers in [-scale, scale), less `below`, and its shape.
fn tensor(ne: [usize; 4], scale: f32, below: f32, seed: &mut u32) -> (Vec<f32>, Shape) {
    let elems = (0..ne.iter().product::<usize>()).map(|_| {
        *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let bits = 0x3f80_0000 | (*seed >> 9);
        scale * (2.0 * f32::from_bits(bits) - 3.0) - below
    });
    let row = 4 * ne[0];
    let nb = [4, row, row * ne[1], row * ne[1] * ne[2]];
    let nb = core::array::from_fn(|i| if ne[i] > 1 { nb[i] } else { 0 });
    let dtype = Type::F32;
    (elems.collect(), Shape { dtype, ne, nb })
}

/// Computes values of this scale in heads of `columns` columns. Returns the results of chunks on a
/// unit, and of tokens one by one.
fn both(form: Form, columns: usize, scale: f32) -> (bool, Vec<f32>, Vec<f32>) {
    let seed = &mut 1;
    let sources = [
        tensor([columns, HEADS, N_TOKENS, 1], 1.0, 0.0, seed),
        tensor([columns, HEADS, N_TOKENS, 1], 0.2, 0.0, seed),
        tensor([columns, HEADS, N_TOKENS, 1], scale, 0.0, seed),
        tensor([1, HEADS, N_TOKENS, 1], 0.5, 0.5, seed),
        tensor([1, HEADS, N_TOKENS, 1], 0.5, -0.5, seed),
        tensor([columns, columns, HEADS, 1], scale, 0.0, seed),
    ];
    let mut src = [Source::None; WIDE_SOURCES];
    for (src, (elems, shape)) in src.iter_mut().zip(&sources) {
        *src = Source::Apart(View::new(bytemuck::cast_slice(elems), *shape).unwrap());
    }
    let ne = [columns * HEADS, N_TOKENS + columns, 1, 1];
    let (mut dst, shape) = tensor(ne, 0.0, 0.0, seed);
    let kind = Recurrence::GatedDelta(1);
    let inputs = super::super::check::check(kind, &shape, &src).unwrap();
    let engine = Engine::new(2);
    let mut vtcm = vec![Tile::ZERO; 1024];
    let mut hmx = Hmx::of_form(form, &vtcm);
    let (outputs, states) = dst.split_at_mut(columns * HEADS * N_TOKENS);
    let done = chunked(&engine, &mut vtcm, Some(&mut hmx), &inputs, outputs, states);
    let (mut want, _) = tensor(ne, 0.0, 0.0, seed);
    let bytes = bytemuck::cast_slice_mut(&mut want);
    let view = crate::ops::tensor::ViewMut::new(bytes, shape).unwrap();
    super::super::recurrence(&engine, &mut vtcm, None, kind, view, &src).unwrap();
    (done.unwrap(), dst, want)
}

#[test]
fn chunks_give_what_tokens_one_by_one_give() {
    for (form, columns, scale) in [
        (Form::Scaling, 64, 0.1),
        (Form::RoundOnly, 64, 1.0),
        (Form::Scaling, 128, 1.0),
        (Form::Scaling, 64, 300.0),
    ] {
        let (done, have, want) = both(form, columns, scale);
        assert!(done, "{form:?}, {columns} columns, scale {scale}");
        let square = |x: f32| f64::from(x).powi(2);
        let pairs = have.iter().zip(&want);
        let error: f64 = pairs.map(|(have, want)| square(have - want)).sum();
        let power: f64 = want.iter().copied().map(square).sum();
        assert!(
            error <= 1e-11 * power,
            "{columns} columns, scale {scale}: {:e}",
            error / power
        );
    }
}

#[test]
fn values_that_f16_does_not_hold_are_left_to_tokens_one_by_one() {
    for scale in [1e5, 1e-4, f32::NAN] {
        assert!(!both(Form::Scaling, 64, scale).0, "scale {scale}");
    }
}

#[test]
fn chips_without_a_matrix_unit_compute_tokens_one_by_one() {
    let (done, have, _) = both(Form::Vectors, 64, 1.0);
    // The kernel refuses before it starts, because the unit's instructions do not exist here.
    assert!(!done && have.iter().all(|x| *x == 0.0));
}
