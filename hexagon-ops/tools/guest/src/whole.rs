//! Packets of whole operations: the command loop reads, checks and executes lists of commands, with
//! cache operations and results, as on a device.
//!
//! A figure is the cost of an additional command of a list, with warm caches. Its activations are
//! those of an earlier command. Copies of the DMA engine cost nothing and copy nothing. Instead
//! VTCM is cleared before each list, because caches and masks are zeros, too. The matrix unit's
//! instructions count as packets.

use core::fmt::Write;
use core::ops::Range;

use bytemuck::Zeroable;
use hexagon_ops::hmx::{Form, Hmx};
use hexagon_ops::layout::{TILE_DIM, Tile, WeightType};
use hexagon_ops::ops::matmul::Dots;
use hexagon_ops::rt::cache::{self, Access};
use hexagon_ops::rt::memory::Mapped;
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::serve::{Platform, Server, State, Units};
use hexagon_ops::wire::{
    self, Attention, COLLECTED, Command, Completion, FENCE, RingHeader, List, MAGIC, Map, MatMul, PUBLISHED, RowsF32,
    RingLayout, STATUS_OK, Serve, Start, Tensor, TensorOp, VERSION, Weights,
};

use crate::bench::packets;
use crate::models;
use crate::scratch::Scratch;

/// Bytes of the only buffer, and the data at its offsets.
pub const ARENA_BYTES: usize = 48 << 20;
pub const WEIGHTS: u64 = 0;
pub const FIRST: u64 = 16 << 20;
pub const SECOND: u64 = 24 << 20;
pub const RESULT: u64 = 32 << 20;
pub const MASK: u64 = 40 << 20;
pub const INDEX: u64 = 44 << 20;
const COMMANDS: u64 = 46 << 20;

/// VTCM of a V75.
pub const VTCM_BYTES: usize = 8 << 20;
/// Slots of the ring.
const SLOTS: u32 = 4;
/// Commands of a list.
const MOST: usize = 3;
/// Side of the weights, and positions of a cache.
const SIDE: usize = 2048;
pub const POSITIONS: usize = 1024;

/// The states of a session that computes on one thread, and of one that computes on several.
static STATES: [Scratch<State>; 2] = [const { Scratch::new(State::new()) }; 2];

/// The system around the loop.
pub struct System {
    arena: *mut u8,
    ring: *mut u8,
}

impl Platform for System {
    fn map(&mut self, _fd: i32, bytes: usize) -> Result<Mapped, u32> {
        // SAFETY: new memory of that size, never unmapped, and not used while the loop runs.
        unsafe { Mapped::new(self.arena, self.arena, bytes) }.ok_or(0)
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

    fn time_us(&mut self) -> u64 {
        0
    }

    fn packets(&mut self) -> u64 {
        u64::from(packets())
    }

    fn relax(&mut self, _polls: u32) -> Result<(), i32> {
        Ok(())
    }
}

/// A host with a session.
pub struct Host<P: Platform = System> {
    server: Server<P, &'static mut [Tile], &'static mut State>,
    layout: RingLayout,
    ring: Shared,
    sequence: u64,
}

impl<P: Platform> Host<P> {
    /// Starts a session; `map` returns zeroed memory, and `system` the system around a ring.
    /// Returns `None` if the loop refuses, or if it computes on another number of threads.
    ///
    /// - `number`: 0 or 1; there is one session of each number at a time
    pub fn start(
        number: usize,
        threads: usize,
        map: &dyn Fn(usize) -> *mut u8,
        system: impl FnOnce(*mut u8) -> P,
    ) -> Option<Self> {
        let layout = RingLayout::new(SLOTS)?;
        let memory = map(layout.bytes());
        let vtcm = map(VTCM_BYTES).cast::<Tile>();
        // SAFETY: new memory of that size, which nothing else uses.
        let vtcm = unsafe { core::slice::from_raw_parts_mut(vtcm, VTCM_BYTES / size_of::<Tile>()) };
        // SAFETY: as for the server's own ring.
        let ring = unsafe { Shared::new(memory, layout.bytes()) }?;
        let header = RingHeader {
            magic: MAGIC,
            version: VERSION,
            slots: SLOTS,
            reserved: 0,
        };
        ring.write(0, &header);
        // SAFETY: packets are counted in a guest without the unit's instructions.
        let hmx = unsafe { Hmx::assume_held(Form::Scaling) };
        let units = Units {
            vtcm,
            hmx,
            threads,
            arch: 73,
        };
        // SAFETY: the only reference to this state, which belongs to no server.
        let state = unsafe { STATES[number].get() };
        state.reset();
        let mut server = Server::new(system(memory), units, state);
        let start = Start {
            version: VERSION,
            fd: 0,
            bytes: u32::try_from(layout.bytes()).ok()?,
            threads: 0,
            power: 0,
            matrix: 1,
        };
        if server.start(&start).ok()?.threads as usize != threads {
            return None;
        }
        Some(Self {
            server,
            layout,
            ring,
            sequence: 0,
        })
    }

