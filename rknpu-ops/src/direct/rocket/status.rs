//! The task that ends each job: a product whose results are known, in an object of a page.
//!
//! ```text
//! 0          A: 4 x 32 ones in FP16
//! 256        B: 32 x 16 ones in FP16
//! 2048       C: 4 x 16 sums in FP32, 0 before the job and 32 after it
//! 2304       the task's stream
//! ```

use std::io;

use super::Object;
use crate::ffi::MatmulType;
use crate::stream::{Arithmetic, Plan, STREAM_WORDS};

/// Bytes of the object.
pub const BYTES: usize = 4096;

const M: usize = 4;
const K: usize = 32;
const N: usize = 16;

const A: usize = 0;
const B: usize = 256;
const C: usize = 2048;
const C_BYTES: usize = M * N * 4;
const STREAM: usize = 2304;

const _: () = assert!(A + M * K * 2 <= B && B + K * N * 2 <= C && C + C_BYTES <= STREAM);
const _: () = assert!(STREAM + STREAM_WORDS * 8 <= BYTES);

/// The value of each result.
const SUM: f32 = 32.0;

/// Returns the device's address of a byte of the object.
fn address(object: &Object, place: usize) -> u32 {
    // PANIC: the object's addresses fit into 32 bits.
    object.address() + u32::try_from(place).expect("a place inside")
}

/// Returns the device's address of the stream.
pub fn stream(object: &Object) -> u32 {
    address(object, STREAM)
}

/// Writes operands and stream.
///
/// # Errors
/// None: the product is inside of the envelope, as a test shows.
pub fn fill(object: &mut Object) -> io::Result<()> {
    let arithmetic = Arithmetic::of(MatmulType::F16_F16_F32).ok_or(io::ErrorKind::Unsupported)?;
    let plan = Plan::new(arithmetic, [M, K, N]).map_err(io::Error::other)?;
    let mut words = Vec::with_capacity(STREAM_WORDS);
    for task in plan.tasks([A, B, C].map(|place| address(object, place))) {
        task.stream(None, &mut words).map_err(io::Error::other)?;
    }
    let bytes = object.bytes_mut();
    let one = half::f16::ONE.to_le_bytes();
    for (start, elements) in [(A, M * K), (B, K * N)] {
        let (operand, _) = bytes[start..][..2 * elements].as_chunks_mut::<2>();
        operand.fill(one);
    }
    let (places, _) = bytes[STREAM..].as_chunks_mut::<8>();
    for (place, word) in places.iter_mut().zip(&words) {
        *place = word.to_le_bytes();
    }
    Ok(())
}

/// Clears the results, for the CPU.
pub fn clear(object: &mut Object) {
    object.bytes_mut()[C..][..C_BYTES].fill(0);
}

/// Returns `true` if the results are those of the product.
pub fn is_written(object: &mut Object) -> bool {
    let (results, _) = object.bytes_mut()[C..][..C_BYTES].as_chunks::<4>();
    results
        .iter()
        .all(|result| f32::from_le_bytes(*result) == SUM)
}
