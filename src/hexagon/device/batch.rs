//! Commands that are submitted together.

use hexagon_ops::wire::{Command, WIDE_SOURCES};

use super::DeviceBuffer;
use super::address::Number;

/// Most buffers that one command names.
pub const MAX_OPERANDS: usize = 1 + WIDE_SOURCES;

/// A command and the buffers that it names.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchEntry {
    /// The command; its sequence number and flags are the session's to fill in.
    pub(super) command: Command,
    /// The buffers, one of them perhaps more than once.
    pub(super) buffers: [Number; MAX_OPERANDS],
}

/// Commands in order. A batch can be submitted several times.
#[derive(Debug, Default)]
pub struct Batch {
    pub(super) entries: Vec<BatchEntry>,
    /// All buffers that the commands name, each once.
    pub(super) numbers: Vec<Number>,
    /// The buffer that the commands were written to, from its first byte on.
    pub(super) list: Option<Number>,
}

impl Batch {
    /// Adds a command.
    ///
    /// - `buffers`: the buffers that it names: 1 to [`MAX_OPERANDS`], one of them perhaps more than
    ///   once
    ///
    /// # Panics
    /// If it names none, or more.
    pub fn push(&mut self, command: Command, buffers: &[Number]) {
        let mut all = [buffers[0]; MAX_OPERANDS];
        all[..buffers.len()].copy_from_slice(buffers);
        for number in buffers {
            if !self.numbers.contains(number) {
                self.numbers.push(*number);
            }
        }
        self.entries.push(BatchEntry {
            command,
            buffers: all,
        });
    }

    /// Takes the last command back. Its buffers stay named.
    pub fn pop(&mut self) {
        self.entries.pop();
    }

    /// Returns the bytes of a buffer for [`Self::record`].
    #[must_use]
    pub fn list_bytes(&self) -> usize {
        self.entries.len() * size_of::<Command>()
    }

    /// Returns the bytes of the process's memory that it holds.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<BatchEntry>()
            + self.numbers.capacity() * size_of::<Number>()
    }

    /// Gives back memory that it does not need, such as that of longer batches before.
    pub fn shrink(&mut self) {
        self.entries.shrink_to_fit();
        self.numbers.shrink_to_fit();
    }

    /// Writes the commands to a buffer, from which the DSP reads them at each later submission,
    /// until the batch is changed.
    pub fn record(&mut self, buffer: &DeviceBuffer) {
        buffer.write(0..self.list_bytes(), |out| {
            for (out, entry) in out
                .chunks_exact_mut(size_of::<Command>())
                .zip(&self.entries)
            {
                out.copy_from_slice(bytemuck::bytes_of(&entry.command));
            }
        });
        self.numbers.push(buffer.number());
        self.list = Some(buffer.number());
    }

    /// Returns `true` if the commands are in a buffer.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.list.is_some()
    }

    /// Returns the commands in order.
    pub fn commands(&self) -> impl Iterator<Item = &Command> {
        self.entries.iter().map(|entry| &entry.command)
    }

    /// Returns one of the commands.
    ///
    /// # Panics
    /// If there are not so many.
    #[must_use]
    pub fn only(&self, entry: usize) -> Self {
        let entry = self.entries[entry];
        let mut numbers = entry.buffers.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        Self {
            entries: vec![entry],
            numbers,
            list: None,
        }
    }

    /// Forgets all commands.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.numbers.clear();
        self.list = None;
    }

    /// Returns the number of commands.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` without commands.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_names_each_buffer_of_its_commands_once() {
        let command = Command::new(0, &hexagon_ops::wire::Nop { reserved: 0 });
        let all: Vec<Number> = (0..).take(1 + WIDE_SOURCES).collect();
        let mut batch = Batch::default();
        batch.push(command, &all);
        batch.push(command, &[3, 77, 3]);
        assert_eq!((batch.len(), batch.is_empty()), (2, false));
        assert_eq!(batch.list_bytes(), 2 * size_of::<Command>());
        assert_eq!(batch.numbers[..all.len()], all);
        assert_eq!(batch.numbers[all.len()..], [77]);
        assert_eq!(batch.only(0).numbers, all);
        assert_eq!(batch.only(1).numbers, [3, 77]);
        batch.clear();
        assert_eq!((batch.len(), batch.is_empty()), (0, true));
    }
}
