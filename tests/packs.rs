//! Proves for Rockchip that weights come from a pack file if it is theirs, that they are bit for
//! bit those that loading would pack, and that a pack that is stale, foreign or damaged changes
//! nothing.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use common::{Numbers, Weight, functions, mul_mat, packed};
use ggml_rust_npu::backend::offline::{self, Form};
use ggml_rust_npu::backend::{Buffer, Device};
use ggml_rust_npu::config::rules::{Choice, Rules};
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::loss::SquaredLoss;
use ggml_rust_npu::packfile::{Fingerprint, Pack, PackWriter, Packs, SourceHash, sampled};
use ggml_rust_npu::rockchip::RkDevice;
use ggml_rust_npu::rockchip::caps::{self, Precision, RkCaps};
use ggml_rust_npu::rockchip::layout::WeightLayout;
use ggml_rust_npu::rockchip::pack::{self, RowSource};
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::tensor::DType;
use proptest::prelude::*;
use rknpu_ops::calibrate::Method;
use rknpu_ops::sim;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn device(caps: &'static RkCaps, rules: &str, keep: bool) -> Arc<RkDevice> {
    let rknn = functions(sim::Options::new(caps.soc));
    let target = Target {
        rules: Rules::parse(rules).unwrap(),
        keep: Some(keep),
        ..Target::from(caps)
    };
    Arc::new(RkDevice::start(rknn, target).unwrap())
}

fn form(caps: &RkCaps, choice: Option<Choice>, w: &Weight) -> Form {
    let layout = WeightLayout::new(caps, choice, w.dtype, w.ne).unwrap();
    Form::Rockchip(layout, Method::default())
}

/// Writes a pack with one F16 weight: the packed form of `w` under the fingerprint of `source`.
fn write(path: &Path, form: Form, w: &Weight, source: &[u8]) {
    let side = path.with_extension("side");
    let mut writer = PackWriter::create(&side, "rk", "", ["weight"]).unwrap();
    let weight = offline::Weight {
        name: "weight",
        dtype: GgmlType::F16,
        ne: w.ne,
        data: &w.bytes,
        feedback: &[],
    };
    assert!(form.write(&weight, &mut writer, |_| true).unwrap());
    writer.finish().unwrap();
    let pack = Pack::open(&side).unwrap();
    let mut entry = pack.entry("weight").unwrap().clone();
    entry.source = Fingerprint {
        sampled: sampled(source),
        full: SourceHash::of(source),
        ..entry.source
    };
    let (bytes, scales) = pack.payload(&entry).unwrap();
    let scales: Vec<f32> = scales
        .as_chunks()
        .0
        .iter()
        .map(|x| f32::from_le_bytes(*x))
        .collect();
    let mut writer = PackWriter::create(path, "rk", "", ["weight"]).unwrap();
    writer.bytes(&bytes).unwrap();
    writer.end(entry, &scales).unwrap();
    writer.finish().unwrap();
}

/// The product with a weight on a device that may have packs. The weight has an offset in its
/// buffer.
fn product(device: &Arc<RkDevice>, w: &Weight) -> Vec<f32> {
    let act = Numbers::new(4).floats(w.ne[0] * 3 * w.ne[2]);
    let buffer = packed(device, w, 4096);
    mul_mat(
        device,
        w,
        Some((&buffer, 4096)),
        &act,
        [w.ne[0], 3, w.ne[2], 1],
    )
    .unwrap()
}

fn with_packs(device: Arc<RkDevice>, path: &Path) -> Arc<RkDevice> {
    device.use_packs(Arc::new(Packs::open(path, true).0));
    device
}

/// Chips and rules for all arithmetics.
const CASES: [(&RkCaps, &str, Option<Choice>, Precision); 7] = [
    (&caps::RK3588, "", None, Precision::Fp16),
    (
        &caps::RK3588,
        "weight=int8",
        Some(Choice::Int8),
        Precision::Int8,
    ),
    (
        &caps::RK3588,
        "weight=int8-plain",
        Some(Choice::Int8Unrotated),
        Precision::Int8Unrotated,
    ),
    (
        &caps::RK3588,
        "weight=int4",
        Some(Choice::Int4),
        Precision::Int4,
    ),
    (
        &caps::RK3576,
        "weight=int4",
        Some(Choice::Int4),
        Precision::Int4Int8,
    ),
    (
        &caps::RK3576,
        "weight=int4-fp16",
        Some(Choice::Int4Fp16),
        Precision::Int4Fp16,
    ),
    (
        &caps::RK3566,
        "weight=int8",
        Some(Choice::Int8),
        Precision::Int8,
    ),
];

