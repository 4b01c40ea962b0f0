//! Execution of the commands of a list.

use super::Platform;
use super::SessionState;
use super::coherence::Cache;
use super::detail::{Failure, OPERATION, RESERVED};
use super::kept::{CheckedCommand, KeptCommand, KeptCommands};
use super::matmul::Resident;
use super::ring::Ring;
use super::work::{COMPUTE, Work, body, forget_changed};
use crate::rt::cache::Access;
use crate::wire::{Command, List};

impl<P: Platform> Work<'_, P> {
    /// Executes [`crate::wire::OP_LIST`], and shows progress on `ring` meanwhile.
    pub(super) fn list(&mut self, command: &Command, ring: &mut Ring, kept: &mut KeptCommands) {
        const BYTES: u64 = size_of::<Command>() as u64;
        let found = body(command).and_then(|list: &List| {
            let bytes = u64::from(list.count) * BYTES;
            let SessionState { memory, ranges, .. } = &mut *self.state;
            let buffers = memory.lend();
            let all = buffers.bind(list.buffer, list.offset, bytes)?;
            if list.count > 0 {
                let mut cache = Cache {
                    mappings: buffers.mappings(),
                    platform: self.platform,
                    ranges,
                };
                // Vector access, because commands are compared and copied by vectors.
                cache.read(&all, all.range(), Access::Vector);
            }
            Ok(list)
        });
        let list = match found {
            Ok(list) => list,
            Err(failure) => return self.execute_counted(|_| Err(failure)),
        };
        for index in 0..u64::from(list.count) {
            ring.advance(self.platform.time_us());
            let offset = list.offset + index * BYTES;
            let place = kept.at(offset);
            self.execute_counted(|work| work.run_listed(list.buffer, offset, place));
        }
    }

    /// Executes a command of a list, and stores its checked form at `place`.
    fn run_listed(
        &mut self,
        buffer: u32,
        offset: u64,
        place: &mut KeptCommand,
    ) -> Result<(), Failure> {
        let buffers = self.state.memory.lend();
        let bound = buffers.bind(buffer, offset, size_of::<Command>() as u64)?;
        let bytes = buffers.bytes(&bound)?;
        if place.is(bytes)
            && let Some(done) = self.run_again(&place.checked)
        {
            return done;
        }
        let buffers = self.state.memory.lend();
        let bound = buffers.bind(buffer, offset, size_of::<Command>() as u64)?;
        // A copy, so that the command that was checked is the one that is executed.
        place.replace(buffers.bytes(&bound)?);
        let command = place.command();
        if command.flags != 0 || command.sequence != 0 {
            return Err(Failure::bad(RESERVED));
        }
        if !COMPUTE.contains(&command.op) {
            return Err(Failure::bad(OPERATION));
        }
        place.checked = self.run(command)?;
        Ok(())
    }

    /// Executes a command that was checked; `None` if it has to be checked again.
    #[inline(always)]
    fn run_again(&mut self, checked: &CheckedCommand) -> Option<Result<(), Failure>> {
        match checked {
            CheckedCommand::None => None,
            CheckedCommand::Tensor(op) => {
                let (state, platform, machine) = self.parts();
                let operands = state.memory.lend().rebind(&op.operands)?;
                if !platform.begin() {
                    return Some(Ok(()));
                }
                if op.op.uses_vtcm() {
                    state.resident = Resident::None;
                }
                let written = op.run(operands, (platform, &mut state.ranges), machine);
                forget_changed(&mut state.resident, &written.map(Some));
                Some(written.map(|_| ()))
            }
            CheckedCommand::Experts(experts) => {
                let (state, platform, machine) = self.parts();
                let SessionState {
                    memory,
                    ranges,
                    scratch,
                    resident,
                    ..
                } = state;
                let operands = memory.lend().rebind(&experts.operands)?;
                if !platform.begin() {
                    return Some(Ok(()));
                }
                // A product with experts uses all of VTCM, as attention does.
                *resident = Resident::None;
                Some(experts.run(operands, (platform, ranges), scratch, machine))
            }
            CheckedCommand::Attention(attention) => {
                let (state, platform, machine, place) = self.parts_and_place();
                let SessionState {
                    memory,
                    ranges,
                    table,
                    resident,
                    ..
                } = state;
                let operands = memory.lend().rebind(&attention.operands)?;
                if !platform.begin() {
                    return Some(Ok(()));
                }
                *resident = Resident::None;
                let table = table.resident(place);
                Some(attention.run(operands, table, (platform, ranges), machine))
            }
            CheckedCommand::Product(product) => {
                let (state, platform, machine) = self.parts();
                let operands = state.memory.lend().rebind(&product.operands)?;
                if !platform.begin() {
                    return Some(Ok(()));
                }
                let earlier = state.resident.take();
                let done = product.run(operands, earlier, (platform, &mut state.ranges), machine);
                Some(done.map(|resident| state.resident = resident))
            }
        }
    }
}
