//! ARGSORT, TOP_K, ARGMAX: the numbers of a row's elements in order.
//!
//! The kernel has no memory but the result's row: k numbers. If k is the length of the source's
//! row, they are sorted in place. Otherwise they are a heap with the worst number on top, and the
//! elements of a chunk of the source are compared one by one only if its best element is better
//! than that.

use core::cmp::Ordering;

use super::{all_lanes, first_lane};
use crate::error::{Error, Result};
use crate::hvx;
use crate::ops::elementwise::load;
use crate::ops::tensor::{CHUNK, Chunk, SCALAR, Source, Type, View, ViewMut, row_packets};
use crate::rt::Engine;

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
    order: Order,
}

impl Keys<'_> {
    fn value(&self, number: i32) -> f32 {
        let k = usize::try_from(number).unwrap_or(0);
        self.view.element(k, self.at)
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

    /// Replaces numbers of a heap by better ones of the whole row.
    fn select(&self, heap: &mut [i32], n: usize) {
        for place in (0..heap.len() / 2).rev() {
            self.sift(heap, place);
        }
        let mut chunk: Chunk = [0.0; CHUNK];
        for start in (heap.len()..n).step_by(CHUNK) {
            let range = start..n.min(start + CHUNK);
            let elems = self.view.read(self.at, range, &mut chunk);
            let best = hvx::widest(Best(elems, self.order));
            // An element equal to the worst one has a larger number, and stays out.
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

/// A search for the best of some elements.
struct Best<'a>(&'a [f32], Order);

impl hvx::Kernel for Best<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let Self(elems, order) = self;
        let whole = elems.len() / 32 * 32;
        // The rest of a vector is filled with the first element.
        let mut rest = [elems.first().copied().unwrap_or(0.0); 32];
        rest[..elems.len() - whole].copy_from_slice(&elems[whole..]);
        let mut best = hvx::load_f32(&rest);
        for k in (0..whole).step_by(32) {
            let lanes = load(elems, k);
            best = match order {
                Order::Ascending => hvx::min_f32(best, lanes),
                Order::Descending => hvx::max_f32(best, lanes),
            };
        }
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
    let (k, n) = (d.ne[0], s.ne[0]);
    let packets = || row_packets(n, SCALAR);
    dst.for_rows(engine, packets, |mut row| {
        let at = row.at;
        let keys = Keys {
            view: &view,
            at,
            order,
        };
        // Rows that `words` refuses were refused above.
        let Ok(words) = row.words() else { return };
        for (number, word) in (0..).zip(words.iter_mut()) {
            *word = number;
        }
        if k < n {
            keys.select(words, n);
        }
        words.sort_unstable_by(|a, b| keys.compare(*a, *b));
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

/// Returns the number of the last one of the largest elements of row `row`.
fn last_largest(view: &View<'_>, row: usize) -> i32 {
    let n = view.shape.ne[0];
    let mut chunk: Chunk = [0.0; CHUNK];
    let (mut largest, mut number) = (f32::NEG_INFINITY, 0);
    for start in (0..n).step_by(CHUNK) {
        let range = start..n.min(start + CHUNK);
        let elems = view.read([row, 0, 0], range, &mut chunk);
        let best = hvx::widest(Best(elems, Order::Descending));
        if best >= largest
            && let Some(k) = elems.iter().rposition(|x| *x == best)
        {
            (largest, number) = (best, start + k);
        }
    }
    i32::try_from(number).unwrap_or(0)
}
