//! Packing of weights: calibrated scales, nibbles, native B.

use super::{CHUNK, join_nibbles, nibble_bytes, quantize_weights};
use crate::calibrate::{self, Method};
use crate::feedback::{Feedback, RoundingScratch};
use crate::layout::NativeB;
use crate::pack::{self, Rows};

/// Quantizes rows of one group to nibbles `q`, with a scale for each row and K segment:
/// `(q + 1/2) * scale`.
///
/// - `rows`: any rows of K elements, already rotated; K and `segment_k` even, the last segment may
///   be short
/// - `method`: the choice of scales; a method that needs many samples pools the rows of a segment
/// - `feedback`: one for each K segment of rows with all their elements finite, to compensate
///   rounding errors; none to round one by one
/// - `out`: `rows.count() * K / 2` bytes, row-major without gaps
/// - `scales[segment][row]`: one slice for each K segment, of at least `rows.count()` elements; the
///   others keep their values. 0 for zeros; NaN for a segment with a non-finite element, whose
///   nibbles are 0
///
/// # Panics
/// If a length disagrees, or K or `segment_k` is odd, or `segment_k` is 0.
pub fn quantize_group_i4(
    rows: Rows<'_, f32>,
    segment_k: usize,
    method: Method,
    feedback: &[Feedback],
    out: &mut [u8],
    scales: &mut [&mut [f32]],
) {
    let k = rows.row_len();
    let row_bytes = nibble_bytes(k, segment_k);
    assert_eq!(
        out.len(),
        rows.count() * row_bytes,
        "output of a group of nibbles"
    );
    assert_eq!(
        scales.len(),
        k.div_ceil(segment_k),
        "scales of each segment"
    );
    let mut work = RoundingScratch::default();
    for (segment, scales) in scales.iter_mut().enumerate() {
        let k0 = segment * segment_k;
        let k1 = k.min(k0 + segment_k);
        let part = rows.columns(k0..k1);
        let out = &mut *out;
        calibrate::clip_rows(part, method, |m, clip| {
            let (values, out) = (part.row(m), &mut out[m * row_bytes..][k0 / 2..k1 / 2]);
            scales[m] = clip.scale_i4(values, method);
            match (clip.inverse_i4(), feedback.get(segment)) {
                (Some(_), Some(feedback)) => {
                    scales[m] = feedback.round_i4(values, clip, &mut work);
                    let levels = work.best.as_chunks::<CHUNK>().0;
                    for (levels, out) in levels.iter().zip(out.chunks_mut(CHUNK / 2)) {
                        join_nibbles(levels, out);
                    }
                }
                (Some(inverse), None) => quantize_weights(values, inverse, out),
                (None, _) => out.fill(0),
            }
        });
    }
}

/// Packs one group of weight rows of nibbles into native B: [`pack::pack_group`] on bytes.
///
/// - `src`: at most `gn` rows of nibbles of the K range; `dst`: the group,
///   `gn * ceil(K / gk) * gk / 2` bytes
///
/// # Panics
/// As [`pack::pack_group`].
pub fn pack_group_i4(src: Rows<'_, u8>, layout: NativeB, dst: &mut [u8]) {
    pack::pack_group(src, in_bytes(layout), dst);
}

/// Undoes [`pack_group_i4`] exactly: `rows` rows of `k` elements (even), `k / 2` bytes each.
///
/// # Panics
/// As [`pack::unpack_group`].
pub fn unpack_group_i4(src: &[u8], layout: NativeB, rows: usize, k: usize, dst: &mut [u8]) {
    pack::unpack_group(src, in_bytes(layout), rows, k / 2, dst);
}

/// Converts a layout of nibbles to one of bytes.
const fn in_bytes(layout: NativeB) -> NativeB {
    NativeB {
        gk: layout.gk / 2,
        split_k: layout.split_k / 2,
        ..layout
    }
}
