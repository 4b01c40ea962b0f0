//! Proves whole multiplications, by both code paths and with every weight type, against f64 sums:
//! shapes below, at and above each tile, group and chunk edge, few and many threads, small and
//! large VTCM.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

mod common;

use common::{Numbers, Weights};
use hexagon_ops::error::Error;
use hexagon_ops::hmx::{Form, Hmx};
use hexagon_ops::layout::{Line, MatrixLayout, Tile, WeightType};
use hexagon_ops::ops::matmul::{Dots, ExpertMatMul, GemmPlan, Machine, MatMul, RowStarts};
use hexagon_ops::rt::Engine;
use test_kit::nmse;

/// A machine's parts, for borrowing.
struct Parts {
    engine: Engine,
    vtcm: Vec<Tile>,
    hmx: Hmx,
}

impl Parts {
    fn new(threads: usize, vtcm_tiles: usize) -> Self {
        let vtcm = vec![Tile::ZERO; vtcm_tiles];
        Self {
            engine: Engine::new(threads),
            hmx: Hmx::new(&vtcm),
            vtcm,
        }
    }

    /// As [`Self::new`], on a chip with another matrix unit, or none.
    fn of_form(form: Form, threads: usize, vtcm_tiles: usize) -> Self {
        let mut parts = Self::new(threads, vtcm_tiles);
        parts.hmx = Hmx::of_form(form, &parts.vtcm);
        parts
    }

    fn machine(&mut self) -> Machine<'_> {
        Machine {
            engine: &self.engine,
            vtcm: &mut self.vtcm,
            hmx: &mut self.hmx,
        }
    }
}

/// Returns the largest possible error of one result, times a hundredth more for f32 sums.
///
/// FP16 path: each weight and each activation is rounded by at most 2^-11 of itself, and the result
/// by 2^-11 of all terms. 8-bit path: each activation by half a step, amax/127/2 of its block, and
/// a Q4_1 minimum's factor by 2^-11. With a second digit the step is that of half the first one's.
///
/// Either path: the scale and the minimum of a super-block's tile are rounded by 2^-11 of
/// themselves, subnormal ones by 2^-25, which the quant (at most 31) multiplies; in the 8-bit path
/// the minimum's factor too, and activations may be as large as the block's largest.
fn bound(
    (m, dots): (usize, Dots),
    weight: WeightType,
    act: &[f32],
    [w, terms]: [&[f64]; 2],
) -> f64 {
    let amax = act.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    let expanded: f64 = terms
        .iter()
        .filter(|term| **term > 0.0)
        .map(|term| f64::from(amax) * (term * 2_f64.powi(-10) + 2_f64.powi(-20)))
        .sum();
    let step = if dots == Dots::TwoDigits {
        1.0 / 254.0 / 254.0
    } else {
        1.0 / 254.0
    };
    let sum: f64 = if m <= dots.rows() && weight.has_dot_product() {
        let blocks = act.chunks(32).zip(w.chunks(32)).map(|(act, w)| {
            let amax = act.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
            let min = if matches!(weight, WeightType::Q4_1 | WeightType::Q5_1) {
                0.02 * 32.0 * 2_f64.powi(-11)
            } else {
                0.0
            };
            f64::from(amax) * (w.iter().map(|w| w.abs()).sum::<f64>() * step + min)
        });
        blocks.sum()
    } else {
        act.iter()
            .zip(w)
            .map(|(a, w)| (f64::from(*a) * w).abs() * 3.0 * 2_f64.powi(-11))
            .sum()
    };
    1.01 * (sum + expanded) + 1e-6
}

/// Checks one row of a product of `m` rows against [`bound`].
fn check_row(m: (usize, Dots), w: &Weights, act: &[f32], have: &[f32], what: &str) {
    let weight = w.layout.panel().weight();
    for (n, have) in have.iter().enumerate() {
        let error = (f64::from(*have) - common::dot(act, &w.values[n])).abs();
        let bound = bound(m, weight, act, [&w.values[n], &w.terms[n]]);
        assert!(
            error <= bound,
            "{weight:?} {what} column {n}: {error:e} over {bound:e}"
        );
    }
}

/// Multiplies random matrices; rows of both sides are further apart than they are long.
fn check(
    parts: &mut Parts,
    weight: WeightType,
    shape: (usize, usize, usize),
    numbers: &mut Numbers,
) {
    check_with(Dots::TwoRows, parts, weight, shape, numbers);
}

