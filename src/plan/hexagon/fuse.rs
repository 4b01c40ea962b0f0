//! Two commands as one, where nothing but the second reads the result of the first.
//!
//! | first | second | as one |
//! |---|---|---|
//! | RMS_NORM, NORM, L2_NORM | MUL | the norm, with what it is multiplied by |
//! | a norm without or with MUL | ADD | the norm, with what is added |

use std::ops::Range;

use hexagon_ops::serve;
use hexagon_ops::wire::{self, SOURCES, TensorOp};

/// `first`, then `second`, as one command; `None` if they cannot be.
///
/// Both name buffers and offsets. The result of `first` has no other reader than `second`.
#[must_use]
pub fn fuse(first: &TensorOp, second: &TensorOp) -> Option<TensorOp> {
    let fused = norm_then(first, second)?;
    let takes = serve::accepts(&fused).is_ok() && is_apart(&fused);
    takes.then_some(fused)
}

/// A norm, then its factor or addend.
fn norm_then(norm: &TensorOp, next: &TensorOp) -> Option<TensorOp> {
    let is_norm = matches!(
        norm.kernel,
        wire::KERNEL_RMS_NORM | wire::KERNEL_NORM | wire::KERNEL_L2_NORM
    );
    // Rounded to less than f32 between the two, it would be another result.
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

/// Whether each source is the result's own memory or shares nothing with it.
fn is_apart(body: &TensorOp) -> bool {
    let result = span(&body.dst);
    body.src.iter().all(|src| {
        let other = src.buffer != body.dst.buffer || src.dtype == wire::TYPE_NONE;
        let span = span(src);
        other || *src == body.dst || span.end <= result.start || result.end <= span.start
    })
}

/// Bytes of its buffer from the first of a tensor of floats to its last, or a few more.
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

    /// Three rows of 64 f32.
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
        // A factor comes before the addend.
        assert_eq!(
            fuse(
                &shifted,
                &op(wire::KERNEL_MUL, rows(Z), [rows(Z), rows(G), NONE])
            ),
            None
        );
    }

    #[test]
    fn what_would_give_other_numbers_stays_apart() {
        let norm = op(wire::KERNEL_RMS_NORM, rows(Y), [rows(X), NONE, NONE]);
        let mul = |dst, src| op(wire::KERNEL_MUL, dst, src);
        assert!(fuse(&norm, &mul(rows(Z), [rows(Y), rows(G), NONE])).is_some());
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
                "no factor",
                norm,
                op(wire::KERNEL_DIV, rows(Z), [rows(Y), rows(G), NONE]),
            ),
        ] {
            assert_eq!(fuse(&first, &second), None, "{what}");
        }
    }
}
