//! Proves that `ggml-npu scale` destroys no file that it reads or does not know, and never mixes up
//! the answers of different problems.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[expect(
    dead_code,
    reason = "models and folders are used, the quantizer's runs are not"
)]
mod common;
#[path = "quantize/decoder.rs"]
#[expect(dead_code, reason = "of the oracle, only the model is used")]
mod decoder;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::thread;
use std::time::Instant;

use common::folder;
use serde_json::{Value, json};

/// Answers a request as llama-server does, with a solution whose answer is always 4.
fn answer(stream: TcpStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut request, mut length) = (String::new(), 0);
    reader.read_line(&mut request)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let line = line.trim().to_ascii_lowercase();
        if let Some(number) = line.strip_prefix("content-length:") {
            length = number.trim().parse().unwrap();
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let reply = match request.split(' ').nth(1) {
        Some("/props") => json!({"total_slots": 1, "model_path": "/x/model.gguf"}),
        Some("/apply-template") => json!({"prompt": "q"}),
        _ => json!([{"content": "#### 4", "tokens_predicted": 3, "stop_type": "eos"}]),
    };
    let reply = reply.to_string();
    let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length:";
    write!(reader.get_mut(), "{head} {}\r\n\r\n{reply}", reply.len())
}

/// Returns the address of a server that runs as long as the test.
fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that closed its connection reports a separate error.
            let _ = stream.and_then(answer);
        }
    });
    url
}

fn tool(args: &[&str]) -> Output {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command.arg("scale").args(args).output().unwrap()
}

