//! `ggml-npu`: the command line tool. One file for each subcommand.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod progress;
mod quantize;

/// Prepares models for NPUs.
#[derive(Debug, Parser)]
#[command(name = "ggml-npu", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 wrong arguments.";

#[derive(Debug, Subcommand)]
enum Command {
    Quantize(quantize::Args),
}

/// Why a subcommand failed, for the user.
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Quantize(args) => quantize::run(&args),
    };
    result.unwrap_or_else(|failure| {
        eprintln!("ggml-npu: {failure}");
        ExitCode::FAILURE
    })
}