#[test]
fn a_weight_comes_from_the_pack_and_is_the_one_that_loading_packs() {
    let ne = [192, 100, 2, 1];
    let w = Weight::random(&mut Numbers::new(1), DType::F16, ne);
    let other = Weight::random(&mut Numbers::new(2), DType::F16, ne);
    for (index, (caps, rules, choice, precision)) in CASES.into_iter().enumerate() {
        let Form::Rockchip(layout, _) = form(caps, choice, &w) else {
            unreachable!("a Rockchip layout")
        };
        assert_eq!(layout.precision, precision);
        let path = path(&format!("rknpu_{index}.npu"));
        let want = product(&device(caps, rules, true), &w);
        for keep in [true, false] {
            write(&path, form(caps, choice, &w), &w, &w.bytes);
            let have = product(&with_packs(device(caps, rules, keep), &path), &w);
            assert_eq!(have, want, "{precision:?}");
            // The pack has another weight's bytes under this weight's fingerprint, so the result
            // shows that the pack was used.
            write(&path, form(caps, choice, &w), &other, &w.bytes);
            let have = product(&with_packs(device(caps, rules, keep), &path), &w);
            assert_eq!(
                have,
                product(&device(caps, rules, true), &other),
                "{precision:?}"
            );
        }
    }
}

#[test]
fn a_kept_tensor_reads_back_as_it_was_written() {
    let w = Weight::random(&mut Numbers::new(1), DType::F16, [64, 70, 1, 1]);
    let path = path("rknpu_kept.npu");
    write(
        &path,
        form(&caps::RK3588, Some(Choice::Int8), &w),
        &w,
        &w.bytes,
    );
    let device = with_packs(device(&caps::RK3588, "weight=int8", true), &path);
    let buffer = packed(&device, &w, 4096);
    let mut back = vec![0; w.bytes.len()];
    buffer.read(&w.tensor(Some(4096)), 0, &mut back).unwrap();
    assert!(back == w.bytes);
}

#[test]
fn a_pack_that_is_not_of_this_weight_is_not_used() {
    let ne = [64, 100, 1, 1];
    let w = Weight::random(&mut Numbers::new(1), DType::F16, ne);
    let other = Weight::random(&mut Numbers::new(2), DType::F16, ne);
    let (chip, rules) = (&caps::RK3588, "weight=int8");
    let want = product(&device(chip, rules, true), &w);
    let path = path("rknpu_stale.npu");
    let same = |what: &str| {
        let have = product(&with_packs(device(chip, rules, true), &path), &w);
        assert_eq!(have, want, "{what}");
    };
    let int8 = |w: &Weight| form(chip, Some(Choice::Int8), w);
    write(&path, int8(&other), &other, &other.bytes);
    same("another model");
    write(
        &path,
        form(&caps::RK3566, Some(Choice::Int8), &w),
        &other,
        &w.bytes,
    );
    same("another chip");
    write(&path, form(chip, None, &w), &other, &w.bytes);
    same("another arithmetic");
    let long = Weight::random(&mut Numbers::new(3), DType::F16, [128, 100, 1, 1]);
    write(&path, int8(&long), &long, &w.bytes);
    same("another shape");
    write(&path, int8(&w), &other, &w.bytes);
    let good = std::fs::read(&path).unwrap();
    let scales = good.len() - 4096;
    for at in [4096 + 17, scales + 5] {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        std::fs::write(&path, &bad).unwrap();
        same("corrupted");
    }
    std::fs::write(&path, &good[..good.len() - 1]).unwrap();
    same("truncated");
}

