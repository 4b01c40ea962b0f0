//! `ggml-npu repack`: the weights of a model in a chip's layout, in a file from which they are
//! loaded.

mod feedback;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{Args as ClapArgs, CommandFactory as _};
use ggml_rust_npu::backend::offline::{Form, Weight};
use ggml_rust_npu::config::rules::{Choice, Rules};
use ggml_rust_npu::config::{self, Config};
use ggml_rust_npu::gguf::{File, Header, TensorInfo};
use ggml_rust_npu::packfile::PackWriter;
use ggml_rust_npu::rockchip::caps::Precision;

use crate::ToolError;
use crate::chip::{self, Chip};
use crate::files::{Files, next_to};
use crate::progress::Progress;
use crate::quantize::{Imatrix, not_finite};
use crate::text::say;

/// Pack a model's weights for a chip
///
/// Does once what the backend does each time that it loads a model: puts weights into the
/// chip's layout and, for Rockchip, quantizes and calibrates them. The model is loaded as
/// usual; weights that the pack has come from there:
///
///   ggml-npu repack model.gguf --chip rk3588 -o model.npu
///   GGML_RUST_NPU_PACK=model.npu llama-cli -m model.gguf ...
///
/// GGML_RUST_NPU_RULES and GGML_RUST_NPU_CALIBRATION count, as they do for the backend; where
/// it runs, it must have the same rules.
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct RepackArgs {
    /// The model: a GGUF
    model: PathBuf,
    /// Chip to pack for; one pack serves all hexagon chips
    #[arg(long, value_parser = chip::names())]
    chip: String,
    /// The file to write [default: the model's name with .npu]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Arithmetic of the weights: pattern=choice,...; each rule must decide a weight of this model.
    /// A list for several models goes into GGML_RUST_NPU_RULES
    #[arg(long)]
    rules: Option<String>,
    /// Method that clips INT4 weights, as GGML_RUST_NPU_CALIBRATION
    #[arg(long, value_parser = PossibleValuesParser::new(config::calibrations()))]
    calibrate: Option<String>,
    /// Statistics of the model's inputs, from llama-imatrix: the rounding error of a weight that
    /// becomes INT8 or INT4 is compensated by the next ones, where inputs are large
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
}

/// A weight and its packed form.
type RepackJob<'a> = (&'a TensorInfo, Form);

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &RepackArgs) -> Result<ExitCode, ToolError> {
    let mut config = Config::from_env()?;
    if let Some(rules) = &args.rules {
        config.rules = Rules::parse(rules).map_err(|reason| format!("--rules: {reason}"))?;
    }
    if let Some(word) = &args.calibrate {
        config.calibration = config::calibration(word)?;
    }
    let chip = Chip::new(&args.chip, &config)?;
    check_options(args, &chip);
    let mut files = Files::default();
    let imatrix = args.imatrix.as_deref();
    let imatrix = imatrix
        .map(|path| Imatrix::open(&mut files, path))
        .transpose()?;
    let file = files.gguf(&args.model)?;
    let output = (args.output.clone()).unwrap_or_else(|| next_to(&args.model, ".npu"));
    files.output(&output)?;
    if args.rules.is_some() {
        check_rules(args, &config, &chip, file.header())?;
    }
    let jobs = jobs(&file, &chip);
    if jobs.is_empty() {
        let model = args.model.display();
        return Err(format!("no weight of {model} is for {}", args.chip).into());
    }
    if args.calibrate.is_some() && !jobs.iter().any(|(_, form)| is_int4(form)) {
        return Err("--calibrate is for INT4 weights, and no weight becomes INT4".into());
    }
    if imatrix.is_some() && !jobs.iter().any(|(_, form)| is_rotated(form)) {
        return Err("--imatrix is for INT8 and INT4 weights, and no weight becomes one".into());
    }
    let means = (jobs.iter()).map(|job| means(job, imatrix.as_ref()));
    let means: Vec<_> = means.collect::<Result<_, _>>()?;
    if imatrix.is_some() {
        say_without_statistics(&jobs, &means)?;
    }
    let options = options(args, &config, &chip);
    let names = jobs.iter().map(|(tensor, _)| tensor.name.as_str());
    let mut writer = PackWriter::create(&output, &args.chip, &options, names)?;
    let total = jobs
        .iter()
        .map(|(tensor, _)| tensor.range.len() as u64)
        .sum();
    let progress = Progress::new("packing", total);
    for ((tensor, form), means) in jobs.iter().zip(means) {
        check_values(&file, tensor)?;
        let feedback = match (form, means) {
            (Form::Rockchip(layout, _), Some(means)) => feedback::of(layout, &tensor.name, means)?,
            _ => Vec::new(),
        };
        let weight = Weight {
            name: &tensor.name,
            dtype: tensor.dtype,
            ne: tensor.ne,
            data: file.data(tensor),
            feedback: &feedback,
        };
        form.write(&weight, &mut writer, |range| {
            progress.add(range.len() as u64);
            // The bytes are not needed again, so releasing them keeps memory at the size of one
            // piece.
            file.release(tensor, range);
            true
        })?;
    }
    progress.finish();
    writer.finish()?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    say(format_args!(
        "{}: {} weights, {:.1} MiB, were {:.1} MiB",
        output.display(),
        jobs.len(),
        mib(fs::metadata(&output)?.len()),
        mib(total)
    ));
    Ok(ExitCode::SUCCESS)
}

