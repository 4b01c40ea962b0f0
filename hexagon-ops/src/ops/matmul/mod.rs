//! Matrix multiplication `dst[M,N] = act[M,K] · w[K,N]`: two code paths over one set of packed
//! weights.
//!
//! | path | used for | steps |
//! |---|---|---|
//! | GEMV | M of 1 or 2, quantized weights with a scale for each column | [`quantize`], [`gemv`] |
//! | GEMM | everything else | [`act`], [`dequantize`], matrix unit or vector units |
//! | rows | any M without a matrix unit, types as for GEMV | `fixed`, or [`quantize`] to 16 bits and [`gemv`] |
//!
//! GEMV quantizes activations to 8 bits and computes integer dot products on the vector units. GEMM
//! converts activations and weights to FP16 tiles and multiplies them on the matrix unit.

pub mod act;
pub mod dequantize;
mod driver;
mod epilogue;
mod experts;
mod fixed;
mod gemm;
pub mod gemv;
mod gemv_driver;
mod output;
mod panel;
mod plan;
pub mod quantize;
mod rows_driver;
mod super_block;

pub use driver::{Dots, Machine, MatMul, Prepared, RowStarts};
pub use epilogue::{Combine, Epilogue};
pub use experts::ExpertMatMul;
pub use panel::Panel;
pub use plan::GemmPlan;

/// Most tasks of one step.
const MAX_TASKS: usize = 16;
