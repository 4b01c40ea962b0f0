//! `ggml-npu devices --probe`: the facts about a device that a developer without it needs, as text
//! for an issue.
//!
//! Everything is a line `section.key: value`; docs/guide/probe.md lists the keys. An unavailable
//! value is `none` with the reason in parentheses, and times of a stand-in end with `(simulated)`.
//! Devices are opened like those of the backend but without the self-test at the start, so that one
//! that fails it is measured, too.

use std::fmt::Display;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ggml_rust_npu::config::Config;
use ggml_rust_npu::driver::trace::{self, Returned};
use ggml_rust_npu::hexagon::discovery::sessions;
use ggml_rust_npu::rockchip::discovery::chip;

use self::private::Private;
use crate::progress::Progress;
use crate::text::escaped;
use crate::{NO_DEVICE, ToolError, devices};

mod finding;
mod hexagon;
mod library;
mod machine;
mod private;
mod rockchip;

/// Version of the lines' meaning.
const SCHEMA: u32 = 3;

/// The lines.
#[derive(Debug, Default)]
struct Lines {
    text: String,
    /// The text before each key.
    section: String,
    private: Private,
    is_simulated: bool,
}

impl Lines {
    /// Adds a line. Line breaks in the value become spaces.
    fn add(&mut self, key: &str, value: impl Display) {
        let value = value.to_string();
        let words: Vec<&str> = value.split_whitespace().collect();
        let value = match &words[..] {
            [] => "none (empty)".into(),
            words => self.private.hide(&words.join(" ")),
        };
        self.text += &format!("{}.{}: {}\n", self.section, escaped(key), escaped(value));
    }

    /// Adds a value or the reason why there is none.
    fn add_result<T: Display, E: Display>(&mut self, key: &str, value: Result<T, E>) {
        match value {
            Ok(value) => self.add(key, value),
            Err(reason) => self.add(key, format!("none ({reason})")),
        }
    }

    /// Adds a measured time.
    fn add_measured(&mut self, key: &str, value: impl Display) {
        let simulated = if self.is_simulated {
            " (simulated)"
        } else {
            ""
        };
        self.add(key, format!("{value}{simulated}"));
    }

    /// Adds the vendor's calls since the last time.
    fn add_calls(&mut self) {
        for (index, calls) in trace::take().into_iter().enumerate() {
            let returned = match calls.returned {
                Returned::Code(code) => format!("{code:#x}"),
                Returned::Valid(true) => "valid".into(),
                Returned::Valid(false) => "null".into(),
                Returned::Nothing => "nothing".into(),
            };
            let (mean, longest) = (calls.total / calls.count, calls.longest);
            let value = format!(
                "{}({}) = {returned}, {} times, mean {:.1} us, longest {:.1} us",
                calls.function,
                calls.arguments,
                calls.count,
                microseconds(mean),
                microseconds(longest)
            );
            self.add_measured(&format!("call.{}", index + 1), value);
        }
    }
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Returns the median time of `count` calls of `work`.
///
/// # Errors
/// The first that `work` returns.
fn median<E>(count: usize, mut work: impl FnMut() -> Result<Duration, E>) -> Result<Duration, E> {
    let mut times = (0..count).map(|_| work()).collect::<Result<Vec<_>, E>>()?;
    times.sort_unstable();
    Ok(times.get(count / 2).copied().unwrap_or_default())
}

/// Returns the duration of `work`.
///
/// # Errors
/// The errors of `work`.
fn timed<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<Duration, E> {
    let began = Instant::now();
    work().map(|_| began.elapsed())
}

/// Runs the probe.
///
/// # Errors
/// Text for the user.
pub fn run(config: &Config) -> Result<ExitCode, ToolError> {
    let progress = Progress::waiting("probing");
    trace::start();
    let mut lines = Lines {
        section: "probe".into(),
        ..Lines::default()
    };
    lines.add("schema", SCHEMA);
    lines.add("version", env!("CARGO_PKG_VERSION"));
    machine::add(&mut lines);

    let mut found = 0;
    if let Some((caps, simulated)) = chip(config) {
        lines.section = "rknpu0".into();
        lines.is_simulated = simulated;
        found += usize::from(rockchip::add(&mut lines, caps, config));
    }
    for (index, session) in sessions(config).into_iter().enumerate() {
        lines.section = format!("hex{index}");
        found += usize::from(hexagon::add(&mut lines, session, index, config));
    }
    lines.section = "log".into();
    for (index, message) in devices::messages().iter().enumerate() {
        lines.add(&format!("message.{}", index + 1), message);
    }
    lines.section = "probe".into();
    lines.add("devices", found);
    progress.finish();
    crate::text::print(&lines.text)?;
    Ok(match found {
        0 => ExitCode::from(NO_DEVICE),
        _ => ExitCode::SUCCESS,
    })
}
