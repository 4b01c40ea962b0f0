//! Finds the Hexagon NPU of this machine, or the simulated ones that the user requests.

use std::path::Path;
use std::sync::Arc;

use hexagon_ops::{ffi, sim};

use super::caps::{self, HexCaps};
use super::device::Serving;
use super::driver::{self, Domain, FastRpc};
use super::{HexDevice, Options};
use crate::backend::{Absence, Discovery};
use crate::config::{Config, SimChip};
use crate::error::{Error, Result};

/// Opens and tests the NPUs that `config` requests or that the machine has: `HEX0`, `HEX1` and so
/// on.
#[must_use]
pub fn find(config: &Config) -> Discovery {
    let mut found = Discovery::default();
    for (index, session) in sessions(config).into_iter().enumerate() {
        let name = format!("HEX{index}");
        match session {
            Err(reason) => found.leave_out(&name, reason),
            Ok(session) => {
                let device = session.start(&name, config);
                found.add(&name, device.map(|device| device as _));
            }
        }
    }
    found
}

/// A session that can be opened.
#[derive(Debug)]
pub struct SessionPlan {
    rpc: Arc<FastRpc>,
    caps: &'static HexCaps,
    dsp: Domain,
    number: u32,
}

impl SessionPlan {
    /// Opens the session and tests its results.
    ///
    /// # Errors
    /// As [`HexDevice::start`].
    pub fn start(self, name: &str, config: &Config) -> Result<Arc<HexDevice>> {
        HexDevice::start(name, &self.rpc, self.caps, self.options(config))
    }

    /// Opens the session without a test.
    ///
    /// # Errors
    /// As [`HexDevice::untested`].
    pub fn untested(&self, name: &str, config: &Config) -> Result<HexDevice> {
        HexDevice::untested(name, &self.rpc, self.caps, self.options(config))
    }

    /// Returns another session on the same DSP.
    #[must_use]
    pub fn another(&self) -> Self {
        Self {
            rpc: Arc::clone(&self.rpc),
            number: u32::from(self.number == 0),
            ..*self
        }
    }

    /// Returns the vendor's library.
    #[must_use]
    pub fn rpc(&self) -> &FastRpc {
        &self.rpc
    }

    /// The compute DSP.
    #[must_use]
    pub fn dsp(&self) -> Domain {
        self.dsp
    }

    fn options<'a>(&self, config: &'a Config) -> Options<'a> {
        Options {
            dsp: self.dsp,
            session: self.number,
            repack: config.repack,
            timeout: config.timeout,
            address_bytes: None,
            threads: config.hex_threads,
            power: config.power,
            activations: config.hex_act,
            // An injected fault may make the DSP hang inside a call, so calls then run on a
            // separate thread.
            serving: if self.rpc.stand_in().is_some() && config.faults.fastrpc.is_empty() {
                Serving::Caller
            } else {
                Serving::Thread
            },
            trace: config.trace.as_deref(),
        }
    }
}

/// Returns the sessions that `config` requests or that the machine has, in order. An NPU that
/// cannot be used, or that the user leaves out, gives the reason instead.
#[must_use]
pub fn sessions(config: &Config) -> Vec<std::result::Result<SessionPlan, Absence>> {
    let all = all_sessions(config).into_iter().enumerate();
    let chosen = all.map(|(index, session)| match session {
        Err(reason @ (Absence::NotThere(_) | Absence::Unusable(_))) => Err(reason),
        _ if !config.chooses(&format!("HEX{index}")) => Err(Absence::NotChosen),
        session => session,
    });
    chosen.collect()
}

