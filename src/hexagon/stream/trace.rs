//! `GGML_RUST_NPU_TRACE`: each command with its modelled cost and its time, as a line of a table or
//! on a [timeline](crate::timeline); or graphs as [commands](super::record), which are not
//! computed.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::record::CommandFile;
use super::submission::Step;
use crate::error::{Error, Result};
use crate::hexagon::caps::HexCaps;
use crate::timeline::{
    DeviceTracks, GraphEvents, OperationTimes, Part, Timeline, Track, begin, open_output,
};

/// The file to which commands are written.
#[derive(Debug)]
pub struct Trace {
    form: Form,
    caps: &'static HexCaps,
    threads: u32,
}

#[derive(Debug)]
enum Form {
    Table(CommandTable),
    Timeline(DeviceTracks),
    Commands(CommandFile),
}

/// Comma-separated values.
#[derive(Debug)]
struct CommandTable {
    /// `None` after an error, which was logged.
    out: Mutex<Option<TableFile>>,
    path: PathBuf,
    graphs: AtomicU64,
    device: String,
}

#[derive(Debug)]
struct TableFile {
    out: BufWriter<File>,
    /// The first lines, until they are written.
    head: Option<String>,
}

/// A graph that is being noted.
#[derive(Debug)]
pub(super) struct GraphTrace<'a> {
    trace: &'a Trace,
    form: GraphForm<'a>,
}

#[derive(Debug)]
enum GraphForm<'a> {
    Table(&'a CommandTable, u64),
    Timeline(GraphEvents<'a>),
}

const HEAD: &str = "device,graph,node,operation,ne0,ne1,ne2,ne3,modelled_packets,modelled_bytes,modelled_tile_products,\
                    modelled_us,measured_dsp_us,measured_host_us";

impl Trace {
    /// Opens a file for a device. Its first command empties the file. `None` after a log line if
    /// the file cannot be written.
    pub fn create(
        path: &Path,
        device: &str,
        caps: &'static HexCaps,
        threads: u32,
        is_simulated: bool,
    ) -> Option<Self> {
        let form = if CommandFile::is_for(path) {
            if !is_simulated {
                log::error!(
                    "{device}: only a simulated device records commands: it does not compute them"
                );
                return None;
            }
            let file = CommandFile::open(path, device, caps, threads);
            Form::Commands(
                file.inspect_err(|error| log::error!("{error}; nothing is traced"))
                    .ok()?,
            )
        } else if Timeline::is_for(path) {
            let remark = "host and queue are measured, DMA, vectors and matrix unit are modelled";
            let file = Timeline::open(path)?;
            Form::Timeline(DeviceTracks::new(file, device, is_simulated, remark))
        } else {
            let table = CommandTable::create(path, device, is_simulated);
            let logged = |error| log::error!("{error}; nothing is traced");
            Form::Table(table.map_err(logged).ok()?)
        };
        Some(Self {
            form,
            caps,
            threads,
        })
    }

    /// Returns the file that graphs are recorded in instead of being computed.
    pub(super) fn commands(&self) -> Option<&CommandFile> {
        match &self.form {
            Form::Commands(file) => Some(file),
            Form::Table(_) | Form::Timeline(_) => None,
        }
    }

    /// Starts a graph; `None` if graphs are recorded.
    pub(super) fn graph(&self) -> Option<GraphTrace<'_>> {
        let form = match &self.form {
            Form::Commands(_) => return None,
            Form::Table(table) => {
                GraphForm::Table(table, table.graphs.fetch_add(1, Ordering::Relaxed))
            }
            Form::Timeline(tracks) => GraphForm::Timeline(tracks.graph()),
        };
        Some(GraphTrace { trace: self, form })
    }
}

impl GraphTrace<'_> {
    /// Notes a command that was submitted at `begun` and has just completed.
    ///
    /// - `dsp`: its time, measured by the DSP
    pub(super) fn step(&mut self, step: &Step, begun: Instant, dsp: Duration) {
        let host = begun.elapsed();
        let Trace { caps, threads, .. } = self.trace;
        let units = step.cost.unit_microseconds(&caps.rates, *threads);
        let modelled_us = units.into_iter().fold(0.0, f64::max);
        match &mut self.form {
            GraphForm::Table(table, graph) => table.step(*graph, step, modelled_us, dsp, host),
            GraphForm::Timeline(events) => {
                let part = |track, us, measured| Part {
                    track,
                    us,
                    measured,
                };
                let [memory, vector, matrix] = units;
                let waiting = host.saturating_sub(dsp).as_secs_f64() * 1e6;
                events.operation(&OperationTimes {
                    node: step.node,
                    ops: &step.ops,
                    ne: step.ne,
                    begun,
                    host,
                    device: dsp,
                    modelled_us,
                    parts: &[
                        part(Track::Queue, waiting, true),
                        part(Track::Dma, memory, false),
                        part(Track::Vectors, vector, false),
                        part(Track::Matrix, matrix, false),
                    ],
                });
            }
        }
    }
}

impl CommandTable {
    fn create(path: &Path, device: &str, is_simulated: bool) -> Result<Self> {
        // One file for each device: the devices are opened one by one and used at the same time.
        let path = path.with_extension(match path.extension() {
            Some(extension) => format!("{device}.{}", extension.to_string_lossy()),
            None => device.to_owned(),
        });
        let wrong = |source| Error::TraceFile {
            path: path.clone(),
            source,
        };
        let out = open_output(&path).map_err(wrong)?;
        let what = if is_simulated {
            "measured: of a stand-in on this computer"
        } else {
            "measured: of the device, each command submitted alone"
        };
        let head = format!("# modelled: from counted packets and assumed rates; {what}\n{HEAD}\n");
        log::warn!(
            "{device}: each command is submitted alone and noted in {}: this is slow",
            path.display()
        );
        Ok(Self {
            out: Mutex::new(Some(TableFile {
                out: BufWriter::new(out),
                head: Some(head),
            })),
            path,
            graphs: AtomicU64::new(0),
            device: device.to_owned(),
        })
    }

    fn step(&self, graph: u64, step: &Step, modelled_us: f64, dsp: Duration, host: Duration) {
        let mut open = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(TableFile { out, head }) = open.as_mut() else {
            return;
        };
        let begun = match head.take() {
            Some(head) => begin(out.get_ref()).and_then(|()| out.write_all(head.as_bytes())),
            None => Ok(()),
        };
        let ops: Vec<&str> = step.ops.iter().flatten().map(|op| op.name()).collect();
        let [n0, n1, n2, n3] = step.ne;
        let cost = &step.cost;
        let line = format!(
            "{},{graph},{},{},{n0},{n1},{n2},{n3},{:.0},{},{},{modelled_us:.2},{},{:.1}\n",
            self.device,
            step.node,
            ops.join("+"),
            cost.weight_packets + cost.other_packets,
            cost.weight_bytes + cost.other_bytes,
            cost.tile_products,
            dsp.as_micros(),
            host.as_secs_f64() * 1e6
        );
        // Programs exit without closing their libraries, so each line is flushed at once.
        let written = begun.and_then(|()| out.write_all(line.as_bytes()));
        if let Err(source) = written.and_then(|()| out.flush()) {
            *open = None;
            let path = self.path.clone();
            log::error!(
                "{}; nothing more is traced",
                Error::TraceFile { path, source }
            );
        }
    }
}
