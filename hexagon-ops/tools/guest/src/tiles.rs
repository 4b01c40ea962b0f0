//! Weights of any type to FP16 tiles, for a comparison with exact values on the host.

use hexagon_ops::layout::{Line, PanelLayout, TILE_DIM, Tile, WeightType};
use hexagon_ops::ops::matmul::Panel;
use hexagon_ops::ops::matmul::dequantize::dequantize;

use crate::samples::TILE_K;
use crate::scratch::Scratch;

/// Tiles of a panel.
const TILES: usize = TILE_K / TILE_DIM;
/// Lines of the largest panel: Q8_0.
const LINES: usize = TILES * 8 + TILES / 2;

static PANEL: Scratch<[Line; LINES]> = Scratch::new([Line::ZERO; LINES]);
static OUT: Scratch<[Tile; TILES]> = Scratch::new([Tile::ZERO; TILES]);

/// Reads a panel of the type with index `weight` in [`WeightType::ALL`], and writes its tiles.
/// Returns `false` if the panel does not exist.
pub fn run(
    weight: usize,
    read: &mut dyn FnMut(&mut [u8]) -> bool,
    write: &mut dyn FnMut(&[u8]),
) -> bool {
    // SAFETY: the only reference to PANEL.
    let panel = unsafe { PANEL.get() };
    // SAFETY: the only reference to OUT.
    let out = unsafe { OUT.get() };
    let Some(layout) = WeightType::ALL
        .get(weight)
        .and_then(|weight| PanelLayout::new(*weight, TILE_K).ok())
    else {
        return false;
    };
    let Some(lines) = panel.get_mut(..layout.panel_lines()) else {
        return false;
    };
    if !read(bytemuck::cast_slice_mut(lines)) {
        return false;
    }
    let is_done =
        Panel::new(layout, lines).is_ok_and(|panel| dequantize(&panel, 0..TILES, out).is_ok());
    if is_done {
        write(bytemuck::cast_slice(out));
    }
    is_done
}
