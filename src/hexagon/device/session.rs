//! One session with a DSP: submissions through the ring, the thread that keeps the DSP serving it,
//! and the mappings.
//!
//! ```text
//! submit() -- ring: commands --> DSP's serve loop
//!    |  ^---- ring: completion --'     ^
//!    '--- bell, if it is parked --> serving thread: stays inside the FastRPC call while there is work
//! ```
//!
//! One lock covers a submission from its first command to its completion, so several backends on
//! several threads alternate. The session is lost after silence for longer than the time-out, an
//! invalid value in the ring, or an error of the serving call: it refuses further work, and the
//! rest of the process continues. A command that fails because of its operands' values, or for lack
//! of room, fails its submission only.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hexagon_ops::serve;
use hexagon_ops::wire::{self, Command, Completion, Info, Nop};

use super::SessionOptions;
use super::address::{AddressSpace, Change, Number};
use super::batch::{Batch, BatchEntry};
use super::serving::{Bell, IDLE, Patience, Serving, serve_on_thread};
use crate::error::{Error, Result};
use crate::hexagon::driver::ring::{Ring, RingError};
use crate::hexagon::driver::{Connection, Quiet, RingMemory, Served, SharedMemory};

/// Slots of the ring: a graph split of a large model has fewer commands, and longer graphs are
/// submitted in several parts.
const SLOTS: u32 = 1024;
/// Calls that end before memory which the system refuses to map is given up.
const MOST_WAITS: u32 = 3;
/// Longest time in which a serving call whose DSP left the ring may return with the reason.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A submission that failed: which command, if one can be named, and why.
#[derive(Debug)]
pub struct Failed {
    /// Index of the command in its batch.
    pub entry: Option<usize>,
    /// The reason.
    pub error: Error,
}

/// State that a submission uses exclusively.
#[derive(Debug)]
struct Inner {
    ring: Ring<RingMemory>,
    quiet: Quiet,
    space: AddressSpace,
    /// The memory of each number of `space`.
    memories: Vec<Option<Arc<SharedMemory>>>,
    /// Scratch of [`Session::submit`].
    changes: Vec<Change>,
    numbers: Vec<Number>,
}

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    device: Arc<str>,
    info: Info,
    bell: Arc<Bell>,
    server: Option<JoinHandle<()>>,
    inner: Mutex<Inner>,
    timeout: Duration,
    serving: Serving,
    /// Reason why the session is out of use.
    lost: OnceLock<String>,
    /// Dropped last: closing its handle ends the process on the DSP, where the ring in `inner` has
    /// to be unmapped before. Closing does not touch the ring.
    connection: Arc<Connection>,
}

impl Session {
    /// Starts the DSP's library on a new ring.
    ///
    /// # Errors
    /// `OutOfMemory` for the ring; `Vendor` if a call fails.
    pub(super) fn open(
        device: &Arc<str>,
        connection: Connection,
        quiet: Quiet,
        options: &SessionOptions,
    ) -> Result<Self> {
        let Some(layout) = wire::RingLayout::new(SLOTS) else {
            unreachable!("SLOTS is a power of two");
        };
        let memory = RingMemory::new(&connection, layout.bytes())?;
        let Some(ring) = Ring::new(memory, SLOTS) else {
            unreachable!("the memory was made for this ring");
        };
        let threads = options.threads.unwrap_or(0);
        let info = connection.start(ring.memory(), threads, options.power, options.matrix)?;
        let connection = Arc::new(connection);
        let bell = Arc::new(Bell::default());
        let server = match options.serving {
            Serving::Thread => Some(serve_on_thread(device, &connection, &bell)?),
            Serving::Caller => None,
        };
        Ok(Self {
            device: Arc::clone(device),
            info,
            bell,
            server,
            inner: Mutex::new(Inner {
                ring,
                quiet,
                space: AddressSpace::new(options.address_bytes),
                memories: Vec::new(),
                changes: Vec::new(),
                numbers: Vec::new(),
            }),
            timeout: options.timeout,
            serving: options.serving,
            lost: OnceLock::new(),
            connection,
        })
    }

    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Returns the report of the DSP's library about itself.
    pub(super) fn info(&self) -> &Info {
        &self.info
    }

