//! Inner loops of the stand-in's multiplication, compiled for several instruction sets and chosen
//! at run time.
//!
//! A strip holds a few columns of B (`gn` of them), in groups of 32 along K:
//!
//! ```text
//! strip:  group 0: [column 0: 32 elements][column 1: 32] ... [column gn-1]   group 1: ...
//! ```
//!
//! Integer sums are exact, so every order gives the same result. A float sum is defined by
//! [`SUM_LANES`] and [`tree`]: a group's 32 products are added in FP64 in one fixed order (nearly
//! always exactly), rounded once to FP32, and the groups are added in FP32 in K order. Both loops
//! over floats follow this definition exactly, so a row's result does not depend on M, and fused
//! multiply-add would change nothing because a product of two halves is exact in FP64.
//!
//! SOURCE: the group of 32 and the single rounding, measured on RK3588 by an open-source driver
//! project (one source).
use multiversion::multiversion;

/// Elements of a group along K.
pub(super) const GROUP: usize = 32;

/// Partial sums of a group: element k of the group goes to sum k % 8.
const SUM_LANES: usize = 8;

/// Partial sums of [`dot_i8`]: one 512-bit register of them.
pub(super) const I8_LANES: usize = 16;

/// Adds a strip's dot products with some rows to partial sums; fastest when the sums of the rows (2
/// KiB each at 32 columns) and the strip stay in the caches.
///
/// - `a`: rows one after another, each as long as the strip; `strip`: i8
/// - `sums`: for each row, `gn` times [`I8_LANES`]
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
    "x86_64+avx2+fma"
))]
pub(super) fn dot_i8(a: &[i16], k: usize, strip: &[u8], gn: usize, sums: &mut [[i32; I8_LANES]]) {
    for (g, tile) in strip.chunks_exact(gn * GROUP).enumerate() {
        for (row, sums) in a.chunks_exact(k).zip(sums.chunks_exact_mut(gn)) {
            let (row, _) = row[g * GROUP..].as_chunks::<GROUP>();
            let (columns, _) = tile.as_chunks::<GROUP>();
            for (column, sums) in columns.iter().zip(sums) {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let [low, high] = [lane, lane + I8_LANES];
                    *sum += i32::from(row[0][low]) * i32::from(column[low].cast_signed())
                        + i32::from(row[0][high]) * i32::from(column[high].cast_signed());
                }
            }
        }
    }
}

/// Adds a strip's dot products with rows of halves to FP32 sums, one group after another.
///
/// - `a`: `[k / 32][row][32]`; `strip`: f16, little endian
/// - `sums`: `[row][gn]`
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
    "x86_64+avx2+fma"
))]
pub(super) fn dot_f16(a: &[[f64; GROUP]], rows: usize, strip: &[u8], gn: usize, sums: &mut [f32]) {
    for (a, tile) in a.chunks_exact(rows).zip(strip.chunks_exact(gn * GROUP * 2)) {
        let (columns, _) = tile.as_chunks::<{ GROUP * 2 }>();
        for (n, column) in columns.iter().enumerate() {
            let mut wide = [[0f64; 1]; GROUP];
            for (to, pair) in wide.iter_mut().zip(column.as_chunks::<2>().0) {
                to[0] = widen(*pair);
            }
            for (m, a) in a.iter().enumerate() {
                let mut part = [0f64; SUM_LANES];
                for (lane, part) in part.iter_mut().enumerate() {
                    *part = lane_sum(a, &wide, lane, 0);
                }
                sums[m * gn + n] += round(tree(part));
            }
        }
    }
}

/// Computes the same as [`dot_f16`], faster for many rows: lanes run over columns, and a group is
/// widened once for all rows.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
    "x86_64+avx2+fma"
))]
pub(super) fn gemm_f16(a: &[[f64; GROUP]], rows: usize, strip: &[u8], gn: usize, sums: &mut [f32]) {
    const LANES: usize = 8;
    for (a, tile) in a.chunks_exact(rows).zip(strip.chunks_exact(gn * GROUP * 2)) {
        let (columns, _) = tile.as_chunks::<{ GROUP * 2 }>();
        for n0 in (0..gn).step_by(LANES) {
            let mut wide = [[0f64; LANES]; GROUP];
            for (n, column) in columns[n0..n0 + LANES].iter().enumerate() {
                for (to, pair) in wide.iter_mut().zip(column.as_chunks::<2>().0) {
                    to[n] = widen(*pair);
                }
            }
            for (a, sums) in a.iter().zip(sums.chunks_exact_mut(gn)) {
                let mut total = [0f64; LANES];
                for (n, total) in total.iter_mut().enumerate() {
                    *total = tree([
                        lane_sum(a, &wide, 0, n),
                        lane_sum(a, &wide, 1, n),
                        lane_sum(a, &wide, 2, n),
                        lane_sum(a, &wide, 3, n),
                        lane_sum(a, &wide, 4, n),
                        lane_sum(a, &wide, 5, n),
                        lane_sum(a, &wide, 6, n),
                        lane_sum(a, &wide, 7, n),
                    ]);
                }
                for (sum, total) in sums[n0..][..LANES].iter_mut().zip(total) {
                    *sum += round(total);
                }
            }
        }
    }
}

/// Returns one partial sum of a group, for one column.
#[inline(always)]
fn lane_sum<const N: usize>(
    a: &[f64; GROUP],
    wide: &[[f64; N]; GROUP],
    lane: usize,
    n: usize,
) -> f64 {
    let [k0, k1, k2, k3] = [lane, lane + 8, lane + 16, lane + 24];
    a[k0] * wide[k0][n] + a[k1] * wide[k1][n] + a[k2] * wide[k2][n] + a[k3] * wide[k3][n]
}

/// Adds the partial sums of a group in the order of sums over halves of a register.
#[inline(always)]
fn tree(p: [f64; SUM_LANES]) -> f64 {
    ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))
}

/// Appends the 4-bit elements of `bytes`, low nibble first, as i8.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
    "x86_64+avx2+fma"
))]
pub(super) fn unpack_i4(bytes: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + 2 * bytes.len(), 0);
    for (to, byte) in out[start..].as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
        let [low, high] = [*byte & 0xf, *byte >> 4];
        // Extends the sign from bit 3 to bit 7.
        *to = [(low ^ 8).wrapping_sub(8), (high ^ 8).wrapping_sub(8)];
    }
}

/// Returns a group's sum in the accumulator's format.
#[inline(always)]
fn round(sum: f64) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "this is the accumulator's one rounding of a group"
    )]
    let rounded = sum as f32;
    rounded
}

/// Returns the value of a half, without branches so that loops over it vectorize.
#[inline(always)]
fn widen(half: [u8; 2]) -> f64 {
    /// Factor from a half's exponent bias to that of FP32: 2^(127 - 15).
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(u16::from_le_bytes(half));
    let magnitude = (bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * REBIAS).to_bits();
    // Infinity and NaN get the largest exponent, and keep their fraction.
    let special = magnitude | 0x7f80_0000;
    let value = if bits & 0x7c00 == 0x7c00 {
        special
    } else {
        finite
    };
    f64::from(f32::from_bits(value | (bits & 0x8000) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widen_agrees_with_half_for_every_bit_pattern() {
        for bits in 0..=u16::MAX {
            let want = half::f16::from_bits(bits).to_f64();
            let have = widen(bits.to_le_bytes());
            assert!(
                have == want || (have.is_nan() && want.is_nan()),
                "{bits:#06x}: {have} {want}"
            );
            assert_eq!(
                have.is_sign_negative(),
                want.is_sign_negative(),
                "{bits:#06x}"
            );
        }
    }
}
