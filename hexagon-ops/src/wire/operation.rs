//! The table of operations on tensors: the one place that lists them.
//!
//! A row gives the number of a kernel on the wire, ggml's operations that it computes, which of
//! their sources it reads, and how its parameters are decoded. Everything that exists once per
//! operation expands from the rows:
//!
//! | expansion | where |
//! |---|---|
//! | `KERNEL_*` and their documentation, [`OPERATIONS`] | here |
//! | [`GgmlOp`]: names as ggml gives them, and the mapping from ggml's operations to kernels | here |
//! | decoding of a command to [`crate::ops::Op`] | `serve/kernel.rs` |
//! | commands that fuzzing and property tests damage | `tests/serve/seed.rs`, from [`OPERATIONS`] |
//!
//! To add a function of one element, add a row here, and a variant with its vector code in
//! `ops/elementwise/function.rs`; test it with a line in `tests/serve/elementwise.rs`.

use core::ops::Range;

#[cfg(doc)]
use super::TensorOp;

/// Passes the table to the macro `$expand`.
///
/// A row has, in this order: the kernel's computation; its number; the range of sources that it
/// reads of these operations of ggml (a result that is a view of a source carries it as a further
/// source); the operation of [`crate::ops`], where `$p` holds the parameters. Numbers are part of
/// the protocol with the DSP: a new row gets the next number, wherever it is placed.
macro_rules! operations {
    ($expand:ident) => {
        $expand! {
            params p;
            // Operations that have a command of their type instead of a kernel number.
            commands [MulMatId "MUL_MAT_ID", FlashAttnExt "FLASH_ATTN_EXT"];

            // Functions of two elements.

            /// `src0 + src1`, src1 repeated
            KERNEL_ADD = 1, 0..2 of [Add "ADD", Add1 "ADD1"] => Op::Binary(Binary::Add);
            /// `src0 - src1`, src1 repeated
            KERNEL_SUB = 2, 0..2 of [Sub "SUB"] => Op::Binary(Binary::Sub);
            /// `src0 · src1`, src1 repeated
            KERNEL_MUL = 3, 0..2 of [Mul "MUL"] => Op::Binary(Binary::Mul);
            /// `src0 / src1`, src1 repeated
            KERNEL_DIV = 4, 0..2 of [Div "DIV"] => Op::Binary(Binary::Div);
            /// `src0 + ` the rows of src1 that src2 names
            KERNEL_ADD_ID = 58, 0..3 of [AddId "ADD_ID"] => Op::AddId;

            // Functions of one element.

            /// `src0 · f0 + f1`
            KERNEL_SCALE = 5, 0..1 of [Scale "SCALE"]
                => Op::Unary(Unary::Scale { factor: p.float(0), bias: p.float(1) });
            /// src0, limited to the range from f0 to f1
            KERNEL_CLAMP = 6, 0..1 of [Clamp "CLAMP"]
                => Op::Unary(Unary::Clamp { low: p.float(0), high: p.float(1) });
            /// square
            KERNEL_SQR = 7, 0..1 of [Sqr "SQR"] => Op::Unary(Unary::Sqr);
            /// square root
            KERNEL_SQRT = 8, 0..1 of [Sqrt "SQRT"] => Op::Unary(Unary::Sqrt);
            /// `x / (1 + exp(-x))`
            KERNEL_SILU = 9, 0..1 of [Silu "SILU"] => Op::Unary(Unary::Silu);
            /// GELU by tanh
            KERNEL_GELU = 10, 0..1 of [Gelu "GELU"] => Op::Unary(Unary::Gelu);
            /// `x / (1 + exp(-1.702 x))`
            KERNEL_GELU_QUICK = 11, 0..1 of [GeluQuick "GELU_QUICK"] => Op::Unary(Unary::GeluQuick);
            /// GELU by erf
            KERNEL_GELU_ERF = 12, 0..1 of [GeluErf "GELU_ERF"] => Op::Unary(Unary::GeluErf);
            /// `max(x, 0)`
            KERNEL_RELU = 13, 0..1 of [Relu "RELU"] => Op::Unary(Unary::Relu);
            /// `1 / (1 + exp(-x))`
            KERNEL_SIGMOID = 14, 0..1 of [Sigmoid "SIGMOID"] => Op::Unary(Unary::Sigmoid);
            /// hyperbolic tangent
            KERNEL_TANH = 15, 0..1 of [Tanh "TANH"] => Op::Unary(Unary::Tanh);
            /// `exp(x)`
            KERNEL_EXP = 16, 0..1 of [Exp "EXP"] => Op::Unary(Unary::Exp);
            /// `-x`
            KERNEL_NEG = 17, 0..1 of [Neg "NEG"] => Op::Unary(Unary::Neg);
            /// absolute value
            KERNEL_ABS = 18, 0..1 of [Abs "ABS"] => Op::Unary(Unary::Abs);
            /// `ln(1 + exp(x))`
            KERNEL_SOFTPLUS = 34, 0..1 of [Softplus "SOFTPLUS"] => Op::Unary(Unary::Softplus);
            /// `x · hardsigmoid(x)`
            KERNEL_HARDSWISH = 35, 0..1 of [Hardswish "HARDSWISH"] => Op::Unary(Unary::Hardswish);
            /// `(x + 3) / 6`, limited to the range from 0 to 1
            KERNEL_HARDSIGMOID = 36, 0..1 of [Hardsigmoid "HARDSIGMOID"] => Op::Unary(Unary::Hardsigmoid);
            /// `x`, below 0 `exp(x) - 1`
            KERNEL_ELU = 37, 0..1 of [Elu "ELU"] => Op::Unary(Unary::Elu);
            /// 1 above 0, else 0
            KERNEL_STEP = 38, 0..1 of [Step "STEP"] => Op::Unary(Unary::Step);
            /// sign: -1, 0 or 1
            KERNEL_SGN = 39, 0..1 of [Sgn "SGN"] => Op::Unary(Unary::Sgn);
            /// `exp(x) - 1`
            KERNEL_EXPM1 = 40, 0..1 of [Expm1 "EXPM1"] => Op::Unary(Unary::Expm1);
            /// largest whole number that is not larger than x
            KERNEL_FLOOR = 41, 0..1 of [Floor "FLOOR"] => Op::Unary(Unary::Floor);
            /// smallest whole number that is not smaller than x
            KERNEL_CEIL = 42, 0..1 of [Ceil "CEIL"] => Op::Unary(Unary::Ceil);
            /// nearest whole number, halves away from zero
            KERNEL_ROUND = 43, 0..1 of [Round "ROUND"] => Op::Unary(Unary::Round);
            /// nearest whole number towards zero
            KERNEL_TRUNC = 44, 0..1 of [Trunc "TRUNC"] => Op::Unary(Unary::Trunc);
            /// xIELU; f1 to f4 are alpha_n, alpha_p, beta, eps
            KERNEL_XIELU = 45, 0..1 of [Xielu "XIELU"]
                => Op::Unary(Unary::Xielu { alpha_n: p.float(1), alpha_p: p.float(2), beta: p.float(3), eps: p.float(4) });
            /// natural logarithm
            KERNEL_LOG = 46, 0..1 of [Log "LOG"] => Op::Unary(Unary::Log);
            /// sine
            KERNEL_SIN = 47, 0..1 of [Sin "SIN"] => Op::Unary(Unary::Sin);
            /// cosine
            KERNEL_COS = 48, 0..1 of [Cos "COS"] => Op::Unary(Unary::Cos);
            /// `x`, below 0 `x · f0`
            KERNEL_LEAKY_RELU = 49, 0..1 of [LeakyRelu "LEAKY_RELU"] => Op::Unary(Unary::LeakyRelu(p.float(0)));

            // Gated units of a and b. These are src0 and src1, or the two halves of src0's rows; if
            // i1 is not 0, a and b are exchanged.

            /// `silu(a) · b`
            KERNEL_SWIGLU = 19, 0..2 of [Swiglu "SWIGLU"] => Op::Glu(Glu::Swiglu, p.is_set(1));
            /// `gelu(a) · b`
            KERNEL_GEGLU = 20, 0..2 of [Geglu "GEGLU"] => Op::Glu(Glu::Geglu, p.is_set(1));
            /// `relu(a) · b`
            KERNEL_REGLU = 21, 0..2 of [Reglu "REGLU"] => Op::Glu(Glu::Reglu, p.is_set(1));
            /// `gelu_erf(a) · b`
            KERNEL_GEGLU_ERF = 50, 0..2 of [GegluErf "GEGLU_ERF"] => Op::Glu(Glu::GegluErf, p.is_set(1));
            /// `gelu_quick(a) · b`
            KERNEL_GEGLU_QUICK = 51, 0..2 of [GegluQuick "GEGLU_QUICK"] => Op::Glu(Glu::GegluQuick, p.is_set(1));
            /// `x / (1 + exp(-f2 x)) · (y + 1)` with x = a up to the limit f3, y = b from -f3 to f3
            KERNEL_SWIGLU_OAI = 52, 0..2 of [SwigluOai "SWIGLU_OAI"]
                => Op::Glu(Glu::SwigluOai { alpha: p.float(2), limit: p.float(3) }, p.is_set(1));
            /// `silu(x) · y` with x = a up to the limit f3, y = b from -f3 to f3
            KERNEL_SWIGLU_CLAMP = 53, 0..2 of [SwigluClamp "SWIGLU_CLAMP"]
                => Op::Glu(Glu::SwigluClamp { limit: p.float(3) }, p.is_set(1));

            // Operations on rows.

            /// rows divided by the root of their mean square plus f0; then times src1 and plus
            /// src2, repeated, if given
            KERNEL_RMS_NORM = 22, 0..1 of [RmsNorm "RMS_NORM"] => Op::Norm(Norm::Rms(p.float(0)));
            /// rows less their mean, divided by the root of their variance plus f0; then as for
            /// RMS_NORM
            KERNEL_NORM = 23, 0..1 of [Norm "NORM", GroupNorm "GROUP_NORM"] => Op::Norm(Norm::Mean(p.float(0)));
            /// rows divided by the larger of their length and f0; then as for RMS_NORM
            KERNEL_L2_NORM = 24, 0..1 of [L2Norm "L2_NORM"] => Op::Norm(Norm::L2(p.float(0)));
            /// sums of rows
            KERNEL_SUM_ROWS = 25, 0..1 of [SumRows "SUM_ROWS"] => Op::SumRows(false);
            /// means of rows
            KERNEL_MEAN = 54, 0..1 of [Mean "MEAN"] => Op::SumRows(true);
            /// sum of all elements
            KERNEL_SUM = 55, 0..1 of [Sum "SUM"] => Op::Sum;
            /// running sums along rows
            KERNEL_CUMSUM = 56, 0..1 of [Cumsum "CUMSUM"] => Op::CumSum;
            /// softmax of rows times f0, plus the mask src1, with the sinks src2; f1 is the largest
            /// ALiBi bias
            KERNEL_SOFT_MAX = 26, 0..3 of [SoftMax "SOFT_MAX"]
                => Op::SoftMax(SoftMax { scale: p.float(0), max_bias: p.float(1) });
            /// rotated pairs; src1 holds positions, src2 frequency factors; parameters as in ggml
            KERNEL_ROPE = 27, 0..3 of [Rope "ROPE"] => Op::Rope(rope(p, false)?);
            /// ROPE with the opposite angles
            KERNEL_ROPE_BACK = 33, 0..3 of [RopeBack "ROPE_BACK"] => Op::Rope(rope(p, true)?);
            /// ROPE without factors; the rows of all heads go to the indices of dimension 2 that
            /// src2 names, others stay
            KERNEL_ROPE_SET_ROWS = 71, 0..3 of [] => Op::RopeSetRows(rope(p, false)?);
            /// numbers of src0's elements in ascending (i0 = 0) or descending (1) order, as many as
            /// the result has
            KERNEL_ARGSORT = 59, 0..1 of [Argsort "ARGSORT", TopK "TOP_K"] => Op::Sort(order(p.word(0))?);
            /// cosines and sines of src0's times, at frequencies from 1 down to 1 / i1
            KERNEL_TIMESTEP_EMBEDDING = 92, 0..1 of [TimestepEmbedding "TIMESTEP_EMBEDDING"] => Op::Timestep(p.signed(1));
            /// number of elements of src0 and src1 that are equal
            KERNEL_COUNT_EQUAL = 93, 0..2 of [CountEqual "COUNT_EQUAL"] => Op::CountEqual;
            /// number of the last one of the largest elements of each row
            KERNEL_ARGMAX = 86, 0..1 of [Argmax "ARGMAX"] => Op::ArgMax;
            /// solution X of `src0 · X = src1`, reading only src0's lower triangle
            KERNEL_SOLVE_TRI = 87, 0..2 of [SolveTri "SOLVE_TRI"] => Op::Solve;
            /// windows of src0's rows times src1's rows
            KERNEL_SSM_CONV = 57, 0..2 of [SsmConv "SSM_CONV"] => Op::SsmConv;
            /// rows of src0, which are not packed, times rows of src1, planes of src0 repeated
            KERNEL_MUL_MAT_UNPACKED = 60, 0..2 of [MulMat "MUL_MAT"] => Op::UnpackedMatMul;
            /// sum over rows of the products of each element of src1's and each element of src0's,
            /// planes of src0 repeated
            KERNEL_OUT_PROD = 91, 0..2 of [OutProd "OUT_PROD"] => Op::OutProd;

            // Operations that move elements.

            /// rows of src0 that src1 names
            KERNEL_GET_ROWS = 28, 0..2 of [GetRows "GET_ROWS"] => Op::GetRows;
            /// rows of src0, to the rows of the result that src1 names; the other rows stay
            KERNEL_SET_ROWS = 29, 0..2 of [SetRows "SET_ROWS"] => Op::SetRows;
            /// src0 in the result's type, strides and shape, element by element
            KERNEL_COPY = 30, 0..1 of [Cpy "CPY", Cont "CONT", Dup "DUP"] => Op::Copy;
            /// src0, then src1, along dimension i0
            KERNEL_CONCAT = 31, 0..2 of [Concat "CONCAT"] => Op::Concat(p.size(0)?);
            /// src0, repeated in all dimensions
            KERNEL_REPEAT = 32, 0..1 of [Repeat "REPEAT"] => Op::Repeat;
            /// src0 after i0, i2, i4 and i6 zeros in dimensions 0 to 3; repeated instead of zeros
            /// if i8 is not 0
            KERNEL_PAD = 61, 0..1 of [Pad "PAD"]
                => Op::Pad(Pad { front: [0, 2, 4, 6].map(|i| p.signed(i)), is_circular: p.is_set(8) });
            /// src0, rotated by i0 to i3 elements in dimensions 0 to 3
            KERNEL_ROLL = 62, 0..1 of [Roll "ROLL"]
                => Op::Pad(Pad { front: [0, 1, 2, 3].map(|i| p.signed(i)), is_circular: true });
            /// src0; minus infinity after column i0 + row
            KERNEL_DIAG_MASK_INF = 63, 0..1 of [DiagMaskInf "DIAG_MASK_INF"] => Op::Band(Band::Past(p.size(0)?));
            /// a triangle of src0, zeros outside; i0 as ggml's `ggml_tri_type`
            KERNEL_TRI = 64, 0..1 of [Tri "TRI"] => Op::Band(triangle(p.word(0))?);
            /// src0's rows, with i0 of their elements reflected before them, and others after them
            KERNEL_PAD_REFLECT_1D = 88, 0..1 of [PadReflect1d "PAD_REFLECT_1D"] => Op::Reflect(p.size(0)?);
            /// src0, plus src1 in the part that i3 and the strides i0 to i2 name in bytes
            KERNEL_ACC = 94, 0..2 of [Acc "ACC"] => Op::Part(part(p, true)?);
            /// src0, with src1 in the part that i3 and the strides i0 to i2 name in bytes
            KERNEL_SET = 95, 0..2 of [Set "SET"] => Op::Part(part(p, false)?);
            /// src0's rows as diagonals
            KERNEL_DIAG = 65, 0..1 of [Diag "DIAG"] => Op::Band(Band::Diagonal);
            /// `f0 + index · f2`; FILL's source is only where the result may be written
            KERNEL_FILL = 66, 0..0 of [Fill "FILL", Arange "ARANGE"] => Op::Ramp(p.float(0), p.float(2));

            // Windows. IM2COL uses only the size of its weights: i13 to i15 hold width, height and
            // depth.

            /// windows of ggml's src1 as rows
            KERNEL_IM2COL = 67, 1..2 of [Im2col "IM2COL"] => Op::Im2col(im2col(p)?);
            /// windows of ggml's src1 with three dimensions as rows
            KERNEL_IM2COL_3D = 68, 1..2 of [Im2col3d "IM2COL_3D"] => Op::Im2col(im2col_3d(p)?);
            /// largest element (i0 = 0) or mean (1) of windows of src0's rows
            KERNEL_POOL_1D = 69, 0..1 of [Pool1d "POOL_1D"] => Op::Pool(pool_1d(p)?);
            /// largest element (i0 = 0) or mean (1) of windows of src0's planes
            KERNEL_POOL_2D = 70, 0..1 of [Pool2d "POOL_2D"] => Op::Pool(pool_2d(p)?);

            /// src0's columns of i1 channels, i0 elements apart and added, less the first i2
            /// elements
            KERNEL_COL2IM_1D = 89, 0..1 of [Col2im1d "COL2IM_1D"]
                => Op::Col2im(Col2im { stride: p.word(0), channels: p.size(1)?, pad: p.word(2) });
            /// src0's planes in the result's size; i0 as ggml's `ggml_scale_mode` and its flags
            KERNEL_UPSCALE = 90, 0..1 of [Upscale "UPSCALE"] => Op::Interpolate(interpolation(p.word(0))?);

            // Recurrences over tokens. Operations with more sources than an OP_TENSOR can have are
            // in the table of `wide`.

            /// a selective state space, then i0 states
            KERNEL_SSM_SCAN = 72, 0..7 of [SsmScan "SSM_SCAN"] => Op::Recurrence(Recurrence::SsmScan(p.size(0)?));
            /// a gated delta rule, then i0 states
            KERNEL_GATED_DELTA_NET = 73, 0..6 of [GatedDeltaNet "GATED_DELTA_NET"]
                => Op::Recurrence(Recurrence::GatedDelta(p.size(0)?));
            /// gated linear attention with queries times f0, then the state
            KERNEL_GATED_LINEAR_ATTN = 74, 0..5 of [GatedLinearAttn "GATED_LINEAR_ATTN"]
                => Op::Recurrence(Recurrence::GatedLinear(p.float(0)));
            /// the recurrence of RWKV 6, then the state
            KERNEL_RWKV_WKV6 = 75, 0..6 of [RwkvWkv6 "RWKV_WKV6"] => Op::Recurrence(Recurrence::Wkv6);
            /// the recurrence of RWKV 7, then the state
            KERNEL_RWKV_WKV7 = 76, 0..7 of [RwkvWkv7 "RWKV_WKV7"] => Op::Recurrence(Recurrence::Wkv7);

            // Convolutions of a kernel (src0) over src1. They work in VTCM, as an OP_WIDE does.

            /// windows of src1's planes, weighted and summed over channels
            KERNEL_CONV_2D = 81, 0..2 of [Conv2d "CONV_2D"]
                => Op::Convolution(convolution(p, ConvolutionForm::Plane));
            /// windows of src1's planes, weighted, each channel alone
            KERNEL_CONV_2D_DW = 82, 0..2 of [Conv2dDw "CONV_2D_DW"]
                => Op::Convolution(convolution(p, ConvolutionForm::EachChannel));
            /// windows of src1's volumes of i9 channels, weighted and summed over channels
            KERNEL_CONV_3D = 83, 0..2 of [Conv3d "CONV_3D"] => Op::Convolution(convolution_3d(p)?);
            /// src1's rows, each element times the kernel, i0 elements apart
            KERNEL_CONV_TRANSPOSE_1D = 84, 0..2 of [ConvTranspose1d "CONV_TRANSPOSE_1D"]
                => Op::Convolution(transposed_1d(p)?);
            /// src1's planes, each element times the kernel, i0 elements apart
            KERNEL_CONV_TRANSPOSE_2D = 85, 0..2 of [ConvTranspose2d "CONV_TRANSPOSE_2D"]
                => Op::Convolution(transposed([p.word(0), p.word(0), 1], ConvolutionForm::TransposedPlane));

            // DeepSeek V4: several streams for each token, and selected positions for sparse
            // attention.

            /// the streams of each token, times weights (i1 = 0) or sigmoids of gates (1), and
            /// their sum times f0
            KERNEL_DSV4_HC_PRE = 77, 0..2 of [Dsv4HcPre "DSV4_HC_PRE"] => Op::HyperPre(p.float(0), p.is_set(1));
            /// a matrix for each token, columns and rows divided i1 times by their sums plus f0
            KERNEL_DSV4_HC_COMB = 78, 0..3 of [Dsv4HcComb "DSV4_HC_COMB"] => Op::HyperComb(p.float(0), p.word(1));
            /// src0 times src2 for each stream, plus the streams src1 mixed by src3
            KERNEL_DSV4_HC_POST = 79, 0..4 of [Dsv4HcPost "DSV4_HC_POST"] => Op::HyperPost;
            /// sums over heads of weighted positive products of queries and keys, plus a mask
            KERNEL_LIGHTNING_INDEXER = 80, 0..4 of [LightningIndexer "LIGHTNING_INDEXER"] => Op::LightningIndexer;
        }
    };
}
pub(crate) use operations;

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// `KERNEL_*`.
    pub kernel: u32,
    /// Operations of ggml that the kernel computes.
    pub ggml: &'static [GgmlOp],
    /// Sources of these that the kernel reads.
    pub sources: Range<usize>,
}