    /// Submits one command and returns its completion; `None` if the loop ends.
    pub fn complete(&mut self, mut command: Command) -> Option<Completion> {
        self.sequence += 1;
        command.sequence = self.sequence;
        command.flags = FENCE;
        let published = self.ring.load(PUBLISHED);
        self.ring.write(self.layout.command(published), &command);
        self.ring.store(PUBLISHED, published.wrapping_add(1));
        let serve = Serve {
            idle_us: 0,
            reserved: 0,
        };
        self.server.serve(&serve).ok()?;
        let completion = self.ring.read(self.layout.completion(published));
        self.ring.store(COLLECTED, published.wrapping_add(1));
        Some(completion)
    }

    /// Submits one command and returns its packets; `None` if it fails.
    pub fn submit(&mut self, command: Command) -> Option<u64> {
        let completion = self.complete(command)?;
        (completion.status == STATUS_OK).then_some(completion.packets)
    }

    /// Clears VTCM, which copies of a guest without an engine do not fill.
    pub fn clear(&mut self) {
        self.server.units().vtcm.fill(Tile::ZERO);
    }
}

/// A host of one buffer.
pub struct Arena {
    host: Host,
    pub start: *mut u8,
}

impl Arena {
    /// As [`Host::start`], with memory of [`ARENA_BYTES`].
    pub fn new(number: usize, threads: usize, map: &dyn Fn(usize) -> *mut u8) -> Option<Self> {
        let start = map(ARENA_BYTES);
        let mut host = Host::start(number, threads, map, |ring| System { arena: start, ring })?;
        let bytes = ARENA_BYTES as u64;
        host.submit(Command::new(0, &Map { buffer: 0, fd: 0, bytes }))?;
        Some(Self { host, start })
    }

    /// As [`Host::submit`].
    pub fn submit(&mut self, command: Command) -> Option<u64> {
        self.host.submit(command)
    }

    /// Returns the packets of a list of the first `count` commands, when run again.
    fn list(&mut self, commands: &[Command; MOST], count: usize) -> Option<u64> {
        for index in 0..count {
            let at = self.start.wrapping_add(COMMANDS as usize + index * size_of::<Command>());
            // SAFETY: inside the arena, which the loop does not use now.
            unsafe { at.cast::<Command>().write(commands[index]) };
        }
        let list = List {
            buffer: 0,
            count: u32::try_from(count).ok()?,
            offset: COMMANDS,
        };
        self.host.clear();
        self.submit(Command::new(0, &list))?;
        self.host.clear();
        self.submit(Command::new(0, &list))
    }

