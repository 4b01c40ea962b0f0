//! Proves that the host's vector operations do the same as Hexagon's, and that kernels need no more
//! packets than recorded.
//!
//! Both need the pinned nightly and an emulator, and are skipped with a printed reason without
//! them: `HEXAGON_QEMU` names a qemu-hexagon with HVX floating point; without it, `qemu-hexagon`
//! from the path runs the integer part. `UPDATE_PACKETS=1` rewrites the table of packets.
#![expect(
    clippy::unwrap_used,
    reason = "a panic is a failure, random bits are cut"
)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../tools/guest/src/ops.rs"]
mod ops;
mod packets;
#[path = "../../tools/guest/src/rows.rs"]
mod rows;
#[path = "../../tools/guest/src/samples.rs"]
mod samples;
mod units;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Numbers, Skip, Weights, block_values, guest};
use half::f16;
use hexagon_ops::hvx::{self, Vector};
use hexagon_ops::layout::{Line, TILE_DIM, WeightType, f16_tile_offset};
use hexagon_ops::ops::tensor::Type;
use units::{Copies, without_units};

/// A qemu-hexagon.
struct Emulator {
    path: PathBuf,
    /// The newest CPU that the emulator knows. Without it, the emulator would refuse an executable
    /// for a newer architecture.
    cpu: String,
    has_float: bool,
}

/// The emulator to use.
fn emulator() -> Result<Emulator, Skip> {
    let (path, has_float) = match std::env::var_os("HEXAGON_QEMU") {
        Some(path) => (path.into(), true),
        None => (PathBuf::from("qemu-hexagon"), false),
    };
    let help = Command::new(&path)
        .args(["-cpu", "help"])
        .output()
        .map_err(|e| format!("{}: {e}", path.display()))?;
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let cpu = help
        .lines()
        .map(str::trim)
        .rfind(|line| line.starts_with('v'));
    // Old versions of QEMU list no CPUs, but know this one.
    let cpu = cpu.unwrap_or("v67").to_owned();
    Ok(Emulator {
        path,
        cpu,
        has_float,
    })
}

/// Runs the guest on `input` and returns its output.
fn run(emulator: &Emulator, guest: &Path, input: Vec<u8>) -> Vec<u8> {
    // A qfloat value that is copied or stored becomes NaN.
    run_as("strict", emulator, guest, input)
}

/// Returns the emulator's mode that keeps qfloat values as the hardware of a library does, with
/// exponents; strict, too.
fn rules(library: &str) -> &'static str {
    match library {
        "v68" | "v69" | "v73q" => "v73",
        _ => "v79",
    }
}

/// Runs the guest on `input` with a mode of the emulator's qfloat, and returns its output.
fn run_as(qfloat: &str, emulator: &Emulator, guest: &Path, input: Vec<u8>) -> Vec<u8> {
    // The compiler stores qfloat values in the libraries for V68 and V69, where integers convert to
    // floats in many registers. Before V79 a register has all their bits, so that nothing is lost.
    let stores = ["v68", "v69"].map(|library| guest.iter().any(|part| part == library));
    let qfloat = if stores.contains(&true) {
        "rounded"
    } else {
        qfloat
    };
    let mut child = Command::new(&emulator.path)
        .args(["-cpu", &emulator.cpu])
        .arg(guest)
        .env("HVX_QFLOAT", qfloat)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        // The guest may end early; its exit status shows that.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(
        output.status.success(),
        "{}: {}",
        guest.display(),
        output.status
    );
    output.stdout
}

