//! Proves that `ggml-npu devices`, `inspect` and `generate` report the available devices and
//! weights, and the reasons for missing ones, in text and in JSON, with exit codes for scripts.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::path::Path;
use std::process::{Output, Stdio};

use common::{Model, folder};
use serde_json::Value;

/// Runs the tool with nothing but `variables` in its environment.
fn run(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command.args(args).env_clear();
    command.envs(variables.iter().copied()).output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn simulated_devices_are_listed_and_tested() {
    let variables = [("GGML_RUST_NPU_SIM", "rk3588,hexagon-v75")];
    let output = run(&["devices", "--self-test", "--json"], &variables);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let report = json(&output);
    let devices = report["devices"].as_array().unwrap();
    let names: Vec<_> = devices
        .iter()
        .map(|device| device["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["RKNPU0", "HEX0"]);
    for device in devices {
        assert_eq!(device["simulated"], true);
        assert_eq!(device["self_test"]["passed"], true);
        assert!(device["max_buffer_bytes"].as_u64() > Some(1 << 29));
    }
    let variable = report["machine"]["variables"][0].as_str().unwrap();
    assert_eq!(variable, "GGML_RUST_NPU_SIM=rk3588,hexagon-v75");
}

/// Variables, the exit code, and the output.
type Case = (
    &'static [(&'static str, &'static str)],
    i32,
    &'static [&'static str],
);

#[test]
fn a_device_that_is_not_there_has_a_reason_and_an_exit_code() {
    let cases: [Case; 7] = [
        // A user who names a library expects an NPU, even if nothing else suggests one.
        (
            &[("GGML_RUST_NPU_RKNN_LIB", "/no/such.so")],
            3,
            &["RKNPU0 is not available", "/no/such.so"],
        ),
        (
            &[
                ("GGML_RUST_NPU_CHIP", "rk3588"),
                ("GGML_RUST_NPU_RKNN_LIB", "/no/such.so"),
            ],
            3,
            &[
                "no NPU can be used",
                "RKNPU0 is not available",
                "/no/such.so",
            ],
        ),
        (
            &[("GGML_RUST_NPU_CDSPRPC_LIB", "/no/such.so")],
            3,
            &["HEX0 is not available", "/no/such.so"],
        ),
        (
            &[
                ("GGML_RUST_NPU_SIM", "rk3588"),
                ("GGML_RUST_NPU_SIM_API_VERSION", "1.5.0"),
            ],
            3,
            &["RKNPU0 is not available", "1.5.0", "2.3.0"],
        ),
        (
            &[
                ("GGML_RUST_NPU_SIM", "rk3588"),
                ("GGML_RUST_NPU_DEVICES", "HEX0"),
            ],
            3,
            &["RKNPU0 is left out", "GGML_RUST_NPU_DEVICES"],
        ),
        (
            &[("GGML_RUST_NPU_SIM", "rk3589")],
            1,
            &["GGML_RUST_NPU_SIM", "rk3589", "rk3588"],
        ),
        (
            &[("GGML_RUST_NPU_SIM", "rk3566"), ("GGML_RUST_NPU_SIMM", "1")],
            0,
            &[
                "RKNPU0: Rockchip RK3566",
                "GGML_RUST_NPU_SIMM is no variable",
            ],
        ),
    ];
    for (variables, code, words) in cases {
        let output = run(&["devices"], variables);
        let text = text(&output);
        assert_eq!(output.status.code(), Some(code), "{variables:?}: {text}");
        for word in words {
            assert!(
                text.contains(word),
                "{variables:?}: {word:?} is not in {text}"
            );
        }
    }
}

/// Debian has `libcdsprpc.so.1` only, the plain name comes with its development files.
#[test]
fn the_vendor_s_library_is_looked_for_by_both_of_its_names() {
    let folder = folder("tool_commands_libraries");
    for name in ["libcdsprpc.so", "libcdsprpc.so.1"] {
        std::fs::write(folder.join(name), "not a library").unwrap();
    }
    let variables = [
        ("LD_LIBRARY_PATH", folder.to_str().unwrap()),
        ("GGML_RUST_NPU_LOG", "debug"),
    ];
    let text = text(&run(&["devices"], &variables));
    for name in ["libcdsprpc.so: ", "libcdsprpc.so.1: "] {
        let path = format!("{}/{name}", folder.display());
        assert!(text.contains(&path), "{name:?} is not in {text}");
    }
}

#[test]
fn a_self_test_that_fails_later_is_a_failure() {
    // The start-up test makes ten multiplications in each of two precisions, on one core.
    let variables = [
        ("GGML_RUST_NPU_SIM", "rk3566"),
        ("GGML_RUST_NPU_SIM_FAULTS", "rknn_matmul_run:21+=-1"),
    ];
    let output = run(&["devices", "--self-test"], &variables);
    let text = text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("self-test  rknn_matmul_run returned -1"),
        "{text}"
    );
}

/// A file with a norm, embeddings, a head, and a matrix in F32.
fn model(path: &Path) {
    let mut model = Model::new("general.architecture", "llama");
    model.number("llama.block_count", 1);
    model.random("output_norm.weight", &[64], 1.0);
    model.random("token_embd.weight", &[64, 8], 0.0);
    model.random("blk.3.attn_q.weight", &[64, 96], 0.0);
    model.random("blk.3.attn_k.weight", &[64, 96], 0.0);
    model.random("blk.3.ffn_up.weight", &[1024, 1056], 0.0);
    model.write(path);
}

#[test]
fn each_weight_has_a_path_or_a_reason() {
    let folder = folder("tool_inspect");
    let (plain, quantized) = (folder.join("f32.gguf"), folder.join("q4_0.gguf"));
    model(&plain);
    common::quantize(&plain, &quantized, &["--type", "q4_0"]);
    let places = |file: &Path, chip: &str, rules: &str| -> Vec<(String, String)> {
        let args = ["inspect", file.to_str().unwrap(), "--json", "--chip", chip];
        let output = run(&args, &[("GGML_RUST_NPU_RULES", rules)]);
        assert!(output.status.success(), "{}", text(&output));
        let report = json(&output);
        let rows = report["tensors"].as_array().unwrap().iter();
        rows.map(|row| {
            let place = row["place"].as_str().unwrap();
            let why = row.get("how").or(row.get("reason")).unwrap();
            (place.to_owned(), why.as_str().unwrap().to_owned())
        })
        .collect()
    };
    let starts = |row: &(String, String), place: &str, why: &str| {
        assert!(
            row.0 == place && row.1.starts_with(why),
            "{row:?}, not {place} {why}"
        );
    };
    let rows = places(&quantized, "rk3588", "attn_k=cpu");
    starts(&rows[0], "cpu", "no matrix");
    // Without a separate output head the embeddings are multiplied as well; they have few rows.
    starts(&rows[1], "npu", "FP16");
    starts(&rows[2], "npu", "INT8");
    starts(&rows[3], "cpu", "weights of this type, size or name");
    let rows = places(&quantized, "hexagon-v75", "");
    starts(&rows[0], "npu", "F32, as it is");
    starts(&rows[1], "npu", "Q8_0, lossless tiles");
    starts(&rows[2], "npu", "Q4_0, lossless tiles");
    let refused = "the NPU takes no F32 weights";
    starts(&places(&plain, "rk3566", "")[2], "cpu", refused);
    let rows = places(&plain, "hexagon-v73", "");
    starts(&rows[2], "npu", "F32, as it is");
    // Weights of more than 2^20 elements are not multiplied in FP32.
    starts(&rows[4], "npu", "F16, converted, tiles");

    let output = run(&["inspect", plain.to_str().unwrap()], &[]);
    let words = [
        "architecture llama",
        "blk.3.attn_q.weight  F32",
        "64x96",
        "24576",
    ];
    for word in words {
        assert!(
            text(&output).contains(word),
            "{word:?} is not in {}",
            text(&output)
        );
    }
    let output = run(&["inspect", env!("CARGO_BIN_EXE_ggml-npu")], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).contains("not a GGUF file"),
        "{}",
        text(&output)
    );
    let output = run(&["inspect", "x.gguf", "--chip", "rk3589"], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("hexagon-v79"), "{}", text(&output));
}