    /// Returns `true` if an error put the session out of use.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic during a submission loses the session.
        self.inner.lock().unwrap_or_else(|poisoned| {
            let _ = self.lose(Error::Dsp {
                reason: "internal error".into(),
            });
            PoisonError::into_inner(poisoned)
        })
    }

    /// Runs `access` while the DSP is idle: the only time at which the CPU touches shared memory.
    pub(super) fn quietly<T>(&self, access: impl FnOnce(&mut Quiet) -> T) -> T {
        access(&mut self.lock().quiet)
    }

    /// Gives shared memory a number, and announces it.
    ///
    /// # Errors
    /// `OutOfMemory` if the DSP cannot map so much, or no number is free; `NotMapped` if it cannot
    /// be announced.
    pub(super) fn add(&self, memory: &Arc<SharedMemory>) -> Result<Number> {
        let mut inner = self.lock();
        let number = inner.space.add(memory.fd(), memory.mapped_bytes())?;
        let index = number as usize;
        if inner.memories.len() <= index {
            inner.memories.resize(index + 1, None);
        }
        inner.memories[index] = Some(Arc::clone(memory));
        let announced = self.announce(&mut inner, number, &[number]);
        if announced.is_err() {
            inner.remove_memory(number);
        }
        announced.map(|()| number)
    }

    /// Announces the memory of a number. When the system refuses it, the window is most likely
    /// full: other memory than that of `numbers` is removed from it, longest unused first, and the
    /// memory is announced again.
    ///
    /// If nothing is left to remove, the room of removed memory may become free only when a call
    /// ends, so a call is made.
    ///
    /// SOURCE: qualcomm/fastrpc src/fastrpc_mem.c: whatever the kernel answers, `fastrpc_mmap`
    /// returns AEE_EFAILED; issue 137: removed mappings occupied room for longer.
    fn announce(&self, inner: &mut Inner, number: Number, numbers: &[Number]) -> Result<()> {
        let Some(memory) = inner.memories.get(number as usize).cloned().flatten() else {
            return Ok(());
        };
        let mut waits = MOST_WAITS;
        loop {
            let refused = match memory.announce() {
                Ok(()) => {
                    inner.space.mark_announced(number, memory.fd());
                    return Ok(());
                }
                Err(refused) => refused,
            };
            if self.is_lost() {
                return Err(refused);
            }
            let mut changes = Vec::new();
            let bytes = memory.mapped_bytes() as u64;
            let leaving = inner.space.retract(bytes, numbers, &mut changes);
            if leaving.is_empty() {
                if waits == 0 {
                    return Err(Error::NotMapped {
                        reason: refused.to_string(),
                    });
                }
                waits -= 1;
                self.end_a_call();
                continue;
            }
            log::debug!("{}: {refused}; making room", self.device);
            self.unmap(&mut inner.ring, &changes)?;
            for number in leaving {
                if let Some(Some(memory)) = inner.memories.get(number as usize) {
                    memory.retract();
                }
            }
        }
    }

    /// Starts a serving call and ends it, or ends the one that runs.
    fn end_a_call(&self) {
        match self.serving {
            Serving::Thread => {
                self.bell.ring();
                std::thread::sleep(2 * IDLE);
            }
            Serving::Caller => {
                // The result does not matter: the announcement is retried anyway.
                let _ = self.connection.serve(Duration::ZERO);
            }
        }
    }

    /// Takes a number back; the DSP does not see the memory afterwards.
    pub(super) fn remove(&self, number: Number) {
        let mut inner = self.lock();
        if !inner.remove_memory(number) || self.is_lost() {
            return;
        }
        if let Err(error) = self.unmap(&mut inner.ring, &[Change::Unmap { number }]) {
            log::error!("{}: cannot unmap shared memory: {error}", self.device);
        }
    }

    /// Has the DSP unmap buffers.
    fn unmap(&self, ring: &mut Ring<RingMemory>, changes: &[Change]) -> Result<()> {
        let sequence = ring.next_sequence();
        for (index, change) in changes.iter().enumerate() {
            let mut command = change.command(sequence);
            if index + 1 == changes.len() {
                command.flags = wire::FENCE;
            }
            self.push(ring, &command)?;
        }
        if !changes.is_empty() {
            self.complete(ring, changes.len())?;
        }
        Ok(())
    }

    /// Lets the DSP execute `batch`, and waits for its end. Returns the time by the DSP's own
    /// clock.
    ///
    /// If the commands' buffers do not fit into the address space together, there are several
    /// submissions. Commands that are refused for lack of room are submitted in halves: a
    /// submission maps its buffers before its first command is executed.
    ///
    /// # Errors
    /// `DeviceLost` after an earlier error; `OutOfMemory` if one command's buffers do not fit,
    /// `NotMapped` if they are refused; otherwise the DSP's error, or a time-out.
    pub(super) fn submit(&self, batch: &Batch) -> std::result::Result<Duration, Failed> {
        let mut inner = self.lock();
        let entries = &batch.entries[..];
        let mut most = entries.len();
        if inner.space.bytes(&batch.numbers) <= inner.space.budget_bytes() {
            inner.numbers.clone_from(&batch.numbers);
            match self.submit_part(&mut inner, entries, batch.list) {
                Err(failed) if failed.is_for_room() && most > 1 => most /= 2,
                result => return result,
            }
        }
        let mut first = 0;
        let mut time = Duration::ZERO;
        while first < entries.len() {
            let end = entries.len().min(first + most);
            let count = inner.fitting(&entries[first..end]);
            let part = &entries[first..first + count];
            match self.submit_part(&mut inner, part, None) {
                Ok(took) => {
                    time += took;
                    first += count;
                }
                Err(failed) if failed.is_for_room() && count > 1 => most = count / 2,
                Err(failed) => {
                    return Err(Failed {
                        entry: failed.entry.map(|entry| first + entry),
                        ..failed
                    });
                }
            }
        }
        Ok(time)
    }

    /// Submits entries whose buffers, `inner.numbers`, fit into the address space together.
    ///
    /// A mapping that the DSP refuses although it should fit is requested a second time after
    /// everything that the entries do not name has been unmapped: the address space may be fuller,
    /// or more fragmented, than assumed.
    fn submit_part(
        &self,
        inner: &mut Inner,
        entries: &[BatchEntry],
        list: Option<Number>,
    ) -> std::result::Result<Duration, Failed> {
        match self.submit_once(inner, entries, list, false) {
            Err(failed) if failed.is_for_room() => {
                log::debug!("{}: {}; making room", self.device, failed.error);
                // The system may have unmapped buffers from the DSP.
                for index in 0..inner.numbers.len() {
                    inner.retract_unmapped(inner.numbers[index]);
                }
                self.submit_once(inner, entries, list, true)
            }
            result => result,
        }
    }

    /// Announces the memory of `inner.numbers` that had been removed from the window.
    fn announce_all(&self, inner: &mut Inner) -> Result<()> {
        let numbers = std::mem::take(&mut inner.numbers);
        let announced = numbers.iter().try_for_each(|number| {
            if inner.space.is_announced(*number) {
                return Ok(());
            }
            self.announce(inner, *number, &numbers)
        });
        inner.numbers = numbers;
        announced
    }

    /// - `alone`: `true` to unmap everything else first
    fn submit_once(
        &self,
        inner: &mut Inner,
        entries: &[BatchEntry],
        list: Option<Number>,
        alone: bool,
    ) -> std::result::Result<Duration, Failed> {
        let whole = |error| Failed { entry: None, error };
        if let Some(error) = self.earlier_error() {
            return Err(whole(error));
        }
        self.announce_all(inner).map_err(|error| Failed {
            entry: (entries.len() == 1).then_some(0),
            error,
        })?;
        let Inner {
            ring,
            space,
            changes,
            numbers,
            ..
        } = inner;
        let sequence = ring.next_sequence();
        changes.clear();
        if alone {
            space.evict_others(numbers, changes);
        }
        (space.admit(numbers, sequence, changes)).map_err(|error| Failed {
            entry: (entries.len() == 1).then_some(0),
            error,
        })?;
        let commands = changes.len() + entries.len() + 1;
        let mut push = |command: Command| self.push(ring, &command).map_err(whole);
        for change in changes.iter() {
            push(change.command(sequence))?;
        }
        match (list, u32::try_from(entries.len())) {
            (Some(buffer), Ok(count)) => {
                let list = wire::List {
                    buffer,
                    count,
                    offset: 0,
                };
                push(Command::new(sequence, &list))?;
            }
            _ => {
                for entry in entries {
                    let mut command = entry.command;
                    command.sequence = sequence;
                    push(command)?;
                }
            }
        }
        let mut fence = Command::new(sequence, &Nop { reserved: 0 });
        fence.flags = wire::FENCE;
        push(fence)?;
        let completion = self.complete(ring, commands).map_err(whole)?;
        let is_done = completion.status == wire::STATUS_OK;
        let failed = if is_done {
            changes.len()
        } else {
            completion.command as usize
        };
        let unmapped = changes
            .iter()
            .take(failed)
            .filter_map(|change| match change {
                Change::Unmap { number } => Some(*number),
                Change::Map { .. } => None,
            });
        let unmapped: Vec<Number> = unmapped.collect();
        let mappings = changes.len();
        for change in changes.iter().skip(failed) {
            space.undo(*change);
        }
        for number in unmapped {
            inner.retract_unmapped(number);
        }
        if is_done {
            return Ok(Duration::from_micros(completion.microseconds));
        }
        let error = match completion.status {
            wire::STATUS_MAP_FAILED => Error::NotMapped {
                reason: serve::describe(completion.status, completion.detail).to_string(),
            },
            status => Error::Command(serve::Failure {
                status,
                detail: completion.detail,
            }),
        };
        Err(Failed {
            entry: failed.checked_sub(mappings),
            error: if serve::is_passing(completion.status, completion.detail) {
                error
            } else {
                self.lose(error)
            },
        })
    }

    /// Writes a command, waiting for a free slot if the ring is full.
    fn push(&self, ring: &mut Ring<RingMemory>, command: &Command) -> Result<()> {
        let mut patience = Patience::new(self.timeout);
        loop {
            if ring
                .push(command)
                .map_err(|corrupt| self.corrupt(corrupt))?
            {
                return Ok(());
            }
            self.show(ring);
            self.wait(ring, &mut patience)?;
        }
    }

    /// Publishes the written commands, and calls the DSP if it does not poll.
    fn show(&self, ring: &mut Ring<RingMemory>) {
        ring.publish();
        if self.serving == Serving::Thread && ring.is_parked() {
            self.bell.ring();
        }
    }

    /// Waits for the completion of the oldest fence.
    fn complete(&self, ring: &mut Ring<RingMemory>, commands: usize) -> Result<Completion> {
        let mut patience = Patience::new(self.timeout);
        self.show(ring);
        loop {
            let collected = ring.collect().map_err(|corrupt| self.corrupt(corrupt))?;
            if let Some(completion) = collected {
                return plausible(completion, commands).map_err(|error| self.lose(error));
            }
            self.wait(ring, &mut patience)?;
        }
    }

    /// A pause between two looks at the ring.
    fn wait(&self, ring: &mut Ring<RingMemory>, patience: &mut Patience) -> Result<()> {
        if self.bell.failed.load(Ordering::Acquire) {
            return Err(self.lose(self.ended("the serving call has ended", Duration::ZERO)));
        }
        if ring.is_closed() {
            return Err(self.lose(self.ended("it gave the ring up", LAST_WORDS)));
        }
        let waiting = ring.waiting().map_err(|corrupt| self.corrupt(corrupt))?;
        if self.serving == Serving::Caller {
            match self.connection.serve(Duration::ZERO) {
                Ok(Served::Parked) => return Ok(()),
                Ok(Served::Later) => self.bell.waits_for_vtcm.store(true, Ordering::Relaxed),
                Err(interruption) => return Err(self.lose(interruption.error)),
            }
        } else if patience.is_long() && ring.is_parked() {
            // The DSP may have parked after an interrupted call, when no thread was waiting for it.
            self.bell.ring();
        }
        if patience.pause(waiting, ring.progress()) {
            return Ok(());
        }
        let seconds = self.timeout.as_secs_f64();
        Err(
            // The DSP reports that it serves as soon as it gets VTCM, so a parked ring means that
            // it still waits for VTCM.
            self.lose(
                if self.bell.waits_for_vtcm.load(Ordering::Relaxed) && ring.is_parked() {
                    Error::Dsp {
                        reason: format!("another program has held VTCM for {seconds} s"),
                    }
                } else {
                    Error::Timeout { seconds }
                },
            ),
        )
    }

    /// Returns the serving call's reason for its end, or else the error that was seen on this side.
    fn ended(&self, seen: &str, patience: Duration) -> Error {
        let unexplained = || Error::Dsp {
            reason: seen.into(),
        };
        self.bell.failure(patience).unwrap_or_else(unexplained)
    }

    /// Puts the session out of use; the first cause stays.
    fn lose(&self, cause: Error) -> Error {
        let _ = self.lost.set(cause.to_string());
        cause
    }

    fn earlier_error(&self) -> Option<Error> {
        self.lost.get().map(|cause| Error::DeviceLost {
            device: self.device.to_string(),
            cause: cause.clone(),
        })
    }

    fn corrupt(&self, corrupt: RingError) -> Error {
        self.lose(Error::Dsp {
            reason: corrupt.to_string(),
        })
    }
}

