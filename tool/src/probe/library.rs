//! The file of a library that is in use, and its build.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

use super::Lines;
use super::machine::reason_of;

/// Adds the library of the vendor whose file name starts with `name`.
pub(super) fn add(lines: &mut Lines, name: &str) {
    let path = if lines.is_simulated {
        Err("built in: a stand-in".into())
    } else {
        loaded(name)
    };
    add_file(lines, "library", path);
}

/// Adds a file and its build.
pub(super) fn add_file(lines: &mut Lines, key: &str, path: Result<PathBuf, String>) {
    let bytes = path.clone().and_then(|path| {
        std::fs::read(&path).map_err(|error| format!("cannot be read: {}", reason_of(&error)))
    });
    lines.add_result(
        &format!("{key}.path"),
        path.map(|path| path.display().to_string()),
    );
    let size = bytes.as_ref().map(Vec::len);
    lines.add_result(&format!("{key}.bytes"), size.map_err(String::as_str));
    let id = bytes.as_deref().map_err(String::clone).and_then(build_id);
    lines.add_result(&format!("{key}.build_id"), id);
    let hash = bytes.map(|bytes| format!("{:032x}", xxh3_128(&bytes)));
    lines.add_result(&format!("{key}.xxh3_128"), hash);
}

/// Returns the file of a library that is loaded.
fn loaded(name: &str) -> Result<PathBuf, String> {
    // SOURCE: proc_pid_maps(5): the path follows after the fifth field.
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(|error| reason_of(&error))?;
    let paths = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut paths = paths.map(Path::new);
    let found = paths.find(|path| {
        let file = path.file_name().and_then(|file| file.to_str());
        file.is_some_and(|file| file.starts_with(name))
    });
    found
        .map(Path::to_path_buf)
        .ok_or_else(|| format!("no {name} is loaded"))
}

/// Returns the linker's mark of a build.
fn build_id(bytes: &[u8]) -> Result<String, String> {
    // SOURCE: elf(5), NT_GNU_BUILD_ID: size of the name (4), size of the id, type 3, then the name.
    let note = bytes.windows(16).find(|note| {
        note[..4] == [4, 0, 0, 0] && note[5..12] == [0, 0, 0, 3, 0, 0, 0] && note[12..] == *b"GNU\0"
    });
    let id = note.and_then(|note| {
        let start = note.as_ptr().addr() - bytes.as_ptr().addr() + 16;
        bytes.get(start..start + usize::from(note[4]))
    });
    id.map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect())
        .ok_or_else(|| "the file has none".into())
}

/// Our library for the DSP, in the folders that FastRPC looks in first.
pub(super) fn dsp_library(name: &str) -> Result<PathBuf, String> {
    let folders = ["DSP_LIBRARY_PATH", "ADSP_LIBRARY_PATH"]
        .into_iter()
        .find_map(|variable| std::env::var(variable).ok())
        .ok_or("neither DSP_LIBRARY_PATH nor ADSP_LIBRARY_PATH is set")?;
    (folders
        .split(';')
        .map(|folder| Path::new(folder).join(name)))
    .find(|path| path.exists())
    .ok_or_else(|| format!("{name} is in no folder of the variable that names them"))
}
