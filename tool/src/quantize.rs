//! `ggml-npu quantize`: a GGUF in 4 or 8 bits from one in F32, F16 or BF16.

use std::iter;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser as _;
use clap::error::ErrorKind;
use clap::{Args as ClapArgs, CommandFactory as _, ValueEnum as _};
use ggml_rust_npu::gguf::{File, Header, TensorInfo, TensorPlan, Value, Writer};

use self::block::BLOCK;
pub use self::block::{Format, not_finite};
pub use self::imatrix::Imatrix;
use self::job::TensorJob;
use self::recipe::{Recipe, TypeRule, is_weight};
use self::rotate::Rotate;
use self::transform::Transforms;
use crate::ToolError;
use crate::files::{Files, named};
use crate::progress::Progress;
use crate::text::say;

mod awq;
mod block;
mod imatrix;
mod job;
mod lpbq;
mod model;
mod recipe;
mod rotate;
mod tile;
mod transform;

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
pub struct QuantizeArgs {
    /// The model: a GGUF whose weights are F32, F16 or BF16
    model: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Type of the weights in the blocks of the model
    #[arg(
        short = 't',
        long = "type",
        value_name = "TYPE",
        value_enum,
        ignore_case = true
    )]
    format: Format,
    /// Type of the token embeddings and of the output head [default: q8_0; f32 and f16: the same as
    /// --type]
    #[arg(long, value_name = "TYPE", value_enum, ignore_case = true)]
    embeddings: Option<Format>,
    /// Type of the weights whose names match a regular expression, such as ffn_down=q8_0; the first
    /// that matches decides
    #[arg(long, value_name = "PATTERN=TYPE")]
    tensor_type: Vec<TypeRule>,
    /// Statistics from llama-imatrix: errors in the inputs that are used most count most
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Activation-aware scaling: also rescales channels so that the ones used most lose least. With
    /// --type f32 or f16 the scales are those for q4_0, and the file is one for another quantizer
    /// to start from
    #[arg(long, requires = "imatrix")]
    awq: bool,
    /// Also write the statistics of the scaled model, for further quantization
    #[arg(long, value_name = "FILE", requires = "awq")]
    imatrix_out: Option<PathBuf>,
    /// Low-power blocks: in the blocks of the model, each weight is a scale of its row times a
    /// multiplier of 1 to 16 of its block times a level of 4 bits. --type says what holds it,
    /// exactly: q4_0, or q8_0 for any length of blocks
    #[arg(long, value_name = "LENGTH", value_parser = PossibleValuesParser::new(lpbq::BLOCKS).try_map(|word| word.parse::<usize>()))]
    lpbq: Option<usize>,
    /// Also write a pack, the output's name with .groups.npu, that has the weights of the model's
    /// blocks in groups of 2 x 16 in place of 32 x 1, which is how Hexagon's matrix unit reads
    /// them. For weights in q4_0 and q8_0; GGML_RUST_NPU_PACK names the pack when the model runs,
    /// and other devices take the model as it is
    #[arg(long, conflicts_with = "lpbq")]
    tile_group: bool,
    /// Fold rotations into the weights: the model computes the same, and its outliers are spread.
    /// Statistics are those of the rotated model: with --type f32 or f16 first, llama-imatrix, then
    /// --imatrix without --rotate
    #[arg(long, value_name = "R1,R2", value_enum, value_delimiter = ',', conflicts_with_all = ["imatrix", "awq"])]
    rotate: Vec<Rotate>,
}

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &QuantizeArgs) -> Result<ExitCode, ToolError> {
    check_options(args);
    let mut files = Files::default();
    let file = files.gguf(&args.model)?;
    check_model(file.header())?;
    let recipe = args.recipe();
    let tensors = tensors(args, file.header());
    recipe.check(&tensors)?;
    recipe.say_exceptions(&tensors);
    let imatrix = args.imatrix.as_deref();
    let imatrix = imatrix
        .map(|path| Imatrix::open(&mut files, path))
        .transpose()?;
    let pack = args.tile_group.then(|| tile::path(&args.output));
    for output in iter::once(&args.output)
        .chain(&args.imatrix_out)
        .chain(&pack)
    {
        files.output(output)?;
    }
    let transforms = match &imatrix {
        Some(imatrix) if args.awq => scale(args, &file, imatrix)?,
        _ => rotate::transforms(&file, &args.rotate)?,
    };
    let jobs = jobs(args, &tensors, imatrix.as_ref(), &transforms)?;
    if imatrix.is_some() && !uses_statistics(args, &jobs) {
        // Only a note, not an error: llama-quantize accepts statistics with every type.
        say(
            "--imatrix changes nothing: no weight of the model's blocks becomes a type of 3, 4 or 5 bits",
        );
    }
    if args.tile_group {
        tile::check(&jobs)?;
    }
    write(args, &file, &jobs)?;
    if let (Some(from), Some(to)) = (&args.imatrix, &args.imatrix_out) {
        imatrix::rescale(from, to, &transforms)?;
    }
    if args.tile_group {
        tile::write(&args.output, &how(args, &jobs), &file, &jobs)?;
    }
    let (before, after) = (file.bytes().len(), std::fs::metadata(&args.output)?.len());
    say(format_args!(
        "{}: {:.1} MiB, was {:.1} MiB",
        args.output.display(),
        after as f64 / f64::from(1 << 20),
        before as f64 / f64::from(1 << 20)
    ));
    Ok(ExitCode::SUCCESS)
}

