//! A DSP that fails: a clear error within the time-out, right results or none, and everything else goes on.

use std::time::{Duration, Instant};

use ggml_rust_npu::backend::hexagon::Options;
use ggml_rust_npu::device::hexagon::{HexNpu, Serving, Settings};
use ggml_rust_npu::error::{Error, Result};
use ggml_rust_npu::graph::Place;
use ggml_rust_npu::reference;
use ggml_rust_npu::vendor::fastrpc::FastRpc;
use hexagon_ops::sim::parse_faults;

use super::common::*;

const TIMEOUT: Duration = Duration::from_millis(400);

fn start(faults: &str) -> Result<std::sync::Arc<ggml_rust_npu::backend::hexagon::Device>> {
    let mut sim = strict(75);
    sim.faults = parse_faults(faults).unwrap();
    let options = Options {
        timeout: TIMEOUT,
        ..OPTIONS
    };
    device_with(sim, options)
}

/// Multiplies until something fails: the error, and how long the failing call took.
fn until_failure(faults: &str) -> (Error, Duration) {
    let began = Instant::now();
    let device = match start(faults) {
        Ok(device) => device,
        Err(error) => return (error, began.elapsed()),
    };
    let mut numbers = Numbers::new(40);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let began = Instant::now();
    let home = match try_buffer_with(&device, &w, Place::Packed) {
        Ok(home) => home,
        Err(error) => return (error, began.elapsed()),
    };
    for _ in 0..150 {
        let act = numbers.floats(64);
        let began = Instant::now();
        match mul_mat(&device, &w, &home, &act, [64, 1, 1, 1]) {
            Ok(have) => {
                let want = reference::mul_mat(&act, &w.values, 64);
                assert!(
                    reference::nmse(&have, &want) <= 1e-4,
                    "{faults}: wrong numbers"
                );
            }
            Err(failed) => {
                let took = began.elapsed();
                // Out of use from now on, at once.
                let began = Instant::now();
                let again = mul_mat(&device, &w, &home, &act, [64, 1, 1, 1]).unwrap_err();
                let refused = matches!(
                    again.error,
                    Error::DeviceLost { .. } | Error::FastRpc { .. }
                );
                assert!(refused, "{faults}: {again:?}");
                assert!(began.elapsed() < TIMEOUT, "{faults}");
                return (failed.error, took);
            }
        }
    }
    panic!("{faults}: nothing failed");
}

#[test]
fn a_lost_hanging_or_raving_dsp_is_an_error_within_its_time() {
    for nth in [1, 2, 12, 100] {
        for (what, said) in [
            ("hang", "has not answered"),
            ("lost", "the process on"),
            ("corrupt", "the DSP failed"),
            ("badring", "the DSP failed"),
        ] {
            let (error, took) = until_failure(&format!("dsp:{nth}={what}"));
            let text = error.to_string();
            assert!(text.contains(said), "dsp:{nth}={what}: {text}");
            assert!(!took.is_zero(), "dsp:{nth}={what}");
            assert!(took < TIMEOUT * 5, "dsp:{nth}={what} took {took:?}");
        }
    }
}

#[test]
fn a_start_that_fails_names_the_call() {
    for (faults, call) in [
        ("remote_handle64_open:1=0x80000406", "remote_handle64_open"),
        ("remote_session_control:2=20", "remote_session_control"),
        // MAP_FAILED, and null.
        ("rpcmem_alloc:1=-1,rpcmem_alloc2:1=-1", "rpcmem_alloc"),
        ("rpcmem_alloc:1=2,rpcmem_alloc2:1=2", "rpcmem_alloc"),
        ("fastrpc_mmap:1=1", "fastrpc_mmap"),
        (
            "remote_handle64_invoke:1=0x8000040e",
            "remote_handle64_invoke",
        ),
    ] {
        let text = start(faults).unwrap_err().to_string();
        assert!(text.contains(call), "{faults}: {text}");
    }
}

#[test]
fn memory_that_cannot_be_had_later_is_an_error_that_passes() {
    let device = start("rpcmem_alloc:16=-1,rpcmem_alloc2:16=-1").unwrap();
    let mut numbers = Numbers::new(41);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let mut failures = 0;
    for _ in 0..12 {
        let tensor = w.tensor(0, Place::Packed);
        let bytes = device.packed_bytes(&tensor);
        match ggml_rust_npu::backend::hexagon::HexBuffer::new(&device, bytes, false) {
            Ok(_) => {}
            Err(error) => {
                assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
                failures += 1;
            }
        }
    }
    assert_eq!(failures, 1);
    let home = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(64);
    assert!(mul_mat(&device, &w, &home, &act, [64, 1, 1, 1]).is_ok());
}

#[test]
fn one_lost_device_leaves_the_others_alone() {
    let broken = start("dsp:34=hang").unwrap();
    let healthy = device();
    let mut numbers = Numbers::new(42);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let (bad, good) = (
        buffer_with(&broken, &w, Place::Packed),
        buffer_with(&healthy, &w, Place::Packed),
    );
    let act = numbers.floats(64);
    let want = reference::mul_mat(&act, &w.values, 64);
    let mut failed = false;
    for _ in 0..20 {
        failed |= mul_mat(&broken, &w, &bad, &act, [64, 1, 1, 1]).is_err();
        let have = mul_mat(&healthy, &w, &good, &act, [64, 1, 1, 1]).unwrap();
        assert!(reference::nmse(&have, &want) <= 1e-4);
    }
    assert!(failed && broken.npu().is_lost() && !healthy.npu().is_lost());
    // What was written to the lost device can still be read.
    let mut bytes = vec![0; w.bytes.len()];
    bad.read(&w.tensor(0, Place::Packed), 0, &mut bytes);
    assert_eq!(bytes, w.bytes);
}

#[test]
fn a_refused_request_for_stack_is_named_by_the_dsp() {
    let text = start("remote_session_control:1=20")
        .unwrap_err()
        .to_string();
    assert!(text.contains("too small a stack"), "{text}");
}

#[test]
fn the_ring_and_all_buffers_are_unmapped_before_the_process_ends() {
    let rpc = FastRpc::simulate(strict(75)).unwrap();
    let caps = ggml_rust_npu::caps::hexagon_by_arch(75).unwrap();
    let settings = Settings {
        session: 0,
        timeout: TIMEOUT,
        address_bytes: caps.address_bytes,
        serving: Serving::Thread,
    };
    let npu = HexNpu::open(&"HEX0".into(), &rpc, caps, settings).unwrap();
    let buffer = npu.allocate(1000).unwrap();
    // The buffer is the last owner of the session.
    drop(npu);
    drop(buffer);
    let machine = rpc.stand_in().unwrap();
    let calls = ["fastrpc_mmap", "fastrpc_munmap"].map(|symbol| machine.calls(symbol));
    assert_eq!(calls, [2, 2]);
    assert_eq!(machine.refusals("fastrpc_munmap"), 0);
    assert_eq!(machine.live(), hexagon_ops::sim::Live::default());
}
