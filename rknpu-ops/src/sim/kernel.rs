//! Inner loops of the stand-in's multiplication, compiled for several instruction sets and chosen at run time.
//!
//! A strip is what a few columns of B (`gn` of them) hold, in groups of 32 along K:
//!
//! ```text
//! strip:  group 0: [column 0: 32 elements][column 1: 32] ... [column gn-1]   group 1: ...
//! ```
//!
//! Integer sums are exact, so any order gives the same. A float sum is defined by [`SUM_LANES`] and [`tree`]: a group's 32
//! products are added in FP64 in one fixed order (nearly always exactly), rounded once to FP32, and the groups are added
//! in FP32 in K order. Both loops over floats follow it to the letter, so a row's result does not depend on M, and fused
//! multiply-add changes nothing because a product of two halves is exact in FP64.
//!
//! SOURCE: the group of 32 and the single rounding, measured on RK3588 by an open-source driver project (one source).
use multiversion::multiversion;
use multiversion::target::target_cfg_f;

/// Elements of a group along K.
pub(super) const GROUP: usize = 32;

/// Partial sums of a group: element k of the group goes to sum k % 8.
const SUM_LANES: usize = 8;

/// Partial sums of [`dot_i8`]: one 512-bit register of them.
pub(super) const I8_LANES: usize = 16;

/// Columns that the matrix loops work on at once.
const COLUMNS: usize = 16;

/// Groups that the integer matrix loop sums in FP32: 8 * 32 products of at most 2^14 stay far below 2^24, so the sums
/// are exact, and their 16 columns of B fit the first-level cache.
const I8_BLOCK_GROUPS: usize = 8;

/// Rows that the integer matrix loop works on at once; rows of A are interleaved by as many ([`gemm_i8`]).
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
    "x86_64+avx2+fma"
))]
pub(super) fn panel_rows() -> usize {
    // As many sums as hide the latency of the additions without running out of registers.
    if target_cfg_f!(target_feature = "avx512f") {
        8
    } else {
        4
    }
}

/// Adds a strip's dot products with one or more rows to partial sums.
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
                    let [even, odd] = [2 * lane, 2 * lane + 1];
                    *sum += i32::from(row[0][even]) * i32::from(column[even].cast_signed())
                        + i32::from(row[0][odd]) * i32::from(column[odd].cast_signed());
                }
            }
        }
    }
}

/// Adds a strip's products with all rows to sums.
///
/// - `panels`: rows interleaved by [`panel_rows`]: `[row / panel_rows][k][row % panel_rows]`, as floats, padded with
///   zeros; `strip`: i8, `gn` a multiple of 16
/// - `sums`: `[row][gn]`
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl+avx2+fma",
    "x86_64+avx2+fma"
))]
pub(super) fn gemm_i8(panels: &[f32], k: usize, strip: &[u8], gn: usize, sums: &mut [i32]) {
    const FMA: bool = target_cfg_f!(any(target_feature = "fma", target_arch = "aarch64"));
    if target_cfg_f!(target_feature = "avx512f") {
        gemm_i8_by::<8, FMA>(panels, k, strip, gn, sums);
    } else {
        gemm_i8_by::<4, FMA>(panels, k, strip, gn, sums);
    }
}

