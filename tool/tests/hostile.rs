//! Proves that no file makes the tool panic, hang, take much memory or print what a terminal obeys: hostile and odd files
//! of every kind that it reads go through every command that reads them. Each run ends with exit code 0, 1 or 2, within a
//! second of the processor and 256 MiB, and a failure is one line.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;
#[path = "quantize/decoder.rs"]
#[expect(dead_code, reason = "of the oracle, only the model is used")]
mod decoder;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ggml_rust_npu::gguf::GgmlType;
use test_kit::Numbers;

/// One in so many files is tested by default.
const STEP: usize = 24;
/// Memory that a run may write to, in KiB: what `ulimit -d` counts.
const MEMORY_KIB: usize = 256 << 10;
/// Seconds of the processor that a run may take; builds without optimization are slower.
const SECONDS: usize = if cfg!(debug_assertions) { 10 } else { 1 };
/// A run that waits for something takes no processor time; it hangs after this time.
const HANGS: Duration = Duration::from_secs(60);

/// A GGUF whose every number can be wrong.
#[derive(Clone)]
struct Raw {
    entries: Vec<(String, Vec<u8>)>,
    tensors: Vec<RawTensor>,
    alignment: usize,
}

#[derive(Clone)]
struct RawTensor {
    name: Vec<u8>,
    ne: Vec<u64>,
    dtype: u32,
    data: Vec<u8>,
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn u64_value(number: u64) -> Vec<u8> {
    [&10u32.to_le_bytes()[..], &number.to_le_bytes()].concat()
}

fn text_value(value: &[u8]) -> Vec<u8> {
    [8u32.to_le_bytes().to_vec(), text(value)].concat()
}

impl Raw {
    /// A good model, or the statistics of one.
    fn of(model: &common::Model, path: &Path) -> Self {
        model.write(path);
        let file = ggml_rust_npu::gguf::File::open(path).unwrap();
        let header = file.header();
        let value = |range: std::ops::Range<usize>, key: &str| {
            file.bytes()[range.start + 8 + key.len()..range.end].to_vec()
        };
        Self {
            entries: (header.entries.iter())
                .map(|entry| (entry.key.clone(), value(entry.range.clone(), &entry.key)))
                .collect(),
            tensors: (header.tensors.iter())
                .map(|tensor| RawTensor {
                    name: tensor.name.clone().into_bytes(),
                    ne: (tensor.ne[..tensor.dims].iter())
                        .map(|n| *n as u64)
                        .collect(),
                    dtype: tensor.dtype.number(),
                    data: file.data(tensor).to_vec(),
                })
                .collect(),
            alignment: 32,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            bytes.extend(text(key.as_bytes()));
            bytes.extend(value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            bytes.extend(text(&tensor.name));
            bytes.extend(u32::try_from(tensor.ne.len()).unwrap().to_le_bytes());
            (tensor.ne.iter()).for_each(|size| bytes.extend(size.to_le_bytes()));
            bytes.extend(tensor.dtype.to_le_bytes());
            bytes.extend((offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
            bytes.extend(&tensor.data);
        }
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes
    }

    fn entry(&self, key: &str, value: Vec<u8>) -> Self {
        let mut other = self.clone();
        other.entries.retain(|(known, _)| known != key);
        other.entries.push((key.into(), value));
        other
    }

    /// With another tensor of a name, whose data are made to fit where that is possible.
    fn tensor(&self, name: &str, ne: &[u64], dtype: u32) -> Self {
        let mut other = self.clone();
        // What does not fit into a small file has no data.
        let bytes = || {
            let sizes: Option<Vec<usize>> = ne.iter().map(|n| usize::try_from(*n).ok()).collect();
            let (k, rows) = sizes.as_ref()?.split_first()?;
            let row = GgmlType::from_number(dtype)?.row_bytes(*k)?;
            let all = (rows.iter()).try_fold(row, |all, n| all.checked_mul(*n))?;
            (all <= 1 << 20).then_some(all)
        };
        let data = vec![0x11; bytes().unwrap_or(0)];
        let tensor = RawTensor {
            name: name.into(),
            ne: ne.to_vec(),
            dtype,
            data,
        };
        let known = (other.tensors.iter()).position(|tensor| tensor.name == name.as_bytes());
        match known {
            Some(index) => other.tensors[index] = tensor,
            None => other.tensors.push(tensor),
        }
        other
    }

    /// With one number of a tensor in place of another.
    fn value(&self, name: &str, value: f32) -> Self {
        let mut other = self.clone();
        let tensor = (other.tensors.iter_mut()).find(|tensor| tensor.name == name.as_bytes());
        tensor.unwrap().data[40..44].copy_from_slice(&value.to_le_bytes());
        other
    }
}

/// The reader of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Model,
    Statistics,
    Pack,
    Times,
    Settings,
}

/// Command lines by what they read. `@` is the file, `=` a good model, `%` good statistics, `>` an output.
const COMMANDS: [(Kind, &str); 25] = [
    (Kind::Model, "inspect @"),
    (Kind::Model, "inspect @ --json --chip rk3588"),
    (Kind::Model, "inspect @ --chip hexagon-v75"),
    (Kind::Model, "inspect @ --verify"),
    (Kind::Model, "model @"),
    (Kind::Model, "repack @ -o > --chip rk3588"),
    (
        Kind::Model,
        "repack @ -o > --chip rk3588 --rules blk=int4 --imatrix %",
    ),
    (Kind::Model, "repack @ -o > --chip hexagon-v75"),
    (Kind::Model, "quantize @ -o > -t q4_0 --tile-group"),
    (Kind::Model, "quantize @ -o > -t q8_0 --tile-group"),
    (Kind::Model, "quantize @ -o > -t q4_k --imatrix % --awq"),
    (Kind::Model, "quantize @ -o > -t q8_0 --lpbq 16"),
    (Kind::Model, "quantize @ -o > -t iq4_nl --imatrix %"),
    (
        Kind::Model,
        "quantize @ -o > -t q4_0 --imatrix % --awq --imatrix-out >2",
    ),
    (Kind::Model, "quantize @ -o > -t f32 --rotate r1"),
    (Kind::Model, "quantize @ -o > -t f16 --rotate r1,r2"),
    (Kind::Statistics, "inspect @"),
    (
        Kind::Statistics,
        "quantize = -o > -t q4_0 --imatrix @ --awq --imatrix-out >2",
    ),
    (Kind::Statistics, "quantize = -o > -t iq4_nl --imatrix @"),
    (
        Kind::Statistics,
        "repack = -o > --chip rk3588 --rules blk=int4 --imatrix @",
    ),
    (Kind::Pack, "inspect @ --json --verify ="),
    (Kind::Pack, "inspect @ --verify"),
    (Kind::Pack, "inspect @"),
    (Kind::Times, "bench --cpu @ -s 32x32 -m 1 -t q8_0"),
    (Kind::Settings, "devices"),
];

/// A file on its way to its test.
struct Case {
    name: String,
    kind: Kind,
    bytes: Vec<u8>,
}

const HOSTILE_TEXT: &[u8] = b"\x1b[2J\x1b]0;owned\x07\r\n\x7f\xc2\x9b31m\xe2\x80\xae name";

/// Numbers that are sizes somewhere.
const NUMBERS: [u64; 14] = [
    0,
    1,
    3,
    33,
    48,
    61,
    4093,
    1 << 20,
    1 << 31,
    4_294_967_291,
    u32::MAX as u64,
    1 << 40,
    1 << 58,
    u64::MAX,
];

fn models(model: &Raw) -> Vec<(String, Vec<u8>)> {
    let mut cases: Vec<(String, Vec<u8>)> = Vec::new();
    let mut add = |name: String, raw: &Raw| cases.push((name, raw.bytes()));
    for number in NUMBERS {
        for key in [
            "general.alignment",
            "llama.embedding_length",
            "llama.attention.head_count",
            "llama.attention.head_count_kv",
            "llama.attention.value_length",
            "llama.block_count",
        ] {
            add(
                format!("{key} {number}"),
                &model.entry(key, u64_value(number)),
            );
        }
    }
    let mut no_value_length = model.entry("llama.attention.head_count", u64_value(65));
    (no_value_length.entries).retain(|(key, _)| key != "llama.attention.value_length");
    add("65 heads of 64 channels".into(), &no_value_length);
    let aligned = |alignment: usize| Raw {
        alignment,
        ..model.entry("general.alignment", u64_value(alignment as u64))
    };
    add("alignment 1".into(), &aligned(1));
    add("alignment 64 KiB".into(), &aligned(1 << 16));
    for (key, value) in [
        ("general.architecture", HOSTILE_TEXT),
        ("general.name", HOSTILE_TEXT),
        ("llama.block_count", HOSTILE_TEXT),
        ("general.architecture", b"\xff\xfe"),
    ] {
        add(
            format!("text in {key}"),
            &model.entry(key, text_value(value)),
        );
    }
    for name in [
        "blk.0.attn_norm.weight",
        "blk.0.attn_v.weight",
        "blk.1.ffn_up.bias",
        "output_norm.weight",
        "blk.0.attn_v.bias",
        "blk.1.attn_output.bias",
        "token_embd.weight",
        "output.weight",
    ] {
        let ne: &[u64] = if name.contains("norm") || name.contains("bias") {
            &[64]
        } else {
            &[64, 64]
        };
        for (what, dtype) in [
            ("I8", 24),
            ("I32", 26),
            ("F64", 28),
            ("Q8_0", 8),
            ("F16", 1),
        ] {
            add(format!("{name} {what}"), &model.tensor(name, ne, dtype));
        }
        for ne in [
            &[][..],
            &[0],
            &[1],
            &[32],
            &[63],
            &[64, 0],
            &[0, 64],
            &[64, 1],
            &[1, 64],
            &[64, 32, 2],
            &[1 << 58],
            &[1 << 40, 0],
            &[0, 1 << 62],
            &[1 << 40, 1 << 40, 0],
        ] {
            add(format!("{name} {ne:?}"), &model.tensor(name, ne, 0));
        }
    }
    for value in [f32::NAN, f32::INFINITY, -1e38, 1e-45] {
        for name in [
            "blk.0.attn_q.weight",
            "blk.0.attn_norm.weight",
            "token_embd.weight",
        ] {
            add(format!("{value:e} in {name}"), &model.value(name, value));
        }
    }
    let mut named = model.clone();
    named.tensors[3].name = [b"blk.0.", HOSTILE_TEXT, b".weight"].concat();
    add("a name with controls".into(), &named);
    named.tensors[3].name = b"blk.0.\x1b[31m.weight".to_vec();
    add("a name with colours".into(), &named);
    named.tensors[3].name = vec![b'x'; 300];
    add("a long name".into(), &named);
    named.tensors[3].name = b"token_embd.weight".to_vec();
    add("a name twice".into(), &named);
    cases
}

fn statistics(statistics: &Raw) -> Vec<(String, Vec<u8>)> {
    let mut cases: Vec<(String, Vec<u8>)> = Vec::new();
    let mut add = |name: String, raw: &Raw| cases.push((name, raw.bytes()));
    for part in ["in_sum2", "counts"] {
        let name = format!("blk.0.attn_v.weight.{part}");
        for (ne, dtype) in [
            (&[64, 1][..], 24),
            (&[64, 1], 28),
            (&[0, 1], 0),
            (&[1, 1], 0),
            (&[64, 2], 0),
            (&[32, 1], 0),
            (&[1 << 40, 0], 0),
            (&[64], 0),
            (&[], 0),
        ] {
            add(
                format!("{name} {ne:?} of {dtype}"),
                &statistics.tensor(&name, ne, dtype),
            );
        }
    }
    for value in [f32::NAN, f32::INFINITY, -1.0, 3e38, 1e-45, 0.0] {
        let mut other = statistics.clone();
        let of_part = |part: &str| {
            other
                .tensors
                .iter()
                .position(|tensor| tensor.name.ends_with(part.as_bytes()))
        };
        let index = of_part("attn_output.weight.in_sum2").unwrap();
        other.tensors[index].data[..4].copy_from_slice(&value.to_le_bytes());
        add(format!("{value:e} in a sum"), &other);
        let mut other = statistics.clone();
        let index = other
            .tensors
            .iter()
            .position(|tensor| tensor.name.ends_with(b"counts"))
            .unwrap();
        other.tensors[index].data[..4].copy_from_slice(&value.to_le_bytes());
        add(format!("{value:e} as a count"), &other);
    }
    add(
        "text as type".into(),
        &statistics.entry("general.type", text_value(HOSTILE_TEXT)),
    );
    cases
}

fn times() -> Vec<(String, Vec<u8>)> {
    let line = |m: &str, n: &str, k: &str, time: &str| {
        format!(
            "MUL_MAT(type_a=q8_0,type_b=f32,m={m},n={n},k={k},bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,\
             m_v=0,pad=0): 852 runs - {time} us/run - 117 MFLOP/run\n"
        )
        .into_bytes()
    };
    let mut cases = Vec::new();
    for number in NUMBERS {
        let number = number.to_string();
        cases.push((format!("m={number}"), line(&number, "1", "32", "1.0")));
        cases.push((format!("n={number}"), line("32", &number, "32", "1.0")));
        cases.push((format!("k={number}"), line("32", "1", &number, "1.0")));
    }
    for time in ["0", "1.2.3", ".", &"9".repeat(400), "0.000000001"] {
        cases.push((format!("time {time:.10}"), line("32", "1", "32", time)));
    }
    cases.push((
        "all of 2^20".into(),
        line("1048576", "1048576", "1048576", "1"),
    ));
    cases.push((
        "many starts".into(),
        b"MUL_MAT(type_a=q8_0,type_b=f32,m=1".repeat(20_000),
    ));
    cases.push(("a line of controls".into(), HOSTILE_TEXT.repeat(100)));
    cases.push(("nothing".into(), Vec::new()));
    cases
}

fn settings() -> Vec<(String, Vec<u8>)> {
    let lines: [&[u8]; 9] = [
        b"",
        b"min_m.rk3588 = 0",
        b"min_m.rk3588 = 99999999999999999999999",
        b"min_m.rk3588 = 2\nmin_m.rk3588 = 2\n",
        b"=\n===\n",
        b"min_m.\x1b[31m = 1",
        b"\xff\xfe\0\0",
        HOSTILE_TEXT,
        b"min_m.rk3588.simulated.simulated = 1",
    ];
    let mut cases: Vec<_> = (lines.iter())
        .map(|line| {
            (
                format!("settings {:?}", String::from_utf8_lossy(line)),
                line.to_vec(),
            )
        })
        .collect();
    cases.push(("long settings".into(), b"# x\n".repeat(1 << 20)));
    cases
}

/// Files with some bytes changed, or cut.
fn damaged(name: &str, good: &[u8], count: usize) -> Vec<(String, Vec<u8>)> {
    let mut random = Numbers::fixed(good.len() as u64);
    let mut cases = Vec::new();
    for seed in 0..count {
        let mut bytes = good.to_vec();
        match seed % 4 {
            0 => bytes.truncate(random.below(good.len())),
            // Most of what is read by number is at the beginning.
            more => {
                for _ in 0..more * more {
                    let at = random.below(good.len().min(4096));
                    bytes[at] = [0, 1, 0x7f, 0x80, 0xff, 0x20][random.below(6)];
                }
            }
        }
        cases.push((format!("{name} damaged {seed}"), bytes));
    }
    cases
}

/// Runs the tool with limits. A run that takes too much memory ends by a signal, and so does one that takes too long.
fn run(args: &[String], settings: &Path) -> (Output, Duration) {
    let script =
        format!("ulimit -c 0; ulimit -d {MEMORY_KIB}; ulimit -t {SECONDS}; exec \"$0\" \"$@\"");
    let began = Instant::now();
    let mut child = Command::new("sh")
        .args(["-c", &script, env!("CARGO_BIN_EXE_ggml-npu")])
        .args(args)
        .env_clear()
        .env("GGML_RUST_NPU_SIM", "rk3566")
        .env("GGML_RUST_NPU_CONFIG", settings)
        .env("RAYON_NUM_THREADS", "2")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut out, mut errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut out, &mut text).map(|_| text)
    });
    let error_reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut errors, &mut text).map(|_| text)
    });
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > HANGS {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let output = Output {
        status,
        stdout: reader.join().unwrap().unwrap(),
        stderr: error_reader.join().unwrap().unwrap(),
    };
    (output, began.elapsed())
}