/// Ends the program if options are for another family of chips. Variables are not checked, here and
/// below: they may be for the backend, or for other models.
fn check_options(args: &RepackArgs, chip: &Chip) {
    let options = [
        ("--rules", args.rules.is_some()),
        ("--calibrate", args.calibrate.is_some()),
        ("--imatrix", args.imatrix.is_some()),
    ];
    let given = options.iter().find(|(_, given)| *given);
    if let (Chip::Hexagon(_), Some((option, _))) = (chip, given) {
        let message = format!("{option} is for Rockchip NPUs, not for {}", args.chip);
        (crate::Cli::command().error(ErrorKind::ArgumentConflict, message)).exit();
    }
}

/// Refuses a rule that decides nothing. One that keeps a weight off the NPU decides, too.
fn check_rules(
    args: &RepackArgs,
    config: &Config,
    chip: &Chip,
    header: &Header,
) -> Result<(), ToolError> {
    let mut without = Chip::new(&args.chip, config)?;
    if let Chip::Rockchip(target) = &mut without {
        target.rules = Rules::default();
    }
    let tied = chip::is_tied(header);
    let is_taken = |tensor: &&TensorInfo| {
        [chip, &without]
            .iter()
            .any(|it| it.form(tensor, tied).is_ok())
    };
    let weights = header.tensors.iter().filter(is_taken);
    let names: Vec<&str> = weights.map(|tensor| tensor.name.as_str()).collect();
    if names.is_empty() {
        // Nothing is packed because of the weights' types, which another message explains.
        return Ok(());
    }
    let checked = config.rules.check(&names);
    checked.map_err(|reason| format!("--rules {reason}").into())
}

/// Bytes of a tensor that are looked at between two releases.
const CHECK_BYTES: usize = 4 << 20;

/// Returns the first result of `find` in a tensor's bytes, which gets a piece and its place in the
/// tensor.
fn find_in<T>(
    file: &File,
    tensor: &TensorInfo,
    find: impl Fn(usize, &[u8]) -> Option<T>,
) -> Option<T> {
    for (chunk, bytes) in file.data(tensor).chunks(CHECK_BYTES).enumerate() {
        let first = chunk * CHECK_BYTES;
        let found = find(first, bytes);
        if found.is_some() {
            return found;
        }
        // Including the page that this chunk shares with the previous one.
        file.release(
            tensor,
            first.saturating_sub(CHECK_BYTES)..first + bytes.len(),
        );
    }
    None
}

/// Refuses numbers that no scale can be found for. Blocks of quantized types are checked after
/// packing.
fn check_values(file: &File, tensor: &TensorInfo) -> Result<(), ToolError> {
    let index = find_in(file, tensor, |first, bytes| {
        let index = not_finite(tensor.dtype, bytes)?;
        Some(index + first / tensor.dtype.block_bytes())
    });
    let Some(index) = index else {
        return Ok(());
    };
    let (name, k) = (&tensor.name, tensor.ne[0]);
    let (row, weight) = (index / k, index % k);
    Err(format!("row {row} of {name}: weight {weight} is no finite number").into())
}

