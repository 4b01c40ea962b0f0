//! Native layouts of A, B and C on Rockchip NPUs, as values. Only their methods compute addresses.
//!
//! `C[M,N] = A[M,K] * B[K,N]`; m, k, n are element indices. Everything is cut into small pieces
//! that the hardware fetches whole (16 bytes of A and C, one tile of B):
//!
//! ```text
//! A  NativeA{s}: K cut into slices of s; a slice holds all M rows          (s = 16 bytes of elements on RK3588)
//!
//!        slice k/s = 0            slice 1
//!      +-----------------+   +-----------------+
//!    m | k=0 .. s-1      |   | k=s .. 2s-1     |        index = ((k/s)*M + m)*s + k%s
//!    | | k=0 .. s-1      |   | ...             |
//!    v +-----------------+   +-----------------+
//!
//! B  NativeB{gn,gk}: tiles of gn columns x gk rows of B; inside, each column's gk values are contiguous;
//!    the tiles of one strip of gn columns follow one another along K
//!
//!      strip n/gn = 0: | tile kt=0 | kt=1 | ... |  strip 1: | kt=0 | ...
//!                        |
//!                        +- n%gn = 0: k=0..gk-1,  n%gn = 1: k=0..gk-1, ...
//!                                     index = (((n/gn)*ceil(K/gk) + k/gk)*gn + n%gn)*gk + k%gk
//!
//! C  NativeC{t}: as A, along N                          index = ((n/t)*M + m)*t + n%t
//! ```
//!
//! Sizes round up to whole pieces; the excess is zero. A 4-bit tensor uses the same element
//! indices, two elements to the byte, the even index in the low nibble (any order works on the
//! hardware if A and B agree).
//!
//! SOURCE: RKNN SDK User Guide 2.3.0 section 3.5 (layout tables and C examples) and
//! rknn_matmul_api.h 2.3.2; agreed by several independent open-source users of the API.

use crate::ffi::MatmulType;

mod normal;

/// A chip family with a matmul API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Soc {
    /// RK3588 and RK3588S: three cores, INT4.
    Rk3588,
    /// RK3576: two cores, mixed types.
    Rk3576,
    /// RK3562: one core.
    Rk3562,
    /// RK3566 and RK3568: one core.
    Rk3566,
}

impl Soc {
    /// All families.
    pub const ALL: [Self; 4] = [Self::Rk3588, Self::Rk3576, Self::Rk3562, Self::Rk3566];

    /// Returns the name that `GGML_RUST_NPU_SIM` uses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rk3588 => "rk3588",
            Self::Rk3576 => "rk3576",
            Self::Rk3562 => "rk3562",
            Self::Rk3566 => "rk3566",
        }
    }

    /// Returns the family of a chip name (`rk3588`, `rk3588s`, `rk3568`…), in upper or lower case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "rk3588" | "rk3588s" => Some(Self::Rk3588),
            "rk3576" => Some(Self::Rk3576),
            "rk3562" => Some(Self::Rk3562),
            "rk3566" | "rk3568" => Some(Self::Rk3566),
            _ => None,
        }
    }

    /// Returns the number of NPU cores.
    ///
    /// SOURCE: vendor kernel driver 0.9.8, `rknpu_drv.c` core masks; RKNN User Guide 2.3.0 section
    /// 3.5.
    #[must_use]
    pub const fn cores(self) -> usize {
        match self {
            Self::Rk3588 => 3,
            Self::Rk3576 => 2,
            Self::Rk3562 | Self::Rk3566 => 1,
        }
    }
}

/// Type of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// Signed, two to the byte.
    I4,
    /// Signed 8-bit.
    I8,
    /// Signed 16-bit.
    I16,
    /// IEEE half.
    F16,
    /// Signed 32-bit.
    I32,
    /// IEEE single.
    F32,
}

