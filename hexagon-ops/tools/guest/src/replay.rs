//! A recorded graph of the host (`GGML_RUST_NPU_TRACE=graphs.commands`): packets of each command of
//! its list.
//!
//! The input, words of 32 bits:
//!
//! ```text
//! buffers, inputs, fillings, commands     numbers of the entries that follow
//! each buffer:   number, bytes
//! each input:    buffer, offset, bytes; with the highest bit set, these are zeros, else the bytes follow, to a multiple of 4
//! each filling:  command, buffer, offset, kind, count, limit, group
//! the commands, 512 bytes each
//! ```
//!
//! Packets of some kernels depend on their operands, which a guest without a matrix unit does not
//! compute. So before a command, at no cost, its *fillings* write `count` values: kind 0, f32
//! between -1 and 1; kind 1, i32 below `limit`, which differ in each `group`; kind 2, f32 of 1.
//!
//! The host's inputs are written before each run, because ggml reuses their memory for later
//! results. The list runs twice, and the second run is counted, because a graph is usually
//! repeated. A command's packets are those from the start of its turn in the list to the start of
//! the next one's. The program does the copies of the DMA engine: it does not count their packets,
//! but reports their bytes. One line for each command: packets, bytes copied.

use core::fmt::Write;
use core::ops::Range;

use hexagon_ops::rt::cache::{self, Access};
use hexagon_ops::rt::memory::Mapped;
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::serve::Platform;
use hexagon_ops::wire::{Command, List, Map, STATUS_OK};

use crate::bench::packets;
use crate::scratch::Scratch;
use crate::whole::Host;

/// Most buffers, and most commands of a graph.
const BUFFERS: usize = 64;
const COMMANDS: usize = 8192;
/// Most fillings.
const FILLINGS: usize = 2048;
/// Most inputs.
const INPUTS: usize = 256;
/// Flag in the number of bytes of an input that is zero.
const ZEROS: u32 = 1 << 31;
/// Packets of a call of [`npu_copy`] that are outside of the part that it counts itself.
const CALL_PACKETS: u32 = 3;

/// The state of a replay.
struct Replay {
    memory: [*mut u8; BUFFERS],
    fillings: [Filling; FILLINGS],
    n_fillings: usize,
    /// Packets at the start of each command of the list, and after the last.
    turns: [u32; COMMANDS + 1],
    bytes: [u32; COMMANDS + 1],
    turn: usize,
    /// Packets that do not count.
    free: u32,
    copied: u32,
}

/// Values to be written before a command.
#[derive(Clone, Copy)]
struct Filling {
    command: u32,
    at: *mut u8,
    kind: u32,
    count: u32,
    limit: u32,
    group: u32,
}

static REPLAY: Scratch<Replay> = Scratch::new(Replay {
    memory: [core::ptr::null_mut(); BUFFERS],
    fillings: [Filling {
        command: 0,
        at: core::ptr::null_mut(),
        kind: 0,
        count: 0,
        limit: 1,
        group: 1,
    }; FILLINGS],
    n_fillings: 0,
    turns: [0; COMMANDS + 1],
    bytes: [0; COMMANDS + 1],
    turn: 0,
    free: 0,
    copied: 0,
});

/// Makes the copy of a descriptor as the DMA engine does, outside of the count.
///
/// # Safety
/// The descriptor is one of `rt/descriptor.rs`, and nothing else uses its two sides.
#[unsafe(no_mangle)]
unsafe extern "C" fn npu_copy(descriptor: *mut u32) {
    /// Bits of a descriptor's control word: the descriptor has eight words; its copy is done.
    const EIGHT_WORDS: u32 = 1 << 24;
    const DONE: u32 = 1 << 31;
    const WIDE: u32 = 9;
    const LOW_24: u32 = (1 << 24) - 1;
    let start = packets();
    // SAFETY: the descriptor has four words.
    let word = |i: usize| unsafe { descriptor.add(i).read() };
    let (control, from, to) = (word(1), word(2), word(3));
    let [rows, bytes, from_stride, to_stride] = if control & EIGHT_WORDS == 0 {
        [1, control & LOW_24, 0, 0]
    } else if word(4) & 0xff == WIDE {
        [word(5) >> 24 | (word(6) & 0xff) << 8, word(5) & LOW_24, word(6) >> 8, control & LOW_24]
    } else {
        [word(5) >> 16, word(5) & 0xffff, word(6) & 0xffff, word(6) >> 16]
    };
    for row in 0..rows {
        let (from, to) = (from + row * from_stride, to + row * to_stride);
        let (from, to) = (from as *const u8, to as *mut u8);
        // SAFETY: rows of the two sides, which do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(from, to, bytes as usize) };
    }
    // SAFETY: as above.
    unsafe { descriptor.add(1).write_volatile(control | DONE) };
    // SAFETY: the loop holds no other reference while a kernel waits for a copy.
    let replay = unsafe { REPLAY.get() };
    replay.copied = replay.copied.wrapping_add(rows * bytes);
    replay.free = replay.free.wrapping_add(packets().wrapping_sub(start) + CALL_PACKETS);
}

