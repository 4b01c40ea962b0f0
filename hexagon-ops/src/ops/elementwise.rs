//! Operations on each element: FP32 arithmetic, results rounded to the result's type.
//!
//! ```text
//! for each row of the result                 rows: one part of them per thread
//!   for each chunk of 256 elements
//!     read the sources as f32                no copy where they are f32 without gaps
//!     for each 32: one vector function
//!     write
//! ```

use super::math;
use super::tensor::{CHUNK, Chunk, Row, Shape, Source, ViewMut};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector, splat_f32, splat_w};
use crate::rt::Engine;

/// A function of two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a · b`.
    Mul,
    /// `a / b`.
    Div,
}

/// A function of one element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// `x · factor + bias`.
    Scale {
        /// The factor.
        factor: f32,
        /// The bias.
        bias: f32,
    },
    /// `x` between two bounds.
    Clamp {
        /// The lower one.
        low: f32,
        /// The upper one.
        high: f32,
    },
    /// `x²`.
    Sqr,
    /// [`math::sqrt`].
    Sqrt,
    /// [`math::silu`].
    Silu,
    /// [`math::gelu`].
    Gelu,
    /// [`math::gelu_quick`].
    GeluQuick,
    /// [`math::gelu_erf`].
    GeluErf,
    /// `max(x, 0)`.
    Relu,
    /// [`math::sigmoid`].
    Sigmoid,
    /// [`math::tanh`].
    Tanh,
    /// [`math::exp`].
    Exp,
    /// `-x`.
    Neg,
    /// `|x|`.
    Abs,
}

/// The activation of a gated unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glu {
    /// [`math::silu`].
    Swiglu,
    /// [`math::gelu`].
    Geglu,
    /// `max(x, 0)`.
    Reglu,
}

/// A function of two vectors.
trait Lanes: Copy + Sync {
    /// The function.
    fn of(self, a: Vector, b: Vector) -> Vector;
}

/// Writes `f(a, b)` for one row. An element of `a` or `b` is `shift` elements behind the result's.
struct MapRow<'a, F> {
    f: F,
    row: Row<'a>,
    src: [&'a Source<'a>; 2],
    shift: [usize; 2],
}

impl<F: Lanes> hvx::Kernel for MapRow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let (mut a_chunk, mut b_chunk): (Chunk, Chunk) = ([0.0; CHUNK], [0.0; CHUNK]);
        let mut out: Chunk = [0.0; CHUNK];
        let n = self.row.len();
        for start in (0..n).step_by(CHUNK) {
            let len = CHUNK.min(n - start);
            let range = |shift: usize| start + shift..start + shift + len;
            let a = self.src[0].read(&self.row, range(self.shift[0]), &mut a_chunk);
            let b = self.src[1].read(&self.row, range(self.shift[1]), &mut b_chunk);
            map(self.f, a, b, &mut out);
            self.row.write(start, &out[..len]);
        }
    }
}

/// `out = f(a, b)`; an absent `b` is zero.
#[inline(always)]
fn map<F: Lanes>(f: F, a: &[f32], b: &[f32], out: &mut Chunk) {
    for (i, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        if 32 * i >= a.len() {
            break;
        }
        hvx::store_f32(out, f.of(load(a, 32 * i), load(b, 32 * i)));
    }
}

/// 32 elements from `k` on; zeros past the end.
#[inline(always)]
pub(super) fn load(elems: &[f32], k: usize) -> Vector {
    match elems.get(k..).and_then(<[f32]>::first_chunk::<32>) {
        Some(whole) => hvx::load_f32(whole),
        None => {
            let mut padded = [0.0; 32];
            let rest = elems.get(k..).unwrap_or_default();
            padded[..rest.len()].copy_from_slice(rest);
            hvx::load_f32(&padded)
        }
    }
}

