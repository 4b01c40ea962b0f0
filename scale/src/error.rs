//! Everything that can end a run.

use std::io;
use std::path::{Path, PathBuf};

/// The reason for the end of a run. Problems that were finished before are in the journal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server refuses connections, or ended a connection.
    #[error("no answer from the server at {url}: {reason}")]
    Unreachable {
        /// Address of the request.
        url: String,
        /// The system's message.
        reason: String,
    },
    /// A server could not be started.
    #[error("{} cannot be started: {reason}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's message.
        reason: String,
    },
    /// The server that was started has ended without a request to do so.
    #[error("{} ended with {status}: {words}", program.display())]
    Ended {
        /// The program.
        program: PathBuf,
        /// The program's exit code, or the signal.
        status: String,
        /// The last lines of the program's log.
        words: String,
    },
    /// The server that was started is not ready in time.
    #[error("{} was not ready after {seconds} s: {words}", program.display())]
    NotReady {
        /// The program.
        program: PathBuf,
        /// Seconds that were waited.
        seconds: u64,
        /// The last lines of the program's log.
        words: String,
    },
    /// The server did not answer in time.
    #[error("no answer from the server at {url} in {seconds} s")]
    Timeout {
        /// Address of the request.
        url: String,
        /// Seconds that were waited.
        seconds: u64,
    },
    /// The server answered with an error.
    #[error("the server at {url} answers with status {status}: {message}")]
    Status {
        /// Address of the request.
        url: String,
        /// HTTP status.
        status: u16,
        /// The server's message.
        message: String,
    },
    /// The server's answer does not have the form of llama-server's.
    #[error("the answer of {url} is not llama-server's: {reason}")]
    Garbage {
        /// Address of the request.
        url: String,
        /// The mistake.
        reason: String,
    },
    /// A file.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's message.
        error: io::Error,
    },
    /// A line of a file.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// The mistake.
        reason: String,
    },
    /// A journal of another run.
    #[error("{} was begun with {key} {was}, not {now}: choose another output", path.display())]
    OtherRun {
        /// The journal.
        path: PathBuf,
        /// The first setting that differs.
        key: String,
        /// The setting's value in the journal.
        was: String,
        /// The setting's value now.
        now: String,
    },
    /// A journal with an entry of another problem, which has another answer.
    #[error("{} has another problem {id}, with the answer {was}, not {now}: choose another output", path.display())]
    OtherAnswer {
        /// The journal.
        path: PathBuf,
        /// The name of both problems.
        id: String,
        /// The right answer in the journal.
        was: String,
        /// The right answer now.
        now: String,
    },
    /// A journal with an entry of another problem, which has the same answer.
    #[error("{} has another problem {id}, with another question: choose another output", path.display())]
    OtherQuestion {
        /// The journal.
        path: PathBuf,
        /// The name of both problems.
        id: String,
    },
    /// Settings that exclude each other, or that the server does not support.
    #[error("{0}")]
    Settings(String),
    /// A verifier that failed, or that printed no number.
    #[error("the verifier {command}: {reason}")]
    Verifier {
        /// The command line of the verifier.
        command: String,
        /// The mistake.
        reason: String,
    },
}

impl Error {
    /// Returns a function that names the file of a system's error.
    pub fn io(path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| Self::Io {
            path: path.into(),
            error,
        }
    }
}
