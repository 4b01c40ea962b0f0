//! Proves that `ggml-npu bench` measures the requested products on simulated devices, shows in each
//! output that they are simulated, finds the M from which they are faster than given times of the
//! CPU, and writes the settings that the backend then reads.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ggml_rust_npu::config::Config;
use serde_json::Value;

const SMALL: [&str; 4] = ["--rows", "1,2,4", "--shapes", "64x192"];

/// An empty folder for one test.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Runs `ggml-npu bench` on simulated chips, with a file of settings.
fn bench(chips: &str, settings: &Path, args: &[&str]) -> Output {
    let mut command = command(chips, settings, args);
    if settings.exists() {
        command.env("GGML_RUST_NPU_CONFIG", settings);
    }
    command.output().unwrap()
}

fn command(chips: &str, settings: &Path, args: &[&str]) -> Command {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command.env("XDG_CONFIG_HOME", settings.parent().unwrap());
    command.env("GGML_RUST_NPU_SIM", chips);
    command.arg("bench").args(args);
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Standard output of a run that succeeds.
fn done(output: &Output) -> &str {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Upstream's output for a CPU that is much faster for two rows and much slower for four.
fn cpu_times(folder: &Path) -> String {
    let line = |m: usize, time: &str| {
        format!(
            "  MUL_MAT(type_a=q8_0,type_b=f32,m=192,n={m},k=64,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,\
             src_overlap=0,m_v=0,pad=0):  207 runs - {time} us/run - 1.00 MFLOP/run -  1.00 GFLOPS\n"
        )
    };
    let path = folder.join("cpu.txt");
    let times = [line(1, "0.001"), line(2, "0.001"), line(4, "999999999.00")];
    std::fs::write(&path, times.concat()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn energy_is_that_of_the_source_and_its_column_is_empty_without_one() {
    let folder = folder("tool_bench_power");
    let none = folder.join("none.conf");
    let point = ["--rows", "2", "--shapes", "64x192", "--types", "q8_0"];
    let row = |more: &[&str]| -> Value {
        let output = bench("rk3588", &none, &[&point[..], &["--json"], more].concat());
        let mut report: Value = serde_json::from_str(done(&output)).unwrap();
        report["rows"][0].take()
    };
    let without = row(&[]);
    assert!(
        without["watts"].is_null() && without["millijoules_per_row"].is_null(),
        "{without}"
    );
    for source in ["command:echo 2.5", folder.join("power").to_str().unwrap()] {
        std::fs::write(folder.join("power"), "2500000\n").unwrap();
        let with = row(&["--power", source]);
        assert_eq!(with["watts"], 2.5, "{with}");
        // The power times the mean time of a run. The minimum time gives a lower bound, of which
        // half is allowed.
        let energy = with["millijoules_per_row"].as_f64().unwrap();
        let least = 2.5 * with["microseconds"].as_f64().unwrap() / 1e3 / 2.0;
        assert!((0.9 * least..1000.0 * least).contains(&energy), "{with}");
    }
    let refused = bench(
        "rk3588",
        &none,
        &[&point[..], &["--power", "/nowhere"]].concat(),
    );
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("/nowhere: "),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn every_output_says_that_times_are_the_stand_in_s() {
    let folder = folder("tool_bench_outputs");
    let (none, svg) = (folder.join("none.conf"), folder.join("plot.svg"));
    let svg_arg = ["--svg", svg.to_str().unwrap()];
    let chips = "rk3588,hexagon-v75";
    let table = bench(chips, &none, &[&SMALL[..], &svg_arg].concat());
    let table = done(&table);
    for device in ["RKNPU0", "HEX0"] {
        let lines = table.lines().skip_while(|line| !line.starts_with(device));
        let lines: Vec<&str> = lines.take(12).collect();
        assert!(lines[0].contains("(simulated)"), "{table}");
        assert!(lines[1].starts_with("simulated: "), "{table}");
        // Three types and three numbers of rows, each with its percentage.
        let shares = lines[3..12].iter().filter(|line| line.contains(" %"));
        assert_eq!(shares.count(), 9, "{table}");
    }
    let image = std::fs::read_to_string(&svg).unwrap();
    // Each device has a panel, with a line for each type through a point for each number of rows.
    assert_eq!(image.matches("(simulated)").count(), 2, "{image}");
    let lines: Vec<&str> = image.split("<polyline points=\"").skip(1).collect();
    assert_eq!(lines.len(), 2 * 3, "{image}");
    for line in lines {
        let points = line.split('"').next().unwrap().split(' ');
        let places = points.map(|point| {
            let (x, y) = point.split_once(',').unwrap();
            [x, y].map(|number| number.parse::<f64>().unwrap())
        });
        let places: Vec<[f64; 2]> = places.collect();
        assert_eq!(places.len(), 3, "{line}");
        assert!(places.is_sorted_by(|a, b| a[0] < b[0]), "{line}");
        let is_inside = |[x, y]: &[f64; 2]| (80.0..790.0).contains(x) && (50.0..440.0).contains(y);
        assert!(places.iter().all(is_inside), "{line}");
    }
    for name in ["Q4_0 64x192", "Q8_0 64x192", "F16 64x192"] {
        assert_eq!(image.matches(name).count(), 2, "{name}: {image}");
    }

    let csv = bench(chips, &none, &[&SMALL[..], &["--csv"]].concat());
    let mut reader = csv::Reader::from_reader(done(&csv).as_bytes());
    let names = reader.headers().unwrap().clone();
    let first: Vec<&str> = names.iter().take(6).collect();
    assert_eq!(first, ["device", "simulated", "type", "m", "k", "n"]);
    let records: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    assert_eq!(records.len(), 2 * 9);
    assert!(records.iter().all(|row| &row[1] == "true"), "{records:?}");

    let json = bench(
        chips,
        &none,
        &[&SMALL[..], &["--json", "--types", "q4_0"]].concat(),
    );
    let json: Value = serde_json::from_str(done(&json)).unwrap();
    assert!(
        json["devices"]
            .as_array()
            .unwrap()
            .iter()
            .all(|device| device["simulated"] == true)
    );
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert_eq!(row["simulated"], true);
        // INT8 on Rockchip; on Hexagon, blocks of 18 bytes for 32 elements.
        let bytes = if row["device"] == "HEX0" {
            64.0 * 192.0 / 32.0 * 18.0
        } else {
            64.0 * 192.0
        };
        assert!(
            (number("gb_per_s") * number("microseconds") * 1e3 / bytes - 1.0).abs() < 1e-6,
            "{row}"
        );
        let ops = 2.0 * number("m") * 64.0 * 192.0;
        assert!(
            (number("gops") * number("microseconds") * 1e3 / ops - 1.0).abs() < 1e-6,
            "{row}"
        );
        assert!(number("share") > 0.0, "{row}");
    }
}

/// Hexagon multiplies small F32 weights unpacked, for which no limit of the chip is known.
/// Regression: they were shown with a rate of 0.00 GB/s and bound by memory.
#[test]
fn a_rate_and_a_bound_that_are_not_known_are_not_printed() {
    let none = folder("tool_bench_unknown").join("none.conf");
    let args = ["-t", "f32", "-s", "64x192", "-m", "1"];
    let table = bench("hexagon-v75", &none, &args);
    let row = done(&table).lines().find(|line| line.starts_with("F32"));
    let cells: Vec<&str> = row.unwrap().split_whitespace().collect();
    // GB/s, the percentage of the limit, and the limit.
    assert_eq!([cells[5], cells[7], cells[8]], ["-"; 3], "{cells:?}");
    assert!(cells[6].parse::<f64>().is_ok(), "{cells:?}");
    let csv = bench("hexagon-v75", &none, &[&args[..], &["--csv"]].concat());
    let mut reader = csv::Reader::from_reader(done(&csv).as_bytes());
    let names = reader.headers().unwrap().clone();
    let record = reader.records().next().unwrap().unwrap();
    let json = bench("hexagon-v75", &none, &[&args[..], &["--json"]].concat());
    let json: Value = serde_json::from_str(done(&json)).unwrap();
    for key in ["gb_per_s", "share", "bound"] {
        let column = names.iter().position(|name| name == key).unwrap();
        assert_eq!(&record[column], "", "{key}");
        assert!(json["rows"][0][key].is_null(), "{key}");
    }
}

#[test]
fn the_backend_reads_from_where_on_the_npu_is_faster() {
    let folder = folder("tool_bench_config");
    let settings = folder.join("settings.conf");
    std::fs::write(&settings, "# mine\nmin_m.rk3588 = 9\n").unwrap();
    let cpu = cpu_times(&folder);
    let args = [
        &SMALL[..],
        &["--types", "q8_0", "--cpu", &cpu, "--write-config"],
    ]
    .concat();
    let output = bench("rk3588", &settings, &args);
    let said = done(&output);
    assert!(
        said.contains("faster than the CPU from 3 rows on; GGML_RUST_NPU_MIN_M=3"),
        "{said}"
    );
    assert!(
        said.contains("RKNPU0 (simulated): at least 3 rows, written to"),
        "{said}"
    );
    let written = std::fs::read_to_string(&settings).unwrap();
    assert_eq!(
        written,
        "# mine\nmin_m.rk3588 = 9\nmin_m.rk3588.simulated = 3\n"
    );
    let min_m = |sim: Option<&str>| {
        let config = Config::from_lookup(|name| match name {
            "GGML_RUST_NPU_CONFIG" => Some(settings.to_str().unwrap().into()),
            "GGML_RUST_NPU_SIM" => sim.map(String::from),
            _ => None,
        });
        config.unwrap().min_m("rk3588").unwrap()
    };
    assert_eq!((min_m(Some("rk3588")), min_m(None)), (3, 9));

    // Hexagon computes all of it, so nothing goes to the CPU.
    let output = bench("hexagon-v75", &settings, &args);
    assert!(done(&output).contains("there is nothing to set"));
    assert_eq!(std::fs::read_to_string(&settings).unwrap(), written);
}

#[test]
fn without_a_named_file_settings_go_to_the_user_s_folder() {
    let folder = folder("tool_bench_folder");
    let settings = folder.join("ggml-rust-npu.conf");
    let cpu = cpu_times(&folder);
    let args = [
        &SMALL[..],
        &["--types", "q8_0", "--cpu", &cpu, "--write-config"],
    ]
    .concat();
    done(&bench("rk3576", &settings, &args));
    assert_eq!(
        std::fs::read_to_string(&settings).unwrap(),
        "min_m.rk3576.simulated = 3\n"
    );
}

#[test]
fn a_named_file_that_does_not_exist_is_made_and_others_do_not_count() {
    let folder = folder("tool_bench_new");
    let new = folder.join("folder/new.conf");
    let cpu = cpu_times(&folder);
    // The user's default file is not read, because another one is named.
    std::fs::write(folder.join("ggml-rust-npu.conf"), "no setting\n").unwrap();
    let args = [&SMALL[..], &["--types", "q8_0", "--cpu", &cpu]].concat();
    let run = |more: &[&str]| {
        let args = [&args[..], more].concat();
        let mut command = command("rk3588", &folder.join("none.conf"), &args);
        command.env("GGML_RUST_NPU_CONFIG", &new).output().unwrap()
    };
    let unread = run(&[]);
    assert_eq!(unread.status.code(), Some(3), "{}", text(&unread.stderr));
    assert!(text(&unread.stderr).contains("new.conf"));
    assert!(!new.exists());
    let said = run(&["--write-config"]);
    assert!(done(&said).contains("at least 3 rows, written to"));
    let written = std::fs::read_to_string(&new).unwrap();
    assert_eq!(written, "min_m.rk3588.simulated = 3\n");
    done(&run(&[]));
}

#[test]
fn sizes_of_the_cpu_s_file_are_timed_and_what_no_device_takes_is_named() {
    let folder = folder("tool_bench_sizes");
    let cpu = cpu_times(&folder);
    let args = [
        "--rows",
        "2",
        "--shapes",
        "48x32",
        "--types",
        "q8_0,q4_0",
        "--cpu",
        &cpu,
        "--csv",
    ];
    let csv = bench("rk3588", &folder.join("none.conf"), &args);
    let rows: Vec<&str> = done(&csv).lines().skip(1).collect();
    let starts = [
        "RKNPU0,true,Q8_0,1,64,192,",
        "RKNPU0,true,Q8_0,2,64,192,",
        "RKNPU0,true,Q8_0,4,64,192,",
    ];
    assert_eq!(rows.len(), 3, "{rows:?}");
    assert!(
        rows.iter()
            .zip(starts)
            .all(|(row, start)| row.starts_with(start)),
        "{rows:?}"
    );
    let args = ["--rows", "2", "--shapes", "48x32", "--types", "q4_0"];
    let table = bench("rk3588", &folder.join("none.conf"), &args);
    assert!(done(&table).contains("RKNPU0: Q4_0 48x32 is left to the CPU"));
}

#[test]
fn what_is_wrong_is_one_clear_error() {
    let folder = folder("tool_bench_wrong");
    let none = folder.join("none.conf");
    let fails = |settings: &Path, args: &[&str], code: i32, words: &[&str]| {
        let output = bench("rk3588", settings, args);
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(
            words.iter().all(|word| errors.contains(word)),
            "{words:?}: {errors}"
        );
    };
    fails(&none, &["--shapes", "64y64"], 2, &["64y64", "2048x8192"]);
    fails(&none, &["--rows", "0"], 2, &["65536"]);
    fails(&none, &["--write-config"], 2, &["--cpu"]);
    fails(&none, &["--csv", "--json"], 2, &["--json"]);
    fails(&none, &["--cpu", "/nowhere"], 1, &["/nowhere"]);
    let empty = folder.join("empty.txt");
    std::fs::write(&empty, "no times\n").unwrap();
    fails(
        &none,
        &["--cpu", empty.to_str().unwrap()],
        1,
        &["empty.txt", "test-backend-ops perf"],
    );
    let bad = folder.join("bad.conf");
    std::fs::write(&bad, "min_m.rk3588 = 2\nmin_m.rk3599 = 2\n").unwrap();
    fails(
        &bad,
        &SMALL,
        3,
        &[
            "GGML_RUST_NPU_CONFIG",
            "bad.conf",
            "line 2",
            "rk3599",
            "rk3588, rk3576",
        ],
    );
    let output = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"))
        .args(["bench"])
        .env("GGML_RUST_NPU_SIM", "rk3588")
        .env("GGML_RUST_NPU_DEVICES", "RKNPU9")
        .env("XDG_CONFIG_HOME", &folder)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("RKNPU0 is left out"));
}

/// The planner uses the segments that the file names, and results stay right: `bench` checks them.
#[test]
fn segments_of_k_are_timed_and_the_planner_uses_the_ones_that_are_written() {
    use ggml_rust_npu::rockchip::caps::RK3588;
    use ggml_rust_npu::rockchip::discovery::target;
    let folder = folder("tool_bench_segments");
    let conf = folder.join("segments.conf");
    std::fs::write(
        &conf,
        "min_m.rk3588 = 7 # mine\nk_max_fp16.rk3588.simulated = 256\n",
    )
    .unwrap();
    let sizes = ["--rows", "1,3", "--shapes", "2080x64,1056x96"];
    let args = [&["--segments"], &sizes[..], &["--write-config"]].concat();
    let output = bench("rk3588", &conf, &args);
    let table = done(&output);
    assert!(table.starts_with("rk3588 (simulated): "), "{table}");
    for arithmetic in ["INT8 K=8192: 1.00\n", "FP16 K=4096: 1.00\n"] {
        assert!(table.contains(arithmetic), "{table}");
    }
    for timed in [
        "INT8 K=1024: ",
        "INT8 K=2048: ",
        "FP16 K=1024: ",
        "FP16 K=2048: ",
    ] {
        assert!(table.contains(timed), "{table}");
    }
    assert!(
        !table.contains("INT8 K=4096: "),
        "no size is longer: {table}"
    );
    assert!(
        !table.contains("nothing was timed"),
        "a candidate is shorter: {table}"
    );
    let text = std::fs::read_to_string(&conf).unwrap();
    assert!(text.contains("min_m.rk3588 = 7 # mine\n"), "{text}");
    assert!(!text.contains("= 256"), "{text}");
    // The planner's choices with such a file.
    let planned = |chips: &str, text: &str| {
        std::fs::write(&conf, text).unwrap();
        let config = Config::from_lookup(|name| match name {
            "GGML_RUST_NPU_CONFIG" => Some(conf.display().to_string()),
            "GGML_RUST_NPU_SIM" => Some(chips.into()),
            _ => None,
        });
        let caps = target(&RK3588, &config.unwrap()).unwrap().caps;
        (caps.k_max_int8, caps.k_max_fp16)
    };
    assert_eq!(planned("rk3588", &text).1 % 1024, 0);
    let both = "k_max_int8.rk3588.simulated = 1024\nk_max_fp16.rk3588 = 2048\n";
    assert_eq!(planned("rk3588", both), (1024, 4096));
    assert_eq!(planned("", both), (8192, 2048));
    // Results with these segments are right, too.
    std::fs::write(&conf, both).unwrap();
    done(&bench(
        "rk3588",
        &conf,
        &[&sizes[..], &["--types", "q8_0,f16"]].concat(),
    ));
}

#[test]
fn segments_of_a_device_that_is_not_chosen_are_not_timed() {
    let conf = folder("tool_bench_left_out").join("segments.conf");
    let args = ["--segments", "-m", "1", "-s", "2080x64", "--write-config"];
    let run = |devices: &str| {
        let mut command = command("rk3588", &conf, &args);
        command.env("GGML_RUST_NPU_CONFIG", &conf);
        command.env("GGML_RUST_NPU_DEVICES", devices);
        command.output().unwrap()
    };
    let output = run("HEX0");
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(
        said.contains("RKNPU0 is left out: GGML_RUST_NPU_DEVICES does not name it"),
        "{said}"
    );
    assert!(said.contains("no NPU can be used"), "{said}");
    assert!(!conf.exists());
    done(&run("rknpu0"));
}

/// Regression: the settings were replaced by the chip's own largest K, though nothing had been
/// compared.
#[test]
fn segments_of_no_long_k_are_not_timed_and_settings_stay() {
    let conf = folder("tool_bench_no_segments").join("segments.conf");
    let old = "k_max_int8.rk3588.simulated = 2048\nk_max_fp16.rk3588.simulated = 1024\n";
    std::fs::write(&conf, old).unwrap();
    let args = ["--segments", "-m", "1", "-s", "512x64", "--write-config"];
    let output = bench("rk3588", &conf, &args);
    let table = done(&output);
    for name in ["INT8", "FP16"] {
        let line = format!(
            "{name}: nothing was timed, because no K is longer than 1024; no setting was written\n"
        );
        assert!(table.contains(&line), "{table}");
    }
    assert!(!table.contains("written to"), "{table}");
    assert_eq!(std::fs::read_to_string(&conf).unwrap(), old);
}

/// Regression: sizes that no candidate splits needed the same time with each candidate, which hid
/// the differences of other sizes.
#[test]
fn a_candidate_is_timed_on_the_shapes_that_it_splits_alone() {
    let conf = folder("tool_bench_short").join("none.conf");
    // The device refuses the short size, so it cannot be timed.
    let args = ["--segments", "-m", "1", "-s", "2080x64,48x64"];
    let output = bench("rk3588", &conf, &args);
    let table = done(&output);
    for timed in ["INT8 K=1024: ", "INT8 K=2048: ", "FP16 K=2048: "] {
        assert!(table.contains(timed), "{table}");
    }
}
