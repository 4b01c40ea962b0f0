//! A Hexagon NPU: attributes, the DSP's library, times and rates, the self-test.

use std::time::Duration;

use ggml_rust_npu::backend::{Absence, Absent, Device};
use ggml_rust_npu::config::Config;
use ggml_rust_npu::error::{Error, Result};
use ggml_rust_npu::hexagon::HexDevice;
use ggml_rust_npu::hexagon::device::{Batch, DeviceBuffer, HexNpu};
use ggml_rust_npu::hexagon::discovery::SessionPlan;
use ggml_rust_npu::hexagon::selftest::{FAMILIES, OneBufferProduct};
use hexagon_ops::ffi::{arch_of, attribute, describe};
use hexagon_ops::layout::{LINE_BYTES, WeightType};
use hexagon_ops::wire::{self, Command, SOURCES, TYPE_F16, TYPE_F32, Tensor, TensorOp, VOTES};

use super::{Lines, finding, library, median, microseconds, timed};

/// The attributes of a DSP that can be queried.
const ATTRIBUTES: [(&str, u32); 11] = [
    ("domain", attribute::DOMAIN_SUPPORT),
    ("unsigned_modules", attribute::UNSIGNED_PD_SUPPORT),
    ("hvx_64b", attribute::HVX_SUPPORT_64B),
    ("hvx_128b", attribute::HVX_SUPPORT_128B),
    ("vtcm_page", attribute::VTCM_PAGE),
    ("vtcm_count", attribute::VTCM_COUNT),
    ("arch", attribute::ARCH_VER),
    ("hmx_depth", attribute::HMX_SUPPORT_DEPTH),
    ("hmx_spatial", attribute::HMX_SUPPORT_SPATIAL),
    ("asynchronous_calls", attribute::ASYNC_FASTRPC_SUPPORT),
    (
        "status_notification",
        attribute::STATUS_NOTIFICATION_SUPPORT,
    ),
];

/// Reason why the speed of gathers is not reported.
const NO_GATHER: &str = "no operation is gathers alone: rate.attention has one for each 64 scores";

/// Adds a session's lines; `false` if it does not open.
pub(super) fn add(
    lines: &mut Lines,
    session: std::result::Result<SessionPlan, Absence>,
    index: usize,
    config: &Config,
) -> bool {
    let name = format!("HEX{index}");
    let session = match session {
        Ok(session) => session,
        Err(reason) => {
            let absent = Absent { name, reason };
            lines.is_simulated = !config.sim.is_empty();
            lines.add("simulated", if lines.is_simulated { "yes" } else { "no" });
            lines.add("opened", format!("none ({absent})"));
            lines.add_calls();
            return false;
        }
    };
    let rpc = session.rpc();
    lines.is_simulated = rpc.stand_in().is_some();
    lines.add("simulated", if lines.is_simulated { "yes" } else { "no" });
    library::add(lines, "libcdsprpc");
    for (key, id) in ATTRIBUTES {
        let value = rpc
            .attribute(session.dsp(), id)
            .map(|value| format!("{value:#x}"));
        lines.add_result(&format!("attribute.{key}"), value);
    }
    let arch = (rpc.attribute(session.dsp(), attribute::ARCH_VER)).map(arch_of);
    let skel = match &arch {
        Ok(_) if lines.is_simulated => Err("built in: a stand-in".into()),
        Ok(arch) => library::dsp_library(&format!("libggml_rust_npu_skel_v{arch}.so")),
        Err(error) => Err(error.to_string()),
    };
    library::add_file(lines, "dsp_library", skel);
    let opened = session.untested(&name, config);
    let is_open = opened.is_ok();
    match opened {
        Ok(device) => {
            finding::add_loading(lines);
            add_open(lines, &device);
            finding::add_session(lines, device.npu(), &session, config);
        }
        Err(error) => {
            lines.add("opened", format!("none ({error})"));
            finding::add_loading(lines);
        }
    }
    lines.add_calls();
    is_open
}