#[test]
fn a_change_between_the_samples_is_found_by_the_full_hash() {
    // In a tensor of 64 pages the samples would cover everything; this one is larger, so it has
    // gaps.
    let mut w = Weight::random(&mut Numbers::new(1), DType::F16, [1024, 256, 1, 1]);
    let (chip, rules) = (&caps::RK3588, "weight=fp16");
    let path = path("rknpu_full.npu");
    write(&path, form(chip, None, &w), &w, &w.bytes);
    let before = sampled(&w.bytes);
    let at = (0..w.bytes.len()).step_by(512).find(|at| {
        w.bytes[*at] ^= 1;
        let unseen = sampled(&w.bytes) == before;
        w.bytes[*at] ^= u8::from(!unseen);
        unseen
    });
    assert!(at.is_some(), "the samples are all of the bytes");
    let want = product(&device(chip, rules, true), &w);
    let have = product(&with_packs(device(chip, rules, true), &path), &w);
    assert_eq!(have, want);
    let sampled_only = device(chip, rules, true);
    sampled_only.use_packs(Arc::new(Packs::open(&path, false).0));
    assert_ne!(
        product(&sampled_only, &w),
        want,
        "this is what the full hash is for"
    );
}

#[test]
fn a_folder_of_packs_has_the_weights_of_all() {
    let folder = path("rknpu_folder");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let (chip, rules) = (&caps::RK3566, "weight=int8");
    let make = |seed| Weight::random(&mut Numbers::new(seed), DType::F16, [96, 64, 1, 1]);
    let (a, b, marker) = (make(1), make(2), make(3));
    let int8 = |w: &Weight| form(chip, Some(Choice::Int8), w);
    write(&folder.join("a.npu"), int8(&a), &a, &a.bytes);
    write(&folder.join("b.npu"), int8(&b), &marker, &b.bytes);
    std::fs::write(folder.join("broken.npu"), b"no pack").unwrap();
    std::fs::write(folder.join("notes.txt"), b"no pack either").unwrap();
    let (packs, failed) = Packs::open(&folder, false);
    assert_eq!((packs.len(), failed.len()), (2, 1));
    assert!(failed[0].0.ends_with("broken.npu"), "{failed:?}");
    let device = device(chip, rules, true);
    let want = [product(&device, &a), product(&device, &marker)];
    device.use_packs(Arc::new(packs));
    assert_eq!([product(&device, &a), product(&device, &b)], want);
}

/// Log lines of this program.
static LINES: Mutex<Vec<(log::Level, String)>> = Mutex::new(Vec::new());

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        let line = (record.level(), record.args().to_string());
        LINES.lock().unwrap().push(line);
    }

    fn flush(&self) {}
}

