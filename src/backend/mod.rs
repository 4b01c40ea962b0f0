//! Joins plan and device: finds devices, keeps weight buffers, computes graphs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

use rknpu_ops::sim;

use crate::caps::{self, Cores, RkCaps};
use crate::config::{Config, SimChip};
use crate::device::rknpu::{self, RkNpu};
use crate::error::{Error, Result};
use crate::graph::{Operation, Tensor};
use crate::packfile::Packs;
use crate::plan::{self, Target};
use crate::rules::Choice;
use crate::selftest;
use crate::vendor::rknn::Rknn;
use crate::vendor::{lock, process};

pub use self::any::{AnyBuffer, AnyDevice, AnyStream, Buffers, Homes};
pub use self::buffer::{PACKED_ALIGN_BYTES, WeightBuffer};
pub use self::limit::Limit;
use self::memory::system_memory;

mod any;
mod buffer;
mod compute;
pub mod hexagon;
mod limit;
mod memory;
pub mod offline;

/// Where the kernel says which board this is.
const DEVICE_TREE: &str = "/proc/device-tree/compatible";

/// A device as ggml sees it.
#[derive(Debug)]
pub struct Device {
    npu: RkNpu,
    target: Target,
    /// The M that calls may have.
    passed: selftest::Passed,
    rows: Mutex<compute::RowScratch>,
    packs: OnceLock<Arc<Packs>>,
    /// The fewest rows that the device multiplies with weights that packing makes larger: all, once there is no memory to
    /// keep the bytes of all of them for the CPU.
    min_m_narrow: AtomicUsize,
    /// That weights are kept for the CPU has been logged.
    narrow_said: Once,
    /// Weights that were logged as too large.
    too_large_said: Mutex<BTreeSet<String>>,
}

/// Finds the devices that `config` asks for or that the machine has. A device that cannot start is left out, with one
/// log line that says why.
#[must_use]
pub fn find_devices(config: &Config) -> Vec<AnyDevice> {
    let mut found: Vec<AnyDevice> = Vec::new();
    let chosen = |name: &str| {
        let keep = config.devices.as_ref();
        let chosen =
            keep.is_none_or(|keep| keep.iter().any(|kept| kept.eq_ignore_ascii_case(name)));
        if !chosen {
            log::info!("{name} is left out: GGML_RUST_NPU_DEVICES does not name it");
        }
        chosen
    };
    let mut report = |name: &str, result: Result<AnyDevice>| match result {
        Ok(device) => {
            log::info!("{name}: {}", device.description());
            found.push(device);
        }
        Err(error) => log::error!("{name} is not available: {error}"),
    };

    let rockchip = rockchip(config);
    if let (Err(refusal), None) = (&config.settings, rockchip) {
        let error = Error::from(refusal.clone());
        log::warn!("no device has settings, but: {error}");
    }
    let chips = config.sim.iter().filter_map(|chip| match chip {
        SimChip::Rockchip(caps) => Some(caps.soc.name()),
        SimChip::Hexagon(_) => None,
    });
    for chip in chips.skip(1) {
        log::warn!(
            "{chip} is not simulated: a machine has one Rockchip NPU, and another one is named before it"
        );
    }
    match rockchip {
        Some((caps, simulated)) if chosen(rknpu::NAME) => {
            let device = open_rockchip(caps, simulated, config)
                .and_then(|rknn| Device::start(rknn, target(caps, config)?))
                .map(|device| AnyDevice::Rockchip(Arc::new(device)));
            report(rknpu::NAME, device);
        }
        Some(_) => {}
        None => explain_missing_chip(),
    }

    for (index, opened) in hexagon::sessions(config).into_iter().enumerate() {
        let name = format!("HEX{index}");
        if chosen(&name) {
            let device = opened.and_then(|session| session.start(&name, config));
            report(&name, device.map(AnyDevice::Hexagon));
        }
    }
    if let (Some(path), false) = (&config.pack, found.is_empty()) {
        let packs = open_packs(path, config.pack_full);
        found.iter().for_each(|device| match device {
            AnyDevice::Rockchip(device) => device.use_packs(Arc::clone(&packs)),
            AnyDevice::Hexagon(device) => device.use_packs(Arc::clone(&packs)),
        });
    }
    found
}