fn add_open(lines: &mut Lines, device: &HexDevice) {
    let npu = device.npu();
    let info = npu.info();
    lines.add("opened", device.description());
    lines.add("dsp.protocol", info.version);
    lines.add("dsp.arch", info.arch);
    lines.add("dsp.vtcm_bytes", info.vtcm_bytes);
    lines.add("dsp.hvx_units", info.units);
    lines.add("dsp.hvx_threads", info.threads);
    lines.add(
        "dsp.cache_line_bytes",
        format!("{LINE_BYTES}, as our library assumes: the DSP cannot be asked"),
    );
    lines.add(
        "dsp.clock",
        "none (an unsigned process cannot ask for clocks)",
    );
    for (vote, of) in info.votes.iter().zip(VOTES) {
        let key = format!("dsp.vote.{}", word(of));
        match vote {
            0 => lines.add(&key, "granted"),
            code => lines.add(&key, format!("refused: {}", describe(*code))),
        }
    }
    let log = if lines.is_simulated {
        "none (a stand-in has no log)"
    } else {
        "where the system keeps it: lines with ggml-rust-npu in adb logcat -s adsprpc, or in dmesg"
    };
    lines.add("dsp.log", log);
    for family in FAMILIES {
        let key = format!("selftest.{}", family.name.replace(' ', "_"));
        let began = std::time::Instant::now();
        match family.test(npu) {
            Ok(outcomes) => {
                for outcome in &outcomes {
                    let said = if outcome.is_right() { "right" } else { "WRONG" };
                    let (have, limit) = (outcome.have, outcome.limit);
                    let value = format!(
                        "{said}: {}, error {have:.1e}, limit {limit:.1e}",
                        outcome.test
                    );
                    lines.add(&format!("{key}.{}", word(&outcome.test)), value);
                }
                let time = microseconds(began.elapsed());
                lines.add_measured(&format!("{key}.time"), format!("{time:.0} us"));
            }
            Err(error) => lines.add(&key, format!("none ({error})")),
        }
    }
    add_times(lines, npu);
    lines.add("rate.gather", format!("none ({NO_GATHER})"));
    for (key, measure) in RATES {
        match measure(npu) {
            Ok(value) => lines.add_measured(&format!("rate.{key}"), value),
            Err(error) => lines.add(&format!("rate.{key}"), format!("none ({error})")),
        }
    }
}

/// Returns the letters, digits and underscores.
fn word(text: &str) -> String {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric());
    let words: Vec<String> = words
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    words.join("_")
}

/// Returns a tensor without gaps at `offset`.
fn tensor(buffer: &DeviceBuffer, dtype: u32, offset: usize, ne: [usize; 4]) -> Tensor {
    let mut stride = if dtype == TYPE_F16 { 2 } else { 4 };
    let mut nb = [0; 4];
    for (nb, count) in nb.iter_mut().zip(ne) {
        *nb = stride as u64;
        stride *= count;
    }
    Tensor {
        buffer: buffer.number(),
        dtype,
        offset: offset as u64,
        ne: ne.map(|count| u32::try_from(count).unwrap_or(u32::MAX)),
        nb,
    }
}

pub(super) fn zeroed(npu: &HexNpu, bytes: usize) -> Result<DeviceBuffer> {
    let buffer = npu.allocate(bytes)?;
    buffer.write(0..bytes, |out| out.fill(0));
    Ok(buffer)
}

fn batch<B: wire::Body>(body: &B, buffer: &DeviceBuffer) -> Batch {
    let mut batch = Batch::default();
    batch.push(Command::new(0, body), &[buffer.number()]);
    batch
}

pub(super) fn submit(npu: &HexNpu, batch: &Batch) -> Result<Duration> {
    npu.submit(batch).map_err(|failed| failed.error)
}

/// Returns a copy of `elements` f32.
pub(super) fn copy(buffer: &DeviceBuffer, elements: usize) -> Batch {
    let none: Tensor = bytemuck::Zeroable::zeroed();
    let mut src = [none; SOURCES];
    src[0] = tensor(buffer, TYPE_F32, 0, [elements, 1, 1, 1]);
    let body = TensorOp {
        kernel: wire::KERNEL_COPY,
        reserved: 0,
        params: [0; 16],
        dst: tensor(buffer, TYPE_F32, elements * 4, [elements, 1, 1, 1]),
        src,
    };
    batch(&body, buffer)
}

/// Adds times of the ring: the time of an almost empty submission.
fn add_times(lines: &mut Lines, npu: &HexNpu) {
    let trip = |pause: Duration, count| {
        let buffer = zeroed(npu, 4096)?;
        let small = copy(&buffer, 32);
        submit(npu, &small)?;
        median(count, || {
            std::thread::sleep(pause);
            timed(|| submit(npu, &small))
        })
    };
    // Longer than the DSP waits for work before its call returns.
    const PARKED: Duration = Duration::from_millis(40);
    for (key, time) in [
        ("time.round_trip", trip(Duration::ZERO, 200)),
        ("time.round_trip_parked", trip(PARKED, 5)),
        ("time.map_64_mib", map(npu)),
    ] {
        match time {
            Ok(time) => lines.add_measured(key, format!("{:.1} us", microseconds(time))),
            Err(error) => lines.add(key, format!("none ({error})")),
        }
    }
}

