//! Operands and the result of a function of elements, checked together. Each operand has memory of
//! its own, or is in the result's place.
//!
//! A reference to an operand would forbid to write the result over it, so these are pointers: an
//! element is loaded before it is written, and no reference to it exists meanwhile.

use core::marker::PhantomData;

use super::{Vector, load, load_f32, store, store_f32};
use crate::layout::{LINE_BYTES, Line};

/// f32 of a vector.
const LANES: usize = LINE_BYTES / 4;

/// `S` operands and a result of as many elements.
#[derive(Debug)]
pub struct Streams<'a, const S: usize> {
    from: [*const f32; S],
    to: *mut f32,
    len: usize,
    life: PhantomData<&'a mut [f32]>,
}

impl<'a, const S: usize> Streams<'a, S> {
    /// Returns operands, `None` for one in the result's place, and the result: as many elements as
    /// all of them have.
    #[must_use]
    #[inline(always)]
    pub fn new(from: [Option<&'a [f32]>; S], to: &'a mut [f32]) -> Self {
        let (mut len, own) = (to.len(), to.as_mut_ptr());
        let from = from.map(|from| match from {
            Some(from) => {
                len = len.min(from.len());
                from.as_ptr()
            }
            None => own.cast_const(),
        });
        Self {
            from,
            to: own,
            len,
            life: PhantomData,
        }
    }

    /// Returns `true` if all start with a line.
    #[must_use]
    #[inline(always)]
    pub fn is_aligned(&self) -> bool {
        let places = self
            .from
            .iter()
            .fold(self.to.addr(), |all, from| all | from.addr());
        places.is_multiple_of(LINE_BYTES)
    }

    /// Splits the groups of `N` vectors off; fewer than one are left. `ALIGNED` is for streams that
    /// [start with a line](Self::is_aligned), and there are no groups of others.
    #[inline(always)]
    pub fn groups<const N: usize, const ALIGNED: bool>(&mut self) -> Groups<'a, S, N, ALIGNED> {
        let count = match !ALIGNED || self.is_aligned() {
            true => self.len / (N * LANES),
            false => 0,
        };
        let group = Group {
            from: self.from,
            to: self.to,
            life: PhantomData,
        };
        self.advance(count * N * LANES);
        Groups { group, count }
    }

    /// Splits the next vector off: `LANES` elements, or all that remain if there are fewer.
    #[inline(always)]
    pub fn piece(&mut self) -> Option<Piece<'a, S>> {
        let count = self.len.min(LANES);
        let piece = Piece {
            from: self.from,
            to: self.to,
            count,
            life: PhantomData,
        };
        self.advance(count);
        (count > 0).then_some(piece)
    }

    /// Goes past `count` elements, which are there.
    #[inline(always)]
    fn advance(&mut self, count: usize) {
        self.from = self.from.map(|from| from.wrapping_add(count));
        self.to = self.to.wrapping_add(count);
        self.len -= count;
    }
}

/// Groups of `N` vectors.
#[derive(Debug)]
pub struct Groups<'a, const S: usize, const N: usize, const ALIGNED: bool> {
    /// The next one.
    group: Group<'a, S, N, ALIGNED>,
    count: usize,
}

impl<'a, const S: usize, const N: usize, const ALIGNED: bool> Iterator
    for Groups<'a, S, N, ALIGNED>
{
    type Item = Group<'a, S, N, ALIGNED>;

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        self.count = self.count.checked_sub(1)?;
        let Group { from, to, life } = self.group;
        self.group.from = from.map(|from| from.wrapping_add(N * LANES));
        self.group.to = to.wrapping_add(N * LANES);
        Some(Group { from, to, life })
    }
}

/// `N` vectors of each operand and of the result: all of them are there, and no other group has
/// them.
#[derive(Debug)]
pub struct Group<'a, const S: usize, const N: usize, const ALIGNED: bool> {
    from: [*const f32; S],
    to: *mut f32,
    life: PhantomData<&'a mut [f32]>,
}

impl<const S: usize, const N: usize, const ALIGNED: bool> Group<'_, S, N, ALIGNED> {
    /// Returns vector `i`, below `N`, of each operand.
    #[must_use]
    #[inline(always)]
    pub fn load(&self, i: usize) -> [Vector; S] {
        assert!(i < N);
        self.from.map(|from| {
            let from = from.wrapping_add(i * LANES);
            if ALIGNED {
                // SAFETY: one of the group's vectors, which start with a line; the result is
                // written through a pointer, too.
                load(unsafe { &*from.cast::<Line>() })
            } else {
                // SAFETY: as above, and f32 are aligned.
                load_f32(unsafe { &*from.cast::<[f32; LANES]>() })
            }
        })
    }

    /// Writes vector `i`, below `N`, of the result.
    #[inline(always)]
    pub fn store(&mut self, i: usize, v: Vector) {
        assert!(i < N);
        let to = self.to.wrapping_add(i * LANES);
        if ALIGNED {
            // SAFETY: one of the group's vectors, which start with a line and belong to it alone;
            // the reference ends with this store.
            store(unsafe { &mut *to.cast::<Line>() }, v);
        } else {
            // SAFETY: as above, and f32 are aligned.
            store_f32(unsafe { &mut *to.cast::<[f32; LANES]>() }, v);
        }
    }
}

