//! Proves that no file makes the tool panic, hang, use much memory or print terminal commands:
//! hostile and odd files of every kind that it reads go through every command that reads them. Each
//! run ends with exit code 0, 1 or 2, within a second of the processor and 256 MiB, and a failure
//! is one line.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../quantize/decoder.rs"]
#[expect(dead_code, reason = "of the oracle, only the model is used")]
mod decoder;
mod gguf;
mod text;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use test_kit::Numbers;

/// By default, one file of this many is tested.
const STEP: usize = 24;
/// Memory that a run may write to, in KiB: the unit of `ulimit -d`.
const MEMORY_KIB: usize = 256 << 10;
/// Processor seconds that a run may use; builds without optimization are slower.
const SECONDS: usize = if cfg!(debug_assertions) { 10 } else { 1 };
/// Bytes that a run may write to standard error: a few lines of progress, and one with names.
const MESSAGE_BYTES: usize = 8192;
/// A run that only waits uses no processor time; it counts as hanging after this time.
const HANGS: Duration = Duration::from_secs(60);

/// Names and bytes of files.
type Files = Vec<(String, Vec<u8>)>;

const HOSTILE_TEXT: &[u8] = b"\x1b[2J\x1b]0;owned\x07\r\n\x7f\xc2\x9b31m\xe2\x80\xae name";

/// Numbers that are written over counts and sizes in files.
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

/// The reader of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Model,
    Statistics,
    Pack,
    Times,
    Settings,
    Problems,
    Solutions,
    Head,
    Trace,
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::Model,
        Self::Statistics,
        Self::Pack,
        Self::Times,
        Self::Settings,
        Self::Problems,
        Self::Solutions,
        Self::Head,
        Self::Trace,
    ];
}

/// Command lines, by the kind of file that they read. `@` is the file, `=` a good model, `%` good
/// statistics, `?` good problems, `>` an output, and `:` the address of no server.
const COMMANDS: [(Kind, &str); 33] = [
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
    (Kind::Problems, "scale run @ -o >3 -n 1 --url :"),
    (Kind::Solutions, "scale run ? -o @ -n 1 --url :"),
    (Kind::Solutions, "scale report @"),
    (
        Kind::Solutions,
        "scale report @ --json --model = --csv > --svg >2",
    ),
    (Kind::Solutions, "scale report @ --aggregate product"),
    (
        Kind::Head,
        "scale run ? -o >3 -n 1 --url : --method best-of-n --scorer head --reward-url : --head @",
    ),
    (Kind::Trace, "trace summary @"),
    (Kind::Trace, "trace summary @ --json"),
];

/// A file that a test is about to use.
struct Case {
    name: String,
    kind: Kind,
    bytes: Vec<u8>,
}

/// Files with some bytes changed, or cut.
fn damaged(name: &str, good: &[u8], count: usize) -> Files {
    let mut random = Numbers::fixed(good.len() as u64);
    let mut cases = Vec::new();
    for seed in 0..count {
        let mut bytes = good.to_vec();
        // Mostly the beginning of the file, where most numbers are.
        let most = if seed % 3 == 0 { usize::MAX } else { 4096 };
        match seed % 4 {
            0 => bytes.truncate(random.below(good.len())),
            more => {
                for _ in 0..more * more {
                    let at = random.below(good.len().min(most));
                    bytes[at] = [0, 1, 0x7f, 0x80, 0xff, 0x20][random.below(6)];
                }
            }
        }
        cases.push((format!("{name} damaged {seed}"), bytes));
    }
    cases
}

/// Runs the tool with limits. A run that uses too much memory or time is ended by a signal.
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

