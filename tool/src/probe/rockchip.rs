//! A Rockchip NPU: versions, clocks, the self-test, times of the library's calls and rates of one
//! core.

use std::sync::Arc;
use std::time::Duration;

use ggml_rust_npu::backend::{Absent, Device};
use ggml_rust_npu::config::Config;
use ggml_rust_npu::error::Result;
use ggml_rust_npu::rockchip::caps::{Precision, RkCaps};
use ggml_rust_npu::rockchip::device::NAME;
use ggml_rust_npu::rockchip::driver::{Context, Memory, Rknn, RunOperands};
use ggml_rust_npu::rockchip::{RkDevice, discovery, selftest};
use rknpu_ops::ffi::{CoreMask, MatmulInfo};

use super::{Lines, finding, library, machine, median, microseconds, timed};

/// Files in which the kernel's driver reports its state; some are for root only.
const DRIVER_FILES: [(&str, &str); 5] = [
    ("driver.version", "/sys/kernel/debug/rknpu/version"),
    ("driver.proc_version", "/proc/rknpu/version"),
    ("driver.power", "/sys/kernel/debug/rknpu/power"),
    ("driver.load", "/sys/kernel/debug/rknpu/load"),
    ("driver.clock", "/sys/kernel/debug/rknpu/freq"),
];

/// Adds the lines; `false` if the NPU does not open.
pub(super) fn add(lines: &mut Lines, caps: &'static RkCaps, config: &Config) -> bool {
    lines.add("simulated", if lines.is_simulated { "yes" } else { "no" });
    lines.add("chip", caps.soc.name());
    lines.add("cores", caps.soc.cores());
    let opened = if config.chooses(NAME) {
        open(caps, lines.is_simulated, config).map_err(|error| error.to_string())
    } else {
        Err(Absent::not_chosen(NAME).to_string())
    };
    library::add(lines, "librknnrt");
    for (key, path) in DRIVER_FILES {
        lines.add_result(key, machine::read(path));
    }
    add_clocks(lines);
    let is_open = opened.is_ok();
    match opened {
        Ok((rknn, device)) => add_open(lines, &rknn, &device, config),
        Err(reason) => lines.add("opened", format!("none ({reason})")),
    }
    lines.add_calls();
    is_open
}

fn open(caps: &'static RkCaps, simulated: bool, config: &Config) -> Result<(Arc<Rknn>, RkDevice)> {
    let rknn = discovery::open(caps, simulated, config)?;
    let device = RkDevice::untested(Arc::clone(&rknn), discovery::target(caps, config)?)?;
    Ok((rknn, device))
}

/// Clocks of the NPU that the kernel lets everyone read.
fn add_clocks(lines: &mut Lines) {
    const FOLDER: &str = "/sys/class/devfreq";
    let folder = std::fs::read_dir(FOLDER).map_err(|error| machine::reason_of(&error));
    let npu = folder.and_then(|folder| {
        let mut paths = folder.flatten().map(|entry| entry.path());
        let found = paths.find(|path| path.to_string_lossy().contains("npu"));
        found.ok_or_else(|| "no NPU among them".into())
    });
    for (key, file) in [
        ("clock.now_hz", "cur_freq"),
        ("clock.largest_hz", "max_freq"),
        ("clock.all_hz", "available_frequencies"),
        ("clock.governor", "governor"),
    ] {
        let value = match &npu {
            Ok(npu) => machine::read(&npu.join(file).to_string_lossy()),
            Err(reason) => Err(format!("{FOLDER}: {reason}")),
        };
        lines.add_result(key, value);
    }
}

