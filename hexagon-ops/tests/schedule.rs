//! Compares the steps that the drivers make with the schedule that `ggml-npu model` assumes: a
//! command lasts as long as the longest of three: its bytes, its packets on all threads, and its
//! products on the matrix unit (`tool/src/model/cost.rs`).
//!
//! An engine that executes nothing records the steps for Llama-3.2-1B on a V75 with four threads. A
//! step lasts as long as the longest of its three, and several steps last at least as long as the
//! copies that overlap them. A command's packets are those of `packets.txt`, in equal parts for its
//! tasks; the slowest thread of a step has the number of tasks rounded up.
#![expect(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a panic is a failure; sizes are below 2^52"
)]

use hexagon_ops::hmx::Hmx;
use hexagon_ops::layout::{F16_TILE_BYTES, LINE_BYTES, Line, MatrixLayout, Tile, WeightType};
use hexagon_ops::ops::attention::{Attention, Sources, TABLE_LINES, TABLE_TILES, attention};
use hexagon_ops::ops::matmul::{Dots, Machine, MatMul, RowStarts};
use hexagon_ops::ops::tensor::{Shape, Type, View, ViewMut};
use hexagon_ops::rt::{Engine, StepRecord};

/// Rates of a V75 as `ggml-npu model` has them: bytes and packets of a thread in a microsecond, and
/// the time of a product of two tiles.
///
/// SOURCE: src/hexagon/caps.rs, `HexRates`.
const BYTES_PER_US: f64 = 60e3;
const PACKETS_PER_US: f64 = 1100.0;
const PRODUCT_US: f64 = 2.0 * 32.0 * 32.0 * 32.0 / 12_032.54e3;
const THREADS: usize = 4;
/// VTCM of a V75 without the table of exponentials.
const VTCM_TILES: usize = (8 << 20) / F16_TILE_BYTES - TABLE_TILES;

/// Returns the counted packets of a kernel or a whole operation on a V75.
fn counted(name: &str) -> f64 {
    let wanted = format!("v75 {name} ");
    let mut lines = include_str!("packets.txt").lines();
    let packets = lines.find_map(|line| line.strip_prefix(&wanted));
    packets.unwrap().parse().unwrap()
}

/// Microseconds of a command, in the model and by its steps.
struct Times {
    model: f64,
    steps: f64,
}

/// Returns the times of a command with `bytes` and `packets` in the model.
///
/// - `more`: packets of the steps in addition to those
fn times(record: &[StepRecord], [bytes, packets, more]: [f64; 3]) -> Times {
    let sum = |of: fn(&StepRecord) -> usize| record.iter().map(of).sum::<usize>() as f64;
    let tasks = sum(|step| step.tasks);
    let longest = |bytes: f64, packets: f64, products: f64| {
        let vectors = packets / PACKETS_PER_US;
        (bytes / BYTES_PER_US)
            .max(vectors)
            .max(products * PRODUCT_US)
    };
    let of_step = |step: &StepRecord| {
        let slowest = step.tasks.div_ceil(THREADS) as f64 * (packets + more) / tasks;
        longest(step.copied_bytes as f64, slowest, step.tile_products as f64)
    };
    let (mut steps, mut rest) = (0.0, record);
    while let Some((step, others)) = rest.split_first() {
        let (beside, others) = others.split_at(step.steps_beside);
        steps += of_step(step).max(beside.iter().map(of_step).sum());
        rest = others;
    }
    Times {
        model: longest(
            bytes,
            packets / THREADS as f64,
            sum(|step| step.tile_products),
        ),
        steps,
    }
}

