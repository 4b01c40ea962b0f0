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
mod probe;
mod progress;
mod quantize;
mod repack;
mod text;

/// Looks at NPUs and prepares models for them
#[derive(Debug, Parser)]
#[command(name = "ggml-npu", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 no NPU that can be used, 130 interrupted.";

/// Exit code of `devices` without any device.
const NO_DEVICE: u8 = 3;

#[derive(Debug, Subcommand)]
enum Command {
    Bench(bench::Args),
    Devices(devices::Args),
    Inspect(inspect::Args),
    Quantize(quantize::Args),
    Repack(repack::Args),
    #[command(hide = true)]
    Generate(generate::Args),
}

/// Why a subcommand failed, for the user.
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn run(command: &Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Bench(args) => bench::run(args),
        Command::Devices(args) => devices::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Repack(args) => repack::run(args),
        Command::Generate(args) => generate::run(args),
    }
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let result = interrupt::watch().and_then(|()| run(&command));
    result.unwrap_or_else(|failure| {
        text::say(format_args!("ggml-npu: {failure}"));
        ExitCode::FAILURE
    })
}
