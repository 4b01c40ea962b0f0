//! Measures bytes per second of the host stages around a Rockchip matmul, and their share of a
//! memcpy in the same run.
//!
//! Throughput counts the FP32 side only: the bytes that a stage reads (pack) or writes (unpack),
//! `M * K * 4` bytes, one thread. `pack` is from FP32 rows to native A, rotation included; `unpack`
//! from native C to FP32 rows with N = K columns. *plain* are loops that move one element at a time
//! to the place that the layout's formula gives, as the compiler translates them; *used* are the
//! functions that the library calls on this processor. Each time is the least of many.
//!
//! `cargo bench` measures; as a test, everything runs once.

#![expect(
    clippy::cast_precision_loss,
    reason = "sizes and times are far below 2^53"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::f16;
use rknpu_ops::int4::{self, Digits, Product, ScaledOutput};
use rknpu_ops::layout::{Elem, NativeA, NativeC};
use rknpu_ops::pack::{self, NativeOutput, Rows, StridedRows};
use rknpu_ops::rotation::Rotation;

mod plain;

const BUCKETS: [usize; 4] = [1, 16, 128, 512];
const DEPTHS: [usize; 4] = [576, 1536, 4096, 8192];

const A_I8: NativeA = NativeA {
    s: 16,
    elem: Elem::I8,
};
const A_F16: NativeA = NativeA {
    s: 8,
    elem: Elem::F16,
};
const A_I4: NativeA = NativeA {
    s: 32,
    elem: Elem::I4,
};
const C_32: NativeC = NativeC {
    t: 4,
    elem: Elem::I32,
};
const C_16: NativeC = NativeC {
    t: 8,
    elem: Elem::I16,
};

/// Duration of a measurement.
#[derive(Clone, Copy)]
struct Effort {
    total: Duration,
    /// Shorter runs are repeated between two looks at the clock.
    at_least: Duration,
}

impl Effort {
    /// Least seconds of one `run`.
    fn seconds(self, mut run: impl FnMut()) -> f64 {
        let began = Instant::now();
        run();
        let once = began.elapsed().max(Duration::from_nanos(50));
        let times = (self.at_least.as_nanos() / once.as_nanos()).clamp(1, 1000) as u32;
        let mut best = once.as_secs_f64();
        while began.elapsed() < self.total {
            let start = Instant::now();
            (0..times).for_each(|_| run());
            best = best.min(start.elapsed().as_secs_f64() / f64::from(times));
        }
        best
    }
}

