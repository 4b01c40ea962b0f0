//! Proves that the NEON version of each host stage has the bits of the portable one, for every
//! length around a vector and for zeros, subnormals, infinities and NaN at every place. Runs on
//! aarch64, or under qemu by scripts/aarch64.py.
#![cfg(target_arch = "aarch64")]

use half::f16;
use rknpu_ops::int4::{Digits, Product, ScaledOutput, SumElem, SumTile, factors, factors_i4};
use rknpu_ops::layout::{Elem, NativeC};
use rknpu_ops::pack::{NativeOutput, Rows, StridedRows};
use rknpu_ops::{neon, scalar};

/// Numbers for which rounding, clamping or a vector instruction could differ.
const EDGES: [f32; 22] = [
    0.0,
    -0.0,
    f32::from_bits(1),
    -f32::from_bits(0x007f_ffff),
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    -f32::NAN,
    // A signalling NaN.
    f32::from_bits(0x7f80_0001),
    0.5,
    -0.5,
    1.5,
    2.5,
    -126.5,
    127.5,
    -127.5,
    -128.5,
    65519.9,
    65520.0,
];

/// Values of both signs and of many magnitudes, the same for the same seed.
fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let value = |x: u32, y: u32| (x as f32 / 8_388_608.0 - 1.0) * power(y % 40) * power(0);
    (0..count).map(|_| value(next(), next())).collect()
}

/// `2^(n - 10)`, so that the middle of 0..20 is 1.
fn power(n: u32) -> f32 {
    2f32.powi(n.cast_signed() - 10)
}

/// `values`, and the same with each of [`EDGES`] somewhere.
fn rows(count: usize) -> Vec<Vec<f32>> {
    let plain = values(count, 1);
    let mut all = vec![plain.clone()];
    if count > 0 {
        for (i, edge) in EDGES.into_iter().enumerate() {
            let mut row = plain.clone();
            row[(i * 7 + count / 2) % count] = edge;
            row[count - 1 - i % count] = edge;
            all.push(row);
        }
    }
    all.push(EDGES.into_iter().cycle().take(count).collect());
    all
}

/// Bits, with one pattern for all NaN: which one an operation returns is not defined in Rust.
fn bits(x: &[f32]) -> Vec<u32> {
    let canonical = |x: &f32| if x.is_nan() { f32::NAN } else { *x };
    x.iter().map(|x| canonical(x).to_bits()).collect()
}

fn half_bits(x: &[f16]) -> Vec<u16> {
    let canonical = |x: &f16| if x.is_nan() { f16::NAN } else { *x };
    x.iter().map(|x| canonical(x).to_bits()).collect()
}

#[test]
fn hadamard_has_the_same_bits_for_every_block() {
    for block in (1..=12).map(|log| 1usize << log) {
        let norm = 1.0 / (block as f32).sqrt();
        for blocks in [0, 1, 2, 3, 5] {
            for row in rows(blocks * block) {
                let (mut vector, mut portable) = (row.clone(), row);
                neon::hadamard(&mut vector, block, norm);
                scalar::hadamard(&mut portable, block, norm);
                assert_eq!(bits(&vector), bits(&portable), "{blocks} x {block}");
            }
        }
    }
}

#[test]
fn absmax_has_the_same_bits_for_every_length() {
    for count in 0..100 {
        for row in rows(count) {
            assert_eq!(
                neon::absmax_bits(&row),
                scalar::absmax_bits(&row),
                "{row:?}"
            );
        }
        for at in 0..count {
            let mut row = vec![1.0; count];
            row[at] = -f32::MAX;
            assert_eq!(
                neon::absmax_bits(&row),
                f32::MAX.to_bits(),
                "{at} of {count}"
            );
        }
    }
}

#[test]
fn quantize_has_the_same_bytes_for_every_length() {
    for count in 0..100 {
        for row in rows(count) {
            for inverse in [1.0, 0.37, 1e-3, 127.0, 1e30, f32::MIN_POSITIVE, 8.5e37] {
                let (mut vector, mut portable) = (vec![1; count], vec![2; count]);
                neon::quantize(&row, inverse, &mut vector);
                scalar::quantize(&row, inverse, &mut portable);
                assert_eq!(vector, portable, "{row:?} * {inverse}");
            }
        }
    }
}

#[test]
fn quantize_rounds_every_tie_and_its_neighbours_alike() {
    let ties = (-260..=260i16).map(|i| f32::from(i) / 2.0);
    let row: Vec<f32> = ties.flat_map(|x| [x.next_down(), x, x.next_up()]).collect();
    let (mut vector, mut portable) = (vec![1; row.len()], vec![2; row.len()]);
    neon::quantize(&row, 1.0, &mut vector);
    scalar::quantize(&row, 1.0, &mut portable);
    assert_eq!(vector, portable);
}

