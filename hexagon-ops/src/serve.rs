//! The command loop of the DSP: it reads the ring of [`crate::wire`], checks each field of each
//! command, and runs the kernels.
//!
//! ```text
//! FastRPC call -> Server::invoke -> START   maps the ring, checks its header
//!                                   SERVE   loop: wish? -> command? -> check -> run -> fence? -> completion
//!                                           nothing to do for a while -> PARKED, look once more, return
//!                                           VTCM is wanted by others, no submission is half done -> PARKED, return
//! ```
//!
//! No bytes from the host make the loop panic or run forever. An impossible counter, header or wish
//! ends the session with [`STATE_CLOSED`] and [`ERROR_RING`]; a wrong command is answered with a
//! status. If the host does not collect its completions within [`COLLECT_US`], the ring counts as
//! corrupt.
//!
//! # Sequence numbers
//!
//! All commands up to a fence have the same number, which is larger than the previous submission's.
//! A command with a different number fails with [`SEQUENCE`]; the completion has the number of the
//! fence.
//!
//! # Lists
//!
//! A list is usually the same as in the last submission. Products with packed weights, attentions
//! and operations on tensors are therefore kept, both as bytes and in checked form. A command with
//! the same bytes at the same place of its list runs without another check, unless a buffer was
//! mapped or unmapped since. Numbers of rows and experts are data, and are checked in every run.
//!
//! # Caches
//!
//! Before a command, the loop invalidates the operands that the command reads by loads
//! (activations, choices of experts), and the cache lines that its results share with other data,
//! except those that an earlier command of the submission has read or written. Before the
//! completion is written, even if a command failed, the loop cleans all results of the submission.
//! Cache operations have steps of 32 bytes where scalar instructions access an operand, and of 128
//! bytes where only vector instructions do (`access`). The DMA engine copies weights and bypasses
//! the cache; for them it suffices that the host has cleaned them, or that an earlier command wrote
//! them under the same buffer number.
//!
//! # Statuses and details
//!
//! | status | detail |
//! |---|---|
//! | [`STATUS_BAD_COMMAND`] | 1 [`OPERATION`] … 22 [`DOTS`]: the field that is wrong |
//! | [`STATUS_MAP_FAILED`] | 1 [`MAP_SIZE`], 2 [`MAP_FULL`], 3 [`MAP_REFUSED`] |
//! | [`STATUS_NO_VTCM`] | KiB that would be needed |
//! | [`STATUS_FAULT`] | 1 [`FAULT_OUTSIDE_VTCM`], 2 [`FAULT_DEEP`], 3 [`FAULT_OVERFLOW`], 4 [`FAULT_DMA`], 5 [`FAULT_CONTROL`], 6 [`FAULT_MISSING`] |
//!
//! [`describe`] returns their meaning in words.

mod access;
mod attention;
mod coherence;
mod detail;
mod kept;
mod kernel;
mod list;
mod matmul;
mod matmul_id;
mod platform;
mod region;
mod ring;
mod tensor_op;
mod tensor_run;
mod wide_op;
mod work;

use core::ops::DerefMut;

use bytemuck::Pod;

use crate::hmx::{Form, Hmx};
use crate::layout::Tile;
use crate::ops::attention::{ExpTable, TABLE_TILES};
use crate::rt::Engine;
use crate::rt::invoke::Call;
use crate::rt::memory::Table;
use crate::wire::{
    ERROR_CALL, ERROR_LATER, ERROR_RING, ERROR_UNITS, ERROR_VERSION, Info, METHOD_SERVE,
    METHOD_START, Power, STATE_CLOSED, STATE_PARKED, STATE_SERVING, Serve, Start, VERSION,
};
#[cfg(doc)]
use crate::wire::{STATUS_BAD_COMMAND, STATUS_FAULT, STATUS_MAP_FAILED, STATUS_NO_VTCM};

pub use attention::accepts_attention;
use coherence::CachedRanges;
pub use detail::*;
use kept::KeptCommands;
pub use matmul::accepts_product;
pub use matmul_id::{MAX_CHOICES, accepts_experts};
pub use platform::{Platform, UNASKED_IDLE_US};
use ring::{Corrupt, Ring};
pub use tensor_op::{accepts, type_of};
pub use wide_op::accepts_wide;
use work::{Submission, Work};

/// Time that the loop waits for a free completion slot, microseconds. No host thread is off its
/// core for that long.
pub const COLLECT_US: u64 = 1_000_000;

/// The hardware units of a server.
#[derive(Debug)]
pub struct Units<V> {
    /// All VTCM that was acquired.
    pub vtcm: V,
    /// The matrix unit, which accepts operands in that VTCM.
    pub hmx: Hmx,
    /// Number of vector units: the most threads that compute.
    pub threads: usize,
    /// Architecture: 68, 69, 73, 75, 79 or 81.
    pub arch: u32,
}

/// The memory of a server between commands. It is large, so the caller decides where to put it.
#[derive(Debug)]
pub struct State {
    session: SessionState,
    kept: KeptCommands,
}

