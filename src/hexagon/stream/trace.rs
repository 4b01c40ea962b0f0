//! `GGML_RUST_NPU_TRACE`: a line for each command, with its modelled cost and its time.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::submission::Step;
use crate::error::{Error, Result};
use crate::hexagon::caps::HexCaps;

/// A file that commands are noted in, as comma-separated values.
#[derive(Debug)]
pub struct Trace {
    out: Mutex<BufWriter<File>>,
    graphs: AtomicU64,
    caps: &'static HexCaps,
    threads: u32,
    device: String,
}

const HEAD: &str = "device,graph,node,operation,ne0,ne1,ne2,ne3,modelled_packets,modelled_bytes,modelled_tile_products,\
                    modelled_us,measured_dsp_us,measured_host_us";

impl Trace {
    /// Begins a file for a device, over an older one.
    ///
    /// # Errors
    /// `TraceFile` if the file cannot be written.
    pub fn create(
        path: &Path,
        device: &str,
        caps: &'static HexCaps,
        threads: u32,
        is_simulated: bool,
    ) -> Result<Self> {
        // A file for each device, as they are opened one by one and used side by side.
        let path = path.with_extension(match path.extension() {
            Some(extension) => format!("{device}.{}", extension.to_string_lossy()),
            None => device.to_owned(),
        });
        let wrong = |source| Error::TraceFile {
            path: path.clone(),
            source,
        };
        let mut out = BufWriter::new(File::create(&path).map_err(wrong)?);
        let what = if is_simulated {
            "measured: of a stand-in on this computer"
        } else {
            "measured: of the device, each command submitted alone"
        };
        writeln!(
            out,
            "# modelled: from counted packets and assumed rates; {what}"
        )
        .and_then(|()| writeln!(out, "{HEAD}"))
        .map_err(wrong)?;
        log::warn!(
            "{device}: each command is submitted alone and noted in {}: this is slow",
            path.display()
        );
        Ok(Self {
            out: Mutex::new(out),
            graphs: AtomicU64::new(0),
            caps,
            threads,
            device: device.to_owned(),
        })
    }

    /// Starts a graph, and returns its number.
    pub(super) fn begin_graph(&self) -> u64 {
        self.graphs.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes a command.
    pub(super) fn step(&self, graph: u64, step: &Step, dsp: Duration, host: Duration) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let ops: Vec<&str> = step.ops.iter().flatten().map(|op| op.name()).collect();
        let [n0, n1, n2, n3] = step.ne;
        let cost = &step.cost;
        let written = writeln!(
            out,
            "{},{graph},{},{},{n0},{n1},{n2},{n3},{:.0},{},{},{:.2},{},{:.1}",
            self.device,
            step.node,
            ops.join("+"),
            cost.weight_packets + cost.other_packets,
            cost.weight_bytes + cost.other_bytes,
            cost.tile_products,
            cost.microseconds(self.caps, self.threads),
            dsp.as_micros(),
            host.as_secs_f64() * 1e6
        );
        // Programs end without closing the libraries that they opened, so each line is flushed.
        if let Err(error) = written.and_then(|()| out.flush()) {
            log::error!("{}: GGML_RUST_NPU_TRACE: {error}", self.device);
        }
    }
}