/// ```text
/// for each block of K, for each 16 columns:
///     widen the columns to [k][16] floats                  (reused by every row)
///     for each panel of rows: ROWS x 16 sums over the block in registers, then added to the integers
/// ```
#[inline(always)]
fn gemm_i8_by<const ROWS: usize, const FMA: bool>(
    panels: &[f32],
    k: usize,
    strip: &[u8],
    gn: usize,
    sums: &mut [i32],
) {
    let mut wide = [[0f32; COLUMNS]; I8_BLOCK_GROUPS * GROUP];
    for (block, tiles) in strip.chunks(gn * GROUP * I8_BLOCK_GROUPS).enumerate() {
        let k0 = block * I8_BLOCK_GROUPS * GROUP;
        let k_len = tiles.len() / gn;
        for n0 in (0..gn).step_by(COLUMNS) {
            for (tile, wide) in tiles.chunks_exact(gn * GROUP).zip(wide.chunks_exact_mut(GROUP)) {
                let (columns, _) = tile[n0 * GROUP..].as_chunks::<GROUP>();
                for (j, wide) in wide.iter_mut().enumerate() {
                    for (to, column) in wide.iter_mut().zip(columns) {
                        *to = f32::from(column[j].cast_signed());
                    }
                }
            }
            for (panel, sums) in panels.chunks_exact(k * ROWS).zip(sums.chunks_mut(gn * ROWS)) {
                let (rows, _) = panel[k0 * ROWS..].as_chunks::<ROWS>();
                let mut acc = [[0f32; COLUMNS]; ROWS];
                for (a, b) in rows[..k_len].iter().zip(&wide) {
                    for (acc, a) in acc.iter_mut().zip(a) {
                        for (acc, b) in acc.iter_mut().zip(b) {
                            *acc = if FMA { a.mul_add(*b, *acc) } else { a * b + *acc };
                        }
                    }
                }
                for (sums, acc) in sums.chunks_exact_mut(gn).zip(&acc) {
                    for (sum, acc) in sums[n0..n0 + COLUMNS].iter_mut().zip(acc) {
                        #[expect(
                            clippy::cast_possible_truncation,
                            reason = "an integer of magnitude at most 2^22"
                        )]
                        let exact = *acc as i32;
                        *sum += exact;
                    }
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
            let mut wide = [0f64; GROUP];
            for (to, pair) in wide.iter_mut().zip(column.as_chunks::<2>().0) {
                *to = widen(*pair);
            }
            for (m, a) in a.iter().enumerate() {
                let mut part = [0f64; SUM_LANES];
                for i in 0..GROUP / SUM_LANES {
                    for (lane, part) in part.iter_mut().enumerate() {
                        let k = i * SUM_LANES + lane;
                        *part += a[k] * wide[k];
                    }
                }
                sums[m * gn + n] += round(tree(part, |x, y| x + y));
            }
        }
    }
}

/// As [`dot_f16`], faster for many rows: lanes run over columns, and a group is widened once for all rows.
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
                let mut part = [[0f64; LANES]; SUM_LANES];
                for i in 0..GROUP / SUM_LANES {
                    for (lane, part) in part.iter_mut().enumerate() {
                        let k = i * SUM_LANES + lane;
                        for (part, wide) in part.iter_mut().zip(&wide[k]) {
                            *part += a[k] * wide;
                        }
                    }
                }
                let total = tree(part, |mut x, y| {
                    for (x, y) in x.iter_mut().zip(y) {
                        *x += y;
                    }
                    x
                });
                for (sum, total) in sums[n0..n0 + LANES].iter_mut().zip(total) {
                    *sum += round(total);
                }
            }
        }
    }
}

/// Adds the partial sums of a group, in the order that halving a register gives.
#[inline(always)]
fn tree<T: Copy>(part: [T; SUM_LANES], add: impl Fn(T, T) -> T) -> T {
    let half = [0, 1, 2, 3].map(|lane| add(part[lane], part[lane + 4]));
    add(add(half[0], half[2]), add(half[1], half[3]))
}

/// A group's sum in the accumulator's format.
#[inline(always)]
fn round(sum: f64) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "this is the accumulator's one rounding of a group"
    )]
    let rounded = sum as f32;
    rounded
}

/// The value of a half, without branches so that loops over it vectorize.
#[inline(always)]
fn widen(half: [u8; 2]) -> f64 {
    /// What takes a half's exponent bias to that of FP32: 2^(127 - 15).
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(u16::from_le_bytes(half));
    let magnitude = (bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * REBIAS).to_bits();
    // Infinities and NaN: the largest exponent, and the fraction as it is.
    let special = magnitude | 0x7f80_0000;
    let value = if bits & 0x7c00 == 0x7c00 { special } else { finite };
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
            assert!(have == want || (have.is_nan() && want.is_nan()), "{bits:#06x}: {have} {want}");
            assert_eq!(have.is_sign_negative(), want.is_sign_negative(), "{bits:#06x}");
        }
    }
}
