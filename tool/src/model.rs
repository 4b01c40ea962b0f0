//! `ggml-npu model`: the speed of a model on a Hexagon NPU, as reckoned from counted packets.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use clap::builder::PossibleValuesParser;
use ggml_rust_npu::hexagon::caps::{self, HexCaps};
use serde::Serialize;

use self::cost::{Model, StepWork, cell_bytes};
use self::counts::{Counts, as_f64};
use self::shape::ModelShape;
use crate::ToolError;
use crate::files::Files;
use crate::text::{Column, print, print_json, table};

mod cost;
mod counts;
mod shape;

/// Vector threads of a chip.
const THREADS: u32 = caps::VECTOR_UNITS;
/// llama.cpp's own number of tokens that it computes at a time.
const UBATCH: u32 = 512;
/// Cells of a cache that a step reads are rounded up to a multiple of this.
// SOURCE: llama_kv_cache::get_n_kv and its padding, llama.cpp 0.5.0.
const CELLS: usize = 256;
/// Cells that are reckoned with at most: more than any model's context has.
const MAX_CELLS: usize = 1 << 24;

/// Reckon how fast a model would be on a Hexagon NPU
///
/// From packets that an emulator counted for whole operations, and from rates that are assumed or
/// published, which are printed: nothing was measured on a device. Compare models, types and sizes
/// with it, not devices. The host, sampling, waiting for memory and heat are not in it.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// The GGUF
    model: PathBuf,
    /// The chip
    #[arg(long, default_value = "hexagon-v75", value_parser = chips())]
    chip: String,
    /// Tokens in the context of each sequence
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "512,1024,2048,4096", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    context: Vec<u32>,
    /// Sequences that generate at the same time
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4,8,16,32", value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: Vec<u32>,
    /// All sequences read one context, such as samples of one answer
    #[arg(long)]
    shared: bool,
    /// Tokens of a prompt that are computed at a time
    #[arg(long, value_name = "N", default_value_t = UBATCH, value_parser = clap::value_parser!(u32).range(1..=4096))]
    ubatch: u32,
    /// Vector threads
    #[arg(long, value_name = "N", default_value_t = THREADS, value_parser = clap::value_parser!(u32).range(1..=16))]
    threads: u32,
    /// Packets of a thread in a microsecond [default: the chip's]
    #[arg(long, value_name = "N", value_parser = rate)]
    packets_per_us: Option<f64>,
    /// Bytes from memory in a nanosecond [default: the chip's]
    #[arg(long, value_name = "N", value_parser = rate)]
    memory_gb_per_s: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Returns the names of the chips, for an argument.
pub fn chips() -> PossibleValuesParser {
    PossibleValuesParser::new(caps::ALL.iter().map(|caps| caps.name))
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && f64::is_finite(rate) => Ok(rate),
        _ => Err("a number above 0 is wanted".into()),
    }
}

/// Generation by some sequences.
#[derive(Debug, Serialize)]
struct GenerationRow {
    context: u32,
    batch: u32,
    tokens_per_s: f64,
    commands: usize,
    step_us: f64,
    memory_us: f64,
    vector_us: f64,
    matrix_us: f64,
    weight_bytes: f64,
    packets: f64,
    tile_products: f64,
}

/// Reading of a prompt.
#[derive(Debug, Serialize)]
struct Prompt {
    tokens: u32,
    tokens_per_s: f64,
}

/// Everything that the command prints.
#[derive(Debug, Serialize)]
struct Report {
    chip: String,
    threads: u32,
    packets_per_us: f64,
    memory_gb_per_s: f64,
    matrix_gflops: f64,
    model_bytes: usize,
    cache_bytes_per_token: usize,
    generation: Vec<GenerationRow>,
    prompts: Vec<Prompt>,
}

impl Report {
    fn new(args: &ModelArgs, caps: &HexCaps, shape: &ModelShape) -> Self {
        let mut rates = caps.rates;
        rates.packets_per_us = args.packets_per_us.unwrap_or(rates.packets_per_us);
        rates.dma_gb_per_s = args.memory_gb_per_s.unwrap_or(rates.dma_gb_per_s);
        let model = Model {
            counts: Counts::of_arch(caps.arch),
            rates,
            threads: args.threads as usize,
        };
        let generation = args.context.iter().flat_map(|&context| {
            let model = &model;
            args.batch
                .iter()
                .map(move |&batch| generate(args, model, shape, context, batch))
        });
        let prompts = args.context.iter().map(|&tokens| Prompt {
            tokens,
            tokens_per_s: f64::from(tokens) * 1e6
                / prompt_us(&model, shape, tokens as usize, args.ubatch as usize),
        });
        Self {
            chip: args.chip.clone(),
            threads: args.threads,
            packets_per_us: rates.packets_per_us,
            memory_gb_per_s: rates.dma_gb_per_s,
            matrix_gflops: rates.hmx_gflops,
            model_bytes: shape.bytes,
            cache_bytes_per_token: cell_bytes(shape),
            generation: generation.collect(),
            prompts: prompts.collect(),
        }
    }

