//! Execution of commands one after another: each is matched with its submission, then executed or
//! skipped, and a fence is answered.

use super::detail::{
    ALIGNMENT, FAULT_DMA, FLAGS, Failure, MAP_SIZE, OPERATION, RESERVED, SEQUENCE,
};
use super::kept::{CheckedCommand, KeptCommands};
use super::matmul::{Resident, ResidentActs};
use super::ring::Ring;
use super::{
    COLLECT_US, Platform, SessionState, Stop, attention, matmul, matmul_id, tensor_op, wide_op,
};
use crate::hmx::Hmx;
use crate::layout::Tile;
use crate::ops::matmul::Machine;
use crate::rt::Engine;
use crate::rt::memory::Addresses;
use crate::wire::{
    Attention, Body, Command, Completion, FENCE, Map, MatMul, MatMulId, Nop, OP_ATTENTION, OP_LIST,
    OP_MAP, OP_MUL_MAT, OP_MUL_MAT_ID, OP_NOP, OP_TENSOR, OP_UNMAP, OP_WIDE, STATUS_OK, TensorOp,
    Unmap, WideOp,
};

/// Operations that a list may hold.
pub(super) const COMPUTE: [u32; 5] = [OP_MUL_MAT, OP_MUL_MAT_ID, OP_TENSOR, OP_ATTENTION, OP_WIDE];

/// The current submission.
#[derive(Clone, Copy, Debug)]
pub(super) struct Submission {
    /// Sequence number of the last submission that was answered.
    last: Option<u64>,
    /// Sequence number of this submission; none before its first command.
    sequence: Option<u64>,
    /// Number of commands seen.
    seen: u32,
    /// Number of commands executed.
    done: u32,
    /// The first failure, and the index of its command.
    failure: Option<(Failure, u32)>,
    start_us: u64,
    start_packets: u64,
}

impl Submission {
    pub(super) const FIRST: Self = Self {
        last: None,
        sequence: None,
        seen: 0,
        done: 0,
        failure: None,
        start_us: 0,
        start_packets: 0,
    };
}

/// A server without its ring.
pub(super) struct Work<'a, P> {
    pub(super) platform: &'a mut P,
    pub(super) state: &'a mut SessionState,
    pub(super) engine: &'a Engine,
    pub(super) vtcm: &'a mut [Tile],
    /// The part of VTCM for the table of exponentials.
    pub(super) table_place: &'a mut [Tile],
    pub(super) hmx: &'a mut Hmx,
}

