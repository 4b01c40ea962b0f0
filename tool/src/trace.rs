//! `ggml-npu trace`: sums up the timeline that `GGML_RUST_NPU_TRACE=trace.json` wrote.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use ggml_rust_npu::files::open_input;
use serde::{Deserialize, Serialize};

use crate::ToolError;
use crate::text::{Column, escaped, print, print_json, table};

/// Looks at what a device did, as GGML_RUST_NPU_TRACE=trace.json noted it
#[derive(Debug, Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Debug, Subcommand)]
enum TraceCommand {
    Summary(SummaryArgs),
}

/// Prints a table of the operations, those that took longest first: to paste into an issue
#[derive(Debug, Args)]
struct SummaryArgs {
    /// The trace; also one of a program that was killed
    file: PathBuf,
    /// The number of rows for each device; 0 prints all
    #[arg(long, default_value_t = 20, value_name = "N")]
    rows: usize,
    /// Prints JSON, with all rows
    #[arg(long)]
    json: bool,
}

/// An event, as Chrome's format has it.
// SOURCE: Trace Event Format, "Complete Events" and "Metadata Events".
#[derive(Debug, Deserialize)]
struct TraceEvent {
    ph: String,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    tid: u64,
    name: String,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: EventArgs,
}

#[derive(Debug, Default, Deserialize)]
struct EventArgs {
    name: Option<String>,
    graph: Option<u64>,
    shape: Option<String>,
    modelled_us: Option<f64>,
    device_us: Option<f64>,
}

/// Operations of one kind and shape on one device.
#[derive(Clone, Debug, Default, Serialize)]
struct OperationSum {
    operation: String,
    shape: String,
    count: u64,
    /// Measured, on the CPU's side.
    host_us: f64,
    /// Measured, on the NPU's side.
    device_us: f64,
    modelled_us: f64,
    /// The track with the most time by the cost model, not counting those of the host and of the
    /// queue.
    longest: Option<String>,
    #[serde(skip)]
    tracks: BTreeMap<u64, f64>,
}

#[derive(Debug, Default, Serialize)]
struct DeviceSum {
    /// The device's name, and the measured unit.
    device: String,
    graphs: usize,
    operations: Vec<OperationSum>,
}

/// Numbers of the tracks in a device's part of the file.
const HOST: u64 = 1;
const QUEUE: u64 = 2;

