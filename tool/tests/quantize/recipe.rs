//! Types by the names of weights.

use std::fs;

use ggml_rust_npu::gguf::{File, GgmlType};
use ggml_rust_npu::packfile::Pack;
use half::f16;

use crate::common::{folder, quantize, run};
use crate::decoder::{imatrix, model, values, with_experts, written};
use crate::fails;

#[test]
fn the_first_rule_that_matches_decides_the_type() {
    let folder = folder("tool_recipe");
    let (from, statistics) = written(&folder, "llama");
    let (to, plain) = (folder.join("mixed.gguf"), folder.join("plain.gguf"));
    let base = ["-t", "q4_0", "--imatrix", statistics.to_str().unwrap()];
    let rules = [
        "--tensor-type",
        "ffn_down=q8_0",
        "--tensor-type",
        r"^blk\.0\.=F16",
    ];
    quantize(&from, &plain, &base);
    quantize(&from, &to, &[&base[..], &rules, &["--tile-group"]].concat());
    let (file, other) = (File::open(&to).unwrap(), File::open(&plain).unwrap());
    let pack = Pack::open(&to.with_extension("groups.npu")).unwrap();
    let mut counts = [0; 3];
    for tensor in file
        .header()
        .tensors
        .iter()
        .filter(|tensor| tensor.name.starts_with("blk.") && tensor.dims == 2)
    {
        let name = &tensor.name;
        let (index, want) = match name {
            name if name.contains("ffn_down") => (0, GgmlType::Q8_0),
            name if name.starts_with("blk.0.") => (1, GgmlType::F16),
            _ => (2, GgmlType::Q4_0),
        };
        counts[index] += 1;
        assert_eq!(tensor.dtype, want, "{name}");
        assert_eq!(pack.entry(name).is_some(), want != GgmlType::F16, "{name}");
        if want == GgmlType::Q4_0 {
            let same = other.data(other.header().tensor(name).unwrap());
            assert!(
                file.data(tensor) == same,
                "{name} is another one than without rules"
            );
        }
    }
    // Seven weights in each of two blocks.
    assert_eq!(counts, [2, 6, 6]);
    let how = file.header().get("general.quantized_by");
    let how = how.and_then(|how| how.as_str()).unwrap();
    let said = how.contains(r"--tensor-type ffn_down=q8_0 --tensor-type ^blk\.0\.=F16");
    assert!(said, "{how:?}");
}

#[test]
fn scales_are_those_for_the_type_of_each_weight() {
    let folder = folder("tool_recipe_awq");
    let (from, statistics) = written(&folder, "llama");
    let to = folder.join("mixed.gguf");
    let base = [
        "-t",
        "q4_0",
        "--awq",
        "--imatrix",
        statistics.to_str().unwrap(),
    ];
    let source = values(&from);
    let is_source = |name: &str, after: &[f32]| {
        let rounded = source[name].iter().map(|x| f16::from_f32(*x).to_f32());
        rounded.eq(after.iter().copied())
    };
    let name = "blk.0.ffn_down.weight";
    // An unquantized weight gains nothing from scales, but it is scaled if others of its group are
    // quantized.
    for (rule, scaled) in [
        ("ffn_down=f16", false),
        ("blk.0.(ffn_down|ffn_gate)=f16", false),
        ("ffn_gate=f16", true),
    ] {
        quantize(&from, &to, &[&base[..], &["--tensor-type", rule]].concat());
        let after = values(&to);
        if !scaled {
            assert!(is_source(name, &after[name]), "{rule}");
        } else {
            assert!(
                !is_source("blk.0.ffn_gate.weight", &after["blk.0.ffn_gate.weight"]),
                "{rule}"
            );
        }
    }
}