    fn text(&self, args: &ModelArgs) -> String {
        let mut columns = vec![Column::Number("context")];
        let names: Vec<String> = args
            .batch
            .iter()
            .map(|batch| format!("{batch} at once"))
            .collect();
        columns.extend(names.iter().map(|name| Column::Number(name.clone().leak())));
        columns.push(Column::Number("prompt"));
        let rows = self
            .generation
            .chunks(args.batch.len())
            .zip(&self.prompts)
            .map(|(row, prompt)| {
                let mut cells = vec![prompt.tokens.to_string()];
                cells.extend(row.iter().map(|each| format!("{:.0}", each.tokens_per_s)));
                cells.push(format!("{:.0}", prompt.tokens_per_s));
                cells
            });
        let mut text = format!(
            "Tokens each second on {}, reckoned, not measured: {} threads of {} packets in a µs (assumed), \
             {} GB/s from memory and {:.2} TFLOPS (published for V75).\n",
            self.chip,
            self.threads,
            self.packets_per_us,
            self.memory_gb_per_s,
            self.matrix_gflops / 1e3,
        );
        let contexts = if args.shared {
            "one context"
        } else {
            "each its own context"
        };
        let _ = writeln!(
            text,
            "Sequences have {contexts}, in F16: {} KiB for a token. The model's tensors are {} MiB.\n",
            self.cache_bytes_per_token / 1024,
            self.model_bytes >> 20,
        );
        text + &table(&columns, rows)
    }
}

fn generate(
    args: &ModelArgs,
    model: &Model,
    shape: &ModelShape,
    context: u32,
    batch: u32,
) -> GenerationRow {
    let cost = model.step(
        shape,
        &StepWork {
            rows: batch as usize,
            cells: context as usize,
            caches: if args.shared { 1 } else { batch as usize },
            seen: 1.0,
            logits: batch as usize,
        },
    );
    let [memory_us, vector_us, matrix_us] = model.alone(&cost);
    GenerationRow {
        context,
        batch,
        tokens_per_s: f64::from(batch) * 1e6 / cost.us,
        commands: cost.commands,
        step_us: cost.us,
        memory_us,
        vector_us,
        matrix_us,
        weight_bytes: cost.weight_bytes,
        packets: cost.packets,
        tile_products: cost.tile_products,
    }
}

/// Returns the microseconds of a prompt, computed in parts.
fn prompt_us(model: &Model, shape: &ModelShape, tokens: usize, part: usize) -> f64 {
    let parts = (0..tokens).step_by(part).map(|begin| {
        let rows = part.min(tokens - begin);
        let cells = begin + rows;
        // A token sees those before it: the mask hides half of the last square.
        let seen = (as_f64(begin) + as_f64(rows) / 2.0) / as_f64(cells);
        model
            .step(
                shape,
                &StepWork {
                    rows,
                    cells,
                    caches: 1,
                    seen,
                    logits: 1,
                },
            )
            .us
    });
    parts.sum()
}

/// Reads the shape of a model.
fn read(path: &Path) -> Result<ModelShape, ToolError> {
    let file = Files::default().gguf(path)?;
    let shape = ModelShape::of(&file);
    shape.map_err(|reason| format!("{}: {reason}", path.display()).into())
}

fn chip(name: &str) -> Result<&'static HexCaps, ToolError> {
    caps::by_name(name).ok_or_else(|| format!("no such chip: {name}").into())
}

/// Returns a function that reckons the seconds of samples, from their lengths in tokens: they share
/// a prompt of `prompt` tokens and one cache, begin together, and each ends on its own.
///
/// # Errors
/// Text, if the file has no model that can be reckoned.
pub fn latency(
    path: &Path,
    name: &str,
    prompt: usize,
) -> Result<impl Fn(&[usize]) -> f64, ToolError> {
    let (shape, caps) = (read(path)?, chip(name)?);
    let model = Model {
        counts: Counts::of_arch(caps.arch),
        rates: caps.rates,
        threads: THREADS as usize,
    };
    let known = RefCell::new(HashMap::new());
    let prompt_us = prompt_us(&model, &shape, prompt, UBATCH as usize);
    Ok(move |lengths: &[usize]| {
        let mut lengths = lengths.to_vec();
        lengths.sort_unstable();
        // Tokens of samples that have ended, and steps until now.
        let (mut ended, mut step, mut us) = (0, 0, prompt_us);
        for (index, length) in lengths.iter().enumerate() {
            let rows = lengths.len() - index;
            while step < *length {
                let used = prompt + ended + rows * (step + 1);
                let cells = used.next_multiple_of(CELLS).min(MAX_CELLS);
                // The steps that read as many cells.
                let same = match cells {
                    MAX_CELLS => length - step,
                    _ => ((cells - used) / rows + 1).min(length - step),
                };
                let reckon = || {
                    let wanted = StepWork {
                        rows,
                        cells,
                        caches: 1,
                        seen: 1.0,
                        logits: rows,
                    };
                    model.step(&shape, &wanted).us
                };
                let mut known = known.borrow_mut();
                us += as_f64(same) * *known.entry((rows, cells)).or_insert_with(reckon);
                step += same;
            }
            ended += length;
        }
        us / 1e6
    })
}

pub fn run(args: &ModelArgs) -> Result<ExitCode, ToolError> {
    let report = Report::new(args, chip(&args.chip)?, &read(&args.model)?);
    if args.json {
        print_json(&report)?;
    } else {
        print(&report.text(args))?;
    }
    Ok(ExitCode::SUCCESS)
}
