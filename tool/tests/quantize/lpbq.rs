//! Low-power blocks in the files of a model.

use ggml_rust_npu::gguf::{File, GgmlType};
use ggml_rust_npu::packfile::Pack;
use half::f16;

use crate::common::{folder, quantize};
use crate::decoder::{model, values, written};

/// `d` of each block of a row, and the levels after it.
fn blocks(bytes: &[u8]) -> Vec<(f64, Vec<i32>)> {
    let block = |block: &[u8]| {
        let d = f16::from_le_bytes([block[0], block[1]]).to_f64();
        (
            d,
            block[2..]
                .iter()
                .map(|level| i32::from(level.cast_signed()))
                .collect(),
        )
    };
    bytes.chunks_exact(34).map(block).collect()
}

#[test]
fn rows_of_q8_0_have_one_scale_and_levels_on_the_grid() {
    let folder = folder("tool_lpbq_rows");
    let (from, _) = written(&folder, "llama");
    for length in [16, 32, 64] {
        let to = folder.join("lpbq.gguf");
        quantize(
            &from,
            &to,
            &["--type", "q8_0", "--lpbq", &length.to_string()],
        );
        let file = File::open(&to).unwrap();
        let weights = file
            .header()
            .tensors
            .iter()
            .filter(|tensor| tensor.name.starts_with("blk.") && tensor.dims == 2);
        let mut rows = 0;
        for tensor in weights {
            assert_eq!(tensor.dtype, GgmlType::Q8_0);
            for row in file.data(tensor).chunks_exact(tensor.ne[0] / 32 * 34) {
                let blocks = blocks(row);
                assert!(
                    blocks.iter().all(|(d, _)| *d == blocks[0].0 && *d > 0.0),
                    "{}",
                    tensor.name
                );
                let levels: Vec<i32> = blocks.into_iter().flat_map(|(_, levels)| levels).collect();
                for block in levels.chunks(length) {
                    let on_grid = |m: i32| {
                        block
                            .iter()
                            .all(|level| level % m == 0 && (-8..=7).contains(&(level / m)))
                    };
                    assert!((1..=16).any(on_grid), "{}: {block:?}", tensor.name);
                }
                rows += 1;
            }
        }
        assert!(rows > 500, "{rows}");
    }
}

#[test]
fn q4_0_and_q8_0_hold_the_same_low_power_blocks() {
    let folder = folder("tool_lpbq_same");
    let (from, statistics) = written(&folder, "llama");
    let statistics = statistics.to_str().unwrap();
    for (length, more) in [
        ("32", &[][..]),
        ("64", &[]),
        ("32", &["--imatrix", statistics, "--awq"]),
    ] {
        let [short, long] = ["q4_0", "q8_0"].map(|format| {
            let to = folder.join(format!("{format}.gguf"));
            let args = ["--type", format, "--lpbq", length, "--embeddings", "q8_0"];
            quantize(&from, &to, &[&args, more].concat());
            values(&to)
        });
        assert_eq!(short.len(), long.len());
        for (name, values) in &short {
            let same = values
                .iter()
                .zip(&long[name])
                .all(|(a, b)| (a - b).abs() <= a.abs() * f32::EPSILON);
            assert!(same, "{length} {more:?}: {name}");
        }
    }
}

#[test]
fn shorter_blocks_are_nearer_to_the_model() {
    let folder = folder("tool_lpbq_nearer");
    let (from, _) = written(&folder, "llama");
    let before = values(&from);
    let shapes = model("llama").tensors;
    let errors = ["16", "32", "64"].map(|length| {
        let to = folder.join("lpbq.gguf");
        quantize(&from, &to, &["--type", "q8_0", "--lpbq", length]);
        let after = values(&to);
        let weights = shapes
            .iter()
            .filter(|(name, ne, _)| name.starts_with("blk.") && ne.len() == 2);
        let error = |name: &String| -> f64 {
            let pairs = before[name].iter().zip(&after[name]);
            pairs
                .map(|(old, new)| f64::from((old - new) * (old - new)))
                .sum()
        };
        weights.map(|(name, ..)| error(name)).sum::<f64>()
    });
    assert!(
        errors[0] > 0.0 && errors[0] < errors[1] && errors[1] < errors[2],
        "{errors:?}"
    );
}

#[test]
fn rockchip_packs_low_power_rows_without_loss_by_the_rule_int8_plain() {
    let folder = folder("tool_lpbq_rockchip");
    let (from, _) = written(&folder, "llama");
    let (model, pack) = (folder.join("lpbq.gguf"), folder.join("lpbq.npu"));
    let shapes = self::model("llama").tensors;
    let errors = |args: &[&str], rule: &str| -> Vec<(String, f64)> {
        quantize(&from, &model, args);
        let tool = |args: &[&str]| {
            let output = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"))
                .args(args)
                .env("GGML_RUST_NPU_RULES", rule)
                .output()
                .unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{args:?}: {errors}");
            String::from_utf8(output.stdout).unwrap()
        };
        let [model, pack] = [&model, &pack].map(|path| path.to_str().unwrap());
        tool(&["repack", model, "--chip", "rk3588", "-o", pack]);
        let shown = tool(&["inspect", model, "--chip", "rk3588"]);
        assert_eq!(
            shown.contains("INT8-PLAIN"),
            rule.contains("int8-plain"),
            "{shown}"
        );
        let pack = Pack::open(pack.as_ref()).unwrap();
        let of_blocks =
            (shapes.iter().map(|(name, ..)| name)).filter(|name| name.starts_with("blk."));
        of_blocks
            .filter_map(|name| Some((name.clone(), pack.entry(name)?.error)))
            .collect()
    };
    let weights = 14;
    for args in [["q8_0", "16"], ["q8_0", "64"], ["q4_0", "32"]] {
        let args = ["--type", args[0], "--lpbq", args[1]];
        let plain = errors(&args, "^blk=int8-plain");
        assert_eq!(plain.len(), weights);
        assert!(plain.iter().all(|(_, error)| *error == 0.0), "{plain:?}");
        let rotated = errors(&args, "^blk=int8");
        assert!(
            rotated.iter().all(|(_, error)| *error > 1e-6),
            "{rotated:?}"
        );
    }
    // Blocks of a row with different scales must be rounded to a common one, which loses precision.
    let other = errors(&["--type", "q8_0"], "^blk=int8-plain");
    assert_eq!(other.len(), weights);
    assert!(
        other.iter().all(|(_, error)| (1e-7..5e-5).contains(error)),
        "{other:?}"
    );
}
