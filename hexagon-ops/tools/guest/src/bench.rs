//! Packets per unit of work of each kernel, warm, by QEMU's packet counter.
//!
//! SOURCE: control register 20 counts packets in qemu-hexagon's user mode; LLVM does not know its
//! name, hence `.word`.

use core::arch::asm;
use core::fmt::{self, Write};
use core::hint::black_box;

use crate::conventional;
use crate::scratch::Scratch;
use hexagon_ops::hmx::{Form, Hmx};
use hexagon_ops::hvx;
use hexagon_ops::layout::{F16_TILE_LINES, LINE_BYTES, Line, PanelLayout, TILE_DIM, Tile, WeightType};
use hexagon_ops::ops::attention::{
    Attention, ExpTable, STRIPS, Sources, TABLE_TILES, attention, exponentials,
};
use hexagon_ops::ops::elementwise::{Glu, glu};
use hexagon_ops::ops::math;
use hexagon_ops::ops::matmul::dequantize::dequantize;
use hexagon_ops::ops::matmul::gemv::{gemv_strip, gemv_two_rows, gemv_two_strips};
use hexagon_ops::ops::matmul::quantize::{ActForm, ActRow, act_lines, quantize_row};
use hexagon_ops::ops::matmul::{Machine, Panel};
use hexagon_ops::ops::rows::{Norm, Rope, RopePairs, norm, rope};
use hexagon_ops::ops::tensor::{Shape, Source, Type, View, ViewMut};
use hexagon_ops::rt::Engine;

/// Elements along K of each measured kernel.
const K: usize = 1024;
/// Tiles of a panel.
const TILES: usize = K / TILE_DIM;
/// Elements of a head of keys and values.
const HEAD: usize = 64;
/// Most query rows of an attention.
const QUERIES: usize = 64;
/// Lines of the largest panel: Q8_0.
const LINES: usize = TILES * 8 + TILES / 2;

static LINES_OF_PANEL: [Line; LINES] = [Line::ZERO; LINES];
/// 32 rows of blocks of Q4_0, and the bytes after them that a load of the last two also reads.
static ROWS_OF_BLOCKS: [Line; TILES * TILE_DIM * 18 / LINE_BYTES + 1] =
    [Line::ZERO; TILES * TILE_DIM * 18 / LINE_BYTES + 1];
static ACT_LINES: [Line; act_lines(K)] = [Line::ZERO; act_lines(K)];
static ROW: [f32; K] = [1.0; K];

static OUT: Scratch<[Tile; TILES]> = Scratch::new([Tile::ZERO; TILES]);
static QUANTIZED: Scratch<[Line; act_lines(K)]> = Scratch::new([Line::ZERO; act_lines(K)]);

static TABLE: Scratch<ExpTable> = Scratch::new(ExpTable::new());
static SCORES: Scratch<[Tile; STRIPS]> = Scratch::new([Tile::ZERO; STRIPS]);
static RESULT: Scratch<[f32; K]> = Scratch::new([0.0; K]);

static VTCM: Scratch<[Tile; 512]> = Scratch::new([Tile::ZERO; 512]);
static CACHE: [Line; K * HEAD * 4 / LINE_BYTES] =
    [Line([0x3c; LINE_BYTES]); K * HEAD * 4 / LINE_BYTES];
static QUERY_ROWS: [f32; QUERIES * HEAD] = [0.25; QUERIES * HEAD];
static ATTENDED: Scratch<[f32; QUERIES * HEAD]> = Scratch::new([0.0; QUERIES * HEAD]);

/// A row of K elements.
const SHAPE: Shape = Shape {
    dtype: Type::F32,
    ne: [K, 1, 1, 1],
    nb: [4, 0, 0, 0],
};

/// Returns the packet counter.
pub fn packets() -> u32 {
    let count;
    // SAFETY: reads a counter into r0.
    unsafe { asm!(".word 0x6a14c000", out("r0") count, options(nomem, nostack)) };
    count
}

/// Returns the packets of the second call of `kernel`, in hundredths per `units`.
fn measure(units: usize, mut kernel: impl FnMut()) -> u32 {
    kernel();
    let start = packets();
    kernel();
    let spent = packets().wrapping_sub(start);
    (spent * 100 + units as u32 / 2) / units as u32
}

