//! `ggml-npu quantize`: a GGUF in 4 or 8 bits from one in F32, F16 or BF16.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use ggml_rust_npu::gguf::{File, GgmlType, TensorInfo, TensorPlan, Value, Writer};
use rayon::prelude::*;

use self::awq::{Transform, Transforms};
use self::block::{BLOCK, Format, to_f32};
use self::imatrix::Imatrix;
use crate::Failure;
use crate::progress::Progress;

mod awq;
mod block;
mod imatrix;

/// Quantize a model
///
/// Writes a plain GGUF that any llama.cpp runs. With statistics of what the model
/// computes on a text, the result is much closer to the original:
///
///   llama-imatrix -m model-F16.gguf -f text.txt -o imatrix.gguf --chunks 40
///   ggml-npu quantize model-F16.gguf -o model-Q4_0.gguf --type q4_0 \
///       --imatrix imatrix.gguf --awq
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The model: a GGUF whose weights are F32, F16 or BF16
    model: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Type of the weights in the blocks of the model
    #[arg(short = 't', long = "type", value_name = "TYPE", value_enum)]
    format: Format,
    /// Type of the token embeddings and of the output head [default: q8_0; f32 and f16: the same as --type]
    #[arg(long, value_name = "TYPE", value_enum)]
    embeddings: Option<Format>,
    /// Statistics from llama-imatrix: errors in the inputs that are used most count most
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Activation-aware scaling: also rescales channels so that the ones used most lose least. With --type f32 or f16
    /// the scales are those for q4_0, and the file is one for another quantizer to start from
    #[arg(long, requires = "imatrix")]
    awq: bool,
}

/// Rows that are quantized between two writes.
const BATCH_ROWS: usize = 1024;

/// A tensor on its way.
#[derive(Debug)]
struct Job<'a> {
    source: &'a TensorInfo,
    dtype: GgmlType,
    /// None: the bytes as they are.
    format: Option<Format>,
    transform: Transform,
    importance: Option<Vec<f32>>,
}

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let named = |path: &PathBuf, error: ggml_rust_npu::gguf::Error| match error {
        error @ ggml_rust_npu::gguf::Error::Io { .. } => error.to_string(),
        error => format!("{}: {error}", path.display()),
    };
    let file = File::open(&args.model).map_err(|error| named(&args.model, error))?;
    check(args, &file)?;
    let imatrix = args.imatrix.as_deref().map(Imatrix::open).transpose()?;
    let transforms = match &imatrix {
        Some(imatrix) if args.awq => scale(args, &file, imatrix)?,
        _ => Transforms::new(),
    };
    let jobs = jobs(args, &file, imatrix.as_ref(), &transforms)?;
    write(args, &file, &jobs).map_err(|error| named(&args.output, error))?;
    let (before, after) = (file.bytes().len(), std::fs::metadata(&args.output)?.len());
    eprintln!(
        "{}: {:.1} MiB, was {:.1} MiB",
        args.output.display(),
        after as f64 / f64::from(1 << 20),
        before as f64 / f64::from(1 << 20)
    );
    Ok(ExitCode::SUCCESS)
}

fn check(args: &Args, file: &File) -> Result<(), Failure> {
    let header = file.header();
    let architecture = header.get("general.architecture").and_then(Value::as_str);
    let architecture = architecture.ok_or("general.architecture is not set: this is no model")?;
    if !awq::ARCHITECTURES.contains(&architecture) {
        let known = awq::ARCHITECTURES.join(", ");
        return Err(format!("architecture {architecture} is not supported, only {known}").into());
    }
    let plain = [GgmlType::F32, GgmlType::F16, GgmlType::BF16];
    for tensor in &header.tensors {
        if is_weight(tensor) && !plain.contains(&tensor.dtype) {
            let (name, dtype) = (&tensor.name, tensor.dtype.name());
            return Err(format!("{name} is {dtype}: start from a file in F32, F16 or BF16").into());
        }
    }
    let same = std::fs::canonicalize(&args.output)
        .is_ok_and(|path| std::fs::canonicalize(file.path()).is_ok_and(|source| source == path));
    if same {
        return Err(format!("{} would overwrite the model", args.output.display()).into());
    }
    Ok(())
}

/// Finds the scales of every group.
fn scale(args: &Args, file: &File, imatrix: &Imatrix) -> Result<Transforms, Failure> {
    let groups = awq::groups(file.header())?;
    let progress = Progress::new("searching scales", groups.len() as u64);
    let mut transforms = Transforms::new();
    let (mut exponents, mut losses) = (0.0, 0.0);
    for group in &groups {
        let found = awq::scale(file, imatrix, args.format, group, &mut transforms)?;
        exponents += found.exponent;
        losses += found.relative_loss;
        progress.add(1);
    }
    progress.finish();
    eprintln!(
        "{} groups scaled, mean exponent {:.2}, mean loss {:.2} of that without",
        groups.len(),
        exponents / groups.len() as f32,
        losses / groups.len() as f64
    );
    Ok(transforms)
}

