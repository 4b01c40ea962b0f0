//! Copies of a block's keys, values and mask to VTCM, while the block before it is computed.
//!
//! Loads of keys and values from memory would stall, because each is read once. The DMA engine
//! copies the rows of the next block, of this head or of the next one, into the buffers that the
//! current block does not use:
//!
//! ```text
//! block       0              1              2
//! copy     0  1              2              3 …
//! work        pack, attend   pack, attend   pack, attend
//! ```
//!
//! 1. **The mask decides first.** Where loads read the mask, it is looked at before a block is
//!    copied, so hidden blocks are not. A mask of many queries is copied itself, and a block that
//!    it hides is copied for nothing.
//! 2. **The next head has the same mask.** Its first visible block is that of this head, and a
//!    copied mask stays where it is.
//! 3. **Without room there are no copies.** Loads then read rows in place, after `l2fetch` of the
//!    next block's keys.

use core::ops::Range;

use super::Head;
use super::vtcm::{COPIES, Copied, CopyMemory, TilePlan, stride};
use crate::layout::{Line, TILE_DIM};
use crate::ops::attention::Job;
use crate::ops::attention::scores::BlockMask;
use crate::ops::tensor::{Shape, View};
use crate::rt::{CopyRows, CopyShape, Engine, cache};

/// Keys or values of a block, where its tasks read them.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheBlock<'a> {
    pub(super) view: View<'a>,
    /// Head and stream in the view.
    pub(super) head: [usize; 2],
    /// Position of the view's first row.
    pub(super) first: usize,
}

/// The operands of a block, where its tasks read them.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockOperands<'a> {
    pub(super) keys: CacheBlock<'a>,
    pub(super) values: CacheBlock<'a>,
    pub(super) mask: Option<BlockMask<'a>>,
}

/// A block of positions of a head, for some queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockPlace {
    pub(super) stream: usize,
    /// Number of the first query.
    pub(super) first: usize,
    pub(super) kv_head: usize,
    /// First position.
    pub(super) start: usize,
}

impl BlockPlace {
    /// Returns the place of the mask: blocks of all heads share it.
    fn of_mask(self) -> Self {
        Self { kv_head: 0, ..self }
    }

    /// Returns the positions of the block.
    fn positions(self, job: &Job<'_>, plan: &TilePlan) -> Range<usize> {
        self.start..job.positions.min(self.start + plan.strips * TILE_DIM)
    }
}

/// Buffers that swap: one is read while the other is filled.
struct Buffers<'v> {
    lines: [&'v mut [Line]; COPIES],
    /// The blocks that the buffers hold. Without buffers, the first is the block that was fetched
    /// last.
    held: [Option<BlockPlace>; COPIES],
    /// Number of the buffer of the current block.
    current: usize,
}

impl<'v> Buffers<'v> {
    fn new(lines: [&'v mut [Line]; COPIES]) -> Self {
        Self {
            lines,
            held: [None; COPIES],
            current: 0,
        }
    }

    /// Returns the bytes of the current buffer, and those of the second buffer, which will hold
    /// `place` afterwards; no bytes if one of the two holds it already.
    fn next(&mut self, place: BlockPlace) -> (&[u8], &mut [u8]) {
        let other = 1 - self.current;
        let is_held = self.held.contains(&Some(place));
        let [first, second] = &mut self.lines;
        let (current, to) = match self.current {
            0 => (&**first, &mut **second),
            _ => (&**second, &mut **first),
        };
        let to = if is_held { &mut [][..] } else { to };
        if !is_held {
            self.held[other] = Some(place);
        }
        (bytemuck::cast_slice(current), bytemuck::cast_slice_mut(to))
    }

    /// Makes the buffer that holds `place` the current one.
    fn turn_to(&mut self, place: BlockPlace) {
        if self.held[1 - self.current] == Some(place) {
            self.current = 1 - self.current;
        }
    }

    /// Returns the bytes of the current buffer.
    fn current(&self) -> &[u8] {
        bytemuck::cast_slice(&*self.lines[self.current])
    }
}

/// The places where the blocks of an attention are read, and the copies ahead of that.
pub(super) struct Ahead<'a, 'v> {
    job: &'a Job<'a>,
    plan: &'a TilePlan,
    engine: &'a Engine,
    keys: Buffers<'v>,
    values: Buffers<'v>,
    masks: Buffers<'v>,
}

impl<'a, 'v> Ahead<'a, 'v> {
    /// Returns an attention before its first copy.
    pub(super) fn new(
        job: &'a Job<'a>,
        plan: &'a TilePlan,
        engine: &'a Engine,
        memory: CopyMemory<'v>,
    ) -> Self {
        Self {
            job,
            plan,
            engine,
            keys: Buffers::new(memory.keys),
            values: Buffers::new(memory.values),
            masks: Buffers::new(memory.masks),
        }
    }