/// Returns the fault in how a run ended; `None` if it ended as it may.
fn fault(kind: Kind, output: &Output) -> Option<String> {
    let code = output.status.code();
    let errors = String::from_utf8_lossy(&output.stderr);
    let obeyed = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).into_owned();
        text.chars()
            .any(|c| (c.is_control() && c != '\n') || c == '\u{202e}')
    };
    // `devices` has a code of its own for a machine without any that can be used, and its report says why.
    let expected = matches!(code, Some(0..=2)) || kind == Kind::Settings && code == Some(3);
    if !expected {
        return Some(format!("ended with {}", output.status));
    }
    if code == Some(1) && !output.stdout.is_empty() && errors.is_empty() {
        // `inspect --verify` found something: that is in its report.
        return None;
    }
    let lines = errors
        .lines()
        .filter(|line| line.starts_with("ggml-npu: "))
        .count();
    if code == Some(1) && lines != 1 {
        return Some(format!("{lines} lines say why"));
    }
    if obeyed(&output.stdout) || obeyed(&output.stderr) {
        return Some("control characters were printed".into());
    }
    None
}

fn cases(folder: &Path) -> Vec<Case> {
    let model = decoder::model("llama");
    let raw = Raw::of(&model, &folder.join("model.gguf"));
    let raw_statistics = Raw::of(&decoder::imatrix(&model), &folder.join("statistics.gguf"));
    let (good, pack) = (folder.join("model.gguf"), folder.join("good.npu"));
    let quantized = folder.join("quantized.gguf");
    common::quantize(&good, &quantized, &["--type", "q8_0"]);
    let arguments = [
        "repack",
        quantized.to_str().unwrap(),
        "-o",
        pack.to_str().unwrap(),
        "--chip",
        "rk3588",
    ];
    let output = run(&arguments.map(String::from), Path::new(""));
    assert!(output.0.status.success(), "{:?}", output.0);
    let pack = fs::read(pack).unwrap();
    let mut cases = Vec::new();
    let mut add = |kind: Kind, more: Vec<(String, Vec<u8>)>| {
        cases.extend(
            more.into_iter()
                .map(|(name, bytes)| Case { name, kind, bytes }),
        );
    };
    add(Kind::Model, models(&raw));
    add(Kind::Model, damaged("model", &raw.bytes(), 40));
    add(Kind::Statistics, statistics(&raw_statistics));
    add(
        Kind::Statistics,
        damaged("statistics", &raw_statistics.bytes(), 12),
    );
    add(Kind::Pack, damaged("pack", &pack, 24));
    add(
        Kind::Pack,
        vec![("all of it is magic".into(), pack[..8].repeat(100))],
    );
    add(Kind::Times, times());
    add(Kind::Settings, settings());
    let others: [(&str, Vec<u8>); 5] = [
        ("empty", Vec::new()),
        ("text", b"this is not a model\n".to_vec()),
        ("magic only", b"GGUF".to_vec()),
        ("zeros", vec![0; 4096]),
        ("counts", [&b"GGUF\x03\0\0\0"[..], &[0xff; 16]].concat()),
    ];
    for kind in [Kind::Model, Kind::Statistics, Kind::Pack] {
        add(
            kind,
            others
                .iter()
                .map(|(name, bytes)| ((*name).into(), bytes.clone()))
                .collect(),
        );
    }
    cases
}

