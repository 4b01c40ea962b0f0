//! `ggml-npu devices`: the NPUs of this machine, and the reasons why others are not available.

mod machine;

use std::fmt;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Args as ClapArgs;
use ggml_rust_npu::backend::{self, Absent, Device, Share};
use ggml_rust_npu::config::{self, Config};
use ggml_rust_npu::host_memory::system_memory;
use log::{Level, LevelFilter, Log, Metadata, Record};
use serde::Serialize;

use crate::progress::Progress;
use crate::text::{escaped, heading, print, print_json, verdict};
use crate::{NO_DEVICE, ToolError};

/// List the NPUs that llama.cpp would get, and the reason for each that it would not
///
/// Looks for them exactly as the backend does, with the same GGML_RUST_NPU_* environment variables:
/// GGML_RUST_NPU_SIM=rk3588 simulates a chip. Exit code 3 means that there is none.
#[derive(Debug, ClapArgs)]
pub struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Run each device's self-test again and print all that a bug report needs
    #[arg(long)]
    self_test: bool,
    /// Measure each device and print a report for an issue, without names of people or machines
    ///
    /// Takes some seconds. One line for each fact: calls of the vendor's library and what they
    /// returned, versions, times, rates and errors; what each means is in docs/guide/probe.md.
    #[arg(long, conflicts_with_all = ["json", "self_test"])]
    probe: bool,
}

/// The report.
#[derive(Debug, Serialize)]
struct DevicesReport {
    version: &'static str,
    devices: Vec<DeviceFacts>,
    /// Reasons why devices are not available, and warnings.
    messages: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<HostMachine>,
}

/// One device.
#[derive(Debug, Serialize)]
struct DeviceFacts {
    name: String,
    description: String,
    simulated: bool,
    memory_free_bytes: usize,
    memory_total_bytes: usize,
    max_buffer_bytes: usize,
    alignment_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    self_test: Option<SelfTest>,
}

/// Result of a self-test.
#[derive(Debug, Serialize)]
struct SelfTest {
    passed: bool,
    milliseconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The machine of the report.
#[derive(Debug, Serialize)]
struct HostMachine {
    system: String,
    kernel: String,
    board: String,
    variables: Vec<String>,
}

/// Runs the subcommand.
///
/// # Errors
/// Text for the user.
pub fn run(args: &DevicesArgs) -> Result<ExitCode, ToolError> {
    let config = Config::from_env()?;
    listen()?;
    if args.probe {
        return crate::probe::run(&config);
    }
    let found = backend::find_devices(&config);
    let mut messages: Vec<String> = found.absent.iter().map(Absent::to_string).collect();
    messages.extend(self::messages());
    // A simulated NPU needs no support of the machine.
    if config.sim.is_empty() {
        messages.extend(machine::findings());
    }
    let machine = (config.sim_memory_bytes()).map_or_else(system_memory, |bytes| (bytes, bytes));
    let shares = backend::shares(machine, &vec![0; found.devices.len()]);
    let report = DevicesReport {
        version: env!("CARGO_PKG_VERSION"),
        devices: (found.devices.iter().zip(shares))
            .map(|(device, share)| line(&**device, share, args.self_test))
            .collect(),
        messages,
        machine: args.self_test.then(host_machine),
    };
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    let passed = |line: &DeviceFacts| line.self_test.as_ref().is_none_or(|test| test.passed);
    Ok(match report.devices.as_slice() {
        [] => ExitCode::from(NO_DEVICE),
        devices if devices.iter().all(passed) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Keeps later messages of the backend.
///
/// # Errors
/// Text, if another logger is set.
pub fn listen() -> Result<(), ToolError> {
    log::set_logger(&MESSAGES).map_err(|error| error.to_string())?;
    log::set_max_level(LevelFilter::Debug);
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in config::unknown_variables(names) {
        log::warn!(
            "{name} is no variable of this backend; there are {}",
            config::known_variables()
        );
    }
    Ok(())
}

/// Returns the reasons why devices are not available, and warnings, since the last call.
pub fn messages() -> Vec<String> {
    MESSAGES.take()
}

fn line(device: &dyn Device, share: Share, with_test: bool) -> DeviceFacts {
    let (free, total) = device.memory(share);
    DeviceFacts {
        name: device.name().into(),
        description: device.description(),
        simulated: device.is_simulated(),
        memory_free_bytes: free,
        memory_total_bytes: total,
        max_buffer_bytes: device.max_buffer_bytes(),
        alignment_bytes: device.alignment(),
        self_test: with_test.then(|| test(device)),
    }
}

fn test(device: &dyn Device) -> SelfTest {
    let progress = Progress::waiting("self-test");
    let start = Instant::now();
    let result = device.self_test();
    progress.finish();
    SelfTest {
        passed: result.is_ok(),
        milliseconds: start.elapsed().as_secs_f64() * 1e3,
        error: result.err().map(|error| error.to_string()),
    }
}

fn host_machine() -> HostMachine {
    let read = |path: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_else(|_| "unknown".into());
        text.trim_end_matches(['\0', '\n']).to_owned()
    };
    let mut variables: Vec<String> = std::env::vars_os()
        .filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let ours = name.starts_with("GGML_RUST_NPU_");
            ours.then(|| format!("{name}={}", value.to_string_lossy()))
        })
        .collect();
    variables.sort();
    HostMachine {
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        kernel: read("/proc/sys/kernel/osrelease"),
        board: read("/proc/device-tree/model"),
        variables,
    }
}

impl fmt::Display for DevicesReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mib = |bytes: usize| bytes >> 20;
        if let Some(machine) = &self.machine {
            writeln!(f, "ggml-rust-npu {}", self.version)?;
            writeln!(
                f,
                "system     {}, kernel {}",
                machine.system, machine.kernel
            )?;
            writeln!(f, "board      {}", escaped(&machine.board))?;
            writeln!(f, "variables  {}", escaped(machine.variables.join(" ")))?;
            writeln!(f)?;
        }
        for line in &self.devices {
            let description = escaped(&line.description);
            writeln!(f, "{}: {description}", heading(&line.name))?;
            let (free, total) = (mib(line.memory_free_bytes), mib(line.memory_total_bytes));
            writeln!(f, "  memory     {free} MiB free of {total} MiB")?;
            let (largest, alignment) = (mib(line.max_buffer_bytes), line.alignment_bytes);
            writeln!(
                f,
                "  buffers    at most {largest} MiB, aligned to {alignment} bytes"
            )?;
            if let Some(test) = &line.self_test {
                let result = escaped(test.error.as_deref().unwrap_or("passed"));
                let result = verdict(test.passed, result);
                writeln!(f, "  self-test  {result} ({:.1} ms)", test.milliseconds)?;
            }
        }
        if self.devices.is_empty() {
            writeln!(f, "{}", verdict(false, "no NPU can be used"))?;
        }
        for message in &self.messages {
            writeln!(f, "- {}", escaped(message))?;
        }
        Ok(())
    }
}

static MESSAGES: Messages = Messages(Mutex::new(Vec::new()));

/// Messages of the backend about devices that it leaves out.
struct Messages(Mutex<Vec<String>>);

impl Messages {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Log for Messages {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with("ggml_")
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if record.level() <= Level::Warn {
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}
