//! Other processes that have a node of the NPU open, as the kernel shows them in `/proc`. Programs
//! with another backend do not know our locks.

use std::fs;
use std::path::{Path, PathBuf};

use rknpu_ops::node::SEAT;

use super::lock;

/// A process and a node that it has open.
#[derive(Debug)]
struct Neighbour {
    /// Name and number, and a remark if the process is stopped.
    name: String,
    node: PathBuf,
    /// The bytes of the node that the process has locked.
    locks: Vec<u16>,
}

/// Warns of each other process that has the NPU open without our locks, as far as this user may see
/// it.
pub fn warn() {
    for process in strangers(Path::new("/proc"), &lock::npu_nodes()) {
        log::warn!(
            "{} has {} open: if it computes on the NPU, both may fail or the kernel may panic",
            process.name,
            process.node.display()
        );
    }
}

/// Returns the processes of [`with_open`] that do not know our locks.
fn strangers(proc: &Path, nodes: &[PathBuf]) -> Vec<Neighbour> {
    let mut found = with_open(proc, nodes);
    found.retain(|process| !process.locks.contains(&SEAT));
    found
}

/// Returns the names of the processes that have a byte of one of `nodes` locked, as far as this
/// user may see it.
pub(super) fn with_lock(nodes: &[PathBuf], byte: u16) -> Vec<String> {
    let processes = with_open(Path::new("/proc"), nodes).into_iter();
    let locked = processes.filter(|process| process.locks.contains(&byte));
    locked.map(|process| process.name).collect()
}

/// Returns the number of other processes that have the NPU open, as far as this user may see them.
#[must_use]
pub fn count() -> usize {
    with_open(Path::new("/proc"), &lock::npu_nodes()).len()
}

/// Returns the other processes that have one of `nodes` open.
fn with_open(proc: &Path, nodes: &[PathBuf]) -> Vec<Neighbour> {
    if nodes.is_empty() {
        return Vec::new();
    }
    let own = std::process::id();
    let mut numbers: Vec<u32> = (fs::read_dir(proc).into_iter().flatten().flatten())
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|number| *number != own)
        .collect();
    numbers.sort_unstable();
    let open = |number: u32| {
        let folder = proc.join(number.to_string());
        let (mut node, mut locks) = (None, Vec::new());
        // Folders of other users' processes cannot be read, and are skipped.
        for file in fs::read_dir(folder.join("fd")).ok()?.flatten() {
            let Ok(target) = fs::read_link(file.path()) else {
                continue;
            };
            if nodes.contains(&target) {
                let info = folder.join("fdinfo").join(file.file_name());
                locks.extend(locked_bytes(&fs::read_to_string(info).unwrap_or_default()));
                node.get_or_insert(target);
            }
        }
        let name = fs::read_to_string(folder.join("comm")).unwrap_or_default();
        let stopped = if is_stopped(&folder) { ", stopped" } else { "" };
        Some(Neighbour {
            name: format!("{} ({number}{stopped})", name.trim()),
            node: node?,
            locks,
        })
    };
    numbers.into_iter().filter_map(open).collect()
}

/// Returns `true` if a signal or a debugger has stopped a process.
fn is_stopped(folder: &Path) -> bool {
    let status = fs::read_to_string(folder.join("status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    // SOURCE: proc(5): T (stopped), t (tracing stop).
    state.is_some_and(|state| state.trim().to_lowercase().starts_with('t'))
}

/// Returns the bytes that an open file has locked, from the lines of its `fdinfo`.
// SOURCE: proc(5), and fs/locks.c: "lock:", number, kind, ADVISORY, READ or WRITE, process, device
// and inode, first and last byte.
fn locked_bytes(info: &str) -> impl Iterator<Item = u16> {
    info.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["lock:", _, "OFDLCK", _, _, _, _, first, _] => first.parse().ok(),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// The `fdinfo` of a file with locks on bytes, as Linux 6.1 shows it.
    fn info(bytes: &[u16]) -> String {
        let lines = bytes
            .iter()
            .map(|byte| format!("lock:\t1: OFDLCK ADVISORY  READ -1 00:06:1042 {byte} {byte}\n"));
        let rest = "pos:\t0\nflags:\t02104002\nmnt_id:\t27\nino:\t1042\n";
        lines.fold(rest.to_owned(), |text, line| text + &line)
    }

    #[test]
    fn processes_with_an_open_node_are_named_but_not_this_one() {
        let proc = tempfile::tempdir().unwrap();
        let nodes = [
            PathBuf::from("/dev/dri/card1"),
            PathBuf::from("/dev/dri/renderD129"),
        ];
        let own = std::process::id().to_string();
        for (number, name, files) in [
            ("41", "rkllm\n", &["/dev/null", "/dev/dri/renderD129"][..]),
            ("7", "weston\n", &["/dev/dri/card0"]),
            (own.as_str(), "ours\n", &["/dev/dri/card1"]),
            ("9", "frigate\n", &["/dev/dri/card1", "/dev/dri/renderD129"]),
            ("self", "link\n", &["/dev/dri/card1"]),
        ] {
            let folder = proc.path().join(number);
            let fd = folder.join("fd");
            fs::create_dir_all(&fd).unwrap();
            fs::create_dir_all(folder.join("fdinfo")).unwrap();
            for (index, file) in files.iter().enumerate() {
                symlink(file, fd.join(index.to_string())).unwrap();
            }
            fs::write(folder.join("comm"), name).unwrap();
        }
        let frigate = proc.path().join("9");
        fs::write(frigate.join("fdinfo/0"), info(&[])).unwrap();
        fs::write(frigate.join("fdinfo/1"), info(&[2, 0])).unwrap();
        fs::write(
            frigate.join("status"),
            "Name:\tfrigate\nState:\tT (stopped)\n",
        )
        .unwrap();
        let found = with_open(proc.path(), &nodes);
        let names: Vec<_> = found.iter().map(|process| process.name.as_str()).collect();
        assert_eq!(names, ["frigate (9, stopped)", "rkllm (41)"]);
        assert_eq!(found[1].node, nodes[1]);
        assert_eq!(found[0].locks, [2, 0]);
        assert!(found[1].locks.is_empty());
        // One with a seat takes turns with this process.
        let strangers = strangers(proc.path(), &nodes);
        assert_eq!(strangers.len(), 1);
        assert_eq!(strangers[0].name, "rkllm (41)");
        assert!(with_open(proc.path(), &[]).is_empty());
        assert!(with_open(&proc.path().join("none"), &nodes).is_empty());
    }
}