/// Returns the time to allocate a large buffer and to use it for the first time.
fn map(npu: &HexNpu) -> Result<Duration> {
    median(3, || {
        timed(|| {
            let buffer = npu.allocate(64 << 20)?;
            submit(npu, &copy(&buffer, 32))
        })
    })
}

type Rate = fn(&HexNpu) -> Result<String>;

/// Measurements, timed by the DSP's clock.
const RATES: [(&str, Rate); 5] = [
    ("copy_f32", |npu| {
        const ELEMENTS: usize = 1 << 20;
        let buffer = zeroed(npu, ELEMENTS * 8)?;
        let time = best(npu, &copy(&buffer, ELEMENTS))?;
        Ok(per_second(ELEMENTS * 8, time, "bytes read and written"))
    }),
    ("weights_q4_0_m1", |npu| weights(npu, WeightType::Q4_0)),
    ("weights_f16_m1", |npu| weights(npu, WeightType::F16)),
    ("matrix_f16_m128", |npu| {
        let time = product(npu, WeightType::F16, 128)?;
        Ok(per_second(128 * K * N * 2, time, "operations"))
    }),
    ("attention", |npu| {
        // One query for each of 8 heads.
        const POSITIONS: usize = 4096;
        let (d, heads) = (64, 8);
        let keys = d * POSITIONS * heads * 2;
        let buffer = zeroed(npu, 2 * keys + 2 * d * heads * 4)?;
        let query = tensor(&buffer, TYPE_F32, 2 * keys, [d, 1, heads, 1]);
        let body = wire::Attention {
            scale: 0.125f32.to_bits(),
            max_bias: 0,
            softcap: 0,
            reserved: 0,
            dst: tensor(
                &buffer,
                TYPE_F32,
                2 * keys + d * heads * 4,
                [d, heads, 1, 1],
            ),
            q: query,
            k: tensor(&buffer, TYPE_F16, 0, [d, POSITIONS, heads, 1]),
            v: tensor(&buffer, TYPE_F16, keys, [d, POSITIONS, heads, 1]),
            mask: bytemuck::Zeroable::zeroed(),
            sinks: bytemuck::Zeroable::zeroed(),
        };
        let time = best(npu, &batch(&body, &buffer))?;
        Ok(per_second(POSITIONS * heads, time, "scores of 64 elements"))
    }),
];

/// Sizes of the products.
const K: usize = 2048;
const N: usize = 2048;

fn weights(npu: &HexNpu, weight: WeightType) -> Result<String> {
    let bytes = OneBufferProduct::new(weight, 1, K, N)
        .layout()
        .matrix_bytes();
    let time = product(npu, weight, 1)?;
    Ok(per_second(bytes, time, "bytes of weights"))
}

/// Returns the time of a product with zeros, which are as slow as other numbers.
fn product(npu: &HexNpu, weight: WeightType, m: usize) -> Result<Duration> {
    let product = OneBufferProduct::new(weight, m, K, N);
    let buffer = zeroed(npu, product.bytes())?;
    best(npu, &product.batch(&buffer))
}

/// Returns the shortest of several times, measured by the DSP, without the first one.
fn best(npu: &HexNpu, batch: &Batch) -> Result<Duration> {
    submit(npu, batch)?;
    let mut shortest = Duration::MAX;
    for _ in 0..3 {
        shortest = shortest.min(submit(npu, batch)?);
    }
    if shortest.is_zero() {
        return Err(Error::Dsp {
            reason: "its clock did not move".into(),
        });
    }
    Ok(shortest)
}

fn per_second(count: usize, time: Duration, what: &str) -> String {
    let rate = count as f64 / time.as_secs_f64();
    let (rate, prefix) = match rate {
        1e9.. => (rate / 1e9, "G"),
        1e6.. => (rate / 1e6, "M"),
        _ => (rate / 1e3, "k"),
    };
    format!(
        "{rate:.2} {prefix} {what} a second, {:.0} us",
        microseconds(time)
    )
}