/// Weights and activations of products: their type, its name in `packets.txt`, and the bits of an
/// activation of one row.
type Format = (WeightType, &'static str, u32);
const Q4_0: Format = (WeightType::Q4_0, "q4_0", 8);

/// Returns the steps of a product on some threads and tiles of VTCM.
fn steps_of(
    (weight, _, bits): Format,
    [m, k, n]: [usize; 3],
    threads: usize,
    vtcm_tiles: usize,
) -> Vec<StepRecord> {
    let layout = MatrixLayout::new(weight, n, k).unwrap();
    let engine = Engine::recording(threads);
    let mut vtcm = vec![Tile::ZERO; vtcm_tiles];
    let mut hmx = Hmx::new(&vtcm);
    let job = MatMul {
        layout,
        weights: &vec![Line::ZERO; layout.matrix_bytes() / LINE_BYTES],
        m,
        dots: if bits == 16 {
            Dots::TwoDigits
        } else {
            Dots::TwoRows
        },
        act: &vec![0.0; m * k],
        act_rows: RowStarts::Strided(k),
        dst: &mut vec![0.0; m * n],
        dst_rows: RowStarts::Strided(n),
        epilogue: None,
    };
    let machine = Machine {
        engine: &engine,
        vtcm: &mut vtcm,
        hmx: &mut hmx,
    };
    job.run(machine).unwrap();
    engine.take_record()
}

/// Returns the times of a product.
fn product(format: Format, [m, k, n]: [usize; 3]) -> Times {
    let (weight, name, bits) = format;
    let layout = MatrixLayout::new(weight, n, k).unwrap();
    let record = steps_of(format, [m, k, n], THREADS, VTCM_TILES);
    let sum = |of: fn(&StepRecord) -> usize| record.iter().map(of).sum::<usize>();
    let tiles = k / 32 * (n / 32);
    let products = if m <= 2 { 0 } else { m.div_ceil(32) };
    assert_eq!(sum(|step| step.tile_products), products * tiles);
    // Weights are copied and dequantized once for each chunk of M that fits in VTCM. The model
    // always counts one chunk; only 512 rows of 8192 need two.
    let chunks = if m * k > 2048 * 1024 { 2 } else { 1 };
    let bytes = layout.matrix_bytes();
    assert_eq!(sum(|step| step.copied_bytes), chunks * bytes);
    let more = counted(&format!("dequantize_{name}")) * ((chunks - 1) * tiles) as f64;
    let digits = if bits == 16 { "_16_bits" } else { "" };
    let packets = counted(&format!("whole_mul_mat_{name}_m{m}{digits}")) * tiles as f64;
    times(&record, [bytes as f64, packets, more])
}

/// Bytes of keys and values of [`attend`].
const CACHE_BYTES: f64 = 2.0 * 2.0 * 64.0 * 512.0 * 8.0;

/// Returns the steps of an attention of `rows` tokens to 512 positions without a mask, 32 heads
/// on 8.
fn attend(rows: usize) -> Vec<StepRecord> {
    const POSITIONS: usize = 512;
    let shape = |dtype: Type, ne: [usize; 4]| {
        let mut nb = [dtype.block_bytes(); 4];
        for i in 1..4 {
            nb[i] = nb[i - 1] * ne[i - 1];
        }
        Shape { dtype, ne, nb }
    };
    let bytes = |shape: &Shape| vec![0_u64; shape.ne.iter().product::<usize>() * shape.nb[0] / 8];
    let q_shape = shape(Type::F32, [64, rows, 32, 1]);
    let kv_shape = shape(Type::F16, [64, POSITIONS, 8, 1]);
    let dst_shape = shape(Type::F32, [64, 32, rows, 1]);
    let [q, kv, mut dst] = [&q_shape, &kv_shape, &dst_shape].map(bytes);
    let kv = View::new(bytemuck::cast_slice(&kv), kv_shape).unwrap();
    let src = Sources {
        q: View::new(bytemuck::cast_slice(&q), q_shape).unwrap(),
        k: kv,
        v: kv,
        mask: None,
        sinks: None,
    };
    let params = Attention {
        scale: 0.125,
        max_bias: 0.0,
        softcap: 0.0,
    };
    let engine = Engine::recording(THREADS);
    let mut vtcm = vec![Tile::ZERO; VTCM_TILES];
    let mut hmx = Hmx::new(&vtcm);
    let machine = Machine {
        engine: &engine,
        vtcm: &mut vtcm,
        hmx: &mut hmx,
    };
    let table = Box::new([Line::ZERO; TABLE_LINES]);
    let dst = ViewMut::new(bytemuck::cast_slice_mut(&mut dst), dst_shape).unwrap();
    attention(machine, &params, dst, &src, Some(&table)).unwrap();
    let record = engine.take_record();
    let products: usize = record.iter().map(|step| step.tile_products).sum();
    // Each pair of a row tile and a position tile multiplies 4 tiles of keys and values.
    assert_eq!(products, (4 * rows).div_ceil(32) * POSITIONS / 32 * 4 * 8);
    let copied: usize = record.iter().map(|step| step.copied_bytes).sum();
    assert_eq!(copied as f64, CACHE_BYTES);
    record
}

/// The products of a layer: inputs and outputs.
const PRODUCTS: [[usize; 2]; 7] = [
    [2048, 2048],
    [2048, 512],
    [2048, 512],
    [2048, 2048],
    [2048, 8192],
    [2048, 8192],
    [8192, 2048],
];

/// Returns the times of a layer's products with `m` rows.
fn layer(format: Format, m: usize) -> Times {
    let mut all = Times {
        model: 0.0,
        steps: 0.0,
    };
    for [k, n] in PRODUCTS {
        let times = product(format, [m, k, n]);
        all.model += times.model;
        all.steps += times.steps;
    }
    all
}

/// Prints how much longer the steps are than the model, and compares that with a bound.
fn check(what: &str, times: &Times, bound: f64) {
    let ratio = times.steps / times.model;
    println!(
        "{what}: model {:.1} us, steps {:.1} us, {ratio:.3}",
        times.model, times.steps
    );
    assert!((0.999..bound).contains(&ratio), "{what}: {ratio:.3}");
}

/// The stages of the first and last groups overlap with nothing: at most three of the steps of each
/// product, and 64 strips have at least 8 groups. Without overlap the vector threads' time would be
/// added, which is a third of the matrix unit's.
#[test]
fn products_of_a_prompt_overlap_as_the_model_assumes() {
    check("products of a layer, 512 rows", &layer(Q4_0, 512), 1.06);
}

/// A product quantizes its row before it starts, and its first copy overlaps with nothing.
#[test]
fn products_of_a_token_overlap_as_the_model_assumes() {
    check("products of a layer, 1 row", &layer(Q4_0, 1), 1.06);
    let q8_0 = (WeightType::Q8_0, "q8_0", 8);
    check("products of a layer, 1 row, Q8_0", &layer(q8_0, 1), 1.06);
}

/// Packets of one thread last longer than the bytes, so a step must give every thread a task. That
/// must also hold if a strip has more than half of a step's bytes (8192), and if a step's bytes are
/// three strips for each thread (1152).
#[test]
fn rows_of_16_bits_are_shared_by_all_threads() {
    let of = |weight, name| layer((weight, name, 16), 1);
    check("16 bits, Q4_0", &of(WeightType::Q4_0, "q4_0"), 1.06);
    check("16 bits, Q8_0", &of(WeightType::Q8_0, "q8_0"), 1.06);
    let short = product((WeightType::Q4_0, "q4_0", 16), [1, 1152, 6912]);
    check("16 bits, 1152 by 6912", &short, 1.06);
}

/// A head of keys and values has 8 groups in 11 steps; the first three and the last three leave a
/// unit idle. Without overlap the matrix unit's time would be added, which is almost half of the
/// vector threads'.
#[test]
fn attention_of_a_prompt_overlaps_as_the_model_assumes() {
    let packets = counted("whole_attention_f16_h64_4on1_r512") * 512.0 * 32.0;
    let times = times(&attend(512), [CACHE_BYTES, packets, 0.0]);
    check("attention of a layer, 512 rows", &times, 1.1);
}

/// A head of keys and values is one tile of rows, which one thread computes, and half of the
/// threads pack its two parts of 256 positions.
#[test]
fn attention_of_a_token_takes_at_most_twice_the_model() {
    let packets = counted("whole_attention_f16_h64_32on8_r1") * 512.0 * 32.0;
    let times = times(&attend(1), [CACHE_BYTES, packets, 0.0]);
    check("attention of a layer, 1 row", &times, 2.0);
}

/// The strips that a step of a dot product copies, and the tasks that multiply the strips of the
/// previous step.
type DotStep = (usize, usize);
/// A product, its threads and tiles of VTCM, the tasks that quantize its rows, and its steps.
type DotCase = (Format, [usize; 3], usize, usize, usize, &'static [DotStep]);

/// A step has the strips of 256 KiB, at least two for each thread and at least 8, if they fit in
/// VTCM twice.
#[test]
fn a_step_of_dot_products_gives_each_thread_whole_pairs() {
    let q8_0 = (WeightType::Q8_0, "q8_0", 8);
    let two_digits = (WeightType::Q4_0, "q4_0", 16);
    let all = VTCM_TILES;
    // A strip of 2048 Q4_0 takes 18 tiles of VTCM, and its activations take 2.
    let cases: [DotCase; 14] = [
        // 8 strips, although 7 have 256 KiB.
        (
            Q4_0,
            [1, 2048, 768],
            4,
            all,
            1,
            &[(8, 1), (8, 4), (8, 4), (0, 4)],
        ),
        (
            Q4_0,
            [1, 2048, 768],
            1,
            all,
            1,
            &[(8, 1), (8, 1), (8, 1), (0, 1)],
        ),
        (Q4_0, [2, 2048, 512], 4, all, 2, &[(8, 1), (8, 4), (0, 4)]),
        (q8_0, [1, 8192, 512], 4, all, 1, &[(8, 1), (8, 4), (0, 4)]),
        // 56 strips have 256 KiB; one row of two digits is quantized without a separate step.
        (Q4_0, [1, 256, 2048], 4, all, 1, &[(56, 1), (8, 4), (0, 4)]),
        (
            two_digits,
            [1, 1152, 640],
            4,
            all,
            0,
            &[(8, 1), (8, 4), (4, 4), (0, 2)],
        ),
        // 12 strips: two for each of 6 threads.
        (
            two_digits,
            [1, 1152, 640],
            6,
            all,
            0,
            &[(12, 1), (8, 6), (0, 4)],
        ),
        // 20 threads would process 40 strips, but there are only 16 tasks.
        (
            Q4_0,
            [1, 2048, 1920],
            20,
            all,
            1,
            &[(40, 1), (20, 10), (0, 10)],
        ),
        // Few strips.
        (Q4_0, [1, 2048, 96], 4, all, 1, &[(3, 1), (0, 2)]),
        (Q4_0, [1, 2048, 64], 4, all, 1, &[(2, 1), (0, 1)]),
        (Q4_0, [1, 2048, 1], 4, all, 1, &[(1, 1), (0, 1)]),
        // If VTCM is small, steps have 7, 7, 3 strips and one.
        (
            Q4_0,
            [1, 2048, 384],
            4,
            2 + 14 * 18,
            1,
            &[(6, 1), (6, 3), (0, 3)],
        ),
        (
            Q4_0,
            [1, 2048, 96],
            4,
            2 + 6 * 18,
            1,
            &[(2, 1), (1, 1), (0, 1)],
        ),
        (
            Q4_0,
            [1, 2048, 96],
            4,
            2 + 2 * 18,
            1,
            &[(1, 1), (1, 1), (1, 1), (0, 1)],
        ),
    ];
    for (format, shape, threads, vtcm_tiles, quantized, want) in cases {
        let panel = MatrixLayout::new(format.0, shape[2], shape[1]).unwrap();
        let panel_bytes = panel.panel().panel_bytes();
        let quantization = StepRecord {
            tasks: quantized,
            ..StepRecord::default()
        };
        let steps = want.iter().map(|(strips, tasks)| StepRecord {
            copied_bytes: strips * panel_bytes,
            tasks: *tasks,
            ..StepRecord::default()
        });
        let first = (quantized > 0).then_some(quantization);
        let want: Vec<StepRecord> = first.into_iter().chain(steps).collect();
        let have = steps_of(format, shape, threads, vtcm_tiles);
        assert_eq!(
            have, want,
            "{shape:?}, {threads} threads, {vtcm_tiles} tiles"
        );
    }
}
