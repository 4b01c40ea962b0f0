//! The functions of elements, as vector code.

use crate::hvx::{
    self, Streams, Vector, add_f32, max_f32, min_f32, mul_f32, select_gt_f32, splat_f32, splat_w,
};
use crate::layout::Line;
use crate::ops::math;
use crate::ops::tensor::{ARITHMETIC, FUNCTION};

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
        /// The lower bound.
        low: f32,
        /// The upper bound.
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
    /// `ln(1 + e^x)`.
    Softplus,
    /// `x` times its [`Self::Hardsigmoid`].
    Hardswish,
    /// `(x + 3) / 6` between 0 and 1.
    Hardsigmoid,
    /// `x`, below 0 `e^x - 1`.
    Elu,
    /// 1 above 0, else 0.
    Step,
    /// The sign: -1, 0 or 1.
    Sgn,
    /// [`math::exp_m1`].
    Expm1,
    /// [`math::floor`].
    Floor,
    /// The smallest whole number that is not smaller than x.
    Ceil,
    /// [`math::round`].
    Round,
    /// [`math::trunc`].
    Trunc,
    /// `p x² + β x` for x > 0; otherwise `(e^min(x, ε) - 1 - x) n + β x`.
    Xielu {
        /// n, the factor below 0.
        alpha_n: f32,
        /// p, the factor above 0.
        alpha_p: f32,
        /// β, the factor of the linear part.
        beta: f32,
        /// ε, the largest argument of the exponential.
        eps: f32,
    },
    /// [`math::ln`].
    Log,
    /// Sine.
    Sin,
    /// Cosine.
    Cos,
    /// `x`, below 0 times a factor.
    LeakyRelu(f32),
}

/// A gated unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// [`math::silu`] of a, times b.
    Swiglu,
    /// [`math::gelu`] of a, times b.
    Geglu,
    /// `max(a, 0) · b`.
    Reglu,
    /// [`math::gelu_erf`] of a, times b.
    GegluErf,
    /// [`math::gelu_quick`] of a, times b.
    GegluQuick,
    /// `x / (1 + e^(-alpha x)) · (y + 1)`, x = a up to the limit, y = b between minus the limit and
    /// the limit.
    SwigluOai {
        /// Slope of the sigmoid.
        alpha: f32,
        /// The limit.
        limit: f32,
    },
    /// [`math::silu`] of a up to the limit, times b between minus the limit and the limit.
    SwigluClamp {
        /// The limit.
        limit: f32,
    },
}

/// A function of one or two elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Function {
    /// A function of two elements.
    Binary(Binary),
    /// A function of one element.
    Unary(Unary),
    /// A gated unit.
    Glu(Glu),
}

/// Writes a function of the lanes of each vector of the operands of [`Streams`] to their result.
/// Each function has a loop with inlined code, because only inlined code is compiled for the
/// machine's vectors.
macro_rules! each {
    ($streams:ident; $($x:ident),+ => $f:expr) => {
        while let Some(mut piece) = $streams.piece() {
            let [$($x),+] = piece.load();
            piece.store($f);
        }
    };
}

/// Does the same as `each!`, with a copy of the code for `$n` whole vectors at a time: for
/// functions that are short or common. All of them are loaded before the first is stored, so that
/// loads, arithmetic and stores of different vectors share packets.
macro_rules! each_group {
    ($n:expr; $streams:ident; $($x:ident),+ => $f:expr) => {{
        for mut group in $streams.groups::<{ $n }, false>() {
            let mut lanes = [hvx::splat_w(0); $n];
            for i in 0..$n {
                let [$($x),+] = group.load(i);
                lanes[i] = $f;
            }
            for i in 0..$n {
                group.store(i, lanes[i]);
            }
        }
        each!($streams; $($x),+ => $f);
    }};
}

/// Does the same as `each_group!`, for functions of few instructions: operands that start with a
/// line are loaded and stored as lines, one of each in a packet, and each result is stored in the
/// packet that loads the next one.
macro_rules! each_line {
    ($streams:ident; $($x:ident),+ => $f:expr) => {{
        for mut group in $streams.groups::<4, true>() {
            let [$($x),+] = group.load(0);
            let mut last = $f;
            for i in 1..4 {
                let [$($x),+] = group.load(i);
                group.store(i - 1, last);
                last = $f;
            }
            group.store(3, last);
        }
        each_group!(4; $streams; $($x),+ => $f);
    }};
}

