//! Segments of K: the largest K of a call with which a Rockchip NPU multiplies fastest.

use std::iter;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ggml_rust_npu::backend::{Absent, Device};
use ggml_rust_npu::config::Config;
use ggml_rust_npu::config::settings::{Setting, Settings};
use ggml_rust_npu::rockchip::caps::RkCaps;
use ggml_rust_npu::rockchip::device::NAME;
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::rockchip::{RkDevice, discovery};

use super::SizeArg;
use super::multiply::{Refused, TimedWeights};
use crate::files::Files;
use crate::quantize::Format;
use crate::text::{print, say};
use crate::{NO_DEVICE, ToolError, files};

/// Candidates for the largest K of a call, in addition to the chip's usual one; the smallest is
/// first.
const CANDIDATES: [usize; 3] = [1024, 2048, 4096];

/// Another K than the chip's usual one is chosen if it needs at most this part of the time.
const WORTH: f64 = 0.98;

/// An arithmetic whose segments are timed.
struct Arithmetic {
    setting: Setting,
    name: &'static str,
    format: Format,
    of: fn(&mut RkCaps) -> &mut usize,
}

const ARITHMETICS: [Arithmetic; 2] = [
    Arithmetic {
        setting: Setting::KMaxInt8,
        name: "INT8",
        format: Format::Q8_0,
        of: |caps| &mut caps.k_max_int8,
    },
    Arithmetic {
        setting: Setting::KMaxFp16,
        name: "FP16",
        format: Format::F16,
        of: |caps| &mut caps.k_max_fp16,
    },
];

/// Times each candidate on the shapes whose K is longer, and writes the fastest one to the file of
/// settings at `path`, if there is one and a candidate was timed.
///
/// # Errors
/// Text for the user.
pub(super) fn run(
    config: &Config,
    shapes: &[SizeArg],
    rows: &[usize],
    path: Option<&Path>,
) -> Result<ExitCode, ToolError> {
    let Some((caps, simulated)) = discovery::chip(config) else {
        say("no Rockchip NPU can be used, and others have no segments of K");
        return Ok(ExitCode::from(NO_DEVICE));
    };
    if !config.chooses(NAME) {
        say(format_args!("- {}", Absent::not_chosen(NAME)));
        say("no NPU can be used");
        return Ok(ExitCode::from(NO_DEVICE));
    }
    let rknn = discovery::open(caps, simulated, config)?;
    let chip = caps.soc.name();
    let suffix = if simulated { " (simulated)" } else { "" };
    let mut text =
        format!("{chip}{suffix}: time for each largest K of a call, of the chip's own\n");
    for arithmetic in &ARITHMETICS {
        let mut sizes = *caps;
        let own = *(arithmetic.of)(&mut sizes);
        let longest = shapes.iter().map(|SizeArg([k, _])| *k).max().unwrap_or(0);
        let candidates = CANDIDATES.map(|k_max| (k_max, longer(shapes, k_max)));
        let candidates = candidates.into_iter();
        let mut candidates = candidates.filter(|(k_max, _)| *k_max < own.min(longest));
        let Some(first) = candidates.next() else {
            let unwritten = path.map_or("", |_| "; no setting was written");
            text += &format!(
                "{}: nothing was timed, because no K is longer than {}{unwritten}\n",
                arithmetic.name, CANDIDATES[0]
            );
            continue;
        };
        let time = |k_max: usize, shapes: &[SizeArg]| {
            let target = discovery::target(caps, config)?;
            let mut sized = *target.caps;
            *(arithmetic.of)(&mut sized) = k_max;
            // A small leak: only a few of these exist, in a program that ends soon.
            let target = Target {
                caps: Box::leak(Box::new(sized)),
                ..target
            };
            let device = RkDevice::start(Arc::clone(&rknn), target)?;
            times(
                &(Arc::new(device) as Arc<dyn Device>),
                arithmetic.format,
                shapes,
                rows,
            )
        };
        let of_own = time(own, &first.1)?;
        let mut best = (own, WORTH);
        text += &format!("{} K={own}: 1.00\n", arithmetic.name);
        for (k_max, shapes) in iter::once(first).chain(candidates) {
            let times = time(k_max, &shapes)?;
            let of_own = of_own.iter().filter(|(k, _)| *k > k_max);
            let ratios = (times.iter().zip(of_own))
                .map(|((_, time), (_, own))| time.as_secs_f64() / own.as_secs_f64());
            let mean = ratios.sum::<f64>() / times.len().max(1) as f64;
            text += &format!("{} K={k_max}: {mean:.2}\n", arithmetic.name);
            if mean < best.1 {
                best = (k_max, mean);
            }
        }
        if let Some(path) = path {
            let old = match path.exists() {
                true => Files::default().text(path)?,
                false => String::new(),
            };
            let new = Settings::with(&old, arithmetic.setting, chip, simulated, best.0);
            files::write(path, new.as_bytes())?;
            text += &format!(
                "{} K={} written to {}\n",
                arithmetic.name,
                best.0,
                path.display()
            );
        }
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the shapes whose K is split if calls have at most `k_max`.
fn longer(shapes: &[SizeArg], k_max: usize) -> Vec<SizeArg> {
    let shapes = shapes.iter().copied();
    shapes.filter(|SizeArg([k, _])| *k > k_max).collect()
}

/// Returns K and the least time of each shape and number of rows.
fn times(
    device: &Arc<dyn Device>,
    format: Format,
    shapes: &[SizeArg],
    rows: &[usize],
) -> Result<Vec<(usize, Duration)>, ToolError> {
    let mut all = Vec::new();
    for SizeArg([k, n]) in shapes {
        let points = TimedWeights::new(device, format, *k, *n).and_then(|weights| {
            rows.iter()
                .map(|m| weights.time(*m, None).map(|cost| (*k, cost.time)))
                .collect::<Result<Vec<_>, _>>()
        });
        match points {
            Ok(points) => all.extend(points),
            Err(Refused::NotIts) => {
                return Err(format!("{} does not take K={k}, N={n}", device.name()).into());
            }
            Err(Refused::Failed(failure)) => return Err(failure),
        }
    }
    Ok(all)
}