/// Whether a tensor is a matrix of weights, or an embedding.
fn is_weight(tensor: &TensorInfo) -> bool {
    tensor.name.ends_with(".weight") && tensor.dims >= 2 && tensor.rows() > 1
}

/// The format that a tensor gets; `None` for one that is kept.
fn format_of(args: &Args, tensor: &TensorInfo) -> Option<Format> {
    if !is_weight(tensor) {
        return None;
    }
    let format = match tensor.name.as_str() {
        "token_embd.weight" | "output.weight" => args.embeddings.unwrap_or(match args.format {
            Format::F32 | Format::F16 => args.format,
            _ => Format::Q8_0,
        }),
        // Routers of experts choose; a wrong choice costs more than the bytes.
        name if name.starts_with("blk.") && !name.contains("ffn_gate_inp") => args.format,
        _ => return None,
    };
    let fits = tensor.ne[0].is_multiple_of(BLOCK) || !format.dtype().is_quantized();
    if !fits {
        let (name, k) = (&tensor.name, tensor.ne[0]);
        eprintln!("{name} stays as it is: its rows of {k} are not whole blocks of {BLOCK}");
    }
    fits.then_some(format)
}

fn jobs<'a>(
    args: &Args,
    file: &'a File,
    imatrix: Option<&Imatrix>,
    transforms: &Transforms,
) -> Result<Vec<Job<'a>>, Failure> {
    let job = |source: &'a TensorInfo| -> Result<Job<'a>, Failure> {
        let transform = transforms.get(&source.name);
        let format = match (format_of(args, source), transform) {
            // Norms and biases are F32 in every model; so are the ones that are scaled.
            (None, Some(_)) => Some(Format::F32),
            (format, _) => format,
        };
        let transform = transform.cloned().unwrap_or_default();
        // llama-imatrix leaves out the head unless it is asked for.
        let weighted = is_weight(source) && source.name.starts_with("blk.");
        let importance = match (imatrix, format) {
            (Some(_), Some(_)) if weighted && source.ne[2] > 1 => {
                let name = &source.name;
                return Err(
                    format!("{name} has experts, which are not supported with --imatrix").into(),
                );
            }
            (Some(imatrix), Some(format)) if weighted && format.dtype().is_quantized() => {
                Some(transform.importance(imatrix.of(&source.name, source.ne[0])?))
            }
            _ => None,
        };
        Ok(Job {
            source,
            dtype: format.map_or(source.dtype, Format::dtype),
            format,
            transform,
            importance,
        })
    };
    file.header().tensors.iter().map(job).collect()
}

fn write(args: &Args, file: &File, jobs: &[Job]) -> ggml_rust_npu::gguf::Result<()> {
    let plans: Vec<TensorPlan> = (jobs.iter())
        .map(|job| TensorPlan {
            name: job.source.name.clone(),
            dtype: job.dtype,
            ne: job.source.ne[..job.source.dims].to_vec(),
        })
        .collect();
    let mut how = format!(
        "ggml-npu {} --type {}",
        env!("CARGO_PKG_VERSION"),
        args.format.dtype().name()
    );
    for (flag, given) in [(" --imatrix", args.imatrix.is_some()), (" --awq", args.awq)] {
        how.push_str(if given { flag } else { "" });
    }
    let updates = [
        (
            "general.file_type",
            Value::Unsigned(args.format.file_type()),
        ),
        // SOURCE: GGML_QNT_VERSION, ggml.h of ggml 0.25.3.
        ("general.quantization_version", Value::Unsigned(2)),
        ("general.quantized_by", Value::String(how)),
    ];
    let mut writer = Writer::create(&args.output, file.header(), file.bytes(), &updates, &plans)?;
    let progress = Progress::new("quantizing", file.bytes().len() as u64);
    for job in jobs {
        match job.format {
            None => writer.tensor([file.data(job.source)])?,
            Some(format) => writer.tensor(job.batches(file, format))?,
        }
        progress.add(job.source.range.len() as u64);
    }
    progress.finish();
    writer.finish()
}

impl Job<'_> {
    /// The tensor's new bytes, some rows at a time.
    fn batches(&self, file: &File, format: Format) -> impl Iterator<Item = Vec<u8>> {
        let (k, rows) = (self.source.ne[0], self.source.rows());
        let data = file.data(self.source);
        let row_bytes = data.len() / rows.max(1);
        (0..rows).step_by(BATCH_ROWS).map(move |first| {
            let batch: Vec<usize> = (first..(first + BATCH_ROWS).min(rows)).collect();
            let of_rows = |part: &[usize]| {
                let (mut row, mut out) = (vec![0.0; k], Vec::new());
                for n in part {
                    to_f32(
                        self.source.dtype,
                        &data[n * row_bytes..][..row_bytes],
                        &mut row,
                    );
                    self.transform.apply(*n, &mut row);
                    format.quantize_row(&row, self.importance.as_deref(), &mut out);
                }
                out
            };
            let parts: Vec<Vec<u8>> = batch.par_chunks(16).map(of_rows).collect();
            parts.concat()
        })
    }
}