/// Gemma 3n shares its head with `token_embd.weight`, and has a second table of embeddings. BERT
/// has no head.
#[test]
fn tables_of_embeddings_are_the_cpu_s_unless_they_are_the_head() {
    let folder = folder("tool_inspect_tables");
    let large = [1024, 1056];
    for (architecture, extra, npu) in [
        (
            "gemma3n",
            "per_layer_token_embd.weight",
            &["token_embd.weight"][..],
        ),
        ("gpt2", "position_embd.weight", &["token_embd.weight"]),
        ("bert", "token_types.weight", &["token_embd_norm.weight"]),
        ("bitnet", "position_embd.weight", &[]),
        (
            "llama",
            "output.weight",
            &["output.weight", "token_embd_norm.weight"],
        ),
    ] {
        let path = folder.join(format!("{architecture}.gguf"));
        let mut model = Model::new("general.architecture", architecture);
        for name in ["token_embd.weight", extra, "blk.0.attn_q.weight"] {
            model.tensor(name, &large, vec![0.5]);
        }
        if npu.contains(&"token_embd_norm.weight") {
            model.tensor("token_embd_norm.weight", &[1024], vec![0.5]);
        }
        model.write(&path);
        let model = path.to_str().unwrap();
        let of_npu = [npu, &["blk.0.attn_q.weight"]].concat();
        let report = json(&run(
            &["inspect", model, "--json", "--chip", "hexagon-v75"],
            &[],
        ));
        for row in report["tensors"].as_array().unwrap() {
            let name = row["name"].as_str().unwrap();
            let want = if of_npu.contains(&name) { "npu" } else { "cpu" };
            assert_eq!(row["place"], want, "{architecture}: {row}");
        }
        let output = run(&["repack", model, "--chip", "hexagon-v75"], &[]);
        assert!(output.status.success(), "{}", text(&output));
        let pack = path.with_extension("npu");
        let report = json(&run(&["inspect", pack.to_str().unwrap(), "--json"], &[]));
        let packed = report["tensors"].as_array().unwrap().iter();
        let packed = packed.map(|row| row["name"].as_str().unwrap());
        let matrices = of_npu.iter().copied();
        let mut matrices: Vec<&str> = matrices.filter(|name| !name.contains("norm")).collect();
        let mut packed: Vec<&str> = packed.collect();
        matrices.sort_unstable();
        packed.sort_unstable();
        assert_eq!(packed, matrices, "{architecture}");
    }
}