/// Values of both signs without structure along K.
fn values(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Seconds of the plain and of the used version.
type Times = (Option<f64>, f64);

fn pack_i8(effort: Effort, m: usize, k: usize) -> Times {
    let (src, rotation) = (values(m * k), Rotation::new(k));
    let (mut work, mut scales) = (vec![0.0; k], vec![0.0; m]);
    let (mut scratch, mut native) = (vec![0i8; m * k], vec![0i8; m * k]);
    let plain = effort.seconds(|| {
        plain::pack_i8(
            black_box(&src),
            k,
            A_I8,
            &mut work,
            &mut scales,
            &mut native,
        );
        black_box(&native);
    });
    let used = effort.seconds(|| {
        let src = Rows::new(black_box(&src), m, k, k);
        pack::quantize_rows_i8(src, &rotation, &mut work, &mut scratch, &mut scales);
        pack::interleave_a(Rows::new(&scratch, m, k, k), A_I8, m, &mut native);
        black_box(&native);
    });
    (Some(plain), used)
}

fn pack_f16(effort: Effort, m: usize, k: usize) -> Times {
    let (src, rotation) = (values(m * k), Rotation::identity(k));
    let mut factors = vec![0.0; m];
    let mut scratch = vec![f16::ZERO; m * k];
    let mut native = scratch.clone();
    let plain = effort.seconds(|| {
        plain::pack_f16(black_box(&src), k, A_F16, &mut factors, &mut native);
        black_box(&native);
    });
    let used = effort.seconds(|| {
        let src = Rows::new(black_box(&src), m, k, k);
        pack::convert_rows_f16(src, &rotation, &mut [], &mut scratch, &mut factors);
        pack::interleave_a(Rows::new(&scratch, m, k, k), A_F16, m, &mut native);
        black_box(&native);
    });
    (Some(plain), used)
}

fn pack_i4(effort: Effort, m: usize, k: usize) -> Times {
    let (src, rotation) = (values(m * k), Rotation::new(k));
    let segments = k.div_ceil(int4::SAFE_K_I4);
    let segment_k = k.div_ceil(segments).next_multiple_of(32);
    let (mut work, mut factors) = (vec![0.0; k], vec![0.0; m * int4::factors_i4(segments)]);
    let (mut scratch, mut native) = (vec![0u8; m * k], vec![0u8; m * k]);
    let used = effort.seconds(|| {
        let (src, digits) = (Rows::new(black_box(&src), m, k, k), Digits::Two);
        let (out, work) = (&mut scratch, &mut work);
        int4::quantize_rows_i4(src, &rotation, segment_k, digits, work, out, &mut factors);
        let digits = Rows::new(&scratch, 2 * m, k / 2, k / 2);
        int4::interleave_a_i4(digits, A_I4, 2 * m, &mut native);
        black_box(&native);
    });
    (None, used)
}

fn unpack_i32(effort: Effort, m: usize, n: usize) -> Times {
    let native: Vec<i32> = (0..).take(m * n).collect();
    let (a_scales, w_scales) = (vec![0.5; m], values(n));
    let mut dst = vec![0.0; m * n];
    let plain = effort.seconds(|| {
        plain::unpack_i32(black_box(&native), C_32, &a_scales, &w_scales, &mut dst);
        black_box(&dst);
    });
    let used = effort.seconds(|| {
        let segments = [black_box(native.as_slice())];
        let c = NativeOutput::new(&segments, C_32, m);
        let mut rows = StridedRows::new(&mut dst, n, n);
        pack::unpack_i32(c, 0..m, &a_scales, &w_scales, &mut rows);
        black_box(&dst);
    });
    (Some(plain), used)
}

fn unpack_f32(effort: Effort, m: usize, n: usize) -> Times {
    let native = values(m * n);
    let (factors, mut dst) = (vec![0.5; m], vec![0.0; m * n]);
    let plain = effort.seconds(|| {
        plain::unpack_f32(black_box(&native), C_32, &factors, &mut dst);
        black_box(&dst);
    });
    let used = effort.seconds(|| {
        let segments = [black_box(native.as_slice())];
        let c = NativeOutput::new(&segments, C_32, m);
        pack::unpack_f32(c, 0..m, &factors, n, &mut StridedRows::new(&mut dst, n, n));
        black_box(&dst);
    });
    (Some(plain), used)
}

fn unpack_i16(effort: Effort, m: usize, n: usize) -> Times {
    let native = vec![5i16; 2 * m * n];
    let (w_scales, per_row) = (values(n), int4::factors_i4(1));
    let (factors, mut dst) = (vec![0.5; m * per_row], vec![0.0; m * n]);
    let used = effort.seconds(|| {
        let segments = [ScaledOutput {
            c: black_box(native.as_slice()),
            w_scales: &w_scales,
        }];
        let factors = Rows::new(&factors, m, per_row, per_row);
        let product = Product::new(&segments, C_16, 2 * m, Digits::Two, factors);
        int4::unpack_scaled(product, 0..m, &mut StridedRows::new(&mut dst, n, n));
        black_box(&dst);
    });
    (None, used)
}

fn memcpy(effort: Effort, m: usize, k: usize) -> f64 {
    let (src, mut dst) = (values(m * k), vec![0.0; m * k]);
    effort.seconds(|| black_box(&mut dst).copy_from_slice(black_box(&src)))
}

/// A stage: its name and how to measure it.
type Stage = (&'static str, fn(Effort, usize, usize) -> Times);

const STAGES: [Stage; 6] = [
    ("rotate, quantize, pack INT8", pack_i8),
    ("convert, pack FP16", pack_f16),
    ("rotate, two digits, pack INT4", pack_i4),
    ("unpack, dequantize INT32", unpack_i32),
    ("unpack FP32", unpack_f32),
    ("unpack two digits of INT16", unpack_i16),
];

fn main() {
    let measured = std::env::args().any(|arg| arg == "--bench");
    let [total, at_least] = if measured { [60_000, 50] } else { [0, 0] }.map(Duration::from_micros);
    let effort = Effort { total, at_least };
    println!(
        "{:30} {:>9} {:>8} {:>13} {:>13} {:>6}",
        "GB/s of FP32 rows", "M x K", "memcpy", "plain", "used", "gain"
    );
    for (name, measure) in STAGES {
        for (m, k) in BUCKETS.into_iter().flat_map(|m| DEPTHS.map(|k| (m, k))) {
            let gigabytes = (4 * m * k) as f64 * 1e-9;
            let copy = memcpy(effort, m, k);
            let (plain, used) = measure(effort, m, k);
            let speed = |seconds: f64| {
                let share = 100.0 * copy / seconds;
                format!("{:6.2} {share:4.0} %", gigabytes / seconds)
            };
            println!(
                "{name:30} {:>9} {:8.1} {:>13} {:>13} {:>6}",
                format!("{m}x{k}"),
                gigabytes / copy,
                plain.map_or_else(|| "-".to_owned(), speed),
                speed(used),
                plain.map_or_else(|| "-".to_owned(), |plain| format!("{:.1}x", plain / used)),
            );
        }
    }
}
