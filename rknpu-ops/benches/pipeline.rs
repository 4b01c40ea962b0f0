//! Bytes per second of the host stages around a Rockchip matmul, beside a memcpy of the same bytes in the same run.
//!
//! Throughput counts the FP32 side only: what a stage reads (pack) or writes (unpack), `M * K * 4` bytes.
//! `pack_*` is single-threaded from FP32 rows to native A; `unpack_*` from native C to FP32 rows with N = K columns.
//! `part_*` are single loops: the portable ones everywhere, and on aarch64 the NEON ones, which the others use there.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::f16;
use rknpu_ops::layout::{Elem, NativeA, NativeB, NativeC};
#[cfg(target_arch = "aarch64")]
use rknpu_ops::neon;
use rknpu_ops::pack::{
    NativeOutput, Rows, RowsMut, convert_rows_f16, interleave_a, pack_group, pack_row_i8,
    quantize_rows_i8, unpack_f32, unpack_i32,
};
use rknpu_ops::quant::{hadamard_block, quantize_weight_row_i8};
use rknpu_ops::scalar;

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
const B_I8: NativeB = NativeB {
    gn: 32,
    gk: 32,
    split_k: 8192,
    elem: Elem::I8,
};
const C_32: NativeC = NativeC {
    t: 4,
    elem: Elem::I32,
};

/// Values of both signs without structure along K.
fn values(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn shapes() -> impl Iterator<Item = (usize, usize, String)> {
    BUCKETS
        .into_iter()
        .flat_map(|m| DEPTHS.map(|k| (m, k, format!("{m}x{k}"))))
}

fn memcpy(c: &mut Criterion) {
    let mut group = c.benchmark_group("memcpy");
    for (m, k, name) in shapes() {
        let (src, mut dst) = (values(m * k), vec![0.0; m * k]);
        group.throughput(Throughput::Bytes(4 * (m * k) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| black_box(&mut dst).copy_from_slice(black_box(&src)));
        });
    }
}

fn pack_i8(c: &mut Criterion) {
    let mut group = c.benchmark_group("pack_i8_hadamard");
    for (m, k, name) in shapes() {
        let (src, block) = (values(m * k), hadamard_block(k));
        let (mut work, mut scales) = (vec![0.0; k], vec![0.0; m]);
        let (mut scratch, mut native) = (vec![0i8; m * k], vec![0i8; m * k]);
        group.throughput(Throughput::Bytes(4 * (m * k) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                if m == 1 {
                    scales[0] =
                        pack_row_i8(black_box(&src), block, &mut work, [native.as_mut_slice()]);
                } else {
                    let src = Rows::new(black_box(&src), m, k, k);
                    quantize_rows_i8(src, block, &mut work, &mut scratch, &mut scales);
                    interleave_a(Rows::new(&scratch, m, k, k), A_I8, m, &mut native);
                }
                black_box(&native);
            });
        });
    }
}

fn pack_f16(c: &mut Criterion) {
    let mut group = c.benchmark_group("pack_f16");
    for (m, k, name) in shapes() {
        let src = values(m * k);
        let mut factors = vec![0.0; m];
        let mut scratch = vec![f16::ZERO; m * k];
        let mut native = scratch.clone();
        group.throughput(Throughput::Bytes(4 * (m * k) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let src = Rows::new(black_box(&src), m, k, k);
                convert_rows_f16(src, &mut scratch, &mut factors);
                if m > 1 {
                    interleave_a(Rows::new(&scratch, m, k, k), A_F16, m, &mut native);
                }
                black_box((&scratch, &native));
            });
        });
    }
}

fn pack_weight(c: &mut Criterion) {
    let mut group = c.benchmark_group("pack_weight_i8");
    for k in DEPTHS {
        let n = B_I8.gn;
        let (src, block) = (values(n * k), hadamard_block(k));
        let (mut work, mut scratch) = (vec![0.0; k], vec![0i8; n * k]);
        let (mut native, mut scales) = (scratch.clone(), vec![0.0; n]);
        group.throughput(Throughput::Bytes(4 * (n * k) as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{n}x{k}")), |b| {
            b.iter(|| {
                for (n, scale) in scales.iter_mut().enumerate() {
                    work.copy_from_slice(&black_box(&src)[n * k..][..k]);
                    *scale = quantize_weight_row_i8(&mut work, block, &mut scratch[n * k..][..k]);
                }
                pack_group(Rows::new(&scratch, n, k, k), B_I8, &mut native);
                black_box((&native, &scales));
            });
        });
    }
}