/// Refuses a completion that blames a command that was never sent.
fn plausible(completion: Completion, commands: usize) -> Result<Completion> {
    if (completion.command as usize) < commands {
        return Ok(completion);
    }
    Err(Error::Dsp {
        reason: format!("it blames command {} of {commands}", completion.command),
    })
}

impl Drop for Session {
    fn drop(&mut self) {
        self.lock().ring.close();
        self.bell.stop();
        let Some(server) = self.server.take() else {
            return;
        };
        // If the DSP hangs, its thread never returns from the call, and is abandoned.
        let deadline = Instant::now() + 50 * IDLE;
        while !server.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
        if server.is_finished() {
            // The panic hook has already reported a panic of that thread.
            let _ = server.join();
        } else {
            log::warn!("{}: the DSP does not return from its call", self.device);
        }
    }
}

impl Failed {
    /// Returns `true` if a buffer had no address, so that no command was executed.
    fn is_for_room(&self) -> bool {
        matches!(self.error, Error::NotMapped { .. })
    }
}

impl Inner {
    /// Retracts the announcement of memory that the DSP has unmapped. The system may drop its
    /// mapping when the call ends, and the mapping would be missing the next time.
    fn retract_unmapped(&mut self, number: Number) {
        if let Some(Some(memory)) = self.memories.get(number as usize)
            && self.space.mark_retracted(number)
        {
            memory.retract();
        }
    }

