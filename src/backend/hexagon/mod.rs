//! Joins plan and device for Hexagon: opens sessions, keeps buffers, turns graphs into submissions.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use hexagon_ops::{ffi, sim};

use crate::caps::{self, HexCaps};
use crate::config::{Config, Repack, SimChip};
use crate::device::hexagon::{Buffer, Floats, HexNpu, Serving, Settings};
use crate::error::{Error, Result};
use crate::graph::{Op, Operation, Place, Tensor};
use crate::packfile::Packs;
use crate::plan::hexagon::{self as plan, WeightLayout};
use crate::selftest;
use crate::vendor::fastrpc::{self, FastRpc};

use self::trace::Trace;

pub use self::buffer::{ALIGN_BYTES, Content, HexBuffer};
pub use self::compute::Stream;

mod buffer;
mod compute;
pub(super) mod pack;
mod submission;
mod trace;

/// Largest buffer.
// SOURCE: ggml-hexagon of ggml 0.25.3 keeps buffers at 1 GiB, so that several fit into an address space of 3 GB.
pub const MAX_BUFFER_BYTES: usize = 1 << 30;

/// Longest list of names that are remembered so that a log line comes once.
const MAX_TOLD: usize = 1000;

/// Largest tensor that a session of so many addresses takes: vendor functions have lengths of 32 bits with a sign, a buffer
/// has a guard page, and a third of the addresses is for what a command names beside it: activations, results.
fn max_tensor_bytes(address_bytes: u64) -> usize {
    let part = address_bytes / 3 * 2;
    usize::try_from(part.min(u64::from(i32::MAX.unsigned_abs()) - 2 * 4096)).unwrap_or(usize::MAX)
}

/// A device as ggml sees it.
#[derive(Debug)]
pub struct Device {
    name: Arc<str>,
    npu: HexNpu,
    repack: Repack,
    /// Counts what makes remembered submissions wrong: weights packed anew, caches that the CPU begins to use.
    changes: Arc<AtomicU64>,
    packs: OnceLock<Arc<Packs>>,
    trace: Option<Trace>,
    shared: SharedBuffers,
    /// Largest tensor that is taken, and the names of larger ones that a log line told of.
    max_tensor_bytes: usize,
    told: Mutex<BTreeSet<String>>,
}

/// The memory that a device shares with the CPU, as long as it is there.
type SharedBuffers = Arc<Mutex<Vec<Weak<Buffer>>>>;

/// What a device is opened with.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Number of the session, from 0.
    pub session: u32,
    /// When weights are packed.
    pub repack: Repack,
    /// How long the DSP may be silent.
    pub timeout: Duration,
    /// Bytes that can be mapped at a time, if fewer than the chip's.
    pub address_bytes: Option<u64>,
    /// Who calls the DSP.
    pub serving: Serving,
    /// Where commands are noted.
    pub trace: Option<&'a Path>,
}

/// A session that can be opened.
#[derive(Debug)]
pub struct Session {
    rpc: Arc<FastRpc>,
    caps: &'static HexCaps,
    number: u32,
}

impl Session {
    /// Opens it and tests what it computes.
    ///
    /// # Errors
    /// As [`Device::start`].
    pub fn start(self, name: &str, config: &Config) -> Result<Arc<Device>> {
        Device::start(name, &self.rpc, self.caps, self.options(config))
    }

    /// Opens it without a test.
    ///
    /// # Errors
    /// As [`Device::untested`].
    pub fn untested(&self, name: &str, config: &Config) -> Result<Device> {
        Device::untested(name, &self.rpc, self.caps, self.options(config))
    }

    /// The library that it goes through.
    #[must_use]
    pub fn rpc(&self) -> &FastRpc {
        &self.rpc
    }

    fn options<'a>(&self, config: &'a Config) -> Options<'a> {
        Options {
            session: self.number,
            repack: config.repack,
            timeout: config.timeout,
            address_bytes: None,
            // Faults of the DSP include one that never returns.
            serving: if self.rpc.stand_in().is_some() && config.faults.fastrpc.is_empty() {
                Serving::Caller
            } else {
                Serving::Thread
            },
            trace: config.trace.as_deref(),
        }
    }
}

