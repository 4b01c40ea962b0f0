//! Kernels over the vector type, and the drivers that run them.
//!
//! [`matmul`] multiplies with packed weights, [`attention`] with keys and values in a cache. The
//! others work on tensors in ggml's layouts ([`tensor`]), row by row, with FP32 arithmetic; [`run`]
//! is their entry.

pub mod add_id;
pub mod attention;
pub mod concat;
pub mod convolution;
pub mod copy;
pub mod count;
pub mod elementwise;
mod fold;
mod halves;
pub mod hyper;
pub mod im2col;
pub mod indexer;
pub mod interpolate;
pub mod math;
pub mod matmul;
pub mod outer;
pub mod pad;
pub mod part;
pub mod place;
pub mod pool;
pub mod recurrence;
pub mod rows;
mod run;
pub mod solve;
mod square;
pub mod tensor;
pub mod timestep;
pub mod unpacked_matmul;

pub use run::{Op, run, run_in, run_wide};