/// Runs `f` on every row.
fn map_rows<F: Lanes>(
    engine: &Engine,
    f: F,
    dst: ViewMut<'_>,
    src: [&Source<'_>; 2],
    shift: [usize; 2],
) {
    dst.for_rows(engine, |row| {
        hvx::widest(MapRow { f, row, src, shift });
    });
}

/// A lanes function by name.
macro_rules! lanes {
    ($($name:ident($a:ident, $b:ident) = $f:expr;)+) => {$(
        #[derive(Clone, Copy)]
        struct $name;
        impl Lanes for $name {
            #[inline(always)]
            fn of(self, $a: Vector, $b: Vector) -> Vector {
                $f
            }
        }
    )+};
}

lanes! {
    Add(a, b) = hvx::add_f32(a, b);
    Sub(a, b) = hvx::sub_f32(a, b);
    Mul(a, b) = hvx::mul_f32(a, b);
    Div(a, b) = math::divide(a, b);
    Sqr(a, _b) = hvx::mul_f32(a, a);
    Sqrt(a, _b) = math::sqrt(a);
    Silu(a, _b) = math::silu(a);
    Gelu(a, _b) = math::gelu(a);
    GeluQuick(a, _b) = math::gelu_quick(a);
    GeluErf(a, _b) = math::gelu_erf(a);
    Relu(a, _b) = hvx::max_f32(a, splat_w(0));
    Sigmoid(a, _b) = math::sigmoid(a);
    Tanh(a, _b) = math::tanh(a);
    Exp(a, _b) = math::exp(a);
    Neg(a, _b) = math::neg(a);
    Abs(a, _b) = math::abs(a);
    Swiglu(a, b) = hvx::mul_f32(math::silu(a), b);
    Geglu(a, b) = hvx::mul_f32(math::gelu(a), b);
    Reglu(a, b) = hvx::mul_f32(hvx::max_f32(a, splat_w(0)), b);
}

/// `x · factor + bias`.
#[derive(Clone, Copy)]
struct Scale(f32, f32);

impl Lanes for Scale {
    #[inline(always)]
    fn of(self, a: Vector, _b: Vector) -> Vector {
        hvx::add_f32(hvx::mul_f32(a, splat_f32(self.0)), splat_f32(self.1))
    }
}

/// `x` between two bounds.
#[derive(Clone, Copy)]
struct Clamp(f32, f32);

impl Lanes for Clamp {
    #[inline(always)]
    fn of(self, a: Vector, _b: Vector) -> Vector {
        hvx::min_f32(hvx::max_f32(a, splat_f32(self.0)), splat_f32(self.1))
    }
}

/// Refuses a source whose elements are not those of the result, or that has another shape.
pub(super) fn same_shape(dst: &Shape, src: &Source<'_>) -> Result<()> {
    match src {
        Source::Apart(view) if view.shape.ne != dst.ne || !view.shape.dtype.is_float() => {
            Err(Error::Operand)
        }
        Source::None => Err(Error::Operand),
        _ if !dst.dtype.is_float() => Err(Error::Operand),
        _ => Ok(()),
    }
}

/// `dst = f(src0, src1)`; src1 is repeated.
///
/// # Errors
/// `Operand` unless all are floats, src0 has the result's shape, and src1's dimensions divide it.
pub fn binary(engine: &Engine, f: Binary, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    same_shape(&dst.shape, src[0])?;
    match src[1] {
        Source::None => return Err(Error::Operand),
        Source::InPlace => {}
        Source::Apart(view) => {
            let fits = |(n, m): (&usize, usize)| n.is_multiple_of(m);
            let repeats = dst.shape.ne.iter().zip(view.shape.ne).all(fits);
            if !repeats || !view.shape.dtype.is_float() {
                return Err(Error::Operand);
            }
        }
    }
    match f {
        Binary::Add => map_rows(engine, Add, dst, src, [0, 0]),
        Binary::Sub => map_rows(engine, Sub, dst, src, [0, 0]),
        Binary::Mul => map_rows(engine, Mul, dst, src, [0, 0]),
        Binary::Div => map_rows(engine, Div, dst, src, [0, 0]),
    }
    Ok(())
}

/// `dst = f(src)`.
///
/// # Errors
/// `Operand` unless both are floats of one shape.
pub fn unary(engine: &Engine, f: Unary, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    same_shape(&dst.shape, src)?;
    let src = [src, &Source::None];
    let none = [0, 0];
    match f {
        Unary::Scale { factor, bias } => map_rows(engine, Scale(factor, bias), dst, src, none),
        Unary::Clamp { low, high } => map_rows(engine, Clamp(low, high), dst, src, none),
        Unary::Sqr => map_rows(engine, Sqr, dst, src, none),
        Unary::Sqrt => map_rows(engine, Sqrt, dst, src, none),
        Unary::Silu => map_rows(engine, Silu, dst, src, none),
        Unary::Gelu => map_rows(engine, Gelu, dst, src, none),
        Unary::GeluQuick => map_rows(engine, GeluQuick, dst, src, none),
        Unary::GeluErf => map_rows(engine, GeluErf, dst, src, none),
        Unary::Relu => map_rows(engine, Relu, dst, src, none),
        Unary::Sigmoid => map_rows(engine, Sigmoid, dst, src, none),
        Unary::Tanh => map_rows(engine, Tanh, dst, src, none),
        Unary::Exp => map_rows(engine, Exp, dst, src, none),
        Unary::Neg => map_rows(engine, Neg, dst, src, none),
        Unary::Abs => map_rows(engine, Abs, dst, src, none),
    }
    Ok(())
}

/// `dst = f(a) · b`: a and b are the two sources, or the first and second half of each row of one; `swapped` exchanges the
/// halves.
///
/// # Errors
/// `Operand` unless all are floats, and the sources have the result's shape, or the one source rows of twice the length.
pub fn glu(
    engine: &Engine,
    f: Glu,
    swapped: bool,
    dst: ViewMut<'_>,
    src: [&Source<'_>; 2],
) -> Result<()> {
    let (src, shift) = match src[1] {
        Source::None => {
            let view = src[0].apart()?;
            let n = dst.shape.ne[0];
            let mut want = dst.shape.ne;
            want[0] = 2 * n;
            let floats = view.shape.dtype.is_float() && dst.shape.dtype.is_float();
            if view.shape.ne != want || !floats {
                return Err(Error::Operand);
            }
            let shift = if swapped { [n, 0] } else { [0, n] };
            ([src[0], src[0]], shift)
        }
        _ => {
            same_shape(&dst.shape, src[0])?;
            same_shape(&dst.shape, src[1])?;
            (src, [0, 0])
        }
    };
    match f {
        Glu::Swiglu => map_rows(engine, Swiglu, dst, src, shift),
        Glu::Geglu => map_rows(engine, Geglu, dst, src, shift),
        Glu::Reglu => map_rows(engine, Reglu, dst, src, shift),
    }
    Ok(())
}