/// The sessions that `config` asks for or that the machine has, in order; for an NPU that is there but cannot be used,
/// the reason.
#[must_use]
pub fn sessions(config: &Config) -> Vec<Result<Session>> {
    let mut found = Vec::new();
    let mut add = |rpc: Result<(Arc<FastRpc>, &'static HexCaps)>| match rpc {
        Ok((rpc, caps)) => found.extend((0..config.hex_sessions).map(|number| {
            Ok(Session {
                rpc: Arc::clone(&rpc),
                caps,
                number,
            })
        })),
        Err(error) => found.push(Err(error)),
    };
    for chip in &config.sim {
        if let SimChip::Hexagon(caps) = chip {
            add(simulate(caps, config).map(|rpc| (rpc, *caps)));
        }
    }
    if !config.sim.is_empty() {
        return found;
    }
    fastrpc::offer_own_folder();
    match FastRpc::load(config.cdsprpc_lib.as_deref()) {
        Ok(rpc) => add(chip_behind(&rpc).map(|caps| (rpc, caps))),
        // Most machines have no such NPU; one with a device of FastRPC has, and so has somebody who names a library.
        Err(error) if config.cdsprpc_lib.is_none() => {
            match fastrpc::device_node(Path::new("/dev")) {
                None => log::debug!("no Hexagon NPU: {error}"),
                Some(node) => log::warn!(
                    "{} shows that there is a Hexagon NPU, which cannot be used: {error}",
                    node.display()
                ),
            }
        }
        Err(error) => add(Err(error)),
    }
    found
}

fn simulate(caps: &HexCaps, config: &Config) -> Result<Arc<FastRpc>> {
    let mut options = sim::Options::new(caps.arch);
    options.faults.clone_from(&config.faults.fastrpc);
    options.coherence = match config.coherence {
        rknpu_ops::sim::Coherence::Relaxed => sim::Coherence::Relaxed,
        rknpu_ops::sim::Coherence::Strict => sim::Coherence::Strict,
    };
    // It computes on the thread that waits for it. A second one would compete with those of ggml, which spin.
    options.hvx_threads = 1;
    FastRpc::simulate(options)
}

fn chip_behind(rpc: &FastRpc) -> Result<&'static HexCaps> {
    let arch = ffi::arch_of(rpc.attribute(ffi::attribute::ARCH_VER)?);
    caps::hexagon_by_arch(arch).ok_or_else(|| Error::Version {
        library: "the Hexagon NPU",
        have: format!("V{arch}"),
        want: "V73, V75, V79 or V81".into(),
    })
}

impl Device {
    /// Opens a session and tests what it computes. V73's vector units may lack the instructions for floats that its library
    /// has; another library without them is tried when a command ends the process.
    ///
    /// # Errors
    /// As [`Self::untested`]; `SelfTest` if it computes something wrong.
    pub fn start(
        name: &str,
        rpc: &Arc<FastRpc>,
        caps: &'static HexCaps,
        options: Options<'_>,
    ) -> Result<Arc<Self>> {
        let device = Self::open(name, rpc, caps, options, Floats::Usual)?;
        let error = match selftest::hexagon::run(&device.npu) {
            Ok(()) => return Ok(Arc::new(device)),
            Err(error) => error,
        };
        if caps.arch != 73 || !device.npu.is_lost() {
            return Err(error);
        }
        drop(device);
        log::warn!(
            "{name}: the self-test ended the DSP's process ({error}); trying the library without IEEE floats"
        );
        let device = Self::open(name, rpc, caps, options, Floats::Qfloat)?;
        selftest::hexagon::run(&device.npu)?;
        Ok(Arc::new(device))
    }

    /// Opens a session.
    ///
    /// # Errors
    /// As [`HexNpu::open`]; `Config` if the trace cannot be written.
    pub fn untested(
        name: &str,
        rpc: &Arc<FastRpc>,
        caps: &'static HexCaps,
        options: Options<'_>,
    ) -> Result<Self> {
        Self::open(name, rpc, caps, options, Floats::Usual)
    }

    fn open(
        name: &str,
        rpc: &Arc<FastRpc>,
        caps: &'static HexCaps,
        options: Options<'_>,
        floats: Floats,
    ) -> Result<Self> {
        let name: Arc<str> = name.into();
        let settings = Settings {
            session: options.session,
            timeout: options.timeout,
            address_bytes: options.address_bytes.unwrap_or(caps.address_bytes),
            serving: options.serving,
            floats,
        };
        let npu = HexNpu::open(&name, rpc, caps, settings)?;
        let (threads, is_simulated) = (npu.info().threads, npu.is_simulated());
        let trace = (options.trace)
            .map(|path| Trace::create(path, &name, caps, threads, is_simulated))
            .transpose()?;
        Ok(Self {
            name,
            npu,
            repack: options.repack,
            changes: Arc::default(),
            packs: OnceLock::new(),
            trace,
            shared: SharedBuffers::default(),
            max_tensor_bytes: max_tensor_bytes(settings.address_bytes),
            told: Mutex::default(),
        })
    }

