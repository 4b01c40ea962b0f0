//! Joins two commands into one, if only the second reads the result of the first.
//!
//! | first | second | as one |
//! |---|---|---|
//! | RMS_NORM, NORM, L2_NORM | MUL | the norm, with its factor |
//! | a norm without or with MUL | ADD | the norm, with its addend |
//! | ROPE without frequency factors | SET_ROWS to F32, F16 or BF16 | rows go to the cache as they are turned |
//! | MUL_MAT with packed weights | ADD of a residual or a bias | added before results are written |
//! | MUL_MAT with packed weights: the gate | SWIGLU, GEGLU, REGLU, GEGLU_ERF, GEGLU_QUICK | applied before results are written |

mod epilogue;

use std::ops::Range;

use hexagon_ops::serve;
use hexagon_ops::wire::{self, SOURCES, TensorOp};

pub use epilogue::fuse_product;

/// Returns `first`, then `second`, as one command; `None` if they cannot be.
///
/// Both name buffers and offsets. The result of `first` has no other reader than `second`.
#[must_use]
pub fn fuse(first: &TensorOp, second: &TensorOp) -> Option<TensorOp> {
    let fused = norm_then(first, second).or_else(|| rope_then(first, second))?;
    let takes = serve::accepts(&fused).is_ok() && is_apart(&fused);
    takes.then_some(fused)
}

/// Returns a norm, then its factor or addend.
fn norm_then(norm: &TensorOp, next: &TensorOp) -> Option<TensorOp> {
    let is_norm = matches!(
        norm.kernel,
        wire::KERNEL_RMS_NORM | wire::KERNEL_NORM | wire::KERNEL_L2_NORM
    );
    // Only for F32: an intermediate result of fewer bits is rounded, and the combined command would
    // skip that rounding.
    if !is_norm || norm.dst.dtype != wire::TYPE_F32 || next.src[0] != norm.dst {
        return None;
    }
    let (place, later) = match next.kernel {
        wire::KERNEL_MUL => (1, 1..SOURCES),
        wire::KERNEL_ADD => (2, 2..SOURCES),
        _ => return None,
    };
    let free = norm.src[later]
        .iter()
        .all(|src| src.dtype == wire::TYPE_NONE);
    let mut fused = *norm;
    fused.dst = next.dst;
    fused.src[place] = next.src[1];
    (free && next.src[1] != norm.dst).then_some(fused)
}

/// Returns a rotation, then rows of all heads to a cache.
fn rope_then(rope: &TensorOp, set: &TensorOp) -> Option<TensorOp> {
    let [heads, rows] = [&rope.dst, &set.src[0]];
    let kernels = rope.kernel == wire::KERNEL_ROPE && set.kernel == wire::KERNEL_SET_ROWS;
    let float = |tensor: &wire::Tensor| match tensor.dtype {
        wire::TYPE_F32 => Some(4),
        wire::TYPE_F16 | wire::TYPE_BF16 => Some(2),
        _ => None,
    };
    if !kernels || rope.src[2].dtype != wire::TYPE_NONE || heads.dtype != wire::TYPE_F32 {
        return None;
    }
    // The same elements, once split into heads and once as whole rows.
    let [d, n_heads, tokens, streams] = heads.ne;
    let row = d.checked_mul(n_heads)?;
    let bytes = [4, u64::from(d) * 4, u64::from(row) * 4];
    let same = (heads.buffer, heads.offset) == (rows.buffer, rows.offset)
        && rows.dtype == heads.dtype
        && (rows.ne, streams) == ([row, tokens, 1, 1], 1)
        && heads.nb[..3] == bytes
        && rows.nb[..2] == [bytes[0], bytes[2]];
    let (cache, size) = (&set.dst, float(&set.dst)?);
    let plane = cache.nb[1];
    if !same || cache.nb[0] != size || cache.ne[2..] != [1, 1] || set.src[1].ne[1..] != [1; 3] {
        return None;
    }
    let mut fused = *rope;
    fused.kernel = wire::KERNEL_ROPE_SET_ROWS;
    fused.dst = wire::Tensor {
        ne: [d, n_heads, cache.ne[1], 1],
        nb: [
            size,
            u64::from(d) * size,
            plane,
            u64::from(cache.ne[1]) * plane,
        ],
        ..*cache
    };
    fused.src[2] = set.src[1];
    Some(fused)
}

/// Returns `true` if each source is the result's own memory or shares nothing with it.
fn is_apart(body: &TensorOp) -> bool {
    let result = span(&body.dst);
    body.src.iter().all(|src| {
        let other = src.buffer != body.dst.buffer || src.dtype == wire::TYPE_NONE;
        let span = span(src);
        other || *src == body.dst || span.end <= result.start || result.end <= span.start
    })
}