/// The part of the state that commands change.
#[derive(Debug)]
struct SessionState {
    memory: Table,
    scratch: Scratch,
    submission: Submission,
    ranges: CachedRanges,
    table: ExpTable,
    resident: matmul::Resident,
}

impl State {
    /// Returns the state of a new session, without mapped buffers.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            session: SessionState {
                memory: Table::new(),
                scratch: Scratch {
                    ids: [0; MAX_CHOICES],
                    starts: [0; 2 * MAX_CHOICES],
                },
                submission: Submission::FIRST,
                ranges: CachedRanges::new(),
                table: ExpTable::new(),
                resident: matmul::Resident::None,
            },
            kept: KeptCommands::new(),
        }
    }

    /// Forgets the submissions of a closed session, which has unmapped all its buffers.
    pub fn reset(&mut self) {
        self.session.submission = Submission::FIRST;
        self.session.ranges.clear();
    }
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}

/// Choices of experts, and the starts of their rows.
#[derive(Debug)]
struct Scratch {
    ids: [i32; MAX_CHOICES],
    starts: [usize; 2 * MAX_CHOICES],
}

/// The phase of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Fresh,
    Started,
    Closed,
}

/// One session's command loop. `V` holds the VTCM, `S` the [`State`].
#[derive(Debug)]
pub struct Server<P: Platform, V, S: DerefMut<Target = State>> {
    platform: P,
    units: Units<V>,
    state: S,
    engine: Engine,
    ring: Option<Ring>,
    phase: Phase,
}

