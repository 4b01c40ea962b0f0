//! Feeds arbitrary bytes to the DSP's command loop, as a broken or hostile host would.
//!
//! ```text
//! input = { record }    record = kind, then
//!   0..=2  command: 512 bytes as they are, published (missing bytes are zero)
//!   3      word: offset in the first 1 KiB of the ring, value
//!   4..=7  a right product of MUL_MAT (4, 5) or MUL_MAT_ID (6, 7) with `count` words of its body replaced
//!   8..=11 a right operation on tensors of a kernel and a type, the same
//!   12, 13 a right attention of up to 16 queries, the same
//! ```
//!
//! A command of kind 4 and more may be one of two alike in a list. After each record the ring is
//! served. Four buffers are mapped; the first two hold zeros or any numbers, and the fourth small
//! integers, which choose experts and rows. `cargo fuzz run commands` in this folder's parent;
//! without cargo-fuzz, see the README.md there.

#![no_main]

use std::cell::Cell;
use std::ops::Range;

use hexagon_ops::hmx::Hmx;
use hexagon_ops::layout::{Tile, WeightType};
use hexagon_ops::rt::cache::Access;
use hexagon_ops::rt::memory::Mapped;
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::serve::{MAP_REFUSED, Platform, Server, State, Units};
use hexagon_ops::wire::{
    self, COLLECTED, COMPLETED, Command, ERROR_CALL, ERROR_RING, Epilogue, FENCE, List, MAGIC, Map,
    MatMul, MatMulId, PUBLISHED, RowsF32, RingHeader, RingLayout, Serve, Start, VERSION, Weights,
};
use libfuzzer_sys::fuzz_target;

#[path = "../../hexagon-ops/tests/serve/seed.rs"]
mod seed;
use seed::BYTES;

const SLOTS: u32 = 4;
const BUFFERS: usize = 4;
const RING_FD: i32 = 100;

/// Memory of four buffers and the ring, kept from run to run.
struct Memory {
    buffers: [*mut u8; BUFFERS],
    ring: *mut u8,
}

/// Tiles that stay.
fn leak(bytes: usize) -> *mut u8 {
    let tiles = vec![Tile::ZERO; bytes.div_ceil(size_of::<Tile>())];
    Box::leak(tiles.into_boxed_slice()).as_mut_ptr().cast()
}

fn layout() -> RingLayout {
    RingLayout::new(SLOTS).expect("a power of two")
}

struct System {
    buffers: [*mut u8; BUFFERS],
    ring: *mut u8,
    now: u64,
}

impl Platform for System {
    fn map(&mut self, fd: i32, bytes: usize) -> Result<Mapped, u32> {
        let base = usize::try_from(fd).ok().and_then(|i| self.buffers.get(i));
        let base = *base.filter(|_| bytes <= BYTES).ok_or(MAP_REFUSED)?;
        // SAFETY: the memory has this length, is never freed, and only the loop uses it.
        unsafe { Mapped::new(base, base, bytes) }.ok_or(MAP_REFUSED)
    }

    fn unmap(&mut self, _mapped: Mapped) {}

    fn map_ring(&mut self, fd: i32, bytes: usize) -> Option<Shared> {
        if fd != RING_FD || bytes > layout().bytes() {
            return None;
        }
        // SAFETY: the memory has this length, is never freed, and is accessed by words only.
        unsafe { Shared::new(self.ring, bytes) }
    }

    fn invalidate(&mut self, mapped: &Mapped, range: Range<usize>, _access: Access) {
        assert!(range.start < range.end && range.end <= mapped.bytes());
    }

    fn clean(&mut self, mapped: &Mapped, range: Range<usize>, _access: Access) {
        assert!(range.start < range.end && range.end <= mapped.bytes());
    }

    fn time_us(&mut self) -> u64 {
        // In large steps, so that waiting for room ends soon.
        self.now += 1000;
        self.now
    }

    fn packets(&mut self) -> u64 {
        0
    }

    fn relax(&mut self, _polls: u32) -> Result<(), i32> {
        Ok(())
    }
}

/// Takes bytes from the front; zeros when there are none left.
fn take<const N: usize>(data: &mut &[u8]) -> [u8; N] {
    let count = N.min(data.len());
    let (now, rest) = data.split_at(count);
    *data = rest;
    let mut bytes = [0; N];
    bytes[..count].copy_from_slice(now);
    bytes
}

fn word(data: &mut &[u8]) -> u32 {
    u32::from_le_bytes(take(data))
}

/// Right products to start from.
fn product(kind: u8, weight: u8) -> Command {
    let all = WeightType::ALL;
    let weight = all[usize::from(weight) % all.len()];
    let weights = Weights {
        buffer: 0,
        layout: weight.layout_id().0,
        offset: 0,
        k: weight.block_elems() as u32,
        n: 32,
        slices: [1, 1],
    };
    let rows_f32 = |buffer, strides| RowsF32 {
        buffer,
        reserved: 0,
        offset: 0,
        strides,
    };
    let single = MatMul {
        weights,
        act: rows_f32(1, [128, 0, 0]),
        dst: rows_f32(2, [128, 0, 0]),
        m: 4,
        planes: [1, 1],
        dots: 2,
        epilogue: Epilogue {
            kernel: wire::KERNEL_SWIGLU,
            swapped: 1,
            other: rows_f32(1, [0, 0, 0]),
        },
    };
    if kind < 3 {
        return Command::new(0, &single);
    }
    if kind < 6 {
        return Command::new(
            0,
            &MatMul {
                weights,
                act: rows_f32(1, [128, 512, 1024]),
                dst: rows_f32(2, [128, 512, 1024]),
                m: 4,
                planes: [2, 1],
                epilogue: bytemuck::Zeroable::zeroed(),
                ..single
            },
        );
    }
    Command::new(
        0,
        &MatMulId {
            weights,
            act: rows_f32(1, [128, 256, 0]),
            dst: rows_f32(2, [128, 256, 0]),
            ids: rows_f32(3, [8, 0, 0]),
            slots: 2,
            act_slots: 2,
            tokens: 3,
            dots: 2,
        },
    )
}

