//! A whole multiplication, for an emulator or device that has the matrix unit: 64 rows, K of 64, 64
//! columns of Q4_0.

use hexagon_ops::hmx::{Form, Hmx};
use hexagon_ops::layout::{LINE_BYTES, Line, MatrixLayout, Tile, WeightType};
use hexagon_ops::ops::matmul::{Dots, Machine, MatMul, RowStarts};
use hexagon_ops::rt::Engine;

use crate::scratch::Scratch;

/// Rows, elements along K, columns.
const SIDE: usize = 64;
/// Lines of the packed weights: 2 panels of 2 tiles.
const LINES: usize = 2 * 2 * WeightType::Q4_0.tile_bytes() / LINE_BYTES;

static VTCM: Scratch<[Tile; 64]> = Scratch::new([Tile::ZERO; 64]);
static DST: Scratch<[f32; SIDE * SIDE]> = Scratch::new([0.0; SIDE * SIDE]);
static WEIGHTS: [Line; LINES] = [Line([0x3a; LINE_BYTES]); LINES];
static ACT: [f32; SIDE * SIDE] = [0.5; SIDE * SIDE];

/// Multiplies and writes the result's bytes; nothing if the arguments are refused.
pub fn run(write: &mut dyn FnMut(&[u8])) {
    // SAFETY: the only reference to VTCM.
    let vtcm = unsafe { VTCM.get() };
    // SAFETY: the only reference to DST.
    let dst = unsafe { DST.get() };
    // SAFETY: whoever sends this request runs the guest on a machine whose matrix unit is on and
    // accepts any memory.
    let mut hmx = unsafe { Hmx::assume_held(Form::Scaling) };
    let Ok(layout) = MatrixLayout::new(WeightType::Q4_0, SIDE, SIDE) else {
        return;
    };
    let job = MatMul {
        layout,
        weights: &WEIGHTS,
        m: SIDE,
        dots: Dots::TwoRows,
        act: &ACT,
        act_rows: RowStarts::Strided(SIDE),
        dst,
        dst_rows: RowStarts::Strided(SIDE),
        epilogue: None,
    };
    let machine = Machine {
        engine: &Engine::new(1),
        vtcm,
        hmx: &mut hmx,
    };
    if job.run(machine).is_ok() {
        write(bytemuck::cast_slice(dst));
    }
}
