//! Interrupts the tool while it writes an output.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![expect(unsafe_code, reason = "sends signals")]

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Runs the tool once for each signal that ends it and sends the signal as soon as `folder` has a
/// third file, which is the unfinished output: the tool must report that, remove it and leave
/// `output` unchanged.
pub fn leaves_nothing(args: &[&str], folder: &Path, output: &Path) {
    fs::write(output, "the old one").unwrap();
    for (signal, number) in [
        ("INT", libc::SIGINT),
        ("TERM", libc::SIGTERM),
        ("HUP", libc::SIGHUP),
    ] {
        // A shell starts background jobs with SIGINT ignored, and the tool keeps that. `env`
        // restores the default, so that the test does not depend on who started it.
        let mut child = test_kit::command("env")
            .args([
                &format!("--default-signal={signal}"),
                env!("CARGO_BIN_EXE_ggml-npu"),
            ])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let began = Instant::now();
        while fs::read_dir(folder).unwrap().count() < 3 {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "it does not begin"
            );
            assert!(child.try_wait().unwrap().is_none(), "it ended early");
            std::thread::sleep(Duration::from_millis(1));
        }
        let process = i32::try_from(child.id()).unwrap();
        // SAFETY: `kill` accesses no memory. The child has not been waited for, so its number is
        // not another process's.
        assert_eq!(unsafe { libc::kill(process, number) }, 0, "{signal}");
        let done = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(130), "{signal}: {errors}");
        assert!(errors.contains("interrupted"), "{signal}: {errors}");
        assert_eq!(fs::read_dir(folder).unwrap().count(), 2, "{signal}");
        assert_eq!(fs::read_to_string(output).unwrap(), "the old one");
    }
}
