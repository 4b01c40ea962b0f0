//! Proves that the tool never destroys a file that it reads, replaces an output completely or not
//! at all, and keeps the kind and the permissions of the old file.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[expect(
    dead_code,
    reason = "models and folders are used, the quantizer's runs are not"
)]
mod common;
#[path = "quantize/decoder.rs"]
#[expect(dead_code, reason = "of the oracle, only the model is used")]
mod decoder;
#[path = "common/interrupt.rs"]
mod interrupt;

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;

use common::folder;
use decoder::written;

fn run(args: &[&str]) -> Output {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command.args(args).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A model, its statistics, and other names of both.
struct Inputs {
    folder: PathBuf,
    model: PathBuf,
    statistics: PathBuf,
}

impl Inputs {
    fn new(name: &str) -> Self {
        let folder = folder(name);
        let (model, statistics) = written(&folder, "llama");
        Self {
            folder,
            model,
            statistics,
        }
    }

    /// Runs `quantize` with `-o` and `--imatrix-out`, which must be refused with all files as they
    /// were.
    fn refused(&self, output: &Path, statistics_out: &Path) {
        let before = [&self.model, &self.statistics].map(|path| fs::read(path).unwrap());
        let names = fs::read_dir(&self.folder).unwrap().count();
        let done = run(&[
            "quantize",
            text(&self.model),
            "-t",
            "q4_0",
            "--awq",
            "--imatrix",
            text(&self.statistics),
            "-o",
            text(output),
            "--imatrix-out",
            text(statistics_out),
        ]);
        let what = format!(
            "-o {output:?} --imatrix-out {statistics_out:?}: {}",
            errors(&done)
        );
        assert_eq!(done.status.code(), Some(1), "{what}");
        assert!(errors(&done).contains("would overwrite"), "{what}");
        let after = [&self.model, &self.statistics].map(|path| fs::read(path).unwrap());
        assert!(before == after, "{what}: an input was changed");
        assert_eq!(fs::read_dir(&self.folder).unwrap().count(), names, "{what}");
    }
}

#[test]
fn an_output_is_never_an_input_nor_another_output_under_any_name() {
    let inputs = Inputs::new("tool_files_inputs");
    let at = |name: &str| inputs.folder.join(name);
    let (out, other) = (at("out.gguf"), at("other.gguf"));
    inputs.refused(&out, &inputs.model);
    inputs.refused(&inputs.statistics, &other);
    inputs.refused(&out, &inputs.statistics);
    inputs.refused(&out, &out);
    fs::hard_link(&inputs.model, at("hard.gguf")).unwrap();
    symlink(&inputs.statistics, at("link.gguf")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    inputs.refused(&at("hard.gguf"), &other);
    inputs.refused(&out, &at("link.gguf"));
    inputs.refused(&out, &at("folder/../out.gguf"));
    let repacked = run(&[
        "repack",
        text(&inputs.model),
        "--chip",
        "rk3588",
        "-o",
        text(&at("hard.gguf")),
    ]);
    assert_eq!(repacked.status.code(), Some(1));
    assert!(
        errors(&repacked).contains("would overwrite"),
        "{}",
        errors(&repacked)
    );
}

#[test]
fn a_pack_of_groups_replaces_neither_the_model_nor_the_pack_of_repack() {
    let inputs = Inputs::new("tool_files_groups");
    let model = inputs.folder.join("x.npu");
    let done = run(&[
        "quantize",
        text(&inputs.model),
        "-t",
        "q4_0",
        "--tile-group",
        "-o",
        text(&model),
    ]);
    assert!(done.status.success(), "{}", errors(&done));
    assert_eq!(fs::read(&model).unwrap()[..4], *b"GGUF");
    let groups = inputs.folder.join("x.npu.groups.npu");
    let before = fs::read(&groups).unwrap();
    let gguf = inputs.folder.join("x.gguf");
    fs::rename(&model, &gguf).unwrap();
    let done = run(&["repack", text(&gguf), "--chip", "rk3588"]);
    assert!(done.status.success(), "{}", errors(&done));
    assert!(model.is_file(), "x.npu is missing");
    assert!(
        fs::read(&groups).unwrap() == before,
        "the pack of groups was replaced"
    );
}

#[test]
fn what_is_at_an_output_keeps_its_kind_and_its_permissions() {
    let inputs = Inputs::new("tool_files_kinds");
    let at = |name: &str| inputs.folder.join(name);
    let quantize = |to: &Path| {
        run(&[
            "quantize",
            text(&inputs.model),
            "-t",
            "q4_0",
            "-o",
            text(to),
        ])
    };
    fs::write(at("secret"), "old").unwrap();
    fs::set_permissions(at("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("secret", at("link")).unwrap();
    assert!(quantize(&at("link")).status.success());
    assert!(
        fs::symlink_metadata(at("link")).unwrap().is_symlink(),
        "the link is gone"
    );
    let secret = fs::metadata(at("secret")).unwrap();
    assert_eq!(secret.permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read(at("secret")).unwrap()[..4], *b"GGUF");

    symlink("nothing", at("dangling")).unwrap();
    test_kit::make_fifo(&at("fifo"));
    for (name, reason) in [("dangling", "link"), ("fifo", "regular"), ("", "regular")] {
        let done = quantize(&at(name));
        assert_eq!(done.status.code(), Some(1), "{name}: {}", errors(&done));
        assert!(errors(&done).contains(reason), "{name}: {}", errors(&done));
    }
    assert!(fs::metadata(at("fifo")).unwrap().file_type().is_fifo());
    assert!(!at("nothing").exists());
    let done = quantize(Path::new("/dev/null"));
    assert!(errors(&done).contains("regular"), "{}", errors(&done));
    assert!(
        fs::metadata("/dev/null")
            .unwrap()
            .file_type()
            .is_char_device()
    );

    let script = "umask 027; exec \"$0\" \"$@\"";
    let new = at("new");
    let done = test_kit::command("sh")
        .args([
            "-c",
            script,
            env!("CARGO_BIN_EXE_ggml-npu"),
            "quantize",
            text(&inputs.model),
        ])
        .args(["-t", "q4_0", "-o", text(&new)])
        .status();
    assert!(done.unwrap().success());
    assert_eq!(
        fs::metadata(&new).unwrap().permissions().mode() & 0o777,
        0o640
    );
}

#[test]
fn an_interrupted_quantization_leaves_nothing_and_keeps_what_was_there() {
    let folder = folder("tool_files_interrupted");
    let (model, out) = (folder.join("model.gguf"), folder.join("out.gguf"));
    let mut large = decoder::model("llama");
    large.random("blk.0.other.weight", &[1024, 8192], 0.0);
    large.write(&model);
    let args = ["quantize", text(&model), "-t", "iq4_nl", "-o", text(&out)];
    interrupt::leaves_nothing(&args, &folder, &out);
}

/// A limit of 768 KiB for each file simulates a full disk. The NPU's memory counts as files, too,
/// and the self-test's is larger than that, so the limit begins when power is measured, which is
/// when the device is open.
#[test]
fn settings_are_as_they_were_when_the_disk_is_full() {
    let folder = folder("tool_files_full");
    let (settings, times) = (folder.join("settings.conf"), folder.join("cpu.txt"));
    let old = format!("min_m.rk3576 = 7\n{}", "# mine\n".repeat(1 << 17));
    fs::write(&settings, &old).unwrap();
    let line = "MUL_MAT(type_a=q8_0,type_b=f32,m=32,n=1,k=32,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,\
                m_v=0,pad=0): 852 runs - 1.0 us/run\n";
    fs::write(&times, line).unwrap();
    // The first reading is written at the start.
    let started = self::folder("tool_files_full_started").join("started");
    let power = format!(
        "command:if [ -e '{0}' ]; then prlimit --pid $PPID --fsize=786432; else : >'{0}'; fi && echo 1",
        text(&started)
    );
    let done = test_kit::command("sh")
        .args([
            "-c",
            "trap '' XFSZ; exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_ggml-npu"),
        ])
        .args([
            "bench",
            "--write-config",
            "-s",
            "32x32",
            "-m",
            "1",
            "-t",
            "q8_0",
        ])
        .args(["--cpu", text(&times), "--power", &power])
        .env("GGML_RUST_NPU_SIM", "rk3588")
        .env("GGML_RUST_NPU_CONFIG", &settings)
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", errors(&done));
    assert!(errors(&done).contains("settings.conf"), "{}", errors(&done));
    assert_eq!(fs::read_to_string(&settings).unwrap(), old);
    assert_eq!(
        fs::read_dir(&folder).unwrap().count(),
        2,
        "something was left"
    );
}

#[test]
fn a_part_of_a_split_model_is_refused_by_name_and_only_its_content_is_shown() {
    let folder = folder("tool_files_split");
    let at = |name: &str| folder.join(name);
    let (part, out) = (at("model-00001-of-00002.gguf"), at("out"));
    let mut model = decoder::model("llama");
    model.number("split.no", 0);
    model.number("split.count", 2);
    model.write(&part);
    let refused = |args: &[&str]| {
        let done = run(args);
        let error = errors(&done);
        assert_eq!(done.status.code(), Some(1), "{args:?}: {error}");
        let line = "model-00001-of-00002.gguf is part 1 of 2: join the parts with llama-gguf-split --merge\n";
        assert!(error.ends_with(line), "{args:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{args:?}: {error}");
        assert!(!out.exists(), "{args:?}: a file was written");
    };
    let (part, to) = (text(&part), text(&out));
    refused(&["quantize", part, "-t", "q4_0", "-o", to]);
    refused(&["repack", part, "--chip", "rk3588", "-o", to]);
    refused(&["model", part]);
    refused(&["inspect", part, "--chip", "rk3588"]);
    let shown = run(&["inspect", part]);
    assert!(shown.status.success(), "{}", errors(&shown));

    let whole = at("whole.gguf");
    model.number("split.count", 1);
    model.write(&whole);
    let done = run(&["quantize", text(&whole), "-t", "q4_0", "-o", to]);
    assert!(done.status.success(), "{}", errors(&done));
}

#[test]
fn packs_of_two_versions_of_a_model_have_two_names() {
    let inputs = Inputs::new("tool_files_versions");
    let at = |name: &str| inputs.folder.join(name);
    let done = |args: &[&str]| {
        let done = run(args);
        assert!(done.status.success(), "{args:?}: {}", errors(&done));
    };
    for version in ["llama-3.1", "llama-3.2"] {
        let (model, out) = (text(&inputs.model), at(version));
        let args = ["quantize", model, "-t", "q4_0", "--tile-group", "-o"];
        done(&[&args[..], &[text(&out)]].concat());
        done(&["repack", text(&out), "--chip", "rk3588"]);
    }
    for name in ["3.1.groups.npu", "3.2.groups.npu", "3.1.npu", "3.2.npu"] {
        let name = format!("llama-{name}");
        assert!(at(&name).is_file(), "{name} is missing");
    }
    assert!(!at("llama-3.groups.npu").exists() && !at("llama-3.npu").exists());
}

#[test]
fn an_output_that_ends_in_a_slash_is_refused_by_name() {
    let inputs = Inputs::new("tool_files_slash");
    let folder = inputs.folder.join("new");
    for (end, command) in [
        ("/", &["quantize", "-t", "q4_0"][..]),
        ("/.", &["quantize", "-t", "q4_0"]),
        ("/", &["repack", "--chip", "rk3588"]),
    ] {
        let out = format!("{}{end}", text(&folder));
        let done = run(&[command, &[text(&inputs.model), "-o", &out]].concat());
        let error = errors(&done);
        assert_eq!(done.status.code(), Some(1), "{out}: {error}");
        let line = format!("ggml-npu: {out}: a path that ends in / names a folder, not a file\n");
        assert_eq!(error, line);
        assert!(!folder.exists(), "{out}: a file was written");
    }
}