/// A function to which text is written.
pub struct Text<'a>(pub &'a mut dyn FnMut(&str));

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
        ("q4_tile", WeightType::Q4Tile),
        ("q8_tile", WeightType::Q8Tile),
        ("q4_k", WeightType::Q4K),
        ("q5_0", WeightType::Q5_0),
        ("q6_k", WeightType::Q6K),
        ("q5_1", WeightType::Q5_1),
        ("q5_k", WeightType::Q5K),
        ("iq4_xs", WeightType::Iq4Xs),
        ("q3_k", WeightType::Q3K),
        ("q2_k", WeightType::Q2K),
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
        if !weight.has_dot_product() {
            continue;
        }
        let (mut a, mut b) = ([0.0; TILE_DIM], [0.0; TILE_DIM]);
        let Ok(act) = ActRow::new(&ACT_LINES) else {
            return;
        };
        line(
            "gemv_1x1_",
            name,
            measure(TILES, || {
                let _ = black_box(gemv_strip(black_box(&panel), act, &mut a));
            }),
        );
        line(
            "gemv_2x1_",
            name,
            measure(2 * TILES, || {
                let _ = black_box(gemv_two_strips(
                    [black_box(&panel), black_box(&panel)],
                    act,
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
                    [act, act],
                    [&mut a, &mut b],
                ));
            }),
        );
    }
    // SAFETY: the only reference to QUANTIZED.
    let quantized = unsafe { QUANTIZED.get() };
    line(
        "quantize",
        "",
        measure(K, || {
            let _ = black_box(quantize_row(black_box(&ROW), ActForm::Nibbles, quantized));
        }),
    );
    rows(&mut line);
    attentions(&mut line);
    bytes(&mut line);
    conventional_kernels(&mut line);
}

/// Kernels of the comparison, per tile and per 1024 elements.
fn conventional_kernels(line: &mut dyn FnMut(&str, &str, u32)) {
    // SAFETY: the only reference to OUT: `run` has used its own for the last time.
    let out = unsafe { OUT.get() };
    let rows: &[u8] = bytemuck::cast_slice(&ROWS_OF_BLOCKS);
    line(
        "conventional_rows_",
        "q4_0",
        measure(TILES, || {
            black_box(conventional::dequantize_rows(black_box(rows), TILES, out));
        }),
    );
    let (quants, scales) = LINES_OF_PANEL.split_at(4 * TILES);
    let quants = quants.as_chunks::<4>().0;
    line(
        "conventional_tiles_",
        "q4_0",
        measure(TILES, || {
            conventional::dequantize_tiles(black_box(quants), black_box(scales), out);
        }),
    );
    let row = &mut out[0].0;
    line(
        "conventional_exp_",
        "f16",
        measure(1, || {
            let (even, odd) = conventional::exponentials(black_box(row), hvx::splat_h(0x3c00));
            black_box(hvx::add_f32(even, odd));
        }),
    );
}

/// Copies and fills of some lengths, per call; `odd` from an odd address.
fn bytes(line: &mut dyn FnMut(&str, &str, u32)) {
    // SAFETY: the only reference to RESULT: `rows` has returned.
    let to: &mut [u8] = bytemuck::cast_slice_mut(unsafe { RESULT.get() });
    let from: &[u8] = bytemuck::cast_slice(&ROW);
    for (name, start, bytes) in [("36", 0, 36), ("512", 0, 512), ("2000_odd", 1, 2000)] {
        let from = &from[start..][..bytes];
        let to = &mut to[..bytes];
        line("memcpy_", name, measure(1, || black_box(&mut *to).copy_from_slice(black_box(from))));
        line("memset_", name, measure(1, || black_box(&mut *to).fill(black_box(1))));
    }
}