pub fn run(args: &TraceArgs) -> Result<ExitCode, ToolError> {
    let TraceCommand::Summary(args) = &args.command;
    let devices = sums(read(&args.file)?);
    if devices.is_empty() {
        return Err(format!("{}: no operation was noted", args.file.display()).into());
    }
    if args.json {
        print_json(&devices)?;
    } else {
        let most = if args.rows == 0 {
            usize::MAX
        } else {
            args.rows
        };
        let shown: Vec<String> = devices.iter().map(|device| device.text(most)).collect();
        print(&shown.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the events. The end of the array may be missing, and the last event may be cut off.
fn read(path: &Path) -> Result<Vec<TraceEvent>, ToolError> {
    let mut bytes = Vec::new();
    let read = open_input(path).and_then(|mut file| file.read_to_end(&mut bytes));
    read.map_err(|error| format!("{}: {error}", path.display()))?;
    let text = String::from_utf8_lossy(&bytes);
    let error = match serde_json::from_str(&text) {
        Ok(events) => return Ok(events),
        Err(error) => error,
    };
    // An event ends with its line, so an incomplete last line is dropped.
    let lines = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    let events = lines.trim_end().trim_end_matches(',');
    serde_json::from_str(&format!("{events}]")).map_err(|_| {
        let path = path.display();
        format!("{path}: not a trace of GGML_RUST_NPU_TRACE: {error}").into()
    })
}

/// Sums events up by device, operation and shape.
fn sums(events: Vec<TraceEvent>) -> Vec<DeviceSum> {
    let mut names = BTreeMap::new();
    let mut tracks = BTreeMap::new();
    let mut graphs: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut found: BTreeMap<(u64, String, String), OperationSum> = BTreeMap::new();
    for event in events {
        let TraceEvent { pid, tid, args, .. } = event;
        match (event.ph.as_str(), event.name.as_str(), args.name) {
            ("M", "process_name", Some(name)) => drop(names.insert(pid, name)),
            ("M", "thread_name", Some(name)) => drop(tracks.insert(tid, name)),
            ("X", ..) => {
                // The bar of a whole graph has no shape, and is skipped.
                let Some(shape) = args.shape else {
                    graphs.entry(pid).or_default().extend(args.graph);
                    continue;
                };
                let key = (pid, event.name.clone(), shape.clone());
                let sum = found.entry(key).or_default();
                if tid == HOST {
                    (sum.operation, sum.shape) = (event.name, shape);
                    sum.count += 1;
                    sum.host_us += event.dur;
                    sum.device_us += args.device_us.unwrap_or(0.0);
                    sum.modelled_us += args.modelled_us.unwrap_or(0.0);
                } else if tid != QUEUE {
                    *sum.tracks.entry(tid).or_default() += event.dur;
                }
            }
            _ => {}
        }
    }
    let mut devices: BTreeMap<u64, DeviceSum> = BTreeMap::new();
    for ((pid, ..), mut sum) in found {
        let longest = sum.tracks.iter().max_by(|a, b| a.1.total_cmp(b.1));
        sum.longest = longest.and_then(|(tid, _)| tracks.get(tid).cloned());
        devices.entry(pid).or_default().operations.push(sum);
    }
    for (pid, device) in &mut devices {
        device.device = names.get(pid).cloned().unwrap_or_default();
        device.graphs = graphs.get(pid).map_or(0, Vec::len);
        (device.operations).sort_by(|a, b| b.host_us.total_cmp(&a.host_us));
    }
    devices.into_values().collect()
}

impl DeviceSum {
    /// Formats the device's table, with at most `most` rows and a last one for all.
    fn text(&self, most: usize) -> String {
        let mut total = OperationSum {
            operation: "all".into(),
            ..OperationSum::default()
        };
        for sum in &self.operations {
            total.count += sum.count;
            total.host_us += sum.host_us;
            total.device_us += sum.device_us;
            total.modelled_us += sum.modelled_us;
        }
        let all = total.host_us;
        let rows = self.operations.iter().take(most).chain([&total]);
        let columns = [
            Column::Text("operation"),
            Column::Text("result"),
            Column::Number("count"),
            Column::Number("host us"),
            Column::Number("%"),
            Column::Number("device us"),
            Column::Number("modelled us"),
            Column::Text("longest"),
        ];
        let mut out = String::new();
        let version = env!("CARGO_PKG_VERSION");
        // Writing to a string cannot fail.
        let _ = writeln!(out, "ggml-npu {version}: {}", escaped(&self.device));
        let left = self.operations.len().saturating_sub(most);
        let _ = writeln!(
            out,
            "graphs: {}; host and device are measured\n",
            self.graphs
        );
        out += &table(
            &columns,
            rows.map(|sum| {
                vec![
                    escaped(&sum.operation),
                    escaped(&sum.shape),
                    sum.count.to_string(),
                    format!("{:.0}", sum.host_us),
                    format!("{:.1}", 100.0 * sum.host_us / all.max(f64::MIN_POSITIVE)),
                    format!("{:.0}", sum.device_us),
                    format!("{:.0}", sum.modelled_us),
                    escaped(sum.longest.as_deref().unwrap_or_default()),
                ]
            }),
        );
        if left > 0 {
            let _ = writeln!(out, "{left} more rows: --rows 0");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: &str = r#"[
{"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"HEX0 (simulated): remark"}},
{"ph":"M","pid":1,"tid":3,"name":"thread_name","args":{"name":"DMA"}},
{"ph":"M","pid":1,"tid":5,"name":"thread_name","args":{"name":"matrix unit"}},
{"ph":"X","pid":1,"tid":1,"ts":0.0,"dur":30.0,"name":"ADD","cat":"measured","args":{"graph":0,"shape":"8x1x1x1","modelled_us":1.0,"device_us":20.0}},
{"ph":"X","pid":1,"tid":1,"ts":40.0,"dur":70.0,"name":"MUL_MAT","cat":"measured","args":{"graph":0,"shape":"8x1x1x1","modelled_us":5.0,"device_us":50.0}},
{"ph":"X","pid":1,"tid":3,"ts":50.0,"dur":5.0,"name":"MUL_MAT","cat":"modelled","args":{"graph":0,"shape":"8x1x1x1"}},
{"ph":"X","pid":1,"tid":5,"ts":50.0,"dur":2.0,"name":"MUL_MAT","cat":"modelled","args":{"graph":0,"shape":"8x1x1x1"}},
{"ph":"X","pid":1,"tid":1,"ts":0.0,"dur":120.0,"name":"graph 0 (2 operations)","cat":"measured","args":{"graph":0}}
]
"#;

    fn read_text(name: &str, text: &str) -> Result<Vec<TraceEvent>, ToolError> {
        let path = std::env::temp_dir().join(format!("{name}-{}.json", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let events = read(&path);
        std::fs::remove_file(path).unwrap();
        events
    }

    #[test]
    fn operations_are_summed_up_those_that_took_longest_first() {
        let devices = sums(read_text("trace-sums", EVENTS).unwrap());
        let text = anstream::adapter::strip_str(&devices[0].text(20)).to_string();
        let version = env!("CARGO_PKG_VERSION");
        let want = format!(
            "ggml-npu {version}: HEX0 (simulated): remark\ngraphs: 1; host and device are measured\n\n\
             operation  result   count  host us      %  device us  modelled us  longest\n\
             MUL_MAT    8x1x1x1      1       70   70.0         50            5  DMA\n\
             ADD        8x1x1x1      1       30   30.0         20            1\n\
             all                     2      100  100.0         70            6\n"
        );
        assert_eq!(text, want);
        assert!(devices[0].text(1).ends_with("1 more rows: --rows 0\n"));
    }

    /// As a program leaves it that is killed while it writes.
    #[test]
    fn every_beginning_of_a_file_can_be_read() {
        let whole = read_text("trace-whole", EVENTS).unwrap().len();
        let first = EVENTS.find('\n').unwrap() + 1;
        for end in first..EVENTS.len() {
            let events = read_text("trace-cut", &EVENTS[..end]);
            let count = events
                .unwrap_or_else(|error| panic!("{end}: {error}"))
                .len();
            let lines = EVENTS[..end].matches("\n{").count();
            assert!(
                count <= lines && count + 1 >= lines,
                "{end}: {count} of {lines}"
            );
        }
        assert_eq!(whole, 8);
    }

    #[test]
    fn other_files_are_refused() {
        for text in ["", "{}", "[1, 2]\n", "device,graph\nHEX0,0\n", "[\n{]\n"] {
            let events = read_text("trace-other", text);
            assert!(events.is_err() || events.unwrap().is_empty(), "{text}");
        }
        assert!(read(Path::new("/no/such/trace.json")).is_err());
    }
}
