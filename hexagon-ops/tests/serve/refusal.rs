//! Every field of every command, made wrong alone, is refused with its own detail, and nothing is
//! written.

use hexagon_ops::layout::WeightType;
use hexagon_ops::serve::{self, MAP_REFUSED, MAP_SIZE, describe};
use hexagon_ops::wire::{
    self, Body, Command, MAX_BUFFERS, Map, MatMul, MatMulId, Nop, RowsF32, STATUS_BAD_COMMAND,
    STATUS_MAP_FAILED, STATUS_NO_VTCM, STATUS_OK, Unmap,
};

use crate::driver::Host;

/// Bytes of each buffer of [`good`].
const BYTES: usize = 1 << 16;

fn rows_f32(buffer: u32, offset: u64, strides: [u64; 3]) -> RowsF32 {
    RowsF32 {
        buffer,
        reserved: 0,
        offset,
        strides,
    }
}

/// Two commands that are right, over three buffers: weights and choices, activations, results.
fn good(host: &mut Host) -> (MatMul, MatMulId) {
    let [(w, _), (act, _), (dst, memory)] = [0; 3].map(|_| host.buffer(BYTES));
    memory.put(0, &[7.0_f32; BYTES / 4]);
    let weights = wire::Weights {
        buffer: w,
        layout: WeightType::Q4_0.layout_id().0,
        offset: 128,
        k: 64,
        n: 32,
        slices: [2, 1],
    };
    let product = MatMul {
        weights,
        act: rows_f32(act, 8, [256, 1024, 4096]),
        dst: rows_f32(dst, 8, [128, 512, 2048]),
        m: 3,
        planes: [4, 2],
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let experts = MatMulId {
        weights,
        act: rows_f32(act, 8, [256, 1024, 0]),
        dst: rows_f32(dst, 8, [128, 512, 0]),
        ids: rows_f32(w, 32768, [16, 0, 0]),
        slots: 4,
        act_slots: 2,
        tokens: 3,
        dots: 2,
    };
    (product, experts)
}

/// Runs a command that must be refused with `detail`.
fn refused<B: Body>(host: &mut Host, body: &B, detail: u32, what: &str) {
    let completion = host.run(&[Command::new(0, body)]);
    assert_eq!(
        (completion.status, completion.detail, completion.done),
        (STATUS_BAD_COMMAND, detail, 0),
        "{what}: {}",
        describe(completion.status, completion.detail)
    );
}

#[test]
fn wrong_fields_of_products_are_refused() {
    let mut host = Host::new();
    let (product, experts) = good(&mut host);
    assert_eq!(host.run(&[Command::new(0, &product)]).status, STATUS_OK);
    assert_eq!(host.run(&[Command::new(0, &experts)]).status, STATUS_OK);

    type Change<B> = fn(&mut B);
    let both_weights: [(u32, &str, Change<wire::Weights>); 15] = [
        (serve::NUMBER, "number", |w| w.buffer = MAX_BUFFERS),
        (serve::NUMBER, "huge number", |w| w.buffer = u32::MAX),
        (serve::UNMAPPED, "unmapped", |w| w.buffer = 77),
        (serve::LAYOUT, "layout", |w| w.layout += 1),
        (serve::LAYOUT, "no layout", |w| w.layout = 0),
        (serve::ALIGNMENT, "offset", |w| w.offset += 64),
        (serve::BOUNDS, "far offset", |w| w.offset = 1 << 40),
        (serve::BOUNDS, "wrapping offset", |w| {
            w.offset = u64::MAX - 127
        }),
        (serve::SHAPE, "k 0", |w| w.k = 0),
        (serve::SHAPE, "half a block", |w| w.k = 48),
        (serve::SHAPE, "huge k", |w| w.k = !31),
        (serve::SHAPE, "n 0", |w| w.n = 0),
        (serve::SHAPE, "slices 0", |w| w.slices[0] = 0),
        (serve::BOUNDS, "huge n", |w| w.n = u32::MAX),
        (serve::BOUNDS, "end of the last matrix", |w| {
            w.offset = BYTES as u64 - 128
        }),
    ];
    for (detail, what, change) in both_weights {
        let mut wrong = product;
        change(&mut wrong.weights);
        refused(&mut host, &wrong, detail, what);
        let mut wrong = experts;
        change(&mut wrong.weights);
        refused(&mut host, &wrong, detail, what);
    }
    let products: [(u32, &str, Change<MatMul>); 20] = [
        (serve::DOTS, "dots", |b| b.dots = 4),
        (serve::RESERVED, "act reserved", |b| b.act.reserved = 1),
        (serve::RESERVED, "dst reserved", |b| b.dst.reserved = 1),
        (serve::PLANES, "planes 0", |b| b.planes[1] = 0),
        (serve::PLANES, "planes 3 of 2", |b| b.planes[0] = 3),
        (serve::BOUNDS, "slices", |b| {
            b.weights.slices = [u32::MAX, u32::MAX];
            b.planes = b.weights.slices;
        }),
        (serve::ALIGNMENT, "act offset", |b| b.act.offset += 2),
        (serve::ALIGNMENT, "dst offset", |b| b.dst.offset += 1),
        (serve::ALIGNMENT, "act stride", |b| b.act.strides[0] += 2),
        (serve::ALIGNMENT, "dst stride", |b| b.dst.strides[2] += 1),
        (serve::BOUNDS, "act stride", |b| b.act.strides[2] = 1 << 20),
        (serve::BOUNDS, "act stride that wraps", |b| {
            b.act.strides = [!3; 3]
        }),
        (serve::BOUNDS, "dst offset", |b| b.dst.offset = 1 << 16),
        (serve::BOUNDS, "rows", |b| b.m = u32::MAX),
        (serve::ROWS, "dst stride 0", |b| b.dst.strides[1] = 0),
        (serve::ROWS, "dst rows meet", |b| b.dst.strides[0] = 124),
        (serve::ROWS, "dst planes meet", |b| b.dst.strides[1] = 320),
        (serve::UNMAPPED, "act", |b| b.act.buffer = 100),
        (serve::NUMBER, "dst", |b| b.dst.buffer = 1 << 30),
        (serve::OVERLAP, "in place", |b| {
            b.dst = rows_f32(b.act.buffer, 1024, b.dst.strides)
        }),
    ];
    for (detail, what, change) in products {
        let mut wrong = product;
        change(&mut wrong);
        refused(&mut host, &wrong, detail, what);
    }
    let choices: [(u32, &str, Change<MatMulId>); 13] = [
        (serve::DOTS, "dots", |b| b.dots = 4),
        (serve::RESERVED, "ids reserved", |b| b.ids.reserved = 1),
        (serve::PLANES, "slices in dimension 3", |b| {
            b.weights.slices[1] = 2
        }),
        (serve::SLOTS, "slots 0", |b| b.slots = 0),
        (serve::SLOTS, "act_slots 0", |b| b.act_slots = 0),
        (serve::SLOTS, "act_slots 3 of 4", |b| b.act_slots = 3),
        (serve::SLOTS, "too many slots", |b| b.slots = 1 << 20),
        (serve::UNMAPPED, "ids", |b| b.ids.buffer = 55),
        (serve::BOUNDS, "ids", |b| b.ids.offset = BYTES as u64 - 4),
        (serve::BOUNDS, "tokens", |b| b.tokens = 1 << 20),
        (serve::ALIGNMENT, "ids", |b| b.ids.offset += 1),
        (serve::OVERLAP, "ids", |b| {
            b.ids = rows_f32(b.dst.buffer, 256, [16, 0, 0])
        }),
        (serve::ROWS, "dst", |b| b.dst.strides[1] = 128),
    ];
    for (detail, what, change) in choices {
        let mut wrong = experts;
        change(&mut wrong);
        refused(&mut host, &wrong, detail, what);
    }
    // The original command is still accepted.
    assert_eq!(host.run(&[Command::new(0, &product)]).status, STATUS_OK);
}

/// The host checks with these functions, before it sends a command, whether its operands overlap or
/// are not aligned, because a refusal by the DSP would end the session.
#[test]
fn the_host_is_told_of_products_that_the_dsp_would_refuse() {
    let mut host = Host::new();
    let (product, experts) = good(&mut host);
    assert_eq!(serve::accepts_product(&product), Ok(()));
    assert_eq!(serve::accepts_experts(&experts), Ok(()));

    type Change<B> = fn(&mut B);
    let products: [(u32, Change<MatMul>); 9] = [
        (serve::RESERVED, |b| b.act.reserved = 1),
        (serve::RESERVED, |b| b.dst.reserved = 1),
        (serve::ALIGNMENT, |b| b.act.offset += 2),
        (serve::ALIGNMENT, |b| b.dst.offset += 1),
        (serve::ALIGNMENT, |b| b.dst.strides[2] += 1),
        (serve::BOUNDS, |b| b.act.strides = [!3; 3]),
        (serve::ROWS, |b| b.dst.strides[0] = 124),
        (serve::ROWS, |b| b.dst.strides[1] = 320),
        (serve::OVERLAP, |b| b.dst.buffer = b.act.buffer),
    ];
    for (number, (detail, change)) in products.into_iter().enumerate() {
        let mut wrong = product;
        change(&mut wrong);
        let what = format!("product {number}");
        refused(&mut host, &wrong, detail, &what);
        let told = serve::accepts_product(&wrong).unwrap_err();
        assert_eq!(
            (told.status, told.detail),
            (STATUS_BAD_COMMAND, detail),
            "{what}"
        );
    }
    let choices: [(u32, Change<MatMulId>); 6] = [
        (serve::RESERVED, |b| b.ids.reserved = 1),
        (serve::ALIGNMENT, |b| b.ids.offset += 1),
        (serve::ALIGNMENT, |b| b.act.offset += 2),
        (serve::ROWS, |b| b.dst.strides[1] = 128),
        (serve::OVERLAP, |b| {
            b.ids = rows_f32(b.dst.buffer, 256, [16, 0, 0])
        }),
        (serve::OVERLAP, |b| b.dst.buffer = b.act.buffer),
    ];
    for (number, (detail, change)) in choices.into_iter().enumerate() {
        let mut wrong = experts;
        change(&mut wrong);
        let what = format!("experts {number}");
        refused(&mut host, &wrong, detail, &what);
        let told = serve::accepts_experts(&wrong).unwrap_err();
        assert_eq!(
            (told.status, told.detail),
            (STATUS_BAD_COMMAND, detail),
            "{what}"
        );
    }
    // An operand without rows is not checked.
    let mut none = product;
    (none.m, none.dst.offset) = (0, 1);
    assert_eq!(serve::accepts_product(&none), Ok(()));

    // Places directly after the activations, and directly before them.
    const ACT: u64 = 3 * 1024 + 2 * 256 + 4096 + 4 * 64;
    const DST: u64 = 3 * 512 + 2 * 128 + 2048 + 4 * 32;
    for (offset, is_right) in [
        (8 + DST + ACT, true),
        (8 + DST + ACT - 4, false),
        (8, true),
        (12, false),
    ] {
        let mut near = product;
        near.act.offset = 8 + DST;
        (near.dst.buffer, near.dst.offset) = (near.act.buffer, offset);
        assert_eq!(
            serve::accepts_product(&near).is_ok(),
            is_right,
            "at {offset}"
        );
        let answer = host.run(&[Command::new(0, &near)]);
        assert_eq!(answer.status == STATUS_OK, is_right, "at {offset}");
    }
}

#[test]
fn experts_that_do_not_exist_are_refused() {
    let mut host = Host::new();
    let (_, experts) = good(&mut host);
    let (ids, memory) = host.buffer(4096);
    let mut wrong = experts;
    wrong.ids = rows_f32(ids, 0, [16, 0, 0]);
    for id in [2, -1, i32::MAX, i32::MIN] {
        memory.put(0, &[0_i32; 12]);
        memory.put(4 * 11, &[id]);
        refused(&mut host, &wrong, serve::EXPERT, &format!("expert {id}"));
    }
    memory.put(4 * 11, &[1_i32]);
    assert_eq!(host.run(&[Command::new(0, &wrong)]).status, STATUS_OK);
}

#[test]
fn wrong_commands_and_maps_are_refused() {
    let mut host = Host::new();
    let nop = Command::new(0, &Nop { reserved: 0 });
    assert_eq!(host.run(&[nop]).status, STATUS_OK);
    let mut check = |command: Command, status: u32, detail: u32, what: &str| {
        let completion = host.run(&[command]);
        assert_eq!(
            (completion.status, completion.detail),
            (status, detail),
            "{what}"
        );
    };
    let bad = STATUS_BAD_COMMAND;
    check(
        Command {
            op: wire::OP_WIDE + 1,
            ..nop
        },
        bad,
        serve::OPERATION,
        "operation",
    );
    check(
        Command {
            op: u32::MAX,
            ..nop
        },
        bad,
        serve::OPERATION,
        "operation",
    );
    check(Command { flags: 4, ..nop }, bad, serve::FLAGS, "flags");
    let mut dirty = nop;
    dirty.body[wire::BODY_BYTES - 1] = 1;
    check(dirty, bad, serve::RESERVED, "bytes behind the body");
    let reserved = Command::new(0, &Nop { reserved: 1 });
    check(reserved, bad, serve::RESERVED, "reserved");

    let map = |buffer, fd, bytes| Command::new(0, &Map { buffer, fd, bytes });
    let unmap = |buffer, reserved| Command::new(0, &Unmap { buffer, reserved });
    let (fd, _) = host.file(8192);
    let mut check = |command: Command, status: u32, detail: u32, what: &str| {
        let completion = host.run(&[command]);
        assert_eq!(
            (completion.status, completion.detail),
            (status, detail),
            "{what}"
        );
    };
    check(map(MAX_BUFFERS, fd, 8192), bad, serve::NUMBER, "number");
    let failed = STATUS_MAP_FAILED;
    check(map(0, fd, 0), failed, MAP_SIZE, "no bytes");
    check(map(0, fd, u64::MAX), failed, MAP_SIZE, "all bytes");
    check(map(0, fd, 8193), failed, MAP_REFUSED, "too many bytes");
    check(map(0, 99, 4096), failed, MAP_REFUSED, "descriptor");
    check(map(0, -1, 4096), failed, MAP_REFUSED, "descriptor");
    check(unmap(0, 0), bad, serve::UNMAPPED, "nothing to unmap");
    check(unmap(MAX_BUFFERS, 0), bad, serve::NUMBER, "number");
    check(map(0, fd, 8192), STATUS_OK, 0, "a map");
    check(map(0, fd, 8192), bad, serve::TAKEN, "the same again");
    check(unmap(0, 1), bad, serve::RESERVED, "reserved");
    check(unmap(0, 0), STATUS_OK, 0, "an unmap");
    check(unmap(0, 0), bad, serve::UNMAPPED, "the same again");
    assert_eq!(host.around().mapped, 0);
}

#[test]
fn two_numbers_of_one_memory_still_overlap() {
    let mut host = Host::new();
    let (product, _) = good(&mut host);
    let (fd, _) = host.file(BYTES);
    for buffer in [10, 11] {
        let map = Map {
            buffer,
            fd,
            bytes: BYTES as u64,
        };
        assert_eq!(host.run(&[Command::new(0, &map)]).status, STATUS_OK);
    }
    let mut wrong = product;
    wrong.act.buffer = 10;
    wrong.dst.buffer = 11;
    refused(&mut host, &wrong, serve::OVERLAP, "one memory");
    wrong.dst.offset = 32768;
    assert_eq!(host.run(&[Command::new(0, &wrong)]).status, STATUS_OK);
}

#[test]
fn a_product_that_vtcm_cannot_hold_says_how_much_it_needs() {
    let mut host = Host::new();
    let k = 1 << 19;
    let bytes = k / 32 * 18 * 32 + (1 << 20);
    let (w, _) = host.buffer(bytes);
    let (act, _) = host.buffer(4 * k);
    let (dst, _) = host.buffer(4096);
    let body = MatMul {
        weights: wire::Weights {
            buffer: w,
            layout: WeightType::Q4_0.layout_id().0,
            offset: 0,
            k: u32::try_from(k).unwrap(),
            n: 32,
            slices: [1, 1],
        },
        act: rows_f32(act, 0, [0; 3]),
        dst: rows_f32(dst, 0, [0; 3]),
        m: 1,
        planes: [1, 1],
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let completion = host.run(&[Command::new(0, &body)]);
    assert_eq!(completion.status, STATUS_NO_VTCM);
    let text = describe(completion.status, completion.detail).to_string();
    assert!(completion.detail > 0 && text.contains("KiB"), "{text}");
}

/// No buffer is as large as the last sizes that are right, so that they fail at another check.
#[test]
fn sizes_of_products_are_right_up_to_their_limits() {
    let mut host = Host::new();
    let (product, experts) = good(&mut host);
    for (k, detail) in [(1 << 20, serve::BOUNDS), ((1 << 20) + 32, serve::SHAPE)] {
        let weights = wire::Weights {
            k,
            ..product.weights
        };
        refused(&mut host, &MatMul { weights, ..product }, detail, "k");
        refused(&mut host, &MatMulId { weights, ..experts }, detail, "k");
    }
    for (slots, detail) in [(4096, serve::BOUNDS), (4097, serve::SLOTS)] {
        let wrong = MatMulId {
            slots,
            act_slots: 1,
            ..experts
        };
        refused(&mut host, &wrong, detail, "slots");
    }
    // The last byte of each operand is the last byte of its buffer, or the one after it.
    let bytes = BYTES as u64;
    let act_bytes = 4 * 64 + 2 * 256 + 3 * 1024 + 4096;
    let dst_bytes = 4 * 32 + 2 * 128 + 3 * 512 + 2048;
    let mut last = product;
    last.act.offset = bytes - act_bytes;
    last.dst.offset = bytes - dst_bytes;
    assert_eq!(host.run(&[Command::new(0, &last)]).status, STATUS_OK);
    let mut wrong = last;
    wrong.act.offset += 4;
    refused(&mut host, &wrong, serve::BOUNDS, "end of the activations");
    let mut wrong = last;
    wrong.dst.offset += 4;
    refused(&mut host, &wrong, serve::BOUNDS, "end of the results");
    let mut last = experts;
    last.ids.offset = bytes - (4 * 4 + 2 * 16);
    assert_eq!(host.run(&[Command::new(0, &last)]).status, STATUS_OK);
    last.ids.offset += 4;
    refused(&mut host, &last, serve::BOUNDS, "end of the choices");
}