impl QuantizeArgs {
    fn recipe(&self) -> Recipe<'_> {
        Recipe {
            blocks: self.format,
            embeddings: self.embeddings,
            rules: &self.tensor_type,
        }
    }
}

/// Ends the program if options do not go together.
fn check_options(args: &QuantizeArgs) {
    if args.tile_group && tile::grouped(args.format).is_none() {
        let message = "--tile-group goes with --type q4_0 and q8_0, which other devices run";
        (crate::Cli::command().error(ErrorKind::ArgumentConflict, message)).exit();
    }
    let misfit = match (args.lpbq, args.format) {
        (None, _) | (Some(_), Format::Q8_0) => None,
        (Some(length), Format::Q4_0) => {
            (length < BLOCK).then_some("q4_0 has one scale for 32 weights")
        }
        (Some(_), _) => Some("it would be rounded once more"),
    };
    if let (Some(length), Some(reason)) = (args.lpbq, misfit) {
        let message = format!("--lpbq {length} goes with --type q8_0: {reason}");
        crate::Cli::command()
            .error(ErrorKind::ArgumentConflict, message)
            .exit();
    }
}

fn check_model(header: &Header) -> Result<(), ToolError> {
    model::architecture(header)?;
    // Adapters have names that end in lora_a and lora_b, and a vocabulary file has no weights.
    if !header.tensors.iter().any(is_weight) {
        let kind = header.get("general.type").and_then(Value::as_str);
        let kind = kind.map_or(String::new(), |kind| format!(" (general.type is {kind})"));
        return Err(
            format!("no tensor of it is a weight of a model{kind}: nothing to quantize").into(),
        );
    }
    for tensor in &header.tensors {
        let (name, dtype) = (&tensor.name, tensor.dtype);
        if let Some(dim) = tensor.ne.iter().position(|size| *size == 0) {
            return Err(format!("dimension {dim} of {name} is 0: it has no elements").into());
        }
        if is_weight(tensor) && !model::UNQUANTIZED.contains(&dtype) {
            let dtype = dtype.name();
            return Err(format!("{name} is {dtype}: start from a file in F32, F16 or BF16").into());
        }
    }
    Ok(())
}

/// Finds the scales of every group of weights that are scaled together.
fn scale(args: &QuantizeArgs, file: &File, imatrix: &Imatrix) -> Result<Transforms, ToolError> {
    let groups = awq::groups(file.header())?;
    let progress = Progress::new("searching scales", groups.len() as u64);
    let recipe = args.recipe();
    let searched = |tensor: &TensorInfo| match recipe.format_of(&tensor.name, tensor)? {
        // The weights of low-power blocks have 4-bit levels, whatever the file's type is.
        format if format == args.format => Some(args.lpbq.map_or(format, |_| Format::Q4_0)),
        // A weight that stays unquantized loses nothing, so it does not influence the search.
        format => format.dtype().is_quantized().then_some(format),
    };
    let mut transforms = Transforms::new();
    let mut scaled = Vec::with_capacity(groups.len());
    for group in &groups {
        scaled.extend(awq::scale(
            file,
            imatrix,
            &searched,
            group,
            &mut transforms,
        )?);
        progress.add(1);
    }
    progress.finish();
    if !scaled.is_empty() {
        let exponents: f32 = scaled.iter().map(|found| found.exponent).sum();
        let losses: f64 = scaled.iter().map(|found| found.relative_loss).sum();
        say(format_args!(
            "{} groups scaled, mean exponent {:.2}, mean loss {:.2} of that without",
            scaled.len(),
            exponents / scaled.len() as f32,
            losses / scaled.len() as f64
        ));
    }
    let few = groups.len() - scaled.len();
    if few > 0 {
        say(format_args!(
            "{few} groups of experts are as they were, because fewer than {} rows of the imatrix's text reached them: \
             a longer text reaches more",
            awq::LEAST_ROWS
        ));
    }
    Ok(transforms)
}

/// A tensor of the new file: its name there, and the tensor that it is made of.
type NewTensor<'a> = (&'a str, &'a TensorInfo);

