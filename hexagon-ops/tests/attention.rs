//! Attention has the same bits whether keys, values and masks are copied to VTCM or read in place,
//! on any number of threads.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

use std::collections::BTreeMap;

use half::f16;
use hexagon_ops::hmx::{Form, Hmx};
use hexagon_ops::layout::{F16_TILE_BYTES, Line, Tile};
use hexagon_ops::ops::attention::{
    Attention, AttentionPlan, ExpTable, Sources, TABLE_LINES, TABLE_TILES, attention,
};
use hexagon_ops::ops::matmul::Machine;
use hexagon_ops::ops::tensor::{Shape, Type, View, ViewMut};
use hexagon_ops::rt::Engine;
use test_kit::Numbers;

const PARAMS: Attention = Attention {
    scale: 0.125,
    max_bias: 0.0,
    softcap: 0.0,
};
/// VTCM of a V75 without the table of exponentials.
const VTCM_TILES: usize = (8 << 20) / F16_TILE_BYTES - TABLE_TILES;

/// The positions that a query sees.
#[derive(Clone, Copy, Debug)]
enum Seen {
    /// Everything, without a mask.
    All,
    /// Positions up to its own.
    Causal,
    /// A query sees this many positions before its own, and its own.
    Window(usize),
    /// Everything, with addends.
    Biased,
}

/// An attention: at each position, keys and values are stored head by head.
#[derive(Clone, Copy, Debug)]
struct Setup {
    dtype: Type,
    head: usize,
    queries: usize,
    /// Query heads, and heads of keys and values.
    heads: [usize; 2],
    streams: usize,
    positions: usize,
    seen: Seen,
    mask: Type,
    /// A value that is not finite.
    exception: Option<f32>,
}

const PLAIN: Setup = Setup {
    dtype: Type::F16,
    head: 64,
    queries: 1,
    heads: [8, 2],
    streams: 1,
    positions: 2100,
    seen: Seen::Causal,
    mask: Type::F16,
    exception: None,
};

/// A tensor with its bytes, aligned as a buffer is.
struct Tensor {
    bytes: Vec<Line>,
    shape: Shape,
}

impl Tensor {
    /// - `order`: dimensions by their strides
    fn new(dtype: Type, ne: [usize; 4], order: [usize; 4]) -> Self {
        let mut shape = Shape {
            dtype,
            ne,
            nb: [0; 4],
        };
        let mut bytes = dtype.block_bytes();
        for dim in order {
            shape.nb[dim] = bytes;
            bytes *= match dim {
                0 => shape.blocks(),
                _ => ne[dim],
            };
        }
        Self {
            bytes: vec![Line::ZERO; bytes.div_ceil(size_of::<Line>())],
            shape,
        }
    }

    fn all(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.bytes)
    }

    fn view(&self) -> View<'_> {
        View::new(bytemuck::cast_slice(&self.bytes), self.shape).unwrap()
    }
}

/// Returns keys or values of a type, small numbers.
fn cache(setup: &Setup, numbers: &mut Numbers) -> Tensor {
    let ne = [setup.head, setup.positions, setup.heads[1], setup.streams];
    let mut tensor = Tensor::new(setup.dtype, ne, [0, 2, 1, 3]);
    let dtype = setup.dtype;
    let size = dtype.block_bytes();
    for block in tensor.all().chunks_exact_mut(size) {
        let scale = f16::from_f32(0.01).to_le_bytes();
        match dtype {
            Type::F16 => {
                let value = numbers.floats(1)[0];
                block.copy_from_slice(&f16::from_f32(value).to_le_bytes());
            }
            Type::Bf16 => {
                let value = numbers.floats(1)[0].to_bits() >> 16;
                block.copy_from_slice(&u16::try_from(value).unwrap().to_le_bytes());
            }
            _ => {
                block.fill_with(|| numbers.bits().to_le_bytes()[7]);
                block[..2].copy_from_slice(&scale);
                if dtype == Type::Q5_1 {
                    block[2..4].copy_from_slice(&scale);
                }
            }
        }
    }
    tensor
}

/// Returns a mask whose rows have whole chunks of positions.
fn mask(setup: &Setup, numbers: &mut Numbers) -> Option<Tensor> {
    let columns = setup.positions.next_multiple_of(256);
    let ne = [columns, setup.queries, 1, setup.streams];
    let mut tensor = Tensor::new(setup.mask, ne, [0, 1, 2, 3]);
    let mut values = Vec::new();
    for row in 0..setup.queries * setup.streams {
        let own = setup.positions - setup.queries + row % setup.queries;
        values.extend((0..columns).map(|position| {
            let is_seen = match setup.seen {
                Seen::All => return f32::NAN,
                Seen::Causal => position <= own,
                Seen::Window(before) => position <= own && position + before >= own,
                Seen::Biased => return numbers.floats(1)[0],
            };
            if is_seen { 0.0 } else { f32::NEG_INFINITY }
        }));
    }
    match setup.mask {
        Type::F16 => {
            let halves: Vec<u16> = values.iter().map(|x| f16::from_f32(*x).to_bits()).collect();
            let bytes = bytemuck::cast_slice(&halves);
            tensor.all()[..bytes.len()].copy_from_slice(bytes);
        }
        _ => {
            let bytes = bytemuck::cast_slice(&values);
            tensor.all()[..bytes.len()].copy_from_slice(bytes);
        }
    }
    (!matches!(setup.seen, Seen::All)).then_some(tensor)
}