/// Vectors that a long function computes at a time. Its steps depend on each other, and those of
/// other vectors fill the packets. With qfloat, more vectors would need too many registers, and
/// qfloat values must not be stored.
pub(in crate::ops) const BESIDE: usize = if hvx::HAS_IEEE { 4 } else { 3 };
/// Vectors for functions with two polynomials, or with many constants.
const FEW: usize = if hvx::HAS_IEEE { 4 } else { 2 };

/// Returns the whole lines at the start of elements that start with one.
#[inline(always)]
pub(in crate::ops) fn lines(elems: &[f32]) -> Option<&[Line]> {
    bytemuck::try_cast_slice(elems.as_chunks::<32>().0).ok()
}

/// Returns the whole lines at the start of elements that start with one.
#[inline(always)]
pub(in crate::ops) fn lines_mut(elems: &mut [f32]) -> Option<&mut [Line]> {
    bytemuck::try_cast_slice_mut(elems.as_chunks_mut::<32>().0).ok()
}

pub(in crate::ops) use {each, each_group, each_line};

/// Writes the first `count` lanes, or all if there are fewer, to the start of `out`.
#[inline(always)]
pub(in crate::ops) fn put(lanes: Vector, out: &mut [f32], count: usize) {
    match out.first_chunk_mut() {
        Some(out) if count >= 32 => hvx::store_f32(out, lanes),
        _ => {
            let mut elems = [0.0; 32];
            hvx::store_f32(&mut elems, lanes);
            hvx::copy_f32(&mut out[..count], &elems);
        }
    }
}

/// Limits lanes to the range between two bounds.
#[inline(always)]
fn clamp(x: Vector, low: Vector, high: Vector) -> Vector {
    min_f32(max_f32(x, low), high)
}

/// Returns `(x + 3) / 6`, limited to the range from 0 to 1.
#[inline(always)]
fn hard_sigmoid(x: Vector) -> Vector {
    let sixth = mul_f32(add_f32(x, splat_f32(3.0)), splat_f32(1.0 / 6.0));
    clamp(sixth, splat_w(0), splat_f32(1.0))
}

impl Function {
    /// Returns the approximate number of packets for 32 elements.
    pub(super) fn packets(self) -> usize {
        use Unary::{Abs, Clamp, LeakyRelu, Neg, Relu, Scale, Sgn, Sqr, Step};
        match self {
            Self::Binary(Binary::Div) => FUNCTION,
            Self::Binary(_) => ARITHMETIC,
            Self::Unary(
                Scale { .. } | Clamp { .. } | Sqr | Relu | Neg | Abs | Step | Sgn | LeakyRelu(_),
            ) => 2 * ARITHMETIC,
            Self::Unary(_) | Self::Glu(_) => FUNCTION,
        }
    }

    /// Computes `out = f(a, b)`; a source that is `None` is in the result's place. A function of
    /// one element does not use `b`.
    #[inline(always)]
    pub(super) fn map(self, [a, b]: [Option<&[f32]>; 2], out: &mut [f32]) {
        match self {
            Self::Binary(f) => f.map(Streams::new([a, b], out)),
            Self::Unary(f) => f.map(Streams::new([a], out)),
            Self::Glu(f) => f.map(Streams::new([a, b], out)),
        }
    }
}

impl Binary {
    #[inline(always)]
    fn map(self, mut s: Streams<'_, 2>) {
        match self {
            Self::Add => each_line!(s; x, y => add_f32(x, y)),
            Self::Sub => each_line!(s; x, y => hvx::sub_f32(x, y)),
            Self::Mul => each_line!(s; x, y => mul_f32(x, y)),
            Self::Div => each_group!(FEW; s; x, y => math::divide(x, y)),
        }
    }
}