impl Elem {
    /// Returns the name of the type.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::I4 => "I4",
            Self::I8 => "I8",
            Self::I16 => "I16",
            Self::F16 => "F16",
            Self::I32 => "I32",
            Self::F32 => "F32",
        }
    }

    /// Returns the number of bits of an element.
    #[must_use]
    pub const fn bits(self) -> usize {
        match self {
            Self::I4 => 4,
            Self::I8 => 8,
            Self::I16 | Self::F16 => 16,
            Self::I32 | Self::F32 => 32,
        }
    }

    /// Returns the bytes of `len` elements; a lone 4-bit element needs a whole byte.
    #[must_use]
    pub const fn bytes(self, len: usize) -> usize {
        (len * self.bits()).div_ceil(8)
    }
}

/// Layout of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeA {
    /// Elements of K in a slice.
    pub s: usize,
    /// Element type.
    pub elem: Elem,
}

impl NativeA {
    /// Returns the element index of (m, k) in a tensor of `rows` rows.
    #[must_use]
    pub const fn index(self, m: usize, k: usize, rows: usize) -> usize {
        ((k / self.s) * rows + m) * self.s + k % self.s
    }

    /// Returns the number of elements, padding included.
    #[must_use]
    pub const fn len(self, rows: usize, k: usize) -> usize {
        k.div_ceil(self.s) * rows * self.s
    }

    /// Returns the number of bytes, padding included.
    #[must_use]
    pub const fn bytes(self, rows: usize, k: usize) -> usize {
        self.elem.bytes(self.len(rows, k))
    }

    /// Returns the dimensions that the library reports, outermost first.
    #[must_use]
    pub const fn dims(self, rows: usize, k: usize) -> [usize; 3] {
        [k.div_ceil(self.s), rows, self.s]
    }
}

/// Layout of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeB {
    /// Columns of a tile.
    pub gn: usize,
    /// Elements of K in a tile.
    pub gk: usize,
    /// Elements of the pieces into which a longer K is cut. Each piece is laid out separately, one
    /// after another.
    pub split_k: usize,
    /// Element type.
    pub elem: Elem,
}

impl NativeB {
    /// Returns the element index of (k, n) in a tensor of `k_len` x `n_len`.
    #[must_use]
    pub const fn index(self, k: usize, n: usize, k_len: usize, n_len: usize) -> usize {
        let piece = k / self.split_k;
        let start = piece * self.split_k;
        let k_in = k - start;
        // All pieces before this one are whole, and each holds every column.
        let base = self.len_whole(start, n_len);
        let tile = (n / self.gn) * self.piece_k(k_len, piece).div_ceil(self.gk) + k_in / self.gk;
        base + (tile * self.gn + n % self.gn) * self.gk + k_in % self.gk
    }

    /// Returns the number of elements, padding included.
    #[must_use]
    pub const fn len(self, k: usize, n: usize) -> usize {
        let whole = k / self.split_k * self.split_k;
        self.len_whole(whole, n) + self.len_whole(k - whole, n)
    }

    /// Returns the number of bytes, padding included.
    #[must_use]
    pub const fn bytes(self, k: usize, n: usize) -> usize {
        self.elem.bytes(self.len(k, n))
    }

    /// Returns the elements of one strip of `gn` columns over a K of at most `split_k`; strip `nt`
    /// starts at `nt` times this.
    #[must_use]
    pub const fn strip_len(self, k: usize) -> usize {
        k.div_ceil(self.gk) * self.gk * self.gn
    }

    /// Returns the number of pieces into which K is cut.
    #[must_use]
    pub const fn pieces(self, k: usize) -> usize {
        k.div_ceil(self.split_k)
    }

    /// Returns the elements of K in piece `piece`.
    #[must_use]
    pub const fn piece_k(self, k: usize, piece: usize) -> usize {
        let rest = k - piece * self.split_k;
        if rest < self.split_k {
            rest
        } else {
            self.split_k
        }
    }

    /// Returns the dimensions that the library reports, outermost first: `[N/gn, K/gk, gn, gk]`.
    #[must_use]
    pub const fn dims(self, k: usize, n: usize) -> [usize; 4] {
        [n.div_ceil(self.gn), k.div_ceil(self.gk), self.gn, self.gk]
    }