/// Returns the bytes of its buffer from the first of a tensor of floats to its last, or a few more.
fn span(tensor: &wire::Tensor) -> Range<u64> {
    let reach = |(ne, nb): (&u32, &u64)| u64::from(ne.saturating_sub(1)).saturating_mul(*nb);
    let steps = tensor.ne.iter().zip(&tensor.nb).map(reach);
    let bytes = steps.fold(size_of::<f32>() as u64, u64::saturating_add);
    tensor.offset..tensor.offset.saturating_add(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: wire::Tensor = wire::Tensor {
        buffer: 0,
        dtype: wire::TYPE_NONE,
        offset: 0,
        ne: [0; 4],
        nb: [0; 4],
    };

    /// Returns three rows of 64 f32.
    fn rows(offset: u64) -> wire::Tensor {
        wire::Tensor {
            buffer: 1,
            dtype: wire::TYPE_F32,
            offset,
            ne: [64, 3, 1, 1],
            nb: [4, 256, 768, 768],
        }
    }

    fn op(kernel: u32, dst: wire::Tensor, src: [wire::Tensor; SOURCES]) -> TensorOp {
        TensorOp {
            kernel,
            dst,
            src,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    const X: u64 = 0;
    const Y: u64 = 1024;
    const G: u64 = 2048;
    const Z: u64 = 4096;

    #[test]
    fn norm_factor_and_addend_are_one_command() {
        let norm = op(wire::KERNEL_RMS_NORM, rows(Y), [rows(X), NONE, NONE]);
        let mul = op(wire::KERNEL_MUL, rows(Y), [rows(Y), rows(G), NONE]);
        let add = op(wire::KERNEL_ADD, rows(Z), [rows(Y), rows(G), NONE]);
        let scaled = fuse(&norm, &mul).unwrap();
        assert_eq!(scaled.src, [rows(X), rows(G), NONE]);
        assert_eq!((scaled.kernel, scaled.dst), (norm.kernel, rows(Y)));
        let both = fuse(&scaled, &add).unwrap();
        assert_eq!(both.src, [rows(X), rows(G), rows(G)]);
        assert_eq!(both.dst, rows(Z));
        let shifted = fuse(&norm, &add).unwrap();
        assert_eq!(shifted.src, [rows(X), NONE, rows(G)]);
        // The combined kernel multiplies before it adds, so a factor after an addend is not
        // combined.
        assert_eq!(
            fuse(
                &shifted,
                &op(wire::KERNEL_MUL, rows(Z), [rows(Z), rows(G), NONE])
            ),
            None
        );
    }

    /// A change that makes a rotation and its successor differ.
    type Change = fn(&mut TensorOp, &mut TensorOp);

    #[test]
    fn turned_heads_go_to_the_cache() {
        let heads = wire::Tensor {
            ne: [64, 3, 2, 1],
            nb: [4, 256, 768, 1536],
            ..rows(Y)
        };
        let flat = wire::Tensor {
            ne: [192, 2, 1, 1],
            nb: [4, 768, 1536, 1536],
            ..heads
        };
        let numbers = |buffer| wire::Tensor {
            buffer,
            dtype: wire::TYPE_I64,
            offset: 0,
            ne: [2, 1, 1, 1],
            nb: [8, 16, 16, 16],
        };
        let cache = wire::Tensor {
            buffer: 9,
            dtype: wire::TYPE_F16,
            offset: 512,
            ne: [192, 100, 1, 1],
            nb: [2, 384, 38400, 38400],
        };
        let mut turn = op(wire::KERNEL_ROPE, heads, [heads, numbers(3), NONE]);
        turn.params[1] = 64;
        turn.params[5] = 1e4_f32.to_bits();
        turn.params[6] = 1_f32.to_bits();
        turn.params[8] = 1_f32.to_bits();
        let set = op(wire::KERNEL_SET_ROWS, cache, [flat, numbers(4), NONE]);
        let fused = fuse(&turn, &set).unwrap();
        assert_eq!(
            (fused.kernel, fused.params),
            (wire::KERNEL_ROPE_SET_ROWS, turn.params)
        );
        assert_eq!(fused.src, [heads, numbers(3), numbers(4)]);
        assert_eq!(
            (fused.dst.ne, fused.dst.nb),
            ([64, 3, 100, 1], [2, 128, 384, 38400])
        );
        assert_eq!((fused.dst.buffer, fused.dst.offset), (9, 512));

        let with = |change: Change| {
            let (mut turn, mut set) = (turn, set);
            change(&mut turn, &mut set);
            fuse(&turn, &set)
        };
        for (what, dtype, nb) in [
            ("F16", wire::TYPE_F16, [2, 384, 38400, 38400]),
            ("BF16", wire::TYPE_BF16, [2, 384, 38400, 38400]),
            ("F32", wire::TYPE_F32, [4, 768, 76800, 76800]),
        ] {
            let mut set = set;
            (set.dst.dtype, set.dst.nb) = (dtype, nb);
            assert!(fuse(&turn, &set).is_some(), "{what}");
        }
        let apart: [(&str, Change); 18] = [
            ("not to a cache", |_, set| set.kernel = wire::KERNEL_COPY),
            ("no rotation", |turn, _| turn.kernel = wire::KERNEL_COPY),
            ("rounded between", |turn, _| turn.dst.dtype = wire::TYPE_F16),
            ("another buffer", |_, set| set.src[0].buffer = 2),
            ("read as integers", |_, set| {
                set.src[0].dtype = wire::TYPE_I32
            }),
            ("two sequences", |turn, _| turn.dst.ne[3] = 2),
            ("heads with gaps", |turn, _| turn.dst.nb[1] = 512),
            ("tokens with gaps", |turn, _| turn.dst.nb[2] = 1024),
            ("rows with gaps", |_, set| set.src[0].nb[1] = 1024),
            ("rows of single elements", |_, set| set.src[0].nb[0] = 8),
            ("a cache with gaps", |_, set| set.dst.nb[0] = 4),
            ("a cache of planes", |_, set| set.dst.ne[2] = 2),
            ("frequency factors", |turn, _| turn.src[2] = rows(G)),
            ("another tensor", |_, set| set.src[0].offset += 4096),
            ("numbers for two planes", |_, set| set.src[1].ne[1] = 2),
            ("a cache of blocks", |_, set| {
                (set.dst.dtype, set.dst.nb[0]) = (wire::TYPE_Q8_0, 34);
            }),
            ("some of the rows", |_, set| set.src[0].ne[1] = 1),
            ("turned back", |turn, _| {
                turn.kernel = wire::KERNEL_ROPE_BACK
            }),
        ];
        for (what, change) in apart {
            assert_eq!(with(change), None, "{what}");
        }
    }

    #[test]
    fn what_would_give_other_numbers_stays_apart() {
        let norm = op(wire::KERNEL_RMS_NORM, rows(Y), [rows(X), NONE, NONE]);
        let mul = |dst, src| op(wire::KERNEL_MUL, dst, src);
        assert!(fuse(&norm, &mul(rows(Z), [rows(Y), rows(G), NONE])).is_some());
        for (what, place) in [
            ("over the source", X),
            ("behind the source", X + 768),
            ("before the factor", G - 768),
        ] {
            let fused = fuse(&norm, &mul(rows(place), [rows(Y), rows(G), NONE]));
            assert!(fused.is_some(), "{what}");
        }
        let f16 = wire::Tensor {
            dtype: wire::TYPE_F16,
            nb: [2, 128, 384, 384],
            ..rows(Y)
        };
        let halves = op(wire::KERNEL_RMS_NORM, f16, [rows(X), NONE, NONE]);
        for (what, first, second) in [
            (
                "it reads something else",
                norm,
                mul(rows(Z), [rows(G), rows(Y), NONE]),
            ),
            ("its square", norm, mul(rows(Z), [rows(Y), rows(Y), NONE])),
            (
                "over part of the source",
                norm,
                mul(rows(X + 256), [rows(Y), rows(G), NONE]),
            ),
            (
                // The result may be the source itself, but must not overlap it in part.
                "over the end of the source",
                norm,
                mul(rows(X + 764), [rows(Y), rows(G), NONE]),
            ),
            (
                "over the start of the factor",
                norm,
                mul(rows(G - 764), [rows(Y), rows(G), NONE]),
            ),
            (
                "rounded between",
                halves,
                mul(rows(Z), [f16, rows(G), NONE]),
            ),
            (
                "not a norm",
                mul(rows(Y), [rows(X), rows(G), NONE]),
                mul(rows(Z), [rows(Y), rows(G), NONE]),
            ),
            (
                "not a norm before a sum",
                mul(rows(Y), [rows(X), rows(G), NONE]),
                op(wire::KERNEL_ADD, rows(Z), [rows(Y), rows(G), NONE]),
            ),
            (
                "no factor",
                norm,
                op(wire::KERNEL_DIV, rows(Z), [rows(Y), rows(G), NONE]),
            ),
        ] {
            assert_eq!(fuse(&first, &second), None, "{what}");
        }
    }
}