/// Sends every `step`th file through its commands; returns the numbers of files and of runs.
fn through_every_command(folder: &Path, step: usize) -> (usize, usize) {
    let (mut files, mut runs, mut faults) = (0, 0, Vec::new());
    let cases = cases(folder);
    let paths = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let mut test = |name: &str, kind: Kind, file: &Path| {
        for (_, command) in COMMANDS.iter().filter(|(of, _)| *of == kind) {
            let args: Vec<String> = (command.split(' '))
                .map(|word| match word {
                    "@" => file.to_str().unwrap().to_owned(),
                    "=" => paths("model.gguf"),
                    "%" => paths("statistics.gguf"),
                    ">" => paths("out"),
                    ">2" => paths("out2"),
                    word => word.to_owned(),
                })
                .collect();
            let settings = match kind {
                Kind::Settings => file.to_path_buf(),
                _ => PathBuf::new(),
            };
            let (output, time) = run(&args, &settings);
            runs += 1;
            if let Some(fault) = fault(kind, &output) {
                let errors = String::from_utf8_lossy(&output.stderr).into_owned();
                faults.push(format!(
                    "{name}: {command}: {fault} after {time:?}: {errors:.300}"
                ));
            }
        }
    };
    let file = folder.join("file");
    for case in cases.iter().step_by(step) {
        fs::write(&file, &case.bytes).unwrap();
        test(&case.name, case.kind, &file);
        files += 1;
    }
    // What is no regular file, and a file that is mostly hole.
    let (fifo, sparse) = (folder.join("fifo"), folder.join("sparse"));
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    fs::File::create(&sparse).unwrap().set_len(8 << 30).unwrap();
    for kind in [
        Kind::Model,
        Kind::Statistics,
        Kind::Pack,
        Kind::Times,
        Kind::Settings,
    ] {
        for (name, file) in [
            ("a FIFO", &*fifo),
            ("a folder", folder),
            ("a device", Path::new("/dev/zero")),
            ("8 GiB of zeros", &sparse),
        ] {
            test(name, kind, file);
            files += 1;
        }
    }
    fs::remove_file(sparse).unwrap();
    assert!(
        faults.is_empty(),
        "{} of {runs} runs:\n{}",
        faults.len(),
        faults.join("\n")
    );
    (files, runs)
}

#[test]
fn hostile_files_end_in_one_line_within_a_second_and_256_mib() {
    let (files, runs) = through_every_command(&common::folder("tool_hostile"), STEP);
    println!("{files} files, {runs} runs");
    assert!(files >= 39 && runs >= 321, "{files} files, {runs} runs");
}

#[test]
#[ignore = "takes minutes: make hostile"]
fn all_hostile_files_end_in_one_line_within_a_second_and_256_mib() {
    let (files, runs) = through_every_command(&common::folder("tool_hostile_all"), 1);
    println!("{files} files, {runs} runs");
    assert!(files >= 455 && runs >= 5_179, "{files} files, {runs} runs");
}