/// The Rockchip NPU that `config` asks for or that the machine has, and whether it is a simulated one.
#[must_use]
pub fn rockchip(config: &Config) -> Option<(&'static RkCaps, bool)> {
    match config.sim.as_slice() {
        [] => (config.chip.or_else(chip_of_this_machine)).map(|caps| (caps, false)),
        sim => sim.iter().find_map(|chip| match chip {
            SimChip::Rockchip(caps) => Some((*caps, true)),
            SimChip::Hexagon(_) => None,
        }),
    }
}

/// Loads the library of a Rockchip NPU, or starts its stand-in.
///
/// # Errors
/// `Library` if there is none, `Busy` if another process has the NPU.
pub fn open_rockchip(caps: &'static RkCaps, simulated: bool, config: &Config) -> Result<Arc<Rknn>> {
    if simulated {
        simulate(caps, config)
    } else {
        load(config)
    }
}

/// Opens the packs that the user named; what cannot be used is left out with a log line.
fn open_packs(path: &Path, full: bool) -> Arc<Packs> {
    let (packs, failed) = Packs::open(path, full);
    for (path, error) in &failed {
        log::error!(
            "{} is not used, its weights are packed when they are loaded: {error}",
            path.display()
        );
    }
    if failed.is_empty() && packs.is_empty() {
        log::warn!(
            "GGML_RUST_NPU_PACK: there is no pack file in {}",
            path.display()
        );
    }
    Arc::new(packs)
}

fn simulate(caps: &RkCaps, config: &Config) -> Result<Arc<Rknn>> {
    let mut options = sim::Options::new(caps.soc);
    options.faults.clone_from(&config.faults.rknn);
    options.coherence = config.coherence;
    if let Some(version) = &config.sim_api_version {
        options.api_version.clone_from(version);
    }
    Rknn::simulate(options)
}

fn load(config: &Config) -> Result<Arc<Rknn>> {
    let rknn = Rknn::load(config.rknn_lib.as_deref())?;
    process::raise_file_limit();
    // Held until the process ends: devices are never given back.
    std::mem::forget(lock::take_npu()?);
    Ok(rknn)
}

/// The chip with the user's wishes for it.
///
/// # Errors
/// `Config` if a rule asks for an arithmetic that the chip does not have, or if the file of settings is not understood.
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
                    Some(_) => "fp16, int8, int4, cpu".into(),
                    None => "fp16, int8, cpu".into(),
                },
            });
        }
    }
    Ok(Target {
        caps: with_cores(caps, config)?,
        rules: config.rules.clone(),
        calibration: config.calibration,
        min_m: config.min_m(caps.soc.name())?,
        min_m_narrow: config.min_m_narrow(caps.soc.name())?,
        keep: config.keep,
    })
}

/// The chip with the cores that the user wants to use.
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
    // Once for each device, and devices are never given back.
    Ok(Box::leak(Box::new(RkCaps { cores, ..*caps })))
}

fn chip_of_this_machine() -> Option<&'static RkCaps> {
    let compatible = std::fs::read_to_string(Path::new(DEVICE_TREE)).unwrap_or_default();
    caps::rockchip_by_compatible(&compatible)
        .or_else(|| caps::rockchip_by_uevent(&lock::npu_uevent()?))
}

/// Says why no chip is known: a warning where the kernel shows a Rockchip NPU.
fn explain_missing_chip() {
    let Some(node) = lock::npu_node() else {
        log::debug!("no Rockchip NPU: {DEVICE_TREE} names no chip with one");
        return;
    };
    let names = caps::ROCKCHIP.map(|caps| caps.soc.name()).join(", ");
    let reason = match std::fs::read_to_string(Path::new(DEVICE_TREE)) {
        Ok(compatible) => format!(
            "{DEVICE_TREE} names {:?}",
            compatible.replace('\0', " ").trim()
        ),
        Err(error) => format!("{DEVICE_TREE} cannot be read ({error}), as in a container"),
    };
    log::warn!(
        "{} is the node of a Rockchip NPU, but of which chip is not known: {reason}; GGML_RUST_NPU_CHIP names it: {names}",
        node.display()
    );
}

