//! Packs rows of ggml's blocks into panels, and unpacks them. Types with a packed form keep every
//! bit. BF16 and F32 become F16; all others are quantized again to blocks of Q8_0, whose error is
//! far below that of these types.

use std::ops::Range;

use half::{bf16, f16};
use hexagon_ops::layout::{MatrixLayout, TILE_DIM};
use rayon::prelude::*;

use super::layout::{Conversion, WeightLayout};
use crate::packfile::LayoutTag;
use crate::tensor::{DType, Dequantize};

/// Elements and bytes of a block of Q8_0.
const Q8_0: (usize, usize) = (32, 34);

/// Returns the tag of bytes that are packed in this layout.
pub(crate) fn tag(layout: &WeightLayout) -> LayoutTag {
    let (matrix, [s2, s3]) = (layout.matrix, layout.slices);
    let shape = [matrix.panel().k(), matrix.n(), s2, s3];
    LayoutTag::hexagon(layout.weight(), shape, layout.form != Conversion::Lossless)
}

/// Returns the layout of one panel as a separate matrix.
pub(super) fn panel_of(layout: MatrixLayout) -> MatrixLayout {
    let panel = layout.panel();
    // PANIC: the type and K are those of a layout that exists.
    MatrixLayout::new(panel.weight(), TILE_DIM, panel.k()).expect("a panel of an existing layout")
}

/// Returns the rows of ggml's tensor that a panel holds.
fn panel_rows(layout: &WeightLayout, panel: usize) -> Range<usize> {
    let (strips, n) = (layout.matrix.n_strips(), layout.matrix.n());
    let first = panel % strips * TILE_DIM;
    let matrix = panel / strips * n;
    matrix + first..matrix + (first + TILE_DIM).min(n)
}

/// Returns the place of a row of ggml's tensor: its panel, and its number in the panel.
fn panel_of_row(layout: &WeightLayout, row: usize) -> (usize, usize) {
    let (strips, n) = (layout.matrix.n_strips(), layout.matrix.n());
    (row / n * strips + row % n / TILE_DIM, row % n % TILE_DIM)
}

/// Returns the panels that hold a range of rows.
fn panels_of(layout: &WeightLayout, rows: &Range<usize>) -> Range<usize> {
    match rows.end.checked_sub(1) {
        Some(last) if last >= rows.start => {
            panel_of_row(layout, rows.start).0..panel_of_row(layout, last).0 + 1
        }
        _ => 0..0,
    }
}

/// Returns the bytes of the packed form that hold a range of rows.
pub(super) fn bytes_of(layout: &WeightLayout, rows: &Range<usize>) -> Range<usize> {
    let (panels, bytes) = (
        panels_of(layout, rows),
        panel_of(layout.matrix).matrix_bytes(),
    );
    panels.start * bytes..panels.end * bytes
}

/// Packed bytes that are made at a time. Between pieces the device may use the tensor's buffer.
const PIECE_BYTES: usize = 4 << 20;

/// Cuts rows into parts whose panels have about [`PIECE_BYTES`]; no panel has rows of two parts.
pub(super) fn pieces(layout: &WeightLayout, touched: Range<usize>) -> Vec<Range<usize>> {
    let panels = panels_of(layout, &touched);
    let count = (PIECE_BYTES / panel_of(layout.matrix).matrix_bytes()).max(1);
    let starts = panels.clone().step_by(count);
    let part = |first: usize| {
        let last = (first + count).min(panels.end) - 1;
        let (from, to) = (
            panel_rows(layout, first).start,
            panel_rows(layout, last).end,
        );
        from.max(touched.start)..to.min(touched.end)
    };
    starts.map(part).collect()
}

/// Packs the rows in `touched`; the others keep their bytes.
///
/// - `packed`: the bytes of the rows ([`bytes_of`])
/// - `row(number, out)`: writes bytes of a row in the layout's own type to `out`, which holds the
///   packed ones if `whole(number)` is false
pub(super) fn pack(
    layout: &WeightLayout,
    packed: &mut [u8],
    touched: Range<usize>,
    whole: impl Fn(usize) -> bool + Sync,
    row: impl Fn(usize, &mut [u8]) + Sync,
) {
    let row_bytes = layout.matrix.ggml_row_bytes();
    let panel_layout = panel_of(layout.matrix);
    let first = panels_of(layout, &touched).start;
    let panels = packed.par_chunks_exact_mut(panel_layout.matrix_bytes());
    panels.enumerate().for_each_init(
        || vec![0; row_bytes],
        |bytes, (index, panel)| {
            for (n, number) in panel_rows(layout, first + index).enumerate() {
                if !touched.contains(&number) {
                    continue;
                }
                // PANIC: the layout gave the sizes and the row numbers.
                if !whole(number) {
                    (panel_layout.unpack_row(panel, n, bytes)).expect("a row of the layout");
                }
                row(number, bytes);
                (panel_layout.pack_row(panel, n, bytes)).expect("a row of the layout");
            }
        },
    );
}

