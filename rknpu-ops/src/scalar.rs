//! The loops of `quant`, `pack` and `int4` in portable code. They run on machines without a
//! hand-written version, and every hand-written version must equal them bit for bit.
//!
//! The callers check lengths and ranges. Here, wrong ones panic or leave elements unchanged.

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
