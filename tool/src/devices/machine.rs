//! Finds drivers, permissions and settings that this machine lacks for its NPU, and prints one line
//! for each finding: the fact, and the command to type.
//!
//! The kernel's files show which family of NPU the machine has. Each finding is a row of `LINES`,
//! which the pages of docs/guide for the three kinds of device repeat.

use std::io;
use std::path::{Path, PathBuf};

use regex_lite::Regex;

/// The lines, with `…` for parts that differ between machines, and the pages of docs/guide that
/// explain them.
///
/// The first part of a line states the fact, the second the remedy.
#[cfg(test)]
const LINES: [(&str, &[&str]); 11] = [
    (
        "there is no /dev/fastrpc-cdsp, the node of the Hexagon NPU: the kernel lacks FastRPC, or the DSP has no firmware; grep . /sys/class/remoteproc/*/{name,state} shows whether cdsp runs",
        &["snapdragon-linux.md", "phone.md"],
    ),
    (
        "the DSP cdsp is …, not running; look for its firmware in dmesg | grep -i remoteproc",
        &["snapdragon-linux.md"],
    ),
    (
        "… is there without /dev/fastrpc-cdsp, so the system runs signed modules on the DSP only, and this backend's is not signed; use another image of the system",
        &["snapdragon-linux.md"],
    ),
    (
        "there is no /dev/dma_heap/system, so that memory shared with the DSP is uncached and slow; the kernel needs CONFIG_DMABUF_HEAPS_SYSTEM",
        &["snapdragon-linux.md"],
    ),
    (
        "… may be opened by the group … only; sudo usermod -aG … $USER, then log in again",
        &["snapdragon-linux.md", "rockchip.md"],
    ),
    (
        "… may be opened by root only; sudo cp 70-ggml-rust-npu.rules /etc/udev/rules.d/, then sudo udevadm control --reload and sudo udevadm trigger",
        &["snapdragon-linux.md", "rockchip.md"],
    ),
    (
        "… may not be opened by apps; use a phone that lets its shell user or apps use the DSP",
        &["phone.md"],
    ),
    (
        "the NPU is driven by mainline's rocket (…), which librknnrt does not know; GGML_RUST_NPU_RKNN=direct on an RK3588, or the vendor's driver rknpu, as a DKMS module or with the vendor's kernel",
        &["rockchip.md"],
    ),
    (
        "no driver serves the Rockchip NPU: no node of rknpu is in /dev; use the vendor's kernel, or its driver rknpu as a DKMS module",
        &["rockchip.md"],
    ),
    (
        "/dev/rknpu is the only node of the NPU, which older drivers have and librknnrt 2.3 may not open; update the driver to 0.9.8",
        &["rockchip.md"],
    ),
    (
        "the memory's clock is … of … MHz with the governor …, which takes up to half of the speed; echo performance | sudo tee …",
        &["rockchip.md"],
    ),
];

/// Tries to open a node for reading and writing.
type Open<'a> = &'a dyn Fn(&Path) -> io::Result<()>;

/// Returns the lines for this machine.
pub(super) fn findings() -> Vec<String> {
    let open = |path: &Path| {
        let options = std::fs::File::options().read(true).write(true).open(path);
        options.map(drop)
    };
    Machine {
        root: Path::new("/"),
        android: cfg!(target_os = "android"),
        open: &open,
    }
    .findings()
}

/// The files that show the NPU, drivers and permissions of a machine.
struct Machine<'a> {
    root: &'a Path,
    android: bool,
    open: Open<'a>,
}