/// A vector of each operand and of the result, or the last elements.
#[derive(Debug)]
pub struct Piece<'a, const S: usize> {
    from: [*const f32; S],
    to: *mut f32,
    /// At most a vector.
    count: usize,
    life: PhantomData<&'a mut [f32]>,
}

impl<const S: usize> Piece<'_, S> {
    /// Returns the elements of each operand, and zeros after them.
    #[must_use]
    #[inline(always)]
    pub fn load(&self) -> [Vector; S] {
        self.from.map(|from| {
            if self.count == LANES {
                // SAFETY: a whole vector of f32, which are aligned.
                return load_f32(unsafe { &*from.cast::<[f32; LANES]>() });
            }
            let mut lanes = [0.0; LANES];
            // A call: of a loop, the compiler would compute functions of no elements, zeros, before
            // all other loops, and store them as qfloat.
            //
            // SAFETY: `count` elements are there, fewer than a vector, and `lanes` is apart.
            unsafe { core::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), self.count) };
            load_f32(&lanes)
        })
    }

    /// Writes the elements of the result.
    #[inline(always)]
    pub fn store(&mut self, v: Vector) {
        if self.count == LANES {
            // SAFETY: a whole vector of f32, which belong to this piece alone.
            return store_f32(unsafe { &mut *self.to.cast::<[f32; LANES]>() }, v);
        }
        let mut lanes = [0.0; LANES];
        store_f32(&mut lanes, v);
        for (i, lane) in lanes.iter().enumerate().take(self.count) {
            // SAFETY: `count` elements are there, which belong to this piece alone.
            unsafe { self.to.wrapping_add(i).write(*lane) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hvx::{add_f32, mul_f32};

    /// Writes `a · b + a`, four vectors at a time.
    fn run(from: [Option<&[f32]>; 2], to: &mut [f32]) {
        let mut streams = Streams::new(from, to);
        let f = |[a, b]: [Vector; 2]| add_f32(mul_f32(a, b), a);
        for mut group in streams.groups::<4, true>() {
            (0..4).for_each(|i| group.store(i, f(group.load(i))));
        }
        for mut group in streams.groups::<2, false>() {
            (0..2).for_each(|i| group.store(i, f(group.load(i))));
        }
        while let Some(mut piece) = streams.piece() {
            piece.store(f(piece.load()));
        }
    }

    #[test]
    fn operands_in_place_and_apart_give_the_same_and_nothing_else_is_written() {
        // Aligned ones and others.
        let elems = |seed: f32| -> Vec<Line> {
            let lines = (0..13_u16).map(|i| [seed + f32::from(i); LANES]);
            lines.map(bytemuck::cast).collect()
        };
        let (a, b) = (elems(1.0), elems(0.5));
        let [a, b] = [&a, &b].map(|lines| bytemuck::cast_slice::<Line, f32>(lines));
        for len in [0, 1, 31, 32, 64, 100, 128, 200, 256, 333] {
            for start in [0, 1, 7] {
                let range = start..start + len;
                let want = |a: &[f32], b: &[f32]| -> Vec<f32> {
                    a.iter().zip(b).map(|(a, b)| a * b + a).collect()
                };
                let (x, y) = (&a[range.clone()], &b[range.clone()]);
                for (from, before, want) in [
                    ([Some(x), Some(y)], b, want(x, y)),
                    ([None, Some(y)], a, want(x, y)),
                    ([Some(x), None], b, want(x, y)),
                    ([None, None], a, want(x, x)),
                ] {
                    let mut lines = vec![Line::ZERO; 13];
                    let to: &mut [f32] = bytemuck::cast_slice_mut(&mut lines);
                    to.copy_from_slice(before);
                    run(from, &mut to[range.clone()]);
                    assert_eq!(to[range.clone()], want, "{len} from {start}");
                    assert_eq!(to[..start], before[..start]);
                    assert_eq!(to[start + len..], before[start + len..]);
                }
            }
        }
    }

    #[test]
    fn the_shortest_operand_ends_the_streams() {
        let (a, mut to) = ([2.0; 70], [1.0; 90]);
        run([Some(&a), Some(&a[..50])], &mut to);
        assert_eq!((to[49], to[50]), (6.0, 1.0));
    }
}
