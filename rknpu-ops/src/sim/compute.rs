//! `C = A * B` over native layouts, and the conversions to them.
//!
//! A is widened once for a run, B strip by strip; [`kernel`] multiplies a strip with all rows; the
//! sums of a strip are scaled, saturated and stored in C's layout.
//!
//! Saturation happens once, at the end: it is unknown if the hardware also saturates on the way.
//! The rounding of scaled results (half to even) and of FP16 results (from FP32) are assumptions,
//! too.

use std::sync::LazyLock;

use half::f16;

use super::kernel::{self, GROUP, I8_LANES};
use super::profile::Dims;
use crate::layout::{Elem, MatmulLayout, NativeB};

/// Rows that the integer loop computes at once.
const I8_ROWS: usize = 4;

/// Fewest rows for which the float matrix loop is used.
const F16_MATRIX_ROWS: usize = 12;

/// One multiplication.
pub(super) struct Multiplication<'a> {
    pub(super) shape: Dims,
    pub(super) layout: &'a MatmulLayout,
    /// Native A.
    pub(super) a: &'a [u8],
    /// Native B.
    pub(super) b: &'a [u8],
    /// `true` if C is native, `false` if it is row-major.
    pub(super) native_c: bool,
    /// Scales of A, B and C.
    pub(super) scales: [f32; 3],
}

/// Multiplies; `c` is as long as the layout requires.
pub(super) fn run(job: &Multiplication<'_>, c: &mut [u8]) {
    match job.layout.a.elem {
        Elem::F16 => float(job, c),
        _ => integer(job, c),
    }
}

fn integer(job: &Multiplication<'_>, c: &mut [u8]) {
    let Dims { m: rows, k, .. } = job.shape;
    let gn = job.layout.b.gn;
    let row_major = rows_of_a(job);
    let mut lanes = vec![[0i32; I8_LANES]; rows.min(I8_ROWS) * gn];
    let mut sums = vec![0i32; rows * gn];
    for_each_strip(job, |nt, strip| {
        for (rows, sums) in row_major
            .chunks(k * I8_ROWS)
            .zip(sums.chunks_mut(gn * I8_ROWS))
        {
            lanes.fill([0; I8_LANES]);
            kernel::dot_i8(rows, k, strip, gn, &mut lanes);
            // Not in `kernel`: compiled for registers of 512 bits it takes three times as long,
            // because the compiler moves single lanes to add up several columns at once.
            for (sum, lanes) in sums.iter_mut().zip(&lanes) {
                *sum = lanes.iter().sum();
            }
        }
        match job.layout.c.elem {
            Elem::I16 => store(job, c, nt, &sums, |sum| saturate_i16(sum).to_le_bytes()),
            Elem::I8 => store(job, c, nt, &sums, |sum| {
                let [a, b, c] = job.scales;
                scale_to_i8(sum, a * b / c).to_le_bytes()
            }),
            _ => store(job, c, nt, &sums, i32::to_le_bytes),
        }
    });
}

fn float(job: &Multiplication<'_>, c: &mut [u8]) {
    let Dims { m: rows, k, .. } = job.shape;
    let gn = job.layout.b.gn;
    // Stored as [group of 32][row][32], so that all rows of a group are together, as a strip needs
    // them.
    let mut a = vec![[0f64; GROUP]; rows * (k / GROUP)];
    let s = job.layout.a.s;
    for (slice, bytes) in job.a.chunks_exact(rows * s * 2).enumerate() {
        for (m, bytes) in bytes.chunks_exact(s * 2).enumerate() {
            let group = &mut a[slice * s / GROUP * rows + m];
            let to = &mut group[slice * s % GROUP..][..s];
            for (to, bytes) in to.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *to = f16::from_le_bytes(*bytes).to_f64();
            }
        }
    }
    // B's scale is used only if B is quantized and C is not.
    let scale = if job.layout.b.elem == Elem::F16 {
        1.0
    } else {
        job.scales[1]
    };
    let mut sums = vec![0f32; rows * gn];
    for_each_strip(job, |nt, strip| {
        sums.fill(0.0);
        if rows >= F16_MATRIX_ROWS {
            kernel::gemm_f16(&a, rows, strip, gn, &mut sums);
        } else {
            kernel::dot_f16(&a, rows, strip, gn, &mut sums);
        }
        match job.layout.c.elem {
            Elem::F16 => store(job, c, nt, &sums, |sum| {
                f16::from_f32(sum * scale).to_le_bytes()
            }),
            _ => store(job, c, nt, &sums, |sum| (sum * scale).to_le_bytes()),
        }
    });
}

/// Returns A as rows of i16, from i8 or i4.
fn rows_of_a(job: &Multiplication<'_>) -> Vec<i16> {
    let Dims { m: rows, k, .. } = job.shape;
    let layout = job.layout.a;
    let mut out = vec![0i16; rows * k];
    let piece_bytes = layout.elem.bytes(layout.s);
    for (slice, bytes) in job.a.chunks_exact(rows * piece_bytes).enumerate() {
        for (m, bytes) in bytes.chunks_exact(piece_bytes).enumerate() {
            let to = &mut out[m * k + slice * layout.s..][..layout.s];
            if layout.elem == Elem::I4 {
                for (to, byte) in to.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                    *to = nibbles(*byte).map(i16::from);
                }
            } else {
                for (to, byte) in to.iter_mut().zip(bytes) {
                    *to = i16::from(byte.cast_signed());
                }
            }
        }
    }
    out
}

