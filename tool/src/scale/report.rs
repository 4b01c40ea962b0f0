//! Accuracy against N, as a table, as comma-separated values, as JSON, and as a picture.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args as ClapArgs, ValueEnum as _};
use ggml_rust_npu::files::open_input;
use test_time_scaling::journal;
use test_time_scaling::summary::{Latency, SummaryRow, summarize};

use super::{AggregateName, plot};
use crate::ToolError;
use crate::files::{self, Files};
use crate::model;
use crate::text::{self, Column, escaped, print_json, table};

/// Print accuracy against the number of solutions
#[derive(Debug, ClapArgs)]
pub struct ReportArgs {
    /// Files of finished problems
    #[arg(required = true)]
    samples: Vec<PathBuf>,
    /// The rule that makes one score of those of the steps, for best-of-n [default: that of the
    /// run]
    #[arg(long, value_enum)]
    aggregate: Option<AggregateName>,
    /// Reckon seconds for a problem with this GGUF, as `ggml-npu model` does
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,
    /// The chip to reckon for
    #[arg(long, default_value = "hexagon-v75", value_parser = model::chips(), requires = "model")]
    chip: String,
    /// Tokens of a prompt, which all samples of a problem share
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20), requires = "model")]
    prompt_tokens: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also write comma-separated values
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also draw accuracy over seconds, or over tokens without --model, as an SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Columns of the table.
const COLUMNS: [Column; 10] = [
    Column::Text("model"),
    Column::Text("method"),
    Column::Number("N"),
    Column::Number("problems"),
    Column::Number("correct"),
    Column::Number("accuracy"),
    Column::Number("95 % interval"),
    Column::Number("tokens"),
    Column::Number("seconds"),
    Column::Number("joules"),
];

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &ReportArgs) -> Result<ExitCode, ToolError> {
    let mut files = Files::default();
    for path in args.samples.iter().chain(&args.model) {
        files.input(path)?;
    }
    for path in args.csv.iter().chain(&args.svg) {
        files.output(path)?;
    }
    let latency = match &args.model {
        Some(path) => Some(model::latency(
            path,
            &args.chip,
            args.prompt_tokens as usize,
        )?),
        None => None,
    };
    let latency = latency.as_ref().map(|latency| latency as Latency<'_>);
    let mut rows = Vec::new();
    for path in &args.samples {
        rows.extend(read(path, args.aggregate, latency)?);
    }
    if let Some(path) = &args.csv {
        files::write(path, csv(&rows)?.as_bytes())?;
    }
    if let Some(path) = &args.svg {
        files::write(path, plot::draw(&rows).as_bytes())?;
    }
    match args.json {
        true => print_json(&rows)?,
        false => text::print(&table(&COLUMNS, rows.iter().map(cells)))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the table of one journal.
///
/// # Errors
/// Text that names the file.
pub fn print(path: &Path) -> Result<(), ToolError> {
    let rows = read(path, None, None)?;
    text::print(&table(&COLUMNS, rows.iter().map(cells)))
}

fn read(
    path: &Path,
    aggregate: Option<AggregateName>,
    latency: Option<Latency<'_>>,
) -> Result<Vec<SummaryRow>, ToolError> {
    let mut bytes = Vec::new();
    let read = open_input(path).and_then(|mut file| file.read_to_end(&mut bytes));
    read.map_err(|error| format!("{}: {error}", path.display()))?;
    let (settings, entries) = journal::parse(path, &bytes)?;
    let of_run = settings.get("aggregate").and_then(|name| name.as_str());
    let of_run = of_run.and_then(|name| AggregateName::from_str(name, false).ok());
    let aggregate = aggregate.or(of_run).unwrap_or(AggregateName::Last);
    Ok(summarize(&settings, &entries, aggregate.into(), latency))
}

fn cells(row: &SummaryRow) -> Vec<String> {
    let percent = |share: f64| format!("{:.1}", share * 100.0);
    vec![
        escaped(&row.model),
        escaped(&row.method),
        row.n.to_string(),
        row.problems.to_string(),
        row.correct.to_string(),
        format!("{} %", percent(row.accuracy)),
        format!("{} to {}", percent(row.low), percent(row.high)),
        format!("{:.0}", row.tokens),
        row.seconds
            .map_or("-".into(), |seconds| format!("{seconds:.2}")),
        row.joules
            .map_or("-".into(), |joules| format!("{joules:.1}")),
    ]
}

fn csv(rows: &[SummaryRow]) -> Result<String, ToolError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row)?;
    }
    let bytes = writer.into_inner().map_err(|error| error.to_string())?;
    Ok(String::from_utf8(bytes)?)
}
