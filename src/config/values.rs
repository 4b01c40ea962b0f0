//! Parses the values of variables. Each error names the variable, its value and the allowed ones.

use log::LevelFilter;
use rknpu_ops::calibrate::Method;
use rknpu_ops::sim::{Coherence, parse_faults};

use super::{Faults, Repack, SimChip};
use crate::config::rules::{self, Rules};
use crate::error::{Error, Result};
use crate::hexagon::caps as hexagon;
use crate::rockchip::caps::{self as rockchip, Cores, RkCaps};

pub(super) fn chip(
    variable: &'static str,
    value: Option<String>,
) -> Result<Option<&'static RkCaps>> {
    let Some(value) = value else { return Ok(None) };
    match rockchip::by_name(value.trim()) {
        Some(caps) => Ok(Some(caps)),
        None => Err(Error::Config {
            variable,
            reason: "no such chip".into(),
            allowed: rockchip::ALL.map(|caps| caps.soc.name()).join(", "),
            value,
        }),
    }
}

pub(super) fn sim(value: Option<String>) -> Result<Vec<SimChip>> {
    let value = value.unwrap_or_default();
    let names = value.split(',').map(str::trim);
    let chips = names.filter(|name| !name.is_empty()).map(|name| {
        let rockchip = rockchip::by_name(name).map(SimChip::Rockchip);
        rockchip
            .or_else(|| hexagon::by_name(name).map(SimChip::Hexagon))
            .ok_or_else(|| Error::Config {
                variable: "GGML_RUST_NPU_SIM",
                value: value.clone(),
                reason: format!("no such chip: {name}"),
                allowed: (rockchip::ALL.iter().map(|caps| caps.soc.name()))
                    .chain(hexagon::ALL.iter().map(|caps| caps.name))
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    });
    chips.collect()
}

/// Longest silence of a Hexagon NPU unless the user sets it.
///
/// SOURCE: a guess to be checked on a device: the largest command of a model of 8 billion weights,
/// 512 rows by its LM head, takes the stand-in several seconds and an NPU well under one.
pub(super) const DEFAULT_TIMEOUT_S: u32 = 30;

pub(super) fn number(
    variable: &'static str,
    value: Option<String>,
    default: u32,
    allowed: std::ops::RangeInclusive<u32>,
) -> Result<u32> {
    let Some(value) = value else {
        return Ok(default);
    };
    let parsed = value.trim().parse().ok();
    parsed
        .filter(|number| allowed.contains(number))
        .ok_or_else(|| Error::Config {
            variable,
            reason: "out of range, or no whole number".into(),
            allowed: format!("{} to {}", allowed.start(), allowed.end()),
            value,
        })
}

pub(super) fn repack(value: Option<String>) -> Result<Repack> {
    match value.as_deref().map(str::trim) {
        None | Some("weights") => Ok(Repack::Weights),
        Some("always") => Ok(Repack::Always),
        Some("off") => Ok(Repack::Off),
        Some(_) => Err(Error::Config {
            variable: "GGML_RUST_NPU_REPACK",
            reason: "no such mode".into(),
            allowed: "weights, always, off".into(),
            value: value.unwrap_or_default(),
        }),
    }
}

pub(super) fn faults(value: Option<String>) -> Result<Faults> {
    let value = value.unwrap_or_default();
    let items = value.split(',').filter(|item| !item.trim().is_empty());
    let (fastrpc, rknn): (Vec<_>, Vec<_>) = items.partition(|item| {
        let function = item.split(':').next().unwrap_or_default();
        hexagon_ops::sim::knows(function.trim())
    });
    let wrong = |reason: String| {
        Error::Config {
        variable: "GGML_RUST_NPU_SIM_FAULTS",
        value: value.clone(),
        reason,
        allowed: "function:n=code,... (n counts calls from 1; n+ means from the nth on), or rknn_matmul_run:M<rows>=0"
            .into(),
    }
    };
    Ok(Faults {
        rknn: parse_faults(&rknn.join(",")).map_err(|error| wrong(error.to_string()))?,
        fastrpc: hexagon_ops::sim::parse_faults(&fastrpc.join(","))
            .map_err(|error| wrong(error.to_string()))?,
    })
}

pub(super) fn rules(value: Option<String>) -> Result<Rules> {
    let value = value.unwrap_or_default();
    Rules::parse(&value).map_err(|reason| Error::Config {
        variable: "GGML_RUST_NPU_RULES",
        reason,
        allowed: format!("pattern=choice,... with one of {}", rules::choices()),
        value,
    })
}

/// Returns the words for how INT4 weights are clipped.
#[must_use]
pub fn calibrations() -> [&'static str; 4] {
    CALIBRATIONS.map(|(word, _)| word)
}

/// Returns the word for how INT4 weights are clipped.
#[must_use]
pub fn calibration_word(method: Method) -> &'static str {
    let found = CALIBRATIONS.iter().find(|(_, known)| *known == method);
    found.map_or("?", |(word, _)| word)
}

/// Words for how INT4 weights are clipped. The percentile is the one that did best on SmolLM2-135M.
const CALIBRATIONS: [(&str, Method); 4] = [
    ("mse", Method::Mse),
    ("kl", Method::KlDivergence),
    ("percentile", Method::Percentile(0.99)),
    ("absmax", Method::AbsMax),
];

/// Parses the method that clips INT4 weights.
///
/// # Errors
/// `Config` if the word is unknown.
pub fn calibration(value: Option<String>) -> Result<Method> {
    let Some(value) = value else {
        return Ok(Method::default());
    };
    let found = CALIBRATIONS.iter().find(|(word, _)| *word == value.trim());
    found.map(|(_, method)| *method).ok_or(Error::Config {
        variable: "GGML_RUST_NPU_CALIBRATION",
        reason: "no such method".into(),
        allowed: calibrations().join(", "),
        value,
    })
}

/// Largest `GGML_RUST_NPU_MIN_M`: no ubatch is larger, so all multiplications are the CPU's.
pub(super) const MIN_M_MAX: usize = 65536;

pub(super) fn min_m(value: Option<String>) -> Result<Option<usize>> {
    let Some(value) = value else {
        return Ok(None);
    };
    match value.trim().parse() {
        Ok(rows @ 1..=MIN_M_MAX) => Ok(Some(rows)),
        _ => Err(Error::Config {
            variable: "GGML_RUST_NPU_MIN_M",
            reason: "not such a number of rows".into(),
            allowed: format!("1 (all on the NPU) to {MIN_M_MAX}"),
            value,
        }),
    }
}

pub(super) fn keep(value: Option<String>) -> Result<Option<bool>> {
    match value.as_deref().map(str::trim) {
        None => Ok(None),
        Some("on") => Ok(Some(true)),
        Some("off") => Ok(Some(false)),
        Some(_) => Err(Error::Config {
            variable: "GGML_RUST_NPU_KEEP",
            reason: "no such choice".into(),
            allowed: "on, off".into(),
            value: value.unwrap_or_default(),
        }),
    }
}

pub(super) fn cores(value: Option<String>) -> Result<Option<Cores>> {
    let Some(value) = value else { return Ok(None) };
    match Cores::parse(&value) {
        Some(cores) => Ok(Some(cores)),
        None => Err(Error::Config {
            variable: "GGML_RUST_NPU_CORES",
            reason: "no list of cores".into(),
            allowed: "numbers of cores such as 0,1".into(),
            value,
        }),
    }
}

pub(super) fn pack_verify(value: Option<String>) -> Result<bool> {
    match value.as_deref().map(str::trim) {
        None | Some("sampled") => Ok(false),
        Some("full") => Ok(true),
        Some(_) => Err(Error::Config {
            variable: "GGML_RUST_NPU_PACK_VERIFY",
            reason: "no such way".into(),
            allowed: "sampled, full".into(),
            value: value.unwrap_or_default(),
        }),
    }
}

pub(super) fn coherence(value: Option<String>) -> Result<Coherence> {
    match value.as_deref().map(str::trim) {
        None | Some("relaxed") => Ok(Coherence::Relaxed),
        Some("strict") => Ok(Coherence::Strict),
        Some(_) => Err(Error::Config {
            variable: "GGML_RUST_NPU_SIM_COHERENCE",
            reason: "no such mode".into(),
            allowed: "relaxed, strict".into(),
            value: value.unwrap_or_default(),
        }),
    }
}

pub(super) fn level(value: Option<String>) -> Result<LevelFilter> {
    let Some(value) = value else {
        return Ok(LevelFilter::Info);
    };
    value.trim().parse().map_err(|_| Error::Config {
        variable: "GGML_RUST_NPU_LOG",
        reason: "no such level".into(),
        allowed: "off, error, warn, info, debug, trace".into(),
        value,
    })
}