/// As [`check`], with a choice of dot products.
fn check_with(
    dots: Dots,
    parts: &mut Parts,
    weight: WeightType,
    shape: (usize, usize, usize),
    numbers: &mut Numbers,
) {
    let (m, k, n) = shape;
    let k = k.next_multiple_of(weight.block_elems());
    let w = Weights::random(weight, n, k, numbers);
    let act_stride = k + 3;
    // Rows whose stride is whole vectors are written together, other rows one by one, so both are
    // tested.
    let dst_stride = if n.is_multiple_of(32) { n + 32 } else { n + 5 };
    let act: Vec<f32> = (0..m * act_stride).map(|_| numbers.float() * 5.0).collect();
    let mut dst = vec![f32::NAN; m * dst_stride];
    let job = MatMul {
        layout: w.layout,
        weights: &w.lines,
        m,
        dots,
        act: &act,
        act_rows: RowStarts::Strided(act_stride),
        dst: &mut dst,
        dst_rows: RowStarts::Strided(dst_stride),
        epilogue: None,
    };
    let threads = parts.engine.threads();
    job.run(parts.machine())
        .unwrap_or_else(|e| panic!("{weight:?} {m}x{k}x{n} threads {threads}: {e}"));
    for row in 0..m {
        let act = &act[row * act_stride..][..k];
        let have = &dst[row * dst_stride..][..n];
        check_row(
            (m, dots),
            &w,
            act,
            have,
            &format!("{shape:?} threads {threads} row {row}"),
        );
        let gap = &dst[row * dst_stride + n..][..dst_stride - n];
        assert!(
            gap.iter().all(|x| x.is_nan()),
            "{weight:?} {m}x{k}x{n}: wrote past row {row}"
        );
    }
}

#[test]
fn every_type_and_edge_matches_f64() {
    let mut numbers = Numbers::default();
    for threads in [1, 3] {
        let mut parts = Parts::new(threads, 512);
        for weight in WeightType::ALL {
            for shape in [
                (1, 32, 1),
                (1, 64, 31),
                (1, 96, 33),
                (2, 160, 70),
                (2, 32, 32),
                (3, 32, 1),
                (4, 96, 65),
                (9, 64, 96),
                (31, 64, 32),
                (32, 128, 33),
                (33, 1056, 40),
                (65, 160, 300),
                (72, 96, 64),
            ] {
                check(&mut parts, weight, shape, &mut numbers);
            }
        }
    }
}

#[test]
fn a_row_of_two_digits_is_exact_to_16_bits() {
    let mut numbers = Numbers::default();
    for threads in [1, 3] {
        let mut parts = Parts::new(threads, 512);
        for weight in WeightType::ALL {
            for shape in [(1, 32, 1), (1, 96, 33), (1, 1024, 64), (1, 2080, 300)] {
                check_with(Dots::TwoDigits, &mut parts, weight, shape, &mut numbers);
            }
            // Two rows are computed by the matrix unit.
            check_with(
                Dots::TwoDigits,
                &mut parts,
                weight,
                (2, 96, 33),
                &mut numbers,
            );
        }
    }
}

#[test]
fn small_vtcm_cuts_m_and_groups() {
    let mut numbers = Numbers::default();
    for weight in WeightType::ALL {
        let layout = MatrixLayout::new(weight, 100, 256).unwrap();
        let least = GemmPlan {
            m_tiles: 1,
            group: 1,
        }
        .vtcm_tiles(layout);
        let mut parts = Parts::new(2, least);
        check(&mut parts, weight, (70, 256, 100), &mut numbers);
        assert!(matches!(
            GemmPlan::new(layout, 70, least - 1),
            Err(Error::VtcmFull { .. })
        ));
        for vtcm_tiles in least..least + 200 {
            let plan = GemmPlan::new(layout, 1000, vtcm_tiles).unwrap();
            assert!(
                plan.vtcm_tiles(layout) <= vtcm_tiles,
                "{weight:?} {plan:?} in {vtcm_tiles}"
            );
        }
    }
}

