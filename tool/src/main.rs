//! `ggml-npu`: the command line tool. One file for each subcommand.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod chip;
mod devices;
mod files;
mod generate;
mod inspect;
mod interrupt;
mod model;
mod power;
mod probe;
mod progress;
mod quantize;
mod repack;
mod scale;
mod svg;
mod text;
mod trace;

/// Looks at NPUs and prepares models for them
#[derive(Debug, Parser)]
#[command(name = "ggml-npu", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 no NPU that can be used, 130 interrupted.";

/// Exit code of `devices` without any device.
const NO_DEVICE: u8 = 3;

#[derive(Debug, Subcommand)]
enum Action {
    Bench(bench::BenchArgs),
    Devices(devices::DevicesArgs),
    Inspect(inspect::InspectArgs),
    Model(model::ModelArgs),
    Quantize(quantize::QuantizeArgs),
    Repack(repack::RepackArgs),
    Scale(scale::ScaleArgs),
    Trace(trace::TraceArgs),
    #[command(hide = true)]
    Generate(generate::GenerateArgs),
}

/// The reason why a subcommand failed, for the user.
type ToolError = Box<dyn std::error::Error + Send + Sync>;

fn run(command: &Action) -> Result<ExitCode, ToolError> {
    match command {
        Action::Bench(args) => bench::run(args),
        Action::Devices(args) => devices::run(args),
        Action::Inspect(args) => inspect::run(args),
        Action::Model(args) => model::run(args),
        Action::Quantize(args) => quantize::run(args),
        Action::Repack(args) => repack::run(args),
        Action::Scale(args) => scale::run(args),
        Action::Trace(args) => trace::run(args),
        Action::Generate(args) => generate::run(args),
    }
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let result = interrupt::watch().and_then(|()| run(&command));
    result.unwrap_or_else(|failure| {
        let _last_words = interrupt::hold_off();
        text::fail(failure);
        ExitCode::FAILURE
    })
}
