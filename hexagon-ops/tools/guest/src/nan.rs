//! Products of a row with an element that is not finite.

use hexagon_ops::layout::{Line, PanelLayout, TILE_DIM, Tile, WeightType};
use hexagon_ops::ops::matmul::Panel;
use hexagon_ops::ops::matmul::act::{RowFactors, pack_rows, unpack_tile};
use hexagon_ops::ops::matmul::gemv::{act_form, gemv_strip, gemv_two_digits};
use hexagon_ops::ops::matmul::quantize::{ActRow, act_lines, quantize_row, quantize_row_twice};

use crate::scratch::Scratch;

/// Elements along K.
const K: usize = 256;
/// Lines of the largest panel: Q8_0.
const LINES: usize = K / TILE_DIM * 8 + K / TILE_DIM / 2;

static PANEL: [Line; LINES] = [Line::ZERO; LINES];
static ACTS: Scratch<[[Line; act_lines(K)]; 2]> = Scratch::new([[Line::ZERO; act_lines(K)]; 2]);
static TILES: Scratch<[Tile; K / TILE_DIM]> = Scratch::new([Tile::ZERO; K / TILE_DIM]);
static OUT: Scratch<[[f32; TILE_DIM]; TILE_DIM]> = Scratch::new([[0.0; TILE_DIM]; TILE_DIM]);

/// Multiplies a row of ones, in which one element has the given bits, and writes 32 results of each
/// code path: dot products with activations of 8 and of 16 bits for Q4_0 and for Q8_0, all weights
/// zero; then the matrix unit's, whose second row is finite: two rows.
pub fn run(bits: u32, write: &mut dyn FnMut(&[u8])) -> bool {
    let mut row = [1.0; K];
    row[77] = f32::from_bits(bits);
    // SAFETY: the only reference to ACTS.
    let [first, rest] = unsafe { ACTS.get() };
    for weight in [WeightType::Q4_0, WeightType::Q8_0] {
        let Ok(panel) = PanelLayout::new(weight, K)
            .and_then(|layout| Panel::new(layout, &PANEL[..layout.panel_lines()]))
        else {
            return false;
        };
        let form = act_form(weight);
        let mut columns = [0.0; TILE_DIM];
        let one = quantize_row(&row, form, first)
            .and_then(|()| gemv_strip(&panel, ActRow::new(first)?, &mut columns));
        write(bytemuck::cast_slice(&columns));
        let two = quantize_row_twice(&row, form, [first, rest]).and_then(|()| {
            gemv_two_digits(
                &panel,
                [ActRow::new(first)?, ActRow::new(rest)?],
                &mut columns,
            )
        });
        write(bytemuck::cast_slice(&columns));
        if one.is_err() || two.is_err() {
            return false;
        }
    }
    // SAFETY: the only reference to TILES.
    let tiles = unsafe { TILES.get() };
    // SAFETY: the only reference to OUT.
    let out = unsafe { OUT.get() };
    let mut factors: RowFactors = bytemuck::Zeroable::zeroed();
    let rows = [row, [1.0; K]];
    pack_rows(|i| rows.get(i).map(|row| &row[..]), tiles, &mut factors);
    unpack_tile(&Tile::ZERO, &factors, out);
    write(bytemuck::cast_slice(&out[..2]));
    true
}