#[test]
fn f16_has_the_same_bits_for_every_length_and_factor() {
    for count in 0..70 {
        for row in rows(count) {
            for factor in [
                1.0,
                2f32.powi(-20),
                2f32.powi(13),
                2f32.powi(126),
                f32::MIN_POSITIVE,
            ] {
                let (mut vector, mut portable) = (vec![f16::ONE; count], vec![f16::MAX; count]);
                neon::scale_to_f16(&row, factor, &mut vector);
                scalar::scale_to_f16(&row, factor, &mut portable);
                assert_eq!(
                    half_bits(&vector),
                    half_bits(&portable),
                    "{row:?} * {factor}"
                );
            }
        }
    }
}

#[test]
fn f16_rounds_every_number_tie_and_neighbour_alike() {
    // All finite FP16 numbers of both signs, including subnormals, and the points half-way to the
    // next number.
    for high in 0..0x7cu16 {
        let numbers = (0..=255).map(|low| f16::from_bits(high << 8 | low));
        let row: Vec<f32> = numbers
            .map(f16::to_f32)
            .zip((0..=255).map(|low| f16::from_bits((high << 8 | low) + 1).to_f32()))
            .flat_map(|(x, next)| {
                [
                    x,
                    if next.is_finite() {
                        (x + next) / 2.0
                    } else {
                        65520.0
                    },
                ]
            })
            .flat_map(|x| [x.next_down(), x, x.next_up()])
            .flat_map(|x| [x, -x])
            .collect();
        let (mut vector, mut portable) = (vec![f16::ONE; row.len()], vec![f16::MAX; row.len()]);
        neon::scale_to_f16(&row, 1.0, &mut vector);
        scalar::scale_to_f16(&row, 1.0, &mut portable);
        assert_eq!(half_bits(&vector), half_bits(&portable), "{high:#x}");
    }
}

/// Interleaves rows whose elements are their own index plus one, `to` `numbers` being those
/// elements.
fn interleave_alike<T: Copy + Default + PartialEq + std::fmt::Debug>(numbers: &[T]) {
    let to = |i: usize| numbers[i % numbers.len()];
    for s in [4, 5, 8, 16, 32] {
        for (m, real) in [
            (1, 0),
            (1, 1),
            (3, 1),
            (4, 4),
            (9, 7),
            (33, 33),
            (40, 37),
            (70, 70),
        ] {
            for k in [1, s - 1, s, 2 * s + 1, 4 * s, 5 * s + 3, 9 * s, 12 * s - 1] {
                let stride = k + 3;
                let src: Vec<T> = (1..=real.max(1) * stride).map(to).collect();
                let src = Rows::new(&src, real, k, stride);
                for extra in [0, 1, 6] {
                    let len = (k.div_ceil(s) + extra) * m * s;
                    let (mut vector, mut portable) = (vec![to(7); len], vec![to(9); len]);
                    neon::interleave(src, s, m, &mut vector);
                    scalar::interleave(src, s, m, &mut portable);
                    assert_eq!(vector, portable, "{real} of {m} rows of {k} by {s}");
                }
            }
        }
    }
}

#[test]
fn interleave_moves_elements_of_one_byte_alike() {
    interleave_alike(&(0..251).collect::<Vec<u8>>());
}

#[test]
fn interleave_moves_elements_of_two_bytes_alike() {
    interleave_alike(&(0..=u16::MAX).collect::<Vec<u16>>());
}

#[test]
fn interleave_moves_elements_of_four_bytes_alike() {
    interleave_alike(&(0..100_000).collect::<Vec<u32>>());
}

/// Shapes of an unpack: `(t, m, rows, columns of C, columns to unpack)`.
fn outputs() -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>, usize, usize)> {
    let rows = [
        (1, 0..1),
        (1, 1..1),
        (2, 0..2),
        (4, 0..4),
        (9, 1..8),
        (13, 0..13),
    ];
    let columns = [0usize, 1, 3, 4, 5, 15, 60, 63, 64, 65, 127, 128, 131, 200];
    [4usize, 8, 16].into_iter().flat_map(move |t| {
        let rows = rows.clone();
        rows.into_iter().flat_map(move |(m, rows)| {
            columns.map(move |n| (t, m, rows.clone(), n.next_multiple_of(t).max(t), n))
        })
    })
}

#[test]
fn unpack_of_int32_has_the_same_bits() {
    for (t, m, rows, have, columns) in outputs() {
        for segments in 1..4 {
            let layout = NativeC { t, elem: Elem::I32 };
            let number = |i: u32| i.wrapping_mul(2_654_435_761).cast_signed() / segments;
            let c: Vec<Vec<i32>> = (0..segments)
                .map(|s| {
                    (1 + s.cast_unsigned()..)
                        .map(number)
                        .take(m * have)
                        .collect()
                })
                .collect();
            let c: Vec<&[i32]> = c.iter().map(Vec::as_slice).collect();
            let c = NativeOutput::new(&c, layout, m);
            for seed in 0..2u32 {
                let (mut a, mut w) = (values(m, seed + 5), values(columns, seed + 6));
                if seed == 1 {
                    a.iter_mut().zip(EDGES).for_each(|(a, edge)| *a = edge);
                    w.iter_mut()
                        .zip(EDGES.into_iter().rev().cycle())
                        .for_each(|(w, edge)| *w = edge);
                }
                let (mut vector, mut portable) = (vec![7.0; m * 210], vec![7.0; m * 210]);
                let mut dst = StridedRows::new(&mut vector, columns, 210);
                neon::unpack_i32(c, rows.clone(), |m| a[m], &w, &mut dst);
                let mut dst = StridedRows::new(&mut portable, columns, 210);
                scalar::unpack_i32(c, rows.clone(), |m| a[m], &w, &mut dst);
                let shape = format!("t {t}, rows {rows:?} of {m}, {columns} of {have}, {segments}");
                assert_eq!(bits(&vector), bits(&portable), "{shape}");
            }
        }
    }
}