/// Declares the numbers, ggml's operations, and the table as data.
macro_rules! declare {
    (
        params $p:ident;
        commands [$($command:ident $command_name:literal),*];
        $($(#[doc = $text:literal])+
        $kernel:ident = $number:literal, $first:literal..$end:literal of [$($op:ident $name:literal),*] => $decoded:expr;)*
    ) => {
        $(#[doc = concat!("[`TensorOp::kernel`]:", $($text,)+ ".")]
        pub const $kernel: u32 = $number;)*

        /// All operations on tensors.
        ///
        /// | number | kernel | ggml's operations | sources read | result |
        /// |---|---|---|---|---|
        $(#[doc = concat!(
            "| ", $number, " | [`", stringify!($kernel), "`] | ", $($name, " ",)* "| ", $first, "..", $end, " |", $($text,)+ " |"
        )])*
        pub const OPERATIONS: &[Operation] = &[
            $(Operation { kernel: $kernel, ggml: &[$(GgmlOp::$op),*], sources: $first..$end },)*
        ];

        /// An operation of ggml that an NPU may compute; those of `GGML_OP_UNARY` and `GGML_OP_GLU`
        /// count one by one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GgmlOp {
            $(#[doc = concat!("ggml's ", $command_name, ".")] $command,)*
            $($(#[doc = concat!("ggml's ", $name, ".")] $op,)*)*
        }

        impl GgmlOp {
            /// Returns ggml's name of the operation.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$command => $command_name,)*
                    $($(Self::$op => $name,)*)*
                }
            }

            /// Returns the operation that ggml calls `name`, if it is one of these.
            ///
            /// ```
            /// use hexagon_ops::wire::{GgmlOp, KERNEL_ADD};
            ///
            /// let add = GgmlOp::from_name(b"ADD").expect("the table has it");
            /// assert_eq!(add.kernel(), Some((KERNEL_ADD, 0..2)));
            /// assert_eq!(GgmlOp::from_name(b"OPT_STEP_SGD"), None);
            /// ```
            #[must_use]
            pub fn from_name(name: &[u8]) -> Option<Self> {
                // The compiler turns this match into a search by length and content.
                match core::str::from_utf8(name).ok()? {
                    $($command_name => Some(Self::$command),)*
                    $($($name => Some(Self::$op),)*)*
                    _ => None,
                }
            }

            /// Returns the kernel on tensors that computes the operation, and the range of sources
            /// that it reads; `None` if only a dedicated command computes it.
            #[must_use]
            pub fn kernel(self) -> Option<(u32, Range<usize>)> {
                match self {
                    $(Self::$command => None,)*
                    $($(Self::$op => Some(($kernel, $first..$end)),)*)*
                }
            }
        }
    };
}

operations!(declare);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_once_and_without_gaps() {
        let mut numbers: Vec<u32> = OPERATIONS.iter().map(|row| row.kernel).collect();
        numbers.sort_unstable();
        let want: Vec<u32> = (1..).take(OPERATIONS.len()).collect();
        assert_eq!(numbers, want);
    }

    #[test]
    fn an_operation_is_found_by_its_name_and_has_the_kernel_of_its_row() {
        for row in OPERATIONS {
            for op in row.ggml {
                assert_eq!(GgmlOp::from_name(op.name().as_bytes()), Some(*op));
                assert_eq!(op.kernel(), Some((row.kernel, row.sources.clone())));
            }
        }
        assert_eq!(GgmlOp::from_name(b"MUL_MAT_ID"), Some(GgmlOp::MulMatId));
        assert_eq!(GgmlOp::MulMatId.kernel(), None);
        assert_eq!(GgmlOp::from_name(b"NONE"), None);
        assert_eq!(GgmlOp::from_name(b"\xff"), None);
    }
}