    /// Runs `run` and has the operands of `place` ready afterwards, for [`Self::work`].
    pub(super) fn bring(&mut self, place: BlockPlace, run: impl FnOnce()) {
        if self.plan.copied == Copied::Nothing {
            self.fetch(place);
            return run();
        }
        if self.keys.held.contains(&Some(place)) {
            run();
        } else {
            self.copy_beside(place, |_| run());
        }
        self.keys.turn_to(place);
        self.values.turn_to(place);
        self.masks.turn_to(place.of_mask());
    }

    /// Runs `run` with the operands of `place`, which [`Self::bring`] has copied, and copies those
    /// of `next` meanwhile.
    pub(super) fn work<R>(
        &mut self,
        place: BlockPlace,
        next: Option<BlockPlace>,
        run: impl FnOnce(&BlockOperands<'_>) -> R,
    ) -> R {
        let (job, plan) = (self.job, self.plan);
        if plan.copied == Copied::Nothing {
            if let Some(next) = next {
                self.fetch(next);
            }
            return run(&in_place(job, place));
        }
        if let Some(next) = next {
            return self.copy_beside(next, |current| run(&copied(job, plan, place, current)));
        }
        let current = [&self.keys, &self.values, &self.masks].map(Buffers::current);
        run(&copied(job, plan, place, current))
    }

    /// Copies the operands of a block while `run` uses the current buffers.
    #[inline(always)]
    fn copy_beside<R>(&mut self, place: BlockPlace, run: impl FnOnce([&[u8]; 3]) -> R) -> R {
        let engine = self.engine;
        let (current, mut copies) = self.next_copies(place);
        engine.beside(&mut copies, || run(current))
    }

    /// Returns the bytes of the current buffers of keys, values and mask, and the copies of a block
    /// to the buffers that are not current.
    #[inline(always)]
    fn next_copies(&mut self, place: BlockPlace) -> ([&[u8]; 3], [CopyRows<'_>; 3]) {
        let (job, plan) = (self.job, self.plan);
        let (keys, to_keys) = self.keys.next(place);
        let (values, to_values) = self.values.next(place);
        let (masks, to_masks) = self.masks.next(place.of_mask());
        let current = [keys, values, masks];
        let count = place.positions(job, plan).len();
        let row = [place.start, place.kv_head, place.stream];
        let cache = |view: &View<'a>, to| {
            let from = view.tail(view.shape.row(row));
            copy(from, to, plan.cache_copy(&view.shape, count))
        };
        let mask = job.src.mask.as_ref().map(|view| {
            let from = view.shape.row([place.first, 0, place.stream]) + 2 * place.start;
            let queries = plan.queries.min(job.src.q.shape.ne[1] - place.first);
            let shape = plan.mask_copy(&view.shape, queries, count);
            copy(view.tail(from), to_masks, shape)
        });
        let copies = [
            cache(&job.src.k, to_keys),
            cache(&job.src.v, to_values),
            mask.unwrap_or_else(|| copy(&[], &mut [], EMPTY)),
        ];
        (current, copies)
    }

    /// Prefetches the keys of a block, once. Keys are read before values, and a fetch of the values
    /// would end the fetch of the keys.
    fn fetch(&mut self, place: BlockPlace) {
        if self.keys.held.contains(&Some(place)) {
            return;
        }
        self.keys.held[0] = Some(place);
        let count = place.positions(self.job, self.plan).len();
        let View { shape, .. } = &self.job.src.k;
        let row = shape.row([place.start, place.kv_head, place.stream]);
        let rows = self.job.src.k.tail(row);
        cache::fetch_rows(rows.as_ptr(), count, shape.row_bytes(), shape.nb[1]);
    }
}

/// A copy of nothing.
const EMPTY: CopyShape = CopyShape {
    rows: 1,
    row_bytes: 0,
    from_stride: 0,
    to_stride: 0,
};

/// Returns a copy of rows, or one of nothing if `to` is empty.
fn copy<'b>(from: &'b [u8], to: &'b mut [u8], shape: CopyShape) -> CopyRows<'b> {
    let shape = if to.is_empty() { EMPTY } else { shape };
    // PANIC: `TilePlan` sized the buffers for these copies, and the rows are inside their tensor.
    match CopyRows::new(from, to, shape) {
        Some(copy) => copy,
        None => unreachable!("a copy outside of its tensor or buffer: {shape:?}"),
    }
}

/// Returns the operands of a block where they are in memory.
fn in_place<'a>(job: &Job<'a>, place: BlockPlace) -> BlockOperands<'a> {
    let cache = |view| CacheBlock {
        view,
        head: [place.kv_head, place.stream],
        first: 0,
    };
    BlockOperands {
        keys: cache(job.src.k),
        values: cache(job.src.v),
        mask: mask_in_place(job),
    }
}

