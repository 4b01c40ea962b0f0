//! A progress bar on standard error, if that is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two redraws when nothing changes.
const TICK: Duration = Duration::from_millis(200);

/// The bar of one step.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Begins a step of `total` units.
    pub fn new(what: &'static str, total: u64) -> Self {
        // The bar draws nothing if standard error is not a terminal.
        let bar = ProgressBar::new(total).with_message(what);
        if let Ok(style) =
            ProgressStyle::with_template("{msg:18} {wide_bar} {percent:>3} % {eta:>4}")
        {
            bar.set_style(style);
        }
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    /// Begins a step whose progress is unknown: shows that it runs, and for how long.
    pub fn waiting(what: &'static str) -> Self {
        let spinner = ProgressBar::new_spinner().with_message(what);
        if let Ok(style) = ProgressStyle::with_template("{msg:18} {spinner} {elapsed}") {
            spinner.set_style(style);
        }
        spinner.enable_steady_tick(TICK);
        Self(spinner)
    }

    /// Another `units` are done.
    pub fn add(&self, units: u64) {
        self.0.inc(units);
    }

    /// Removes the bar from the screen.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}