    /// Returns the cost of an additional command of a list, in hundredths of a packet per unit.
    fn cost(&mut self, commands: &[Command; MOST], units: usize) -> Option<u64> {
        let one = self.list(commands, 1)?;
        let more = self.list(commands, MOST)?;
        let units = units as u64 * (MOST as u64 - 1);
        Some(((more.checked_sub(one)?) * 100 + units / 2) / units)
    }
}

/// Writes one line per operation: name, packets per unit; `refused` in place of them if it failed.
/// `map` returns zeroed memory.
///
/// - `only`: number of the only operation that is executed, counted from 1; 0 for all, -1 for those
///   at shapes of models, -2 for those without a matrix unit
pub fn run(write: &mut dyn FnMut(&str), map: &dyn Fn(usize) -> *mut u8, only: i32) {
    let mut text = crate::bench::Text(write);
    let Some(mut host) = Arena::new(0, 1, map) else {
        let _ = writeln!(text, "no session");
        return;
    };
    let arena = host.start;
    let mut number = 0;
    let mut line = |is_model: bool, name: core::fmt::Arguments<'_>, commands: [Command; MOST], units: usize| {
        number += 1;
        if only > 0 && only != number || only < 0 && !(is_model && only == -1) {
            return;
        }
        let _ = match host.cost(&commands, units) {
            Some(spent) => writeln!(text, "whole_{name} {}.{:02}", spent / 100, spent % 100),
            None => writeln!(text, "whole_{name} refused"),
        };
    };
    for (name, weight, rows) in [
        ("q4_0", WeightType::Q4_0, &[1, 2, 4, 8, 32, 128, 512][..]),
        ("q8_0", WeightType::Q8_0, &[1, 4, 32, 128]),
        ("f16", WeightType::F16, &[1, 4, 32, 128]),
    ] {
        for m in rows {
            // Two activations are used in turn, so that no product finds its activations already
            // quantized.
            let commands = [FIRST, SECOND, FIRST].map(|act| mul_mat(weight, *m, act));
            let tiles = SIDE / TILE_DIM * SIDE / TILE_DIM;
            line(false, format_args!("mul_mat_{name}_m{m}"), commands, tiles);
        }
    }
    let [first, second, third] = [0, 1, 2].map(tensor_ops);
    for (((name, a), (_, b)), (_, c)) in first.into_iter().zip(second).zip(third) {
        line(false, format_args!("{name}"), [a, b, c].map(|op| Command::new(0, &op)), 1);
    }
    for (name, cache, head, heads, per, rows) in [
        ("f16_h64_1on1_r1", wire::TYPE_F16, 64, 1, 1, 1),
        ("f16_h64_32on8_r1", wire::TYPE_F16, 64, 32, 4, 1),
        ("f16_h64_1on1_r32", wire::TYPE_F16, 64, 1, 1, 32),
        ("f16_h64_4on1_r512", wire::TYPE_F16, 64, 4, 4, 512),
        ("f16_h128_1on1_r1", wire::TYPE_F16, 128, 1, 1, 1),
        ("f16_h128_32on8_r1", wire::TYPE_F16, 128, 32, 4, 1),
        ("f16_h128_1on1_r32", wire::TYPE_F16, 128, 1, 1, 32),
        ("f16_h128_4on1_r512", wire::TYPE_F16, 128, 4, 4, 512),
        ("f16_h96_32on8_r7", wire::TYPE_F16, 96, 32, 4, 7),
        ("f16_h256_32on8_r1", wire::TYPE_F16, 256, 32, 4, 1),
        ("q8_0_h64_1on1_r1", wire::TYPE_Q8_0, 64, 1, 1, 1),
    ] {
        let commands = [0, 1, 2].map(|layer| {
            Command::new(0, &attention(layer, cache, head, [heads, heads / per, rows]))
        });
        line(false, format_args!("attention_{name}"), commands, POSITIONS * heads);
    }
    for (name, weight) in [("q4_0", WeightType::Q4_0), ("q8_0", WeightType::Q8_0)] {
        let of = |act| product_by(Dots::TwoDigits, weight, [1, SIDE, SIDE], act);
        let tiles = SIDE / TILE_DIM * SIDE / TILE_DIM;
        line(false, format_args!("mul_mat_{name}_m1_16_bits"), [FIRST, SECOND, FIRST].map(of), tiles);
    }
    models::fill(arena);
    let [first, second, third] = [0, 1, 2].map(models::operations);
    for (((name, a), (_, b)), (_, c)) in first.into_iter().zip(second).zip(third) {
        line(true, format_args!("{name}"), [a, b, c].map(|op| Command::new(0, &op)), 1);
    }
    if cfg!(target_feature = "hvxv73") {
        return;
    }
    // The chips of these libraries may lack a matrix unit.
    host.host.server.units().hmx.leave_alone();
    for (name, weight, m) in [
        ("q4_0", WeightType::Q4_0, 32),
        ("q4_0", WeightType::Q4_0, 512),
        ("q8_0", WeightType::Q8_0, 32),
        ("q8_0", WeightType::Q8_0, 512),
        ("f16", WeightType::F16, 32),
    ] {
        number += 1;
        if only > 0 && only != number || only == -1 {
            continue;
        }
        let commands = [FIRST, SECOND, FIRST].map(|act| mul_mat(weight, m, act));
        let tiles = SIDE / TILE_DIM * SIDE / TILE_DIM;
        let name = format_args!("whole_mul_mat_{name}_m{m}_on_vectors");
        let _ = match host.cost(&commands, tiles) {
            Some(spent) => writeln!(text, "{name} {}.{:02}", spent / 100, spent % 100),
            None => writeln!(text, "{name} refused"),
        };
    }
}

