//! `ggml-npu model`: estimates the speed of a model on an NPU, from counted packets (Hexagon) or
//! from the planner's costs (Rockchip).

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use clap::builder::PossibleValuesParser;
use ggml_rust_npu::hexagon::caps::{self, HexCaps};
use ggml_rust_npu::rockchip::caps as rockchip_caps;
use serde::Serialize;

use self::cost::{Model, StepCost, StepWork, cell_bytes};
use self::counts::as_f64;
use self::published::{Rates, fitted, speeds};
use self::shape::ModelShape;
use crate::ToolError;
use crate::files::Files;
use crate::text::{Column, print, print_json, table};

mod cost;
mod counts;
mod published;
mod rockchip;
mod shape;

/// Vector threads of a chip.
const THREADS: u32 = caps::VECTOR_UNITS;
/// llama.cpp's own number of tokens that it computes at a time.
const UBATCH: u32 = 512;
/// Cells of a cache that a step reads are rounded up to a multiple of this.
// SOURCE: llama_kv_cache::get_n_kv and its padding, llama.cpp 0.5.0.
const CELLS: usize = 256;
/// Most cells that are accepted: more than any model's context has.
const MAX_CELLS: usize = 1 << 24;

/// Reckon how fast a model would be on an NPU
///
/// Hexagon: from packets that an emulator counted for whole operations, and from rates that are
/// assumed or published, which are printed. Rockchip: from the planner's costs. Nothing was
/// measured on a device. Compare models, types and sizes with it, not devices. The host, sampling,
/// waiting for memory and heat are not in it.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// The GGUF
    model: PathBuf,
    /// The chip
    #[arg(long, default_value = "hexagon-v75", value_parser = crate::chip::names())]
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

/// Returns the names of the chips that [`latency`] knows, for an argument.
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
    fitted_tokens_per_s: [f64; 2],
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
    fitted_tokens_per_s: [f64; 2],
    packets: f64,
}

/// A speed that others published of the model on such a chip.
#[derive(Debug, Serialize)]
struct Published {
    weight: String,
    prompt: String,
    generation: String,
    source: String,
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
    published: Vec<Published>,
}

