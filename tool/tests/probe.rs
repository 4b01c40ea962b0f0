//! Proves that `ggml-npu devices --probe` prints the keys in docs/guide/probe.md on every kind of
//! chip, marks simulated values with `simulated`, and reveals nothing about people.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Output;

use regex_lite::Regex;

const GUIDE: &str = include_str!("../../docs/guide/probe.md");

/// A person's environment.
const PERSON: [(&str, &str); 5] = [
    ("HOME", "/srv/zaphod"),
    ("USER", "zaphod"),
    ("HOSTNAME", "heartofgold"),
    ("LD_LIBRARY_PATH", "/srv/zaphod/lib:/home/zaphod/lib"),
    ("DSP_LIBRARY_PATH", "/data/data/org.heartofgold/files"),
];

fn probe(variables: &[(&str, &str)]) -> Output {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command
        .args(["devices", "--probe"])
        .env_clear()
        .envs(PERSON);
    command.envs(variables.iter().copied()).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8([&output.stdout[..], &output.stderr[..]].concat()).unwrap()
}

/// The keys of the guide for a device, as patterns, and whether a report must have them.
fn schema(device: &str) -> Vec<(Regex, bool)> {
    let mut keys = Vec::new();
    for row in GUIDE.lines().filter(|line| line.starts_with("| `")) {
        let mut cells = row.trim_matches('|').split(" | ");
        let names = cells.next().unwrap();
        let must = !cells.next().unwrap().starts_with("if ");
        for key in names.split_whitespace() {
            let key = key.trim_matches('`');
            let (first, rest) = key.split_once('.').unwrap();
            let first = match first {
                "dev" => device,
                "hex#" if device == "hex0" => device,
                "hex#" => continue,
                "rknpu0" if device != "rknpu0" => continue,
                other => other,
            };
            let rest = rest
                .replace('.', r"\.")
                .replace('#', "[0-9]+")
                .replace('*', r"[^:]+");
            keys.push((Regex::new(&format!("^{first}\\.{rest}$")).unwrap(), must));
        }
    }
    assert!(keys.len() > 30, "the guide has no tables");
    keys
}

/// Key and value of each line.
fn lines(report: &str) -> Vec<(&str, &str)> {
    let form = Regex::new(r"^[a-z0-9_]+(\.[A-Za-z0-9_,/-]+)+: \S.*$").unwrap();
    let lines = report.lines().map(|line| {
        assert!(form.is_match(line), "no line of a report: {line}");
        line.split_once(": ").unwrap()
    });
    lines.collect()
}

/// Versions of the schema, and the hashes of their keys.
const SCHEMAS: [(u32, u128); 2] = [
    (2, 333595845334153475009534438202331806988),
    (3, 42157997255890435209648617587184493843),
];

#[test]
fn other_keys_have_another_version() {
    let rows = GUIDE.lines().filter(|line| line.starts_with("| `"));
    let mut keys: Vec<_> = rows
        .flat_map(|row| row.trim_matches('|').split(" | ").next())
        .flat_map(str::split_whitespace)
        .collect();
    keys.sort_unstable();
    let hash = xxhash_rust::xxh3::xxh3_128(keys.join(" ").as_bytes());
    let (version, known) = SCHEMAS[SCHEMAS.len() - 1];
    assert_eq!(
        hash, known,
        "the keys of docs/guide/probe.md are others: raise SCHEMA of tool/src/probe/mod.rs, and add a row with the hash here"
    );
    let versions = SCHEMAS.map(|(version, _)| version);
    assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
    let report = text(&probe(&[("GGML_RUST_NPU_SIM", "rk3566")]));
    assert!(
        report.starts_with(&format!("probe.schema: {version}\n")),
        "{report}"
    );
    assert!(GUIDE.contains(&format!("| version of this page: {version} |")));
}

