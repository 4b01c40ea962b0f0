//! ggml's blocks, BF16 and F32 to `f32`, for weights that are packed without ggml: with the same
//! bits as ggml's `to_float`.
//!
//! Products of a block's scales and levels are exact in FP32 in nearly all types, so that it does
//! not matter whether a compiler fuses their additions; where they are not (Q6_K), nothing is
//! added.
//!
//! Types whose levels come from large tables (IQ1 to IQ3) have no dequantizer here: their weights
//! are packed when they are loaded.
// SOURCE: block structures and dequantize_row_* of ggml 0.25.3 (ggml-common.h, ggml-quants.c).

use half::{bf16, f16};

use crate::gguf::GgmlType;
use crate::tensor::Dequantize;

mod k;

/// Blocks of one type.
struct Blocks<const BYTES: usize, const ELEMS: usize>(fn(&[u8; BYTES], &mut [f32; ELEMS]));

impl<const BYTES: usize, const ELEMS: usize> Dequantize for Blocks<BYTES, ELEMS> {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        let blocks = blocks.as_chunks::<BYTES>().0;
        for (block, out) in blocks.iter().zip(out.as_chunks_mut::<ELEMS>().0) {
            (self.0)(block, out);
        }
    }
}

/// The dequantizer of a type, by ggml's number and name.
type Known = (&'static str, &'static dyn Dequantize);

/// All types that have a dequantizer.
static KNOWN: [Known; 15] = [
    (
        "F32",
        &Blocks::<4, 1>(|bytes, out| out[0] = f32::from_le_bytes(*bytes)),
    ),
    (
        "BF16",
        &Blocks::<2, 1>(|bytes, out| out[0] = bf16::from_le_bytes(*bytes).to_f32()),
    ),
    ("Q4_0", &Blocks::<18, 32>(q4_0)),
    ("Q4_1", &Blocks::<20, 32>(q4_1)),
    ("Q5_0", &Blocks::<22, 32>(q5_0)),
    ("Q5_1", &Blocks::<24, 32>(q5_1)),
    ("Q8_0", &Blocks::<34, 32>(q8_0)),
    ("IQ4_NL", &Blocks::<18, 32>(iq4_nl)),
    ("MXFP4", &Blocks::<17, 32>(mxfp4)),
    ("Q2_K", &Blocks::<84, 256>(k::q2)),
    ("Q3_K", &Blocks::<110, 256>(k::q3)),
    ("Q4_K", &Blocks::<144, 256>(k::q4)),
    ("Q5_K", &Blocks::<176, 256>(k::q5)),
    ("Q6_K", &Blocks::<210, 256>(k::q6)),
    ("IQ4_XS", &Blocks::<136, 256>(k::iq4_xs)),
];

/// Returns the dequantizer of a type; `None` for F16, integers, and types with large tables.
#[must_use]
pub fn of(dtype: GgmlType) -> Option<&'static dyn Dequantize> {
    let found = KNOWN.iter().find(|(name, _)| *name == dtype.name());
    found.map(|(_, dequantize)| *dequantize)
}

/// Levels of IQ4_NL and IQ4_XS.
// SOURCE: kvalues_iq4nl, ggml-common.h.
const IQ4_LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Levels of MXFP4, doubled.
// SOURCE: kvalues_mxfp4, ggml-common.h.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Returns the half-precision number at `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Returns the values of 16 bytes of nibbles: the low ones are the first half.
fn nibbles(quants: &[u8], out: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    let (low, high) = out.split_at_mut(quants.len());
    for (j, byte) in quants.iter().enumerate() {
        low[j] = value(j, byte & 15);
        high[j] = value(j + quants.len(), byte >> 4);
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    nibbles(&block[2..], out, |_, q| (f32::from(q) - 8.0) * d);
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, min) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[4..], out, |_, q| f32::from(q) * d + min);
}

/// Returns the bit `j` of four bytes, as the fifth bit of a level.
fn fifth(bits: &[u8], j: usize) -> u8 {
    (bits[j / 8] >> (j % 8) & 1) << 4
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let bits = &block[2..6];
    let value = |j, q| (f32::from(q | fifth(bits, j)) - 16.0) * d;
    nibbles(&block[6..], out, value);
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, min) = (half_at(block, 0), half_at(block, 2));
    let bits = &block[4..8];
    let value = |j, q| f32::from(q | fifth(bits, j)) * d + min;
    nibbles(&block[8..], out, value);
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (out, q) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(q.cast_signed()) * d;
    }
}

fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let value = |_, q| d * f32::from(IQ4_LEVELS[usize::from(q)]);
    nibbles(&block[2..], out, value);
}

fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    // Half of 2^(e - 127), since the levels are doubled; the two smallest are subnormal.
    let bits = match block[0] {
        e @ 0..=1 => 0x0020_0000 << e,
        e => u32::from(e - 1) << 23,
    };
    let d = f32::from_bits(bits);
    let value = |_, q| f32::from(E2M1_DOUBLED[usize::from(q)]) * d;
    nibbles(&block[1..], out, value);
}
