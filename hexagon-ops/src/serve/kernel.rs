//! Decoding of a command on tensors: the kernel's number and its parameters to the operation that
//! computes it.

use super::detail::{Failure, KERNEL_NUMBER, OPERAND};
use crate::ops::Op;
use crate::ops::convolution::{Convolution, ConvolutionForm};
use crate::ops::elementwise::{Binary, Glu, Unary};
use crate::ops::im2col::{Col2im, Im2col, Image};
use crate::ops::interpolate::{Interpolation, Neighbours};
use crate::ops::pad::Pad;
use crate::ops::part::ChangedPart;
use crate::ops::place::Band;
use crate::ops::pool::Pooling;
use crate::ops::recurrence::Recurrence;
use crate::ops::rows::{Norm, Order, Rope, RopePairs, SectionOrder, Sections, SoftMax};
use crate::wire::{self, operations};

/// ggml's parameters of an operation.
#[derive(Clone, Copy)]
struct Params<'a>(&'a [u32; 16]);

impl Params<'_> {
    fn word(self, i: usize) -> u32 {
        self.0[i]
    }

    fn signed(self, i: usize) -> i32 {
        self.0[i].cast_signed()
    }

    fn float(self, i: usize) -> f32 {
        f32::from_bits(self.0[i])
    }

    fn is_set(self, i: usize) -> bool {
        self.0[i] != 0
    }

    fn size(self, i: usize) -> Result<usize, Failure> {
        usize::try_from(self.0[i]).map_err(|_| Failure::bad(OPERAND))
    }
}

/// Declares [`decode`].
macro_rules! declare {
    (
        params $p:ident;
        commands [$($command:ident $command_name:literal),*];
        $($(#[doc = $text:literal])+
        $kernel:ident = $number:literal, $first:literal..$end:literal of [$($op:ident $name:literal),*] => $decoded:expr;)*
    ) => {
        /// Returns the operation that a command names, with its parameters.
        ///
        /// # Errors
        /// `KERNEL_NUMBER` if no kernel has the number; `OPERAND` if a parameter has a value that
        /// the kernel does not know.
        pub(super) fn decode(kernel: u32, params: &[u32; 16]) -> Result<Op, Failure> {
            let $p = Params(params);
            Ok(match kernel {
                $(wire::$kernel => $decoded,)*
                _ => return Err(Failure::bad(KERNEL_NUMBER)),
            })
        }
    };
}

operations!(declare);

/// Decodes the order of ARGSORT.
///
/// SOURCE: ggml.h, `GGML_SORT_ORDER_ASC` 0 and `_DESC` 1.
fn order(order: u32) -> Result<Order, Failure> {
    match order {
        0 => Ok(Order::Ascending),
        1 => Ok(Order::Descending),
        _ => Err(Failure::bad(OPERAND)),
    }
}

/// Decodes the triangle of TRI.
///
/// SOURCE: ggml.h, enum `ggml_tri_type`.
fn triangle(triangle: u32) -> Result<Band, Failure> {
    match triangle {
        0 => Ok(Band::UpperDiagonal),
        1 => Ok(Band::Upper),
        2 => Ok(Band::LowerDiagonal),
        3 => Ok(Band::Lower),
        _ => Err(Failure::bad(OPERAND)),
    }
}

/// Decodes the part of a result, as ggml stores it.
///
/// SOURCE: ggml.c, `ggml_acc_impl` and `ggml_set_impl`.
fn part(p: Params<'_>, is_sum: bool) -> Result<ChangedPart, Failure> {
    Ok(ChangedPart {
        strides: [p.size(0)?, p.size(1)?, p.size(2)?],
        offset: p.size(3)?,
        is_sum,
    })
}

/// Decodes the parameters of a rotation, as ggml stores them.
///
/// SOURCE: ggml.h, `GGML_ROPE_TYPE_NORMAL` 0, `_NEOX` 2, `_MROPE` 8, `_VISION` 24, `_IMROPE` 40;
/// ggml.c, `ggml_rope_impl`.
fn rope(p: Params<'_>, is_inverse: bool) -> Result<Rope, Failure> {
    let (pairs, order) = match p.word(2) {
        0 => (RopePairs::Adjacent, None),
        2 => (RopePairs::Halves, None),
        8 => (RopePairs::Halves, Some(SectionOrder::Blocks)),
        24 => (RopePairs::Halves, Some(SectionOrder::Apart)),
        40 => (RopePairs::Halves, Some(SectionOrder::Turns)),
        _ => return Err(Failure::bad(OPERAND)),
    };
    let sizes = [p.size(11)?, p.size(12)?, p.size(13)?, p.size(14)?];
    Ok(Rope {
        pairs,
        sections: order.map(|order| Sections { sizes, order }),
        is_inverse,
        n_dims: p.size(1)?,
        first: p.size(15)?,
        n_ctx_orig: p.signed(4),
        freq_base: p.float(5),
        freq_scale: p.float(6),
        ext_factor: p.float(7),
        attn_factor: p.float(8),
        beta_fast: p.float(9),
        beta_slow: p.float(10),
    })
}

/// Decodes the parameters of IM2COL, as ggml stores them, and the window that the planner puts
/// after them.
fn im2col(p: Params<'_>) -> Result<Im2col, Failure> {
    Ok(Im2col {
        image: if p.is_set(6) {
            Image::Plane
        } else {
            Image::Line
        },
        stride: [p.word(0), p.word(1), 1],
        pad: [p.signed(2), p.signed(3), 0],
        dilation: [p.word(4), p.word(5), 1],
        window: window(p)?,
    })
}

/// Decodes the parameters of IM2COL_3D, as ggml stores them, and the window that the planner puts
/// after them.
fn im2col_3d(p: Params<'_>) -> Result<Im2col, Failure> {
    Ok(Im2col {
        image: Image::Volume(p.size(9)?),
        stride: [0, 1, 2].map(|i| p.word(i)),
        pad: [3, 4, 5].map(|i| p.signed(i)),
        dilation: [6, 7, 8].map(|i| p.word(i)),
        window: window(p)?,
    })
}

/// Decodes width, height and depth of the window.
fn window(p: Params<'_>) -> Result<[usize; 3], Failure> {
    Ok([p.size(13)?, p.size(14)?, p.size(15)?])
}

/// Decodes the parameters of POOL_1D, as ggml stores them.
fn pool_1d(p: Params<'_>) -> Result<Pooling, Failure> {
    Ok(Pooling {
        is_mean: is_mean(p.word(0))?,
        counts_inside: true,
        size: [p.word(1), 1],
        stride: [p.word(2), 1],
        pad: [p.signed(3), 0],
    })
}

/// Decodes the parameters of POOL_2D, as ggml stores them.
fn pool_2d(p: Params<'_>) -> Result<Pooling, Failure> {
    Ok(Pooling {
        is_mean: is_mean(p.word(0))?,
        counts_inside: false,
        size: [p.word(1), p.word(2)],
        stride: [p.word(3), p.word(4)],
        pad: [p.signed(5), p.signed(6)],
    })
}

/// Decodes the kind of pooling.
///
/// SOURCE: ggml.h, `GGML_OP_POOL_MAX` 0 and `_AVG` 1.
fn is_mean(kind: u32) -> Result<bool, Failure> {
    match kind {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Failure::bad(OPERAND)),
    }
}