/// Packs rows that follow one another in ggml's layout; groups of a pack do not. Panels all of
/// whose rows are touched are written whole, padding too; in other panels the padding keeps its
/// bytes.
///
/// - `packed`: the bytes of the rows ([`bytes_of`])
/// - `rows`: all rows of the tensor
pub(crate) fn pack_rows(
    layout: &WeightLayout,
    packed: &mut [u8],
    touched: Range<usize>,
    rows: &[u8],
    dequantize: Option<&dyn Dequantize>,
) {
    assert_ne!(
        layout.form,
        Conversion::Groups,
        "groups are not made of ggml's rows"
    );
    let source_bytes = rows.len() / (layout.count() * layout.matrix.n());
    let source = |number: usize| &rows[number * source_bytes..][..source_bytes];
    let matrix = panel_of(layout.matrix);
    let (panel_layout, row_bytes) = (matrix.panel(), matrix.ggml_row_bytes());
    let first = panels_of(layout, &touched).start;
    let panels = packed.par_chunks_exact_mut(matrix.matrix_bytes());
    panels.enumerate().for_each_init(
        || Work::new(layout),
        |work, (index, panel)| {
            let numbers = panel_rows(layout, first + index);
            let whole = touched.start <= numbers.start && numbers.end <= touched.end;
            let bytes = match (layout.form, dequantize) {
                (form, Some(dequantize)) if form.needs_values() => {
                    let converted = work.rows.chunks_exact_mut(row_bytes);
                    for (number, out) in numbers.clone().zip(converted) {
                        dequantize.dequantize(source(number), &mut work.values);
                        match form {
                            Conversion::Halved => halve(&work.values, out),
                            _ => quantize_q8_0(&work.values, out),
                        }
                    }
                    &work.rows[..numbers.len() * row_bytes]
                }
                _ => &rows[numbers.start * row_bytes..numbers.end * row_bytes],
            };
            if whole {
                // PANIC: the layout gave the sizes and the row numbers.
                (panel_layout.pack_panel(panel, bytes)).expect("a panel of the layout");
                return;
            }
            let each = numbers.zip(bytes.chunks_exact(row_bytes)).enumerate();
            for (n, (_, row)) in each.filter(|(_, (number, _))| touched.contains(number)) {
                // PANIC: as above.
                (matrix.pack_row(panel, n, row)).expect("a row of the layout");
            }
        },
    );
}

/// Scratch of one thread, for types that change: the values of a row, and the rows of a panel.
struct Work {
    values: Vec<f32>,
    rows: Vec<u8>,
}

impl Work {
    fn new(layout: &WeightLayout) -> Self {
        if !layout.form.needs_values() {
            return Self {
                values: Vec::new(),
                rows: Vec::new(),
            };
        }
        Self {
            values: vec![0.0; layout.matrix.panel().k()],
            rows: vec![0; TILE_DIM * layout.matrix.ggml_row_bytes()],
        }
    }
}

/// Rounds a row to F16.
fn halve(values: &[f32], out: &mut [u8]) {
    for (half, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *half = f16::from_f32(*value).to_le_bytes();
    }
}

/// Returns a finite value of weights that become F16 but that F16 has no finite value for.
pub(crate) fn beyond_f16(layout: &WeightLayout, dtype: DType, rows: &[u8]) -> Option<f32> {
    if layout.form != Conversion::Halved {
        return None;
    }
    let is_beyond = |value: &f32| value.is_finite() && f16::from_f32(*value).is_infinite();
    if dtype == DType::Bf16 {
        let values = rows.as_chunks().0.par_iter();
        let values = values.map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
        values.find_any(is_beyond)
    } else {
        let values = rows.as_chunks().0.par_iter();
        let values = values.map(|bytes| f32::from_le_bytes(*bytes));
        values.find_any(is_beyond)
    }
}

/// Quantizes a row to blocks of Q8_0.
///
/// SOURCE: ggml's `quantize_row_q8_0_ref`: the scale is the largest magnitude over 127, kept as
/// FP16.
fn quantize_q8_0(values: &[f32], out: &mut [u8]) {
    let blocks = out
        .chunks_exact_mut(Q8_0.1)
        .zip(values.chunks_exact(Q8_0.0));
    for (block, values) in blocks {
        let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { scale.recip() };
        block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        for (byte, value) in block[2..].iter_mut().zip(values) {
            #[expect(clippy::cast_possible_truncation, reason = "at most 127 in magnitude")]
            let level = (value * inverse).round() as i8;
            *byte = level.cast_unsigned();
        }
    }
}

/// Restores the bytes of a tensor, starting at `first`, for layouts that keep every bit.
///
/// - `packed`: the packed bytes ([`bytes_of`]) of the rows that contain these bytes
pub(super) fn unpack(layout: &WeightLayout, packed: &[u8], first: usize, out: &mut [u8]) {
    let row_bytes = layout.matrix.ggml_row_bytes();
    let panel_layout = panel_of(layout.matrix);
    let first_panel = panel_of_row(layout, first / row_bytes).0;
    let mut row = vec![0; row_bytes];
    let mut done = 0;
    while done < out.len() {
        let within = (first + done) % row_bytes;
        let (panel, n) = panel_of_row(layout, (first + done) / row_bytes);
        let at = (panel - first_panel) * panel_layout.matrix_bytes();
        let bytes = &packed[at..at + panel_layout.matrix_bytes()];
        // PANIC: the layout gave the sizes and the row numbers.
        (panel_layout.unpack_row(bytes, n, &mut row)).expect("a row of the layout");
        let count = (row_bytes - within).min(out.len() - done);
        out[done..done + count].copy_from_slice(&row[within..within + count]);
        done += count;
    }
}

/// Returns the bytes of a row in ggml's layout.
pub(super) fn row_bytes(layout: &WeightLayout, dtype: DType) -> usize {
    dtype.row_bytes(layout.matrix.panel().k()).unwrap_or(0)
}
