//! `ggml-npu inspect`: what is in a model, and which way each weight would take on a chip.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use clap::builder::PossibleValuesParser;
use ggml_rust_npu::caps;
use ggml_rust_npu::config::Config;
use ggml_rust_npu::gguf::{File, TensorInfo, Value};
use serde::Serialize;

use self::path::{Chip, Path};
use crate::Failure;

mod path;

/// Show a model's tensors, and where each would be computed
///
/// With --chip, each weight is shown with the arithmetic that it takes on that NPU, or the reason why it stays on the CPU.
/// GGML_RUST_NPU_RULES counts, as it does for the backend. No NPU is needed.
#[derive(Debug, ClapArgs)]
pub struct Args {
    /// A GGUF
    file: PathBuf,
    /// Chip to plan for
    #[arg(long, value_parser = PossibleValuesParser::new(chips()))]
    chip: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn chips() -> impl Iterator<Item = &'static str> {
    let rockchip = caps::ROCKCHIP.into_iter().map(|caps| caps.soc.name());
    rockchip.chain(caps::HEXAGON.iter().map(|caps| caps.name))
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    file: PathBuf,
    version: u32,
    architecture: String,
    name: String,
    metadata_entries: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    chip: Option<String>,
    tensors: Vec<Row>,
    /// Bytes of all tensors.
    bytes: usize,
}

/// One tensor.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    #[serde(rename = "type")]
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none", flatten)]
    path: Option<Path>,
}

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let file = File::open(&args.file).map_err(|error| match error {
        error @ ggml_rust_npu::gguf::Error::Io { .. } => error.to_string(),
        error => format!("{}: {error}", args.file.display()),
    })?;
    let header = file.header();
    let chip = match &args.chip {
        Some(name) => Some(Chip::new(name, Config::from_env()?.rules)?),
        None => None,
    };
    let text = |key: &str| {
        let value = header.get(key).and_then(Value::as_str);
        value.unwrap_or("(not set)").to_owned()
    };
    let tied = header.tensor("output.weight").is_none();
    let row = |tensor: &TensorInfo| Row {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name(),
        shape: tensor.ne[..tensor.dims].to_vec(),
        bytes: tensor.range.len(),
        path: chip.as_ref().map(|chip| chip.path(tensor, tied)),
    };
    let report = Report {
        file: args.file.clone(),
        version: header.version,
        architecture: text("general.architecture"),
        name: text("general.name"),
        metadata_entries: header.entries.len(),
        chip: args.chip.clone(),
        bytes: header.tensors.iter().map(|tensor| tensor.range.len()).sum(),
        tensors: header.tensors.iter().map(row).collect(),
    };
    crate::print(&if args.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        report.to_string()
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Tensors and bytes of one kind.
type Sum = (usize, usize);

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(
            f,
            "{}: GGUF {}, architecture {}, {}",
            self.file.display(),
            self.version,
            self.architecture,
            self.name
        )?;
        let wide = self.tensors.iter().map(|row| row.name.len()).max();
        let wide = wide.unwrap_or(0);
        let (mut types, mut places) = (BTreeMap::new(), BTreeMap::new());
        let add = |sums: &mut BTreeMap<&'static str, Sum>, key, bytes| {
            let sum = sums.entry(key).or_default();
            *sum = (sum.0 + 1, sum.1 + bytes);
        };
        for row in &self.tensors {
            let shape: Vec<String> = row.shape.iter().map(usize::to_string).collect();
            let shape = shape.join("x");
            write!(
                f,
                "{:wide$}  {:8} {shape:>14} {:>12}",
                row.name, row.dtype, row.bytes
            )?;
            add(&mut types, row.dtype, row.bytes);
            if let Some(path) = &row.path {
                write!(f, "  {path}")?;
                add(&mut places, path.place(), row.bytes);
            }
            writeln!(f)?;
        }
        for (key, (tensors, bytes)) in types.into_iter().chain(places) {
            writeln!(
                f,
                "{key:8} {tensors:6} tensors {:10.1} MiB",
                bytes as f64 / f64::from(1 << 20)
            )?;
        }
        Ok(())
    }
}