/// Solves problems with one sample for each.
fn solve(url: &str, problems: &Path, out: &Path) -> Output {
    let (problems, out) = (text(problems), text(out));
    tool(&["run", problems, "-o", out, "-n", "1", "--url", url])
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the single line that a failed run printed.
fn refused(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(output.stdout.is_empty(), "{error}");
    error
}

fn write_lines(path: &Path, lines: &[Value]) {
    let lines: Vec<String> = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(path, lines.concat()).unwrap();
}

/// Writes problems without names: their names are the numbers of their lines.
fn write_problems(path: &Path, problems: &[[&str; 2]]) {
    let line = |[question, answer]: &[&str; 2]| json!({"question": question, "answer": answer});
    write_lines(path, &problems.iter().map(line).collect::<Vec<_>>());
}

/// The files that a report reads, in a folder.
struct Inputs {
    folder: PathBuf,
    samples: [PathBuf; 2],
    model: PathBuf,
}

impl Inputs {
    fn new(name: &str) -> Self {
        let folder = folder(name);
        let samples = ["first.jsonl", "second.jsonl"].map(|name| folder.join(name));
        for path in &samples {
            let solution =
                json!({"text": "4", "answer": "4", "correct": true, "tokens": 9, "logprob": -0.1});
            let lines = [
                json!({"settings": {"model": "m", "method": "majority", "n": 1}}),
                json!({"id": "1", "expected": "4", "chosen": "4", "correct": true, "tokens": 9,
                    "solutions": [solution]}),
            ];
            write_lines(path, &lines);
        }
        let (model, _) = decoder::written(&folder, "llama");
        Self {
            folder,
            samples,
            model,
        }
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        let files = self.samples.iter().chain([&self.model]);
        files.map(|path| fs::read(path).unwrap()).collect()
    }

    fn report(&self, args: &[&str]) -> Output {
        let [first, second] = &self.samples;
        tool(&[&["report", text(first), text(second)], args].concat())
    }

    /// Reports with these options, which must be refused with all files as they were.
    fn refused(&self, args: &[&str]) {
        let before = self.bytes();
        let names = fs::read_dir(&self.folder).unwrap().count();
        let done = self.report(args);
        assert!(before == self.bytes(), "{args:?}: an input was changed");
        let error = refused(&done);
        assert!(error.contains(" would overwrite the input "), "{error}");
        assert_eq!(fs::read_dir(&self.folder).unwrap().count(), names);
    }
}

#[test]
fn a_report_never_replaces_its_samples_nor_its_model() {
    let inputs = Inputs::new("scale_report_inputs");
    let at = |name: &str| inputs.folder.join(name);
    let (linked, hard) = (at("link.csv"), at("hard.svg"));
    symlink(&inputs.samples[0], &linked).unwrap();
    fs::hard_link(&inputs.model, &hard).unwrap();
    let model = ["--model", text(&inputs.model)];
    for option in ["--csv", "--svg"] {
        for path in [&inputs.samples[0], &inputs.samples[1], &linked] {
            inputs.refused(&[option, text(path)]);
            inputs.refused(&[option, text(path), "--json"]);
        }
        for path in [&inputs.model, &hard] {
            inputs.refused(&[&model[..], &[option, text(path)]].concat());
        }
    }
    let before = inputs.bytes();
    let (csv, svg) = (at("new.csv"), at("new.svg"));
    let done = inputs.report(&[&model[..], &["--csv", text(&csv), "--svg", text(&svg)]].concat());
    assert!(done.status.success(), "{done:?}");
    assert!(before == inputs.bytes());
    assert!(fs::read_to_string(csv).unwrap().starts_with("model,method"));
    assert!(fs::read_to_string(svg).unwrap().starts_with("<svg"));
}

/// Regression: each step was computed separately, once for each token, and two such numbers needed
/// an hour.
#[test]
fn the_seconds_of_many_tokens_are_reckoned_at_once() {
    let inputs = Inputs::new("scale_report_seconds");
    let seconds = |n: u64, tokens: u64| {
        let lines = [
            json!({"settings": {"model": "m", "method": "beam", "n": n}}),
            json!({"id": "1", "expected": "4", "chosen": "4", "correct": true, "tokens": tokens, "solutions": []}),
        ];
        let path = inputs.folder.join("many.jsonl");
        write_lines(&path, &lines);
        let model = ["--model", text(&inputs.model), "--json"];
        let done = tool(&[&["report", text(&path)], &model[..]].concat());
        assert!(done.status.success(), "{done:?}");
        let rows: Value = serde_json::from_slice(&done.stdout).unwrap();
        rows[0]["seconds"].as_f64().unwrap()
    };
    let begun = Instant::now();
    let most = seconds(65535, 65535 << 24);
    assert!(begun.elapsed().as_secs() < 30, "{:?}", begun.elapsed());
    assert!(most.is_finite() && most > seconds(65535, 65535 << 12));
    // A sample of 100 tokens needs 99 steps more than one of 1 token, and all steps read the same
    // number of cells.
    let [none, one, hundred] = [0, 1, 100].map(|tokens| seconds(1, tokens));
    let (step, steps) = (one - none, hundred - none);
    assert!(
        step > 0.0 && (steps / step - 100.0).abs() < 1e-3,
        "{none} {one} {hundred}"
    );
}

#[test]
fn a_run_leaves_foreign_outputs_as_they_are() {
    let folder = folder("scale_foreign");
    let (problems, out) = (folder.join("problems.jsonl"), folder.join("out"));
    write_problems(&problems, &[["2+2", "4"]]);
    let (model, _) = decoder::written(&folder, "llama");
    let url = server();
    let model = fs::read(model).unwrap();
    assert!(!model.ends_with(b"\n") && model.contains(&b'\n'));
    for bytes in [&model[..], b"my notes", b"my notes\nof two lines"] {
        fs::write(&out, bytes).unwrap();
        let error = refused(&solve(&url, &problems, &out));
        assert!(fs::read(&out).unwrap() == bytes, "changed: {error}");
        let name = out.display();
        assert!(error.contains(&format!("{name}, line 1: ")), "{error}");
    }
}

#[test]
fn a_run_refuses_the_output_of_other_problems() {
    let folder = folder("scale_other_problems");
    let at = |name: &str| folder.join(name);
    let (problems, out) = (at("problems.jsonl"), at("out.jsonl"));
    let (others, changed) = (at("others.jsonl"), at("changed.jsonl"));
    write_problems(&problems, &[["2+2", "4"], ["3+3", "6"]]);
    write_problems(&others, &[["7+7", "14"], ["8+8", "16"]]);
    write_problems(&changed, &[["2+2", "4"], ["1+5", "6"]]);
    let url = server();
    let done = solve(&url, &problems, &out);
    assert!(done.status.success(), "{done:?}");
    let before = fs::read(&out).unwrap();
    let name = out.display();
    for (file, reason) in [
        (&others, "1, with the answer 4, not 14"),
        (&changed, "2, with another question"),
    ] {
        let error = refused(&solve(&url, file, &out));
        let text = format!("{name} has another problem {reason}: choose another output");
        assert!(error.contains(&text), "{error}");
        assert!(fs::read(&out).unwrap() == before, "changed: {error}");
    }
    // The same problems, and an additional one.
    write_problems(&problems, &[["2+2", "4"], ["3+3", "6"], ["1+3", "4"]]);
    let done = solve(&url, &problems, &out);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(said.contains("2 of 3 problems are in"), "{said}");
    let after = fs::read(&out).unwrap();
    assert!(after.starts_with(&before) && after.len() > before.len());
}

#[test]
fn an_option_that_the_scorer_does_not_read_is_refused() {
    let url = "http://127.0.0.1:1";
    let cases: [(&[&str], &str); 7] = [
        (
            &["--verifier", "true"],
            "--verifier goes with --scorer command",
        ),
        (&["--head", "h"], "--head goes with --scorer head"),
        (
            &["--scorer", "plus-minus", "--reward-url", url, "--head", "h"],
            "--head goes with --scorer head",
        ),
        (
            &["--scorer", "logprob", "--reward-url", url],
            "--reward-url goes with --scorer plus-minus or head",
        ),
        (
            &["--reward-prompt", "{steps}"],
            "--reward-prompt goes with --scorer plus-minus",
        ),
        (&["--plus", "+"], "--plus goes with --scorer plus-minus"),
        (&["--minus", "-"], "--minus goes with --scorer plus-minus"),
    ];
    for (args, words) in cases {
        let run = ["run", "p.jsonl", "-o", "o.jsonl", "--method", "best-of-n"];
        let done = tool(&[&run[..], args].concat());
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    }
}
