//! An arena of VTCM: hands out disjoint pieces of it, and fails if there is not enough.

use crate::error::{Error, Result};
use crate::layout::{F16_TILE_BYTES, F16_TILE_LINES, Line, Tile};

/// Returns the tiles that hold `count` lines. A product with the bytes of a line could exceed the
/// DSP's 32-bit words.
#[must_use]
pub const fn tiles_of_lines(count: usize) -> usize {
    count.div_ceil(F16_TILE_LINES)
}

/// The part of VTCM that is still free, in tiles of 2 KiB.
#[derive(Debug)]
pub struct Arena<'a> {
    rest: &'a mut [Tile],
}

impl<'a> Arena<'a> {
    /// Returns an arena of all of `vtcm`.
    #[must_use]
    pub fn new(vtcm: &'a mut [Tile]) -> Self {
        Self { rest: vtcm }
    }

    /// Returns the number of tiles that are still free.
    #[must_use]
    pub fn free_tiles(&self) -> usize {
        self.rest.len()
    }

    /// Takes `count` tiles for `what`.
    ///
    /// # Errors
    /// `VtcmFull` if fewer are left.
    pub fn tiles(&mut self, what: &'static str, count: usize) -> Result<&'a mut [Tile]> {
        let rest = core::mem::take(&mut self.rest);
        let have_bytes = rest.len() * F16_TILE_BYTES;
        match rest.split_at_mut_checked(count) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => Err(Error::VtcmFull {
                what,
                need_bytes: count.saturating_mul(F16_TILE_BYTES),
                have_bytes,
            }),
        }
    }

    /// Allocates `count` lines for `what`. The arena loses whole tiles.
    ///
    /// # Errors
    /// `VtcmFull` if fewer are left.
    pub fn lines(&mut self, what: &'static str, count: usize) -> Result<&'a mut [Line]> {
        let tiles = self.tiles(what, tiles_of_lines(count))?;
        Ok(&mut bytemuck::cast_slice_mut(tiles)[..count])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_hands_out_disjoint_pieces_and_then_refuses() {
        let mut vtcm = vec![Tile::ZERO; 4];
        let mut arena = Arena::new(&mut vtcm);
        let tiles = arena.tiles("tiles", 2).unwrap();
        let lines = arena.lines("lines", 17).unwrap();
        tiles.fill(Tile([Line([1; 128]); 16]));
        assert!(lines.len() == 17 && lines.iter().all(|line| *line == Line::ZERO));
        assert_eq!(
            arena.lines("more", 1),
            Err(Error::VtcmFull {
                what: "more",
                need_bytes: 2048,
                have_bytes: 0
            })
        );
    }

    /// `2^25` lines are 4 GiB: their bytes are 0 modulo `2^32`.
    #[test]
    fn more_lines_than_memory_has_bytes_are_refused() {
        let mut vtcm = vec![Tile::ZERO; 4];
        for count in [1 << 25, (1 << 25) + 16, usize::MAX] {
            let refused = Arena::new(&mut vtcm).lines("lines", count);
            assert!(
                matches!(refused, Err(Error::VtcmFull { .. })),
                "{count} lines"
            );
        }
    }
}