#[test]
fn a_reader_that_stops_early_is_no_failure() {
    let path = folder("tool_pipe").join("f32.gguf");
    model(&path);
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    let command = command.arg("inspect").arg(&path).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
}

#[test]
fn completions_and_manual_pages_know_every_subcommand() {
    let folder = folder("tool_generate");
    for (kind, file) in [
        ("man", "ggml-npu-quantize.1"),
        ("bash", "ggml-npu.bash"),
        ("elvish", "ggml-npu.elv"),
        ("fish", "ggml-npu.fish"),
        ("powershell", "_ggml-npu.ps1"),
        ("zsh", "_ggml-npu"),
    ] {
        let output = run(&["generate", kind, "--dir", folder.to_str().unwrap()], &[]);
        assert!(output.status.success(), "{}", text(&output));
        let written = std::fs::read_to_string(folder.join(file)).unwrap();
        assert!(written.contains("imatrix"), "{file}");
    }
    for subcommand in ["devices", "inspect", "quantize", "repack"] {
        assert!(folder.join(format!("ggml-npu-{subcommand}.1")).exists());
    }
    assert!(!text(&run(&["--help"], &[])).contains("generate"));
}

/// README.md shows `docs/figures/screen.txt`, which `make screen` records.
#[test]
fn the_recorded_screen_has_the_devices_as_they_are_listed_today() {
    let recorded = include_str!("../../docs/figures/screen.txt");
    let (_, after) = recorded.split_once("ggml-npu devices\n").unwrap();
    let (recorded, _) = after.split_once("\n\n").unwrap();
    let output = run(&["devices"], &[("GGML_RUST_NPU_SIM", "hexagon-v75")]);
    // Memory, threads and other facts about the machine are not compared.
    let shown = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with("- "));
        lines
            .map(|line| line.replace(|c: char| c.is_ascii_digit(), ""))
            .collect()
    };
    assert_eq!(
        shown(recorded),
        shown(&String::from_utf8(output.stdout).unwrap())
    );
}

#[test]
fn what_a_terminal_would_obey_is_escaped() {
    let folder = folder("tool_escapes");
    let path = folder.join("\u{1b}[2J.gguf");
    let mut model = Model::new(
        "general.architecture",
        "\u{1b}]0;owned\u{7}\u{9b}31m\nforged line",
    );
    model.tensor("blk.0.\u{1b}[31m\r.weight", &[32, 2], vec![0.0; 64]);
    model.write(&path);
    let missing = folder.join("\u{1b}[2J missing");
    for args in [
        &["inspect", path.to_str().unwrap()][..],
        &["inspect", path.to_str().unwrap(), "--json"],
        &[
            "quantize",
            path.to_str().unwrap(),
            "-t",
            "q8_0",
            "-o",
            "out",
        ],
        &["repack", missing.to_str().unwrap(), "--chip", "rk3588"],
    ] {
        let output = run(args, &[]);
        let text = text(&output);
        let obeyed = |c: char| c.is_control() && c != '\n';
        assert!(!text.contains(obeyed), "{args:?}: {text:?}");
        assert!(!text.contains("\nforged"), "{args:?}: {text:?}");
        assert!(text.contains("1b"), "{args:?}: {text:?}");
    }
    let report = json(&run(&["inspect", path.to_str().unwrap(), "--json"], &[]));
    assert_eq!(report["tensors"][0]["name"], "blk.0.\u{1b}[31m\r.weight");
}