impl Machine<'_> {
    fn findings(&self) -> Vec<String> {
        let compatible = self.read("proc/device-tree/compatible").unwrap_or_default();
        // SOURCE: `compatible` of the boards' device trees: "qcom,x1e80100", "rockchip,rk3588".
        let snapdragon = compatible.contains("qcom,") || self.has("dev/fastrpc-cdsp");
        let rockchip = Regex::new("rockchip,rk35(88|83|82|76|62|66|68)")
            .is_ok_and(|chip| chip.is_match(&compatible));
        let mut lines = Vec::new();
        if snapdragon {
            self.snapdragon(&mut lines);
        }
        if rockchip {
            self.rockchip(&mut lines);
        }
        lines
    }

    fn snapdragon(&self, lines: &mut Vec<String>) {
        // SOURCE: names of nodes: Linux drivers/misc/fastrpc.c; adsprpc-smd: Qualcomm's kernels for
        // Android.
        let node = ["dev/fastrpc-cdsp", "dev/adsprpc-smd"]
            .iter()
            .find(|node| self.has(node));
        let signed_only = "dev/fastrpc-cdsp-secure";
        if let Some(state) = self
            .remote_processor("cdsp")
            .filter(|state| state != "running")
        {
            lines.push(format!(
                "the DSP cdsp is {state}, not running; look for its firmware in dmesg | grep -i remoteproc"
            ));
        }
        match node {
            Some(node) => self.permission(node, lines),
            None if self.has(signed_only) => lines.push(format!(
                "/{signed_only} is there without /dev/fastrpc-cdsp, so the system runs signed modules on the DSP only, \
                 and this backend's is not signed; use another image of the system"
            )),
            None => lines.push(
                "there is no /dev/fastrpc-cdsp, the node of the Hexagon NPU: the kernel lacks FastRPC, or the DSP has no \
                 firmware; grep . /sys/class/remoteproc/*/{name,state} shows whether cdsp runs"
                    .into(),
            ),
        }
        // SOURCE: names of heaps: Linux drivers/dma-buf/heaps; qcom,system and ion: Qualcomm's
        // kernels for Android.
        let heaps = ["dev/dma_heap/system", "dev/dma_heap/qcom,system", "dev/ion"];
        match heaps.iter().find(|heap| self.has(heap)) {
            Some(heap) => self.permission(heap, lines),
            None => lines.push(
                "there is no /dev/dma_heap/system, so that memory shared with the DSP is uncached and slow; the kernel \
                 needs CONFIG_DMABUF_HEAPS_SYSTEM"
                    .into(),
            ),
        }
    }

    fn rockchip(&self, lines: &mut Vec<String>) {
        let nodes: Vec<PathBuf> = (self.entries("sys/class/drm").into_iter())
            .filter(|entry| {
                self.driver(entry)
                    .is_some_and(|name| name.eq_ignore_ascii_case("rknpu"))
            })
            .filter_map(|entry| Some(Path::new("dev/dri").join(entry.file_name()?)))
            .filter(|node| self.has(node))
            .collect();
        for node in &nodes {
            self.permission(node, lines);
        }
        let rocket = (self.entries("sys/class/accel").into_iter())
            .find(|entry| self.driver(entry).is_some_and(|name| name == "rocket"));
        match (nodes.is_empty(), self.has("dev/rknpu"), rocket) {
            (false, ..) => {}
            (true, true, _) => {
                lines.push(
                    "/dev/rknpu is the only node of the NPU, which older drivers have and librknnrt 2.3 may not open; \
                     update the driver to 0.9.8"
                        .into(),
                );
                self.permission("dev/rknpu", lines);
            }
            (true, false, Some(entry)) => {
                let node = Path::new("/dev/accel").join(entry.file_name().unwrap_or_default());
                lines.push(format!(
                    "the NPU is driven by mainline's rocket ({}), which librknnrt does not know; GGML_RUST_NPU_RKNN=direct \
                     on an RK3588, or the vendor's driver rknpu, as a DKMS module or with the vendor's kernel",
                    node.display()
                ));
            }
            (true, false, None) => lines.push(
                "no driver serves the Rockchip NPU: no node of rknpu is in /dev; use the vendor's kernel, or its driver \
                 rknpu as a DKMS module"
                    .into(),
            ),
        }
        self.memory_clock(lines);
    }

    /// Adds a line if the memory's clock is not the highest one that the board has.
    fn memory_clock(&self, lines: &mut Vec<String>) {
        // SOURCE: the vendor's kernels show the memory's clock as the devfreq device `dmc`. Users
        // report that it can cost half of the speed (airockchip/rknn-llm issue 532). Not measured
        // here.
        let folder = "sys/class/devfreq/dmc";
        let hz = |file: &str| self.read(format!("{folder}/{file}"))?.parse::<u64>().ok();
        let (Some(now), Some(most)) = (hz("cur_freq"), hz("max_freq")) else {
            return;
        };
        let governor = self.read(format!("{folder}/governor")).unwrap_or_default();
        if now < most && governor != "performance" {
            lines.push(format!(
                "the memory's clock is {} of {} MHz with the governor {governor}, which takes up to half of the speed; \
                 echo performance | sudo tee /{folder}/governor",
                now / 1_000_000,
                most / 1_000_000
            ));
        }
    }

    /// Adds a line if this user may not open a node.
    fn permission(&self, node: impl AsRef<Path>, lines: &mut Vec<String>) {
        let path = self.root.join(node.as_ref());
        // A node that is busy, or whose hardware is asleep, has granted access, so only a refused
        // permission counts.
        if !(self.open)(&path).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            return;
        }
        let shown = Path::new("/").join(node.as_ref());
        let shown = shown.display();
        if self.android {
            lines.push(format!(
                "{shown} may not be opened by apps; use a phone that lets its shell user or apps use the DSP"
            ));
            return;
        }
        let group = path.metadata().ok().and_then(|facts| {
            let for_group = os::files::mode(&facts)? & 0o060 == 0o060;
            let number = os::files::group(&facts).filter(|number| for_group && *number != 0)?;
            Some(self.group(number))
        });
        lines.push(match group {
            Some(group) => format!(
                "{shown} may be opened by the group {group} only; sudo usermod -aG {group} $USER, then log in again"
            ),
            None => format!(
                "{shown} may be opened by root only; sudo cp 70-ggml-rust-npu.rules /etc/udev/rules.d/, then sudo udevadm \
                 control --reload and sudo udevadm trigger"
            ),
        });
    }

    /// Returns a group's name, or its number if it has none.
    fn group(&self, number: u32) -> String {
        let groups = self.read("etc/group").unwrap_or_default();
        // SOURCE: group(5): name:password:number:members.
        let name = groups.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            (fields.nth(1)?.parse() == Ok(number)).then(|| name.to_owned())
        });
        name.unwrap_or_else(|| number.to_string())
    }

    /// Returns the state of a processor that the kernel starts; `None` if the kernel shows no such
    /// processor.
    fn remote_processor(&self, name: &str) -> Option<String> {
        let entry = (self.entries("sys/class/remoteproc").into_iter()).find(|entry| {
            self.read(entry.join("name"))
                .is_some_and(|found| found == name)
        })?;
        self.read(entry.join("state"))
    }

    /// Returns the name of the driver of an entry in a class of devices.
    fn driver(&self, entry: &Path) -> Option<String> {
        let link = std::fs::read_link(self.root.join(entry).join("device/driver")).ok()?;
        Some(link.file_name()?.to_string_lossy().into_owned())
    }

    /// Returns the entries of a folder, by their paths below the root and in order.
    fn entries(&self, folder: &str) -> Vec<PathBuf> {
        let found = std::fs::read_dir(self.root.join(folder));
        let mut names: Vec<_> = (found.into_iter().flatten().flatten())
            .map(|entry| Path::new(folder).join(entry.file_name()))
            .collect();
        names.sort();
        names
    }

    fn has(&self, path: impl AsRef<Path>) -> bool {
        self.root.join(path).exists()
    }

    fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = std::fs::read(self.root.join(path)).ok()?;
        let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
        Some(text.trim().to_owned())
    }
}

#[cfg(test)]
mod tests;