/// Returns a finite value of a weight that becomes F16 on Hexagon but that F16 has no finite value
/// for.
fn beyond_f16(file: &File, tensor: &TensorInfo, form: &Form) -> Option<f32> {
    if !form.rounds_to_f16() {
        return None;
    }
    find_in(file, tensor, |_, bytes| {
        form.beyond_f16(tensor.dtype, bytes)
    })
}

/// Returns the options of the pack, in the words of the command line.
fn options(args: &RepackArgs, config: &Config, chip: &Chip) -> String {
    let mut options = Vec::new();
    if let Chip::Rockchip(target) = chip {
        let rules = args
            .rules
            .clone()
            .or(std::env::var("GGML_RUST_NPU_RULES").ok());
        options.extend(rules.map(|rules| format!("--rules {rules}")));
        let asks = |choice| target.rules.ask_for(choice);
        if asks(Choice::Int4) || asks(Choice::Int4Fp16) {
            options.push(format!(
                "--calibrate {}",
                config::calibration_word(config.calibration)
            ));
        }
        let imatrix = args.imatrix.as_ref().and_then(|path| path.file_name());
        options.extend(imatrix.map(|name| format!("--imatrix {}", name.display())));
    }
    options.join(" ")
}

fn is_int4(form: &Form) -> bool {
    matches!(form, Form::Rockchip(layout, _) if layout.precision.is_int4())
}

/// Returns `true` for weights whose rounding errors can be compensated: integers that are rotated.
fn is_rotated(form: &Form) -> bool {
    let of_int8 = |precision| matches!(precision, Precision::Int8 | Precision::Int8Wide);
    is_int4(form) || matches!(form, Form::Rockchip(layout, _) if of_int8(layout.precision))
}

/// Returns the mean square of each input of an INT8 or INT4 weight, if they are known. Those of
/// experts in INT8 are not used. Weights in INT8 and outside of the model's blocks may have none:
/// llama-imatrix leaves out the head by default, and always if it shares the embeddings.
///
/// # Errors
/// Text that names a weight that cannot be packed with statistics.
fn means<'a>(
    (tensor, form): &RepackJob,
    imatrix: Option<&'a Imatrix>,
) -> Result<Option<&'a [f32]>, ToolError> {
    let Some(imatrix) = imatrix.filter(|_| is_rotated(form)) else {
        return Ok(None);
    };
    let name = &tensor.name;
    if tensor.ne[2] > 1 && !is_int4(form) {
        return Ok(None);
    }
    if tensor.ne[2] > 1 {
        return Err(format!("{name} has experts, which --imatrix does not support in INT4").into());
    }
    let is_needed = is_int4(form) && name.starts_with("blk.");
    if !is_needed && !imatrix.has(tensor) {
        return Ok(None);
    }
    imatrix.of(tensor).map(Some)
}

/// Names the weights that become INT8 or INT4 without statistics.
///
/// # Errors
/// Text if none has.
fn say_without_statistics(jobs: &[RepackJob], means: &[Option<&[f32]>]) -> Result<(), ToolError> {
    if means.iter().all(Option::is_none) {
        return Err("--imatrix has statistics of no weight that becomes INT8 or INT4".into());
    }
    for ((tensor, form), means) in jobs.iter().zip(means) {
        if is_rotated(form) && means.is_none() {
            say(format_args!(
                "{} is rounded as without --imatrix, which says nothing of it",
                tensor.name
            ));
        }
    }
    Ok(())
}

/// Returns the weights that the chip accepts. Prints a line for each one that cannot be packed
/// here.
fn jobs<'a>(file: &'a File, chip: &Chip) -> Vec<RepackJob<'a>> {
    let tied = chip::is_tied(file.header());
    let mut jobs = Vec::new();
    for tensor in &file.header().tensors {
        let Ok(form) = chip.form(tensor, tied) else {
            continue;
        };
        if !form.can_pack(tensor.dtype) {
            let (name, dtype) = (&tensor.name, tensor.dtype.name());
            say(format_args!(
                "{name} is packed when it is loaded: it is {dtype}, which only llama.cpp can read"
            ));
            continue;
        }
        // Beyond F16's range, the device does not use F16 for it at run time either.
        if let Some(value) = beyond_f16(file, tensor, &form) {
            let name = &tensor.name;
            say(format_args!(
                "{name} is not packed: it has the value {value}, beyond F16's range"
            ));
            continue;
        }
        jobs.push((tensor, form));
    }
    jobs
}