/// The line names the best match for the weight, and is a warning the first time only.
#[test]
fn a_weight_that_no_pack_has_is_told_once_with_the_nearest_reason() {
    // Fails only if another test has already set it.
    let _ = log::set_logger(&Lines);
    log::set_max_level(log::LevelFilter::Debug);
    let (chip, rules) = (&caps::RK3566, "weight=int8");
    let make = |seed| Weight::random(&mut Numbers::new(seed), DType::F16, [96, 64, 1, 1]);
    let (w, other) = (make(1), make(2));
    let int8 = |w: &Weight| form(chip, Some(Choice::Int8), w);
    // Packs of a folder are read in the order of their names. The best match is the second of
    // three.
    let of_layout = |path: &Path| write(path, form(chip, None, &w), &w, &w.bytes);
    let of_source = |path: &Path| write(path, int8(&other), &other, &other.bytes);
    let broken = |path: &Path| {
        write(path, int8(&w), &w, &w.bytes);
        let mut bytes = std::fs::read(path).unwrap();
        bytes[4096] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    type Make<'a> = &'a dyn Fn(&Path);
    let cases: [(&str, [Make; 3], &str); 3] = [
        (
            "told_broken",
            [&of_layout, &broken, &of_source],
            "corrupted",
        ),
        (
            "told_layout",
            [&of_source, &of_layout, &of_source],
            "the pack has it as Rockchip FP16",
        ),
        (
            "told_source",
            [&of_source, &of_source, &of_source],
            "sampled hash is another one",
        ),
    ];
    for (name, make, reason) in cases {
        let folder = path(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        for (file, make) in ["a.npu", "b.npu", "c.npu"].iter().zip(make) {
            make(&folder.join(file));
        }
        let device = with_packs(device(chip, rules, true), &folder);
        (0..2).for_each(|_| _ = product(&device, &w));
        let which = if name == "told_source" {
            "a.npu"
        } else {
            "b.npu"
        };
        let begin = format!("{}: weight is not taken", folder.join(which).display());
        let lines = LINES.lock().unwrap();
        let of_it = lines
            .iter()
            .filter(|(_, line)| line.contains(&format!("{name}/")));
        let levels: Vec<log::Level> = of_it
            .map(|(level, line)| {
                assert!(line.starts_with(&begin) && line.contains(reason), "{line}");
                *level
            })
            .collect();
        assert_eq!(levels, [log::Level::Warn, log::Level::Debug], "{name}");
    }
}

/// The last segment of K is shorter than the others, but the NPU reads as many bytes of it.
#[test]
fn the_end_of_a_shorter_segment_is_cleared_whatever_lay_there() {
    for (caps, _, choice, precision) in CASES {
        let k = match precision {
            Precision::Fp16 => 4128,
            Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => 8224,
            _ => 608,
        };
        let w = Weight::random(&mut Numbers::new(7), DType::F16, [k, 64, 1, 1]);
        let Form::Rockchip(layout, calibration) = form(caps, choice, &w) else {
            unreachable!("a Rockchip layout")
        };
        assert!(layout.segments * layout.segment_k > k, "{precision:?}");
        let source = RowSource {
            dtype: DType::F16,
            rows: &w.bytes,
            dequantize: None,
            calibration,
            feedback: &[],
        };
        let [clean, dirty] = [0, 0xff].map(|before| {
            let mut scales = vec![layout.empty_scale(); layout.scales()];
            let mut out = vec![before; layout.bytes()];
            pack::pack_rows(&layout, source, 0..64, &mut scales, &mut out);
            let blocks = 0..layout.blocks_per_slice();
            let block = |block| &out[layout.block_offset(block)..][..layout.block_bytes()];
            blocks.map(block).collect::<Vec<_>>().concat()
        });
        assert!(clean == dirty, "{precision:?}: old bytes are left");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_are_the_bytes_of_the_whole(
        which in 0usize..7,
        k in 1usize..12,
        n in 1usize..300,
        slices in 1usize..3,
        seed in any::<u32>(),
    ) {
        let (caps, _, choice, precision) = CASES[which];
        let w = Weight::random(&mut Numbers::new(seed.into()), DType::F16, [32 * k, n, slices, 1]);
        let Form::Rockchip(layout, calibration) = form(caps, choice, &w) else {
            unreachable!("a Rockchip layout")
        };
        let source = RowSource {
            dtype: DType::F16,
            rows: &w.bytes,
            dequantize: dequantize::of(GgmlType::F16),
            calibration,
            feedback: &[],
        };
        let mut scales = vec![layout.empty_scale(); layout.scales()];
        let mut whole = vec![0; layout.bytes()];
        pack::pack_rows(&layout, source, 0..n * slices, &mut scales, &mut whole);

        let form = Form::Rockchip(layout, calibration);
        let (mut bytes, mut out, mut part) = (Vec::new(), Vec::new(), Vec::new());
        let row = w.row_bytes();
        let mut error = SquaredLoss::default();
        for (piece, rows) in form.pieces().into_iter().enumerate() {
            let rows = &w.bytes[rows.start * row..rows.end * row];
            let source = RowSource { rows, ..source };
            error = error + form.pack(piece, source, &mut out, &mut part);
            bytes.extend_from_slice(&out);
        }
        prop_assert!(bytes == whole, "{precision:?}");
        prop_assert_eq!(part, scales);
        // All numbers are uniform: with a step of absmax / levels, the error is step^2 / 12 and the
        // variance 1/3. After a rotation, the absmax of a row of at most 352 elements is below 4.5
        // standard deviations.
        let limit = match precision {
            Precision::Fp16 => 0.0,
            Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => (4.5f64 / 127.0).powi(2) / 12.0,
            _ => (4.5f64 / 7.5).powi(2) / 12.0,
        };
        prop_assert!(error.relative() <= limit, "{precision:?}: {:.2e} is over {limit:.2e}", error.relative());
        prop_assert!(precision == Precision::Fp16 || error.relative() > limit / 100.0, "{precision:?}");
    }
}
