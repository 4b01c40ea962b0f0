//! Finds the Rockchip NPU of this machine, or the simulated one that the user requests.

use std::path::Path;
use std::sync::Arc;

use rknpu_ops::direct::node::{DeviceNode, Kernel, Node};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim;

use super::RkDevice;
use super::caps::{self, Cores, RkCaps};
use super::device::NAME;
use super::driver::lock::{self, Nodes};
use super::driver::{Rknn, neighbour, process};
use super::plan::Target;
use crate::backend::{Absence, Discovery};
use crate::config::rules::Choice;
use crate::config::settings::Setting;
use crate::config::{Config, Driving, SimChip};
use crate::error::{Error, Result};

/// The file in which the kernel names the board.
const DEVICE_TREE: &str = "/proc/device-tree/compatible";

/// Opens and tests the NPU that `config` requests or that the machine has.
#[must_use]
pub fn find(config: &Config) -> Discovery {
    let mut found = Discovery::default();
    let Some((caps, simulated)) = chip(config) else {
        if let Err(refusal) = &config.settings {
            let error = Error::from(refusal.clone());
            log::warn!("no device has settings, but: {error}");
        }
        found.leave_out(NAME, why_absent(config));
        return found;
    };
    let chips = config.sim.iter().filter_map(|chip| match chip {
        SimChip::Rockchip(caps) => Some(caps.soc.name()),
        SimChip::Hexagon(_) => None,
    });
    for chip in chips.skip(1) {
        log::warn!(
            "{chip} is not simulated: a machine has one Rockchip NPU, and another one is named before it"
        );
    }
    if config.chooses(NAME) {
        let device = open(caps, simulated, config)
            .and_then(|rknn| RkDevice::start(rknn, target(caps, config)?))
            .map(|device| device.traced(config.trace.as_deref()));
        if let Ok(device) = &device {
            // The program may only start other programs that compute, as llama-server does for
            // several models, so the NPU is released until it is needed.
            device.npu().release_idle();
        }
        found.add(NAME, device.map(|device| Arc::new(device) as _));
    } else {
        found.leave_out(NAME, Absence::NotChosen);
    }
    found
}

/// Returns the Rockchip NPU that `config` requests or that the machine has, and whether it is
/// simulated.
#[must_use]
pub fn chip(config: &Config) -> Option<(&'static RkCaps, bool)> {
    match config.sim.as_slice() {
        [] => (config.chip.or_else(chip_of_this_machine)).map(|caps| (caps, false)),
        sim => sim.iter().find_map(|chip| match chip {
            SimChip::Rockchip(caps) => Some((*caps, true)),
            SimChip::Hexagon(_) => None,
        }),
    }
}

/// Loads the library of a Rockchip NPU, or its replacement: the stand-in, or our own command
/// streams.
///
/// # Errors
/// `Library` if there is none, `Direct` if there is nothing for command streams.
pub fn open(caps: &'static RkCaps, simulated: bool, config: &Config) -> Result<Arc<Rknn>> {
    if simulated {
        simulate(caps, config)
    } else {
        load(caps, config)
    }
}

fn simulate(caps: &RkCaps, config: &Config) -> Result<Arc<Rknn>> {
    let mut options = sim::Options::new(caps.soc);
    options.faults.clone_from(&config.faults.rknn);
    options.coherence = config.coherence;
    options.node.clone_from(&config.sim_node);
    if let Some(version) = &config.sim_api_version {
        options.api_version.clone_from(version);
    }
    Rknn::simulate(options)
}

fn load(caps: &RkCaps, config: &Config) -> Result<Arc<Rknn>> {
    let library = || Rknn::load(config.rknn_lib.as_deref());
    let rknn = match config.rknn {
        Driving::Direct => direct(caps)?,
        // If the user named a library, there is no fallback to the direct driver.
        Driving::Auto if config.rknn_lib.is_none() => library().or_else(|missing| {
            direct(caps).map_err(|error| {
                log::info!("{error}");
                missing
            })
        })?,
        Driving::Vendor | Driving::Auto => library()?,
    };
    process::raise_file_limit();
    neighbour::warn();
    Ok(rknn)
}

/// Drives the NPU by our own command streams.
fn direct(caps: &RkCaps) -> Result<Arc<Rknn>> {
    if caps.soc != Soc::Rk3588 {
        let chip = caps.soc.name();
        return Err(Error::Direct {
            reason: format!("command streams are known for rk3588 only, not for {chip}"),
        });
    }
    let node = DeviceNode::find().map_err(|error| Error::Direct {
        reason: error.to_string(),
    })?;
    let (path, kernel) = (node.path().display(), node.kernel());
    log::info!("{path} ({}) is driven without librknnrt", kernel.name());
    let nodes = match kernel {
        Kernel::Rknpu => Nodes::Machine,
        // Each opened file has a separate address space, and the kernel queues the jobs of all of
        // them.
        Kernel::Rocket => Nodes::Private,
    };
    Rknn::direct(Box::new(node), nodes)
}

