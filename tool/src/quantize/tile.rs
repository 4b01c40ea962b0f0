//! `--tile-group`: a pack next to the model whose weights are in groups of 2 × 16 instead of blocks
//! of 32 × 1.
//!
//! A tensor of the pack replaces the Q4_0 or Q8_0 one of the same name in the new model, whose
//! hashes it carries. Its weights are quantized from the source, as those of the model are, and not
//! from the model's.

use std::ops::Range;
use std::path::{Path, PathBuf};

use ggml_rust_npu::backend::offline::{Form, Weight};
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::{File, GgmlType, TensorInfo};
use ggml_rust_npu::hexagon;
use ggml_rust_npu::loss::SquaredLoss;
use ggml_rust_npu::packfile::{PackWriter, SourceHash, sampled};
use hexagon_ops::layout::{MatrixLayout, TILE_DIM, WeightType, group_elem};
use rayon::prelude::*;

use super::block::{BLOCK, Format, push_q4_0, push_q8_0, search_weights};
use super::job::{RowReader, TensorJob};
use crate::ToolError;
use crate::files::next_to;
use crate::progress::Progress;
use crate::text::say;

/// Returns the type of groups that replaces a type's blocks, if there is one.
pub fn grouped(format: Format) -> Option<WeightType> {
    match format {
        Format::Q4_0 => Some(WeightType::Q4Tile),
        Format::Q8_0 => Some(WeightType::Q8Tile),
        _ => None,
    }
}

/// Panels that are made between two writes.
const BATCH_PANELS: usize = 64;

/// Returns the pack's place: the model's name, with an ending that no other pack of it has.
pub fn path(output: &Path) -> PathBuf {
    next_to(output, ".groups.npu")
}

/// Refuses a model that there would be no pack of.
///
/// # Errors
/// Text for the user.
pub fn check(jobs: &[TensorJob]) -> Result<(), ToolError> {
    if jobs.iter().any(|job| job.tile_group.is_some()) {
        return Ok(());
    }
    Err("no weight of the model's blocks is Q4_0 or Q8_0, so there is none to group".into())
}

/// Writes the pack of a model that is there already.
///
/// - `output`: the model
/// - `how`: how both were made, in words
///
/// # Errors
/// Text for the user.
pub fn write(output: &Path, how: &str, source: &File, jobs: &[TensorJob]) -> Result<(), ToolError> {
    let jobs: Vec<(&TensorJob, WeightType)> = (jobs.iter())
        .filter_map(|job| Some((job, job.tile_group?)))
        .collect();
    let path = path(output);
    let model = File::open(output).map_err(|error| format!("{}: {error}", output.display()))?;
    let names = jobs.iter().map(|(job, _)| job.name.as_str());
    let mut writer = PackWriter::create(&path, "hexagon", how, names)?;
    let bytes = (jobs.iter())
        .map(|(job, _)| job.source.range.len() as u64)
        .sum();
    let progress = Progress::new("grouping", bytes);
    for (job, weight) in &jobs {
        let tensor = (model.header().tensor(&job.name))
            .ok_or_else(|| format!("{} is missing from {}", job.name, output.display()))?;
        let tensor = (tensor, model.data(tensor));
        write_weight((job, *weight), source, tensor, &mut writer)?;
        progress.add(job.source.range.len() as u64);
    }
    progress.finish();
    writer.finish()?;
    let bytes = std::fs::metadata(&path)?.len() as f64;
    let (count, mib) = (jobs.len(), bytes / f64::from(1 << 20));
    say(format_args!(
        "{}: {count} weights in groups, {mib:.1} MiB",
        path.display()
    ));
    Ok(())
}

/// Writes one weight.
///
/// - `weight`: its type of groups
/// - `tensor`, `data`: the weight in the model
fn write_weight(
    (job, weight): (&TensorJob, WeightType),
    source: &File,
    (tensor, data): (&TensorInfo, &[u8]),
    writer: &mut PackWriter,
) -> Result<(), ToolError> {
    let [k, n, s2, s3] = tensor.ne;
    let matrix = MatrixLayout::new(weight, n, k).map_err(|error| error.to_string())?;
    let rows = job.rows(source);
    // The panels, by matrix and strip, with the rows of each.
    let panels: Vec<Range<usize>> = (0..s2 * s3)
        .flat_map(|slice| {
            let strips = (0..n).step_by(TILE_DIM);
            strips.map(move |first| slice * n + first..slice * n + (first + TILE_DIM).min(n))
        })
        .collect();
    let mut error = SquaredLoss::default();
    for batch in panels.chunks(BATCH_PANELS) {
        let made: Vec<(Vec<u8>, SquaredLoss)> = (batch.par_iter())
            .map(|numbers| panel(job, &rows, matrix, numbers.clone()))
            .collect();
        for (bytes, lost) in made {
            writer.bytes(&bytes)?;
            error = error + lost;
        }
    }
    let form = Form::Hexagon(hexagon::layout::WeightLayout {
        matrix,
        slices: [s2, s3],
        form: hexagon::layout::Conversion::Groups,
    });
    let weight = Weight {
        name: &job.name,
        dtype: tensor.dtype,
        ne: tensor.ne,
        data,
        feedback: &[],
    };
    let hashes = [sampled(data), SourceHash::of(data)];
    writer.end(form.entry(&weight, hashes, error), &[])?;
    Ok(())
}

/// Quantizes the rows `numbers`, at most 32, into a panel; columns without a row are zeros.
fn panel(
    job: &TensorJob,
    rows: &RowReader,
    matrix: MatrixLayout,
    numbers: Range<usize>,
) -> (Vec<u8>, SquaredLoss) {
    let panel = matrix.panel();
    let (k, row_bytes) = (panel.k(), panel.ggml_row_bytes());
    // The ggml type whose blocks have the same meaning as these groups.
    let (is_searched, blocks) = match panel.weight() {
        WeightType::Q4Tile => (true, GgmlType::Q4_0),
        _ => (false, GgmlType::Q8_0),
    };
    // PANIC: the library's table has both types.
    let dequantize = dequantize::of(blocks).expect("a dequantizer");
    let mut values = vec![0.0; TILE_DIM * k];
    let mut weights = vec![0.0; TILE_DIM * k];
    for (column, number) in numbers.enumerate() {
        let row = &mut values[column * k..][..k];
        rows.read(number, row);
        if is_searched {
            let of_row = search_weights(row, job.importance_of(number));
            weights[column * k..][..k].copy_from_slice(&of_row);
        }
    }
    let mut error = SquaredLoss::default();
    let mut groups = Vec::with_capacity(TILE_DIM * row_bytes);
    for g in 0..TILE_DIM {
        for kt in 0..panel.k_tiles() {
            let of_group = |elems: &[f32]| -> [f32; BLOCK] {
                std::array::from_fn(|i| {
                    let (row, column) = group_elem(g, i);
                    elems[column * k + kt * TILE_DIM + row]
                })
            };
            let group = of_group(&values);
            if is_searched {
                push_q4_0(&group, Some(&of_group(&weights)), &mut groups);
            } else {
                push_q8_0(&group, &mut groups);
            }
            let mut have = [0.0; BLOCK];
            let bytes = groups.len() - panel.weight().block_bytes();
            dequantize.dequantize(&groups[bytes..], &mut have);
            error.add_row(&group, &have);
        }
    }
    let mut packed = vec![0; panel.panel_bytes()];
    // PANIC: the layout gave the sizes.
    (panel.pack_panel(&mut packed, &groups)).expect("32 rows of groups");
    (packed, error)
}
