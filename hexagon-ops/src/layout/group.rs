//! Groups of 2 × 16 weights: their elements, and their moves into panels and back.

use super::{PanelLayout, Q8_FLIP, WeightType};

/// Elements of a group along N, and along K.
pub const GROUP_DIMS: [usize; 2] = [16, 2];

/// Returns element `i` of group `g` of a tile as (k, n) within the tile. The first 16 have the even
/// k, the others the odd one.
#[must_use]
pub const fn group_elem(g: usize, i: usize) -> (usize, usize) {
    let [columns, rows] = GROUP_DIMS;
    (
        rows * (g / 2) + i / columns,
        columns * (g % 2) + i % columns,
    )
}

/// Returns the places of the nibbles of byte `c` of group `g` in a panel: the low one's, then the
/// high one's.
fn places(layout: PanelLayout, kt: usize, g: usize, c: usize) -> [(usize, u32); 2] {
    [c, c + GROUP_DIMS[0]].map(|i| {
        let (k, n) = group_elem(g, i);
        layout.elem(kt, k, n)
    })
}

/// Returns the place of byte `i` of group `g` in a panel of Q8Tile.
fn byte_place(layout: PanelLayout, kt: usize, g: usize, i: usize) -> usize {
    let (k, n) = group_elem(g, i);
    layout.elem(kt, k, n).0
}

/// Writes a group: its scale, and its quants. Nibbles are in bytes that other groups share.
pub(super) fn write_group(
    layout: PanelLayout,
    panel: &mut [u8],
    kt: usize,
    g: usize,
    block: &[u8],
) {
    panel[layout.scale_offset(kt, g)..][..2].copy_from_slice(&block[..2]);
    if layout.weight() == WeightType::Q8Tile {
        for (i, quant) in block[2..].iter().enumerate() {
            panel[byte_place(layout, kt, g, i)] = quant ^ Q8_FLIP;
        }
        return;
    }
    for (c, pair) in block[2..].iter().enumerate() {
        let values = [pair & 15, pair >> 4];
        for (value, (at, shift)) in values.into_iter().zip(places(layout, kt, g, c)) {
            panel[at] = panel[at] & !(15 << shift) | value << shift;
        }
    }
}

/// Reads a group as [`write_group`] wrote it.
pub(super) fn read_group(layout: PanelLayout, panel: &[u8], kt: usize, g: usize, block: &mut [u8]) {
    block[..2].copy_from_slice(&panel[layout.scale_offset(kt, g)..][..2]);
    if layout.weight() == WeightType::Q8Tile {
        for (i, quant) in block[2..].iter_mut().enumerate() {
            *quant = panel[byte_place(layout, kt, g, i)] ^ Q8_FLIP;
        }
        return;
    }
    for (c, pair) in block[2..].iter_mut().enumerate() {
        let [low, high] = places(layout, kt, g, c).map(|(at, shift)| panel[at] >> shift & 15);
        *pair = low | high << 4;
    }
}
