//! Measures repacking of weights, in bytes of the source a second, compared with memcpy: tiles for
//! Hexagon on one core and on all, and loading from a pack file, compared with reading as many
//! bytes. Loading a model streams its weights through memory once, so there are more of them than
//! any cache holds.

use std::io::Read;
use std::path::Path;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ggml_rust_npu::backend::offline::{Form, Weight};
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::graph::{Place, Tensor};
use ggml_rust_npu::hexagon::layout::WeightLayout;
use ggml_rust_npu::packfile::{PackWriter, Packs, Wanted};
use ggml_rust_npu::tensor::Shape;
use hexagon_ops::layout::{MatrixLayout, TILE_DIM, WeightType};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// N and K of a weight of the pack: Llama-3.2-1B's feed-forward.
const SHAPE: [usize; 2] = [8192, 2048];
/// Bytes of the rows that become tiles: more than server processors have of third-level cache.
const ROW_BYTES: usize = 384 << 20;

fn pool(threads: usize) -> ThreadPool {
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("a pool of threads")
}

fn tiles(criterion: &mut Criterion) {
    let [_, k] = SHAPE;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Types with groups are left out, because a pack file has them packed already.
    let all = WeightType::ALL.into_iter();
    for weight in all.filter(|weight| *weight != WeightType::Q4Tile) {
        // PANIC: K consists of whole tiles.
        let row_bytes =
            (MatrixLayout::new(weight, TILE_DIM, k).expect("a layout")).ggml_row_bytes();
        let n = ROW_BYTES / row_bytes / TILE_DIM * TILE_DIM;
        let layout = MatrixLayout::new(weight, n, k).expect("a layout");
        let panel = layout.panel();
        let rows = vec![0x5a_u8; n * layout.ggml_row_bytes()];
        let mut packed = vec![0; layout.matrix_bytes()];
        let mut group = criterion.benchmark_group(format!("{weight:?}"));
        group.sample_size(20);
        group.throughput(Throughput::Bytes(rows.len() as u64));
        let (from, to) = (TILE_DIM * layout.ggml_row_bytes(), panel.panel_bytes());
        for threads in [1, cores] {
            let pool = pool(threads);
            group.bench_function(BenchmarkId::new("memcpy", threads), |bencher| {
                bencher.iter(|| {
                    pool.install(|| {
                        let parts = packed.par_chunks_exact_mut(to).zip(rows.par_chunks(from));
                        parts.for_each(|(to, from)| to[..from.len()].copy_from_slice(from));
                    });
                });
            });
            group.bench_function(BenchmarkId::new("tiles", threads), |bencher| {
                bencher.iter(|| {
                    pool.install(|| {
                        let parts = packed.par_chunks_exact_mut(to).zip(rows.par_chunks(from));
                        parts.for_each(|(to, from)| {
                            // PANIC: the layout gave these sizes.
                            panel.pack_panel(to, from).expect("a panel");
                        });
                    });
                });
            });
        }
        group.finish();
    }
}

/// Weights of the pack that is loaded.
const WEIGHTS: usize = 4;

fn tensor(dtype: GgmlType) -> Tensor<'static> {
    let ((dtype, format), [n, k]) = (dtype.tensor_type(), SHAPE);
    let row = dtype.row_bytes(k).unwrap_or(0);
    Tensor {
        name: "",
        dtype,
        format,
        shape: Shape {
            ne: [k, n, 1, 1],
            nb: [dtype.step_bytes().unwrap_or(0), row, row * n, row * n],
        },
        place: Place::Packed,
        memory: None,
        packed_offset: 0,
        role: ggml_rust_npu::graph::Role::Weights,
        dequantize: None,
    }
}

/// Writes the pack, and returns the layouts in which its weights are requested.
fn write(path: &Path, names: &[String], dtype: GgmlType, source: &[u8]) -> Form {
    let tensor = tensor(dtype);
    // PANIC: K consists of whole blocks.
    let form = Form::Hexagon(WeightLayout::new(&tensor).expect("a layout"));
    let names = || names.iter().map(String::as_str);
    let mut writer = PackWriter::create(path, "hexagon-v75", "", names()).expect("a new file");
    for name in names() {
        let weight = Weight {
            name,
            dtype,
            ne: tensor.shape.ne,
            data: source,
            feedback: &[],
        };
        form.write(&weight, &mut writer, |_| true)
            .expect("room for the file");
    }
    writer.finish().expect("a place for the file");
    form
}

fn load(criterion: &mut Criterion) {
    let names: Vec<String> = (0..WEIGHTS)
        .map(|index| format!("weight.{index}"))
        .collect();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench.npu");
    for dtype in [GgmlType::Q4_0, GgmlType::Q8_0] {
        let tensor = tensor(dtype);
        let source: Vec<u8> = (0..tensor.shape.nb[3])
            .map(|i| (i * i / 7).to_le_bytes()[0])
            .collect();
        let form = write(&path, &names, dtype, &source);
        let mut group = criterion.benchmark_group(format!("load {}", dtype.name()));
        group.throughput(Throughput::Bytes((WEIGHTS * form.bytes()) as u64));
        let mut memory = vec![0u8; WEIGHTS * form.bytes()];
        group.bench_function("read", |bencher| {
            bencher.iter(|| {
                let mut file = std::fs::File::open(&path).expect("the file");
                file.read_exact(&mut memory).expect("its bytes");
            });
        });
        for (name, full) in [("pack", false), ("pack, all bytes compared", true)] {
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    let (packs, failed) = Packs::open(&path, full);
                    assert!(failed.is_empty(), "{failed:?}");
                    for (name, out) in names.iter().zip(memory.chunks_exact_mut(form.bytes())) {
                        let wanted = Wanted {
                            name,
                            dtype: tensor.dtype,
                            format: tensor.format,
                            ne: tensor.shape.ne,
                            source: &source,
                            layout: form.tag(),
                        };
                        assert!(packs.take(&wanted, out, &mut []), "it is in there");
                    }
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, tiles, load);
criterion_main!(benches);
