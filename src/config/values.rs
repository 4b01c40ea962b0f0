//! Parses the values of environment variables. An error describes the fault of the text; the table
//! of variables adds the name and the values that are allowed.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use hexagon_ops::ffi;
use hexagon_ops::wire::Power;
use log::LevelFilter;
use rknpu_ops::calibrate::Method;
use rknpu_ops::sim::{Coherence, parse_faults};

use super::{ActivationBits, Driving, Faults, Repack, SimChip};
use crate::ggml_version::NewerGgml;
use crate::hexagon::caps as hexagon;
use crate::rockchip::caps::{self as rockchip, RkCaps};

/// Words and their values.
type Words<T, const N: usize> = [(&'static str, T); N];

pub(super) const LEVELS: Words<LevelFilter, 6> = [
    ("off", LevelFilter::Off),
    ("error", LevelFilter::Error),
    ("warn", LevelFilter::Warn),
    ("info", LevelFilter::Info),
    ("debug", LevelFilter::Debug),
    ("trace", LevelFilter::Trace),
];
pub(super) const PACK_VERIFIES: Words<bool, 2> = [("sampled", false), ("full", true)];
/// The percentile is the one that did best on SmolLM2-135M.
pub(super) const CALIBRATIONS: Words<Method, 4> = [
    ("mse", Method::Mse),
    ("kl", Method::KlDivergence),
    ("percentile", Method::Percentile(0.99)),
    ("absmax", Method::AbsMax),
];
pub(super) const RKNNS: Words<Driving, 3> = [
    ("vendor", Driving::Vendor),
    ("direct", Driving::Direct),
    ("auto", Driving::Auto),
];
pub(super) const KEEPS: Words<bool, 2> = [("on", true), ("off", false)];
pub(super) const REPACKS: Words<Repack, 3> = [
    ("weights", Repack::Weights),
    ("always", Repack::Always),
    ("off", Repack::Off),
];
pub(super) const NEWER_GGMLS: Words<NewerGgml, 2> =
    [("probe", NewerGgml::Probe), ("strict", NewerGgml::Strict)];
pub(super) const ACTIVATIONS: Words<ActivationBits, 3> = [
    ("auto", ActivationBits::Auto),
    ("8", ActivationBits::Eight),
    ("16", ActivationBits::Sixteen),
];
pub(super) const POWERS: Words<Power, 3> = [
    ("burst", Power::Burst),
    ("balanced", Power::Balanced),
    ("saver", Power::Saver),
];
pub(super) const COHERENCES: Words<Coherence, 2> = [
    ("relaxed", Coherence::Relaxed),
    ("strict", Coherence::Strict),
];

pub(super) const SESSIONS: RangeInclusive<u32> = 1..=ffi::NUM_SESSIONS;
/// SOURCE: no chip has more than 8 vector units; llama.cpp ggml-hexagon htp/main.c limits its
/// threads to 10.
pub(super) const HEX_THREADS: RangeInclusive<u32> = 1..=10;
pub(super) const TIMEOUTS_S: RangeInclusive<u32> = 1..=3600;
/// Up to 1 TiB.
pub(super) const MEMORIES_MIB: RangeInclusive<u32> = 1..=1 << 20;

/// Default time for which a Hexagon NPU may be silent.
///
/// SOURCE: a guess to be checked on a device: the largest command of a model of 8 billion weights,
/// 512 rows by its LM head, runs for several seconds on the stand-in and well under one second on
/// an NPU.
pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Largest `GGML_RUST_NPU_MIN_M`: no ubatch is larger, so the CPU computes all multiplications.
pub(super) const MIN_M_MAX: usize = 65536;

/// Formats words for Markdown.
pub(super) fn quoted(words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    words.join(", ")
}

/// Formats the words of a table for Markdown.
pub(super) fn words<T: Copy, const N: usize>(table: &Words<T, N>) -> String {
    quoted(&table.map(|(word, _)| word))
}

/// Formats the ends of a range.
pub(super) fn span(range: &RangeInclusive<u32>) -> String {
    format!("{} to {}", range.start(), range.end())
}

pub(super) fn one_of<T: Copy>(table: &[(&str, T)], text: &str) -> Result<T, String> {
    let found = table.iter().find(|(word, _)| *word == text.trim());
    found
        .map(|(_, value)| *value)
        .ok_or_else(|| "no such choice".into())
}

pub(super) fn list(text: &str) -> Vec<String> {
    let names = text.split(',').map(str::trim);
    names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

pub(super) fn path(text: &str) -> Result<Option<PathBuf>, String> {
    Ok(Some(text.into()))
}

pub(super) fn number(range: &RangeInclusive<u32>, text: &str) -> Result<u32, String> {
    let parsed = text.trim().parse().ok();
    parsed
        .filter(|number| range.contains(number))
        .ok_or_else(|| "out of range, or no whole number".into())
}

pub(super) fn threads(text: &str) -> Result<Option<u32>, String> {
    number(&HEX_THREADS, text).map(Some)
}

pub(super) fn timeout(text: &str) -> Result<Duration, String> {
    number(&TIMEOUTS_S, text).map(|seconds| Duration::from_secs(seconds.into()))
}

pub(super) fn memory_mib(text: &str) -> Result<Option<u32>, String> {
    number(&MEMORIES_MIB, text).map(Some)
}

pub(super) fn rows(text: &str) -> Result<Option<usize>, String> {
    match text.trim().parse() {
        Ok(rows @ 1..=MIN_M_MAX) => Ok(Some(rows)),
        _ => Err("not such a number of rows".into()),
    }
}

/// Returns the names of the Rockchip NPUs.
pub(super) fn rockchips() -> Vec<&'static str> {
    rockchip::ALL.iter().map(|caps| caps.soc.name()).collect()
}

/// Returns the names of all chips.
pub(super) fn chips() -> Vec<&'static str> {
    let hexagons = hexagon::ALL.iter().map(|caps| caps.name);
    rockchips().into_iter().chain(hexagons).collect()
}

pub(super) fn chip(text: &str) -> Result<&'static RkCaps, String> {
    rockchip::by_name(text.trim()).ok_or_else(|| "no such chip".into())
}

