//! The file of finished problems: one line of JSON for each, after a line of settings.
//!
//! A line is complete or absent: if a killed run left an incomplete line, the next run removes it.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Error;
use crate::problem::Problem;

/// A solution in the journal.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The whole text.
    pub text: String,
    /// The answer in it.
    pub answer: Option<String>,
    /// `true` if the answer is the right one.
    pub correct: bool,
    /// Number of tokens.
    pub tokens: usize,
    /// Mean logarithm of the tokens' probabilities.
    pub logprob: f64,
    /// Scores of the steps; empty without a scorer, or if no probabilities are known.
    #[serde(default)]
    pub scores: Vec<f64>,
    /// `true` if the solution was cut at the largest allowed number of tokens.
    #[serde(default)]
    pub cut: bool,
}

/// A finished problem.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Solved {
    /// The problem's name.
    pub id: String,
    /// The hash of its question; older versions did not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub question_hash: Option<String>,
    /// The right answer.
    pub expected: String,
    /// The answer that the method chose.
    pub chosen: Option<String>,
    /// `true` if it is the right one.
    pub correct: bool,
    /// Tokens that were sampled.
    pub tokens: usize,
    /// Energy since the previous problem was finished, if it was measured. With several problems at
    /// a time, only the mean over all of them is meaningful.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules: Option<f64>,
    /// The solutions, in the order in which they were found.
    pub solutions: Vec<Record>,
}

/// The settings of a run. Entries of different settings are not mixed.
pub type RunSettings = Map<String, Value>;

/// The first line.
#[derive(Serialize, Deserialize)]
struct RunHeader {
    settings: RunSettings,
}

/// Most tokens of a solution: more than any model's context has.
pub const MAX_TOKENS: usize = 1 << 24;

/// The first bytes of every journal. A file that begins with others is another program's.
const MARK: &[u8] = b"{\"settings\":";

/// A journal that is being written.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    is_locked: bool,
    /// The file ends with an incomplete line, which could not be removed.
    is_cut: bool,
}

impl Journal {
    /// Begins a journal, or continues an existing one. A file that is refused is left unchanged.
    ///
    /// - `problems`: those of the run; entries of the journal may be of others
    /// - returns the journal and the names of the problems in it
    ///
    /// # Errors
    /// [`Error::OtherRun`] if it has other settings, [`Error::OtherAnswer`] and
    /// [`Error::OtherQuestion`] if an entry has the name of a problem and is of another one,
    /// [`Error::Line`] if the file is not a journal, [`Error::Settings`] if another process writes
    /// it, and those of files.
    pub fn open(
        path: &Path,
        settings: &RunSettings,
        problems: &[Problem],
    ) -> Result<(Self, HashSet<String>), Error> {
        let io = Error::io(path);
        let options = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .clone();
        let mut file = options.open(path).map_err(&io)?;
        if !file.metadata().map_err(&io)?.is_file() {
            return Err(io(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            )));
        }
        let is_locked = check_lock(path, file.try_lock())?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(&io)?;
        let whole = bytes
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        let header = RunHeader {
            settings: settings.clone(),
        };
        let is_ours = match whole {
            // A killed run may have left an incomplete first line.
            0 => {
                bytes.is_empty()
                    || bytes.starts_with(MARK) && line_of(&header, path)?.starts_with(&bytes)
            }
            _ => bytes.starts_with(MARK),
        };
        if !is_ours {
            return Err(Error::Line {
                path: path.into(),
                line: 1,
                reason: "not of this tool: it is left as it is".into(),
            });
        }
        let entries = match whole {
            0 => Vec::new(),
            _ => {
                let (was, entries) = parse(path, &bytes[..whole])?;
                check_settings(path, &was, settings)?;
                check_problems(path, &entries, problems)?;
                entries
            }
        };
        // All checks passed; only now is the file changed.
        if whole < bytes.len() {
            file.set_len(whole as u64).map_err(&io)?;
            file.seek(io::SeekFrom::End(0)).map_err(&io)?;
        }
        let mut journal = Self {
            path: path.into(),
            file,
            is_locked,
            is_cut: false,
        };
        if whole == 0 {
            journal.line(&header)?;
        }
        let names = entries.into_iter().map(|entry| entry.id).collect();
        Ok((journal, names))
    }

    /// Returns `true` if no other process can open the journal. Some platforms and file systems
    /// have no locks.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }

    /// Appends a finished problem. It is on the disk when this returns.
    ///
    /// # Errors
    /// An error of the system.
    pub fn append(&mut self, entry: &Solved) -> Result<(), Error> {
        self.line(entry)
    }

    fn line(&mut self, line: &impl Serialize) -> Result<(), Error> {
        let bytes = line_of(line, &self.path)?;
        let io = Error::io(&self.path);
        if self.is_cut {
            return Err(io(io::Error::other("its last line is not whole")));
        }
        let whole = self.file.metadata().map_err(&io)?.len();
        if let Err(error) = self.file.write_all(&bytes) {
            // Cut off the incomplete line, because a problem that another thread is solving may
            // find room later.
            self.is_cut = self.file.set_len(whole).is_err();
            return Err(io(error));
        }
        self.file.sync_data().map_err(&io)
    }
}