/// A product of `m` rows.
fn mul_mat(weight: WeightType, m: usize, act: u64) -> Command {
    product(weight, [m, SIDE, SIDE], act)
}

/// A product of M rows with K x N weights.
pub fn product(weight: WeightType, shape: [usize; 3], act: u64) -> Command {
    product_by(Dots::TwoRows, weight, shape, act)
}

/// The same with a choice of dot products.
fn product_by(dots: Dots, weight: WeightType, [m, k, n]: [usize; 3], act: u64) -> Command {
    let rows = |offset, row: usize| RowsF32 {
        buffer: 0,
        reserved: 0,
        offset,
        strides: [4 * row as u64, (4 * row * m) as u64, (4 * row * m) as u64],
    };
    let body = MatMul {
        weights: Weights {
            buffer: 0,
            layout: weight.layout_id().0,
            offset: WEIGHTS,
            k: k as u32,
            n: n as u32,
            slices: [1; 2],
        },
        act: rows(act, k),
        dst: rows(RESULT, n),
        m: m as u32,
        planes: [1; 2],
        dots: dots as u32,
        epilogue: Zeroable::zeroed(),
    };
    Command::new(0, &body)
}

/// A tensor without gaps.
pub fn tensor(dtype: u32, offset: u64, ne: [usize; 4]) -> Tensor {
    let (block, bytes) = match dtype {
        wire::TYPE_F16 => (1, 2),
        wire::TYPE_I64 => (1, 8),
        wire::TYPE_Q8_0 => (32, 34),
        _ => (1, 4),
    };
    let row = ne[0] / block * bytes;
    Tensor {
        buffer: 0,
        dtype,
        offset,
        ne: ne.map(|n| n as u32),
        nb: [bytes, row, row * ne[1], row * ne[1] * ne[2]].map(|n| n as u64),
    }
}

/// Bytes from the weights, or the caches, of a layer to those of the next.
pub const LAYER: u64 = 2 << 20;

/// An operation of these parameters, by their indices, and tensors.
pub fn tensor_op(kernel: u32, params: &[(usize, u32)], dst: Tensor, src: &[Tensor]) -> TensorOp {
    let mut op = TensorOp {
        kernel,
        dst,
        ..Zeroable::zeroed()
    };
    params.iter().for_each(|(at, word)| op.params[*at] = *word);
    op.src[..src.len()].copy_from_slice(src);
    op
}