impl Device {
    /// Opens and tests an NPU.
    ///
    /// # Errors
    /// As [`RkNpu::open`]; `SelfTest` if it computes something wrong.
    pub fn start(rknn: Arc<Rknn>, target: impl Into<Target>) -> Result<Self> {
        let mut device = Self::untested(rknn, target)?;
        device.passed = selftest::run(&device.npu, &device.target.rules)?;
        Ok(device)
    }

    /// Opens an NPU without a test of what it computes: for benchmarks with a stand-in that computes nothing.
    ///
    /// # Errors
    /// As [`RkNpu::open`].
    pub fn untested(rknn: Arc<Rknn>, target: impl Into<Target>) -> Result<Self> {
        let mut target = target.into();
        // CPU numbers mean something only on the chip itself.
        let here = chip_of_this_machine().filter(|caps| caps.soc == target.caps.soc);
        let cpus = here.map_or(&[][..], |caps| caps.big_cpus);
        let npu = RkNpu::open(rknn, target.caps, &target.precisions(), cpus)?;
        target.caps = npu.caps();
        Ok(Self {
            min_m_narrow: AtomicUsize::new(target.min_m_narrow),
            narrow_said: Once::new(),
            too_large_said: Mutex::default(),
            npu,
            target,
            passed: selftest::Passed::default(),
            rows: Mutex::default(),
            packs: OnceLock::new(),
        })
    }

    /// Has weights that are written from now on come from pack files, if these have them. The first call decides.
    pub fn use_packs(&self, packs: Arc<Packs>) {
        // Later ones change nothing.
        let _ = self.packs.set(packs);
    }

    /// The NPU.
    #[must_use]
    pub fn npu(&self) -> &RkNpu {
        &self.npu
    }

    /// Chip, library and driver, in one line.
    #[must_use]
    pub fn description(&self) -> String {
        let (library, driver) = self.npu.versions();
        let library = library.split_whitespace().next().unwrap_or("?");
        let chip = self.npu.caps().soc.name().to_uppercase();
        let simulated = if self.npu.is_simulated() {
            " (simulated)"
        } else {
            ""
        };
        format!("Rockchip {chip} NPU, librknnrt {library}, driver {driver}{simulated}")
    }

    /// Whether the device computes an operation. Metadata only.
    #[must_use]
    pub fn supports(&self, operation: &Operation) -> bool {
        let plan = plan::question(&self.target, operation);
        if let Err(reason) = plan {
            log::trace!("{} stays on the CPU: {reason}", operation.dst.name);
            self.report_too_large(operation);
        }
        plan.is_ok()
    }

    /// Says once for each weight that it is larger than a buffer can be.
    fn report_too_large(&self, operation: &Operation) {
        let Some(bytes) = plan::too_large(&self.target, operation) else {
            return;
        };
        let name = operation.src[0].map_or("", |weights| weights.name);
        let mut said = (self.too_large_said.lock()).unwrap_or_else(PoisonError::into_inner);
        if said.insert(name.to_owned()) {
            log::warn!(
                "{}: {name} stays on the CPU: it takes {bytes} bytes, and a buffer has at most {}",
                rknpu::NAME,
                caps::DOMAIN_WEIGHT_BYTES
            );
        }
    }

    /// Whether a node that the device could compute has so few rows that the CPU shall do it.
    #[must_use]
    pub fn leaves_to_cpu(&self, operation: &Operation) -> bool {
        let narrow = self.min_m_narrow.load(Ordering::Relaxed);
        plan::left_to_cpu(&self.target, operation, narrow)
    }

    /// Bytes that weights can still take in the NPU's address spaces, and could take in all.
    #[must_use]
    pub fn address_space(&self) -> (usize, usize) {
        self.npu.address_space()
    }

    /// Bytes that a tensor takes in a buffer for packed weights: its own, or those of its packed form if that is
    /// larger.
    #[must_use]
    pub fn packed_bytes(&self, tensor: &Tensor) -> usize {
        let plain = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
        plan::weight_layout(&self.target, tensor).map_or(plain, |layout| layout.bytes().max(plain))
    }
}
