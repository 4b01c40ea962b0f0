//! A llama-server that is started for a run, and ended with it.

use std::collections::VecDeque;
use std::env;
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::Error;
use crate::server::agent;

/// Lines of the server's log that an error repeats.
const LAST_LINES: usize = 3;
/// Longest line of the server's log in an error.
const MAX_LINE_CHARS: usize = 200;
/// Time between two questions for the server's health.
const POLL: Duration = Duration::from_millis(50);
/// Seconds to wait for each answer about the server's health.
const HEALTH_TIMEOUT_S: u64 = 5;
/// Longest wait for the end of a process that has closed its connections.
const END: Duration = Duration::from_secs(5);

/// Servers that run, for [`kill_all`].
static RUNNING: Mutex<Vec<Arc<Mutex<Child>>>> = Mutex::new(Vec::new());

/// The command line of a server.
#[derive(Clone, Debug)]
pub struct ServerCommand {
    /// The program: a path, or a name that is looked for in PATH.
    pub program: PathBuf,
    /// The GGUF.
    pub model: PathBuf,
    /// Sequences that are computed at the same time.
    pub slots: usize,
    /// Tokens of all slots together.
    pub context: usize,
    /// Further arguments, which come last.
    pub args: Vec<String>,
}

/// A server that this process started. Dropping it ends the server.
#[derive(Debug)]
pub struct LocalServer {
    program: PathBuf,
    url: String,
    child: Arc<Mutex<Child>>,
    log: Arc<Mutex<VecDeque<String>>>,
    reader: Option<JoinHandle<()>>,
}

impl LocalServer {
    /// Starts a server on a free port of this machine, and waits until it has loaded its model.
    ///
    /// - `timeout_s`: seconds to wait
    ///
    /// # Errors
    /// [`Error::Start`] if the program cannot be started, [`Error::Ended`] if it ends, and
    /// [`Error::NotReady`] if it is not ready in time.
    pub fn start(command: &ServerCommand, timeout_s: u64) -> Result<Self, Error> {
        let program = command.program.clone();
        let failed = |reason: String| Error::Start {
            program: program.clone(),
            reason,
        };
        let path = find(&program).ok_or_else(|| failed("no such program in PATH".into()))?;
        // The port is free until the server uses it. If another program is faster, the server ends
        // with an error.
        let port = TcpListener::bind(("127.0.0.1", 0))
            .and_then(|socket| socket.local_addr())
            .map_err(|error| failed(error.to_string()))?
            .port();
        // Locked until the child is in the list, so that a signal handler finds it.
        let mut running = lock(&RUNNING);
        let mut child = Command::new(path)
            .arg("-m")
            .arg(&command.model)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["-np", &command.slots.to_string(), "-kvu"])
            .args(["-c", &command.context.to_string(), "--no-webui"])
            .args(&command.args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let reader = child.stderr.take().map(|stderr| {
            let log = Arc::clone(&log);
            thread::spawn(move || read_log(stderr, &log))
        });
        let child = Arc::new(Mutex::new(child));
        running.push(Arc::clone(&child));
        drop(running);
        let mut server = Self {
            program,
            url: format!("http://127.0.0.1:{port}"),
            child,
            log,
            reader,
        };
        server.wait_until_ready(timeout_s)?;
        Ok(server)
    }

    /// Returns the server's address.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the reason why the server ended, if it did; otherwise `error`, which a request got.
    #[must_use]
    pub fn explain(&mut self, error: Error) -> Error {
        if !matches!(error, Error::Unreachable { .. }) {
            return error;
        }
        let start = Instant::now();
        while start.elapsed() < END {
            if let Some(ended) = self.ended() {
                return ended;
            }
            thread::sleep(POLL);
        }
        error
    }

    fn wait_until_ready(&mut self, timeout_s: u64) -> Result<(), Error> {
        let start = Instant::now();
        let health = format!("{}/health", self.url);
        let agent = agent(HEALTH_TIMEOUT_S);
        loop {
            if let Some(ended) = self.ended() {
                return Err(ended);
            }
            // While the model is loaded, the status is 503.
            let answer = agent.get(&health).call();
            if answer.is_ok_and(|answer| answer.status() == 200) {
                return Ok(());
            }
            if start.elapsed() >= Duration::from_secs(timeout_s) {
                return Err(Error::NotReady {
                    program: self.program.clone(),
                    seconds: timeout_s,
                    words: self.words(),
                });
            }
            thread::sleep(POLL);
        }
    }

    /// Returns the error of a server that has ended.
    fn ended(&mut self) -> Option<Error> {
        let status = lock(&self.child).try_wait().ok()??;
        // The log ends when the process ends, unless that has started other processes.
        let start = Instant::now();
        while start.elapsed() < END && self.reader.as_ref().is_some_and(|r| !r.is_finished()) {
            thread::sleep(POLL);
        }
        Some(Error::Ended {
            program: self.program.clone(),
            status: status.to_string(),
            words: self.words(),
        })
    }

    /// Returns the last lines of the log.
    fn words(&self) -> String {
        let lines: Vec<String> = lock(&self.log).iter().cloned().collect();
        match lines.is_empty() {
            true => "it wrote nothing".into(),
            false => lines.join(" | "),
        }
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        lock(&RUNNING).retain(|child| !Arc::ptr_eq(child, &self.child));
        end(&self.child);
    }
}

/// Ends all servers that this process started. It is for a program that ends without running
/// destructors.
pub fn kill_all() {
    for child in lock(&RUNNING).drain(..) {
        end(&child);
    }
}

fn end(child: &Mutex<Child>) {
    let mut child = lock(child);
    // An error means that the process has already ended.
    let _ended = child.kill();
    let _status = child.wait();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the server's log to its end, so that the server never waits for a reader, and keeps the
/// last lines.
fn read_log(stderr: ChildStderr, log: &Mutex<VecDeque<String>>) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim();
        if !text.is_empty() {
            let mut log = lock(log);
            if log.len() == LAST_LINES {
                log.pop_front();
            }
            log.push_back(text.chars().take(MAX_LINE_CHARS).collect());
        }
        line.clear();
    }
}

/// Returns the path of a program: the given path if it names a folder, otherwise the first match in
/// PATH.
fn find(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return Some(program.into());
    }
    env::split_paths(&env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_folder_is_not_looked_for() {
        assert_eq!(
            find(Path::new("./llama-server")),
            Some("./llama-server".into())
        );
        assert!(find(Path::new("sh")).is_some_and(|path| path.ends_with("sh")));
        assert_eq!(find(Path::new("no-program-of-this-name")), None);
    }
}