/// The operands of an attention.
struct Operands {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Option<Tensor>,
    dst: Shape,
}

impl Operands {
    fn new(setup: &Setup) -> Self {
        let mut numbers = Numbers::new(9);
        let ne = [setup.head, setup.queries, setup.heads[0], setup.streams];
        let mut q = Tensor::new(Type::F32, ne, [0, 2, 1, 3]);
        let elems = numbers.floats(ne.iter().product());
        let bytes = bytemuck::cast_slice(&elems);
        q.all()[..bytes.len()].copy_from_slice(bytes);
        let [k, mut v] = [(); 2].map(|()| cache(setup, &mut numbers));
        if let Some(value) = setup.exception {
            let at = v.shape.row([setup.positions / 2, setup.heads[1] - 1, 0]);
            let value = match setup.dtype {
                Type::Bf16 => value.to_bits().to_le_bytes()[2..].to_vec(),
                _ => f16::from_f32(value).to_le_bytes().to_vec(),
            };
            v.all()[at..at + 2].copy_from_slice(&value);
        }
        let ne = [setup.head, setup.heads[0], setup.queries, setup.streams];
        Self {
            q,
            k,
            v,
            mask: mask(setup, &mut numbers),
            dst: Tensor::new(Type::F32, ne, [0, 1, 2, 3]).shape,
        }
    }