/// Calls `body` with the number and the bytes of each strip of B: i8 or f16, groups of 32 along K.
fn for_each_strip(job: &Multiplication<'_>, mut body: impl FnMut(usize, &[u8])) {
    let Dims { k, n, .. } = job.shape;
    let b = job.layout.b;
    let wide = if job.layout.a.elem == Elem::F16 {
        Elem::F16
    } else {
        Elem::I8
    };
    let as_is = b.elem == wide && b.gk == GROUP && b.pieces(k) == 1;
    let mut scratch = Vec::new();
    for nt in 0..n.div_ceil(b.gn) {
        if as_is {
            let bytes = wide.bytes(b.strip_len(k));
            body(nt, &job.b[nt * bytes..][..bytes]);
            continue;
        }
        scratch.clear();
        for piece in 0..b.pieces(k) {
            let start = b.elem.bytes(b.index(piece * b.split_k, nt * b.gn, k, n));
            let bytes = b.elem.bytes(b.strip_len(b.piece_k(k, piece)));
            widen_strip(b, wide, &job.b[start..][..bytes], &mut scratch);
        }
        body(nt, &scratch);
    }
}

/// Appends part of a strip with `wide` elements in groups of 32.
fn widen_strip(b: NativeB, wide: Elem, strip: &[u8], out: &mut Vec<u8>) {
    match b.elem {
        Elem::I4 if wide == Elem::I8 => kernel::unpack_i4(strip, out),
        Elem::I4 => {
            let mut bytes = Vec::new();
            kernel::unpack_i4(strip, &mut bytes);
            out.extend(bytes.iter().flat_map(|byte| half_of(*byte)));
        }
        Elem::I8 if wide != Elem::I8 => out.extend(strip.iter().flat_map(|byte| half_of(*byte))),
        elem => {
            // A group is the same column of several neighbouring tiles.
            let run = elem.bytes(b.gk);
            for tiles in strip.chunks_exact(b.gn * elem.bytes(GROUP)) {
                for n in 0..b.gn {
                    for tile in tiles.chunks_exact(b.gn * run) {
                        out.extend_from_slice(&tile[n * run..][..run]);
                    }
                }
            }
        }
    }
}

/// Returns an i8 as the bytes of a half.
fn half_of(byte: u8) -> [u8; 2] {
    static HALVES: LazyLock<[[u8; 2]; 256]> = LazyLock::new(|| {
        std::array::from_fn(|i| {
            let value = i16::try_from(i).map_or(0, |i| if i < 128 { i } else { i - 256 });
            f16::from_f32(f32::from(value)).to_le_bytes()
        })
    });
    HALVES[usize::from(byte)]
}

/// Writes the sums of strip `nt`, `[row][gn]`, to their places in C.
fn store<T: Copy, const BYTES: usize>(
    job: &Multiplication<'_>,
    c: &mut [u8],
    nt: usize,
    sums: &[T],
    convert: impl Fn(T) -> [u8; BYTES],
) {
    let Dims { m: rows, n, .. } = job.shape;
    let gn = job.layout.b.gn;
    let n0 = nt * gn;
    let used = gn.min(n - n0);
    // So many elements of a row are next to each other in C; with one row, all of them are.
    let run = match job.native_c {
        true if rows > 1 => job.layout.c.t,
        _ => gn,
    };
    for (m, sums) in sums.chunks_exact(gn).enumerate() {
        for (i, sums) in sums[..used].chunks(run).enumerate() {
            let at = n0 + i * run;
            let index = if job.native_c {
                job.layout.c.index(m, at, rows)
            } else {
                m * n + at
            };
            let to = &mut c[index * BYTES..][..sums.len() * BYTES];
            for (to, sum) in to.as_chunks_mut::<BYTES>().0.iter_mut().zip(sums) {
                *to = convert(*sum);
            }
        }
    }
}

/// Converts row-major A (4-bit elements packed) to its native layout.
pub(super) fn native_a(layout: &MatmulLayout, shape: Dims, norm: &[u8]) -> Vec<u8> {
    let Dims { m: rows, k, .. } = shape;
    let a = layout.a;
    let mut out = vec![0; a.bytes(rows, k)];
    let piece_bytes = a.elem.bytes(a.s);
    for (m, row) in norm.chunks_exact(a.elem.bytes(k)).enumerate() {
        for (slice, bytes) in row.chunks(piece_bytes).enumerate() {
            let at = a.elem.bytes(a.index(m, slice * a.s, rows));
            out[at..][..bytes.len()].copy_from_slice(bytes);
        }
    }
    out
}

/// Returns the two 4-bit elements of a byte, low nibble first.
fn nibbles(byte: u8) -> [i8; 2] {
    [(byte << 4).cast_signed() >> 4, byte.cast_signed() >> 4]
}

fn saturate_i16(sum: i32) -> i16 {
    let clamped = sum.clamp(i32::from(i16::MIN), i32::from(i16::MAX));
    // CAST: clamped to the range.
    i16::try_from(clamped).unwrap_or(i16::MAX)
}

fn scale_to_i8(sum: i32, scale: f32) -> i8 {
    let scaled = (f64::from(sum) * f64::from(scale)).round_ties_even();
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the cast saturates, which is the type's rule"
    )]
    let saturated = scaled as i8;
    saturated
}
