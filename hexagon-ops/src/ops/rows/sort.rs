//! ARGSORT, TOP_K, ARGMAX: the numbers of a row's elements in order.
//!
//! Of rows of up to [`COUNTED`] elements without gaps, the place of each element is counted: it is
//! the number of elements that come before it.
//!
//! ```text
//! for each element j
//!   for each 32 elements i          before them: j comes first if it is not worse; after them: if it is better
//!     place[i] += j comes before i
//! for each element i                if its place is below k
//!   result[place[i]] = i
//! ```
//!
//! Rows of up to [`SORTED`] elements without gaps are sorted by a [network].
//!
//! For other rows the kernel uses only the memory of the result's row: a heap of k numbers, with
//! the worst one on top. If k is less than the length of the source's row, the elements of a chunk
//! of the source are compared one by one only if its best element is better than that. At the end
//! the worst number is removed repeatedly, which sorts the heap.

mod network;

use core::cmp::Ordering;

use self::network::{Network, SORTED};
use super::{all_lanes, first_lane, lane_numbers};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector, splat_w};
use crate::ops::elementwise::load;
use crate::ops::tensor::{CHUNK, Chunk, SCALAR, Source, Type, View, ViewMut, row_packets};
use crate::rt::Engine;

/// Most elements of a row whose places are counted: the packets grow with their square.
const COUNTED: usize = 256;
/// Vectors of such a row.
const MOST: usize = COUNTED / 32;

/// An order of f32. Equal elements are ordered by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The smallest first.
    Ascending,
    /// The largest first.
    Descending,
}

/// A row whose elements are compared.
#[derive(Clone, Copy)]
struct Keys<'a> {
    view: &'a View<'a>,
    at: [usize; 3],
    /// The elements, if they have no gaps.
    elems: Option<&'a [f32]>,
    order: Order,
}

impl Keys<'_> {
    fn value(&self, number: i32) -> f32 {
        let k = usize::try_from(number).unwrap_or(0);
        match self.elems {
            Some(elems) => elems.get(k).copied().unwrap_or_default(),
            None => self.view.element(k, self.at),
        }
    }

    /// Compares two elements by this order.
    fn compare(&self, a: i32, b: i32) -> Ordering {
        let order = self.value(a).total_cmp(&self.value(b));
        let order = match self.order {
            Order::Ascending => order,
            Order::Descending => order.reverse(),
        };
        order.then(a.cmp(&b))
    }

    /// Moves the number at `place` of a heap down until no worse one is below it.
    fn sift(&self, heap: &mut [i32], place: usize) {
        let mut place = place;
        loop {
            let mut worst = place;
            for child in [2 * place + 1, 2 * place + 2] {
                if child < heap.len() && self.compare(heap[child], heap[worst]).is_gt() {
                    worst = child;
                }
            }
            if worst == place {
                return;
            }
            heap.swap(place, worst);
            place = worst;
        }
    }

    /// Writes the numbers of the first of `n` elements in order, by a heap.
    #[inline(never)]
    fn sort(&self, heap: &mut [i32], n: usize) {
        for (number, word) in (0..).zip(heap.iter_mut()) {
            *word = number;
        }
        for place in (0..heap.len() / 2).rev() {
            self.sift(heap, place);
        }
        if heap.len() < n {
            self.select(heap, n);
        }
        for end in (1..heap.len()).rev() {
            heap.swap(0, end);
            self.sift(&mut heap[..end], 0);
        }
    }

    /// Replaces numbers of a heap by better ones of the whole row.
    fn select(&self, heap: &mut [i32], n: usize) {
        let mut chunk: Chunk = [0.0; CHUNK];
        for start in (heap.len()..n).step_by(CHUNK) {
            let range = start..n.min(start + CHUNK);
            let elems = self.view.read(self.at, range, &mut chunk);
            let best = hvx::widest(Best(elems, self.order));
            // An element that equals the worst one of the heap has a larger index, so it stays out.
            let worst = self.value(heap[0]);
            let better = match self.order {
                Order::Ascending => best < worst,
                Order::Descending => best > worst,
            };
            if !better {
                continue;
            }
            for k in start..start + elems.len() {
                let number = i32::try_from(k).unwrap_or(i32::MAX);
                if self.compare(number, heap[0]).is_lt() {
                    heap[0] = number;
                    self.sift(heap, 0);
                }
            }
        }
    }
}