impl<P: Platform> Work<'_, P> {
    /// Executes or skips a command, and returns the completion if it is a fence.
    pub(super) fn step(
        &mut self,
        command: &Command,
        ring: &mut Ring,
        kept: &mut KeptCommands,
    ) -> Option<Completion> {
        if self.state.submission.sequence.is_none() {
            let last = self.state.submission.last;
            // The host may have written new activations since.
            self.state.resident = Resident::None;
            self.state.ranges.clear();
            self.state.submission = Submission {
                last,
                sequence: Some(command.sequence),
                start_us: self.platform.time_us(),
                start_packets: self.platform.packets(),
                ..Submission::FIRST
            };
        }
        match self.check(command) {
            Ok(()) if command.op == OP_LIST => self.list(command, ring, kept),
            checked => {
                self.execute_counted(|work| checked.and_then(|()| work.run(command).map(|_| ())))
            }
        }
        let submission = &mut self.state.submission;
        if command.flags & FENCE == 0 {
            return None;
        }
        submission.sequence = None;
        let SessionState { memory, ranges, .. } = &mut *self.state;
        ranges.clean(memory.mappings(), self.platform);
        let submission = &mut self.state.submission;
        let lost_count = Some(Failure::bad(SEQUENCE));
        if submission.failure.map(|(failure, _)| failure) != lost_count {
            submission.last = Some(command.sequence);
        }
        let submission = *submission;
        let (status, detail, index) = match submission.failure {
            None => (STATUS_OK, 0, 0),
            Some((failure, index)) => (failure.status, failure.detail, index),
        };
        let packets = self.platform.packets();
        Some(Completion {
            sequence: command.sequence,
            status,
            command: index,
            detail,
            done: submission.done,
            microseconds: self.platform.time_us().saturating_sub(submission.start_us),
            packets: packets.saturating_sub(submission.start_packets),
            reserved: [0; 11],
        })
    }

    /// Executes a command by `run` unless an earlier one of the submission has failed, and counts
    /// it.
    pub(super) fn execute_counted(&mut self, run: impl FnOnce(&mut Self) -> Result<(), Failure>) {
        if self.state.submission.failure.is_none() {
            let mut result = run(self);
            if self.engine.is_stuck() {
                result = Err(Failure::fault(FAULT_DMA));
            }
            let submission = &mut self.state.submission;
            match result {
                Ok(()) => submission.done = submission.done.saturating_add(1),
                Err(failure) => submission.failure = Some((failure, submission.seen)),
            }
        }
        let submission = &mut self.state.submission;
        submission.seen = submission.seen.saturating_add(1);
    }

    /// Checks the fields that all commands of the ring have.
    fn check(&self, command: &Command) -> Result<(), Failure> {
        let submission = &self.state.submission;
        let grows = submission.last.is_none_or(|last| command.sequence > last);
        if submission.sequence != Some(command.sequence) || !grows {
            return Err(Failure::bad(SEQUENCE));
        }
        if command.flags & !FENCE != 0 {
            return Err(Failure::bad(FLAGS));
        }
        Ok(())
    }

    /// Executes a command, and returns its checked form.
    pub(super) fn run(&mut self, command: &Command) -> Result<CheckedCommand, Failure> {
        if COMPUTE.contains(&command.op) && !self.platform.begin() {
            return Ok(CheckedCommand::None);
        }
        // Activations stay resident only while no command uses VTCM for other data. After a
        // product, its activations are resident.
        if !matches!(command.op, OP_MUL_MAT | OP_TENSOR) {
            self.state.resident = Resident::None;
        }
        match command.op {
            OP_NOP => {
                let Nop { reserved } = body(command)?;
                zero(*reserved)
            }
            OP_MAP => self.map(body(command)?),
            OP_UNMAP => {
                let Unmap { buffer, reserved } = *body(command)?;
                zero(reserved)?;
                let SessionState { memory, ranges, .. } = &mut *self.state;
                // Another buffer may be mapped at the same address later.
                ranges.clean(memory.mappings(), self.platform);
                ranges.clear();
                let mapped = self.state.memory.remove(buffer)?;
                self.platform.unmap(mapped);
                Ok(())
            }
            OP_MUL_MAT => return self.product(body(command)?),
            OP_MUL_MAT_ID => return self.experts(body(command)?),
            OP_TENSOR => return self.tensor_op(body(command)?),
            OP_ATTENTION => return self.attention(body(command)?),
            OP_WIDE => {
                let body: &WideOp = body(command)?;
                let (state, platform, machine) = self.parts();
                let SessionState {
                    memory,
                    ranges,
                    resident,
                    ..
                } = state;
                let written = wide_op::wide_op(body, memory, (platform, ranges), machine);
                forget_changed(resident, &written);
                written.map(|_| ())
            }
            _ => Err(Failure::bad(OPERATION)),
        }
        .map(|()| CheckedCommand::None)
    }

    /// Executes [`OP_MUL_MAT`].
    fn product(&mut self, body: &MatMul) -> Result<CheckedCommand, Failure> {
        let (state, platform, machine) = self.parts();
        let SessionState {
            memory,
            ranges,
            resident,
            ..
        } = state;
        let earlier = resident.take();
        let Some((product, operands)) = matmul::check(body, memory)? else {
            return Ok(CheckedCommand::None);
        };
        *resident = product.run(operands, earlier, (platform, ranges), machine)?;
        Ok(CheckedCommand::Product(product))
    }

    /// Executes [`OP_MUL_MAT_ID`].
    fn experts(&mut self, body: &MatMulId) -> Result<CheckedCommand, Failure> {
        let (state, platform, machine) = self.parts();
        let SessionState {
            memory,
            ranges,
            scratch,
            ..
        } = state;
        let Some((experts, operands)) = matmul_id::check(body, memory)? else {
            return Ok(CheckedCommand::None);
        };
        experts.run(operands, (platform, ranges), scratch, machine)?;
        Ok(CheckedCommand::Experts(experts))
    }

    /// Executes [`OP_ATTENTION`].
    fn attention(&mut self, body: &Attention) -> Result<CheckedCommand, Failure> {
        let (state, platform, machine, place) = self.parts_and_place();
        let SessionState {
            memory,
            ranges,
            table,
            ..
        } = state;
        let Some((attention, operands)) = attention::check(body, memory)? else {
            return Ok(CheckedCommand::None);
        };
        let table = table.resident(place);
        attention.run(operands, table, (platform, ranges), machine)?;
        Ok(CheckedCommand::Attention(attention))
    }

    /// Executes [`OP_TENSOR`].
    fn tensor_op(&mut self, body: &TensorOp) -> Result<CheckedCommand, Failure> {
        let (state, platform, machine) = self.parts();
        let SessionState {
            memory,
            ranges,
            resident,
            ..
        } = state;
        let (op, operands) = match tensor_op::check(body, memory) {
            Ok(Some(checked)) => checked,
            Ok(None) => return Ok(CheckedCommand::None),
            Err(failure) => {
                *resident = Resident::None;
                return Err(failure);
            }
        };
        if op.op.uses_vtcm() {
            *resident = Resident::None;
        }
        let written = op.run(operands, (platform, ranges), machine);
        forget_changed(resident, &written.map(Some));
        written.map(|_| CheckedCommand::Tensor(op))
    }

    /// Returns the parts that a product needs.
    pub(super) fn parts(&mut self) -> (&mut SessionState, &mut P, Machine<'_>) {
        let (state, platform, machine, _) = self.parts_and_place();
        (state, platform, machine)
    }

    /// Returns the parts that an attention needs: [`Self::parts`] and the place of its table.
    pub(super) fn parts_and_place(
        &mut self,
    ) -> (&mut SessionState, &mut P, Machine<'_>, &mut [Tile]) {
        let machine = Machine {
            engine: self.engine,
            vtcm: &mut *self.vtcm,
            hmx: &mut *self.hmx,
        };
        (self.state, self.platform, machine, self.table_place)
    }

    /// Executes [`OP_MAP`].
    fn map(&mut self, map: &Map) -> Result<(), Failure> {
        self.state.memory.vacant(map.buffer)?;
        let bytes = usize::try_from(map.bytes).ok();
        let bytes = bytes.filter(|bytes| *bytes > 0 && isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or(Failure::map(MAP_SIZE))?;
        let mapped = self.platform.map(map.fd, bytes).map_err(Failure::map)?;
        if let Some(other) = self.state.memory.insert(map.buffer, mapped)? {
            self.platform.unmap(other);
        }
        Ok(())
    }

    /// Waits until a completion can be written. Returns `false` if the host requests the end of the
    /// session meanwhile.
    pub(super) fn wait_for_room(&mut self, ring: &Ring) -> Result<bool, Stop> {
        let start = self.platform.time_us();
        let mut polls = 0_u32;
        while !ring.has_room()? {
            if ring.wants_close()? {
                return Ok(false);
            }
            if self.platform.time_us().saturating_sub(start) > COLLECT_US {
                return Err(Stop::Ring);
            }
            self.platform.relax(polls).map_err(Stop::Code)?;
            polls = polls.saturating_add(1);
        }
        Ok(true)
    }
}

