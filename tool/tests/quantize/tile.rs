//! Groups of 2 × 16 weights of 4 or 8 bits in a pack file next to the model.

use ggml_rust_npu::gguf::File;
use ggml_rust_npu::packfile::{Pack, SourceHash, sampled};
use half::f16;

use crate::common::{folder, quantize};
use crate::decoder::{values, written};
use crate::fails;

/// The values of a tensor in groups of 4 or 8 bits, row by row, by the picture in
/// `hexagon_ops::layout`.
fn values_of_groups(packed: &[u8], bits: usize, k: usize, n: usize) -> Vec<f32> {
    let (tiles, tile_bytes) = (k / 32, 128 * bits);
    let panel_bytes = tiles * tile_bytes + tiles.div_ceil(2) * 128;
    let mut values = vec![0.0; k * n];
    for (at, value) in values.iter_mut().enumerate() {
        let (row, column) = (at % k, at / k);
        let panel = &packed[column / 32 * panel_bytes..][..panel_bytes];
        let (kt, k, n) = (row / 32, row % 32, column % 32);
        let (line, group) = (k / 2, k / 2 * 2 + n / 16);
        let byte = panel[kt * tile_bytes + line * bits / 16 * 128 + 4 * n + 2 * (k % 2) + line % 2];
        let scale = tiles * tile_bytes + kt / 2 * 128 + 4 * group + kt % 2 * 2;
        let d = f16::from_le_bytes([panel[scale], panel[scale + 1]]).to_f32();
        *value = match bits {
            4 => d * (f32::from(byte >> (line / 2 % 2 * 4) & 15) - 8.0),
            _ => d * (f32::from(byte) - 128.0),
        };
    }
    values
}

/// Range of the loss in 4 bits. Rounding uniform numbers to a step of an eighth of the largest
/// gives a variance of (1/8)^2 / 12; divided by their variance of 1/3 that is 3.9e-3. The real loss
/// is smaller, as few groups reach the largest number, but more than a quarter of that.
const LOST_4: std::ops::Range<f64> = 1e-3..5e-3;

/// Range of the loss in 8 bits: the same with a step of a 127th gives 1.6e-5.
const LOST_8: std::ops::Range<f64> = 1e-5..2e-5;

#[test]
fn the_pack_has_the_weights_of_the_blocks_in_groups_near_the_source() {
    let errors = grouped("q4_0", 4, &LOST_4, true);
    assert!(errors[1] < 0.95 * errors[0], "{errors:?}");
}

#[test]
fn groups_of_8_bits_are_near_the_source_too() {
    grouped("q8_0", 8, &LOST_8, false);
}

/// Quantizes to a type and to groups of `bits`, whose loss must be in `range`, and returns the
/// error of the products without statistics, and with them if the type uses any.
fn grouped(
    format: &str,
    bits: usize,
    range: &std::ops::Range<f64>,
    uses_statistics: bool,
) -> Vec<f64> {
    let folder = folder(&format!("tool_tile_{format}"));
    let (from, statistics) = written(&folder, "llama");
    let source = values(&from);
    let means = values(&statistics);
    let (plain, model) = (folder.join("plain.gguf"), folder.join("grouped.gguf"));
    let mut errors = Vec::new();
    let runs = [&[][..], &["--imatrix", statistics.to_str().unwrap()]];
    for more in runs.into_iter().take(1 + usize::from(uses_statistics)) {
        let args = [&["--type", format], more].concat();
        quantize(&from, &plain, &args);
        quantize(&from, &model, &[&args[..], &["--tile-group"]].concat());
        let file = File::open(&model).unwrap();
        let other = File::open(&plain).unwrap();
        let pack = Pack::open(&model.with_extension("groups.npu")).unwrap();
        let (mut weighted, mut packed_names) = (0.0, 0);
        for tensor in &file.header().tensors {
            let name = &tensor.name;
            let data = file.data(tensor);
            // Writing a pack must not change the model.
            assert!(
                data == other.data(other.header().tensor(name).unwrap()),
                "{name}"
            );
            let Some(entry) = pack.entry(name) else {
                assert!(
                    !name.starts_with("blk.") || tensor.dims == 1,
                    "{name} is missing"
                );
                continue;
            };
            packed_names += 1;
            assert!(name.starts_with("blk."), "{name}");
            assert_eq!(entry.source.sampled, sampled(data));
            assert_eq!(entry.source.full, SourceHash::of(data));
            pack.check(entry).unwrap();
            let (k, n) = (tensor.ne[0], tensor.ne[1]);
            let have = values_of_groups(&pack.payload(entry).unwrap().0, bits, k, n);
            let want = &source[name];
            let squares = |error: bool| -> f64 {
                let pairs = want.iter().zip(&have);
                pairs
                    .map(|(w, h)| f64::from(if error { w - h } else { *w }).powi(2))
                    .sum()
            };
            let lost = squares(true) / squares(false);
            assert!(
                (entry.error / lost - 1.0).abs() < 1e-3,
                "{name}: {} {lost}",
                entry.error
            );
            assert!(more.len() == 2 || range.contains(&lost), "{name}: {lost}");
            let columns = means[&format!("{name}.in_sum2")].iter().cycle();
            let pairs = want.iter().zip(&have).zip(columns);
            weighted += pairs
                .map(|((w, h), x)| f64::from(x * (w - h) * (w - h)))
                .sum::<f64>();
        }
        // Seven weights in each of two blocks.
        assert_eq!(packed_names, 14);
        errors.push(weighted);
    }

    let pack = model.with_extension("groups.npu");
    let inspect = |args: &[&str]| {
        let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
        command
            .arg("inspect")
            .arg(&pack)
            .args(args)
            .output()
            .unwrap()
    };
    let shown = inspect(&["--verify", model.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.status.success(), "{text}");
    assert_eq!(text.matches("groups of 2 x 16").count(), 14, "{text}");
    let options = ["--tile-group", "--imatrix --tile-group"][usize::from(uses_statistics)];
    assert!(text.contains(options), "{text}");
    // The pack belongs to the last model, so another model must refuse it.
    quantize(&from, &plain, &["--type", "q4_0"]);
    assert!(
        !inspect(&["--verify", plain.to_str().unwrap()])
            .status
            .success()
    );
    errors
}

#[test]
fn groups_go_with_q4_0_and_q8_0_alone() {
    let folder = folder("tool_tile_refused");
    let (from, _) = written(&folder, "llama");
    let to = folder.join("out.gguf");
    fails(
        &from,
        &to,
        &["--type", "q4_k", "--tile-group"],
        2,
        &["--tile-group", "q4_0", "q8_0"],
    );
    let lpbq = ["--type", "q4_0", "--lpbq", "32", "--tile-group"];
    fails(&from, &to, &lpbq, 2, &["--lpbq", "--tile-group"]);
    assert!(!to.exists());
}
