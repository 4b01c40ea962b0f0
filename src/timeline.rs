//! `GGML_RUST_NPU_TRACE=FILE.json`: a record of the devices' work over time, as trace events that
//! Perfetto and Chrome show.
//!
//! ```text
//!   HEX0          host         |graph 4 (31 operations)                         |
//!                              |RMS_NORM+MUL|MUL_MAT                   |ROPE    |
//!                 queue        |--|         |--|                       |--|
//!                 DMA             |-|          |-----------------|        |-|
//!                 vectors         |---|        |--------|                 |--|
//!                 matrix unit                  |-----------|
//! ```
//!
//! The file is complete JSON after each graph, because programs end without closing the libraries
//! that they loaded. The end of its array is overwritten by the next graph.

use std::fmt::Write as _;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::files::regular;
use crate::graph::Op;

/// End of the array.
const END: &str = "\n]\n";

/// A file of events, for all devices of the process.
#[derive(Debug)]
pub struct Timeline {
    begun: Instant,
    path: PathBuf,
    file: Mutex<TimelineFile>,
}

#[derive(Debug)]
struct TimelineFile {
    out: File,
    /// Bytes of the events, without the end of the array; 0 before the first event.
    bytes: u64,
    /// Devices with tracks.
    devices: u32,
    /// The names of the tracks, until the next events.
    names: String,
    /// An error was logged, and nothing more is written.
    failed: bool,
}

/// Files that are being written, and paths at which no file can be written.
#[derive(Debug, Default)]
struct OpenFiles {
    open: Vec<Weak<Timeline>>,
    refused: Vec<PathBuf>,
}

static OPEN: Mutex<OpenFiles> = Mutex::new(OpenFiles {
    open: Vec::new(),
    refused: Vec::new(),
});

impl Timeline {
    /// Returns `true` if the extension of a path selects a timeline.
    #[must_use]
    pub fn is_for(path: &Path) -> bool {
        path.extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
    }

    /// Opens a file, which the first event empties, or returns the one that another device of this
    /// process has opened at the path. `None` after a log line if it cannot be written.
    #[must_use]
    pub fn open(path: &Path) -> Option<Arc<Self>> {
        let mut files = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        files.open.retain(|open| open.strong_count() > 0);
        let known = files.open.iter().filter_map(Weak::upgrade);
        if let Some(open) = known.into_iter().find(|open| open.path == path) {
            return Some(open);
        }
        if files.refused.iter().any(|refused| refused == path) {
            return None;
        }
        match open_output(path) {
            Ok(out) => {
                let timeline = Arc::new(Self {
                    begun: Instant::now(),
                    path: path.to_owned(),
                    file: Mutex::new(TimelineFile {
                        out,
                        bytes: 0,
                        devices: 0,
                        names: String::new(),
                        failed: false,
                    }),
                });
                files.open.push(Arc::downgrade(&timeline));
                Some(timeline)
            }
            Err(source) => {
                files.refused.push(path.to_owned());
                report(path, source);
                None
            }
        }
    }

    /// Microseconds since the file was begun.
    fn microseconds(&self, at: Instant) -> f64 {
        micros(at.saturating_duration_since(self.begun))
    }

    fn lock(&self) -> MutexGuard<'_, TimelineFile> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds events, each a line that ends with a comma.
    fn write(&self, events: &str) {
        let mut file = self.lock();
        if file.failed || events.is_empty() {
            return;
        }
        let events = std::mem::take(&mut file.names) + events;
        let events = events.trim_end_matches(",\n");
        let before = if file.bytes == 0 { "[" } else { "," };
        let text = format!("{before}\n{events}{END}");
        let begun = if file.bytes == 0 {
            begin(&file.out)
        } else {
            Ok(())
        };
        match begun.and_then(|()| os::files::write_all_at(&file.out, text.as_bytes(), file.bytes)) {
            Ok(()) => file.bytes += (text.len() - END.len()) as u64,
            Err(source) => {
                file.failed = true;
                report(&self.path, source);
            }
        }
    }
}

