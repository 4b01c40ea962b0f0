//! A sorting network over a row: pairs of elements at fixed places are compared and exchanged, 32
//! of them at a time.
//!
//! Element p of 32 · V is in lane p / V of vector p % V, so that most pairs are lanes of two
//! vectors. In the steps with larger distances than V they are lanes of one vector, and two such
//! vectors exchange blocks of lanes before and after.
//!
//! ```text
//! for size = 2, 4 .. 32 V            blocks of that size are sorted, in turns upwards and downwards
//!   for distance = size / 2 .. 1     element p and element p + distance
//! ```
//!
//! SOURCE: K. Batcher, Sorting networks and their applications, 1968: the bitonic sorter.

use super::{Order, ordered};
use crate::hvx::{self, Vector, and, splat_w, sub_w, swap_blocks, xor};
use crate::layout::{Line, TILE_DIM};
use crate::ops::elementwise::load;
use crate::ops::rows::lane_numbers;
use crate::ops::square::{GatherRows, Gathered, WriteColumns};

/// Most elements of a row. Its keys and numbers are on the stack of a thread.
pub(super) const SORTED: usize = 4096;
/// Vectors of such a row.
const MOST: usize = SORTED / 32;
/// Fewest vectors: those of a square that is transposed at the end.
const FEWEST: usize = TILE_DIM;

/// Writes the numbers of a row's first elements in an order.
pub(super) struct Network<'a> {
    /// Up to [`SORTED`] elements.
    pub(super) elems: &'a [f32],
    pub(super) order: Order,
    pub(super) words: &'a mut [i32],
}

/// Vectors of keys, and as many of the numbers of their elements: a power of two.
struct Pairs<'a> {
    keys: &'a mut [Line],
    numbers: &'a mut [Line],
}

/// A key and a number in each lane.
type Pair = [Vector; 2];

#[inline(always)]
fn load_pair(key: &Line, number: &Line) -> Pair {
    [hvx::load(key), hvx::load(number)]
}

/// Returns the pairs that come first and those that come later, or the reverse in lanes of `down`
/// with all bits. No two numbers are equal.
#[inline(always)]
fn compare(a: Pair, b: Pair, down: Vector) -> (Pair, Pair) {
    let difference = hvx::sub_sat_w(a[0], b[0]);
    let sign = hvx::max_w(hvx::min_w(difference, splat_w(1)), splat_w(-1));
    // Equal keys are ordered by their index, which has fewer bits than the shift.
    let score = hvx::shl_add_w(sub_w(a[1], b[1]), sign, 26);
    let kept = xor(hvx::shr_add_w(splat_w(0), score, 31), down);
    let [key, number] = [0, 1].map(|i| {
        let exchanged = and(xor(a[i], b[i]), kept);
        (xor(b[i], exchanged), xor(a[i], exchanged))
    });
    ([key.0, number.0], [key.1, number.1])
}

/// Compares vectors that are `distance` apart; their number is a multiple of twice the distance.
///
/// - `down`: returns the lanes of a block of twice as many vectors that are sorted downwards
#[inline(always)]
fn compare_vectors(
    (keys, numbers): (&mut [Line], &mut [Line]),
    distance: usize,
    down: impl Fn(usize) -> Vector,
) {
    let blocks = keys.chunks_exact_mut(2 * distance);
    for (i, (keys, numbers)) in blocks
        .zip(numbers.chunks_exact_mut(2 * distance))
        .enumerate()
    {
        let down = down(2 * distance * i);
        let (low_keys, high_keys) = keys.split_at_mut(distance);
        let (low_numbers, high_numbers) = numbers.split_at_mut(distance);
        let low = low_keys.iter_mut().zip(low_numbers);
        for ((ka, na), (kb, nb)) in low.zip(high_keys.iter_mut().zip(high_numbers)) {
            let (first, later) = compare(load_pair(ka, na), load_pair(kb, nb), down);
            hvx::store(ka, first[0]);
            hvx::store(na, first[1]);
            hvx::store(kb, later[0]);
            hvx::store(nb, later[1]);
        }
    }
}

