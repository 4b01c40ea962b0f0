//! The loops of `quant`, `pack` and `int4` in portable code: what runs where there is no hand-written version, and what a
//! hand-written version must equal bit for bit.
//!
//! Lengths and ranges are checked there; here, wrong ones panic or leave elements alone.

mod hadamard;
mod interleave;
mod row;
mod scaled;
mod unpack;

pub use hadamard::hadamard;
pub use interleave::interleave;
pub use row::{absmax_bits, quantize, scale_to_f16};
pub use scaled::{Quad, scaled_tile};
pub use unpack::{unpack_f32, unpack_i32};