/// Whole attentions of a head to 1024 positions, per position.
fn attentions(line: &mut dyn FnMut(&str, &str, u32)) {
    // SAFETY: the only reference to TABLE: `rows` has returned.
    let table = unsafe { TABLE.get() };
    // SAFETY: the only reference to VTCM.
    let vtcm = unsafe { VTCM.get() };
    let (vtcm, place) = vtcm.split_at_mut(512 - TABLE_TILES);
    let table = table.resident(place);
    // SAFETY: the only reference to ATTENDED.
    let attended = unsafe { ATTENDED.get() };
    // SAFETY: packets are counted in a guest without the unit's instructions.
    let mut hmx = unsafe { Hmx::assume_held(Form::Scaling) };
    let params = Attention {
        scale: 0.125,
        max_bias: 0.0,
        softcap: 0.0,
    };
    for (name, dtype, rows) in [
        ("attention_f16_r1", Type::F16, 1),
        ("attention_f16_r32", Type::F16, 32),
        ("attention_f16_r64", Type::F16, 64),
        ("attention_q8_0_r1", Type::Q8_0, 1),
        ("attention_f32_r1", Type::F32, 1),
        ("attention_f32_r8", Type::F32, 8),
    ] {
        let shape = |dtype: Type, ne: [usize; 4]| {
            let row_bytes = ne[0] / dtype.block() * dtype.block_bytes();
            let nb = [dtype.block_bytes(), row_bytes, ne[1] * row_bytes, 0];
            Shape { dtype, ne, nb }
        };
        let result = shape(Type::F32, [HEAD, 1, rows, 1]);
        let cache = View::new(bytemuck::cast_slice(&CACHE), shape(dtype, [HEAD, K, 1, 1]));
        let queries = View::new(
            bytemuck::cast_slice(&QUERY_ROWS),
            shape(Type::F32, [HEAD, rows, 1, 1]),
        );
        let mask = View::new(
            bytemuck::cast_slice(&CACHE),
            shape(Type::F16, [K, rows, 1, 1]),
        );
        let (Ok(cache), Ok(q), Ok(mask)) = (cache, queries, mask) else {
            return;
        };
        let src = Sources {
            q,
            k: cache,
            v: cache,
            mask: Some(mask),
            sinks: None,
        };
        // Keys and values are not copied here, but VTCM must have room for the bytes of the cache.
        vtcm.fill(Tile([CACHE[0]; F16_TILE_LINES]));
        let spent = measure(K, || {
            let Ok(dst) = ViewMut::new(bytemuck::cast_slice_mut(attended), result) else {
                return;
            };
            let machine = Machine {
                engine: &Engine::new(1),
                vtcm,
                hmx: &mut hmx,
            };
            let _ = black_box(attention(machine, &params, dst, &src, table));
        });
        line(name, "", spent);
    }
}

/// Kernels on rows of activations, per 1024 elements.
fn rows(line: &mut dyn FnMut(&str, &str, u32)) {
    // SAFETY: the only reference to TABLE.
    let table = unsafe { TABLE.get() }.lines();
    // SAFETY: the only reference to SCORES.
    let scores = unsafe { SCORES.get() };
    line(
        "soft_max_inner",
        "",
        measure(STRIPS, || {
            for two in 0..TILE_DIM / 4 {
                let largest = [hvx::splat_h(0x3c00); 2];
                black_box(exponentials(black_box(table), scores, two, largest));
            }
        }),
    );
    // SAFETY: the only reference to RESULT.
    let result = unsafe { RESULT.get() };
    line(
        "exp_f32",
        "",
        measure(1, || {
            let rows = black_box(&ROW).as_chunks::<32>().0;
            for (out, x) in result.as_chunks_mut::<32>().0.iter_mut().zip(rows) {
                hvx::store_f32(out, math::exp(hvx::load_f32(x)));
            }
            black_box(&*result);
        }),
    );
    let engine = Engine::new(1);
    let row = || View::new(bytemuck::cast_slice(black_box(&ROW)), SHAPE).ok();
    let Some(view) = row() else { return };
    let src = Source::Apart(view);
    let sources = [src, Source::None, Source::None];
    line(
        "rms_norm",
        "",
        measure(1, || {
            if let Ok(dst) = ViewMut::new(bytemuck::cast_slice_mut(result), SHAPE) {
                let _ = black_box(norm(&engine, Norm::Rms(1e-6), dst, &sources));
            }
        }),
    );
    line(
        "swiglu",
        "",
        measure(1, || {
            if let Ok(dst) = ViewMut::new(bytemuck::cast_slice_mut(result), SHAPE) {
                let _ = black_box(glu(&engine, Glu::Swiglu, false, dst, [&src, &src]));
            }
        }),
    );
    // Sixteen heads of 64 elements at one position.
    let heads = Shape {
        ne: [64, K / 64, 1, 1],
        nb: [4, 256, 0, 0],
        ..SHAPE
    };
    let place = Shape {
        dtype: Type::I32,
        ne: [1; 4],
        nb: [0; 4],
    };
    let rotation = Rope {
        pairs: RopePairs::Halves,
        sections: None,
        is_inverse: false,
        n_dims: 64,
        first: 0,
        n_ctx_orig: 0,
        freq_base: 1e4,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    let position = [7_i32];
    let operands = (
        View::new(bytemuck::cast_slice(&ROW), heads),
        View::new(bytemuck::cast_slice(&position), place),
    );
    let (Ok(elems), Ok(positions)) = operands else {
        return;
    };
    let src = [Source::Apart(elems), Source::Apart(positions), Source::None];
    line(
        "rope",
        "",
        measure(1, || {
            if let Ok(dst) = ViewMut::new(bytemuck::cast_slice_mut(result), heads) {
                let _ = black_box(rope(&engine, rotation, dst, &src));
            }
        }),
    );
}
