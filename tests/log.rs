//! Proves which log lines reach the host program, and at which level. One test, because a process
//! has one logger.
#![expect(unsafe_code, reason = "gives a function, as C does")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::ffi::{CStr, c_char};
use std::sync::Mutex;

use ggml_rust_npu::abi::*;
use log::{Level, LevelFilter, debug, error, info, log_enabled, trace, warn};

static LINES: Mutex<Vec<(u32, String)>> = Mutex::new(Vec::new());

unsafe extern "C" fn take(level: u32, text: *const c_char) {
    // SAFETY: the caller guarantees a C string.
    let text = unsafe { CStr::from_ptr(text) }.to_str().unwrap();
    LINES.lock().unwrap().push((level, text.to_owned()));
    // Some programs forward ggml's lines to `log`, as this call does.
    error!(target: OURS, "again: {text}");
}

/// The beginning of the names of modules whose lines the host program gets.
const OURS: &str = "ggml_rust_npu::tests";

/// The lines that `log` made.
fn lines(log: impl FnOnce()) -> Vec<(u32, String)> {
    log();
    std::mem::take(&mut *LINES.lock().unwrap())
}

#[test]
fn the_host_program_gets_the_lines_of_the_levels_it_asked_for() {
    for name in test_kit::foreign_variables() {
        // SAFETY: no other thread exists yet.
        unsafe { std::env::remove_var(name) };
    }
    // SAFETY: no other thread exists yet.
    unsafe { std::env::set_var("GGML_RUST_NPU_SIM", "rk3588") };
    let host = NpuHost { log: Some(take) };
    // SAFETY: the function may be called at any time.
    assert_eq!(unsafe { npu_start(&raw const host) }, 1);
    assert!(!lines(|| ()).is_empty(), "a line names the device");
    let ours = |level, text: &str| (level, format!("ggml-rust-npu: {text}"));
    let all = || {
        lines(|| {
            error!(target: OURS, "one");
            warn!(target: OURS, "tw\0o");
            info!(target: OURS, "three");
            debug!(target: OURS, "four");
            trace!(target: OURS, "five");
            error!("a line of another crate");
            // The vendor's library reports an error that a line of this crate will explain.
            error!(target: "librknnrt", "six");
        })
    };
    let three = [
        ours(NPU_LOG_ERROR, "one"),
        ours(NPU_LOG_WARN, "tw o"),
        ours(NPU_LOG_INFO, "three"),
    ];
    assert_eq!(all(), three);
    assert!(log_enabled!(target: OURS, Level::Info) && !log_enabled!(target: OURS, Level::Debug));
    // If the machine has too little memory for a buffer, a warning comes before the system may end
    // the program.
    let (mut free, mut total) = (0, 0);
    // SAFETY: pointers to two local numbers.
    unsafe { npu_device_memory(0, &raw mut free, &raw mut total) };
    assert!(total > 0);
    let asked = |size| {
        // SAFETY: the pointer is from `npu_buffer_new`, or NULL.
        lines(|| unsafe { npu_buffer_free(npu_buffer_new(0, size, false)) })
    };
    let is_warning = |(level, line): &(u32, String)| {
        *level == NPU_LOG_WARN && line.contains(": a buffer of ") && line.contains("(-c)")
    };
    assert!(asked(usize::MAX / 2).iter().any(is_warning));
    assert!(!asked(4096).iter().any(is_warning));
    log::set_max_level(LevelFilter::Debug);
    let mut six = three.to_vec();
    six.push(ours(NPU_LOG_DEBUG, "four"));
    six.push((NPU_LOG_DEBUG, "librknnrt: six".to_owned()));
    assert_eq!(all(), six);
    log::set_max_level(LevelFilter::Trace);
    six.insert(4, ours(NPU_LOG_DEBUG, "five"));
    assert_eq!(all(), six);
}