/// Operations on tensors, one row unless the name has another number; with 32 rows, all are written
/// to one cell. Results and activations are those of an earlier command, but each layer has its
/// weights and caches, which are new in the submission.
fn tensor_ops(layer: u64) -> [(&'static str, TensorOp); 27] {
    use wire::{TYPE_F16 as F16, TYPE_F32 as F32, TYPE_I32 as I32, TYPE_I64 as I64};
    let op = tensor_op;
    let row = |offset, n| tensor(F32, offset, [n, 1, 1, 1]);
    let two = |kernel, n| op(kernel, &[], row(RESULT, n), &[row(FIRST, n), row(SECOND, n)]);
    let rows = |offset, n| tensor(F32, offset, [n, 32, 1, 1]);
    let two_rows = |kernel, n| op(kernel, &[], rows(RESULT, n), &[rows(FIRST, n), rows(SECOND, n)]);
    let concat = |a: [usize; 4], b: [usize; 4]| {
        let joined = [a[0] + b[0], a[1], 1, 1];
        op(wire::KERNEL_CONCAT, &[], tensor(F32, RESULT, joined), &[tensor(F32, FIRST, a), tensor(F32, SECOND, b)])
    };
    let norm = |n| {
        let eps = (0, 1e-6_f32.to_bits());
        let weights = row(SECOND + layer * LAYER, n);
        op(wire::KERNEL_RMS_NORM, &[eps], row(RESULT, n), &[row(FIRST, n), weights])
    };
    let angles = |n, mode| {
        [
            (1, n),
            (2, mode),
            (5, 1e4_f32.to_bits()),
            (6, 1_f32.to_bits()),
            (8, 1_f32.to_bits()),
            (9, 32_f32.to_bits()),
            (10, 1_f32.to_bits()),
        ]
    };
    let position = tensor(I32, INDEX, [1; 4]);
    let rope = |n: usize, heads, mode| {
        let at = |offset| tensor(F32, offset, [n, heads, 1, 1]);
        op(wire::KERNEL_ROPE, &angles(n as u32, mode), at(RESULT), &[at(FIRST), position])
    };
    let number = tensor(I64, INDEX, [1; 4]);
    let soft_max = |mask: Tensor| {
        let scale = (0, 1_f32.to_bits());
        op(wire::KERNEL_SOFT_MAX, &[scale], row(RESULT, POSITIONS), &[row(FIRST, POSITIONS), mask])
    };
    let copy = |ne| op(wire::KERNEL_COPY, &[], tensor(F16, RESULT, ne), &[tensor(F32, FIRST, ne)]);
    [
        ("rms_norm_mul_576", norm(576)),
        ("rms_norm_mul_2048", norm(2048)),
        ("rms_norm_mul_4096", norm(4096)),
        ("add_576", two(wire::KERNEL_ADD, 576)),
        ("add_2048", two(wire::KERNEL_ADD, 2048)),
        ("mul_2048", two(wire::KERNEL_MUL, 2048)),
        ("swiglu_1536", two(wire::KERNEL_SWIGLU, 1536)),
        ("swiglu_8192", two(wire::KERNEL_SWIGLU, 8192)),
        ("rope_neox_64x9", rope(64, 9, 2)),
        ("rope_neox_64x32", rope(64, 32, 2)),
        ("rope_neox_128x32", rope(128, 32, 2)),
        ("rope_norm_64x32", rope(64, 32, 0)),
        (
            "rope_set_rows_64x9",
            op(
                wire::KERNEL_ROPE_SET_ROWS,
                &angles(64, 2),
                tensor(F16, RESULT + layer * LAYER, [64, 9, 8, 1]),
                &[tensor(F32, FIRST, [64, 9, 1, 1]), position, number],
            ),
        ),
        ("soft_max_1024_mask_f16", soft_max(tensor(F16, MASK, [POSITIONS, 1, 1, 1]))),
        ("soft_max_1024_mask_f32", soft_max(row(MASK, POSITIONS))),
        ("soft_max_1024", soft_max(Zeroable::zeroed())),
        (
            "set_rows_f16_512",
            op(
                wire::KERNEL_SET_ROWS,
                &[],
                tensor(F16, RESULT + layer * LAYER, [512, 8, 1, 1]),
                &[row(FIRST, 512), number],
            ),
        ),
        (
            "get_rows_f16_2048",
            op(
                wire::KERNEL_GET_ROWS,
                &[],
                row(RESULT, 2048),
                &[tensor(F16, FIRST + layer * LAYER, [2048, 8, 1, 1]), position],
            ),
        ),
        ("copy_f16_2048", copy([2048, 1, 1, 1])),
        ("copy_f16_64x32", copy([64, 32, 1, 1])),
        // The keys of 16 heads with their rotated parts appended, as in DeepSeek's models.
        ("concat_128_64x16", concat([128, 16, 1, 1], [64, 16, 1, 1])),
        // The latest inputs of a convolution over 2048 channels, and those of a new token.
        ("concat_3_1x2048", concat([3, 2048, 1, 1], [1, 2048, 1, 1])),
        (
            "ssm_conv_4x2048",
            op(
                wire::KERNEL_SSM_CONV,
                &[],
                row(RESULT, 2048),
                &[tensor(F32, FIRST, [4, 2048, 1, 1]), tensor(F32, SECOND, [4, 2048, 1, 1])],
            ),
        ),
        ("add_2048_32_rows", two_rows(wire::KERNEL_ADD, 2048)),
        ("swiglu_2048_32_rows", two_rows(wire::KERNEL_SWIGLU, 2048)),
        ("rms_norm_mul_2048_32_rows", {
            let eps = (0, 1e-6_f32.to_bits());
            let weights = row(SECOND + layer * LAYER, 2048);
            op(wire::KERNEL_RMS_NORM, &[eps], rows(RESULT, 2048), &[rows(FIRST, 2048), weights])
        }),
        (
            "rope_set_rows_64x9_32_rows",
            op(
                wire::KERNEL_ROPE_SET_ROWS,
                &angles(64, 2),
                tensor(F16, RESULT + layer * LAYER, [64, 9, 32, 1]),
                &[
                    tensor(F32, FIRST, [64, 9, 32, 1]),
                    tensor(I32, INDEX, [32, 1, 1, 1]),
                    tensor(I64, INDEX + 4096, [32, 1, 1, 1]),
                ],
            ),
        ),
    ]
}

/// Attention over [`POSITIONS`]: query heads, heads of keys and values, rows.
pub fn attention(layer: u64, cache: u32, head: usize, [heads, kv, rows]: [usize; 3]) -> Attention {
    // A cache stores all heads of a position next to each other.
    let cached = |offset| {
        let mut tensor = tensor(cache, offset, [head, POSITIONS, kv, 1]);
        let one = tensor.nb[1];
        tensor.nb[1] = one * kv as u64;
        tensor.nb[2] = one;
        tensor
    };
    Attention {
        scale: 0.125_f32.to_bits(),
        max_bias: 0,
        softcap: 0,
        reserved: 0,
        dst: tensor(wire::TYPE_F32, RESULT, [head, heads, rows, 1]),
        q: tensor(wire::TYPE_F32, FIRST, [head, rows, heads, 1]),
        k: cached(WEIGHTS + layer * LAYER),
        v: cached(SECOND + layer * LAYER),
        mask: tensor(wire::TYPE_F16, MASK, [POSITIONS, rows, 1, 1]),
        sinks: Zeroable::zeroed(),
    }
}