pub(super) fn sim(text: &str) -> Result<Vec<SimChip>, String> {
    let names = text.split(',').map(str::trim);
    let chips = names.filter(|name| !name.is_empty()).map(|name| {
        let rockchip = rockchip::by_name(name).map(SimChip::Rockchip);
        rockchip
            .or_else(|| hexagon::by_name(name).map(SimChip::Hexagon))
            .ok_or_else(|| format!("no such chip: {name}"))
    });
    chips.collect()
}

pub(super) fn faults(text: &str) -> Result<Faults, String> {
    let items = text.split(',').filter(|item| !item.trim().is_empty());
    let (fastrpc, rknn): (Vec<_>, Vec<_>) = items.partition(|item| {
        let function = item.split(':').next().unwrap_or_default();
        hexagon_ops::sim::knows(function.trim())
    });
    let fastrpc = hexagon_ops::sim::parse_faults(&fastrpc.join(","));
    Ok(Faults {
        rknn: parse_faults(&rknn.join(",")).map_err(|error| error.to_string())?,
        fastrpc: fastrpc.map_err(|error| error.to_string())?,
    })
}

/// Returns the words for the methods that clip INT4 weights.
#[must_use]
pub fn calibrations() -> [&'static str; 4] {
    CALIBRATIONS.map(|(word, _)| word)
}

/// Returns the word for a method that clips INT4 weights.
#[must_use]
pub fn calibration_word(method: Method) -> &'static str {
    let found = CALIBRATIONS.iter().find(|(_, known)| *known == method);
    found.map_or("?", |(word, _)| word)
}

/// Returns the method that clips INT4 weights, by its word.
///
/// # Errors
/// An error text if the word is unknown.
pub fn calibration(word: &str) -> Result<Method, String> {
    one_of(&CALIBRATIONS, word)
}
