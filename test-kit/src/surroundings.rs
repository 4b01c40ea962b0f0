//! Independence of a test from the person who starts it: their variables and their files of
//! settings.

use std::env;
use std::ffi::{OsStr, OsString};
use std::process::Command;

/// Variables that a program needs to start, or that describe how it was built.
const KEPT: [&str; 8] = [
    "PATH",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "QEMU_LD_PREFIX",
    "LLVM_PROFILE_FILE",
    "ASAN_OPTIONS",
    "TSAN_OPTIONS",
    "RUST_BACKTRACE",
];

/// Returns a command for a program that is tested. Of the variables of the person who starts the
/// test, it gets only those that it needs to start. So it has no settings, no home folder, and no
/// language.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear();
    command.envs(
        KEPT.iter()
            .filter_map(|name| Some((name, env::var_os(name)?))),
    );
    command
}

/// Returns the names of variables that are set and would change the backend's behaviour in this
/// process: its own, and those that lead to a settings file.
#[must_use]
pub fn foreign_variables() -> Vec<OsString> {
    let is_foreign = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with("GGML_RUST_NPU_") || name == "HOME" || name == "XDG_CONFIG_HOME"
    };
    let names = env::vars_os().map(|(name, _)| name);
    names.filter(is_foreign).collect()
}