    const fn len_whole(self, k: usize, n: usize) -> usize {
        n.div_ceil(self.gn) * self.strip_len(k)
    }
}

/// Layout of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NativeC {
    /// Elements of N in a slice.
    pub t: usize,
    /// Element type.
    pub elem: Elem,
}

impl NativeC {
    /// Returns the element index of (m, n) in a tensor of `rows` rows.
    #[must_use]
    pub const fn index(self, m: usize, n: usize, rows: usize) -> usize {
        ((n / self.t) * rows + m) * self.t + n % self.t
    }

    /// Returns the number of elements, padding included.
    #[must_use]
    pub const fn len(self, rows: usize, n: usize) -> usize {
        n.div_ceil(self.t) * rows * self.t
    }

    /// Returns the number of bytes, padding included.
    #[must_use]
    pub const fn bytes(self, rows: usize, n: usize) -> usize {
        self.elem.bytes(self.len(rows, n))
    }

    /// Returns the dimensions that the library reports, outermost first.
    #[must_use]
    pub const fn dims(self, rows: usize, n: usize) -> [usize; 3] {
        [n.div_ceil(self.t), rows, self.t]
    }
}

/// Layouts and shape rules of one matmul type on one chip.
///
/// ```
/// use rknpu_ops::ffi::MatmulType;
/// use rknpu_ops::layout::{MatmulLayout, Soc};
///
/// // Weights of 64 × 64 in INT8: the second column follows the first one's piece of K in its tile.
/// let weights = MatmulLayout::of(Soc::Rk3588, MatmulType::I8_I8_I32).expect("RK3588 has INT8").b;
/// assert_eq!(weights.index(0, 1, 64, 64), weights.gk);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulLayout {
    /// Activations.
    pub a: NativeA,
    /// Weights.
    pub b: NativeB,
    /// Result.
    pub c: NativeC,
    /// K must be a multiple of this.
    pub k_align: usize,
    /// N must be a multiple of this.
    pub n_align: usize,
    /// Largest K that the library accepts, if it has a limit.
    pub k_max: Option<usize>,
    /// Largest N according to the documentation; the library does not enforce it (see
    /// [`MatmulLayout::of`]).
    pub n_max_documented: Option<usize>,
}

impl MatmulLayout {
    /// Returns the layouts of `matmul_type` on `soc`; `None` when the chip does not have the type.
    ///
    /// If header and guide disagree, alignments are the stricter ones.
    ///
    /// SOURCE: types, RKNN User Guide 2.3.0 table 3-13; alignments, limits and tiles,
    /// rknn_matmul_api.h 2.3.2 comments and User Guide section 3.5. That N above the documented
    /// limit runs on RK3588 with 2.3.2 is reported by one open backend (INT8 N = 87392, F16 N =
    /// 32768). The f16 and int8 C slices of 8 and 16 follow from the 16-byte atom.
    #[must_use]
    pub fn of(soc: Soc, matmul_type: MatmulType) -> Option<Self> {
        let (a, b, c) = elements(soc, matmul_type)?;
        Some(Self {
            a: NativeA {
                s: a_slice_bytes(soc) * 8 / a.bits(),
                elem: a,
            },
            b: tile_of_b(soc, a, b, c),
            c: NativeC {
                t: c_slice(c),
                elem: c,
            },
            k_align: 32,
            n_align: n_align(soc, a),
            k_max: match soc {
                Soc::Rk3562 | Soc::Rk3566 => Some(10240),
                Soc::Rk3588 | Soc::Rk3576 => None,
            },
            n_max_documented: match (soc, a) {
                (Soc::Rk3588 | Soc::Rk3576, Elem::F16) => None,
                (_, Elem::I4) => Some(8192),
                _ => Some(4096),
            },
        })
    }
}

