//! The files of a run: inputs are opened here, and outputs are compared with them before anything
//! is written.

use std::fs::{self, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};

use ggml_rust_npu::files::{Destination, open_input};
use ggml_rust_npu::gguf::{self, File, Value};

use crate::ToolError;

/// Longest text that is read, in bytes.
const MAX_TEXT_BYTES: u64 = 16 << 20;

/// The files that a run reads and writes.
#[derive(Debug, Default)]
pub struct Files {
    inputs: Vec<(PathBuf, Metadata)>,
    outputs: Vec<(PathBuf, Destination)>,
}

impl Files {
    /// Opens a GGUF that holds a whole model.
    ///
    /// # Errors
    /// An error text with the file and its fault, or that it is a part of a split model.
    pub fn gguf(&mut self, path: &Path) -> Result<File, ToolError> {
        let file = self.gguf_or_part(path)?;
        let number = |key| file.header().get(key).and_then(Value::as_usize);
        // SOURCE: LLM_KV_SPLIT_NO and LLM_KV_SPLIT_COUNT, llama.cpp 0.5.0: parts are counted
        // from 0.
        if let Some(count @ 2..) = number("split.count") {
            let part = match number("split.no") {
                Some(index) => format!("part {}", index.saturating_add(1)),
                None => "a part".to_owned(),
            };
            let path = path.display();
            return Err(format!(
                "{path} is {part} of {count}: join the parts with llama-gguf-split --merge"
            )
            .into());
        }
        Ok(file)
    }

    /// Opens a GGUF that may be a part of a split model.
    ///
    /// # Errors
    /// Text that names the file and its mistake.
    pub fn gguf_or_part(&mut self, path: &Path) -> Result<File, ToolError> {
        let file = File::open(path).map_err(|error| named(path, &error))?;
        self.input(path)?;
        Ok(file)
    }

    /// Reads a text.
    ///
    /// # Errors
    /// Text that names the file and the error.
    pub fn text(&mut self, path: &Path) -> Result<String, ToolError> {
        let mut text = String::new();
        let read = open_input(path)
            .and_then(|file| file.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text));
        let bytes = read.map_err(|error| format!("{}: {error}", path.display()))?;
        if bytes as u64 > MAX_TEXT_BYTES {
            let path = path.display();
            return Err(format!("{path}: more than {} MiB of text", MAX_TEXT_BYTES >> 20).into());
        }
        self.input(path)?;
        Ok(text)
    }

    /// Takes note of an input that is opened elsewhere.
    ///
    /// # Errors
    /// Text that names the file, if it does not exist.
    pub fn input(&mut self, path: &Path) -> Result<(), ToolError> {
        let file = fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
        self.inputs.push((path.into(), file));
        Ok(())
    }

    /// Takes note of an output. Call it after every input is open, and before the first output is
    /// begun.
    ///
    /// # Errors
    /// Text, if a file cannot be written there, if it is one of the inputs under any name, or if
    /// another output is written there.
    pub fn output(&mut self, path: &Path) -> Result<(), ToolError> {
        let name = path.display();
        let place = Destination::of(path).map_err(|error| format!("{name}: {error}"))?;
        if let Some((input, _)) = self.inputs.iter().find(|(_, file)| place.is(file)) {
            let input = input.display();
            return Err(format!("{name} would overwrite the input {input}").into());
        }
        let mut others = self.outputs.iter();
        if let Some((other, _)) = others.find(|(_, other)| place.is_same(other)) {
            return Err(format!("{name} would overwrite the output {}", other.display()).into());
        }
        self.outputs.push((path.into(), place));
        Ok(())
    }
}

/// Returns the path of a file that is made next to a model: the model's name with `ending` instead
/// of `.gguf`, or appended to any other name, which may end in a version such as `3.1`.
pub fn next_to(model: &Path, ending: &str) -> PathBuf {
    let name = match model.extension().is_some_and(|it| it == "gguf") {
        true => model.with_extension(""),
        false => model.to_path_buf(),
    };
    let mut name = name.into_os_string();
    name.push(ending);
    name.into()
}

/// Returns an error with the path of its file.
pub fn named(path: &Path, error: &gguf::Error) -> String {
    match error {
        gguf::Error::Io { .. } => error.to_string(),
        _ => format!("{}: {error}", path.display()),
    }
}

/// Writes a whole output.
///
/// # Errors
/// Text that names the file.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), ToolError> {
    let done = ggml_rust_npu::files::write(path, bytes);
    done.map_err(|(path, error)| format!("{}: {error}", path.display()).into())
}
