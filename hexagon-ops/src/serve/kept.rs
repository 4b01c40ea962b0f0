//! Commands of lists that were executed before.
//!
//! The host runs the same list again and again. A command with the same bytes as an earlier one at
//! its place is the same command, so it is checked only once, as long as no buffer is mapped or
//! unmapped.
//!
//! ```text
//! command of a list ── same bytes, same buffers ──> run the checked command
//!        └── otherwise: copy the bytes, check, run, and keep the checked command if that succeeded
//! ```
//!
//! The bytes are compared in memory that the host can write, but the command that runs was copied
//! first, and then checked.

use super::attention::CheckedAttention;
use super::matmul::CheckedProduct;
use super::matmul_id::CheckedExperts;
use super::tensor_run::CheckedOp;
use crate::hvx;
use crate::layout::{LINE_BYTES, Line};
use crate::wire::Command;

/// Commands that are kept: more than the graph of a usual model has.
const PLACES: usize = 1024;
/// Lines of a command.
const LINES: usize = size_of::<Command>() / LINE_BYTES;

/// The result of checking. `None` has the number 0 and no content, so that a table of them needs no
/// bytes in the library's file.
#[derive(Debug)]
#[repr(u8)]
pub(super) enum CheckedCommand {
    /// The command has not been executed, or failed, or is of a kind that is checked each time.
    None = 0,
    Tensor(CheckedOp),
    Product(CheckedProduct),
    Experts(CheckedExperts),
    Attention(CheckedAttention),
}

/// A command that was executed.
#[derive(Debug)]
pub(super) struct KeptCommand {
    bytes: [Line; LINES],
    pub(super) checked: CheckedCommand,
}

impl KeptCommand {
    const EMPTY: Self = Self {
        bytes: [Line::ZERO; LINES],
        checked: CheckedCommand::None,
    };

    /// Returns `true` if the command has these bytes.
    pub(super) fn is(&self, bytes: &[u8]) -> bool {
        hvx::widest(Compare {
            kept: &self.bytes,
            bytes,
        })
    }

    /// Replaces the command by a new, unchecked one.
    pub(super) fn replace(&mut self, bytes: &[u8]) {
        self.checked = CheckedCommand::None;
        let own: &mut [u8] = bytemuck::cast_slice_mut(&mut self.bytes);
        if bytes.len() == own.len() {
            own.copy_from_slice(bytes);
        }
    }

    pub(super) fn command(&self) -> &Command {
        bytemuck::cast_ref(&self.bytes)
    }
}

/// Compares the bytes of two commands.
struct Compare<'a> {
    kept: &'a [Line; LINES],
    bytes: &'a [u8],
}

impl hvx::Kernel for Compare<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let (lines, rest) = self.bytes.as_chunks();
        if lines.len() != LINES || !rest.is_empty() {
            return false;
        }
        let mut all = hvx::splat_w(0);
        for (kept, line) in self.kept.iter().zip(lines) {
            // Equal words have a difference of zero.
            all = hvx::or(all, hvx::sub_w(hvx::load(kept), hvx::load_bytes(line)));
        }
        let [mut folded] = hvx::zeros();
        hvx::store(&mut folded, all);
        let words: &[u64; LINE_BYTES / 8] = bytemuck::cast_ref(&folded);
        words.iter().fold(0, |all, word| all | word) == 0
    }
}

/// Commands by their place in the memory of their list.
#[derive(Debug)]
pub(super) struct KeptCommands([KeptCommand; PLACES]);

impl KeptCommands {
    pub(super) const fn new() -> Self {
        Self([const { KeptCommand::EMPTY }; PLACES])
    }

    /// Returns the place for the command at byte `offset` of its buffer.
    pub(super) fn at(&mut self, offset: u64) -> &mut KeptCommand {
        // CAST: below the number of places.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let place = (offset / size_of::<Command>() as u64 % PLACES as u64) as usize;
        &mut self.0[place]
    }
}