/// Returns the element types of A, B and C of a matmul type, if the chip has it.
///
/// SOURCE: RKNN User Guide 2.3.0 table 3-13; I4 x I4 on RK3588 only is confirmed by users of both
/// chips.
fn elements(soc: Soc, matmul_type: MatmulType) -> Option<(Elem, Elem, Elem)> {
    use Elem::{F16, F32, I4, I8, I16, I32};
    let big = matches!(soc, Soc::Rk3588 | Soc::Rk3576);
    match matmul_type {
        MatmulType::F16_F16_F32 => Some((F16, F16, F32)),
        MatmulType::I8_I8_I32 => Some((I8, I8, I32)),
        MatmulType::F16_F16_F16 if big => Some((F16, F16, F16)),
        MatmulType::I8_I8_I8 if soc == Soc::Rk3588 => Some((I8, I8, I8)),
        MatmulType::I8_I8_F32 if soc == Soc::Rk3588 => Some((I8, I8, F32)),
        MatmulType::I4_I4_I16 if soc == Soc::Rk3588 => Some((I4, I4, I16)),
        MatmulType::F16_I8_F32 if soc == Soc::Rk3576 => Some((F16, I8, F32)),
        MatmulType::F16_I4_F32 if soc == Soc::Rk3576 => Some((F16, I4, F32)),
        MatmulType::F16_I4_F16 if soc == Soc::Rk3576 => Some((F16, I4, F16)),
        MatmulType::I8_I4_I32 if soc == Soc::Rk3576 => Some((I8, I4, I32)),
        _ => None,
    }
}

/// Returns the bytes of a slice of A.
///
/// SOURCE: User Guide 2.3.0 section 3.5, native A shapes: s = 32/16/8 (int4/int8/f16), half of it
/// on RK3566/68.
const fn a_slice_bytes(soc: Soc) -> usize {
    match soc {
        Soc::Rk3588 | Soc::Rk3576 | Soc::Rk3562 => 16,
        Soc::Rk3566 => 8,
    }
}

/// Returns the elements of a slice of C: 16 bytes.
///
/// SOURCE: User Guide 2.3.0 section 3.5: t = 4 for i32 and f32, 8 for i16.
const fn c_slice(c: Elem) -> usize {
    128 / c.bits()
}

/// Returns the tiles of B.
///
/// SOURCE: User Guide 2.3.0 section 3.5: (gn, gk) = (64,32)/(32,32)/(16,32) for int4/int8/f16 on
/// RK3588 and RK3576, (16,32)/(8,32) on RK3562, (16,32)/(8,16) on RK3566/68. With mixed types the
/// tile is that of the plain type with the same C (User Guide, RK3576 example). B is split at K >
/// 8192 on RK3588 and 4096 on RK3576 (header comment).
const fn tile_of_b(soc: Soc, a: Elem, b: Elem, c: Elem) -> NativeB {
    let float = matches!(a, Elem::F16) && matches!(c, Elem::F32 | Elem::F16);
    let (gn, gk) = match soc {
        Soc::Rk3588 | Soc::Rk3576 if float => (16, 32),
        Soc::Rk3588 if matches!(b, Elem::I4) => (64, 32),
        Soc::Rk3588 | Soc::Rk3576 => (32, 32),
        Soc::Rk3562 if float => (8, 32),
        Soc::Rk3566 if float => (8, 16),
        Soc::Rk3562 | Soc::Rk3566 => (16, 32),
    };
    NativeB {
        gn,
        gk,
        split_k: match soc {
            Soc::Rk3588 => 8192,
            Soc::Rk3576 => 4096,
            Soc::Rk3562 | Soc::Rk3566 => usize::MAX,
        },
        elem: b,
    }
}

/// Returns the alignment of N, by the type of A.
///
/// SOURCE: User Guide 2.3.0 table of limits; for f16 the header's 16 (8 on one-core chips) is
/// weaker.
const fn n_align(soc: Soc, a: Elem) -> usize {
    match (soc, a) {
        (Soc::Rk3588 | Soc::Rk3576, Elem::I4) => 64,
        (Soc::Rk3588 | Soc::Rk3576, _) => 32,
        (Soc::Rk3562 | Soc::Rk3566, _) => 16,
    }
}
