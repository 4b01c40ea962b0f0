//! Passes log lines to the host program.

use std::ffi::CString;
use std::sync::OnceLock;

use super::types::{NPU_LOG_DEBUG, NPU_LOG_ERROR, NPU_LOG_INFO, NPU_LOG_WARN, NpuHost};

static HOST: OnceLock<NpuHost> = OnceLock::new();

/// Sends the lines of this process to `host`, from the first call on.
pub(super) fn install(host: Option<&NpuHost>) {
    if let Some(host) = host {
        HOST.get_or_init(|| *host);
    }
    // A Rust program that links this crate may have its own logger; then the lines go there.
    let _ = log::set_logger(&HostLog);
    log::set_max_level(log::LevelFilter::Info);
}

/// Passes log lines to the host program.
struct HostLog;

impl log::Log for HostLog {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::max_level()
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
        if level > log::max_level() {
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
        // SAFETY: the host's function takes a level and a string that is alive during the call.
        unsafe { log(level, text.as_ptr()) };
    }

    fn flush(&self) {}
}