/// Empties a file that is about to be written, but not one that another process is writing. A
/// process that computes nothing leaves the file to the processes that it starts, for example
/// llama-server with several models.
///
/// # Errors
/// An error of the system, or that of such a file.
pub(crate) fn begin(file: &File) -> io::Result<()> {
    // Some platforms (Android) and file systems have no locks; events are written there without
    // one.
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        return Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "another process is writing it",
        ));
    }
    file.set_len(0)
}

/// Opens a file that [`begin`] empties.
///
/// # Errors
/// An error of the system; `InvalidInput` if it is not a regular file.
pub(crate) fn open_output(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(false);
    regular(os::files::at_once(&mut options).open(path)?)
}

fn report(path: &Path, source: io::Error) {
    let path = path.to_owned();
    log::error!(
        "{}; nothing more is traced",
        Error::TraceFile { path, source }
    );
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// A row of the picture, for one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Track {
    /// The CPU's side of a submission.
    Host,
    /// Waiting between the CPU and the NPU.
    Queue,
    /// Memory traffic.
    Dma,
    /// Vector units.
    Vectors,
    /// The matrix unit.
    Matrix,
}

impl Track {
    const ALL: [Self; 5] = [
        Self::Host,
        Self::Queue,
        Self::Dma,
        Self::Vectors,
        Self::Matrix,
    ];

    fn number(self) -> u32 {
        self as u32 + 1
    }

    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Queue => "queue",
            Self::Dma => "DMA",
            Self::Vectors => "vectors",
            Self::Matrix => "matrix unit",
        }
    }
}

/// A time on a track.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// The track.
    pub track: Track,
    /// The length of the time in microseconds.
    pub us: f64,
    /// `true` if it was measured, `false` if the cost model computed it.
    pub measured: bool,
}

/// One operation that a device computed.
#[derive(Clone, Copy, Debug)]
pub struct OperationTimes<'a> {
    /// Number of its node in the graph.
    pub node: usize,
    /// The operations that were joined into one.
    pub ops: &'a [Option<Op>],
    /// Dimensions of the result.
    pub ne: [usize; 4],
    /// The beginning.
    pub begun: Instant,
    /// Measured time of the CPU's side, from the beginning to the result.
    pub host: Duration,
    /// Measured time of the NPU's side: by its own clock, or in the vendor's call that runs it.
    pub device: Duration,
    /// Modelled time on the NPU.
    pub modelled_us: f64,
    /// Times on the other tracks. All parts except the queue begin together, after the queue.
    pub parts: &'a [Part],
}

/// The tracks of one device.
#[derive(Debug)]
pub struct DeviceTracks {
    timeline: Arc<Timeline>,
    process: u32,
    device: String,
    graphs: AtomicU64,
    /// End of the last part on each track, because a modelled time may be longer than the measured
    /// time that contains it, and bars of a track must not overlap.
    ends: Mutex<[f64; Track::ALL.len()]>,
}

impl DeviceTracks {
    /// Adds the tracks of a device to a file.
    ///
    /// - `remark`: a note about the times for the viewer
    #[must_use]
    pub fn new(timeline: Arc<Timeline>, device: &str, is_simulated: bool, remark: &str) -> Self {
        let process = {
            let mut file = timeline.lock();
            file.devices += 1;
            file.devices
        };
        let kind = if is_simulated {
            "simulated"
        } else {
            "a device"
        };
        let mut events = String::new();
        // Names and remarks are texts of this crate and need no escaping.
        let _ = writeln!(
            events,
            r#"{{"ph":"M","pid":{process},"tid":0,"name":"process_name","args":{{"name":"{device} ({kind}): {remark}"}}}},"#
        );
        for track in Track::ALL {
            let (number, name) = (track.number(), track.name());
            let _ = writeln!(
                events,
                r#"{{"ph":"M","pid":{process},"tid":{number},"name":"thread_name","args":{{"name":"{name}"}}}},"#
            );
            let _ = writeln!(
                events,
                r#"{{"ph":"M","pid":{process},"tid":{number},"name":"thread_sort_index","args":{{"sort_index":{number}}}}},"#
            );
        }
        timeline.lock().names += &events;
        log::warn!(
            "{device}: each operation is submitted alone and noted in {}: this is slow",
            timeline.path.display()
        );
        Self {
            timeline,
            process,
            device: device.to_owned(),
            graphs: AtomicU64::new(0),
            ends: Mutex::default(),
        }
    }