/// Returns the tensors of the new file. Embeddings that are also the head no longer equal the head
/// if the stream is rotated.
fn tensors<'a>(args: &QuantizeArgs, header: &'a Header) -> Vec<NewTensor<'a>> {
    let tensors = header.tensors.iter();
    let mut tensors: Vec<NewTensor> = tensors.map(|it| (it.name.as_str(), it)).collect();
    let head = "output.weight";
    if args.rotate.contains(&Rotate::R1) && header.tensor(head).is_none() {
        tensors.extend(header.tensor("token_embd.weight").map(|it| (head, it)));
    }
    tensors
}

fn jobs<'a>(
    args: &QuantizeArgs,
    tensors: &[NewTensor<'a>],
    imatrix: Option<&Imatrix>,
    transforms: &Transforms,
) -> Result<Vec<TensorJob<'a>>, ToolError> {
    let job = |name: &str, source: &'a TensorInfo| -> Result<TensorJob<'a>, ToolError> {
        let transform = transforms.get(name);
        let format = match (args.recipe().format_of(name, source), transform) {
            // Norms and biases are F32 in every model, so scaled ones are stored as F32, too.
            (None, Some(_)) => Some(Format::F32),
            (format, _) => format,
        };
        let transform = transform.cloned().unwrap_or_default();
        // llama-imatrix has no statistics of the head unless the user asks for them.
        let weighted = is_weight(source) && source.name.starts_with("blk.");
        let lpbq = (args.lpbq).filter(|_| weighted && format == Some(args.format));
        let uses_importance = lpbq.is_some() || format.is_some_and(Format::uses_importance);
        let importance = match imatrix {
            Some(imatrix) if weighted && uses_importance => {
                Some(transform.importance(imatrix.of(source)?))
            }
            _ => None,
        };
        Ok(TensorJob {
            name: name.into(),
            source,
            dtype: format.map_or(source.dtype, Format::dtype),
            format,
            transform,
            importance,
            lpbq,
            tile_group: format
                .filter(|_| args.tile_group && weighted)
                .and_then(tile::grouped),
        })
    };
    tensors
        .iter()
        .map(|(name, source)| job(name, source))
        .collect()
}

/// Returns `true` if the statistics of an imatrix decide values of the output.
fn uses_statistics(args: &QuantizeArgs, jobs: &[TensorJob]) -> bool {
    args.awq || jobs.iter().any(|job| job.importance.is_some())
}

/// Returns the options of the output, in the words of the command line.
fn how(args: &QuantizeArgs, jobs: &[TensorJob]) -> String {
    let mut how = format!(
        "ggml-npu {} --type {}",
        env!("CARGO_PKG_VERSION"),
        args.format.dtype().name()
    );
    if let Some(format) = args.embeddings {
        how.push_str(&format!(" --embeddings {}", format.dtype().name()));
    }
    let flags = [
        (
            " --imatrix",
            args.imatrix.is_some() && uses_statistics(args, jobs),
        ),
        (" --awq", args.awq),
        (" --tile-group", args.tile_group),
    ];
    for (flag, given) in flags {
        how.push_str(if given { flag } else { "" });
    }
    if let Some(length) = args.lpbq {
        how.push_str(&format!(" --lpbq {length}"));
    }
    for rule in &args.tensor_type {
        how.push_str(&format!(" --tensor-type {}", rule.text));
    }
    for (index, rotation) in args.rotate.iter().enumerate() {
        let word = rotation.to_possible_value();
        let word = word.as_ref().map_or("", |word| word.get_name());
        how.push_str(if index == 0 { " --rotate " } else { "," });
        how.push_str(word);
    }
    how
}

fn write(args: &QuantizeArgs, file: &File, jobs: &[TensorJob]) -> Result<(), ToolError> {
    let plans: Vec<TensorPlan> = (jobs.iter())
        .map(|job| TensorPlan {
            name: job.name.clone(),
            dtype: job.dtype,
            ne: job.source.ne[..job.source.dims].to_vec(),
        })
        .collect();
    let updates = [
        (
            "general.file_type",
            Value::Unsigned(args.format.file_type()),
        ),
        // SOURCE: GGML_QNT_VERSION, ggml.h of ggml 0.25.3.
        ("general.quantization_version", Value::Unsigned(2)),
        ("general.quantized_by", Value::String(how(args, jobs))),
    ];
    let named = |error| named(&args.output, &error);
    let mut writer = Writer::create(&args.output, file.header(), file.bytes(), &updates, &plans)
        .map_err(named)?;
    let progress = Progress::new("quantizing", file.bytes().len() as u64);
    for job in jobs {
        match job.format {
            None => writer.tensor([file.data(job.source)]).map_err(named)?,
            Some(format) => {
                let mut failure = None;
                let batches = job.batches(file, format);
                let batches =
                    batches.map_while(|batch| batch.map_err(|no| failure = Some(no)).ok());
                let written = writer.tensor(batches).map_err(named);
                failure.map_or(Ok(()), Err)?;
                written?;
            }
        }
        progress.add(job.source.range.len() as u64);
    }
    progress.finish();
    Ok(writer.finish().map_err(named)?)
}
