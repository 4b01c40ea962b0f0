//! Packets per unit of work of each kernel, warm, by QEMU's packet counter.
//!
//! SOURCE: control register 20 counts packets in qemu-hexagon's user mode; LLVM does not know its name, hence `.word`.

use core::arch::asm;
use core::fmt::{self, Write};
use core::hint::black_box;

use crate::scratch::Scratch;
use hexagon_ops::layout::{Line, PanelLayout, TILE_DIM, Tile, WeightType};
use hexagon_ops::ops::matmul::Panel;
use hexagon_ops::ops::matmul::dequantize::dequantize;
use hexagon_ops::ops::matmul::gemv::{gemv_strip, gemv_two_rows, gemv_two_strips};
use hexagon_ops::ops::matmul::quantize::{ActGroup, quantize_row};

/// Elements along K of every kernel measured.
const K: usize = 1024;
/// Tiles of a panel.
const TILES: usize = K / TILE_DIM;
/// Lines of the largest panel: Q8_0.
const LINES: usize = TILES * 8 + TILES / 2;

static LINES_OF_PANEL: [Line; LINES] = [Line::ZERO; LINES];
static ACTS: [ActGroup; 1] = [ActGroup::ZERO];
static ROW: [f32; K] = [1.0; K];

static OUT: Scratch<[Tile; TILES]> = Scratch::new([Tile::ZERO; TILES]);
static GROUPS: Scratch<[ActGroup; 1]> = Scratch::new([ActGroup::ZERO; 1]);

/// The packet counter.
fn packets() -> u32 {
    let count;
    // SAFETY: reads a counter into r0.
    unsafe { asm!(".word 0x6a14c000", out("r0") count, options(nomem, nostack)) };
    count
}

/// Packets of the second call of `kernel`, in hundredths per `units`.
fn measure(units: usize, mut kernel: impl FnMut()) -> u32 {
    kernel();
    let start = packets();
    kernel();
    let spent = packets().wrapping_sub(start);
    (spent * 100 + units as u32 / 2) / units as u32
}

struct Text<'a>(&'a mut dyn FnMut(&str));

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        (self.0)(text);
        Ok(())
    }
}

/// Writes one line per kernel: name, packets per tile (quantizer: per element) with two decimals.
pub fn run(write: &mut dyn FnMut(&str)) {
    let mut text = Text(write);
    let mut line = |kernel: &str, weight: &str, hundredths: u32| {
        let _ = writeln!(
            text,
            "{kernel}{weight} {}.{:02}",
            hundredths / 100,
            hundredths % 100
        );
    };
    // SAFETY: the only reference to OUT.
    let out = unsafe { OUT.get() };
    for (name, weight) in [
        ("q4_0", WeightType::Q4_0),
        ("q4_1", WeightType::Q4_1),
        ("q8_0", WeightType::Q8_0),
        ("iq4_nl", WeightType::Iq4Nl),
        ("mxfp4", WeightType::Mxfp4),
    ] {
        let Ok(layout) = PanelLayout::new(weight, K) else {
            return;
        };
        let Ok(panel) = Panel::new(layout, &LINES_OF_PANEL[..layout.panel_lines()]) else {
            return;
        };
        line(
            "dequantize_",
            name,
            measure(TILES, || {
                let _ = black_box(dequantize(black_box(&panel), 0..TILES, out));
            }),
        );
        let (mut a, mut b) = ([0.0; TILE_DIM], [0.0; TILE_DIM]);
        line(
            "gemv_1x1_",
            name,
            measure(TILES, || {
                let _ = black_box(gemv_strip(black_box(&panel), &ACTS, &mut a));
            }),
        );
        line(
            "gemv_2x1_",
            name,
            measure(2 * TILES, || {
                let _ = black_box(gemv_two_strips(
                    [black_box(&panel), black_box(&panel)],
                    &ACTS,
                    [&mut a, &mut b],
                ));
            }),
        );
        line(
            "gemv_1x2_",
            name,
            measure(TILES, || {
                let _ = black_box(gemv_two_rows(
                    black_box(&panel),
                    [&ACTS, &ACTS],
                    [&mut a, &mut b],
                ));
            }),
        );
    }
    // SAFETY: the only reference to GROUPS.
    let groups = unsafe { GROUPS.get() };
    line(
        "quantize",
        "",
        measure(K, || {
            let _ = black_box(quantize_row(black_box(&ROW), groups));
        }),
    );
}
