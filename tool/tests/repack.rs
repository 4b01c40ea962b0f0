//! Proves that `ggml-npu repack` writes the same bytes as a device of the chip would pack, all or
//! nothing, within bounded memory, and that `inspect` shows them and finds mismatches.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;
#[path = "common/interrupt.rs"]
mod interrupt;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::{Model, folder};
use ggml_rust_npu::gguf::{GgmlType, Header, TensorPlan, Value, Writer};
use ggml_rust_npu::packfile::Pack;
use serde_json::Value as Json;

fn command(args: &[&str]) -> Command {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command.args(args).env_clear().stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8([&output.stdout[..], &output.stderr[..]].concat()).unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A model in Q4_0 with embeddings in Q8_0, which are the head, too.
fn quantized(path: &Path) {
    let plain = path.with_extension("f32");
    let mut model = Model::new("general.architecture", "llama");
    model.number("llama.block_count", 1);
    model.random("output_norm.weight", &[64], 1.0);
    model.random("token_embd.weight", &[64, 100], 0.0);
    model.random("blk.3.attn_q.weight", &[64, 96], 0.0);
    model.random("blk.3.attn_k.weight", &[64, 40], 0.0);
    model.write(&plain);
    common::quantize(&plain, path, &["--type", "q4_0"]);
}

fn json(args: &[&str]) -> (Option<i32>, Json) {
    let output = run(args);
    let report = serde_json::from_slice(&output.stdout);
    (
        output.status.code(),
        report.unwrap_or_else(|error| panic!("{error}: {}", text(&output))),
    )
}

fn rows(report: &Json) -> Vec<(String, String, f64)> {
    let word = |row: &Json, key: &str| row[key].as_str().unwrap().to_owned();
    let rows = report["tensors"].as_array().unwrap().iter();
    rows.map(|row| {
        (
            word(row, "name"),
            word(row, "layout"),
            row["error"].as_f64().unwrap(),
        )
    })
    .collect()
}

#[test]
fn a_pack_holds_what_the_chip_takes_and_inspect_shows_it() {
    let folder = folder("tool_repack");
    let (model, pack) = (folder.join("model.gguf"), folder.join("model.npu"));
    quantized(&model);
    let output = run(&["repack", path(&model), "--chip", "hexagon-v79"]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("3 weights"), "{}", text(&output));
    let (code, report) = json(&["inspect", path(&pack), "--json"]);
    assert_eq!(
        (code, report["chip"].as_str()),
        (Some(0), Some("hexagon-v79"))
    );
    let names: Vec<_> = rows(&report)
        .into_iter()
        .map(|(name, layout, error)| {
            assert_eq!(error.to_bits(), 0, "{name}: lossless");
            (name, layout)
        })
        .collect();
    let tiles = |name: &str, dtype: &str| {
        (
            name.to_owned(),
            format!("Hexagon {dtype} tiles v1, lossless"),
        )
    };
    assert_eq!(
        names,
        [
            tiles("token_embd.weight", "Q8_0"),
            tiles("blk.3.attn_q.weight", "Q4_0"),
            tiles("blk.3.attn_k.weight", "Q4_0"),
        ]
    );

    let args = [
        "repack",
        path(&model),
        "--chip",
        "rk3588",
        "-o",
        path(&pack),
    ];
    let flags = ["--rules", "attn_k=int4,token=fp16", "--calibrate", "kl"];
    let output = run(&[&args[..], &flags].concat());
    assert!(output.status.success(), "{}", text(&output));
    let (_, report) = json(&["inspect", path(&pack), "--json"]);
    assert_eq!(
        report["options"],
        "--rules attn_k=int4,token=fp16 --calibrate kl"
    );
    let rows = rows(&report);
    for ((name, layout, error), (want, low, high)) in rows.iter().zip([
        // Q8_0 is not exact in FP16: a level of 8 bits times a scale of 11 bits is rounded to 11
        // bits.
        ("Rockchip FP16", 0.0, 1e-7),
        // absmax / 127 / sqrt(12), in standard deviations of a normal row, where absmax is 2 to
        // 4.5.
        ("Rockchip INT8", 1e-5, 1.1e-4),
        ("Rockchip INT4", 3e-3, 3e-2),
    ]) {
        assert!(layout.starts_with(want), "{name}: {layout}");
        assert!(
            (low..high).contains(error),
            "{name}: {error:.2e} is not between {low:.0e} and {high:.0e}"
        );
    }
    // A pack belongs to one chip, so there is no plan for another.
    let output = run(&["inspect", path(&pack), "--chip", "rk3588"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let error = "--chip is for models";
    assert!(text(&output).contains(error), "{}", text(&output));
    let shown = text(&run(&["inspect", path(&pack)]));
    for word in [
        "pack 1 for rk3588",
        "64x40",
        "Rockchip INT4 v1",
        "3 tensors",
    ] {
        assert!(shown.contains(word), "{word:?} is not in {shown}");
    }
    // Calibration applies to INT4 only.
    let before = fs::read(&pack).unwrap();
    let output = run(&[
        &args[..],
        &["--rules", "attn_k=int4,token=fp16", "--calibrate", "absmax"],
    ]
    .concat());
    assert!(output.status.success(), "{}", text(&output));
    let (old, new) = (Pack::open(&pack).unwrap(), fs::read(&pack).unwrap());
    assert_ne!(before, new);
    let before = ggml_rust_npu::packfile::PackTable::parse(&before).unwrap();
    let same = |index: usize| before.entries[index].payload == old.table().entries[index].payload;
    assert_eq!([same(0), same(1), same(2)], [true, true, false]);
}

#[test]
fn what_a_pack_is_verified_against_is_found_to_differ() {
    let folder = folder("tool_repack_verify");
    let (model, pack) = (folder.join("model.gguf"), folder.join("model.npu"));
    quantized(&model);
    assert!(
        run(&["repack", path(&model), "--chip", "rk3566"])
            .status
            .success()
    );
    let verify = ["inspect", path(&pack), "--json", "--verify"];
    assert_eq!(json(&[&verify[..], &[path(&model)]].concat()).0, Some(0));
    assert_eq!(json(&verify).0, Some(0));
    // One bit of the last weight of the model.
    let mut bytes = fs::read(&model).unwrap();
    let last = Header::parse(&bytes)
        .unwrap()
        .tensor("blk.3.attn_k.weight")
        .unwrap()
        .range
        .clone();
    bytes[last.start + 100] ^= 1;
    let other = folder.join("other.gguf");
    fs::write(&other, &bytes).unwrap();
    let (code, report) = json(&[&verify[..], &[path(&other)]].concat());
    assert_eq!(code, Some(1));
    let problem = |report: &Json, index: usize| report["tensors"][index]["problem"].clone();
    assert!(
        problem(&report, 2).as_str().unwrap().contains("hash"),
        "{report}"
    );
    assert!(problem(&report, 1).is_null());
    // One bit of the pack's first payload.
    let mut bytes = fs::read(&pack).unwrap();
    let start = usize::try_from(Pack::open(&pack).unwrap().table().entries[0].offset).unwrap();
    bytes[start] ^= 1;
    fs::write(&pack, &bytes).unwrap();
    let (code, report) = json(&verify);
    assert_eq!(code, Some(1));
    assert!(
        problem(&report, 0).as_str().unwrap().contains("corrupted"),
        "{report}"
    );
    fs::write(&pack, &bytes[..bytes.len() - 1]).unwrap();
    let output = run(&verify);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("truncated"), "{}", text(&output));
}

/// llama-imatrix has no statistics of a head that is the embeddings.
#[test]
fn a_head_without_statistics_is_rounded_as_without_an_imatrix() {
    let folder = folder("tool_repack_head");
    let [model, statistics, pack, plain] =
        ["model.gguf", "imatrix.gguf", "model.npu", "plain.npu"].map(|name| folder.join(name));
    quantized(&model);
    let repack = |pack: &Path, flags: &[&str]| {
        let args = ["repack", path(&model), "--chip", "rk3588", "-o", path(pack)];
        run(&[&args[..], &["--rules", ".*=int4"], flags].concat())
    };
    let mut imatrix = Model::new("general.type", "imatrix");
    let mut write = |name: &str| {
        imatrix.random(&format!("{name}.in_sum2"), &[64, 1], 1.0);
        imatrix.tensor(&format!("{name}.counts"), &[1, 1], vec![4.0]);
        imatrix.write(&statistics);
    };
    let flags = ["--imatrix", path(&statistics)];
    write("blk.3.attn_q.weight");
    let output = repack(&pack, &flags);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let error = "the imatrix says nothing of blk.3.attn_k.weight";
    assert!(text(&output).contains(error), "{}", text(&output));
    assert_eq!(text(&output).lines().count(), 1, "{}", text(&output));
    assert!(!pack.exists());
    let of_head = [
        "repack",
        path(&model),
        "--chip",
        "rk3588",
        "-o",
        path(&pack),
    ];
    let output = run(&[
        &of_head[..],
        &["--rules", "token_embd=int4,blk=fp16"],
        &flags,
    ]
    .concat());
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let error = "--imatrix has statistics of no weight that becomes INT8 or INT4";
    assert!(text(&output).contains(error), "{}", text(&output));
    assert!(!pack.exists());
    write("blk.3.attn_k.weight");
    let output = repack(&pack, &flags);
    assert!(output.status.success(), "{}", text(&output));
    let line = "token_embd.weight is rounded as without --imatrix";
    assert!(text(&output).contains(line), "{}", text(&output));
    assert!(repack(&plain, &[]).status.success());
    let compare = || {
        let packs = [&pack, &plain].map(|path| Pack::open(path).unwrap());
        for (name, same) in [
            ("token_embd.weight", true),
            ("blk.3.attn_q.weight", false),
            ("blk.3.attn_k.weight", false),
        ] {
            let [with, without] = [&packs[0], &packs[1]].map(|pack| pack.entry(name).unwrap());
            assert_eq!(with.payload == without.payload, same, "{name}");
        }
    };
    compare();
    let in_int8 = |pack: &Path, flags: &[&str]| {
        let args = ["repack", path(&model), "--chip", "rk3588", "-o", path(pack)];
        run(&[&args[..], flags].concat())
    };
    let output = in_int8(&pack, &flags);
    assert!(
        output.status.success() && text(&output).contains(line),
        "{}",
        text(&output)
    );
    assert!(in_int8(&plain, &[]).status.success());
    compare();
}

/// These variables may be for the backend, or for other models.
#[test]
fn variables_that_no_weight_is_packed_with_are_not_refused() {
    let folder = folder("tool_repack_variables");
    let model = folder.join("model.gguf");
    quantized(&model);
    for chip in ["rk3588", "hexagon-v75"] {
        let mut command = command(&["repack", path(&model), "--chip", chip]);
        command.env("GGML_RUST_NPU_RULES", "no_such=int8");
        command.env("GGML_RUST_NPU_CALIBRATION", "kl");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{chip}: {}", text(&output));
    }
}

/// Words that the tool prints, and the arguments that cause them.
type Refused<'a> = (&'a [&'a str], &'a [&'a str], i32);

#[test]
fn wrong_arguments_are_refused_with_a_reason() {
    let folder = folder("tool_repack_wrong");
    let (model, plain) = (folder.join("model.gguf"), folder.join("model.f32"));
    quantized(&model);
    let model = path(&model);
    let cases: [Refused; 15] = [
        (&["rk3589", "hexagon-v75"], &[model, "--chip", "rk3589"], 2),
        (&["--chip"], &[model], 2),
        (&["no_such.gguf"], &["no_such.gguf", "--chip", "rk3588"], 1),
        (
            &["would overwrite the input"],
            &[model, "--chip", "rk3588", "-o", model],
            1,
        ),
        (
            &["no weight of", "hexagon-v73"],
            &[path(&plain), "--chip", "hexagon-v73"],
            1,
        ),
        (
            &["rk3566 has no such arithmetic"],
            &[model, "--chip", "rk3566", "--rules", "x=int4"],
            1,
        ),
        (
            &["--rules", "int5"],
            &[model, "--chip", "rk3588", "--rules", "x=int5"],
            1,
        ),
        (
            &["--calibrate", "percentile"],
            &[model, "--chip", "rk3588", "--calibrate", "best"],
            2,
        ),
        (
            &["--rules is for Rockchip NPUs, not for hexagon-v75"],
            &[model, "--chip", "hexagon-v75", "--rules", "blk=int8"],
            2,
        ),
        (
            &["--calibrate is for Rockchip NPUs"],
            &[model, "--chip", "hexagon-v75", "--calibrate", "kl"],
            2,
        ),
        (
            &["--rules attn_w=int4: no weight for the NPU has such a name"],
            &[
                model,
                "--chip",
                "rk3588",
                "--rules",
                "attn_q=int4,attn_w=int4",
            ],
            1,
        ),
        (
            &["--rules output=int4: no weight for the NPU has such a name"],
            &[model, "--chip", "rk3588", "--rules", "output=int4"],
            1,
        ),
        (
            &["--rules attn_q=int4: an earlier rule decides blk.3.attn_q.weight"],
            &[model, "--chip", "rk3588", "--rules", "blk=cpu,attn_q=int4"],
            1,
        ),
        (
            &["--calibrate is for INT4 weights, and no weight becomes INT4"],
            &[model, "--chip", "rk3588", "--calibrate", "kl"],
            1,
        ),
        (
            &["model.gguf", "general.type is not imatrix"],
            &[
                model,
                "--chip",
                "rk3588",
                "--rules",
                "x=int4",
                "--imatrix",
                model,
            ],
            1,
        ),
    ];
    for (words, args, code) in cases {
        let output = run(&[&["repack"], args].concat());
        let text = text(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        for word in words {
            assert!(text.contains(word), "{args:?}: {word:?} is not in {text}");
        }
    }
    let left: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

/// F16 has no such value, and the device multiplies the weight in FP32.
#[test]
fn a_weight_beyond_the_range_of_f16_is_left_out_by_name() {
    let folder = folder("tool_repack_beyond");
    let (from, pack) = (folder.join("model.gguf"), folder.join("model.npu"));
    let names = ["blk.3.attn_q.weight", "blk.0.attn_k.weight"];
    // The first value is the largest of BF16 that fits into F16's range.
    for (value, count) in [(65_280.0, 2), (131_072.0, 1), (-131_072.0, 1)] {
        let mut model = Model::new("general.architecture", "llama");
        let mut values = vec![0.5; 64 * 64];
        model.tensor(names[0], &[64, 64], values.clone());
        values[64 * 3 + 5] = value;
        model.tensor(names[1], &[64, 64], values);
        for (.., dtype) in &mut model.tensors {
            *dtype = GgmlType::BF16;
        }
        model.write(&from);
        let output = run(&["repack", path(&from), "--chip", "hexagon-v75"]);
        let said = text(&output);
        assert!(output.status.success(), "{said}");
        let line = format!("{} is not packed: it has the value {value}", names[1]);
        assert_eq!(said.contains(&line), count == 1, "{said}");
        let (_, report) = json(&["inspect", path(&pack), "--json"]);
        let rows = rows(&report);
        let packed: Vec<&str> = rows.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(packed, names[..count]);
        for (name, layout, _) in &rows {
            assert_eq!(layout, "Hexagon F16 tiles v1, converted", "{name}");
        }
    }
}

/// A model with one matrix in F16, of `n` rows of 1024.
fn large(path: &Path, n: usize) {
    let mut empty = b"GGUF\x03\0\0\0".to_vec();
    empty.extend([0; 16]);
    let header = Header::parse(&empty).unwrap();
    let updates = [("general.architecture", Value::String("llama".into()))];
    let plan = TensorPlan {
        name: "blk.3.ffn_up.weight".into(),
        dtype: GgmlType::F16,
        ne: vec![1024, n],
    };
    let mut writer = Writer::create(path, &header, &empty, &updates, &[plan]).unwrap();
    let row: Vec<u8> = (0..1024u16)
        .flat_map(|i| (0x3000 | (i * 37) & 0x8fff).to_le_bytes())
        .collect();
    writer.tensor((0..n).map(|_| &row)).unwrap();
    writer.finish().unwrap();
}

#[test]
fn an_interrupted_run_leaves_nothing_and_keeps_what_was_there() {
    let folder = folder("tool_repack_interrupted");
    let (model, pack) = (folder.join("model.gguf"), folder.join("model.npu"));
    large(&model, 3 * 4096 * 8);
    let args = [
        "repack",
        path(&model),
        "--chip",
        "rk3588",
        "--rules",
        "ffn=int4",
        "--calibrate",
        "kl",
    ];
    interrupt::leaves_nothing(&args, &folder, &pack);
}

/// Most memory that the process and its threads ever held, in bytes.
#[cfg(target_os = "linux")]
fn peak_of(args: &[&str]) -> u64 {
    let mut child = command(args).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) * 1024);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(child.wait().unwrap().success());
    peak
}

#[test]
#[cfg(target_os = "linux")]
fn memory_is_bounded_whatever_the_size_of_the_model() {
    let folder = folder("tool_repack_memory");
    let model = folder.join("model.gguf");
    // A piece has up to 16,384 rows for Rockchip (32 MiB) and exists twice: in the mapped file,
    // whose pages count, and packed. The program itself needs about 20 MiB.
    large(&model, 80 * 1024);
    let tensor = 160 << 20;
    for chip in ["rk3588", "hexagon-v75"] {
        let peak = peak_of(&["repack", path(&model), "--chip", chip]);
        assert!(
            peak > 0 && peak < tensor - (16 << 20),
            "{chip}: {} MiB",
            peak >> 20
        );
    }
}