/// Returns the mistake in the end of a run; `None` if the run ended in an allowed way.
fn fault(kind: Kind, output: &Output) -> Option<String> {
    let code = output.status.code();
    let errors = String::from_utf8_lossy(&output.stderr);
    let obeyed = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).into_owned();
        text.chars()
            .any(|c| (c.is_control() && c != '\n') || c == '\u{202e}')
    };
    // `devices` has a separate exit code for machines without a usable device, and its report gives
    // the reason.
    let expected = matches!(code, Some(0..=2)) || kind == Kind::Settings && code == Some(3);
    if !expected {
        return Some(format!("ended with {}", output.status));
    }
    if code == Some(1) && !output.stdout.is_empty() && errors.is_empty() {
        // `inspect --verify` reports its findings.
        return None;
    }
    let lines = errors
        .lines()
        .filter(|line| line.starts_with("ggml-npu: "))
        .count();
    if code == Some(1) && lines != 1 {
        return Some(format!("{lines} lines say why"));
    }
    if errors.len() > MESSAGE_BYTES {
        return Some(format!("{} bytes say why", errors.len()));
    }
    if obeyed(&output.stdout) || obeyed(&output.stderr) {
        return Some("control characters were printed".into());
    }
    None
}

fn cases(folder: &Path) -> Vec<Case> {
    let model = decoder::model("llama");
    let raw = gguf::Raw::of(&model, &folder.join("model.gguf"));
    let raw_statistics = gguf::Raw::of(&decoder::imatrix(&model), &folder.join("statistics.gguf"));
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
    let mut add = |kind: Kind, more: Files| {
        cases.extend(
            more.into_iter()
                .map(|(name, bytes)| Case { name, kind, bytes }),
        );
    };
    add(Kind::Model, gguf::models(&raw));
    add(Kind::Model, damaged("model", &raw.bytes(), 40));
    let blocks = gguf::Raw::read(&quantized);
    add(Kind::Model, gguf::quantized(&blocks));
    add(Kind::Model, damaged("quantized", &blocks.bytes(), 12));
    let experts = decoder::with_experts(decoder::model("llama"));
    let experts = gguf::Raw::of(&experts, &folder.join("experts.gguf"));
    add(Kind::Model, gguf::experts(&experts));
    add(Kind::Statistics, gguf::statistics(&raw_statistics));
    add(
        Kind::Statistics,
        damaged("statistics", &raw_statistics.bytes(), 12),
    );
    add(Kind::Pack, damaged("pack", &pack, 24));
    add(
        Kind::Pack,
        vec![("all of it is magic".into(), pack[..8].repeat(100))],
    );
    add(Kind::Times, text::times());
    add(Kind::Settings, text::settings());
    add(Kind::Problems, text::problems());
    add(Kind::Solutions, text::solutions());
    add(Kind::Head, text::heads());
    add(Kind::Trace, text::traces());
    for (kind, good) in [
        (Kind::Problems, text::PROBLEMS),
        (Kind::Solutions, text::SOLUTIONS),
        (Kind::Trace, text::TRACE),
    ] {
        add(kind, damaged("text", good.as_bytes(), 12));
    }
    let others: [(&str, Vec<u8>); 5] = [
        ("empty", Vec::new()),
        ("text", b"this is not a model\n".to_vec()),
        ("magic only", b"GGUF".to_vec()),
        ("zeros", vec![0; 4096]),
        ("counts", [&b"GGUF\x03\0\0\0"[..], &[0xff; 16]].concat()),
    ];
    for kind in Kind::ALL {
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

/// Runs the commands on every `step`th file. Returns the numbers of files and of runs.
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
                    ">3" => paths("out3"),
                    "?" => paths("problems.jsonl"),
                    ":" => "http://127.0.0.1:1".into(),
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
    fs::write(folder.join("problems.jsonl"), text::PROBLEMS).unwrap();
    let file = folder.join("file");
    for case in cases.iter().step_by(step) {
        fs::write(&file, &case.bytes).unwrap();
        test(&case.name, case.kind, &file);
        files += 1;
    }
    // A file that is not regular, and a file that is mostly a hole.
    let (fifo, sparse) = (folder.join("fifo"), folder.join("sparse"));
    test_kit::make_fifo(&fifo);
    fs::File::create(&sparse).unwrap().set_len(8 << 30).unwrap();
    for kind in Kind::ALL {
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
    assert!(files >= 94 && runs >= 485, "{files} files, {runs} runs");
}

#[test]
#[ignore = "takes minutes: make hostile"]
fn all_hostile_files_end_in_one_line_within_a_second_and_256_mib() {
    let (files, runs) = through_every_command(&common::folder("tool_hostile_all"), 1);
    println!("{files} files, {runs} runs");
    assert!(files >= 1445 && runs >= 8_620, "{files} files, {runs} runs");
}