/// Returns the body of a command, and refuses a command without zeros after it.
#[inline(always)]
pub(super) fn body<B: Body>(command: &Command) -> Result<&B, Failure> {
    let (body, rest) = command.body.split_at(size_of::<B>());
    if !is_zero(rest) {
        return Err(Failure::bad(RESERVED));
    }
    bytemuck::try_from_bytes(body).map_err(|_| Failure::bad(ALIGNMENT))
}

/// Forgets packed activations that a command has written, or may have written before it failed.
pub(super) fn forget_changed(
    resident: &mut Resident,
    written: &Result<Option<Addresses>, Failure>,
) {
    let changed = |acts: &ResidentActs| match written {
        Ok(written) => written.is_some_and(|written| acts.is_changed_by(written)),
        Err(_) => true,
    };
    resident.forget_if(changed);
}

/// Returns `true` if all bytes are zero; eight at a time where they are aligned, because this is
/// part of each command.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    match bytemuck::try_cast_slice::<u8, u64>(bytes) {
        Ok(words) => words.iter().fold(0, |all, word| all | word) == 0,
        Err(_) => bytes.iter().all(|byte| *byte == 0),
    }
}

/// Refuses a reserved field that is not zero.
fn zero(reserved: u32) -> Result<(), Failure> {
    if reserved == 0 {
        Ok(())
    } else {
        Err(Failure::bad(RESERVED))
    }
}
