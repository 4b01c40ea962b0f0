//! An arena of VTCM: hands out disjoint pieces, and never more than there is.

use crate::error::{Error, Result};
use crate::layout::{F16_TILE_BYTES, LINE_BYTES, Line, Tile};

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
                need_bytes: count * F16_TILE_BYTES,
                have_bytes,
            }),
        }
    }

    /// Takes `count` lines for `what`; whole tiles leave the arena.
    ///
    /// # Errors
    /// `VtcmFull` if fewer are left.
    pub fn lines(&mut self, what: &'static str, count: usize) -> Result<&'a mut [Line]> {
        let tiles = self.tiles(what, (count * LINE_BYTES).div_ceil(F16_TILE_BYTES))?;
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
}