/// The system around the loop.
struct System {
    ring: *mut u8,
}

impl Platform for System {
    fn map(&mut self, fd: i32, bytes: usize) -> Result<Mapped, u32> {
        // SAFETY: no other reference is alive in a call of the loop.
        let replay = unsafe { REPLAY.get() };
        let memory = usize::try_from(fd).ok().and_then(|fd| replay.memory.get(fd)).ok_or(0_u32)?;
        // SAFETY: new memory of that size, never unmapped, and not used while the loop runs.
        unsafe { Mapped::new(*memory, *memory, bytes) }.ok_or(0)
    }

    fn unmap(&mut self, _mapped: Mapped) {}

    fn map_ring(&mut self, _fd: i32, bytes: usize) -> Option<Shared> {
        // SAFETY: new memory of that size, never unmapped, and used by words.
        unsafe { Shared::new(self.ring, bytes) }
    }

    fn invalidate(&mut self, mapped: &Mapped, range: Range<usize>, access: Access) {
        cache::invalidate(mapped.start().wrapping_add(range.start), range.len(), access);
    }

    fn clean(&mut self, mapped: &Mapped, range: Range<usize>, access: Access) {
        cache::clean(mapped.start().wrapping_add(range.start), range.len(), access);
    }

    /// The loop reads the time when a submission starts, when a command of a list starts, and for
    /// the completion.
    fn time_us(&mut self) -> u64 {
        let start = packets();
        // SAFETY: no other reference is alive in a call of the loop.
        let replay = unsafe { REPLAY.get() };
        replay.begin(start);
        replay.free = replay.free.wrapping_add(packets().wrapping_sub(start));
        0
    }

    fn packets(&mut self) -> u64 {
        u64::from(packets())
    }

    fn relax(&mut self, _polls: u32) -> Result<(), i32> {
        Ok(())
    }
}

impl Replay {
    /// Notes the packets at the start of a command, and fills its operands.
    fn begin(&mut self, now: u32) {
        self.turn += 1;
        // Turn 0 is the call that submits, so commands start one turn later.
        let Some(turn) = self.turn.checked_sub(2).filter(|turn| *turn <= COMMANDS) else { return };
        self.turns[turn] = now.wrapping_sub(self.free);
        self.bytes[turn] = self.copied;
        for filling in self.fillings[..self.n_fillings].iter().filter(|it| it.command as usize == turn) {
            filling.write();
        }
    }
}

impl Filling {
    fn write(&self) {
        let at = self.at.cast::<u32>();
        for i in 0..self.count {
            let word = match self.kind {
                0 => {
                    let bits = i.wrapping_mul(0x9e37_79b9) ^ self.command;
                    let bits = (bits ^ bits >> 15).wrapping_mul(0x85eb_ca6b);
                    (((bits ^ bits >> 13) >> 8) as f32 / 8_388_608.0 - 1.0).to_bits()
                }
                2 => 1_f32.to_bits(),
                _ => {
                    // A row of a group starts at a random column and advances by a step that
                    // reaches every number once.
                    let (row, column) = (i / self.group, i % self.group);
                    (row.wrapping_mul(0x9e37_79b9) >> 7).wrapping_add(column * (self.limit / self.group).max(1)) % self.limit
                }
            };
            // SAFETY: inside the buffer by the request; the loop does not use it now.
            unsafe { at.add(i as usize).write_unaligned(word) };
        }
    }
}