#[test]
fn unpack_of_fp32_has_the_same_bits() {
    for (t, m, rows, have, columns) in outputs() {
        for segments in 1..4u32 {
            let layout = NativeC { t, elem: Elem::F32 };
            let c: Vec<Vec<f32>> = (0..segments)
                .map(|s| {
                    let mut c = values(m * have, s + 9);
                    let some = c.iter_mut().skip(s as usize).step_by(5);
                    some.zip(EDGES.into_iter().cycle())
                        .for_each(|(c, edge)| *c = edge);
                    c
                })
                .collect();
            let c: Vec<&[f32]> = c.iter().map(Vec::as_slice).collect();
            let c = NativeOutput::new(&c, layout, m);
            let factors: Vec<f32> = (0..13).map(|m| power(m * 9)).collect();
            let factor = |m: usize| factors[m];
            let (mut vector, mut portable) = (vec![7.0; m * 210], vec![7.0; m * 210]);
            let mut dst = StridedRows::new(&mut vector, columns, 210);
            neon::unpack_f32(c, rows.clone(), factor, columns, &mut dst);
            let mut dst = StridedRows::new(&mut portable, columns, 210);
            scalar::unpack_f32(c, rows.clone(), factor, columns, &mut dst);
            let shape = format!("t {t}, rows {rows:?} of {m}, {columns} of {have}, {segments}");
            assert_eq!(bits(&vector), bits(&portable), "{shape}");
        }
    }
}

/// Compares tiles of products whose elements of C are `number`s of their index.
fn scaled_tiles_alike<T: SumElem + std::fmt::Debug>(number: impl Fn(usize) -> T) {
    for (t, segments, digits) in [4, 8, 16].into_iter().flat_map(|t| {
        let digits = [Digits::One, Digits::Two, Digits::TwoBytes];
        [1, 2, 5]
            .into_iter()
            .flat_map(move |s| digits.map(|digits| (t, s, digits)))
    }) {
        for (m, rows, n) in [
            (1, 0..1, 64),
            (6, 1..5, 200),
            (7, 4..7, 131),
            (4, 0..4, 12),
            (5, 0..3, 67),
        ] {
            let (layout, bucket) = (NativeC { t, elem: Elem::I32 }, m * digits.rows());
            let len = layout.len(bucket, n);
            let c: Vec<Vec<T>> = (0..segments)
                .map(|s| (0..len).map(|i| number(i * 7 + s * 131)).collect())
                .collect();
            let w_scales = values(segments * n, 21);
            let views: Vec<_> = (c.iter().zip(w_scales.chunks(n)))
                .map(|(c, w_scales)| ScaledOutput {
                    c: c.as_slice(),
                    w_scales,
                })
                .collect();
            for per_row in [factors(segments), factors_i4(segments)] {
                let mut a = values(m * per_row, 22);
                a[per_row / 2] = f32::NAN;
                let a = Rows::new(&a, m, per_row, per_row);
                let product = Product::new(&views, layout, bucket, digits, a);
                for n0 in (0..n).step_by(64) {
                    let columns = n0..n.min(n0 + 64);
                    let mut tiles: [SumTile; 2] = [[[0.5; 64]; 4]; 2];
                    let [vector, portable] = &mut tiles;
                    neon::scaled_tile(product, rows.clone(), columns.clone(), vector);
                    scalar::scaled_tile(product, rows.clone(), columns.clone(), portable);
                    let shape =
                        format!("t {t}, {segments} segments, {digits:?}, {rows:?}, {columns:?}");
                    let [vector, portable] = tiles.map(|tile| bits(tile.as_flattened()));
                    assert_eq!(vector, portable, "{shape}");
                }
            }
        }
    }
}

#[test]
#[expect(clippy::cast_possible_truncation, reason = "any 16 bits will do")]
fn scaled_tiles_of_int16_have_the_same_bits() {
    scaled_tiles_alike(|i| (i.wrapping_mul(40_503) as u16).cast_signed());
}

#[test]
fn scaled_tiles_of_int32_have_the_same_bits() {
    scaled_tiles_alike(|i| i32::try_from(i * 30_011 % 1_200_000).map_or(0, |i| i - 600_000));
}

#[test]
fn scaled_tiles_of_fp32_have_the_same_bits() {
    let numbers = values(997, 23);
    scaled_tiles_alike(|i| numbers[i % 997]);
}
