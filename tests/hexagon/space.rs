//! The DSP's address space: buffers take turns in it, and results stay right.

use std::sync::Arc;

use ggml_rust_npu::backend::hexagon::{HexBuffer, Options, Stream};
use ggml_rust_npu::error::Error;
use ggml_rust_npu::graph::{Op, Place};
use ggml_rust_npu::reference;

use super::common::*;

const KIB: u64 = 1024;

#[test]
fn weights_beyond_the_address_space_take_turns() {
    let options = Options {
        address_bytes: Some(200 * KIB),
        ..OPTIONS
    };
    // The stand-in refuses to map more than that, too.
    let mut sim = strict(73);
    sim.address_bytes = 200 * KIB;
    let device = device_with(sim, options).unwrap();
    let mut numbers = Numbers::new(20);
    // 68 KiB each with the padding of pages.
    let layers: Vec<_> = (0..6)
        .map(|_| Weight::random(&mut numbers, KINDS[3], [256, 240, 1, 1]))
        .collect();
    let homes: Vec<_> = (layers.iter())
        .map(|w| buffer_with(&device, w, Place::Packed))
        .collect();
    let act = numbers.floats(256);
    for _ in 0..2 {
        // One graph over all of them does not fit at once.
        let work: Vec<_> = (layers.iter())
            .map(|w| Work::new(&device, &act, [256, 1, 1, 1], [w.ne[1], 1, 1, 1], &[]).unwrap())
            .collect();
        let mut stream = Stream::new(Arc::clone(&device));
        for ((w, home), work) in layers.iter().zip(&homes).zip(&work) {
            work.push(&mut stream, Op::MulMat, w.tensor(0, Place::Packed), home)
                .unwrap();
        }
        stream.finish(0).unwrap();
        for (w, work) in layers.iter().zip(&work) {
            let want = reference::mul_mat(&act, &w.values, 256);
            let error = reference::nmse(&work.result(), &want);
            assert!(error <= 1e-4, "{error:.2e}");
        }
    }
}

#[test]
fn a_buffer_larger_than_the_address_space_is_refused() {
    let options = Options {
        address_bytes: Some(64 * KIB),
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let error = HexBuffer::new(&device, 65 * 1024, false).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    HexBuffer::new(&device, 64 * 1024, false).unwrap();
}

#[test]
fn a_node_whose_operands_do_not_fit_together_fails_and_the_next_one_works() {
    let options = Options {
        address_bytes: Some(100 * KIB),
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let mut numbers = Numbers::new(21);
    let w = Weight::random(&mut numbers, KINDS[3], [256, 240, 1, 1]);
    let home = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(256 * 20);
    let failed = mul_mat(&device, &w, &home, &act, [256, 20, 1, 1]).unwrap_err();
    assert!(
        matches!(failed.error, Error::OutOfMemory { .. }),
        "{failed:?}"
    );
    assert_eq!(failed.job, Some(0));
    let have = mul_mat(&device, &w, &home, &act[..256], [256, 1, 1, 1]).unwrap();
    let want = reference::mul_mat(&act[..256], &w.values, 256);
    assert!(reference::nmse(&have, &want) <= 1e-4);
}

#[test]
fn two_sessions_work_side_by_side() {
    let rpc = ggml_rust_npu::vendor::fastrpc::FastRpc::simulate(strict(75)).unwrap();
    let caps = ggml_rust_npu::caps::hexagon_by_arch(75).unwrap();
    let start = |session| {
        let name = format!("HEX{session}");
        let options = Options { session, ..OPTIONS };
        ggml_rust_npu::backend::hexagon::Device::start(&name, &rpc, caps, options).unwrap()
    };
    let devices = [start(0), start(1), start(2)];
    std::thread::scope(|scope| {
        for (seed, device) in (30..).zip(&devices) {
            scope.spawn(move || {
                let mut numbers = Numbers::new(seed);
                let w = Weight::random(&mut numbers, KINDS[1], [128, 64, 1, 1]);
                let home = buffer_with(device, &w, Place::Packed);
                for m in [1, 3, 9] {
                    let act = numbers.floats(128 * m);
                    let have = mul_mat(device, &w, &home, &act, [128, m, 1, 1]).unwrap();
                    let want = reference::mul_mat(&act, &w.values, 128);
                    assert!(reference::nmse(&have, &want) <= 1e-4);
                }
            });
        }
    });
}