fn add_open(lines: &mut Lines, rknn: &Arc<Rknn>, device: &RkDevice, config: &Config) {
    let (library, driver) = device.npu().versions();
    lines.add("opened", device.description());
    lines.add("version.library", library);
    lines.add("version.driver", driver);
    match selftest::cores(device.npu()) {
        Ok(None) => lines.add("selftest.cores", "agree"),
        Ok(Some(differ)) => lines.add("selftest.cores", format!("{differ} results DIFFER")),
        Err(error) => lines.add("selftest.cores", format!("none ({error})")),
    }
    let began = std::time::Instant::now();
    match selftest::run(device.npu(), &config.rules) {
        Ok(_) => lines.add("selftest.products", "right"),
        Err(error) => lines.add("selftest.products", format!("WRONG: {error}")),
    }
    let time = microseconds(began.elapsed());
    lines.add_measured("selftest.time", format!("{time:.0} us"));
    // With the turn, no other process computes while times are measured.
    let _turn = match rknn.turn() {
        Ok(turn) => turn,
        Err(error) => {
            lines.add("measured", format!("none ({error})"));
            return;
        }
    };
    let cores = device.npu().caps().soc.cores();
    // A chip with one core refuses a mask.
    let mask = (cores > 1).then_some(CoreMask::CORE_0);
    for (key, bytes) in [("4_kib", 4 << 10), ("1_mib", 1 << 20), ("16_mib", 16 << 20)] {
        match sync(rknn, bytes) {
            Ok([to, from]) => {
                let value = |time| format!("{:.1} us", microseconds(time));
                lines.add_measured(&format!("time.sync_to_device_{key}"), value(to));
                lines.add_measured(&format!("time.sync_from_device_{key}"), value(from));
            }
            Err(error) => lines.add(&format!("time.sync_{key}"), format!("none ({error})")),
        }
    }
    finding::add_rockchip(lines, rknn, mask);
    for precision in [Precision::Int8, Precision::Fp16] {
        let name = precision.name().to_lowercase();
        for m in [1, 64] {
            match Times::measure(rknn, precision, m, mask) {
                Ok(times) => times.add(lines, &format!("{name}_m{m}"), m),
                Err(error) => lines.add(&format!("rate.{name}_m{m}"), format!("none ({error})")),
            }
        }
    }
}

/// Returns the times of the two directions of a cache operation.
fn sync(rknn: &Arc<Rknn>, bytes: usize) -> Result<[Duration; 2]> {
    let info = MatmulInfo::native(Precision::Fp16.matmul_type(), 32, 32, 32);
    let context = Arc::new(Context::new(rknn, info, None)?);
    let mut memory = Memory::new(&context, bytes)?;
    let to = median(21, || {
        memory.bytes_mut().fill(1);
        timed(|| memory.sync_to_device())
    })?;
    let from = median(21, || timed(|| memory.sync_from_device()))?;
    Ok([to, from])
}

/// Sizes of the products.
const K: usize = 1024;
const N: usize = 1024;

/// Times of a shape on one core.
struct Times {
    create: Duration,
    run: Duration,
    /// The time of a run before which the weights were bound to other memory.
    run_and_bind: Duration,
}

impl Times {
    fn measure(
        rknn: &Arc<Rknn>,
        precision: Precision,
        m: usize,
        mask: Option<CoreMask>,
    ) -> Result<Self> {
        let [rows, k, n] = [m, K, N].map(|size| i32::try_from(size).unwrap_or(i32::MAX));
        let info = MatmulInfo::native(precision.matmul_type(), rows, k, n);
        let create = timed(|| Context::new(rknn, info, mask))?;
        let mut context = Context::new(rknn, info, mask)?;
        let owner = MatmulInfo::native(Precision::Fp16.matmul_type(), 32, 32, 32);
        let owner = Arc::new(Context::new(rknn, owner, None)?);
        // An element of an operand has at most two bytes, one of a result at most four.
        let weight_bytes = K * N * 2;
        let zeros = |bytes: usize| {
            let mut memory = Memory::new(&owner, bytes)?;
            memory.bytes_mut().fill(0);
            memory.sync_to_device()?;
            Ok::<_, ggml_rust_npu::error::Error>(memory)
        };
        let (a, weights, mut c) = (
            zeros(m * K * 2)?,
            zeros(2 * weight_bytes)?,
            zeros(m * N * 4)?,
        );
        let b = [
            weights.view(0, weight_bytes)?,
            weights.view(weight_bytes, weight_bytes)?,
        ];
        let mut run = |b| {
            let operands = RunOperands {
                a: &a,
                b,
                c: &mut c,
            };
            timed(|| context.bind_and_run(operands))
        };
        run(&b[0])?;
        let same = median(9, || run(&b[0]))?;
        let mut turn = 0;
        let other = median(9, || {
            turn += 1;
            run(&b[turn % 2])
        })?;
        Ok(Self {
            create,
            run: same,
            run_and_bind: other,
        })
    }

    fn add(&self, lines: &mut Lines, name: &str, m: usize) {
        for (key, time) in [
            ("create", self.create),
            ("run", self.run),
            ("run_and_bind", self.run_and_bind),
        ] {
            let value = format!("{:.1} us, K={K} N={N}, one core", microseconds(time));
            lines.add_measured(&format!("time.{key}_{name}"), value);
        }
        let rate = (2 * m * K * N) as f64 / self.run.as_secs_f64() / 1e9;
        let value = format!("{rate:.3} G operations a second, one core");
        lines.add_measured(&format!("rate.{name}"), value);
    }
}