/// Of 256 columns and 100 rows: a tile of scales, 80 tiles of activations and 2 of their factors;
/// twice three strips of raw panels, of tiles, and of results.
#[test]
fn a_plan_takes_the_tiles_of_all_its_areas() {
    let plan = GemmPlan {
        m_tiles: 10,
        group: 3,
    };
    for (weight, raw) in [(WeightType::Q4_0, 7), (WeightType::F16, 0)] {
        let layout = MatrixLayout::new(weight, 100, 256).unwrap();
        let want = 1 + 2 + 80 + 2 * (raw + 24 + 30);
        assert_eq!(plan.vtcm_tiles(layout), want, "{weight:?}");
    }
}

/// Weights pass through VTCM once per chunk of M, so fewer chunks come first, and then longer
/// groups.
#[test]
fn a_plan_has_the_fewest_chunks_and_the_longest_groups() {
    for (weight, n, k) in [
        (WeightType::Q4_0, 100, 256),
        (WeightType::Q8_0, 2048, 1024),
        (WeightType::F16, 1024, 64),
    ] {
        let layout = MatrixLayout::new(weight, n, k).unwrap();
        let most = layout.n_strips().min(8);
        let tiles = |m_tiles, group| GemmPlan { m_tiles, group }.vtcm_tiles(layout);
        for m in [1_usize, 32, 33, 1000] {
            let all = m.div_ceil(32);
            for vtcm_tiles in tiles(1, 1)..tiles(1, 1) + 1000 {
                let plan = GemmPlan::new(layout, m, vtcm_tiles).unwrap();
                let what = format!("{weight:?}, {m} rows in {vtcm_tiles} tiles: {plan:?}");
                let fits = |m_tiles, group| tiles(m_tiles, group) <= vtcm_tiles;
                let largest = (1..=all).rev().find(|m_tiles| fits(*m_tiles, 1)).unwrap();
                // The plan reserves memory for the factors of all rows, so 32 more rows may fit
                // than it finds.
                let equal = |m_tiles: usize| all.div_ceil(all.div_ceil(m_tiles.max(1)));
                let right = [equal(largest), equal(largest - 1)];
                assert!(right.contains(&plan.m_tiles), "{what}");
                assert!(fits(plan.m_tiles, plan.group), "{what}");
                let is_longest = plan.group == most || !fits(plan.m_tiles, plan.group + 1);
                assert!((1..=most).contains(&plan.group) && is_longest, "{what}");
            }
        }
    }
}

#[test]
fn one_panel_larger_than_a_step_still_fits() {
    let mut numbers = Numbers::default();
    let mut parts = Parts::new(2, 400);
    check(&mut parts, WeightType::Q8_0, (1, 8192, 96), &mut numbers);
    check(&mut parts, WeightType::Mxfp4, (2, 8192, 96), &mut numbers);
    let w = Weights::random(WeightType::Q8_0, 32, 8192, &mut numbers);
    let act = vec![0.0; 8192];
    let mut dst = vec![0.0; 32];
    let job = MatMul {
        layout: w.layout,
        weights: &w.lines,
        m: 1,
        dots: Dots::TwoRows,
        act: &act,
        act_rows: RowStarts::Strided(0),
        dst: &mut dst,
        dst_rows: RowStarts::Strided(0),
        epilogue: None,
    };
    // VTCM for two panels of 8192 Q8_0 and 32 rows, but activations take some of its tiles.
    let error = job.run(Parts::new(1, 100).machine()).unwrap_err();
    let Error::VtcmFull {
        what,
        need_bytes,
        have_bytes,
    } = error
    else {
        panic!("{error:?}")
    };
    assert_eq!((what, need_bytes), ("one panel, twice", 557_056));
    assert!(
        have_bytes < 100 * 2048 && have_bytes > 50 * 2048,
        "{have_bytes}"
    );
}

#[test]
fn listed_rows_are_gathered_and_scattered() {
    let mut numbers = Numbers::default();
    let mut parts = Parts::new(2, 512);
    for weight in [WeightType::Q4_0, WeightType::F16] {
        for starts in [vec![3_usize, 0], vec![5, 1, 0, 7, 2]] {
            let w = Weights::random(weight, 48, 64, &mut numbers);
            let act: Vec<f32> = (0..8 * 64).map(|_| numbers.float()).collect();
            let mut dst = vec![0.0; 8 * 48];
            let act_rows: Vec<usize> = starts.iter().map(|row| row * 64).collect();
            let dst_rows: Vec<usize> = starts.iter().map(|row| (7 - row) * 48).collect();
            let job = MatMul {
                layout: w.layout,
                weights: &w.lines,
                m: starts.len(),
                dots: Dots::TwoRows,
                act: &act,
                act_rows: RowStarts::Listed(&act_rows),
                dst: &mut dst,
                dst_rows: RowStarts::Listed(&dst_rows),
                epilogue: None,
            };
            job.run(parts.machine()).unwrap();
            for row in 0..8 {
                let have = &dst[(7 - row) * 48..][..48];
                if starts.contains(&row) {
                    let act = &act[row * 64..][..64];
                    check_row(
                        (starts.len(), Dots::TwoRows),
                        &w,
                        act,
                        have,
                        &format!("row {row}"),
                    );
                } else {
                    assert_eq!(have, [0.0; 48], "{weight:?}: row {row} was not asked for");
                }
            }
        }
    }
}

