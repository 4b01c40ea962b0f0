//! Every field of an attention, made wrong alone, is refused with its own detail, and nothing is
//! written.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::attention::{LIMIT_F16, Mask, Operands, PLAIN, Setup};
use crate::common::Numbers;
use crate::tensor::Bench;

#[test]
fn wrong_fields_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let setup = Setup {
        queries: 2,
        positions: 40,
        ..PLAIN
    };
    let operands = Operands::new(&setup, Mask::Random, true, &mut numbers);
    let good = operands.place(&setup, &mut bench);
    type Change = fn(&mut Attention);
    let none: Tensor = bytemuck::Zeroable::zeroed();
    for (detail, what, change) in [
        (serve::RESERVED, "reserved", (|b| b.reserved = 1) as Change),
        (serve::OPERAND, "infinite scale", |b| {
            b.scale = f32::INFINITY.to_bits()
        }),
        (serve::OPERAND, "cap that is no number", |b| {
            b.softcap = f32::NAN.to_bits()
        }),
        (serve::OPERAND, "queries in f16", |b| b.q.dtype = TYPE_F16),
        (serve::OPERAND, "result in f16", |b| b.dst.dtype = TYPE_F16),
        (serve::OPERAND, "keys in i32", |b| {
            b.k.dtype = TYPE_I32;
            b.k.nb[0] = 4;
        }),
        (serve::OPERAND, "length of keys", |b| b.k.ne[0] = 32),
        (serve::OPERAND, "length of values", |b| b.v.ne[0] = 32),
        (serve::OPERAND, "positions", |b| b.v.ne[1] = 39),
        (serve::OPERAND, "heads of keys", |b| b.k.ne[2] = 2),
        (serve::OPERAND, "heads", |b| b.q.ne[2] = 6),
        (serve::OPERAND, "mask too short", |b| b.mask.ne[0] = 39),
        (serve::OPERAND, "rows of the mask", |b| b.mask.ne[1] = 1),
        (serve::OPERAND, "heads of the mask", |b| {
            b.mask.ne[2] = 2;
            b.mask.nb[2] = 0;
        }),
        (serve::OPERAND, "mask in i32", |b| {
            b.mask.dtype = TYPE_I32;
            b.mask.nb = [4; 4];
        }),
        (serve::OPERAND, "sinks", |b| b.sinks.ne[0] = 8),
        (serve::OPERAND, "rows of results overlap", |b| {
            b.dst.nb[1] = 252
        }),
        (serve::SHAPE, "no positions", |b| b.k.ne[1] = 0),
        (serve::ALIGNMENT, "stride", |b| b.k.nb[1] += 1),
        (serve::TYPE, "type", |b| b.v.dtype = 99),
        (serve::UNMAPPED, "unmapped", |b| b.sinks.buffer = 99),
        (serve::BOUNDS, "bounds", |b| b.v.offset = 1 << 40),
        (serve::OVERLAP, "overlap", |b| b.q.offset = b.dst.offset),
    ] {
        let mut wrong = good;
        change(&mut wrong);
        bench.refused_body(&wrong, detail, what);
    }
    for remove in [
        (|b, none| b.q = none) as fn(&mut Attention, Tensor),
        |b, none| b.k = none,
        |b, none| b.v = none,
        |b, none| b.dst = none,
    ] {
        let mut wrong = good;
        remove(&mut wrong, none);
        bench.refused_body(&wrong, serve::OPERAND, "absent operand");
    }
    operands.compare(&good, &mut bench, LIMIT_F16, "the right one");
}
