//! `ggml-npu bench`: the speed of multiplications on each device, compared with the chip's limits
//! and with the CPU.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args as ClapArgs;
use ggml_rust_npu::backend::{self, Absent, Device};
use ggml_rust_npu::config::Config;
use ggml_rust_npu::config::settings::{Setting, Settings};
use ggml_rust_npu::rockchip;

use self::cpu::Time;
use self::multiply::{Refused, TimedWeights};
use self::report::{BenchReport, BenchRow, Crossover, DeviceLine};
use crate::files::Files;
use crate::power::PowerSource;
use crate::progress::Progress;
use crate::quantize::Format;
use crate::text::{print, print_json, say};
use crate::{NO_DEVICE, ToolError, devices, files};

mod cpu;
mod multiply;
mod plot;
mod report;
mod segment;

/// Time multiplications on each device
///
/// Devices are those of `ggml-npu devices`. Each point is the least time of several runs
/// of (M x K) x (K x N), including the backend's work on the CPU. The share is that of the
/// chip's best possible time, in which it reads the weights once, or computes, whichever takes
/// longer. To find the M at which the NPU becomes faster than the CPU, give it times of
/// llama.cpp's CPU backend on the same machine:
///
///   test-backend-ops perf -b CPU -o MUL_MAT > cpu.txt
///   ggml-npu bench --cpu cpu.txt --write-config
///
/// A Rockchip NPU computes long K in segments. Shorter ones than the largest possible may be
/// faster, which depends on the version of the library:
///
///   ggml-npu bench --segments --rows 1,128 --shapes 8192x4096 --write-config
///
/// Times of a simulated device are those of its stand-in on this CPU, and say nothing of
/// the chip.
#[derive(Debug, ClapArgs)]
#[command(verbatim_doc_comment)]
pub struct BenchArgs {
    /// Rows of activations: tokens that are computed at a time
    #[arg(short, long = "rows", value_name = "M,...", value_delimiter = ',', default_value = "1,2,4,8,16,32,64,128,256,512",
        value_parser = rows)]
    m: Vec<usize>,
    /// Sizes of weights: inputs by outputs
    #[arg(
        short,
        long = "shapes",
        value_name = "KxN,...",
        value_delimiter = ',',
        default_value = "2048x2048,2048x8192,8192x2048,4096x4096"
    )]
    shapes: Vec<SizeArg>,
    /// Types of weights
    #[arg(
        short,
        long = "types",
        value_name = "TYPE,...",
        value_delimiter = ',',
        value_enum,
        default_value = "q4_0,q8_0,f16"
    )]
    types: Vec<Format>,
    /// Output of `test-backend-ops perf -b CPU -o MUL_MAT` on this machine. Its sizes of the given
    /// types are timed, too
    #[arg(long, value_name = "FILE", group = "measured")]
    cpu: Option<PathBuf>,
    /// Only time how a Rockchip NPU splits long K: for each largest K of a call, the time of the
    /// given sizes in INT8 and FP16, as a part of that with the chip's own largest K
    #[arg(long, group = "measured", conflicts_with_all = ["csv", "json", "svg", "types"])]
    segments: bool,
    /// Have the backend use what was found, by writing it to the file of settings: with --cpu the M
    /// below which the CPU is faster, with --segments the fastest largest K
    #[arg(long, requires = "measured")]
    write_config: bool,
    /// Also measure watts, for a second at each point, and print millijoules for each row of
    /// activations. A folder of /sys/class/hwmon or /sys/class/power_supply, a file with
    /// microwatts, or `command:PROGRAM`, which prints watts. They are those of all that the source
    /// measures
    #[arg(long, value_name = "SOURCE", conflicts_with = "segments")]
    power: Option<String>,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also draw operations per second over M, as an SVG that a browser shows
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Largest M: that of the setting which the results become.
const LARGEST_M: usize = 1 << 16;
/// Largest K or N.
const LARGEST_SIZE: usize = 1 << 20;
/// Most elements of weights: 4 GiB of F16.
const LARGEST_WEIGHTS: usize = 1 << 31;
/// Most elements of activations and of results: 1 GiB each.
const LARGEST_OPERAND: usize = 1 << 28;