/// Decodes the parameters of CONV_2D and CONV_2D_DW, as ggml stores them.
fn convolution(p: Params<'_>, form: ConvolutionForm) -> Convolution {
    Convolution {
        form,
        stride: [p.word(0), p.word(1), 1],
        pad: [p.signed(2), p.signed(3), 0],
        dilation: [p.word(4), p.word(5), 1],
    }
}

/// Decodes the parameters of CONV_3D, as ggml stores them.
fn convolution_3d(p: Params<'_>) -> Result<Convolution, Failure> {
    Ok(Convolution {
        form: ConvolutionForm::Volume(p.size(9)?),
        stride: [0, 1, 2].map(|i| p.word(i)),
        pad: [3, 4, 5].map(|i| p.signed(i)),
        dilation: [6, 7, 8].map(|i| p.word(i)),
    })
}

/// Decodes the parameters of CONV_TRANSPOSE_1D: a stride, a padding of 0 and a dilation of 1.
///
/// SOURCE: ggml.c, `ggml_conv_transpose_1d`, which asserts the two.
fn transposed_1d(p: Params<'_>) -> Result<Convolution, Failure> {
    if (p.word(1), p.word(2)) != (0, 1) {
        return Err(Failure::bad(OPERAND));
    }
    Ok(transposed(
        [p.word(0), 1, 1],
        ConvolutionForm::TransposedLine,
    ))
}

/// Returns a transposed convolution without padding.
fn transposed(stride: [u32; 3], form: ConvolutionForm) -> Convolution {
    Convolution {
        form,
        stride,
        pad: [0; 3],
        dilation: [1; 3],
    }
}

/// Decodes the mode of UPSCALE.
///
/// SOURCE: ggml.h, enum `ggml_scale_mode` and `ggml_scale_flag`: bit 8 aligns corners, bit 9
/// averages the area that an element covers.
fn interpolation(mode: u32) -> Result<Interpolation, Failure> {
    let neighbours = match (mode & 0xff, mode >> 9) {
        (0, 0) => Neighbours::Nearest,
        (1, 0) => Neighbours::Bilinear,
        (1, 1) => Neighbours::Antialiased,
        (2, 0) => Neighbours::Bicubic,
        _ => return Err(Failure::bad(OPERAND)),
    };
    Ok(Interpolation {
        neighbours,
        aligns_corners: mode & 1 << 8 != 0,
    })
}
