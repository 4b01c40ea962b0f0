//! Operations on whole rows: norms, sums, softmax, rotary positions, sorting. Sums are FP32, in 32
//! lanes that are added at the end.

mod norm;
mod rope;
mod scan;
mod soft_max;
mod sort;

pub use norm::{Norm, norm, sum_all, sum_rows};
pub use rope::{Rope, RopePairs, SectionOrder, Sections, WHOLE_ROW, rope, rope_set_rows};
pub use scan::{convolve, cumulate};
pub(super) use soft_max::Slopes;
pub use soft_max::{SoftMax, soft_max};
pub use sort::{Order, arg_max, sort};

use super::elementwise::load;
use crate::hvx::{self, Vector};

/// Returns `join` of all lanes of `v` in all lanes.
#[inline(always)]
pub(super) fn all_lanes(v: Vector, join: fn(Vector, Vector) -> Vector) -> Vector {
    let mut v = v;
    for _ in 0..5 {
        let (even, odd) = hvx::deal_w(v, v);
        v = join(even, odd);
    }
    v
}

/// Returns the number of each lane.
#[inline(always)]
pub(super) fn lane_numbers() -> Vector {
    static NUMBERS: [i32; 32] = {
        let mut numbers = [0; 32];
        let mut i = 1;
        while i < 32 {
            numbers[i] = numbers[i - 1] + 1;
            i += 1;
        }
        numbers
    };
    hvx::load_bytes(bytemuck::cast_ref(&NUMBERS))
}

/// Returns lane 0.
#[inline(always)]
pub(super) fn first_lane(v: Vector) -> f32 {
    let mut lanes = [0.0; 32];
    hvx::store_f32(&mut lanes, v);
    lanes[0]
}

/// Returns the number of elements as f32: rows are shorter than 2^24.
#[inline(always)]
#[expect(
    clippy::cast_precision_loss,
    reason = "longer rows lose less by it than by their own sum"
)]
fn count_f32(n: usize) -> f32 {
    n as f32
}