/// Returns the mask where it is in memory.
fn mask_in_place<'a>(job: &Job<'a>) -> Option<BlockMask<'a>> {
    job.src.mask.map(|view| BlockMask {
        view,
        first_query: 0,
        first_position: 0,
    })
}

/// Returns the operands of a block in the current buffers.
fn copied<'b>(
    job: &Job<'b>,
    plan: &TilePlan,
    place: BlockPlace,
    [keys, values, mask]: [&'b [u8]; 3],
) -> BlockOperands<'b> {
    let view = |bytes, shape: &Shape, rows, stride| {
        let ne = [shape.ne[0], rows, 1, 1];
        let nb = [shape.nb[0], stride, 0, 0];
        View::bound(bytes, Shape { ne, nb, ..*shape })
    };
    let rows = plan.strips * TILE_DIM;
    let cache = |bytes, shape: &Shape| CacheBlock {
        view: view(bytes, shape, rows, stride(shape)),
        head: [0; 2],
        first: place.start,
    };
    BlockOperands {
        keys: cache(keys, &job.src.k.shape),
        values: cache(values, &job.src.v.shape),
        mask: match (&job.src.mask, plan.copied) {
            (Some(source), Copied::CacheAndMask) => {
                let mut view = view(mask, &source.shape, plan.queries, plan.mask_stride());
                view.shape.ne[0] = rows;
                Some(BlockMask {
                    view,
                    first_query: place.first,
                    first_position: place.start,
                })
            }
            _ => mask_in_place(job),
        },
    }
}

impl Head<'_> {
    /// Returns the place of a block of this head.
    pub(super) fn place(&self, start: usize) -> BlockPlace {
        BlockPlace {
            stream: self.stream,
            first: self.first,
            kv_head: self.kv_head,
            start,
        }
    }

    /// Returns the mask in its original place, if loads read it there.
    pub(super) fn mask_in_place(&self) -> Option<BlockMask<'_>> {
        mask_in_place(self.job)
    }

    /// Returns the first block after this head, as far as that is known: other queries may see
    /// other positions than `start`, which is the first that this head's see.
    pub(super) fn after(&self, start: usize) -> Option<BlockPlace> {
        let [_, queries, _, streams] = self.job.src.q.shape.ne;
        let mut place = self.place(start);
        place.kv_head += 1;
        if place.kv_head == self.job.kv_heads {
            (place.kv_head, place.start) = (0, 0);
            place.first += self.plan.queries;
        }
        if place.first >= queries {
            (place.first, place.stream) = (0, place.stream + 1);
        }
        (place.stream < streams).then_some(place)
    }
}