impl<P, V, S> Server<P, V, S>
where
    P: Platform,
    V: DerefMut<Target = [Tile]>,
    S: DerefMut<Target = State>,
{
    /// Returns a server without a ring; `state` is [`State::new`].
    #[must_use]
    pub fn new(platform: P, units: Units<V>, state: S) -> Self {
        Self {
            platform,
            units,
            state,
            engine: Engine::new(1),
            ring: None,
            phase: Phase::Fresh,
        }
    }

    /// Executes a FastRPC call of [`METHOD_START`] or [`METHOD_SERVE`].
    ///
    /// # Errors
    /// `ERROR_CALL` for other methods and sizes; otherwise those of [`Self::start`] and
    /// [`Self::serve`].
    pub fn invoke(&mut self, call: Call<'_>) -> Result<(), i32> {
        match call.method {
            METHOD_START => {
                let start = argument(call.input)?;
                if call.output.len() != size_of::<Info>() {
                    return Err(ERROR_CALL);
                }
                let info = self.start(&start)?;
                call.output.copy_from_slice(bytemuck::bytes_of(&info));
                Ok(())
            }
            METHOD_SERVE if call.output.is_empty() => self.serve(&argument(call.input)?),
            _ => Err(ERROR_CALL),
        }
    }

    /// Takes over the ring.
    ///
    /// # Errors
    /// `ERROR_VERSION` if the host's version differs; `ERROR_CALL` if called before or with an
    /// unknown [`Start::power`] or [`Start::matrix`]; `ERROR_RING` if the region cannot be mapped
    /// or holds no ring; `ERROR_UNITS` without VTCM.
    pub fn start(&mut self, start: &Start) -> Result<Info, i32> {
        if start.version != VERSION {
            return Err(ERROR_VERSION);
        }
        if self.phase != Phase::Fresh || Power::from_number(start.power).is_none() {
            return Err(ERROR_CALL);
        }
        if start.matrix > 1 {
            return Err(ERROR_CALL);
        }
        if self.units.vtcm.is_empty() || self.units.threads == 0 {
            return Err(ERROR_UNITS);
        }
        let bytes = usize::try_from(start.bytes).map_err(|_| ERROR_RING)?;
        let region = self.platform.map_ring(start.fd, bytes).ok_or(ERROR_RING)?;
        self.ring = Some(Ring::new(region).map_err(|Corrupt| ERROR_RING)?);
        let wanted = usize::try_from(start.threads).unwrap_or(usize::MAX);
        let most = self.units.threads;
        self.engine = Engine::new(if wanted == 0 { most } else { wanted.min(most) });
        if start.matrix == 0 {
            self.units.hmx.leave_alone();
        }
        self.phase = Phase::Started;
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(Info {
            version: VERSION,
            arch: self.units.arch,
            vtcm_bytes: number(size_of_val(split_vtcm(&mut self.units.vtcm).0)),
            threads: number(self.engine.threads()),
            units: number(self.units.threads),
            matrix: u32::from(self.units.hmx.form() != Form::Vectors),
            votes: self.platform.votes(),
        })
    }

    /// Reads the ring until it has been empty for a while, until another program waits for VTCM, or
    /// until the host wants to close.
    ///
    /// # Errors
    /// `ERROR_LATER` if another program waits for VTCM and the host has published more commands; it
    /// then calls again. `ERROR_RING` if the ring is corrupt, `ERROR_CALL` before START and after
    /// the end; codes of [`Platform::answer`]. The session is closed then.
    pub fn serve(&mut self, serve: &Serve) -> Result<(), i32> {
        if self.phase != Phase::Started || serve.reserved != 0 {
            return Err(ERROR_CALL);
        }
        let idle_us = serve.idle_us.min(self.platform.longest_idle_us());
        let result = self.read_ring(u64::from(idle_us));
        if !matches!(result, Ok(Exit::Idle | Exit::Later)) {
            if let Some(ring) = &self.ring {
                ring.announce(STATE_CLOSED);
            }
            self.close();
        }
        match result {
            Ok(Exit::Later) => Err(ERROR_LATER),
            Ok(Exit::Idle | Exit::Closed) => Ok(()),
            Err(Stop::Ring) => Err(ERROR_RING),
            Err(Stop::Code(code)) => Err(code),
        }
    }

    /// Returns the units. It is for a system that gives VTCM to the server only during a call:
    /// START uses the size of VTCM, and SERVE its memory.
    pub fn units(&mut self) -> &mut Units<V> {
        &mut self.units
    }

    /// Runs code on the thread that computes with the matrix unit, for a system in which one thread
    /// locks the unit.
    pub fn on_matrix_thread(&self, run: impl FnMut() + Send) {
        self.engine.on_matrix_thread(run);
    }

    /// Returns `true` if a thread in addition to those that compute has the matrix unit, or if only
    /// one thread computes.
    pub fn has_matrix_thread(&self) -> bool {
        self.engine.has_matrix_thread() || self.engine.threads() == 1
    }

    /// Returns the system that the loop runs on.
    pub fn platform(&mut self) -> &mut P {
        &mut self.platform
    }

    /// Ends the session: unmaps all buffers and refuses later calls. Does not touch the ring, which
    /// a host that closes the handle has unmapped.
    pub fn close(&mut self) {
        self.ring = None;
        for mapped in self.state.session.memory.drain() {
            self.platform.unmap(mapped);
        }
        self.phase = Phase::Closed;
    }

    /// Runs the loop of [`Self::serve`].
    fn read_ring(&mut self, idle_us: u64) -> Result<Exit, Stop> {
        let Some(ring) = &mut self.ring else {
            return Err(Stop::Ring);
        };
        ring.announce(STATE_SERVING);
        // Another program may have used VTCM since the last call.
        let State { session, kept } = &mut *self.state;
        session.resident = matmul::Resident::None;
        session.table.evict();
        let (vtcm, table_place) = split_vtcm(&mut self.units.vtcm);
        let mut work = Work {
            platform: &mut self.platform,
            state: session,
            engine: &self.engine,
            vtcm,
            table_place,
            hmx: &mut self.units.hmx,
        };
        let mut idle_since = None;
        let mut polls = 0_u32;
        loop {
            if ring.wants_close()? {
                return Ok(Exit::Closed);
            }
            if ring.pending()? > 0 {
                (idle_since, polls) = (None, 0);
                let command = ring.take();
                if let Some(mut completion) = work.step(&command, ring, kept) {
                    work.platform.answer(&mut completion).map_err(Stop::Code)?;
                    if !work.wait_for_room(ring)? {
                        return Ok(Exit::Closed);
                    }
                    ring.answer(&completion);
                    if work.platform.is_vtcm_wanted() {
                        ring.announce(STATE_PARKED);
                        // Commands that the host published before it could see the new state come
                        // without a call, so they must not be left in the ring.
                        let is_done = ring.pending()? == 0;
                        return Ok(if is_done { Exit::Idle } else { Exit::Later });
                    }
                }
                continue;
            }
            let now = work.platform.time_us();
            let is_idle = now.saturating_sub(*idle_since.get_or_insert(now)) >= idle_us;
            if is_idle || work.platform.is_vtcm_wanted() {
                ring.announce(STATE_PARKED);
                if ring.pending()? == 0 && !ring.wants_close()? {
                    return Ok(Exit::Idle);
                }
                ring.announce(STATE_SERVING);
                continue;
            }
            work.platform.relax(polls).map_err(Stop::Code)?;
            polls = polls.saturating_add(1);
        }
    }
}

impl<P: Platform, V, S: DerefMut<Target = State>> Drop for Server<P, V, S> {
    fn drop(&mut self) {
        for mapped in self.state.session.memory.drain() {
            self.platform.unmap(mapped);
        }
    }
}

/// Returns the part of VTCM that commands share, and the place of the table of exponentials after
/// it.
fn split_vtcm(vtcm: &mut [Tile]) -> (&mut [Tile], &mut [Tile]) {
    vtcm.split_at_mut(vtcm.len().saturating_sub(TABLE_TILES))
}

/// Reads the argument of a method.
fn argument<T: Pod>(input: &[u8]) -> Result<T, i32> {
    if input.len() != size_of::<T>() {
        return Err(ERROR_CALL);
    }
    Ok(bytemuck::pod_read_unaligned(input))
}

/// A reason to leave the loop.
enum Exit {
    /// There was nothing to do.
    Idle,
    /// There are commands, but another program waits for VTCM.
    Later,
    /// The host closes the session.
    Closed,
}

/// A failure that ends the loop.
enum Stop {
    /// The ring is corrupt.
    Ring,
    /// The platform returned this code.
    Code(i32),
}

impl From<Corrupt> for Stop {
    fn from(_: Corrupt) -> Self {
        Self::Ring
    }
}