    /// Its name in ggml.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Chip and library, in one line.
    #[must_use]
    pub fn description(&self) -> String {
        let info = self.npu.info();
        let simulated = if self.npu.is_simulated() {
            " (simulated)"
        } else {
            ""
        };
        format!(
            "Qualcomm Hexagon V{} NPU, {} KiB VTCM, {} HVX thread(s){simulated}",
            info.arch,
            info.vtcm_bytes / 1024,
            info.threads
        )
    }

    /// The NPU.
    #[must_use]
    pub fn npu(&self) -> &HexNpu {
        &self.npu
    }

    /// Has weights of buffers that are allocated from now on come from pack files, if these have them. The first call
    /// decides.
    pub fn use_packs(&self, packs: Arc<Packs>) {
        // Later ones change nothing.
        let _ = self.packs.set(packs);
    }

    /// Where weights may lie packed already.
    fn packs(&self) -> Arc<Packs> {
        self.packs.get().cloned().unwrap_or_default()
    }

    /// When weights are packed.
    #[must_use]
    pub fn repack(&self) -> Repack {
        self.repack
    }

    /// Whether the device computes an operation. Metadata only.
    #[must_use]
    pub fn supports(&self, operation: &Operation) -> bool {
        let operands = operation.src.iter().flatten().chain([&operation.dst]);
        if let Some(large) = operands
            .into_iter()
            .find(|tensor| self.packed_bytes(tensor) > self.max_tensor_bytes)
        {
            self.tell_of(large);
            return false;
        }
        let vtcm_bytes = self.npu.info().vtcm_bytes as usize;
        let plan = plan::question(vtcm_bytes, &self.with_places(operation));
        if let Err(reason) = plan {
            let (op, name) = (operation.op.name(), operation.dst.name);
            log::trace!("{}: {op} {name} is left to others: {reason}", self.name);
        }
        plan.is_ok()
    }

    /// Says once of a tensor that it is too large.
    fn tell_of(&self, tensor: &Tensor) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() < MAX_TOLD && told.insert(tensor.name.to_owned()) {
            log::warn!(
                "{}: {} is left to the CPU: it takes {} bytes, and a buffer has at most {}",
                self.name,
                tensor.name,
                self.packed_bytes(tensor),
                self.max_tensor_bytes
            );
        }
    }

    /// The operation with its operands where they will be when it is computed: where everything is in buffers that pack
    /// (`GGML_RUST_NPU_REPACK=always`), only factors of products are packed then, see [`Stream::push`].
    fn with_places<'a>(&self, operation: &Operation<'a>) -> Operation<'a> {
        let mut operation = *operation;
        if self.repack != Repack::Always {
            return operation;
        }
        let factors = factors(&operation);
        let others = operation.src.iter_mut().skip(factors).flatten();
        for tensor in others.chain([&mut operation.dst]) {
            if tensor.place == Place::Packed {
                tensor.place = Place::Device;
            }
        }
        operation
    }

    /// How often something happened that makes remembered submissions wrong.
    fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Bytes of the largest tensor that is taken.
    #[must_use]
    pub fn max_tensor_bytes(&self) -> usize {
        self.max_tensor_bytes
    }

    /// Bytes that a tensor takes in a buffer for weights: its own, or those of its packed form if that is larger.
    #[must_use]
    pub fn packed_bytes(&self, tensor: &Tensor) -> usize {
        let plain = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
        let packed = WeightLayout::new(tensor).filter(|_| tensor.shape.is_contiguous(tensor.dtype));
        packed.map_or(plain, |layout| layout.bytes().max(plain))
    }
}

/// Sources of an operation that may be packed when it is computed: those of a product whose weights have a packed form.
fn factors(operation: &Operation) -> usize {
    match (operation.op, &operation.src[0]) {
        (Op::MulMat | Op::MulMatId, Some(src0)) if WeightLayout::new(src0).is_some() => 2,
        _ => 0,
    }
}
