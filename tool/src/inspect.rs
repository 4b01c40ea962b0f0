//! `ggml-npu inspect`: the content of a model, and the place of each weight on a chip.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args as ClapArgs;
use ggml_rust_npu::config::Config;
use ggml_rust_npu::files::open_input;
use ggml_rust_npu::gguf::{TensorInfo, Value};
use ggml_rust_npu::packfile;
use serde::Serialize;

use crate::ToolError;
use crate::chip::{self, Chip};
use crate::files::Files;
use crate::text::{plain, print, print_json};

mod pack_file;

/// Show the tensors of a model, and where each would be computed, or those of a pack file
///
/// With --chip, each weight of a model is shown with the arithmetic that it takes on that NPU, or
/// the reason why it stays on the CPU. GGML_RUST_NPU_RULES counts, as it does for the backend. No
/// NPU is needed. Tensors of a pack file are shown with their layout, size, the fingerprint of
/// their source, and what packing lost.
#[derive(Debug, ClapArgs)]
pub struct InspectArgs {
    /// A GGUF, or a pack file
    file: PathBuf,
    /// Chip to plan for
    #[arg(long, value_parser = chip::names())]
    chip: Option<String>,
    /// Check all bytes of a pack file, and that it was made from this model; exit code 1 if not
    #[arg(long, value_name = "MODEL", num_args = 0..=1, conflicts_with = "chip")]
    verify: Option<Option<PathBuf>>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Place where a tensor is computed.
#[derive(Debug, Serialize)]
#[serde(tag = "place", rename_all = "lowercase")]
enum Path {
    /// On the NPU.
    Npu {
        /// Arithmetic or type there, and how it comes to be.
        how: String,
        /// Bytes in the NPU's memory.
        packed_bytes: usize,
    },
    /// On the CPU.
    Cpu {
        /// Why.
        reason: String,
    },
}

impl Path {
    fn of(chip: &Chip, tensor: &TensorInfo, tied: bool) -> Self {
        match chip.form(tensor, tied) {
            Ok(form) => Self::Npu {
                how: form.to_string(),
                packed_bytes: form.bytes(),
            },
            Err(reason) => Self::Cpu { reason },
        }
    }

    /// Returns `NPU` or `CPU`.
    fn place(&self) -> &'static str {
        match self {
            Self::Npu { .. } => "NPU",
            Self::Cpu { .. } => "CPU",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Npu { how, packed_bytes } => write!(f, "NPU  {how}, {packed_bytes} bytes"),
            Self::Cpu { reason } => write!(f, "CPU  {reason}"),
        }
    }
}

/// Returns `true` if a file begins as pack files do. What cannot be read is for the reader of
/// models to say.
fn is_pack(path: &std::path::Path) -> bool {
    let mut begin = packfile::MAGIC.map(|_| 0);
    let read = open_input(path).and_then(|mut file| file.read_exact(&mut begin));
    read.is_ok() && begin == packfile::MAGIC
}

/// The report.
#[derive(Debug, Serialize)]
struct InspectReport {
    file: String,
    version: u32,
    architecture: String,
    name: String,
    metadata_entries: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    chip: Option<String>,
    tensors: Vec<TensorRow>,
    /// Bytes of all tensors.
    bytes: usize,
}

/// One tensor.
#[derive(Debug, Serialize)]
struct TensorRow {
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
pub fn run(args: &InspectArgs) -> Result<ExitCode, ToolError> {
    if is_pack(&args.file) {
        return pack_file::run(&args.file, args.json, args.verify.as_ref());
    }
    if args.verify.is_some() {
        return Err(format!(
            "--verify is for pack files, and {} is none",
            args.file.display()
        )
        .into());
    }
    let file = Files::default().gguf(&args.file)?;
    let header = file.header();
    let chip = match &args.chip {
        Some(name) => Some(Chip::new(name, &Config::from_env()?)?),
        None => None,
    };
    let text = |key: &str| {
        let value = header.get(key).and_then(Value::as_str);
        value.unwrap_or("(not set)").to_owned()
    };
    let tied = chip::is_tied(header);
    let row = |tensor: &TensorInfo| TensorRow {
        name: tensor.name.clone(),
        dtype: tensor.dtype.name(),
        shape: tensor.ne[..tensor.dims].to_vec(),
        bytes: tensor.range.len(),
        path: chip.as_ref().map(|chip| Path::of(chip, tensor, tied)),
    };
    let report = InspectReport {
        file: args.file.display().to_string(),
        version: header.version,
        architecture: text("general.architecture"),
        name: text("general.name"),
        metadata_entries: header.entries.len(),
        chip: args.chip.clone(),
        bytes: header.tensors.iter().map(|tensor| tensor.range.len()).sum(),
        tensors: header.tensors.iter().map(row).collect(),
    };
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Tensors and bytes of one kind.
type Sum = (usize, usize);

impl fmt::Display for InspectReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(
            f,
            "{}: GGUF {}, architecture {}, {}",
            plain(&self.file),
            self.version,
            plain(&self.architecture),
            plain(&self.name)
        )?;
        let names: Vec<String> = self.tensors.iter().map(|row| plain(&row.name)).collect();
        let wide = names.iter().map(String::len).max();
        let wide = wide.unwrap_or(0);
        let (mut types, mut places) = (BTreeMap::new(), BTreeMap::new());
        let add = |sums: &mut BTreeMap<&'static str, Sum>, key, bytes| {
            let sum = sums.entry(key).or_default();
            *sum = (sum.0 + 1, sum.1 + bytes);
        };
        for (row, name) in self.tensors.iter().zip(&names) {
            let shape: Vec<String> = row.shape.iter().map(usize::to_string).collect();
            let shape = shape.join("x");
            write!(
                f,
                "{name:wide$}  {:8} {shape:>14} {:>12}",
                row.dtype, row.bytes
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
