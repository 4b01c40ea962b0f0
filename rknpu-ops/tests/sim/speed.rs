//! Measures the stand-in's speed on this machine; run with `--release --ignored --nocapture`.

use std::time::Instant;

use rknpu_ops::ffi::MatmulType;
use rknpu_ops::layout::Soc;

use crate::common::{Npu, info};

#[test]
#[ignore = "a measurement"]
fn speed() {
    let npu = Npu::new(Soc::Rk3588);
    for (name, matmul_type) in [
        ("i8", MatmulType::I8_I8_I32),
        ("f16", MatmulType::F16_F16_F32),
        ("i4", MatmulType::I4_I4_I16),
    ] {
        for [m, k, n] in [
            [1, 576, 1536],
            [1, 4096, 4096],
            [2, 576, 1536],
            [4, 576, 1536],
            [8, 576, 1536],
            [32, 576, 1536],
            [512, 576, 1536],
        ] {
            let (ctx, attr) = npu.create(info(matmul_type, [m, k, n])).unwrap();
            let mems = [attr.a, attr.b, attr.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
            for (mem, attr) in mems.iter().zip([attr.a, attr.b, attr.c]) {
                mem.write(&vec![0x11; usize::try_from(attr.size).unwrap()]);
                assert_eq!(npu.set(ctx, *mem, attr), 0);
            }
            npu.clean(ctx, mems[2]);
            assert_eq!(npu.run(ctx), 0);
            // Uses the fastest run, which other programs on the machine disturb least.
            let (start, mut seconds) = (Instant::now(), f64::INFINITY);
            while start.elapsed().as_secs_f64() < 0.3 {
                let run = Instant::now();
                assert_eq!(npu.run(ctx), 0);
                seconds = seconds.min(run.elapsed().as_secs_f64());
            }
            println!(
                "{name:4} {m:4} x {k} x {n}: {:9.1} us {:7.1} GMAC/s {:6.1} GB/s of weights",
                seconds * 1e6,
                (m * k * n) as f64 / seconds * 1e-9,
                f64::from(attr.b.size) / seconds * 1e-9,
            );
            for mem in mems {
                assert_eq!(npu.destroy_mem(ctx, mem), 0);
            }
            assert_eq!(npu.destroy(ctx), 0);
        }
    }
}