/// Returns the chip with the user's wishes for it.
///
/// # Errors
/// `Config` if a rule contains an arithmetic that the chip lacks, or if the settings file cannot be
/// understood.
pub fn target(caps: &'static RkCaps, config: &Config) -> Result<Target> {
    for (choice, word, arithmetic) in [
        (Choice::Int4, "int4", caps.int4),
        (Choice::Int4Fp16, "int4-fp16", caps.int4_fp16),
    ] {
        if config.rules.ask_for(choice) && arithmetic.is_none() {
            return Err(Error::Config {
                variable: "GGML_RUST_NPU_RULES",
                value: word.into(),
                reason: format!("{} has no such arithmetic", caps.soc.name()),
                allowed: match caps.int4 {
                    Some(_) => "fp16, int8, int8-plain, int8-wide, int4, cpu".into(),
                    None => "fp16, int8, int8-plain, int8-wide, cpu".into(),
                },
            });
        }
    }
    Ok(Target {
        caps: with_segments(with_cores(caps, config)?, config)?,
        rules: config.rules.clone(),
        calibration: config.calibration,
        min_m: config.min_m(caps.soc.name())?,
        min_m_narrow: config.min_m_narrow(caps.soc.name())?,
        keep: config.keep,
        repack: config.repack,
    })
}

/// Returns the chip with the cores that the user wants to use.
fn with_cores(caps: &'static RkCaps, config: &Config) -> Result<&'static RkCaps> {
    let Some(cores) = config.cores else {
        return Ok(caps);
    };
    let there = caps.soc.cores();
    if cores.iter().any(|core| core >= there) {
        return Err(Error::Config {
            variable: "GGML_RUST_NPU_CORES",
            value: cores.to_string(),
            reason: format!("{} has {there} cores", caps.soc.name()),
            allowed: Cores::first(there).to_string(),
        });
    }
    Ok(RkCaps { cores, ..*caps }.keep())
}

/// Returns the chip with the segments of K that `ggml-npu bench` found faster.
fn with_segments(caps: &'static RkCaps, config: &Config) -> Result<&'static RkCaps> {
    let chip = caps.soc.name();
    let at_most = |setting, k_max| {
        let wish = config.setting(setting, chip)?;
        Ok::<_, Error>(wish.unwrap_or(k_max).min(k_max))
    };
    let k_max_int8 = at_most(Setting::KMaxInt8, caps.k_max_int8)?;
    let k_max_fp16 = at_most(Setting::KMaxFp16, caps.k_max_fp16)?;
    if (k_max_int8, k_max_fp16) == (caps.k_max_int8, caps.k_max_fp16) {
        return Ok(caps);
    }
    let caps = RkCaps {
        k_max_int8,
        k_max_fp16,
        ..*caps
    };
    Ok(caps.keep())
}

pub(super) fn chip_of_this_machine() -> Option<&'static RkCaps> {
    let compatible = std::fs::read_to_string(Path::new(DEVICE_TREE)).unwrap_or_default();
    caps::by_compatible(&compatible).or_else(|| caps::by_uevent(&lock::npu_uevent()?))
}

/// Returns the reason why there is no device if no chip is known. A user who names a library
/// expects a device, so the first check is whether the file is a library.
fn why_absent(config: &Config) -> Absence {
    let Some(library) = &config.rknn_lib else {
        return why_unknown();
    };
    match Rknn::load(Some(library)) {
        Err(error) => Absence::Failed(error),
        Ok(_) => Absence::Unusable(format!(
            "GGML_RUST_NPU_RKNN_LIB names {}, but {DEVICE_TREE} names no chip with an NPU: GGML_RUST_NPU_CHIP names it: {}",
            library.display(),
            chips()
        )),
    }
}

fn chips() -> String {
    caps::ALL.map(|caps| caps.soc.name()).join(", ")
}

/// Returns the reason why no chip is known. It is a warning if the kernel shows a Rockchip NPU.
fn why_unknown() -> Absence {
    let Some(node) = lock::npu_node() else {
        return Absence::NotThere(format!(
            "no Rockchip NPU: {DEVICE_TREE} names no chip with one"
        ));
    };
    let reason = match std::fs::read_to_string(Path::new(DEVICE_TREE)) {
        Ok(compatible) => format!(
            "{DEVICE_TREE} names {:?}",
            compatible.replace('\0', " ").trim()
        ),
        Err(error) => format!("{DEVICE_TREE} cannot be read ({error}), as in a container"),
    };
    Absence::Unusable(format!(
        "{} is the node of a Rockchip NPU, but of which chip is not known: {reason}; GGML_RUST_NPU_CHIP names it: {}",
        node.display(),
        chips()
    ))
}