/// Writes the numbers of a row's first elements in an order by counting.
struct Count<'a> {
    elems: &'a [f32],
    order: Order,
    words: &'a mut [i32],
}

/// Returns words in the order of [`f32::total_cmp`].
#[inline(always)]
fn ordered(x: Vector) -> Vector {
    let is_negative = hvx::shr_add_w(splat_w(0), x, 31);
    // The word of a negative number is -1 minus its magnitude.
    let magnitude = hvx::and(x, splat_w(i32::MAX));
    let minus = hvx::sub_w(splat_w(-1), magnitude);
    let kept = hvx::and(magnitude, hvx::sub_w(splat_w(-1), is_negative));
    hvx::or(kept, hvx::and(minus, is_negative))
}

/// Returns `count` less 1 where `a` is below `b`.
#[inline(always)]
fn less_if_below(count: Vector, a: Vector, b: Vector) -> Vector {
    hvx::shr_add_w(count, hvx::sub_sat_w(a, b), 31)
}

impl hvx::Kernel for Count<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let n = self.elems.len();
        let mut keys = hvx::zeros::<MOST>();
        for (g, line) in keys.iter_mut().enumerate().take(n.div_ceil(32)) {
            let key = ordered(load(self.elems, 32 * g));
            // The element that comes first in the order gets the smallest word.
            let key = match self.order {
                Order::Ascending => key,
                Order::Descending => hvx::sub_w(splat_w(-1), key),
            };
            // The largest word is avoided, so that `next` exists for every word. This makes only
            // two kinds of NaN equal.
            hvx::store(line, hvx::min_w(key, splat_w(i32::MAX - 1)));
        }
        let lane = lane_numbers();
        let mut places = hvx::zeros::<MOST>();
        let words: &[i32; COUNTED] = bytemuck::cast_ref(&keys);
        let words = &words[..n];
        for (g, place) in places.iter_mut().enumerate().take(n.div_ceil(32)) {
            let have = hvx::load(&keys[g]);
            // An element comes after equal elements with smaller indices.
            let next = hvx::add_w(have, splat_w(1));
            let (before, rest) = words.split_at(32 * g);
            let (among, after) = rest.split_at(rest.len().min(32));
            let mut count = splat_w(0);
            for word in before {
                count = less_if_below(count, splat_w(*word), next);
            }
            for (j, word) in (0..).zip(among) {
                let is_after = hvx::shr_w(hvx::sub_w(splat_w(j), lane), 31);
                count = less_if_below(count, splat_w(*word), hvx::add_w(have, is_after));
            }
            for word in after {
                count = less_if_below(count, splat_w(*word), have);
            }
            hvx::store(place, hvx::sub_w(splat_w(0), count));
        }
        let places: &[i32; COUNTED] = bytemuck::cast_ref(&places);
        for (i, place) in (0..).zip(&places[..n]) {
            let place = usize::try_from(*place).unwrap_or(usize::MAX);
            if let Some(word) = self.words.get_mut(place) {
                *word = i;
            }
        }
    }
}

/// A search for the best of some elements.
struct Best<'a>(&'a [f32], Order);

impl hvx::Kernel for Best<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let Self(elems, order) = self;
        let (vectors, remaining) = elems.as_chunks();
        // The unused lanes are filled with the first element.
        let mut rest = [elems.first().copied().unwrap_or(0.0); 32];
        rest[..remaining.len()].copy_from_slice(remaining);
        let rest = hvx::load_f32(&rest);
        // One loop for each order, so that the loop has no condition.
        let best = match order {
            Order::Ascending => vectors.iter().fold(rest, |best, vector| {
                hvx::min_f32(best, hvx::load_f32(vector))
            }),
            Order::Descending => vectors.iter().fold(rest, |best, vector| {
                hvx::max_f32(best, hvx::load_f32(vector))
            }),
        };
        let best = match order {
            Order::Ascending => all_lanes(best, hvx::min_f32),
            Order::Descending => all_lanes(best, hvx::max_f32),
        };
        first_lane(best)
    }
}