    /// Begins a graph.
    pub fn graph(&self) -> GraphEvents<'_> {
        GraphEvents {
            tracks: self,
            number: self.graphs.fetch_add(1, Ordering::Relaxed),
            begun: Instant::now(),
            operations: 0,
            events: String::new(),
        }
    }
}

/// The events of a graph, which are written when it is dropped.
#[derive(Debug)]
pub struct GraphEvents<'a> {
    tracks: &'a DeviceTracks,
    number: u64,
    begun: Instant,
    operations: u32,
    events: String,
}

impl GraphEvents<'_> {
    /// Adds an operation.
    pub fn operation(&mut self, times: &OperationTimes) {
        self.operations += 1;
        let names: Vec<&str> = times.ops.iter().flatten().map(|op| op.name()).collect();
        let (name, shape) = (names.join("+"), times.ne.map(|n| n.to_string()).join("x"));
        let begin = self.tracks.timeline.microseconds(times.begun);
        let args = format!(
            r#""device":"{}","graph":{},"node":{},"shape":"{shape}","modelled_us":{:.3},"device_us":{:.3}"#,
            self.tracks.device,
            self.number,
            times.node,
            times.modelled_us,
            micros(times.device)
        );
        self.event(
            Track::Host,
            (begin, micros(times.host)),
            &name,
            "measured",
            &args,
        );
        let mut ends = self
            .tracks
            .ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let queue = times.parts.iter().find(|part| part.track == Track::Queue);
        let submitted = begin + queue.map_or(0.0, |part| part.us);
        for part in times.parts.iter().filter(|part| part.us > 0.0) {
            let wanted = match part.track {
                Track::Queue => begin,
                _ => submitted,
            };
            let end = &mut ends[part.track as usize];
            let from = wanted.max(*end);
            *end = from + part.us;
            let kind = if part.measured {
                "measured"
            } else {
                "modelled"
            };
            let args = format!(r#""graph":{},"shape":"{shape}""#, self.number);
            let (events, process) = (&mut self.events, self.tracks.process);
            push(
                events,
                process,
                part.track,
                (from, part.us),
                &name,
                kind,
                &args,
            );
        }
    }

    fn event(&mut self, track: Track, time: (f64, f64), name: &str, kind: &str, args: &str) {
        push(
            &mut self.events,
            self.tracks.process,
            track,
            time,
            name,
            kind,
            args,
        );
    }
}

/// Adds a bar: (beginning, length) in microseconds.
fn push(
    events: &mut String,
    process: u32,
    track: Track,
    (begin, length): (f64, f64),
    name: &str,
    kind: &str,
    args: &str,
) {
    let tid = track.number();
    let _ = writeln!(
        events,
        r#"{{"ph":"X","pid":{process},"tid":{tid},"ts":{begin:.3},"dur":{length:.3},"name":"{name}","cat":"{kind}","args":{{{args}}}}},"#
    );
}

