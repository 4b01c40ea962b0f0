//! Passes log lines to the host program.

use std::cell::Cell;
use std::ffi::CString;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::types::{NPU_LOG_DEBUG, NPU_LOG_ERROR, NPU_LOG_INFO, NPU_LOG_WARN, NpuHost};

static HOST: OnceLock<NpuHost> = OnceLock::new();

/// The process has no other logger than [`HostLog`].
static IS_OURS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The host is being given a line.
    static IS_GIVING: Cell<bool> = const { Cell::new(false) };
}

/// Sends the lines of this process to `host`, from the first call on.
pub(super) fn install(host: Option<&NpuHost>) {
    if let Some(host) = host {
        HOST.get_or_init(|| *host);
    }
    // A Rust program that links this crate may have a logger already. Then the lines go there, and
    // that logger decides which of them it shows.
    if log::set_logger(&HostLog).is_ok() {
        IS_OURS.store(true, Ordering::Relaxed);
    }
    set_level(log::LevelFilter::Info);
}

/// Says which lines the host gets.
pub(super) fn set_level(level: log::LevelFilter) {
    if IS_OURS.load(Ordering::Relaxed) {
        log::set_max_level(level);
    }
}

/// Beginnings of the names of this project's crates, and of the vendor's library.
const TARGETS: [&str; 5] = [
    "ggml_rust_npu",
    "hexagon_ops",
    "rknpu_ops",
    "task_pool",
    "librknnrt",
];

/// Passes log lines to the host program.
struct HostLog;

impl log::Log for HostLog {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        let target = metadata.target();
        metadata.level() <= log::max_level() && TARGETS.iter().any(|ours| target.starts_with(ours))
    }

    fn log(&self, record: &log::Record) {
        let Some(log) = HOST.get().and_then(|host| host.log) else {
            return;
        };
        // Errors of the vendor's library become debug lines, because this crate reports the error
        // that follows from them.
        let vendor = record.target() == "librknnrt";
        let level = if vendor {
            log::Level::Debug
        } else {
            record.level()
        };
        if level > log::max_level() || !self.enabled(record.metadata()) {
            return;
        }
        let source = if vendor { "librknnrt" } else { "ggml-rust-npu" };
        let text = format!("{source}: {}", record.args()).replace('\0', " ");
        let Ok(text) = CString::new(text) else { return };
        let level = match level {
            log::Level::Error => NPU_LOG_ERROR,
            log::Level::Warn => NPU_LOG_WARN,
            log::Level::Info => NPU_LOG_INFO,
            log::Level::Debug | log::Level::Trace => NPU_LOG_DEBUG,
        };
        // A Rust program may forward ggml's log lines to the `log` crate. Without this flag they
        // would return here in an endless loop.
        if IS_GIVING.replace(true) {
            return;
        }
        // SAFETY: the host's function takes a level and a string that is alive during the call.
        unsafe { log(level, text.as_ptr()) };
        IS_GIVING.set(false);
    }

    fn flush(&self) {}
}
