//! Machines made of files: each missing part gives one line, and each line is on the pages of its
//! devices.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use tempfile::TempDir;

use super::*;

/// Makes a machine of files; a file whose content begins with `->` is a link.
fn machine(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().expect("a temporary folder");
    for (path, content) in files {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        match content.strip_prefix("->") {
            Some(target) => symlink(target, &path).expect("a link"),
            None => std::fs::write(&path, content).expect("a file"),
        }
    }
    root
}

/// Returns the lines for a machine whose user may not open the node `closed`.
fn findings(root: &TempDir, closed: Option<&str>, android: bool) -> Vec<String> {
    let closed = closed.map(|node| root.path().join(node));
    let open = |path: &Path| match closed.as_deref() == Some(path) {
        true => Err(io::ErrorKind::PermissionDenied.into()),
        false => Ok(()),
    };
    Machine {
        root: root.path(),
        android,
        open: &open,
    }
    .findings()
}

const SNAPDRAGON: (&str, &str) = (
    "proc/device-tree/compatible",
    "qcom,x1e80100-crd\0qcom,x1e80100\0",
);
const RK3588: (&str, &str) = (
    "proc/device-tree/compatible",
    "radxa,rock-5b\0rockchip,rk3588\0",
);
const NODE: (&str, &str) = ("dev/fastrpc-cdsp", "");
const HEAP: (&str, &str) = ("dev/dma_heap/system", "");
const RENDER: (&str, &str) = ("dev/dri/renderD129", "");
const RKNPU: (&str, &str) = (
    "sys/class/drm/renderD129/device/driver",
    "->/sys/bus/platform/drivers/RKNPU",
);
const ROCKET: (&str, &str) = (
    "sys/class/accel/accel0/device/driver",
    "->/sys/bus/platform/drivers/rocket",
);
const DISPLAY: (&str, &str) = (
    "sys/class/drm/card0/device/driver",
    "->/sys/bus/platform/drivers/rockchip-drm",
);

/// Each finding: the machine, the node that may not be opened, whether it runs Android, and the
/// beginning of its line.
#[expect(clippy::type_complexity, reason = "one row of a table")]
fn machines() -> Vec<(
    Vec<(&'static str, &'static str)>,
    Option<&'static str>,
    bool,
    &'static str,
)> {
    vec![
        (
            vec![SNAPDRAGON, HEAP],
            None,
            false,
            "there is no /dev/fastrpc-cdsp",
        ),
        (
            vec![
                SNAPDRAGON,
                HEAP,
                NODE,
                ("sys/class/remoteproc/remoteproc0/name", "adsp\n"),
                ("sys/class/remoteproc/remoteproc0/state", "running\n"),
                ("sys/class/remoteproc/remoteproc1/name", "cdsp\n"),
                ("sys/class/remoteproc/remoteproc1/state", "offline\n"),
            ],
            None,
            false,
            "the DSP cdsp is offline",
        ),
        (
            vec![SNAPDRAGON, HEAP, ("dev/fastrpc-cdsp-secure", "")],
            None,
            false,
            "/dev/fastrpc-cdsp-secure is there without",
        ),
        (
            vec![SNAPDRAGON, NODE],
            None,
            false,
            "there is no /dev/dma_heap/system",
        ),
        (
            vec![SNAPDRAGON, NODE, HEAP],
            Some("dev/dma_heap/system"),
            false,
            "/dev/dma_heap/system may be opened by",
        ),
        (
            vec![NODE, HEAP],
            Some("dev/fastrpc-cdsp"),
            true,
            "/dev/fastrpc-cdsp may not be opened by apps",
        ),
        (
            vec![RK3588, DISPLAY, ROCKET],
            None,
            false,
            "the NPU is driven by mainline's rocket (/dev/accel/accel0)",
        ),
        (
            vec![RK3588, DISPLAY, ("dev/dri/card0", "")],
            None,
            false,
            "no driver serves the Rockchip NPU",
        ),
        (
            vec![RK3588, ("dev/rknpu", "")],
            None,
            false,
            "/dev/rknpu is the only node",
        ),
        (
            vec![RK3588, RENDER, RKNPU],
            Some("dev/dri/renderD129"),
            false,
            "/dev/dri/renderD129 may be opened by",
        ),
        (
            vec![
                RK3588,
                RENDER,
                RKNPU,
                ("sys/class/devfreq/dmc/cur_freq", "528000000\n"),
                ("sys/class/devfreq/dmc/max_freq", "2112000000\n"),
                ("sys/class/devfreq/dmc/governor", "dmc_ondemand\n"),
            ],
            None,
            false,
            "the memory's clock is 528 of 2112 MHz with the governor dmc_ondemand",
        ),
    ]
}