fn all_sessions(config: &Config) -> Vec<std::result::Result<SessionPlan, Absence>> {
    let mut found = Vec::new();
    for chip in &config.sim {
        if let SimChip::Hexagon(caps) = chip {
            match simulate(caps, config) {
                Ok(rpc) => found.extend(sessions_behind(&rpc, config).into_iter().map(|plan| {
                    // A simulated chip may be a variant of its architecture, such as one without a
                    // matrix unit, so its properties replace the usual ones.
                    plan.map(|plan| SessionPlan { caps, ..plan })
                })),
                Err(error) => found.push(Err(Absence::Failed(error))),
            }
        }
    }
    if !config.sim.is_empty() {
        return found;
    }
    match FastRpc::load(config.cdsprpc_lib.as_deref()) {
        Ok(rpc) => {
            // FastRPC reads this variable at its first call. Without a FastRPC library the
            // environment is left unchanged.
            driver::offer_own_folder();
            sessions_behind(&rpc, config)
        }
        Err(error) => vec![Err(why_not_loaded(error, config))],
    }
}

/// As [`sessions`], for the compute DSPs of a library: the sessions of the first one, then those of
/// the others.
#[must_use]
pub fn sessions_behind(
    rpc: &Arc<FastRpc>,
    config: &Config,
) -> Vec<std::result::Result<SessionPlan, Absence>> {
    let mut found = Vec::new();
    for dsp in Domain::ALL {
        match chip_behind(rpc, dsp) {
            Ok(Some(caps)) => found.extend((0..config.hex_sessions).map(|number| {
                Ok(SessionPlan {
                    rpc: Arc::clone(rpc),
                    caps,
                    dsp,
                    number,
                })
            })),
            Ok(None) => {}
            Err(error) => found.push(Err(Absence::Failed(error))),
        }
    }
    found
}

/// Returns the reason why the library is not there. Most machines have no such NPU; one with a
/// device node of FastRPC has, and so has one whose user names a library.
fn why_not_loaded(error: Error, config: &Config) -> Absence {
    if config.cdsprpc_lib.is_some() {
        return Absence::Failed(error);
    }
    match driver::device_node(Path::new("/dev")) {
        None => Absence::NotThere(format!("no Hexagon NPU: {error}")),
        Some(node) => Absence::Unusable(format!(
            "{} shows that there is a Hexagon NPU, which cannot be used: {error}",
            node.display()
        )),
    }
}

fn simulate(caps: &HexCaps, config: &Config) -> Result<Arc<FastRpc>> {
    let mut options = sim::Options::new(caps.arch);
    if !caps.has_matrix {
        options.matrix = sim::MatrixUnit::Refused;
    }
    options.faults.clone_from(&config.faults.fastrpc);
    options.coherence = match config.coherence {
        rknpu_ops::sim::Coherence::Relaxed => sim::Coherence::Relaxed,
        rknpu_ops::sim::Coherence::Strict => sim::Coherence::Strict,
    };
    // By default a simulated DSP computes on the thread that waits for it. A second thread would
    // compete with ggml's threads, which spin while they wait.
    options.hvx_threads = config.hex_threads.map_or(1, |threads| threads as usize);
    FastRpc::simulate(options)
}

/// Returns the chip that a DSP is part of; `None` if the DSP does not exist; libraries then answer
/// with an error or with 0.
fn chip_behind(rpc: &FastRpc, dsp: Domain) -> Result<Option<&'static HexCaps>> {
    // A library that does not know the third and fourth DSP returns the first one's answer for
    // them.
    let is_known = matches!(dsp, Domain::Cdsp | Domain::Cdsp1) || rpc.stand_in().is_some();
    if !is_known && !driver::has_node_of(Path::new("/dev"), dsp) {
        return Ok(None);
    }
    let arch = match (rpc.attribute(dsp, ffi::attribute::ARCH_VER), dsp) {
        (Err(error), Domain::Cdsp) => return Err(error),
        (Err(error), dsp) => {
            log::debug!("no Hexagon NPU {}: {error}", dsp.name().to_string_lossy());
            return Ok(None);
        }
        (Ok(0), dsp) if dsp != Domain::Cdsp => return Ok(None),
        (Ok(version), _) => ffi::arch_of(version),
    };
    let known = caps::by_arch(arch).ok_or_else(|| Error::Architecture {
        what: "the Hexagon NPU",
        have: format!("V{arch}"),
        want: "V68, V69, V73, V75, V79 or V81".into(),
    });
    known.map(Some)
}