fn unpack(c: &mut Criterion) {
    let mut group = c.benchmark_group("unpack_i32");
    for (m, n, name) in shapes() {
        let native: Vec<i32> = (0..).take(m * n).collect();
        let (a_scales, w_scales) = (vec![0.5; m], values(n));
        let mut dst = vec![0.0; m * n];
        group.throughput(Throughput::Bytes(4 * (m * n) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let segments = [black_box(native.as_slice())];
                let c = NativeOutput::new(&segments, C_32, m);
                let mut rows = RowsMut::new(&mut dst, n, n);
                unpack_i32(c, 0..m, &a_scales, &w_scales, &mut rows);
                black_box(&dst);
            });
        });
    }
    group.finish();

    let mut group = c.benchmark_group("unpack_f32_two_segments");
    for (m, n, name) in shapes() {
        let (first, second) = (values(m * n), values(m * n));
        let (factors, mut dst) = (vec![0.5; m], vec![0.0; m * n]);
        group.throughput(Throughput::Bytes(4 * (m * n) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let segments = [black_box(first.as_slice()), &second];
                let c = NativeOutput::new(&segments, C_32, m);
                unpack_f32(c, 0..m, &factors, n, &mut RowsMut::new(&mut dst, n, n));
                black_box(&dst);
            });
        });
    }
}

/// The loops of one implementation.
struct Version {
    name: &'static str,
    hadamard: fn(&mut [f32], usize, f32),
    absmax: fn(&[f32]) -> u32,
    quantize: fn(&[f32], f32, &mut [i8]),
    to_f16: fn(&[f32], f32, &mut [f16]),
    interleave: fn(Rows<'_, i8>, usize, usize, &mut [i8]),
    unpack: fn(NativeOutput<'_, i32>, usize, &[f32], &mut RowsMut<'_>),
}

const SCALAR: Version = Version {
    name: "scalar",
    hadamard: scalar::hadamard,
    absmax: scalar::absmax_bits,
    quantize: scalar::quantize,
    to_f16: scalar::scale_to_f16,
    interleave: scalar::interleave,
    unpack: |c, m, w_scales, dst| scalar::unpack_i32(c, 0..m, |_| 0.5, w_scales, dst),
};

#[cfg(target_arch = "aarch64")]
const VERSIONS: [Version; 2] = [
    SCALAR,
    Version {
        name: "neon",
        hadamard: neon::hadamard,
        absmax: neon::absmax_bits,
        quantize: neon::quantize,
        to_f16: neon::scale_to_f16,
        interleave: neon::interleave,
        unpack: |c, m, w_scales, dst| neon::unpack_i32(c, 0..m, |_| 0.5, w_scales, dst),
    },
];
#[cfg(not(target_arch = "aarch64"))]
const VERSIONS: [Version; 1] = [SCALAR];

fn parts(c: &mut Criterion) {
    for version in VERSIONS {
        let mut group = c.benchmark_group(format!("part_{}", version.name));
        for k in DEPTHS {
            let (mut row, mut out, mut halves) = (values(k), vec![0i8; k], vec![f16::ZERO; k]);
            group.throughput(Throughput::Bytes(4 * k as u64));
            group.bench_function(BenchmarkId::new("hadamard", k), |b| {
                // Not normalized rows would grow with each transform, and slow down as infinities.
                let block = hadamard_block(k);
                let norm = 1.0 / (block as f32).sqrt();
                b.iter(|| (version.hadamard)(black_box(&mut row), block, norm));
            });
            let row = values(k);
            group.bench_function(BenchmarkId::new("absmax", k), |b| {
                b.iter(|| (version.absmax)(black_box(&row)));
            });
            group.bench_function(BenchmarkId::new("quantize", k), |b| {
                b.iter(|| (version.quantize)(black_box(&row), 127.0, black_box(&mut out)));
            });
            group.bench_function(BenchmarkId::new("scale_to_f16", k), |b| {
                b.iter(|| (version.to_f16)(black_box(&row), 0.5, black_box(&mut halves)));
            });
            for m in [1, 16, 512] {
                let (scratch, mut native) = (vec![1i8; m * k], vec![0i8; m * k]);
                group.throughput(Throughput::Bytes(4 * (m * k) as u64));
                let shape = format!("{m}x{k}");
                group.bench_function(BenchmarkId::new("interleave_i8", &shape), |b| {
                    b.iter(|| {
                        let src = Rows::new(black_box(&scratch), m, k, k);
                        (version.interleave)(src, A_I8.s, m, black_box(&mut native));
                    });
                });
                let (sums, mut dst) = (vec![9i32; m * k], vec![0.0; m * k]);
                group.bench_function(BenchmarkId::new("unpack_i32", &shape), |b| {
                    b.iter(|| {
                        let segments = [black_box(sums.as_slice())];
                        let c = NativeOutput::new(&segments, C_32, m);
                        (version.unpack)(c, m, &row, &mut RowsMut::new(&mut dst, k, k));
                        black_box(&dst);
                    });
                });
            }
        }
    }
}

/// About 130 measurements of half a second, 40 more on aarch64.
fn quick() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300))
        .without_plots()
}

criterion_group! {
    name = benches;
    config = quick();
    targets = memcpy, pack_i8, pack_f16, pack_weight, unpack, parts
}
criterion_main!(benches);