    fn sources(&self) -> Sources<'_> {
        Sources {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            mask: self.mask.as_ref().map(Tensor::view),
            sinks: None,
        }
    }

    /// Calls `f` with a machine.
    fn on<R>(engine: &Engine, vtcm: &mut [Tile], f: impl FnOnce(Machine<'_>) -> R) -> R {
        Self::on_form(Form::Scaling, engine, vtcm, f)
    }

    /// As [`Self::on`], with a matrix unit of some form, or none.
    fn on_form<R>(
        form: Form,
        engine: &Engine,
        vtcm: &mut [Tile],
        f: impl FnOnce(Machine<'_>) -> R,
    ) -> R {
        let mut hmx = Hmx::of_form(form, vtcm);
        f(Machine {
            engine,
            vtcm,
            hmx: &mut hmx,
        })
    }

    /// Returns `true` for the cache and for the mask if they are copied.
    fn copied(&self, engine: &Engine, vtcm: &mut [Tile]) -> [bool; 2] {
        Self::on(engine, vtcm, |machine| {
            let plan =
                AttentionPlan::new(&PARAMS, &self.sources(), &self.dst, &machine, true).unwrap();
            [plan.copies_cache(), plan.copies_mask()]
        })
    }

    /// Returns the bits of the result.
    fn run(&self, engine: &Engine, vtcm: &mut [Tile], table: &[Line; TABLE_LINES]) -> Vec<u32> {
        self.run_on(Form::Scaling, engine, vtcm, table)
    }

    /// As [`Self::run`], with a matrix unit of some form, or none.
    fn run_on(
        &self,
        form: Form,
        engine: &Engine,
        vtcm: &mut [Tile],
        table: &[Line; TABLE_LINES],
    ) -> Vec<u32> {
        let mut dst = vec![Line::ZERO; self.dst.elems().div_ceil(32)];
        // Not finite as floats, so that a result shows whether a copy left something out.
        vtcm.fill(Tile([Line([0xff; 128]); 16]));
        let view = ViewMut::new(bytemuck::cast_slice_mut(&mut dst), self.dst).unwrap();
        Self::on_form(form, engine, vtcm, |machine| {
            attention(machine, &PARAMS, view, &self.sources(), Some(table)).unwrap();
        });
        bytemuck::cast_slice(&dst).to_vec()
    }
}

/// Compares the results with all possible copies, with fewer and with none. Returns the copies that
/// were made.
///
/// If there is an exception, dot products compute the result, which are divided for the number of
/// threads.
fn compare(setup: &Setup, table: &[Line; TABLE_LINES]) -> Vec<[bool; 2]> {
    let operands = Operands::new(setup);
    let mut vtcm = vec![Tile::ZERO; VTCM_TILES];
    let mut want = None;
    let mut all = Vec::new();
    for threads in [1, 2, 4, 8] {
        let engine = Engine::new(threads);
        if setup.exception.is_some() {
            want = None;
        }
        // For each shape, the most VTCM with which something is still left out.
        let mut sizes = BTreeMap::new();
        for tiles in (1..=VTCM_TILES).rev() {
            let copied = operands.copied(&engine, &mut vtcm[..tiles]);
            sizes.entry(copied).or_insert(tiles);
            if copied == [false; 2] {
                break;
            }
        }
        for (copied, tiles) in &sizes {
            let have = operands.run(&engine, &mut vtcm[..*tiles], table);
            let want = want.get_or_insert_with(|| have.clone());
            assert!(
                have == *want,
                "{setup:?}: {copied:?} in {tiles} tiles on {threads} threads"
            );
        }
        all = sizes.into_keys().collect();
    }
    let is_finite = |bits: &u32| f32::from_bits(*bits).is_finite();
    let finite = want
        .unwrap_or_default()
        .iter()
        .filter(|bits| is_finite(bits))
        .count();
    assert!(finite > 0, "{setup:?}: nothing but NaN");
    all
}

/// Returns the table of exponentials.
fn table() -> Box<ExpTable> {
    Box::new(ExpTable::new())
}

#[test]
fn copies_of_keys_and_values_change_no_bit() {
    let mut table = table();
    let table = table.lines();
    for (dtype, head) in [
        (Type::F16, 64),
        (Type::F16, 72),
        (Type::F16, 128),
        (Type::F16, 256),
        (Type::Bf16, 64),
        (Type::Q8_0, 64),
        (Type::Q8_0, 128),
        (Type::Q4_0, 96),
        (Type::Q5_1, 64),
        (Type::Iq4Nl, 64),
    ] {
        for (queries, seen) in [(1, Seen::Causal), (1, Seen::Window(300)), (5, Seen::All)] {
            let setup = Setup {
                dtype,
                head,
                queries,
                seen,
                ..PLAIN
            };
            let copied = compare(&setup, table);
            assert_eq!(copied, [[false; 2], [true, false]], "{setup:?}");
        }
    }
}

#[test]
fn copies_of_masks_change_no_bit() {
    let mut table = table();
    let table = table.lines();
    for (queries, streams, positions, seen, mask) in [
        (40, 1, 1100, Seen::Causal, Type::F16),
        (70, 2, 300, Seen::Causal, Type::F16),
        (200, 1, 2200, Seen::Window(100), Type::F16),
        (40, 2, 1030, Seen::Biased, Type::F16),
        (40, 1, 1100, Seen::Causal, Type::F32),
    ] {
        let setup = Setup {
            queries,
            streams,
            positions,
            seen,
            mask,
            ..PLAIN
        };
        let copied = compare(&setup, table);
        let want: &[_] = match mask {
            Type::F16 => &[[false; 2], [true, false], [true; 2]],
            _ => &[[false; 2], [true, false]],
        };
        assert_eq!(copied, want, "{setup:?}");
    }
}

/// Rows that see a value that is not finite are NaN; a number beyond FP16's range leads to dot
/// products, which read the operands in place.
#[test]
fn exceptions_among_copied_values_are_found() {
    let mut table = table();
    let table = table.lines();
    for (dtype, value) in [
        (Type::F16, f32::INFINITY),
        (Type::F16, f32::NAN),
        (Type::Bf16, 1e30),
    ] {
        for (queries, seen) in [(1, Seen::Causal), (40, Seen::Window(200))] {
            let setup = Setup {
                dtype,
                queries,
                seen,
                positions: 1100,
                exception: Some(value),
                ..PLAIN
            };
            assert!(compare(&setup, table).len() > 1, "{setup:?}");
        }
    }
}

/// Scores in FP16 that are rounded at other places differ by 2^-11 of themselves, and weights by as
/// much as their exponents.
#[test]
fn an_older_unit_and_none_give_nearly_the_same() {
    let mut table = table();
    let table = table.lines();
    let mut vtcm = vec![Tile::ZERO; VTCM_TILES];
    for (head, queries, seen) in [
        (64, 1, Seen::Causal),
        (72, 40, Seen::All),
        (128, 70, Seen::Causal),
        (256, 5, Seen::Window(300)),
        (64, 33, Seen::Biased),
    ] {
        let setup = Setup {
            head,
            queries,
            seen,
            ..PLAIN
        };
        let operands = Operands::new(&setup);
        for threads in [1, 3] {
            let engine = Engine::new(threads);
            let mut of = |form| -> Vec<f32> {
                let bits = operands.run_on(form, &engine, &mut vtcm, table);
                bits.into_iter().map(f32::from_bits).collect()
            };
            let want: Vec<f64> = of(Form::Scaling).into_iter().map(f64::from).collect();
            for form in [Form::RoundOnly, Form::Vectors] {
                let error = test_kit::nmse(&of(form), &want);
                assert!(error < 3e-6, "{setup:?} {form:?} on {threads}: {error:e}");
            }
        }
    }
}