#[test]
fn tokens_meet_the_experts_they_chose() {
    let mut numbers = Numbers::default();
    let mut parts = Parts::new(2, 512);
    let (n, n_experts, n_tokens, n_slots) = (40, 5, 7, 2);
    for weight in WeightType::ALL {
        let k = 96_usize.next_multiple_of(weight.block_elems());
        let experts: Vec<Weights> = (0..n_experts)
            .map(|_| Weights::random(weight, n, k, &mut numbers))
            .collect();
        let lines: Vec<Line> = experts
            .iter()
            .flat_map(|w| w.lines.iter().copied())
            .collect();
        // Expert 0 gets most rows and expert 4 none; a token chooses an expert at most once.
        let ids: Vec<i32> = (0..n_tokens * n_slots)
            .map(|row| [0, 1, 0, 2, 0, 3][row % 6])
            .collect();
        for shared in [false, true] {
            let act_strides = if shared { [k, 0] } else { [n_slots * k, k] };
            let act: Vec<f32> = (0..n_tokens * n_slots * k)
                .map(|_| numbers.float())
                .collect();
            let mut dst = vec![0.0; n_tokens * n_slots * n];
            let mut scratch = vec![0; 2 * ids.len()];
            let mut run = |ids: &[i32], scratch: &mut [usize]| {
                let product = ExpertMatMul {
                    layout: experts[0].layout,
                    weights: &lines,
                    dots: Dots::TwoRows,
                    ids,
                    n_slots,
                    act: &act,
                    act_strides,
                    dst: &mut dst,
                    dst_strides: [n_slots * n, n],
                };
                product.run(parts.machine(), scratch)
            };
            let bad = Err(Error::Index {
                what: "expert",
                index: 5,
                limit: 5,
            });
            assert_eq!(run(&[0, 5], &mut scratch), bad);
            let short = Err(Error::Length {
                what: "scratch",
                have: 27,
                want: 28,
            });
            assert_eq!(run(&ids, &mut scratch[1..]), short);
            assert_eq!(run(&ids, &mut scratch), Ok(()));
            for (row, id) in ids.iter().enumerate() {
                let w = &experts[usize::try_from(*id).unwrap()];
                let at = row / n_slots * act_strides[0] + row % n_slots * act_strides[1];
                let m = ids.iter().filter(|other| *other == id).count();
                let what = format!("row {row} expert {id}");
                check_row(
                    (m, Dots::TwoRows),
                    w,
                    &act[at..at + k],
                    &dst[row * n..][..n],
                    &what,
                );
            }
        }
    }
}

