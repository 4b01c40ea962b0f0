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
use crate::text::{Column, escaped, print, print_json, table};

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
    /// Chip to plan for, of a model
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
        /// Arithmetic or type on the NPU, and the conversion of the weights to it.
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
            Err(_) if chip.reads_as_it_is(tensor, tied) => Self::Npu {
                how: format!("{}, as it is", tensor.dtype.name()),
                packed_bytes: tensor.range.len(),
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

    /// Returns the place, the bytes there, and the conversion or the reason.
    fn cells(&self) -> [String; 3] {
        match self {
            Self::Npu { how, packed_bytes } => {
                [self.place().into(), packed_bytes.to_string(), how.clone()]
            }
            Self::Cpu { reason } => [self.place().into(), String::new(), reason.clone()],
        }
    }
}

/// Returns `true` if a file begins as pack files do. A file that cannot be read is left to the
/// reader of models, which reports the error.
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
        if args.chip.is_some() {
            return Err(format!(
                "--chip is for models, and {} is a pack file",
                args.file.display()
            )
            .into());
        }
        return pack_file::run(&args.file, args.json, args.verify.as_ref());
    }
    if args.verify.is_some() {
        return Err(format!(
            "--verify is for pack files, and {} is none",
            args.file.display()
        )
        .into());
    }
    let (file, chip) = match &args.chip {
        Some(name) => {
            let chip = Chip::new(name, &Config::from_env()?)?;
            (Files::default().gguf(&args.file)?, Some(chip))
        }
        None => (Files::default().gguf_or_part(&args.file)?, None),
    };
    let header = file.header();
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
            escaped(&self.file),
            self.version,
            escaped(&self.architecture),
            escaped(&self.name)
        )?;
        let mut columns = vec![
            Column::Text("name"),
            Column::Text("type"),
            Column::Number("shape"),
            Column::Number("bytes"),
        ];
        if self.chip.is_some() {
            columns.extend([
                Column::Text("place"),
                Column::Number("packed"),
                Column::Text("how, or why not"),
            ]);
        }
        let rows = self.tensors.iter().map(|row| {
            let shape: Vec<String> = row.shape.iter().map(usize::to_string).collect();
            let mut cells = vec![
                escaped(&row.name),
                row.dtype.into(),
                shape.join("x"),
                row.bytes.to_string(),
            ];
            cells.extend(row.path.iter().flat_map(Path::cells));
            cells
        });
        writeln!(f, "{}", table(&columns, rows))?;
        let (mut types, mut places) = (BTreeMap::new(), BTreeMap::new());
        let add = |sums: &mut BTreeMap<&'static str, Sum>, key, bytes| {
            let sum = sums.entry(key).or_default();
            *sum = (sum.0 + 1, sum.1 + bytes);
        };
        for row in &self.tensors {
            add(&mut types, row.dtype, row.bytes);
            if let Some(path) = &row.path {
                add(&mut places, path.place(), row.bytes);
            }
        }
        let columns = [
            Column::Text("all of"),
            Column::Number("tensors"),
            Column::Number("MiB"),
        ];
        let sums = types.into_iter().chain(places);
        let sums = sums.map(|(key, (tensors, bytes))| {
            let mib = bytes as f64 / f64::from(1 << 20);
            vec![key.into(), tensors.to_string(), format!("{mib:.1}")]
        });
        f.write_str(&table(&columns, sums))
    }
}