impl Drop for GraphEvents<'_> {
    fn drop(&mut self) {
        if self.operations == 0 {
            return;
        }
        let timeline = &self.tracks.timeline;
        let begin = timeline.microseconds(self.begun);
        let length = micros(self.begun.elapsed());
        let name = format!("graph {} ({} operations)", self.number, self.operations);
        let args = format!(r#""graph":{}"#, self.number);
        self.event(Track::Host, (begin, length), &name, "measured", &args);
        timeline.write(&self.events);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("{name}-{}.json", std::process::id()))
    }

    fn times(parts: &[Part]) -> OperationTimes<'_> {
        OperationTimes {
            node: 3,
            ops: &[Some(Op::RmsNorm), Some(Op::Mul), None],
            ne: [576, 2, 1, 1],
            begun: Instant::now(),
            host: Duration::from_micros(50),
            device: Duration::from_micros(40),
            modelled_us: 12.5,
            parts,
        }
    }

    /// Opening it waited for a reader: every program hung at its start.
    #[test]
    fn a_fifo_as_trace_is_refused_at_once() {
        let fifo = path("timeline-fifo");
        test_kit::make_fifo(&fifo);
        let open = |options: &mut std::fs::OpenOptions| options.open(&fifo).unwrap();
        let reader = || open(os::files::at_once(File::options().read(true)));
        for has_reader in [false, true] {
            let _reader = has_reader.then(reader);
            let (send, receive) = std::sync::mpsc::channel();
            let name = fifo.clone();
            std::thread::spawn(move || send.send(open_output(&name).err()));
            let error = receive.recv_timeout(Duration::from_secs(60));
            let text = error.expect("it hangs").unwrap().to_string();
            // Opening a FIFO that has no reader fails with ENXIO (no such device or address).
            let words = if has_reader {
                "not a regular file"
            } else {
                "os error 6"
            };
            assert!(text.contains(words), "{text}");
        }
        std::fs::remove_file(&fifo).unwrap();
    }

    #[test]
    fn file_is_whole_after_each_graph_and_shared_by_devices() {
        let path = path("timeline-whole");
        let first = DeviceTracks::new(Timeline::open(&path).unwrap(), "HEX0", true, "one");
        let second = DeviceTracks::new(Timeline::open(&path).unwrap(), "RKNPU0", true, "two");
        for tracks in [&first, &second, &first] {
            tracks.graph().operation(&times(&[]));
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(
                text.starts_with("[\n{") && text.ends_with("}\n]\n"),
                "{text}"
            );
            assert_eq!(text.matches("\n]\n").count(), 1);
            let lines: Vec<&str> = text.lines().collect();
            let (last, events) = lines[1..lines.len() - 1].split_last().unwrap();
            assert!(events.iter().all(|line| line.ends_with("},")) && last.ends_with('}'));
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches(r#""name":"RMS_NORM+MUL""#).count(), 3);
        assert_eq!(text.matches(r#""pid":2"#).count(), 1 + 2 * 5 + 2);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn bars_of_a_track_do_not_overlap() {
        let path = path("timeline-overlap");
        let tracks = DeviceTracks::new(Timeline::open(&path).unwrap(), "HEX0", true, "");
        let part = |track, us| Part {
            track,
            us,
            measured: false,
        };
        let long = [part(Track::Queue, 10.0), part(Track::Dma, 1e6)];
        let mut graph = tracks.graph();
        graph.operation(&times(&long));
        graph.operation(&times(&long));
        drop(graph);
        let text = std::fs::read_to_string(&path).unwrap();
        let begins: Vec<f64> = (text.lines())
            .filter(|line| line.contains(r#""tid":3,"ts""#))
            .map(|line| {
                line.split(r#""ts":"#)
                    .nth(1)
                    .unwrap()
                    .split(',')
                    .next()
                    .unwrap()
            })
            .map(|number| number.parse().unwrap())
            .collect();
        assert_eq!(begins.len(), 2, "{text}");
        assert!(begins[1] >= begins[0] + 1e6, "{begins:?}");
        std::fs::remove_file(path).unwrap();
    }

    /// Regression: the events of one process were cut off, and both processes overwrote those of
    /// the other.
    #[test]
    fn a_file_that_another_process_writes_is_left_as_it_is() {
        let path = path("timeline-taken");
        std::fs::write(&path, "events").unwrap();
        let text = || std::fs::read_to_string(&path).unwrap();
        // A lock belongs to an opened file, not to a process. A timeline that records nothing does
        // not lock the file.
        let idle = Timeline::open(&path).unwrap();
        let other = File::open(&path).unwrap();
        other.try_lock().unwrap();
        idle.write("event,\n");
        assert_eq!(text(), "events");
        drop((idle, other));
        Timeline::open(&path).unwrap().write("event,\n");
        assert_eq!(text(), "[\nevent\n]\n");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn path_that_cannot_be_written_gives_no_timeline() {
        let path = path("no-such-folder").join("trace.json");
        assert!(Timeline::open(&path).is_none());
        assert!(Timeline::open(&path).is_none());
    }

    #[test]
    fn extension_asks_for_a_timeline() {
        assert!(Timeline::is_for(Path::new("a/trace.JSON")));
        assert!(!Timeline::is_for(Path::new("trace.csv")) && !Timeline::is_for(Path::new("json")));
    }
}
