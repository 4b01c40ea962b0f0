//! The computer around the NPU: system, chip, memory, device nodes.

use std::path::Path;
use std::process::Command;

use super::Lines;

/// Device nodes of NPUs and of the memory that they share with the CPU.
const NODES: [&str; 12] = [
    "fastrpc-cdsp",
    "fastrpc-cdsp-secure",
    "fastrpc-cdsp1",
    "fastrpc-cdsp1-secure",
    "adsprpc-smd",
    "adsprpc-smd-secure",
    "dma_heap/system",
    "dma_heap/qcom,system",
    "ion",
    "rknpu",
    "dri/card1",
    "dri/renderD129",
];

/// Returns the content of a small file of the kernel, or the reason why there is none.
pub(super) fn read(path: &str) -> Result<String, String> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
            Ok(text.trim().to_owned())
        }
        Err(error) => Err(format!("{path}: {}", reason_of(&error))),
    }
}

/// Returns a system's error without its number.
pub(super) fn reason_of(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().into()
}

/// Adds the lines.
pub(super) fn add(lines: &mut Lines) {
    lines.section = "machine".into();
    lines.add("os", std::env::consts::OS);
    lines.add("arch", std::env::consts::ARCH);
    lines.add_result("kernel", read("/proc/sys/kernel/osrelease"));
    lines.add_result("board", read("/proc/device-tree/model"));
    lines.add_result("soc.compatible", read("/proc/device-tree/compatible"));
    for key in ["family", "machine", "soc_id", "revision"] {
        let value = read(&format!("/sys/devices/soc0/{key}"));
        lines.add_result(&format!("soc.{key}"), value);
    }
    for key in [
        "ro.soc.manufacturer",
        "ro.soc.model",
        "ro.board.platform",
        "ro.build.version.release",
    ] {
        lines.add_result(&format!("android.{key}"), property(key));
    }
    let cpus = std::thread::available_parallelism().map(usize::from);
    lines.add_result("cpus", cpus);
    let cache = "/sys/devices/system/cpu/cpu0/cache/index0/coherency_line_size";
    lines.add_result("cpu_cache_line_bytes", read(cache));
    lines.add_result("page_bytes", page_bytes());
    for (key, field) in [
        ("memory_total", "MemTotal:"),
        ("memory_available", "MemAvailable:"),
    ] {
        let value = read("/proc/meminfo").and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix(field));
            line.map(|value| value.trim().to_owned())
                .ok_or_else(|| format!("/proc/meminfo has no {field}"))
        });
        lines.add_result(key, value);
    }
    for node in NODES {
        let path = Path::new("/dev").join(node);
        let opened = std::fs::File::options().read(true).write(true).open(&path);
        let value = opened
            .map(|_| "opens for reading and writing")
            .map_err(|error| reason_of(&error));
        lines.add_result(&format!("node.{node}"), value);
    }
    for variable in [
        "DSP_LIBRARY_PATH",
        "ADSP_LIBRARY_PATH",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
    ] {
        let value = std::env::var_os(variable).ok_or("not set");
        let value = value.map(|value| value.to_string_lossy().into_owned());
        lines.add_result(&format!("variable.{variable}"), value);
    }
    for (name, value) in std::env::vars_os() {
        let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
        if name.starts_with("GGML_RUST_NPU_") {
            lines.add(&format!("variable.{name}"), value);
        }
    }
}

/// Returns a property of Android.
fn property(name: &str) -> Result<String, String> {
    const GETPROP: &str = "/system/bin/getprop";
    if !Path::new(GETPROP).exists() {
        return Err("not Android".into());
    }
    let output = Command::new(GETPROP).arg(name).output();
    match output {
        Ok(output) => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        Err(error) => Err(reason_of(&error)),
    }
}

/// Returns the bytes of a page.
fn page_bytes() -> Result<u64, String> {
    // SOURCE: getauxval(3): pairs of words; 6 is AT_PAGESZ.
    const AT_PAGESZ: u64 = 6;
    let bytes = std::fs::read("/proc/self/auxv").map_err(|error| reason_of(&error))?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    (bytes.chunks_exact(16))
        .find(|pair| word(&pair[..8]) == AT_PAGESZ)
        .map(|pair| word(&pair[8..]))
        .ok_or_else(|| "/proc/self/auxv has no page size".into())
}