/// Returns the row of `LINES` that a line is of.
fn row(line: &str) -> Option<usize> {
    LINES.iter().position(|(pattern, _)| {
        let parts: Vec<_> = pattern.split('…').collect();
        let mut rest = line;
        parts
            .iter()
            .enumerate()
            .all(|(index, part)| match rest.find(part) {
                Some(at) if index > 0 || at == 0 => {
                    rest = &rest[at + part.len()..];
                    index + 1 < parts.len() || rest.is_empty() || part.is_empty()
                }
                _ => false,
            })
    })
}

#[test]
fn each_machine_lacks_one_thing_and_each_line_of_the_table_is_said() {
    // That of a group is said by `a_closed_node_names_its_group_or_root`: the owner of a test's
    // files may have none.
    let group = |(line, _): &(&str, &[&str])| line.contains("by the group");
    let mut said: Vec<_> = LINES.iter().map(group).collect();
    for (files, closed, android, begins) in machines() {
        let lines = findings(&machine(&files), closed, android);
        assert_eq!(lines.len(), 1, "{files:?}: {lines:?}");
        assert!(
            lines[0].starts_with(begins),
            "{lines:?} does not begin with {begins:?}"
        );
        let row = row(&lines[0]);
        said[row.unwrap_or_else(|| panic!("{lines:?} is in no row"))] = true;
    }
    let silent = LINES.iter().zip(said).filter(|(_, said)| !said);
    assert_eq!(
        silent.map(|((line, _), _)| *line).collect::<Vec<_>>(),
        [""; 0]
    );
}

#[test]
fn a_machine_that_lacks_nothing_has_no_line() {
    let running = ("sys/class/remoteproc/remoteproc1/state", "running\n");
    let cdsp = ("sys/class/remoteproc/remoteproc1/name", "cdsp\n");
    for files in [
        vec![SNAPDRAGON, NODE, HEAP, cdsp, running],
        vec![RK3588, RENDER, RKNPU, ROCKET],
        vec![],
    ] {
        assert_eq!(
            findings(&machine(&files), None, false),
            [""; 0],
            "{files:?}"
        );
    }
}

/// The group file of a root folder names the group of the node; without a name, only root may open
/// the node.
#[test]
fn a_closed_node_names_its_group_or_root() {
    let root = machine(&[SNAPDRAGON, NODE, HEAP]);
    let node = root.path().join("dev/fastrpc-cdsp");
    // Only root may give the node to an arbitrary group. For other users the file keeps their
    // group, which the test reads back.
    let _ = std::os::unix::fs::chown(&node, None, Some(7));
    let number = node.metadata().expect("a node").gid();
    std::fs::create_dir(root.path().join("etc")).expect("a folder");
    std::fs::write(
        root.path().join("etc/group"),
        format!("render:x:{number}:\n"),
    )
    .expect("a file");
    for (mode, begins) in [
        (0o600, "/dev/fastrpc-cdsp may be opened by root only"),
        (
            0o660,
            if number == 0 {
                "/dev/fastrpc-cdsp may be opened by root only"
            } else {
                "/dev/fastrpc-cdsp may be opened by the group render only; sudo usermod -aG render $USER"
            },
        ),
    ] {
        std::fs::set_permissions(&node, std::fs::Permissions::from_mode(mode)).expect("a mode");
        let lines = findings(&root, Some("dev/fastrpc-cdsp"), false);
        assert!(lines[0].starts_with(begins), "{mode:o}: {lines:?}");
        assert!(row(&lines[0]).is_some(), "{lines:?} is in no row");
    }
}

#[test]
fn pages_of_devices_have_each_line() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide");
    for (line, pages) in LINES {
        let (seen, todo) = line
            .split_once("; ")
            .expect("what was seen, and what to do");
        for page in pages {
            let text = std::fs::read_to_string(guide.join(page)).expect("a page");
            for part in [seen, todo] {
                // In a table's cell, a vertical bar is written with a backslash.
                assert!(
                    text.contains(&part.replace('|', "\\|")),
                    "{page} lacks {part:?}"
                );
            }
        }
    }
}

#[test]
fn pages_of_devices_have_no_other_line() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide");
    for page in ["phone.md", "snapdragon-linux.md", "rockchip.md"] {
        let text = std::fs::read_to_string(guide.join(page)).expect("a page");
        let mut rows: Vec<_> = (text.lines())
            .skip_while(|line| *line != "| the line says | what to do |")
            .skip(2)
            .take_while(|line| line.starts_with('|'))
            .collect();
        let wanted = LINES.iter().filter(|(_, pages)| pages.contains(&page));
        let mut wanted: Vec<_> = wanted
            .map(|(line, _)| {
                let cells = line.replace('|', "\\|").replacen("; ", "` | `", 1);
                format!("| `{cells}` |")
            })
            .collect();
        wanted.sort_unstable();
        rows.sort_unstable();
        assert_eq!(rows, wanted, "{page}");
    }
}
