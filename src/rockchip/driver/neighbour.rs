//! Other processes that have a node of the NPU open: programs with another backend do not know our lock.

use std::fs;
use std::path::{Path, PathBuf};

use super::lock;

/// Warns of each process beside this one that has the NPU open, as far as this user may see it.
pub fn warn() {
    let nodes = lock::npu_nodes();
    for (process, node) in with_open(Path::new("/proc"), &nodes, std::process::id()) {
        log::warn!(
            "{process} has {} open: if it computes on the NPU, both may fail or the kernel may panic",
            node.display()
        );
    }
}

/// Returns the number of processes beside this one that have the NPU open, as far as this user may see them.
#[must_use]
pub fn count() -> usize {
    with_open(Path::new("/proc"), &lock::npu_nodes(), std::process::id()).len()
}

/// Returns the processes but `own` that have one of `nodes` open: name and number, and the first such node.
fn with_open(proc: &Path, nodes: &[PathBuf], own: u32) -> Vec<(String, PathBuf)> {
    if nodes.is_empty() {
        return Vec::new();
    }
    let mut numbers: Vec<u32> = (fs::read_dir(proc).into_iter().flatten().flatten())
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|number| *number != own)
        .collect();
    numbers.sort_unstable();
    let open = |number: u32| {
        let folder = proc.join(number.to_string());
        // Those of other users cannot be read.
        let mut files = fs::read_dir(folder.join("fd")).ok()?.flatten();
        let node = files.find_map(|file| {
            let target = fs::read_link(file.path()).ok()?;
            nodes.contains(&target).then_some(target)
        })?;
        let name = fs::read_to_string(folder.join("comm")).unwrap_or_default();
        Some((format!("{} ({number})", name.trim()), node))
    };
    numbers.into_iter().filter_map(open).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn processes_with_an_open_node_are_named_but_not_this_one() {
        let proc = tempfile::tempdir().unwrap();
        let nodes = [
            PathBuf::from("/dev/dri/card1"),
            PathBuf::from("/dev/dri/renderD129"),
        ];
        for (number, name, files) in [
            ("41", "rkllm\n", &["/dev/null", "/dev/dri/renderD129"][..]),
            ("7", "weston\n", &["/dev/dri/card0"]),
            ("500", "ours\n", &["/dev/dri/card1"]),
            ("9", "frigate\n", &["/dev/dri/card1", "/dev/dri/renderD129"]),
            ("self", "link\n", &["/dev/dri/card1"]),
        ] {
            let fd = proc.path().join(number).join("fd");
            fs::create_dir_all(&fd).unwrap();
            for (index, file) in files.iter().enumerate() {
                symlink(file, fd.join(index.to_string())).unwrap();
            }
            fs::write(proc.path().join(number).join("comm"), name).unwrap();
        }
        let found = with_open(proc.path(), &nodes, 500);
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["frigate (9)", "rkllm (41)"]);
        assert_eq!(found[1].1, nodes[1]);
        assert!(with_open(proc.path(), &[], 500).is_empty());
        assert!(with_open(&proc.path().join("none"), &nodes, 500).is_empty());
    }
}
