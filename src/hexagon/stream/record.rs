//! Commands of graphs in a file, with all that is needed to execute them elsewhere:
//! `GGML_RUST_NPU_TRACE=graphs.commands`.
//!
//! A graph is one line of JSON:
//!
//! ```text
//! { "device": name, "arch": 73, "threads": 4,
//!   "buffers":  [[number, bytes], ...],                         the buffers of the commands
//!   "inputs":   [[buffer, offset, "bytes in hexadecimal"], ...] the host's data for this graph, unless zero
//!   "nodes":    [{ "op", "params", "dst", "src" }, ...],        ggml's nodes; of a tensor "type" (ggml's number of a quantized
//!                                                               type, or a name), "ne", "nb", "role", "at": [buffer, offset]
//!   "commands": [{ "node", "ops", "ne", "command": "512 bytes in hexadecimal" }, ...] }
//! ```
//!
//! Nothing is computed: graphs of large models are recorded as fast as they are planned. So only a
//! simulated device records.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hexagon_ops::wire::Command;

use super::submission::Step;
use crate::error::{Error, Result};
use crate::graph::{Operation, Role, Tensor};
use crate::hexagon::HexBuffer;
use crate::hexagon::caps::HexCaps;
use crate::hexagon::device::DeviceBuffer;
use crate::tensor::DType;

/// Extension of a file of commands.
const EXTENSION: &str = "commands";

/// A file that graphs are appended to.
#[derive(Debug)]
pub(super) struct CommandFile {
    /// `None` after an error, which was logged.
    out: Mutex<Option<File>>,
    path: PathBuf,
    head: String,
}

/// Bytes of a buffer, by its number.
type Bytes = (u32, Range<usize>);

/// The nodes of a graph.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    text: Vec<String>,
    /// Results of the nodes.
    written: Vec<Bytes>,
    /// Operands that no earlier node has written.
    inputs: Vec<Bytes>,
}

impl CommandFile {
    /// Returns `true` if the extension of a path selects commands.
    pub(super) fn is_for(path: &Path) -> bool {
        path.extension()
            .is_some_and(|it| it.eq_ignore_ascii_case(EXTENSION))
    }

    /// Opens a file for a device. Lines are appended, so that a program can truncate the file while
    /// this one runs.
    ///
    /// # Errors
    /// `TraceFile` with the system's.
    pub(super) fn open(path: &Path, device: &str, caps: &HexCaps, threads: u32) -> Result<Self> {
        let path = path.to_owned();
        let opened = File::options().append(true).create(true).open(&path);
        let out = opened.map_err(|source| Error::TraceFile {
            path: path.clone(),
            source,
        })?;
        log::warn!(
            "{device}: graphs are recorded in {} and not computed: all results are wrong",
            path.display()
        );
        Ok(Self {
            out: Mutex::new(Some(out)),
            path,
            head: format!(
                r#""device":"{device}","arch":{},"threads":{threads}"#,
                caps.arch
            ),
        })
    }

    /// Adds a graph.
    ///
    /// - `buffers`: at least those that the commands and nodes name
    pub(super) fn graph<'a>(
        &self,
        nodes: &Nodes,
        commands: impl Iterator<Item = (&'a Step, &'a Command)>,
        buffers: &[&DeviceBuffer],
    ) {
        let mut open = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(out) = open.as_mut() else { return };
        let sizes = buffers
            .iter()
            .map(|buffer| format!("[{},{}]", buffer.number(), buffer.bytes()));
        let inputs = nodes.inputs.iter().filter_map(|(number, range)| {
            let buffer = buffers.iter().find(|buffer| buffer.number() == *number)?;
            let text = buffer.read(range.clone(), |bytes| {
                bytes.iter().any(|byte| *byte != 0).then(|| hex(bytes))
            });
            Some(format!(r#"[{number},{},"{}"]"#, range.start, text?))
        });
        let commands = commands.map(|(step, command)| {
            let ops: Vec<&str> = step.ops.iter().flatten().map(|op| op.name()).collect();
            let bytes = hex(bytemuck::bytes_of(command));
            format!(
                r#"{{"node":{},"ops":"{}","ne":{:?},"command":"{bytes}"}}"#,
                step.node,
                ops.join("+"),
                step.ne
            )
        });
        let line = format!(
            "{{{},\"buffers\":[{}],\"inputs\":[{}],\"nodes\":[{}],\"commands\":[{}]}}\n",
            self.head,
            joined(sizes),
            joined(inputs),
            nodes.text.join(","),
            joined(commands)
        );
        if let Err(source) = out.write_all(line.as_bytes()) {
            *open = None;
            let path = self.path.clone();
            log::error!(
                "{}; nothing more is recorded",
                Error::TraceFile { path, source }
            );
        }
    }
}

impl Nodes {
    /// Adds a node, with the buffers of its operands.
    pub(super) fn push(
        &mut self,
        operation: &Operation,
        dst: Option<&HexBuffer>,
        src: &[Option<&HexBuffer>],
    ) {
        let operands: Vec<String> = (operation.src.iter().zip(src))
            .map(|(tensor, buffer)| {
                tensor
                    .as_ref()
                    .map_or("null".to_owned(), |tensor| described(tensor, *buffer))
            })
            .collect();
        self.text.push(format!(
            r#"{{"op":"{}","params":{:?},"dst":{},"src":[{}]}}"#,
            operation.op.name(),
            operation.params,
            described(&operation.dst, dst),
            operands.join(",")
        ));
        for (tensor, buffer) in operation.src.iter().zip(src) {
            let (Some(tensor), Some(buffer)) = (tensor, buffer) else {
                continue;
            };
            let bytes = (buffer.memory.number(), tensor.span());
            let is_known = |known: &Bytes| {
                known.0 == bytes.0 && known.1.start < bytes.1.end && bytes.1.start < known.1.end
            };
            if tensor.role != Role::Weights
                && !self.written.iter().chain(&self.inputs).any(is_known)
            {
                self.inputs.push(bytes);
            }
        }
        if let Some(buffer) = dst {
            self.written
                .push((buffer.memory.number(), operation.dst.span()));
        }
    }
}

fn joined(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(",")
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn described(tensor: &Tensor, buffer: Option<&HexBuffer>) -> String {
    let kind = match (tensor.format, tensor.dtype) {
        (Some(format), _) => format!("{format:?}"),
        (
            None,
            DType::Quantized {
                block_elems,
                block_bytes,
            },
        ) => format!("{block_bytes}/{block_elems}"),
        (None, dtype) => format!("{dtype:?}"),
    };
    let at = buffer.map_or("null".to_owned(), |buffer| {
        format!("[{},{}]", buffer.memory.number(), tensor.span().start)
    });
    format!(
        r#"{{"type":"{kind}","ne":{:?},"nb":{:?},"role":"{:?}","at":{at}}}"#,
        tensor.shape.ne, tensor.shape.nb, tensor.role
    )
}