#[test]
fn activations_of_any_magnitude_pass_the_matrix_unit() {
    let mut numbers = Numbers::default();
    let mut parts = Parts::new(1, 512);
    let w = Weights::random(WeightType::Q4_0, 32, 128, &mut numbers);
    // The second tile has all rows whose factors are not representable in f16.
    let odd = [1e-30_f32, 1e-8, 1.0, 3e4, 1e6, 1e30, 0.0];
    let scales = [&[1.0; 32], &odd[..], &[0.5; 25], &[3e4; 8]].concat();
    let act: Vec<f32> = scales
        .iter()
        .flat_map(|scale| {
            (0..128)
                .map(|_| numbers.float() * scale)
                .collect::<Vec<_>>()
        })
        .collect();
    let mut dst = vec![0.0; scales.len() * 32];
    let job = MatMul {
        layout: w.layout,
        weights: &w.lines,
        m: scales.len(),
        dots: Dots::TwoRows,
        act: &act,
        act_rows: RowStarts::Strided(128),
        dst: &mut dst,
        dst_rows: RowStarts::Strided(32),
        epilogue: None,
    };
    job.run(parts.machine()).unwrap();
    for (row, scale) in scales.iter().enumerate() {
        let want: Vec<f64> = w
            .values
            .iter()
            .map(|w| common::dot(&act[row * 128..][..128], w))
            .collect();
        let error = nmse(&dst[row * 32..][..32], &want);
        // Three relative roundings of 2^-12, squared, times 20, because sums are smaller than their
        // terms.
        assert!(error < 3e-6, "scale {scale:e}: {error:e}");
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let mut numbers = Numbers::default();
    let mut parts = Parts::new(1, 64);
    let w = Weights::random(WeightType::Q4_0, 32, 32, &mut numbers);
    let mut run = |weights: usize, act: usize, dst: usize, rows: RowStarts<'_>| {
        let (act, mut dst) = (vec![0.0; act], vec![0.0; dst]);
        let job = MatMul {
            layout: w.layout,
            weights: &w.lines[..weights],
            m: 2,
            dots: Dots::TwoRows,
            act: &act,
            act_rows: RowStarts::Strided(32),
            dst: &mut dst,
            dst_rows: rows,
            epilogue: None,
        };
        job.run(parts.machine())
    };
    let lines = w.lines.len();
    let length = |what, have, want| Err(Error::Length { what, have, want });
    assert_eq!(run(lines, 64, 64, RowStarts::Strided(32)), Ok(()));
    assert_eq!(
        run(lines - 1, 64, 64, RowStarts::Strided(32)),
        length("weight lines", lines - 1, lines)
    );
    assert_eq!(
        run(lines, 63, 64, RowStarts::Strided(32)),
        length("activations", 63, 64)
    );
    assert_eq!(
        run(lines, 64, 63, RowStarts::Strided(32)),
        length("results", 63, 64)
    );
    assert_eq!(
        run(lines, 64, 64, RowStarts::Listed(&[0])),
        length("results", 1, 2)
    );
    assert_eq!(
        run(lines, 64, 64, RowStarts::Listed(&[0, usize::MAX])),
        length("results", 64, usize::MAX)
    );
    assert_eq!(
        run(lines, 64, 64, RowStarts::Strided(16)),
        Err(Error::Overlap {
            first: 0,
            second: 16,
            row: 32
        })
    );
}

/// Host speed: `cargo test --release --test matmul -- --ignored --nocapture`.
#[test]
#[ignore = "a benchmark"]
fn host_speed() {
    let mut numbers = Numbers::default();
    let mut parts = Parts::new(2, 4096);
    for weight in WeightType::ALL {
        let w = Weights::random(weight, 1536, 576, &mut numbers);
        for m in [1, 2, 8, 32, 128] {
            let act: Vec<f32> = (0..m * 576).map(|_| numbers.float()).collect();
            let mut dst = vec![0.0; m * 1536];
            let turns = if m < 32 { 60 } else { 10 };
            let start = std::time::Instant::now();
            for _ in 0..turns {
                let job = MatMul {
                    layout: w.layout,
                    weights: &w.lines,
                    m,
                    dots: Dots::TwoRows,
                    act: &act,
                    act_rows: RowStarts::Strided(576),
                    dst: &mut dst,
                    dst_rows: RowStarts::Strided(1536),
                    epilogue: None,
                };
                job.run(parts.machine()).unwrap();
            }
            let seconds = start.elapsed().as_secs_f64() / f64::from(turns);
            let ns_per_weight = seconds * 1e9 / (1536.0 * 576.0);
            println!(
                "{weight:?} M {m}: {:.0} us, {ns_per_weight:.3} ns per weight",
                seconds * 1e6
            );
        }
    }
}

#[test]
fn chips_with_an_older_unit_or_none_multiply_as_exactly() {
    let mut numbers = Numbers::default();
    for form in [Form::RoundOnly, Form::Vectors] {
        for weight in WeightType::ALL {
            for (threads, vtcm_tiles, shape) in [
                (1, 1024, (1, 64, 33)),
                (4, 1024, (5, 96, 64)),
                (3, 64, (70, 256, 70)),
                (2, 512, (33, 64, 300)),
            ] {
                let mut parts = Parts::of_form(form, threads, vtcm_tiles);
                check_with(Dots::None, &mut parts, weight, shape, &mut numbers);
                check(&mut parts, weight, shape, &mut numbers);
            }
        }
    }
}

