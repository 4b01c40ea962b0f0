//! `ggml-npu generate`: shell completions and manual pages, for packages.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args as ClapArgs, CommandFactory, ValueEnum};
use clap_complete::Shell;

use crate::{Cli, ToolError};

/// Write shell completions or manual pages
#[derive(Debug, ClapArgs)]
pub struct GenerateArgs {
    /// The files to write
    #[arg(value_enum)]
    kind: Kind,
    /// The folder to write to
    #[arg(long, default_value = ".")]
    dir: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    /// Manual pages
    Man,
    /// Completions for bash
    Bash,
    /// Completions for elvish
    Elvish,
    /// Completions for fish
    Fish,
    /// Completions for PowerShell
    Powershell,
    /// Completions for zsh
    Zsh,
}

/// Runs the subcommand.
///
/// # Errors
/// An error of the system.
pub fn run(args: &GenerateArgs) -> Result<ExitCode, ToolError> {
    std::fs::create_dir_all(&args.dir)
        .map_err(|error| format!("{}: {error}", args.dir.display()))?;
    let mut command = Cli::command();
    let shell = match args.kind {
        Kind::Man => {
            clap_mangen::generate_to(command, &args.dir)?;
            return Ok(ExitCode::SUCCESS);
        }
        Kind::Bash => Shell::Bash,
        Kind::Elvish => Shell::Elvish,
        Kind::Fish => Shell::Fish,
        Kind::Powershell => Shell::PowerShell,
        Kind::Zsh => Shell::Zsh,
    };
    clap_complete::generate_to(shell, &mut command, "ggml-npu", &args.dir)?;
    Ok(ExitCode::SUCCESS)
}