/// Returns `true` if a journal is locked, and an error if another process holds its lock.
///
/// A platform (Android) or a file system without locks gives no error: the run continues without
/// one.
// SOURCE: rust-lang/rust#148325, `File::try_lock` on Android; flock(2), ENOLCK and NFS.
fn check_lock(path: &Path, lock: Result<(), TryLockError>) -> Result<bool, Error> {
    match lock {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Err(Error::Settings(format!(
            "{} is written by another run",
            path.display()
        ))),
        Err(TryLockError::Error(error)) if os::files::has_no_locks(&error) => Ok(false),
        Err(TryLockError::Error(error)) => Err(Error::io(path)(error)),
    }
}

/// Formats a line of the journal at `path`, with its end.
fn line_of(line: &impl Serialize, path: &Path) -> Result<Vec<u8>, Error> {
    let mut bytes = serde_json::to_vec(line).map_err(|error| Error::io(path)(error.into()))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Settings that a run knows only for a server that it started; older versions did not write them.
const UNKNOWN_MAY_BE: [&str; 2] = ["model_hash", "server_args"];

/// Returns an error if the settings of a journal are not those of the run.
fn check_settings(path: &Path, was: &RunSettings, now: &RunSettings) -> Result<(), Error> {
    let keys: HashSet<&String> = was.keys().chain(now.keys()).collect();
    let mut keys: Vec<&String> = keys.into_iter().collect();
    keys.sort();
    for key in keys {
        let (was, now) = (was.get(key), now.get(key));
        if UNKNOWN_MAY_BE.contains(&key.as_str()) && (was.is_none() || now.is_none()) {
            continue;
        }
        let words = |value: Option<&Value>| value.map_or("nothing".into(), Value::to_string);
        if was != now {
            return Err(Error::OtherRun {
                path: path.into(),
                key: key.clone(),
                was: words(was),
                now: words(now),
            });
        }
    }
    Ok(())
}

/// Returns an error if an entry of a journal has the name of a problem but belongs to another one.
fn check_problems(path: &Path, entries: &[Solved], problems: &[Problem]) -> Result<(), Error> {
    let known: HashMap<&str, &Problem> = (problems.iter())
        .map(|problem| (problem.id.as_str(), problem))
        .collect();
    for entry in entries {
        let Some(problem) = known.get(entry.id.as_str()) else {
            continue;
        };
        if entry.expected != problem.answer {
            return Err(Error::OtherAnswer {
                path: path.into(),
                id: entry.id.clone(),
                was: entry.expected.clone(),
                now: problem.answer.clone(),
            });
        }
        let hash = entry.question_hash.as_ref();
        if hash.is_some_and(|hash| *hash != problem.question_hash()) {
            return Err(Error::OtherQuestion {
                path: path.into(),
                id: entry.id.clone(),
            });
        }
    }
    Ok(())
}

/// Reads a journal.
///
/// - `path`: the name in errors
/// - `bytes`: the file; a last line without its end is left out
///
/// # Errors
/// [`Error::Line`] for a line that is not a journal's, and for a problem that occurs twice.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<(RunSettings, Vec<Solved>), Error> {
    let failed = |line: usize, reason: String| Error::Line {
        path: path.into(),
        line,
        reason,
    };
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    let mut lines = bytes[..whole].split(|byte| *byte == b'\n').enumerate();
    let head: RunHeader = match lines.next() {
        Some((_, line)) => {
            serde_json::from_slice(line).map_err(|error| failed(1, error.to_string()))?
        }
        None => return Err(failed(1, "no settings".into())),
    };
    let n = head.settings.get("n").and_then(Value::as_u64);
    if let Some(n) = n.filter(|n| *n > u64::from(u16::MAX)) {
        return Err(failed(1, format!("n is {n}, at most {}", u16::MAX)));
    }
    let mut names = HashSet::new();
    let mut entries = Vec::new();
    for (index, line) in lines {
        let entry: Solved =
            serde_json::from_slice(line).map_err(|error| failed(index + 1, error.to_string()))?;
        if entry.tokens > MAX_TOKENS.saturating_mul(u16::MAX.into()) {
            return Err(failed(index + 1, format!("{} tokens", entry.tokens)));
        }
        if let Some(solution) = (entry.solutions.iter()).find(|it| it.tokens > MAX_TOKENS) {
            let reason = format!(
                "{} tokens of a solution, at most {MAX_TOKENS}",
                solution.tokens
            );
            return Err(failed(index + 1, reason));
        }
        if !names.insert(entry.id.clone()) {
            return Err(failed(
                index + 1,
                format!("problem {} for the second time", entry.id),
            ));
        }
        entries.push(entry);
    }
    Ok((head.settings, entries))
}

#[cfg(test)]
mod tests;