/// Reads M.
fn rows(text: &str) -> Result<usize, String> {
    let m = text.parse().ok().filter(|m| (1..=LARGEST_M).contains(m));
    m.ok_or_else(|| format!("not a number from 1 to {LARGEST_M}"))
}

/// K and N.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SizeArg([usize; 2]);

impl FromStr for SizeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes = text.split_once('x');
        let size = |text: &str| {
            text.trim()
                .parse()
                .ok()
                .filter(|size| (1..=LARGEST_SIZE).contains(size))
        };
        sizes
            .and_then(|(k, n)| Some(Self([size(k)?, size(n)?])))
            .ok_or_else(|| format!("not K and N, from 1 to {LARGEST_SIZE}, as in 2048x8192"))
    }
}

/// Weights to time, and with how many rows.
struct Point {
    format: Format,
    k: usize,
    n: usize,
    rows: Vec<usize>,
}

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &BenchArgs) -> Result<ExitCode, ToolError> {
    let mut config = Config::from_env()?;
    devices::listen()?;
    let mut inputs = Files::default();
    let times = match &args.cpu {
        Some(path) => cpu::read(&mut inputs, path)?,
        None => Vec::new(),
    };
    let power = args.power.as_deref().map(PowerSource::open).transpose()?;
    let settings = args.write_config.then(settings).transpose()?;
    for output in args.svg.iter().chain(&settings) {
        inputs.output(output)?;
    }
    if settings.as_ref().is_some_and(|path| !path.exists()) {
        // A settings file that does not exist yet is created.
        config.settings = Ok(Settings::default());
    }
    let points = points(args, &times)?;
    if args.segments {
        return segment::run(&config, &args.shapes, &args.m, settings.as_deref());
    }
    let found = backend::find_devices(&config);
    let mut messages: Vec<String> = found.absent.iter().map(Absent::to_string).collect();
    messages.extend(devices::messages());
    let devices = found.devices;
    if devices.is_empty() {
        for message in messages {
            say(format_args!("- {message}"));
        }
        say("no NPU can be used");
        return Ok(ExitCode::from(NO_DEVICE));
    }
    let mut report = BenchReport {
        version: env!("CARGO_PKG_VERSION"),
        devices: devices.iter().map(|device| line(&**device)).collect(),
        rows: Vec::new(),
        crossovers: Vec::new(),
        notes: Vec::new(),
    };
    let steps = points.iter().map(|point| point.rows.len()).sum::<usize>() * devices.len();
    let progress = Progress::new("timing", steps as u64);
    for device in &devices {
        for point in &points {
            measure(
                device,
                point,
                &times,
                power.as_ref(),
                &progress,
                &mut report,
            )?;
        }
        let rows: Vec<&BenchRow> = report
            .rows
            .iter()
            .filter(|row| row.device == device.name())
            .collect();
        report.crossovers.extend(Crossover::of(&rows));
    }
    progress.finish();
    report.notes.extend(messages);
    report.notes.extend(devices::messages());
    if let Some(path) = &args.svg {
        plot::draw(path, &report)?;
    }
    if let Some(path) = &settings {
        for device in &devices {
            report.notes.push(write_config(&**device, &report, path)?);
        }
    }
    match (args.json, args.csv) {
        (true, _) => print_json(&report)?,
        (false, true) => print(&report.csv()?)?,
        (false, false) => print(&report.to_string())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the file of settings; its folder is made.
fn settings() -> Result<PathBuf, ToolError> {
    let path = Settings::path(|name| std::env::var(name).ok());
    let path = path.ok_or("no folder for settings: set GGML_RUST_NPU_CONFIG to a file")?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    Ok(path)
}

fn line(device: &dyn Device) -> DeviceLine {
    DeviceLine {
        name: device.name().into(),
        description: device.description(),
        chip: device.chip(),
        simulated: device.is_simulated(),
    }
}

/// Returns the requested points, and those of the CPU's sizes.
///
/// # Errors
/// Text that names the first size that is too large to be timed.
fn points(args: &BenchArgs, times: &[Time]) -> Result<Vec<Point>, ToolError> {
    let mut points = Vec::new();
    for format in &args.types {
        for SizeArg([k, n]) in &args.shapes {
            points.push(Point {
                format: *format,
                k: *k,
                n: *n,
                rows: args.m.clone(),
            });
        }
        for time in times.iter().filter(|time| time.is_of(*format)) {
            let [m, k, n] = time.shape;
            let same = |point: &&mut Point| (point.format, point.k, point.n) == (*format, k, n);
            match points.iter_mut().find(same) {
                Some(point) => point.rows.push(m),
                None => points.push(Point {
                    format: *format,
                    k,
                    n,
                    rows: vec![m],
                }),
            }
        }
    }
    for point in &mut points {
        point.rows.sort_unstable();
        point.rows.dedup();
        let (m, k, n) = (point.rows.last().copied().unwrap_or(0), point.k, point.n);
        if k * n > LARGEST_WEIGHTS || m * k.max(n) > LARGEST_OPERAND {
            return Err(format!(
                "M = {m}, K = {k}, N = {n} is too large to be timed: weights have at most {LARGEST_WEIGHTS} elements, \
                 activations and results {LARGEST_OPERAND}"
            )
            .into());
        }
    }
    Ok(points)
}

fn measure(
    device: &Arc<dyn Device>,
    point: &Point,
    times: &[Time],
    power: Option<&PowerSource>,
    progress: &Progress,
    report: &mut BenchReport,
) -> Result<(), ToolError> {
    let Point { format, k, n, rows } = point;
    let dtype = format.dtype().name();
    let mut skip = |what: String, count: usize| {
        report.notes.push(format!(
            "{}: {dtype} {what} is left to the CPU",
            device.name()
        ));
        progress.add(count as u64);
    };
    let weights = match TimedWeights::new(device, *format, *k, *n) {
        Ok(weights) => weights,
        Err(Refused::NotIts) => {
            skip(format!("{k}x{n}"), rows.len());
            return Ok(());
        }
        Err(Refused::Failed(failure)) => return Err(failure),
    };
    let limit = weights.limit();
    let mut measured = Vec::new();
    for m in rows {
        let cost = match weights.time(*m, power) {
            Ok(cost) => cost,
            Err(Refused::NotIts) => {
                skip(format!("{m}x{k}x{n}"), 1);
                continue;
            }
            Err(Refused::Failed(failure)) => return Err(failure),
        };
        let of_cpu = times
            .iter()
            .find(|time| time.is_of(*format) && time.shape == [*m, *k, *n]);
        measured.push(BenchRow::new(
            &**device,
            *format,
            [*m, *k, *n],
            cost,
            limit,
            of_cpu,
        ));
        progress.add(1);
    }
    report.rows.append(&mut measured);
    Ok(())
}

/// Writes the fewest rows of a device to the user's settings. Returns a line about it.
fn write_config(
    device: &dyn Device,
    report: &BenchReport,
    path: &Path,
) -> Result<String, ToolError> {
    let (name, chip) = (device.name(), device.chip());
    if rockchip::caps::by_name(chip).is_none() {
        return Ok(format!(
            "{name}: multiplications of any M are its; there is nothing to set"
        ));
    }
    let found = report.crossovers.iter().find(|found| found.device == name);
    let Some(found) = found else {
        return Ok(format!(
            "{name}: nothing was timed on both sides; no setting was written"
        ));
    };
    let old = match path.exists() {
        true => Files::default().text(path)?,
        false => String::new(),
    };
    let simulated = device.is_simulated();
    let min_m = found.setting();
    let text = Settings::with(&old, Setting::MinM, chip, simulated, min_m);
    files::write(path, text.as_bytes())?;
    let what = if device.is_simulated() {
        " (simulated)"
    } else {
        ""
    };
    Ok(format!(
        "{name}{what}: at least {min_m} rows, written to {}",
        path.display()
    ))
}

impl Time {
    fn is_of(&self, format: Format) -> bool {
        self.dtype.eq_ignore_ascii_case(format.dtype().name())
    }
}

/// Uniform numbers in [-1, 1), the same for the same seed.
// SOURCE: splitmix64, Steele, Lea and Flood 2014.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let high = u16::try_from(x >> 48).unwrap_or(0);
        f32::from(high) / 32768.0 - 1.0
    };
    std::iter::repeat_with(next).take(n).collect()
}