/// Reads a graph, runs it, and writes the packets of its commands. Returns `None` if the input ends
/// early or has too much.
///
/// - `map`: returns zeroed memory
pub fn run(text: &mut impl Write, map: &dyn Fn(usize) -> *mut u8, read: &mut dyn FnMut(&mut [u8]) -> bool) -> Option<()> {
    let [n_buffers, n_inputs, n_fillings, n_commands] = words(read)?;
    if n_buffers as usize >= BUFFERS || n_inputs as usize > INPUTS {
        return None;
    }
    if n_fillings as usize > FILLINGS || n_commands as usize > COMMANDS {
        return None;
    }
    let mut places = [(0_u32, core::ptr::null_mut::<u8>(), 0_u32); BUFFERS];
    for place in &mut places[..n_buffers as usize] {
        let [number, bytes] = words(read)?;
        *place = (number, map(bytes as usize), bytes);
    }
    let find = |number: u32| places[..n_buffers as usize].iter().find(|place| place.0 == number).map(|place| place.1);
    let mut inputs = [(core::ptr::null_mut::<u8>(), core::ptr::null_mut::<u8>(), 0_usize); INPUTS];
    for input in &mut inputs[..n_inputs as usize] {
        let [buffer, offset, bytes] = words(read)?;
        let (is_zero, bytes) = (bytes & ZEROS != 0, (bytes & !ZEROS).next_multiple_of(4) as usize);
        *input = (map(bytes), find(buffer)?.wrapping_add(offset as usize), bytes);
        if !is_zero {
            // SAFETY: the memory is new and has that size.
            read(unsafe { core::slice::from_raw_parts_mut(input.0, bytes) }).then_some(())?;
        }
    }
    // SAFETY: no other reference is alive.
    let replay = unsafe { REPLAY.get() };
    replay.n_fillings = n_fillings as usize;
    for filling in &mut replay.fillings[..n_fillings as usize] {
        let [command, buffer, offset, kind, count, limit, group] = words(read)?;
        let at = find(buffer)?.wrapping_add(offset as usize);
        *filling = Filling { command, at, kind, count, limit, group };
    }
    let bytes = n_commands as usize * size_of::<Command>();
    let commands = map(bytes);
    // SAFETY: the memory is new and has that size.
    read(unsafe { core::slice::from_raw_parts_mut(commands, bytes) }).then_some(())?;
    for (memory, place) in replay.memory.iter_mut().zip(places) {
        *memory = place.1;
    }
    replay.memory[n_buffers as usize] = commands;
    let mut host = Host::start(0, 1, map, |ring| System { ring })?;
    let list_number = (0..).find(|number| find(*number).is_none())?;
    for (fd, place) in (0..).zip(&places[..n_buffers as usize]) {
        host.submit(Command::new(0, &Map { buffer: place.0, fd, bytes: place.2.into() }))?;
    }
    let list_map = Map { buffer: list_number, fd: n_buffers.cast_signed(), bytes: bytes as u64 };
    host.submit(Command::new(0, &list_map))?;
    let list = List { buffer: list_number, count: n_commands, offset: 0 };
    for _ in 0..2 {
        reset();
        for (from, to, bytes) in &inputs[..n_inputs as usize] {
            // SAFETY: inside a buffer by the request, and the loop does not use it now.
            unsafe { core::ptr::copy_nonoverlapping(*from, *to, *bytes) };
        }
        let done = host.complete(Command::new(0, &list))?;
        if done.status != STATUS_OK {
            let _ = writeln!(text, "refused {} {} {}", done.command, done.status, done.detail);
            return Some(());
        }
    }
    // SAFETY: the loop has returned.
    let replay = unsafe { REPLAY.get() };
    let count = n_commands as usize;
    let (turns, copied) = (&replay.turns[..=count], &replay.bytes[..=count]);
    for i in 0..count {
        let spent = turns[i + 1].wrapping_sub(turns[i]);
        let _ = writeln!(text, "{spent} {}", copied[i + 1].wrapping_sub(copied[i]));
    }
    Some(())
}

/// Starts a run of the list.
fn reset() {
    // SAFETY: no other reference is alive.
    let replay = unsafe { REPLAY.get() };
    (replay.turn, replay.free, replay.copied) = (0, 0, 0);
}

/// Reads words.
fn words<const N: usize>(read: &mut dyn FnMut(&mut [u8]) -> bool) -> Option<[u32; N]> {
    let mut words = [0; N];
    read(bytemuck::cast_slice_mut(&mut words)).then_some(words)
}