/// Weights of which each column is blocks of one quant, with the scale that `scale` returns for a
/// column and a block.
fn of_one_quant(
    weight: WeightType,
    (n, k): (usize, usize),
    scale: impl Fn(usize, usize) -> half::f16,
    quant: u8,
) -> (MatrixLayout, Vec<Line>) {
    let layout = MatrixLayout::new(weight, n, k).unwrap();
    let mut lines = vec![Line::ZERO; layout.matrix_bytes() / size_of::<Line>()];
    let quants = if weight == WeightType::Q4_0 { 16 } else { 32 };
    for row in 0..n {
        let blocks = (0..k / 32).flat_map(|block| {
            [&scale(row, block).to_le_bytes()[..], &vec![quant; quants]].concat()
        });
        let blocks: Vec<u8> = blocks.collect();
        layout
            .pack_row(bytemuck::cast_slice_mut(&mut lines), row, &blocks)
            .unwrap();
    }
    (layout, lines)
}

/// Multiplies on the vector units; rows follow each other.
fn on_vectors((layout, lines): &(MatrixLayout, Vec<Line>), act: &[f32]) -> Vec<Vec<f32>> {
    let (k, n) = (layout.panel().k(), layout.n());
    let m = act.len() / k;
    let mut dst = vec![0.0; m * n];
    let job = MatMul {
        layout: *layout,
        weights: lines,
        m,
        dots: Dots::None,
        act,
        act_rows: RowStarts::Strided(k),
        dst: &mut dst,
        dst_rows: RowStarts::Strided(n),
        epilogue: None,
    };
    job.run(Parts::of_form(Form::Vectors, 2, 2048).machine())
        .unwrap();
    dst.chunks(n).map(<[f32]>::to_vec).collect()
}

/// All weights and activations are as large as they can be, so that all terms have one sign.
#[test]
fn no_sum_in_fixed_point_leaves_32_bits() {
    let scale = half::f16::from_f32(0.01);
    for (weight, quant, value) in [
        (WeightType::Q8_0, 0x80, -128.0),
        (WeightType::Q8_0, 0x7f, 127.0),
        (WeightType::Q4_0, 0x00, -8.0),
        (WeightType::Q4_0, 0xff, 7.0),
    ] {
        for k in [96, 512, 2048, 4096, 16384] {
            let weights = of_one_quant(weight, (32, k), |_, _| scale, quant);
            let act: Vec<f32> = (0..5 * k).map(|i| [3.7, -3.7][i / k % 2]).collect();
            for (row, have) in on_vectors(&weights, &act).iter().enumerate() {
                let want = f64::from(act[row * k]) * value * scale.to_f64() * k as f64;
                for x in have {
                    // A scale is rounded to eleven bits, and a step of activations is 2^-14.
                    let error = (f64::from(*x) / want - 1.0).abs();
                    assert!(
                        error < 2_f64.powi(-10),
                        "{weight:?}, K {k}, row {row}: {x} for {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_and_columns_that_are_not_finite_stay_alone_without_a_matrix_unit() {
    let (n, k) = (40, 160);
    for weight in [WeightType::Q4_0, WeightType::Q8_0] {
        let scale = |row, block| match (row, block) {
            (7, 2) => half::f16::INFINITY,
            (9, 4) => half::f16::NAN,
            // Zeros, and numbers that are not normal.
            (11, _) => half::f16::ZERO,
            (12, _) => half::f16::from_bits(3),
            _ => half::f16::from_f32(0.5),
        };
        let weights = of_one_quant(weight, (n, k), scale, 0x11);
        let value = if weight == WeightType::Q4_0 {
            -7.0
        } else {
            17.0
        };
        let mut act = vec![2.0; 6 * k];
        act[2 * k + 3] = f32::NAN;
        act[4 * k + 159] = f32::NEG_INFINITY;
        for (row, have) in on_vectors(&weights, &act).iter().enumerate() {
            for (column, x) in have.iter().enumerate() {
                let scale = scale(column, 0).to_f64();
                let want = 2.0 * value * scale * k as f64;
                let is_right = if matches!(row, 2 | 4) || matches!(column, 7 | 9) {
                    x.is_nan()
                } else {
                    (f64::from(*x) - want).abs() <= 1e-3 * want.abs()
                };
                assert!(
                    is_right,
                    "{weight:?}, row {row}, column {column}: {x} for {want}"
                );
            }
        }
    }
}