#[test]
fn statistics_are_needed_of_weights_alone_that_they_change() {
    let folder = folder("tool_recipe_statistics");
    let (from, path) = written(&folder, "llama");
    let to = folder.join("out.gguf");
    let statistics = path.to_str().unwrap();
    let mut imatrix = imatrix(&model("llama"));
    let name = "blk.0.ffn_down.weight";
    (imatrix.tensors).retain(|(statistics, ..)| !statistics.starts_with(name));
    imatrix.write(&path);
    let base = ["-t", "q4_0", "--imatrix", statistics];
    fails(&from, &to, &base, 1, &["says nothing of", name]);
    let rule = ["--tensor-type", "blk.0.ffn_down=q8_0"];
    quantize(&from, &to, &[&base[..], &rule].concat());
    for format in ["f16", "q8_0"] {
        let args = ["-t", format, "--imatrix", statistics];
        let output = run(&from, &to, &args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("--imatrix changes nothing"), "{said}");
        let file = File::open(&to).unwrap();
        let how = file.header().get("general.quantized_by");
        let how = how.and_then(|how| how.as_str()).unwrap();
        assert!(!how.contains("imatrix"), "{how}");
    }
    fs::remove_file(&to).unwrap();
    // Low-power blocks are searched, whatever type stores them.
    let lpbq = ["-t", "q8_0", "--imatrix", statistics, "--lpbq", "32"];
    fails(&from, &to, &lpbq, 1, &["says nothing of", name]);
    assert!(!to.exists());
}

#[test]
fn the_type_of_embeddings_is_that_of_its_option_and_named() {
    let folder = folder("tool_recipe_embeddings");
    let (from, _) = written(&folder, "llama");
    let to = folder.join("out.gguf");
    quantize(&from, &to, &["-t", "q4_0", "--embeddings", "iq4_nl"]);
    let file = File::open(&to).unwrap();
    let embeddings = file.header().tensor("token_embd.weight").unwrap();
    assert_eq!(embeddings.dtype, GgmlType::IQ4_NL);
    let how = file.header().get("general.quantized_by");
    let how = how.and_then(|how| how.as_str()).unwrap();
    assert!(how.ends_with("--type Q4_0 --embeddings IQ4_NL"), "{how}");
}

#[test]
fn routers_of_experts_keep_their_type_whatever_the_rules() {
    let folder = folder("tool_recipe_routers");
    let (from, to) = (folder.join("model.gguf"), folder.join("out.gguf"));
    with_experts(model("llama")).write(&from);
    let args = ["-t", "q8_0", "--tensor-type", "ffn_gate=q4_0"];
    quantize(&from, &to, &args);
    let file = File::open(&to).unwrap();
    let dtype = |name: &str| file.header().tensor(name).unwrap().dtype;
    assert_eq!(dtype("blk.0.ffn_gate_inp.weight"), GgmlType::F32);
    assert_eq!(dtype("blk.0.ffn_gate_exps.weight"), GgmlType::Q4_0);
    assert_eq!(dtype("blk.0.ffn_up_exps.weight"), GgmlType::Q8_0);
    fs::remove_file(&to).unwrap();
    let args = ["-t", "q8_0", "--tensor-type", "gate_inp=q4_0"];
    let words = ["--tensor-type gate_inp=q4_0", "blk.0.ffn_gate_inp.weight"];
    fails(&from, &to, &args, 1, &words);
    assert!(!to.exists());
}

#[test]
fn a_rule_that_is_wrong_or_decides_nothing_is_refused_by_its_words() {
    let folder = folder("tool_recipe_refused");
    let (from, _) = written(&folder, "llama");
    let to = folder.join("out.gguf");
    let refused = |rules: &[&str], code: i32, words: &[&str]| {
        let mut args = vec!["-t", "q4_0"];
        for rule in rules {
            args.extend(["--tensor-type", rule]);
        }
        fails(&from, &to, &args, code, words);
    };
    refused(&["ffn_down"], 2, &["ffn_down", "PATTERN=TYPE"]);
    refused(&["=q8_0"], 2, &["=q8_0", "PATTERN=TYPE"]);
    refused(&["ffn_down=q9"], 2, &["\"q9\"", "q4_0, q4_1, q5_0, q8_0"]);
    refused(&["ffn_(=q8_0"], 2, &["\"ffn_(\"", "no regular expression"]);
    refused(
        &["ffn_dwon=q8_0"],
        1,
        &["--tensor-type ffn_dwon=q8_0", "no weight"],
    );
    let shadowed = &["ffn=q8_0", "ffn_down=f16"];
    refused(
        shadowed,
        1,
        &[
            "--tensor-type ffn_down=f16",
            "earlier rule",
            "blk.0.ffn_down.weight",
        ],
    );
    assert!(!to.exists());
}