impl Report {
    fn new(args: &ModelArgs, caps: &HexCaps, shape: &ModelShape) -> Self {
        let mut rates = caps.rates;
        rates.packets_per_us = args.packets_per_us.unwrap_or(rates.packets_per_us);
        rates.dma_gb_per_s = args.memory_gb_per_s.unwrap_or(rates.dma_gb_per_s);
        let model = |rates| Model {
            rates,
            threads: args.threads as usize,
            ..Model::of(caps)
        };
        let nominal = model(Rates {
            each: rates,
            is_beside: caps.has_matrix,
        });
        let of_tokens = fitted("token", caps.rates).map(model);
        let of_prompts = fitted("prompt", caps.rates).map(model);
        let mut generation = Vec::new();
        for &context in &args.context {
            for &batch in &args.batch {
                generation.push(GenerationRow {
                    fitted_tokens_per_s: of_tokens
                        .each_ref()
                        .map(|model| generate(args, model, shape, context, batch).tokens_per_s),
                    ..generate(args, &nominal, shape, context, batch)
                });
            }
        }
        let prompts = args.context.iter().map(|&tokens| {
            let cost = |model| prompt(model, shape, tokens as usize, args.ubatch as usize);
            let per_s = |cost: StepCost| f64::from(tokens) * 1e6 / cost.us;
            Prompt {
                tokens,
                tokens_per_s: per_s(cost(&nominal)),
                fitted_tokens_per_s: of_prompts.each_ref().map(|model| per_s(cost(model))),
                packets: cost(&nominal).packets,
            }
        });
        let known = (shape.arch.as_str(), shape.layers.len(), shape.embed);
        let published = published(known, &format!("v{}", caps.arch));
        Self {
            chip: args.chip.clone(),
            threads: args.threads,
            packets_per_us: rates.packets_per_us,
            memory_gb_per_s: rates.dma_gb_per_s,
            matrix_gflops: rates.hmx_gflops,
            model_bytes: shape.bytes,
            cache_bytes_per_token: cell_bytes(shape),
            generation,
            prompts: prompts.collect(),
            published,
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
        let rows = |generated: fn(&GenerationRow) -> String, read: fn(&Prompt) -> String| {
            let rows = self.generation.chunks(args.batch.len()).zip(&self.prompts);
            let rows = rows.map(|(row, prompt)| {
                let mut cells = vec![prompt.tokens.to_string()];
                cells.extend(row.iter().map(generated));
                cells.push(read(prompt));
                cells
            });
            table(&columns, rows.collect::<Vec<_>>())
        };
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
        text += &rows(
            |row| format!("{:.0}", row.tokens_per_s),
            |prompt| format!("{:.0}", prompt.tokens_per_s),
        );
        let [of_tokens, of_prompts] = ["token", "prompt"].map(|workload| {
            let [low, high] = fitted(workload, caps::FITTED).map(|rates| rates.each);
            let packets = [low, high].map(|rates| rates.packets_per_us);
            (packets, [low, high].map(|rates| rates.dma_gb_per_s))
        });
        let _ = writeln!(
            text,
            "\nAt rates that fit published speeds of ggml-hexagon: {} to {} packets for generation, {} to {} for \
             prompts, {} to {} GB/s.\n",
            of_tokens.0[0],
            of_tokens.0[1],
            of_prompts.0[0],
            of_prompts.0[1],
            of_tokens.1[0],
            of_tokens.1[1],
        );
        text += &rows(
            |row| band(row.fitted_tokens_per_s),
            |prompt| band(prompt.fitted_tokens_per_s),
        );
        text + &published_text(&self.published)
    }
}

/// Returns the published speeds of a model on a chip, in the form that [`speeds`] expects.
fn published(model: (&str, usize, usize), chip: &str) -> Vec<Published> {
    let all = speeds(model, chip).map(|speed| Published {
        weight: speed.weight.to_owned(),
        prompt: speed.prompt.to_owned(),
        generation: speed.generation.to_owned(),
        source: speed.source.to_owned(),
    });
    all.collect()
}

/// Returns a line for each published speed, after a headline; nothing if there are none.
fn published_text(published: &[Published]) -> String {
    let mut text = String::new();
    for (i, speed) in published.iter().enumerate() {
        let head = if i == 0 {
            "\nPublished for this model on such a chip, tokens each second of a prompt and of generation:\n"
        } else {
            ""
        };
        let _ = writeln!(
            text,
            "{head}{:>6} {:>6}  {}, {}",
            speed.prompt, speed.generation, speed.weight, speed.source
        );
    }
    text
}

/// Returns the lowest and the highest of the estimated speeds.
fn band([low, high]: [f64; 2]) -> String {
    // Numbers below ten get one more digit.
    let digits = usize::from(low < 10.0);
    format!("{low:.digits$} to {high:.digits$}")
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
        fitted_tokens_per_s: [0.0; 2],
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

/// Returns the cost of a prompt, computed in parts.
fn prompt(model: &Model, shape: &ModelShape, tokens: usize, part: usize) -> StepCost {
    let mut total = StepCost::default();
    for begin in (0..tokens).step_by(part) {
        let rows = part.min(tokens - begin);
        let cells = begin + rows;
        let step = StepWork {
            rows,
            cells,
            caches: 1,
            // A token attends to earlier ones only, so the mask hides half of the last square.
            seen: (as_f64(begin) + as_f64(rows) / 2.0) / as_f64(cells),
            logits: 1,
        };
        total += model.step(shape, &step);
    }
    total
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

/// Returns a function that estimates the seconds of samples, from their lengths in tokens: they
/// share a prompt of `prompt` tokens and one cache, begin together, and each ends on its own.
///
/// # Errors
/// Text, if the speed of the file's model cannot be estimated.
pub fn latency(
    path: &Path,
    name: &str,
    prompt: usize,
) -> Result<impl Fn(&[usize]) -> f64, ToolError> {
    let (shape, caps) = (read(path)?, chip(name)?);
    let model = Model::of(caps);
    let known = RefCell::new(HashMap::new());
    let prompt_us = self::prompt(&model, &shape, prompt, UBATCH as usize).us;
    Ok(move |lengths: &[usize]| {
        let mut lengths = lengths.to_vec();
        lengths.sort_unstable();
        // Tokens of the samples that have ended, and the number of steps so far.
        let (mut ended, mut step, mut us) = (0, 0, prompt_us);
        for (index, length) in lengths.iter().enumerate() {
            let rows = lengths.len() - index;
            while step < *length {
                let used = prompt + ended + rows * (step + 1);
                let cells = used.next_multiple_of(CELLS).min(MAX_CELLS);
                // All steps that read the same number of cells.
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
    let shape = read(&args.model)?;
    if let Some(caps) = rockchip_caps::by_name(&args.chip) {
        if args.packets_per_us.is_some()
            || args.memory_gb_per_s.is_some()
            || args.threads != THREADS
        {
            return Err(
                "--threads, --packets-per-us and --memory-gb-per-s are for Hexagon chips".into(),
            );
        }
        let report = rockchip::Report::new(args, caps, &shape)?;
        if args.json {
            print_json(&report)?;
        } else {
            print(&report.text(args))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let report = Report::new(args, chip(&args.chip)?, &shape);
    if args.json {
        print_json(&report)?;
    } else {
        print(&report.text(args))?;
    }
    Ok(ExitCode::SUCCESS)
}