/// Three input vectors and a scalar that suit operation `op`.
fn inputs(op: usize, turn: usize, numbers: &mut Numbers) -> ([Line; 3], i32) {
    const EDGES_F16: [u16; 12] = [
        0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0x6400,
    ];
    const EDGES_F32: [u32; 12] = [
        0,
        0x8000_0000,
        1,
        0x0080_0000,
        0x3f80_0000,
        0xbf80_0000,
        0x477f_e000,
        0x477f_f000,
        0x3380_0000,
        0x3380_0001,
        0x3300_0000,
        0x7f7f_ffff,
    ];
    let name = ops::NAMES.get(op).copied().unwrap_or("accumulate");
    let mut lines = [Line::ZERO; 3];
    for line in &mut lines {
        for i in 0..32 {
            let random = (numbers.bits() >> 32) as u32;
            let edge = numbers.below(4) == 0;
            let word = match name {
                // Small normal numbers, both as f32 and as two f16.
                "widen_mul_add" | "add_f16" => random & 0x0fff_0fff | 0x3000_3000,
                // Neither NaN nor overflow.
                "sub_f16" | "max_f16" => random & 0xbfff_bfff,
                "mul_f16" | "mul_add_f16" | "widen_mul_f16" | "widen_in_order_f16" if edge => {
                    let half = |numbers: &mut Numbers| {
                        u32::from(EDGES_F16[numbers.below(EDGES_F16.len())])
                    };
                    half(numbers) << 16 | half(numbers)
                }
                "narrow_f32" | "mul_f32" | "add_f32" | "sub_f32" | "max_f32" | "min_f32"
                | "select_gt_f32" | "fold_f32" | "accumulate"
                    if edge =>
                {
                    EDGES_F32[numbers.below(EDGES_F32.len())]
                }
                // Exponents near those of f16, so that rounding, overflow and subnormals all occur.
                "narrow_f32" => random & 0x807f_ffff | (100 + random % 47) << 23,
                "mul_f32" | "add_f32" | "sub_f32" | "max_f32" | "min_f32" | "select_gt_f32"
                | "fold_f32" | "unbias" | "accumulate" => random & 0x8fff_ffff | 0x3000_0000,
                _ if turn == 0 => [
                    0,
                    u32::MAX,
                    0x8000_0000,
                    0x7fff_ffff,
                    0x8080_8080,
                    0x7f7f_7f7f,
                ][numbers.below(6)],
                _ => random,
            };
            line.0[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
    (lines, (numbers.bits() >> 32) as i32)
}

/// Returns `true` if two results agree; NaNs of any kind do, and zeros: qfloat has no negative one.
fn same(op: usize, have: Vector, want: Vector) -> bool {
    let name = ops::NAMES.get(op).copied().unwrap_or("accumulate");
    let [have, want] = [have, want].map(|v| -> [u8; 128] { bytemuck::cast(v) });
    if op < ops::FIRST_FLOAT {
        return have == want;
    }
    if matches!(
        name,
        "mul_f16" | "mul_add_f16" | "f16_from_b" | "sub_f16" | "max_f16" | "narrow_f32"
    ) {
        let [have, want] = [have, want].map(|v| -> [u16; 64] { bytemuck::cast(v) });
        return have.iter().zip(&want).all(|(h, w)| {
            h == w || (h | w) & 0x7fff == 0 || (h & 0x7fff > 0x7c00 && w & 0x7fff > 0x7c00)
        });
    }
    let [have, want] = [have, want].map(|v| -> [u32; 32] { bytemuck::cast(v) });
    let is_nan = |bits: u32| f32::from_bits(bits).is_nan();
    have.iter()
        .zip(&want)
        .all(|(h, w)| h == w || (h | w) & 0x7fff_ffff == 0 || (is_nan(*h) && is_nan(*w)))
}

/// The result of operation `op` on the host.
fn expected(library: &str, op: usize, [a, b, c]: [Vector; 3], scalar: i32) -> (Vector, Vector) {
    let is_qfloat = !matches!(library, "v73" | "v75");
    if is_qfloat && ops::NAMES.get(op) == Some(&"mul_add_f16") {
        // Without IEEE arithmetic, a multiply-add rounds its product as well.
        let minus_c = hvx::sub_f16(hvx::splat_h(0x8000), c);
        let sum = hvx::sub_f16(hvx::mul_f16(a, b), minus_c);
        return (sum, sum);
    }
    ops::run(op, [a, b, c], scalar)
}

/// Compares every operation the emulator knows, `turns` times.
fn compare(library: &str, turns: usize) -> Result<usize, Skip> {
    let emulator = emulator()?;
    let guest = guest(library)?;
    let last = if emulator.has_float {
        ops::ACCUMULATE
    } else {
        ops::FIRST_FLOAT - 1
    };
    let mut numbers = Numbers::default();
    let mut cases = Vec::new();
    for op in 0..=last {
        cases.extend((0..turns).map(|turn| (op, inputs(op, turn, &mut numbers))));
    }
    let mut request = Vec::new();
    for (op, (lines, scalar)) in &cases {
        let mut head = Line::ZERO;
        head.0[..4].copy_from_slice(&i32::try_from(*op).unwrap().to_le_bytes());
        head.0[4..8].copy_from_slice(&scalar.to_le_bytes());
        request.extend_from_slice(&head.0);
        request.extend_from_slice(bytemuck::cast_slice(lines));
    }
    let answer = run(&emulator, &guest, request);
    assert_eq!(answer.len(), cases.len() * 256, "the guest stopped early");
    for ((op, (lines, scalar)), answer) in cases.iter().zip(answer.chunks_exact(256)) {
        let want = expected(library, *op, lines.each_ref().map(hvx::load), *scalar);
        let have =
            [0, 1].map(|i| bytemuck::pod_read_unaligned::<Vector>(&answer[128 * i..][..128]));
        assert!(
            same(*op, have[0], want.0) && same(*op, have[1], want.1),
            "{} differs on {library}\nin {lines:x?} {scalar:#x}\nhexagon {have:x?}\nhost {want:x?}",
            ops::NAMES.get(*op).unwrap_or(&"accumulate")
        );
    }
    Ok(last + 1)
}

/// Returns the emulator, if it has HVX floating point; otherwise prints why the test is skipped.
fn float_emulator() -> Option<Emulator> {
    match emulator() {
        Ok(found) if found.has_float => return Some(found),
        Ok(_) => println!("SKIPPED: the emulator has no HVX floating point"),
        Err(reason) => println!("SKIPPED: {reason}"),
    }
    None
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn host_operations_are_hexagons() {
    for library in common::LIBRARIES {
        match compare(library, 200) {
            Ok(count) => println!("{count} operations agree on {library}"),
            Err(reason) => println!("SKIPPED {library}: {reason}"),
        }
    }
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn replaced_instructions_are_exact() {
    let Ok(emulator) = emulator() else {
        return println!("SKIPPED: no emulator");
    };
    let mut numbers = Numbers::default();
    let halves = |first: u16| -> Line {
        let mut halves = [0_u16; 64];
        for (to, half) in halves.iter_mut().zip(first..=first + 63) {
            *to = half;
        }
        Line(bytemuck::cast(halves))
    };
    // First all halfwords; then words around each power of two, whose lowest bits are rounded, and
    // others.
    let all: Vec<Line> = (0..1024).map(|i| halves(64 * i)).collect();
    let mut words = |i: u32| {
        let lanes: [u32; 32] = std::array::from_fn(|lane| {
            let random = (numbers.bits() >> 32) as u32;
            let near = 1_u32.rotate_left(i).wrapping_add(random % 5) ^ 2;
            let word = if lane % 4 == 0 {
                near
            } else {
                random >> (i % 32)
            };
            if random & 1 == 0 {
                word
            } else {
                word.wrapping_neg()
            }
        });
        Line(bytemuck::cast(lanes))
    };
    let words: Vec<Line> = (0..4096_u32).map(&mut words).collect();
    let op = |name: &str| ops::NAMES.iter().position(|have| *have == name).unwrap();
    for library in ["v68", "v69"] {
        let guest = match guest(library) {
            Ok(guest) => guest,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        for (name, a, b) in [
            ("f16_from_h", &all, &all),
            ("f32_from_w", &words, &words),
            ("f32_from_small_w", &words, &words),
            // Each halfword multiplied by other ones.
            ("mul_upper_h", &all, &words),
        ] {
            let cases = a.iter().zip(b.iter().rev());
            let requests = cases.clone().map(|(a, b)| {
                let mut head = Line::ZERO;
                head.0[..4].copy_from_slice(&i32::try_from(op(name)).unwrap().to_le_bytes());
                [head.0, a.0, b.0, [0; 128]].concat()
            });
            let answer = run(&emulator, &guest, requests.flatten().collect());
            assert_eq!(answer.len(), a.len() * 256, "the guest stopped early");
            for ((a, b), have) in cases.zip(answer.chunks_exact(256)) {
                let have: Vector = bytemuck::pod_read_unaligned(&have[..128]);
                let operands = [hvx::load(a), hvx::load(b), hvx::splat_w(0)];
                let want = ops::run(op(name), operands, 0).0;
                let [have, want] = [have, want].map(|v| -> [u8; 128] { bytemuck::cast(v) });
                assert_eq!(have, want, "{name} of {a:x?} and {b:x?} on {library}");
            }
            println!("{library}: {name} is exact for {} vectors", a.len());
        }
    }
}

/// A request to the guest that is only a number.
fn request(number: i32) -> Vec<u8> {
    let mut head = Line::ZERO;
    head.0[..4].copy_from_slice(&number.to_le_bytes());
    [head.0, [0; 128], [0; 128], [0; 128]].concat()
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn bytes_are_copied_and_filled_as_by_loops() {
    let emulator = match emulator() {
        Ok(found) => found,
        Err(reason) => return println!("SKIPPED: {reason}"),
    };
    for library in common::LIBRARIES {
        let guest = match guest(library) {
            Ok(guest) => guest,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        let text = String::from_utf8(run(&emulator, &guest, request(-3))).unwrap();
        assert_eq!(
            text, "Copy 262144\nMove 262144\nFill 262144\nPage 65536\n",
            "{library}"
        );
    }
}

/// Returns the elements of a result as f32.
fn elements(bytes: &[u8], dtype: Type) -> Vec<f32> {
    match dtype {
        Type::F16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|half| half::f16::from_le_bytes(*half).to_f32())
            .collect(),
        _ => bytes
            .as_chunks()
            .0
            .iter()
            .map(|word| f32::from_le_bytes(*word))
            .collect(),
    }
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn rows_have_the_hosts_values_up_to_their_ends() {
    let Some(emulator) = float_emulator() else {
        return;
    };
    for library in common::LIBRARIES {
        let guest = match guest(library) {
            Ok(guest) => guest,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        let requests = (0..rows::CASES).map(|case| {
            let mut head = Line::ZERO;
            head.0[..4].copy_from_slice(&(-5_i32).to_le_bytes());
            head.0[4..8].copy_from_slice(&i32::try_from(case).unwrap().to_le_bytes());
            [head.0, [0; 128], [0; 128], [0; 128]].concat()
        });
        let input: Vec<u8> = requests.flatten().collect();
        // Runs once with IEEE rounding, and once as the hardware rounds.
        let mut answers = run(&emulator, &guest, input.clone());
        answers.extend(run_as(rules(library), &emulator, &guest, input));
        let bytes = rows::LINES * size_of::<Line>();
        assert_eq!(
            answers.len(),
            2 * rows::CASES * bytes,
            "the guest stopped early"
        );
        for (case, have) in answers.chunks_exact(bytes).enumerate() {
            let (is_by_rules, case) = (case >= rows::CASES, case % rows::CASES);
            let mut arena = rows::Arena {
                src: [[Line::ZERO; rows::LINES]; 3],
                dst: [Line::ZERO; rows::LINES],
            };
            let dtype = rows::compute(case, &mut arena).unwrap();
            let want = elements(bytemuck::cast_slice(&arena.dst), dtype);
            // The rounding of f16, and of qfloat.
            let mut relative = match (dtype, library) {
                (Type::F16, _) => 1e-3,
                (_, "v73" | "v75") => 2e-6,
                // With qfloat, a logistic function has another polynomial: the host's, with IEEE
                // arithmetic, is off by 2.6e-6.
                _ => 3e-6,
            };
            if is_by_rules && rules(library) == "v73" {
                // A qf32 has 23 bits, so angles of thousands are off by 2^-12.
                relative = if dtype == Type::F16 { 2e-3 } else { 3e-4 };
            }
            for (i, (have, want)) in elements(have, dtype).iter().zip(&want).enumerate() {
                assert!(
                    (have - want).abs() <= relative * want.abs().max(1.0),
                    "case {case} on {library}: element {i} is {have}, not {want}"
                );
            }
        }
    }
}

/// Returns a request to the guest of a number and a scalar.
fn request_with(number: i32, scalar: u32) -> Vec<u8> {
    let mut request = request(number);
    request[4..8].copy_from_slice(&scalar.to_le_bytes());
    request
}

/// Returns the f16 numbers of a result.
fn halves(bytes: &[u8]) -> Vec<f16> {
    let (halves, _) = bytes.as_chunks();
    halves.iter().map(|two| f16::from_le_bytes(*two)).collect()
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn conventional_dequantizers_give_the_nearest_f16() {
    const TILE: usize = TILE_DIM * TILE_DIM;
    let Some(emulator) = float_emulator() else {
        return;
    };
    let mut numbers = Numbers::default();
    for library in common::LIBRARIES {
        let guest = match guest(library) {
            Ok(guest) => guest,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        for _ in 0..8 {
            let seed = (numbers.bits() >> 32) as u32;
            let answer = halves(&run(&emulator, &guest, request_with(-7, seed)));
            assert_eq!(answer.len(), 2 * samples::K_TILES * TILE, "{library}");
            let kernels = answer.chunks_exact(samples::K_TILES * TILE);
            for (kernel, tiles) in ["from rows", "from tiles"].iter().zip(kernels) {
                for (n, row) in samples::rows(seed).iter().enumerate() {
                    let blocks = row.as_chunks::<{ samples::BLOCK_BYTES }>().0;
                    for (tile, block) in tiles.chunks_exact(TILE).zip(blocks) {
                        let want = block_values(WeightType::Q4_0, block);
                        for (k, want) in want.into_iter().enumerate() {
                            let have = tile[f16_tile_offset(k, n) / 2];
                            let want = f16::from_f64(want);
                            assert_eq!(have, want, "{kernel} on {library}, seed {seed}: {k}, {n}");
                        }
                    }
                }
            }
        }
    }
}

/// Returns the largest squared error of dequantized weights, over the squares of the weights.
///
/// Rounding to f16 is an error of up to 2^-11 of a number, in the mean 4e-8 of its square. Scales
/// of super-blocks are rounded before, and with qfloat products before a minimum is added; these
/// have ten bits before V79.
fn most_error(library: &str, weight: WeightType) -> f64 {
    use WeightType as W;
    match weight {
        W::Q4_1 | W::Q5_1 | W::Q4K | W::Q5K | W::Q2K if rules(library) == "v73" => 4e-7,
        W::Q4_1 | W::Q5_1 | W::Q4K | W::Q5K | W::Q2K => 1.5e-7,
        W::Q6K | W::Iq4Xs | W::Q3K => 1e-7,
        _ => 5e-8,
    }
}

/// Returns the unit in the last place of the f16 next to `value`.
fn f16_unit(value: f64) -> f64 {
    2_f64
        .powf(value.abs().log2().floor() - 10.0)
        .max(2_f64.powi(-24))
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn dequantized_weights_are_next_to_the_exact_ones() {
    let Some(emulator) = float_emulator() else {
        return;
    };
    let mut worse = Vec::new();
    for library in common::LIBRARIES {
        let guest = match guest(library) {
            Ok(guest) => guest,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        for (i, weight) in WeightType::ALL.into_iter().enumerate() {
            if weight == WeightType::F16 {
                continue;
            }
            let mut numbers = Numbers::default();
            let (mut error, mut norm, mut largest) = (0.0, 0.0, 0.0_f64);
            for _ in 0..4 {
                let weights = Weights::random(weight, TILE_DIM, samples::TILE_K, &mut numbers);
                let mut input = request_with(-10, u32::try_from(i).unwrap());
                input.extend_from_slice(bytemuck::cast_slice(weights.panel_lines(0)));
                let answer = halves(&run_as(rules(library), &emulator, &guest, input));
                assert_eq!(
                    answer.len(),
                    TILE_DIM * samples::TILE_K,
                    "{weight:?} on {library}"
                );
                for (kt, tile) in answer.chunks_exact(TILE_DIM * TILE_DIM).enumerate() {
                    for (at, n) in (0..TILE_DIM * TILE_DIM).map(|i| (i / TILE_DIM, i % TILE_DIM)) {
                        let have = tile[f16_tile_offset(at, n) / 2].to_f64();
                        let k = kt * TILE_DIM + at;
                        let (want, terms) = (weights.values[n][k], weights.terms[n][k]);
                        error += (have - want).powi(2);
                        norm += want.powi(2);
                        largest =
                            largest.max((have - want).abs() / f16_unit(want.abs().max(terms)));
                    }
                }
            }
            let nmse = error / norm;
            println!("{library} {weight:?}: squared error {nmse:.1e}, largest {largest:.2} units");
            if nmse.is_nan() || nmse > most_error(library, weight) {
                worse.push(format!("{library} {weight:?}: {nmse:.1e}"));
            }
        }
    }
    assert!(worse.is_empty(), "{}", worse.join("\n"));
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn rows_that_are_not_finite_give_nan() {
    let Some(emulator) = float_emulator() else {
        return;
    };
    for library in common::LIBRARIES {
        let guest = match guest(library) {
            Ok(guest) => guest,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        for element in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let request = request_with(-11, element.to_bits());
            let answer = elements(
                &run_as(rules(library), &emulator, &guest, request),
                Type::F32,
            );
            let (spoiled, finite) = answer.split_at(5 * TILE_DIM);
            assert_eq!(finite.len(), TILE_DIM, "{library}");
            for (row, results) in spoiled.chunks_exact(TILE_DIM).enumerate() {
                assert!(
                    results.iter().all(|x| x.is_nan()),
                    "{library}, {element}, {row}: {results:?}"
                );
            }
            // Before V79 qfloat has no zero.
            assert!(
                finite.iter().all(|x| x.abs() < 1e-30),
                "{library}, {element}: {finite:?}"
            );
        }
    }
}

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn conventional_exponentials_are_within_two_units() {
    /// f16 from -0 to minus infinity.
    const NUMBERS: u16 = 0x7c01;
    const ROW: usize = 1024;
    let Some(emulator) = float_emulator() else {
        return;
    };
    for library in common::LIBRARIES {
        let guest = match guest(library) {
            Ok(guest) => guest,
            Err(reason) => return println!("SKIPPED {library}: {reason}"),
        };
        let answer = run(&emulator, &guest, request(-8));
        let (answer, sums) = answer.split_at(answer.len() - 2 * size_of::<Line>());
        let (each, row) = answer.split_at(answer.len() - 2 * ROW);
        // Units in the last place: 1.53 with IEEE arithmetic, and 1.70 with qfloat, which also
        // rounds products.
        let bound = if matches!(library, "v73" | "v75") {
            1.53
        } else {
            1.7
        };
        let mut largest = 0.0_f64;
        let each = halves(each);
        assert!(
            each.len() >= usize::from(NUMBERS),
            "{library}: the guest stopped early"
        );
        for (bits, have) in (0x8000..0x8000 + NUMBERS).zip(each) {
            let x = f16::from_bits(bits).to_f64();
            let want = x.exp();
            let unit = 2_f64.powf(want.log2().floor() - 10.0).max(2_f64.powi(-24));
            let error = (have.to_f64() - want).abs() / unit;
            assert!(
                error <= bound,
                "{library}: e^{x} is {have}, {error} units from {want}"
            );
            largest = largest.max(error);
        }
        println!("{library}: largest error {largest:.2} units in the last place");
        let largest = f16::from_bits(samples::LARGEST).to_f64();
        let row = halves(row);
        for (k, have) in (0..).zip(&row) {
            let x = f16::from_bits(samples::score(k)).to_f64() - largest;
            // The difference is rounded by at most 2^-9; the exponential has the error above.
            let want = x.exp();
            let error = (have.to_f64() - want).abs();
            assert!(
                error <= want * (2_f64.powi(-9) + 1.0 / 512.0),
                "{library}: {k}: {have} for {want}"
            );
        }
        let want: f64 = row.iter().map(|weight| weight.to_f64()).sum();
        let have: f32 = elements(sums, Type::F32).iter().sum();
        assert!(
            (f64::from(have) - want).abs() <= 1e-5 * want,
            "{library}: {have} for {want}"
        );
    }
}

/// Commands that a guest executes on each number of threads, unless `NPU_TEST_COMMANDS` says
/// otherwise.
const COMMANDS: u32 = 10_000;

#[test]
#[ignore = "needs the pinned nightly and an emulator: make dsp"]
fn random_commands_give_the_same_bytes_on_several_threads() {
    let emulator = match emulator() {
        Ok(found) => found,
        Err(reason) => return println!("SKIPPED: {reason}"),
    };
    if !emulator.has_float {
        return println!("SKIPPED: HEXAGON_QEMU does not name an emulator with HVX floating point");
    }
    let commands = std::env::var("NPU_TEST_COMMANDS")
        .ok()
        .map_or(COMMANDS, |text| text.parse().unwrap());
    let mut numbers = Numbers::default();
    for (library, threads) in [("v73", 4), ("v79", 4), ("v79", 2), ("v73", 8)] {
        let guest = match guest(library) {
            Ok(guest) => without_units(&guest, Copies::Refused),
            Err(reason) => return println!("SKIPPED: {reason}"),
        };
        let commands = if threads == 4 {
            commands
        } else {
            commands / 10
        };
        let mut head = Line::ZERO;
        let words: &mut [u32; 32] = bytemuck::cast_mut(&mut head);
        let seed = (numbers.bits() >> 32) as u32;
        words[..4].copy_from_slice(&[(-6_i32).cast_unsigned(), threads, commands, seed]);
        let input = bytemuck::cast_slice(&[head, Line::ZERO, Line::ZERO, Line::ZERO]).to_vec();
        let began = std::time::Instant::now();
        let text = String::from_utf8(run(&emulator, &guest, input)).unwrap();
        assert_eq!(text, format!("{commands} same\n"), "{library}, seed {seed}");
        println!(
            "{library}: {commands} commands on {threads} threads in {:?}",
            began.elapsed()
        );
    }
}