fn holds_the_schema(report: &str, device: &str) {
    let (schema, lines) = (schema(device), lines(report));
    for (key, _) in &lines {
        let known = schema.iter().any(|(pattern, _)| pattern.is_match(key));
        assert!(known, "{key} is not in docs/guide/probe.md");
        let same = lines.iter().filter(|(other, _)| other == key).count();
        assert_eq!(same, 1, "{key} is there {same} times");
    }
    for (pattern, must) in schema {
        let there = lines.iter().any(|(key, _)| pattern.is_match(key));
        assert!(
            there || !must,
            "{device}: nothing like {}",
            pattern.as_str()
        );
    }
}

fn tells_nothing_about_people(report: &str) {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = Some(host.trim()).filter(|host| host.len() > 2);
    let lower = report.to_lowercase();
    for word in ["zaphod", "heartofgold", "/home/", "serial"] {
        assert!(!lower.contains(word), "{word} in\n{report}");
    }
    let words = report.split(|c: char| !c.is_alphanumeric() && c != '-');
    let named = words.filter(|word| Some(*word) == host).count();
    assert_eq!(named, 0, "{host:?} in\n{report}");
}

fn check_simulated(chip: &str, device: &str) -> String {
    let output = probe(&[("GGML_RUST_NPU_SIM", chip)]);
    let report = text(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    holds_the_schema(&report, device);
    tells_nothing_about_people(&report);
    for (key, value) in lines(&report) {
        let measured = ["time", "rate", "call"]
            .iter()
            .any(|part| key.split('.').any(|it| it == *part));
        let marked = value.ends_with(" (simulated)") || value.starts_with("none (");
        assert!(marked || !measured, "{chip}: {key}: {value}");
        assert!(!value.contains("WRONG"), "{chip}: {key}: {value}");
    }
    assert!(report.contains(&format!("{device}.simulated: yes")));
    assert!(report.contains("~/lib:~/lib"), "{report}");
    report
}

#[test]
fn a_report_of_each_hexagon_chip_holds_the_schema_and_no_names() {
    for chip in ["hexagon-v73", "hexagon-v75", "hexagon-v79", "hexagon-v81"] {
        let report = check_simulated(chip, "hex0");
        for unit in ["client", "clocks", "vector_units", "matrix_unit"] {
            let line = format!("hex0.dsp.vote.{unit}: granted\n");
            assert!(report.contains(&line), "{report}");
        }
    }
}

#[test]
fn a_report_of_each_rockchip_holds_the_schema_and_no_names() {
    for chip in ["rk3588", "rk3576", "rk3566"] {
        let report = check_simulated(chip, "rknpu0");
        assert!(report.contains("rknpu0.selftest.cores: agree"), "{report}");
    }
}

#[test]
fn a_library_that_does_not_load_is_a_reason_without_the_home_folder() {
    let output = probe(&[("GGML_RUST_NPU_CDSPRPC_LIB", "/srv/zaphod/libcdsprpc.so")]);
    let report = text(&output);
    assert_eq!(output.status.code(), Some(3), "{report}");
    assert!(report.contains("hex0.opened: none ("), "{report}");
    assert!(report.contains("~/libcdsprpc.so"), "{report}");
    tells_nothing_about_people(&report);
    lines(&report);
}

/// Regression: any such variable of another program was enough for a panic.
#[test]
fn variables_that_are_not_utf_8_are_shown_with_a_sign_for_each_wrong_byte() {
    let [home, wrong] =
        [&b"/srv/zaphod\xff"[..], b"/srv/zaphod\xff/\xff/lib"].map(OsStr::from_bytes);
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command
        .args(["devices", "--probe"])
        .env_clear()
        .envs(PERSON)
        .env("GGML_RUST_NPU_SIM", "rk3588")
        .env("HOME", home)
        .env("LD_LIBRARY_PATH", wrong)
        .env("PWD", wrong)
        .env(OsStr::from_bytes(b"NAME\xff"), "value");
    let output = command.output().unwrap();
    let report = text(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    let line = "machine.variable.LD_LIBRARY_PATH: ~/\u{fffd}/lib\n";
    assert!(report.contains(line), "{report}");
    assert!(report.contains("machine.variable.GGML_RUST_NPU_SIM: rk3588\n"));
    tells_nothing_about_people(&report);
}

#[test]
fn calls_are_listed_with_their_codes_also_those_that_fail() {
    let variables = [
        ("GGML_RUST_NPU_SIM", "hexagon-v75"),
        (
            "GGML_RUST_NPU_SIM_FAULTS",
            "remote_handle64_open:1=0x80000406",
        ),
    ];
    let output = probe(&variables);
    let report = text(&output);
    assert_eq!(output.status.code(), Some(3), "{report}");
    let failed = "remote_handle64_open(file:///libggml_rust_npu_skel_v75.so";
    let line = lines(&report)
        .into_iter()
        .find(|(_, value)| value.starts_with(failed));
    assert!(
        line.unwrap().1.contains(" = 0x80000406, 1 times"),
        "{report}"
    );
    let loader = "hex0.finding.loader: refuses our library: AEE_EUNABLETOLOAD (0x80000406)";
    assert!(report.contains(loader), "{report}");
}

#[test]
fn a_device_that_is_not_chosen_is_not_opened() {
    let chips = ("GGML_RUST_NPU_SIM", "rk3588,hexagon-v75");
    for (chosen, left_out) in [
        ("RKNPU0", &["hex0"][..]),
        ("hex0", &["rknpu0"]),
        ("HEX1", &["hex0", "rknpu0"]),
    ] {
        let output = probe(&[chips, ("GGML_RUST_NPU_DEVICES", chosen)]);
        let report = text(&output);
        let code = if left_out.len() == 2 { 3 } else { 0 };
        assert_eq!(output.status.code(), Some(code), "{report}");
        for device in left_out {
            let name = device.to_uppercase();
            let reason = format!(
                "{device}.opened: none ({name} is left out: GGML_RUST_NPU_DEVICES does not name it)\n"
            );
            assert!(report.contains(&reason), "{report}");
            assert!(report.contains(&format!("{device}.simulated: yes\n")));
            assert!(!report.contains(&format!("{device}.time.")), "{report}");
        }
        let opened = report.matches(".opened: ").count();
        let none = report.matches(".opened: none").count();
        assert_eq!((opened, none), (2, left_out.len()), "{report}");
    }
}

#[test]
fn a_device_that_computes_wrong_is_measured_all_the_same() {
    let variables = [
        ("GGML_RUST_NPU_SIM", "hexagon-v75"),
        ("GGML_RUST_NPU_SIM_FAULTS", "dsp:1+=wrong"),
    ];
    let report = text(&probe(&variables));
    assert!(
        report.contains("hex0.selftest.norms.norm: WRONG: NORM, error "),
        "{report}"
    );
    holds_the_schema(&report, "hex0");
}

#[test]
fn reports_in_the_tree_are_of_this_tree() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/results");
    let mut found = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("probe-") {
            continue;
        }
        found += 1;
        let mut report = std::fs::read_to_string(&path).unwrap();
        let device = if name.contains("-rk") {
            "rknpu0"
        } else {
            "hex0"
        };
        if device == "rknpu0" {
            // On a machine with one NPU, the report gives the reason why the other one is missing.
            let lines = report.split_inclusive('\n');
            report = lines.filter(|line| !line.starts_with("hex0.")).collect();
        }
        holds_the_schema(&report, device);
        tells_nothing_about_people(&report);
        let (version, _) = SCHEMAS[SCHEMAS.len() - 1];
        let mut wanted = vec![format!("probe.schema: {version}\n")];
        if device == "hex0" {
            wanted.push(format!(
                "hex0.dsp.protocol: {}\n",
                hexagon_ops::wire::VERSION
            ));
        }
        for line in wanted {
            assert!(
                report.contains(&line),
                "{name} lacks {line:?}: scripts/probes.py writes it"
            );
        }
    }
    assert_eq!(found, 10, "reports");
}