    /// Removes the memory of a number; `true` if the DSP has its memory mapped.
    fn remove_memory(&mut self, number: Number) -> bool {
        if let Some(memory) = self.memories.get_mut(number as usize) {
            *memory = None;
        }
        self.space.remove(number)
    }

    /// Returns how many of the first `entries` fit into the address space together, at least one;
    /// their buffers are in `numbers`.
    fn fitting(&mut self, entries: &[BatchEntry]) -> usize {
        self.numbers.clear();
        let mut bytes = 0;
        for (count, entry) in entries.iter().enumerate() {
            let known = self.numbers.len();
            for number in entry.buffers {
                if !self.numbers.contains(&number) {
                    self.numbers.push(number);
                    bytes += self.space.bytes(&[number]);
                }
            }
            if count > 0 && bytes > self.space.budget_bytes() {
                self.numbers.truncate(known);
                return count;
            }
        }
        entries.len()
    }
}

impl Change {
    fn command(self, sequence: u64) -> Command {
        match self {
            Self::Map { number, fd, bytes } => Command::new(
                sequence,
                &wire::Map {
                    buffer: number,
                    fd,
                    bytes,
                },
            ),
            Self::Unmap { number } => Command::new(
                sequence,
                &wire::Unmap {
                    buffer: number,
                    reserved: 0,
                },
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_blames_one_of_the_commands_that_were_sent() {
        let blaming = |command| Completion {
            command,
            ..bytemuck::Zeroable::zeroed()
        };
        for command in [0, 4] {
            assert_eq!(plausible(blaming(command), 5).unwrap().command, command);
        }
        for command in [5, u32::MAX] {
            let text = plausible(blaming(command), 5).unwrap_err().to_string();
            assert!(text.contains(&format!("command {command} of 5")), "{text}");
        }
    }
}
