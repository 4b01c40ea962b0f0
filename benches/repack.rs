//! Repacking of weights, in bytes of the source a second, beside memcpy: tiles for Hexagon on one core and on all, and
//! the whole way of a tensor from a pack file. A weight of Llama-3.2-1B's feed-forward size, out of every cache.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hexagon_ops::layout::{MatrixLayout, TILE_DIM, WeightType};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// N and K of the weight.
const SHAPE: [usize; 2] = [8192, 2048];

fn pool(threads: usize) -> ThreadPool {
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("a pool of threads")
}

fn tiles(criterion: &mut Criterion) {
    let [n, k] = SHAPE;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for weight in WeightType::ALL {
        // PANIC: K is whole tiles.
        let layout = MatrixLayout::new(weight, n, k).expect("a layout");
        let panel = layout.panel();
        let rows = vec![0x5a_u8; n * layout.ggml_row_bytes()];
        let mut packed = vec![0; layout.matrix_bytes()];
        let mut group = criterion.benchmark_group(format!("{weight:?}"));
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
                            // PANIC: sizes are the layout's own.
                            panel.pack_panel(to, from).expect("a panel");
                        });
                    });
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, tiles);
criterion_main!(benches);
