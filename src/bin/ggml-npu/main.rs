//! `ggml-npu`: the command line tool. One file for each subcommand.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod chip;
mod devices;
mod generate;
mod inspect;
mod progress;
mod quantize;
mod repack;

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

/// Writes to standard output. A reader that stops early, such as `head`, has what it wants.
///
/// # Errors
/// The system's, other than a closed pipe.
fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Repack(args) => repack::run(&args),
        Command::Generate(args) => generate::run(&args),
    };
    result.unwrap_or_else(|failure| {
        eprintln!("ggml-npu: {failure}");
        ExitCode::FAILURE
    })
}