impl Unary {
    #[inline(always)]
    fn map(self, mut s: Streams<'_, 1>) {
        let (zero, one) = (splat_w(0), splat_f32(1.0));
        match self {
            Self::Scale { factor, bias } => {
                let (factor, bias) = (splat_f32(factor), splat_f32(bias));
                each_line!(s; x => add_f32(mul_f32(x, factor), bias));
            }
            Self::Clamp { low, high } => {
                let (low, high) = (splat_f32(low), splat_f32(high));
                each_line!(s; x => clamp(x, low, high));
            }
            Self::Sqr => each_line!(s; x => mul_f32(x, x)),
            Self::Sqrt => each_group!(BESIDE; s; x => math::sqrt(x)),
            Self::Silu => each_group!(BESIDE; s; x => math::silu(x)),
            Self::Gelu => each_group!(BESIDE; s; x => math::gelu(x)),
            Self::GeluQuick => each_group!(BESIDE; s; x => math::gelu_quick(x)),
            Self::GeluErf => each!(s; x => math::gelu_erf(x)),
            Self::Relu => each_line!(s; x => max_f32(x, zero)),
            Self::Sigmoid => each_group!(BESIDE; s; x => math::or_nan(x, math::sigmoid(x))),
            Self::Tanh => each_group!(FEW; s; x => math::or_nan(x, math::tanh(x))),
            Self::Exp => each_group!(BESIDE; s; x => math::or_nan(x, math::exp(x))),
            Self::Neg => each_line!(s; x => math::neg(x)),
            Self::Abs => each_line!(s; x => math::abs(x)),
            Self::Softplus => each!(s; x => {
                let small = math::exp(math::neg(math::abs(x)));
                math::or_nan(x, add_f32(max_f32(x, zero), math::ln_1p(small)))
            }),
            Self::Hardswish => each!(s; x => mul_f32(x, hard_sigmoid(x))),
            Self::Hardsigmoid => each!(s; x => hard_sigmoid(x)),
            Self::Elu => each!(s; x => {
                math::or_nan(x, select_gt_f32(x, zero, x, math::exp_m1(x)))
            }),
            Self::Step => each_line!(s; x => select_gt_f32(x, zero, one, zero)),
            Self::Sgn => {
                let minus = splat_f32(-1.0);
                each!(s; x => {
                    select_gt_f32(x, zero, one, select_gt_f32(zero, x, minus, zero))
                });
            }
            Self::Expm1 => each!(s; x => math::or_nan(x, math::exp_m1(x))),
            Self::Floor => each!(s; x => math::floor(x)),
            Self::Ceil => each!(s; x => math::neg(math::floor(math::neg(x)))),
            Self::Round => each!(s; x => math::round(x)),
            Self::Trunc => each!(s; x => math::trunc(x)),
            Self::Xielu {
                alpha_n,
                alpha_p,
                beta,
                eps,
            } => {
                let [n, p, beta, eps] = [alpha_n, alpha_p, beta, eps].map(splat_f32);
                each!(s; x => {
                    let bent = hvx::sub_f32(math::exp_m1(min_f32(x, eps)), x);
                    let below = mul_f32(bent, n);
                    let above = mul_f32(mul_f32(p, x), x);
                    add_f32(select_gt_f32(x, zero, above, below), mul_f32(beta, x))
                });
            }
            Self::Log => each_group!(FEW; s; x => math::or_nan(x, math::ln(x))),
            Self::Sin => each!(s; x => math::sin_cos(x).0),
            Self::Cos => each!(s; x => math::sin_cos(x).1),
            Self::LeakyRelu(slope) => {
                let slope = splat_f32(slope);
                each!(s; x => {
                    add_f32(max_f32(x, zero), mul_f32(min_f32(x, zero), slope))
                });
            }
        }
    }
}

impl Glu {
    #[inline(always)]
    fn map(self, mut s: Streams<'_, 2>) {
        match self {
            // Four at a time need too many registers with qfloat, whose values must not be stored.
            Self::Swiglu if hvx::HAS_IEEE => {
                each_group!(4; s; x, y => mul_f32(math::silu(x), y));
            }
            Self::Swiglu => each_group!(3; s; x, y => mul_f32(math::silu(x), y)),
            Self::Geglu => each_group!(BESIDE; s; x, y => mul_f32(math::gelu(x), y)),
            Self::Reglu => each_line!(s; x, y => mul_f32(max_f32(x, splat_w(0)), y)),
            Self::GegluErf => each!(s; x, y => mul_f32(math::gelu_erf(x), y)),
            Self::GegluQuick => each!(s; x, y => mul_f32(math::gelu_quick(x), y)),
            Self::SwigluOai { alpha, limit } => {
                let (low, high) = (splat_f32(-limit), splat_f32(limit));
                let alpha = splat_f32(alpha);
                each_group!(BESIDE; s; x, y => {
                    let limited = min_f32(x, high);
                    let gate = mul_f32(limited, math::sigmoid(mul_f32(limited, alpha)));
                    let result = mul_f32(gate, add_f32(clamp(y, low, high), splat_f32(1.0)));
                    math::or_nan(x, math::or_nan(y, result))
                });
            }
            Self::SwigluClamp { limit } => {
                let (low, high) = (splat_f32(-limit), splat_f32(limit));
                each_group!(BESIDE; s; x, y => {
                    let result = mul_f32(math::silu(min_f32(x, high)), clamp(y, low, high));
                    math::or_nan(x, math::or_nan(y, result))
                });
            }
        }
    }
}