/// Compares lanes of each vector that are `WORDS` apart.
#[inline(always)]
fn compare_lanes<const WORDS: usize>((keys, numbers): (&mut [Line], &mut [Line]), down: Vector) {
    let (keys, numbers) = (keys.as_chunks_mut::<2>().0, numbers.as_chunks_mut::<2>().0);
    for ([ka, kb], [na, nb]) in keys.iter_mut().zip(numbers) {
        let (ka_kb, na_nb) = (
            swap_blocks::<WORDS>(hvx::load(ka), hvx::load(kb)),
            swap_blocks::<WORDS>(hvx::load(na), hvx::load(nb)),
        );
        let (first, later) = compare([ka_kb.0, na_nb.0], [ka_kb.1, na_nb.1], down);
        let (key, other_key) = swap_blocks::<WORDS>(first[0], later[0]);
        let (number, other_number) = swap_blocks::<WORDS>(first[1], later[1]);
        hvx::store(ka, key);
        hvx::store(kb, other_key);
        hvx::store(na, number);
        hvx::store(nb, other_number);
    }
}

/// Returns all bits in lanes that have `bit` in their number.
#[inline(always)]
fn lanes_with(bit: usize) -> Vector {
    let bit = i32::try_from(bit).unwrap_or(0);
    let bits = and(lane_numbers(), splat_w(bit));
    hvx::shr_add_w(splat_w(0), sub_w(splat_w(0), bits), 31)
}

impl Pairs<'_> {
    /// Reads a row, with keys after all others, and larger numbers, after its end.
    #[inline(always)]
    fn fill(&mut self, elems: &[f32], order: Order) {
        let last = splat_w(i32::try_from(elems.len()).unwrap_or(i32::MAX) - 1);
        let mut number = lane_numbers();
        let lines = self.keys.iter_mut().zip(&mut *self.numbers);
        for (i, (key, to)) in lines.enumerate() {
            let word = ordered(load(elems, 32 * i));
            let word = match order {
                Order::Ascending => word,
                Order::Descending => sub_w(splat_w(-1), word),
            };
            let is_after = hvx::shr_add_w(splat_w(0), sub_w(last, number), 31);
            let least = xor(splat_w(i32::MIN), is_after);
            hvx::store(key, hvx::max_w(word, least));
            hvx::store(to, number);
            number = hvx::add_w(number, splat_w(32));
        }
    }

    #[inline(always)]
    fn sort(&mut self) {
        let (keys, numbers) = (&mut *self.keys, &mut *self.numbers);
        let count = keys.len();
        let mut size = 2;
        while size <= 32 * count {
            let in_lanes = match size < count {
                true => splat_w(0),
                // No lane is reversed at the last size, because lane numbers end before it.
                false => lanes_with(size / count),
            };
            let mut distance = size / 2;
            while distance >= count {
                let pairs = (&mut *keys, &mut *numbers);
                match distance / count {
                    16 => compare_lanes::<16>(pairs, in_lanes),
                    8 => compare_lanes::<8>(pairs, in_lanes),
                    4 => compare_lanes::<4>(pairs, in_lanes),
                    2 => compare_lanes::<2>(pairs, in_lanes),
                    _ => compare_lanes::<1>(pairs, in_lanes),
                }
                distance /= 2;
            }
            while distance > 0 {
                compare_vectors((&mut *keys, &mut *numbers), distance, |first| {
                    match first & size & (count - 1) {
                        0 => in_lanes,
                        _ => splat_w(-1),
                    }
                });
                distance /= 2;
            }
            size *= 2;
        }
    }
}

impl hvx::Kernel for Network<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let count = self.elems.len().div_ceil(32).next_power_of_two();
        let count = count.clamp(FEWEST, MOST);
        let mut lines = [Line::ZERO; 2 * MOST];
        let (keys, numbers) = lines.split_at_mut(MOST);
        let mut pairs = Pairs {
            keys: &mut keys[..count],
            numbers: &mut numbers[..count],
        };
        pairs.fill(self.elems, self.order);
        pairs.sort();
        // After sorting, lane l has the elements l · count to (l + 1) · count - 1.
        let out: &mut [f32] = bytemuck::cast_slice_mut(self.words);
        let mut gathered: Gathered = hvx::zeros();
        for first in (0..count).step_by(TILE_DIM) {
            hvx::widest(GatherRows {
                elems: bytemuck::cast_slice(pairs.numbers),
                at: 32 * first,
                stride: 32,
                count: TILE_DIM,
                to: &mut gathered,
            });
            hvx::widest(WriteColumns {
                gathered: &gathered,
                out: out.get_mut(first..).unwrap_or_default(),
                stride: count,
                rows: TILE_DIM,
                columns: TILE_DIM,
            });
        }
    }
}
