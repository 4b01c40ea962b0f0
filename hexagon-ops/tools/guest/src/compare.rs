//! Results of the kernels of `conventional.rs`, for a comparison on the host.

use hexagon_ops::hvx;
use hexagon_ops::layout::{LINE_BYTES, Line, MatrixLayout, TILE_DIM, Tile, WeightType};

use crate::conventional;
use crate::samples::{self, K_TILES, ROW_BYTES, ROWS};
use crate::scratch::Scratch;

/// Lines of the weights, whose last blocks a load of a line reads beyond.
const WEIGHT_LINES: usize = ROWS * ROW_BYTES / LINE_BYTES + 1;
/// Lines of the weights in the library's order.
const PANEL_LINES: usize = K_TILES * 4 + K_TILES / 2;
/// Lines of the f16 that are zero or negative: infinity is the last one, and NaNs fill its line.
const NEGATIVE_LINES: usize = 0x7c00 * 2 / LINE_BYTES + 2;

static WEIGHTS: Scratch<[Line; WEIGHT_LINES]> = Scratch::new([Line::ZERO; WEIGHT_LINES]);
static PANEL: Scratch<[Line; PANEL_LINES]> = Scratch::new([Line::ZERO; PANEL_LINES]);
static TILES: Scratch<[Tile; K_TILES]> = Scratch::new([Tile::ZERO; K_TILES]);
static SCORES: Scratch<[Line; NEGATIVE_LINES]> = Scratch::new([Line::ZERO; NEGATIVE_LINES]);

/// Dequantizes the rows of a seed by both kernels, and writes the tiles of each. Returns `false` if
/// a kernel refuses them.
pub fn dequantize(seed: u32, write: &mut dyn FnMut(&[u8])) -> bool {
    // SAFETY: the only reference to WEIGHTS.
    let weights: &mut [u8] = bytemuck::cast_slice_mut(unsafe { WEIGHTS.get() });
    // SAFETY: the only reference to PANEL.
    let panel = unsafe { PANEL.get() };
    // SAFETY: the only reference to TILES.
    let tiles = unsafe { TILES.get() };
    let rows = samples::rows(seed);
    weights[..ROWS * ROW_BYTES].copy_from_slice(rows.as_flattened());
    if !conventional::dequantize_rows(weights, K_TILES, tiles) {
        return false;
    }
    write(bytemuck::cast_slice(tiles));
    let Ok(layout) = MatrixLayout::new(WeightType::Q4_0, ROWS, K_TILES * TILE_DIM) else {
        return false;
    };
    for (n, row) in rows.iter().enumerate() {
        if layout
            .pack_row(bytemuck::cast_slice_mut(panel), n, row)
            .is_err()
        {
            return false;
        }
    }
    *tiles = [Tile::ZERO; K_TILES];
    let (quants, scales) = panel.split_at(layout.panel().scale_plane_offset() / LINE_BYTES);
    conventional::dequantize_tiles(quants.as_chunks().0, scales, tiles);
    write(bytemuck::cast_slice(tiles));
    true
}

/// Writes the exponentials of all f16 from -0 to minus infinity, in the order of their bits, then
/// those of a row of 1024 and its sums: two lines of f32.
pub fn exponentials(write: &mut dyn FnMut(&[u8])) {
    // SAFETY: the only reference to SCORES.
    let scores = unsafe { SCORES.get() };
    let halves: &mut [u16] = bytemuck::cast_slice_mut(scores);
    for (half, bits) in halves.iter_mut().zip(0x8000..) {
        *half = bits;
    }
    let _ = conventional::exponentials(scores, hvx::splat_h(0));
    write(bytemuck::cast_slice(scores));
    // Differences from the largest score, up to 6.
    let row = &mut scores[..1024 * 2 / LINE_BYTES];
    let halves: &mut [u16] = bytemuck::cast_slice_mut(row);
    for (half, k) in halves.iter_mut().zip(0..) {
        *half = samples::score(k);
    }
    let (even, odd) = conventional::exponentials(row, hvx::splat_h(samples::LARGEST));
    write(bytemuck::cast_slice(row));
    let mut sums = [Line::ZERO; 2];
    hvx::store(&mut sums[0], even);
    hvx::store(&mut sums[1], odd);
    write(bytemuck::cast_slice(&sums));
}
