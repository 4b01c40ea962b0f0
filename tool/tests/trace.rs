//! Proves that devices of both families write a timeline that has Chrome's format, and that
//! `ggml-npu trace summary` reads it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

const TRACKS: [&str; 5] = ["host", "queue", "DMA", "vectors", "matrix unit"];

fn tool(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    let output = command.args(args).envs(env.iter().copied()).output();
    output.unwrap()
}

fn done(output: &Output) -> &str {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    std::str::from_utf8(&output.stdout).unwrap()
}

/// Multiplies on simulated chips with a trace; returns its path.
fn traced(name: &str, chips: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let env = [
        ("GGML_RUST_NPU_SIM", chips),
        ("GGML_RUST_NPU_TRACE", path.to_str().unwrap()),
    ];
    let sizes = ["--rows", "1,33", "--shapes", "64x192", "--types", "q8_0"];
    done(&tool(&[&["bench"], &sizes[..]].concat(), &env));
    path
}

/// Checks each event against Chrome's format, and returns the names of processes, and for each the
/// names of its tracks.
// SOURCE: Trace Event Format: "Complete Events" and "Metadata Events".
fn checked(events: &[Value]) -> BTreeMap<u64, (String, BTreeSet<String>)> {
    let mut devices: BTreeMap<u64, (String, BTreeSet<String>)> = BTreeMap::new();
    let mut bars: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for event in events {
        let number = |name: &str| {
            let number = event[name].as_f64();
            number.unwrap_or_else(|| panic!("{name} of {event}"))
        };
        let (pid, tid) = (
            event["pid"].as_u64().unwrap(),
            event["tid"].as_u64().unwrap(),
        );
        let name = event["name"].as_str().unwrap();
        match event["ph"].as_str().unwrap() {
            "M" => {
                let device = devices.entry(pid).or_default();
                match name {
                    "process_name" => device.0 = event["args"]["name"].as_str().unwrap().into(),
                    "thread_name" => {
                        device
                            .1
                            .insert(event["args"]["name"].as_str().unwrap().into());
                    }
                    "thread_sort_index" => assert_eq!(event["args"]["sort_index"], tid),
                    other => panic!("{other}"),
                }
            }
            "X" => {
                let (ts, dur) = (number("ts"), number("dur"));
                assert!(ts >= 0.0 && dur >= 0.0, "{event}");
                assert!(["measured", "modelled"].contains(&event["cat"].as_str().unwrap()));
                assert!(event["args"]["graph"].is_u64(), "{event}");
                assert!((1..=TRACKS.len() as u64).contains(&tid), "{event}");
                if tid > 1 {
                    bars.entry((pid, tid)).or_default().push((ts, dur));
                }
            }
            other => panic!("{other}"),
        }
    }
    for bars in bars.values_mut() {
        bars.sort_by(|a, b| a.0.total_cmp(&b.0));
        for pair in bars.windows(2) {
            // Times have three digits after the decimal point.
            assert!(
                pair[0].0 + pair[0].1 <= pair[1].0 + 0.01,
                "{pair:?} overlap"
            );
        }
    }
    devices
}

#[test]
fn timeline_of_both_families_has_the_format_and_the_tracks() {
    let path = traced("both.json", "hexagon-v75,rk3588");
    let text = std::fs::read_to_string(&path).unwrap();
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    let devices = checked(&events);
    let names: Vec<&str> = devices.values().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 2);
    for device in ["HEX0 (simulated)", "RKNPU0 (simulated)"] {
        assert!(
            names.iter().any(|name| name.starts_with(device)),
            "{names:?}"
        );
    }
    for (_, tracks) in devices.values() {
        assert!(tracks.iter().map(String::as_str).eq(BTreeSet::from(TRACKS)));
    }
    for pid in devices.keys() {
        let operations: Vec<&Value> = (events.iter())
            .filter(|event| event["pid"] == *pid && event["tid"] == 1)
            .filter(|event| event["args"]["shape"].is_string())
            .collect();
        for shape in ["192x1x1x1", "192x33x1x1"] {
            let one = operations
                .iter()
                .find(|event| event["args"]["shape"] == shape);
            let one = one.unwrap_or_else(|| panic!("{shape} of {pid}"));
            assert_eq!(one["name"], "MUL_MAT");
            let args = &one["args"];
            let [modelled, device] =
                ["modelled_us", "device_us"].map(|name| args[name].as_f64().unwrap());
            assert!(
                modelled > 0.0 && device > 0.0 && device <= one["dur"].as_f64().unwrap() + 1.0,
                "{one}"
            );
        }
        // With 33 rows the matrix unit has work on both devices.
        assert!(
            events
                .iter()
                .any(|event| event["pid"] == *pid && event["tid"] == 5 && event["ph"] == "X")
        );
    }
}

#[test]
fn summary_prints_the_operations_of_each_device() {
    let path = traced("summary.json", "hexagon-v75,rk3588");
    let path = path.to_str().unwrap();
    let output = tool(&["trace", "summary", path], &[]);
    let text = done(&output);
    for device in ["HEX0 (simulated)", "RKNPU0 (simulated)"] {
        assert!(text.contains(device), "{text}");
    }
    assert_eq!(text.matches("\nMUL_MAT").count(), 4, "{text}");
    let output = tool(&["trace", "summary", path, "--json"], &[]);
    let report: Value = serde_json::from_str(done(&output)).unwrap();
    assert_eq!(report[0]["operations"][0]["operation"], "MUL_MAT");
    assert!(report[0]["operations"][0]["count"].as_u64().unwrap() > 0);
}

#[test]
fn a_file_that_cannot_be_written_is_one_line_and_the_work_goes_on() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no/such/folder/trace.json");
    let env = [
        ("GGML_RUST_NPU_SIM", "hexagon-v75,rk3588"),
        ("GGML_RUST_NPU_TRACE", path.to_str().unwrap()),
    ];
    let output = tool(
        &[
            "bench", "--rows", "1", "--shapes", "64x192", "--types", "q8_0",
        ],
        &env,
    );
    // Below its table the tool prints the backend's messages.
    let error = done(&output).to_owned() + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(error.matches("GGML_RUST_NPU_TRACE").count(), 1, "{error}");
    assert!(error.contains("no/such/folder/trace.json"), "{error}");
}

#[test]
fn what_is_no_trace_is_refused_with_its_name() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no_trace.json");
    std::fs::write(&path, "{\"traceEvents\": 3}").unwrap();
    let output = tool(&["trace", "summary", path.to_str().unwrap()], &[]);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("no_trace.json") && error.contains("not a trace"),
        "{error}"
    );
}
