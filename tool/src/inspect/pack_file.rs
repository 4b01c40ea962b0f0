//! The content of a pack file, and a comparison of it with a model.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ggml_rust_npu::gguf::{File, GgmlType};
use ggml_rust_npu::packfile::{Entry, Pack, VERSION, Wanted};
use serde::Serialize;

use crate::ToolError;
use crate::files::Files;
use crate::progress::Progress;
use crate::text::{Column, escaped, print, print_json, table};

/// The report.
#[derive(Debug, Serialize)]
struct PackReport {
    file: String,
    version: u32,
    chip: String,
    options: String,
    tensors: Vec<PackRow>,
    /// Packed bytes and scales of all tensors.
    packed_bytes: u64,
}

/// One tensor.
#[derive(Debug, Serialize)]
struct PackRow {
    name: String,
    #[serde(rename = "type")]
    dtype: &'static str,
    shape: [u64; 4],
    layout: String,
    packed_bytes: u64,
    scales: u64,
    sampled_hash: String,
    full_hash: String,
    payload_hash: String,
    /// Square error over the square of the weights.
    error: f64,
    /// The tensor's error, if one was looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Prints the content of a pack. With `verify`, payloads are read, and compared with a model if
/// there is one; the exit code is 1 if one differs.
///
/// # Errors
/// Text for the user.
pub fn run(
    path: &Path,
    json: bool,
    verify: Option<&Option<PathBuf>>,
) -> Result<ExitCode, ToolError> {
    let pack = Pack::open(path).map_err(|error| match error {
        error @ ggml_rust_npu::packfile::Error::Io { .. } => error.to_string(),
        error => format!("{}: {error}", path.display()),
    })?;
    let model = match verify {
        Some(Some(model)) => Some(Files::default().gguf(model)?),
        _ => None,
    };
    let table = pack.table();
    let bytes = table.entries.iter().map(|entry| entry.bytes).sum();
    let progress = verify.is_some().then(|| Progress::new("verifying", bytes));
    let row = |entry: &Entry| {
        let source = &entry.source;
        PackRow {
            name: source.name.clone(),
            dtype: GgmlType::from_number(source.dtype).map_or("?", GgmlType::name),
            shape: source.ne,
            layout: entry.layout.to_string(),
            packed_bytes: entry.bytes,
            scales: entry.scales,
            sampled_hash: format!("{:032x}", source.sampled),
            full_hash: format!("{:032x}", source.full),
            payload_hash: format!("{:032x}", entry.payload),
            error: entry.error,
            problem: verify.and_then(|_| {
                let found = problem(&pack, entry, model.as_ref());
                if let Some(progress) = &progress {
                    progress.add(entry.bytes);
                }
                found
            }),
        }
    };
    let report = PackReport {
        file: path.display().to_string(),
        version: VERSION,
        chip: table.chip.clone(),
        options: table.options.clone(),
        tensors: table.entries.iter().map(row).collect(),
        packed_bytes: table.entries.iter().map(Entry::payload_bytes).sum(),
    };
    if let Some(progress) = &progress {
        progress.finish();
    }
    match json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    let broken = report.tensors.iter().any(|row| row.problem.is_some());
    Ok(if broken {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Returns the error of a tensor, if it has one.
fn problem(pack: &Pack, entry: &Entry, model: Option<&File>) -> Option<String> {
    if let Err(error) = pack.check(entry) {
        return Some(error.to_string());
    }
    let model = model?;
    let name = &entry.source.name;
    let Some(tensor) = model.header().tensor(name) else {
        return Some("the model has no such tensor".into());
    };
    let (dtype, format) = tensor.dtype.tensor_type();
    let wanted = Wanted {
        name,
        dtype,
        format,
        ne: tensor.ne,
        source: model.data(tensor),
        layout: entry.layout,
    };
    let other = entry.source.compare(&wanted, true).err()?;
    Some(format!("the model's {other} is another one"))
}

impl fmt::Display for PackReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(
            f,
            "{}: pack {} for {} {}",
            escaped(&self.file),
            self.version,
            escaped(&self.chip),
            escaped(&self.options)
        )?;
        let mut columns = vec![
            Column::Text("name"),
            Column::Text("type"),
            Column::Number("shape"),
            Column::Number("packed"),
            Column::Number("error"),
            Column::Text("source"),
            Column::Text("layout"),
        ];
        if self.tensors.iter().any(|row| row.problem.is_some()) {
            columns.push(Column::Text("PROBLEM"));
        }
        let rows = self.tensors.iter().map(|row| {
            let dims = row.shape.iter().rposition(|size| *size != 1).unwrap_or(0) + 1;
            let shape: Vec<String> = row.shape[..dims].iter().map(u64::to_string).collect();
            let mut cells = vec![
                escaped(&row.name),
                row.dtype.into(),
                shape.join("x"),
                row.packed_bytes.to_string(),
                format!("{:.2e}", row.error),
                row.sampled_hash.clone(),
                row.layout.clone(),
            ];
            cells.extend(row.problem.as_ref().map(escaped));
            cells
        });
        f.write_str(&table(&columns, rows))?;
        writeln!(
            f,
            "{} tensors, {:.1} MiB",
            self.tensors.len(),
            self.packed_bytes as f64 / f64::from(1 << 20)
        )
    }
}