fn publish(ring: &Shared, command: &Command) {
    let published = ring.load(PUBLISHED);
    ring.write(layout().command(published), command);
    ring.store(PUBLISHED, published.wrapping_add(1));
}

fn run(memory: &Memory, mut data: &[u8]) {
    let mut numbers = data.iter().fold(data.len() as u32 % 3, |all, byte| {
        all.wrapping_mul(0x0101_0101) ^ u32::from(*byte)
    });
    let is_zero = numbers % 2 == 0;
    for (index, buffer) in memory.buffers.into_iter().enumerate() {
        // SAFETY: the buffer has this length, and nothing uses it now.
        let words = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u32>(), BYTES / 4) };
        for word in words {
            numbers = numbers.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *word = match index {
                _ if is_zero => 0,
                0 | 1 => numbers.rotate_left(7),
                _ => numbers >> 30,
            };
        }
    }
    let bytes = layout().bytes();
    // SAFETY: as above.
    unsafe { memory.ring.write_bytes(0, bytes) };
    // SAFETY: the memory has this length, is never freed, and is accessed by words only.
    let ring = unsafe { Shared::new(memory.ring, bytes) }.expect("aligned");
    ring.write(
        0,
        &RingHeader {
            magic: MAGIC,
            version: VERSION,
            slots: SLOTS,
            reserved: 0,
        },
    );
    let vtcm = vec![Tile::ZERO; 128];
    let units = Units {
        hmx: Hmx::new(&vtcm),
        vtcm,
        threads: 1,
        arch: 75,
    };
    let system = System {
        buffers: memory.buffers,
        ring: memory.ring,
        now: 0,
    };
    let mut server = Server::new(system, units, Box::<State>::default());
    let start = Start {
        version: VERSION,
        fd: RING_FD,
        bytes: u32::try_from(bytes).expect("small"),
        threads: 1,
        power: 0,
        matrix: 1,
    };
    server.start(&start).expect("the ring is in order");
    let serve = Serve {
        idle_us: 1,
        reserved: 0,
    };
    let mut sequence = 0;
    for (buffer, fd) in (0..4).zip(0..4) {
        let map = Map {
            buffer,
            fd,
            bytes: BYTES as u64,
        };
        sequence += 1;
        let mut command = Command::new(sequence, &map);
        command.flags = FENCE;
        publish(&ring, &command);
        server.serve(&serve).expect("maps are in order");
        ring.store(COLLECTED, ring.load(COMPLETED));
    }
    while !data.is_empty() {
        let [kind] = take(&mut data);
        let is_listed = kind / 14 % 4 == 3;
        match kind % 14 {
            0..=2 => publish(&ring, bytemuck::from_bytes(&Aligned(take(&mut data)).0)),
            3 => {
                let at = word(&mut data) as usize % 256 * 4;
                ring.store(at, word(&mut data));
            }
            kind => {
                sequence += 1;
                let [weight, count] = take(&mut data);
                let mut command = if kind < 8 {
                    product(kind, weight)
                } else if kind > 11 {
                    Command::new(0, &seed::attention(u32::from(weight % 16) + 1))
                } else {
                    let dtype = u32::from(count / 4) % seed::TYPES;
                    let index = usize::from(weight) % wire::OPERATIONS.len();
                    seed::command(index, dtype)
                };
                for _ in 0..count % 4 {
                    let [at] = take(&mut data);
                    let at = usize::from(at) % (command.body.len() / 4) * 4;
                    command.body[at..at + 4].copy_from_slice(&take::<4>(&mut data));
                }
                if is_listed {
                    let offset = BYTES - 2 * size_of::<Command>();
                    let list = memory.buffers[3]
                        .wrapping_add(offset)
                        .cast::<[Command; 2]>();
                    // SAFETY: the end of the buffer, which is aligned, and nothing uses it now.
                    unsafe { list.write([command; 2]) };
                    let list = List {
                        buffer: 3,
                        count: 2,
                        offset: offset as u64,
                    };
                    command = Command::new(0, &list);
                }
                (command.sequence, command.flags) = (sequence, FENCE);
                publish(&ring, &command);
            }
        }
        match server.serve(&serve) {
            Ok(()) => {}
            Err(ERROR_RING | ERROR_CALL) => return,
            Err(code) => panic!("code {code:#x}"),
        }
        ring.store(COLLECTED, ring.load(COMPLETED));
    }
}

/// Bytes of a command, aligned as one.
#[repr(C, align(8))]
struct Aligned([u8; size_of::<Command>()]);

thread_local! {
    static MEMORY: Cell<Option<&'static Memory>> = const { Cell::new(None) };
}

fuzz_target!(|data: &[u8]| {
    let memory = MEMORY.get().unwrap_or_else(|| {
        Box::leak(Box::new(Memory {
            buffers: [0; BUFFERS].map(|_| leak(BYTES)),
            ring: leak(layout().bytes()),
        }))
    });
    MEMORY.set(Some(memory));
    run(memory, data);
});