/// Writes the numbers of the first elements of each row in an order.
///
/// # Errors
/// `Operand` unless the source is f32, the result is i32 with rows that have no gaps and are not
/// longer, and the other dimensions are equal.
pub fn sort(engine: &Engine, order: Order, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = src.apart()?;
    let (d, s) = (dst.shape, view.shape);
    let shapes = d.ne[1..] == s.ne[1..] && d.ne[0] <= s.ne[0] && i32::try_from(s.ne[0]).is_ok();
    let types = d.dtype == Type::I32 && s.dtype == Type::F32;
    if !types || !shapes || !d.has_dense_rows() {
        return Err(Error::Operand);
    }
    let n = s.ne[0];
    let packets = || row_packets(n, SCALAR);
    dst.for_rows(engine, packets, |mut row| {
        let at = row.at;
        let keys = Keys {
            view: &view,
            at,
            elems: view.floats(at),
            order,
        };
        // Rows that `words` would refuse were refused above.
        let Ok(words) = row.words() else { return };
        match view.floats(at) {
            Some(elems) if n <= COUNTED => hvx::widest(Count {
                elems,
                order,
                words,
            }),
            Some(elems) if n <= SORTED => hvx::widest(Network {
                elems,
                order,
                words,
            }),
            _ => keys.sort(words, n),
        }
    });
    Ok(())
}

/// Writes the number of the largest element of each row; the last one's of equal elements, as ggml
/// does.
///
/// - `src`: f32 `[n, m]`
/// - `dst`: i32 `[m]` without gaps
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn arg_max(engine: &Engine, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = src.apart()?;
    let (d, [n, m, ..]) = (dst.shape, view.shape.ne);
    let shapes = view.shape.ne == [n, m, 1, 1] && d.ne == [m, 1, 1, 1] && i32::try_from(n).is_ok();
    if d.dtype != Type::I32 || view.shape.dtype != Type::F32 || !shapes || !d.has_dense_rows() {
        return Err(Error::Operand);
    }
    // A single row.
    let packets = || 0;
    dst.for_rows(engine, packets, |mut row| {
        let Ok(words) = row.words() else { return };
        for (i, word) in words.iter_mut().enumerate() {
            *word = last_largest(&view, i);
        }
    });
    Ok(())
}

/// Number of elements that are first searched for their largest one; only if that matters, their
/// chunks are searched one by one.
const PIECE: usize = 4096;

/// Returns the number of the last one of the largest elements of row `row`.
fn last_largest(view: &View<'_>, row: usize) -> i32 {
    let n = view.shape.ne[0];
    let number = match view.floats([row, 0, 0]) {
        Some(elems) => {
            let (_, piece) = largest_of(elems.chunks(PIECE));
            let first = PIECE * piece;
            let elems = &elems[first..n.min(first + PIECE)];
            let (largest, chunk) = largest_of(elems.chunks(CHUNK));
            let chunk = CHUNK * chunk..elems.len().min(CHUNK * (chunk + 1));
            let number = elems[chunk.clone()].iter().rposition(|x| *x == largest);
            number.map_or(0, |number| first + chunk.start + number)
        }
        None => {
            let mut chunk: Chunk = [0.0; CHUNK];
            let (mut largest, mut number) = (f32::NEG_INFINITY, 0);
            for start in (0..n).step_by(CHUNK) {
                let range = start..n.min(start + CHUNK);
                let elems = view.read([row, 0, 0], range, &mut chunk);
                let (best, _) = largest_of([elems].into_iter());
                if best >= largest
                    && let Some(k) = elems.iter().rposition(|x| *x == best)
                {
                    (largest, number) = (best, start + k);
                }
            }
            number
        }
    };
    i32::try_from(number).unwrap_or(0)
}

/// Returns the largest element of some pieces, and the number of the last piece that has it.
fn largest_of<'a>(pieces: impl Iterator<Item = &'a [f32]>) -> (f32, usize) {
    let (mut largest, mut number) = (f32::NEG_INFINITY, 0);
    for (i, elems) in pieces.enumerate() {
        let best = hvx::widest(Best(elems, Order::Descending));
        if best >= largest {
            (largest, number) = (best, i);
        }
    }
    (largest, number)
}
