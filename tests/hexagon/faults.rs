//! Failures of the DSP: each gives a clear error within the time-out, right results or none, and
//! everything else works.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ggml_rust_npu::backend::{Buffer, Device, Stream};
use ggml_rust_npu::error::{Error, Result};
use ggml_rust_npu::graph::{Op, Place};
use ggml_rust_npu::hexagon::caps;
use ggml_rust_npu::hexagon::device::{Domain, Floats, HexNpu, Serving, SessionOptions};
use ggml_rust_npu::hexagon::driver::FastRpc;
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::reference;
use hexagon_ops::sim::{MatrixUnit, parse_faults};

use super::common::*;

const TIMEOUT: Duration = Duration::from_secs(2);
/// Longer than a call that waits for [`TIMEOUT`] once, even on a busy machine.
const LONG: Duration = Duration::from_secs(30);

fn start(faults: &str) -> Result<std::sync::Arc<ggml_rust_npu::hexagon::HexDevice>> {
    let mut sim = strict(75);
    sim.faults = parse_faults(faults).unwrap();
    let options = Options {
        timeout: TIMEOUT,
        ..OPTIONS
    };
    device_with(sim, options)
}

/// Returns the submissions and the allocations of a device until it has started.
fn of_start() -> (u64, u64) {
    let device = device_with(strict(75), OPTIONS).unwrap();
    let machine = device.npu().rpc().stand_in().unwrap();
    let allocations = machine.calls("rpcmem_alloc") + machine.calls("rpcmem_alloc2");
    (machine.submissions(), allocations)
}

/// Multiplies until a call fails. Returns the error, and the duration of the failing call.
fn until_failure(faults: &str) -> (Error, Duration) {
    let began = Instant::now();
    let device = match start(faults) {
        Ok(device) => device,
        Err(error) => return (error, began.elapsed()),
    };
    let mut numbers = Numbers::new(40);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let began = Instant::now();
    let buffer = match try_buffer_with(&device, &w, Place::Packed) {
        Ok(buffer) => buffer,
        Err(error) => return (error, began.elapsed()),
    };
    for _ in 0..150 {
        let act = numbers.floats(64);
        let began = Instant::now();
        match mul_mat(&device, &w, &buffer, &act, [64, 1, 1, 1]) {
            Ok(have) => {
                let want = reference::mul_mat(&act, &w.values, 64);
                assert!(
                    reference::nmse(&have, &want) <= 1e-4,
                    "{faults}: wrong numbers"
                );
            }
            Err(failed) => {
                let took = began.elapsed();
                // The device must be out of use at once, without a wait.
                let began = Instant::now();
                let again = mul_mat(&device, &w, &buffer, &act, [64, 1, 1, 1]).unwrap_err();
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
            assert!(took < LONG, "dsp:{nth}={what} took {took:?}");
        }
    }
}

#[test]
fn a_start_that_fails_names_the_call() {
    for (faults, call) in [
        ("remote_handle64_open:1=0x80000406", "remote_handle64_open"),
        ("remote_session_control:2=20", "remote_session_control"),
        // The allocator's failures: MAP_FAILED, and null.
        ("rpcmem_alloc:1+=-1,rpcmem_alloc2:1+=-1", "rpcmem_alloc"),
        ("rpcmem_alloc:1+=2,rpcmem_alloc2:1+=2", "rpcmem_alloc"),
        ("fastrpc_mmap:1=1", "fastrpc_mmap"),
        (
            "remote_handle64_invoke:1=0x8000040e",
            "remote_handle64_invoke",
        ),
    ] {
        let text = start(faults).unwrap_err().to_string();
        assert!(text.contains(call), "{faults}: {text}");
        assert!(!text.contains("its firmware"), "{faults}: {text}");
    }
}

/// A user cannot change such firmware, so the error names it as the cause.
#[test]
fn firmware_that_runs_signed_modules_only_is_named() {
    let mut sim = strict(75);
    sim.unsigned_modules = false;
    let text = device_with(sim, OPTIONS).unwrap_err().to_string();
    for part in [
        "remote_handle64_open",
        "AEE_EUNSUPPORTED",
        "its firmware says that it runs signed modules only",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn memory_that_cannot_be_had_later_is_an_error_that_passes() {
    let nth = of_start().1 + 2;
    let device = start(&format!("rpcmem_alloc:{nth}=-1,rpcmem_alloc2:{nth}=-1")).unwrap();
    let mut numbers = Numbers::new(41);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let mut failures = 0;
    for _ in 0..12 {
        let tensor = w.tensor(0, Place::Packed);
        let bytes = device.packed_bytes(&tensor);
        match HexBuffer::new(&device, bytes, false) {
            Ok(_) => {}
            Err(error) => {
                assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
                failures += 1;
            }
        }
    }
    assert_eq!(failures, 1);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(64);
    assert!(mul_mat(&device, &w, &buffer, &act, [64, 1, 1, 1]).is_ok());
}

/// Libraries that initialize their allocator themselves would forget their allocations.
#[test]
fn an_allocator_is_made_ready_once_and_only_before_its_first_allocation() {
    let calls_of = |needs_rpcmem_init: bool, faults: &str| {
        let mut sim = strict(75);
        sim.needs_rpcmem_init = needs_rpcmem_init;
        sim.faults = parse_faults(faults).unwrap();
        let device = device_with(sim, OPTIONS).unwrap();
        let failures = (0..40)
            .filter(|_| HexBuffer::new(&device, 4096, false).is_err())
            .count();
        let machine = device.npu().rpc().stand_in().unwrap();
        (machine.calls("rpcmem_init"), failures)
    };
    assert_eq!(calls_of(false, ""), (0, 0));
    assert_eq!(calls_of(true, ""), (1, 0));
    let later = format!("rpcmem_alloc2:{}=2", of_start().1 + 2);
    assert_eq!(calls_of(false, &later), (0, 1));
    // A call that fails for another reason is repeated once.
    assert_eq!(calls_of(false, "rpcmem_alloc2:1=2"), (1, 0));
}

#[test]
fn one_lost_device_leaves_the_others_alone() {
    let broken = start(&format!("dsp:{}=hang", of_start().0 + 5)).unwrap();
    let mut numbers = Numbers::new(42);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    // The parts of a model on four NPUs, one after another; the third one is lost.
    let devices = [device(), device(), Arc::clone(&broken), device()];
    let parts = devices.map(|device| (buffer_with(&device, &w, Place::Packed), device));
    let bad = &parts[2].0;
    let act = numbers.floats(64);
    let want = reference::mul_mat(&act, &w.values, 64);
    let mut errors = Vec::new();
    for _ in 0..20 {
        for (buffer, device) in &parts {
            match mul_mat(device, &w, buffer, &act, [64, 1, 1, 1]) {
                Ok(have) => assert!(reference::nmse(&have, &want) <= 1e-4),
                Err(error) => errors.push((device.npu().is_lost(), error.error.to_string())),
            }
        }
    }
    let lost = parts.each_ref().map(|(_, device)| device.npu().is_lost());
    assert_eq!(lost, [false, false, true, false]);
    // The first error names the cause, and the later ones are of the same device.
    assert!(errors[0].1.contains("has not answered"), "{errors:?}");
    assert!(
        errors[1..]
            .iter()
            .all(|(is_lost, text)| *is_lost && text.contains("out of use"))
    );
    // Bytes that were written to the lost device can still be read back.
    let mut bytes = vec![0; w.bytes.len()];
    bad.read(&w.tensor(0, Place::Packed), 0, &mut bytes)
        .unwrap();
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
    let caps = ggml_rust_npu::hexagon::caps::by_arch(75).unwrap();
    let settings = SessionOptions {
        dsp: Domain::Cdsp,
        session: 0,
        timeout: TIMEOUT,
        address_bytes: caps.address_bytes,
        threads: None,
        power: hexagon_ops::wire::Power::Burst,
        serving: Serving::Thread,
        floats: Floats::Usual,
        matrix: true,
    };
    let npu = HexNpu::open(&"HEX0".into(), &rpc, caps, settings).unwrap();
    let buffer = npu.allocate(1000).unwrap();
    // The buffer is now the last owner of the session.
    drop(npu);
    drop(buffer);
    let machine = rpc.stand_in().unwrap();
    let calls = ["fastrpc_mmap", "fastrpc_munmap"].map(|symbol| machine.calls(symbol));
    assert_eq!(calls, [2, 2]);
    assert_eq!(machine.refusals("fastrpc_munmap"), 0);
    // Waiting for the serving thread must end.
    let deadline = Instant::now() + Duration::from_secs(60);
    while machine.live() != hexagon_ops::sim::Live::default() {
        assert!(Instant::now() < deadline, "{:?}", machine.live());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A signal ends the wait for a call on the host, and the call continues on the DSP.
#[test]
fn no_signal_reaches_the_thread_that_serves() {
    let _device = device();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut servers = 0;
    for task in tasks.map(|task| task.unwrap().path()) {
        // A thread of another test may have ended.
        let Ok(name) = std::fs::read_to_string(task.join("comm")) else {
            continue;
        };
        let Ok(status) = std::fs::read_to_string(task.join("status")) else {
            continue;
        };
        let line = status.lines().find(|line| line.starts_with("SigBlk:"));
        let blocked = line.unwrap().split_whitespace().nth(1).unwrap();
        let blocked = u64::from_str_radix(blocked, 16).unwrap();
        if name.trim() == "HEX0-serve" {
            servers += 1;
            // KILL and STOP cannot be blocked, and the C library uses 32 and 33 itself.
            let exempt = [9, 19, 32, 33].map(|signal| 1 << (signal - 1));
            let exempt: u64 = exempt.iter().sum();
            assert_eq!(blocked | exempt, u64::MAX, "{blocked:#x}");
        }
    }
    assert!(servers > 0);
}

#[test]
fn an_interrupted_serving_call_is_made_again() {
    let device = start("remote_handle64_invoke:2=0x200,remote_handle64_invoke:3=4").unwrap();
    let mut numbers = Numbers::new(43);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(64);
    assert!(mul_mat(&device, &w, &buffer, &act, [64, 1, 1, 1]).is_ok());
}

/// Each keeps one of the DSP's 255 contexts, which all programs share, until the session is closed.
#[test]
fn a_session_ends_after_sixteen_interrupted_calls() {
    let mut sim = strict(75);
    sim.faults = parse_faults("remote_handle64_invoke:2+=0x200").unwrap();
    let rpc = FastRpc::simulate(sim).unwrap();
    let chip = caps::by_arch(75).unwrap();
    let error = HexDevice::start("HEX0", &rpc, chip, OPTIONS).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("AEE_ERPC"), "{text}");
    // The first one opens the session. A second session is tried without the matrix unit, if any.
    let calls = rpc.stand_in().unwrap().calls("remote_handle64_invoke");
    assert_eq!(calls, 1 + 16);
}

/// Regression: the host noticed only after a tenth of a second that the DSP had parked, so the
/// first token after a pause waited for that.
#[test]
fn a_parked_dsp_is_called_at_once() {
    let device = device();
    let mut numbers = Numbers::new(44);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(64);
    // On a busy machine most calls may take longer than that.
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut quickest = Duration::MAX;
    while quickest >= Duration::from_millis(40) {
        assert!(Instant::now() < deadline, "{quickest:?}");
        // The DSP parks after 15 ms without work.
        std::thread::sleep(Duration::from_millis(60));
        let began = Instant::now();
        mul_mat(&device, &w, &buffer, &act, [64, 1, 1, 1]).unwrap();
        quickest = quickest.min(began.elapsed());
    }
}

/// A remembered graph is one command of the ring. Regression: its time-out was counted from its
/// first command.
#[test]
fn a_remembered_graph_may_take_longer_than_the_time_out() {
    let mut sim = strict(75);
    sim.command_time = Duration::from_millis(100);
    let options = Options {
        timeout: 10 * sim.command_time,
        ..OPTIONS
    };
    let device = device_with(sim, options).unwrap();
    let mut numbers = Numbers::new(44);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(64);
    let work: Vec<_> = (0..16)
        .map(|_| Work::new(&device, &act, [64, 1, 1, 1], [32, 1, 1, 1], &[]).unwrap())
        .collect();
    let stream = HexStream::new(Arc::clone(&device));
    let weights = w.tensor(0, Place::Packed);
    let nodes = work
        .iter()
        .map(|work| work.node(Op::MulMat, weights, &buffer));
    stream.submit(7, &mut nodes.collect::<Vec<_>>()).unwrap();
    for _ in 0..2 {
        let began = Instant::now();
        stream.replay(7).unwrap().unwrap();
        assert!(began.elapsed() > options.timeout);
    }
}

#[test]
fn refused_votes_are_told_and_do_not_refuse_the_device() {
    let mut sim = strict(73);
    sim.votes = [0, 0, 0, 0x8000_0414_u32.cast_signed()];
    let votes = sim.votes;
    let device = device_with(sim, OPTIONS).unwrap();
    assert_eq!(device.npu().info().votes, votes);
}

#[test]
fn vtcm_that_another_program_holds_is_waited_for() {
    let options = Options {
        timeout: TIMEOUT,
        ..OPTIONS
    };
    for serving in [Serving::Thread, Serving::Caller] {
        let options = Options { serving, ..options };
        let mut sim = strict(75);
        sim.vtcm_taken = 4;
        assert!(device_with(sim, options).is_ok(), "{serving:?}");
        let mut sim = strict(75);
        sim.vtcm_taken = u64::MAX;
        let text = device_with(sim, options).unwrap_err().to_string();
        assert!(text.contains("held VTCM"), "{serving:?}: {text}");
    }
    // The DSP gets VTCM, and then hangs.
    let mut sim = strict(75);
    sim.vtcm_taken = 1;
    sim.faults = parse_faults("dsp:1=hang").unwrap();
    let text = device_with(sim, options).unwrap_err().to_string();
    assert!(text.contains("has not answered"), "{text}");
}

/// Each session waits for VTCM, which the other one has, and gets it after the other one's
/// submission.
#[test]
fn two_sessions_that_generate_take_turns() {
    const TURNS: usize = 30;
    let mut sim = strict(75);
    sim.shared_vtcm = true;
    let rpc = FastRpc::simulate(sim).unwrap();
    let caps = ggml_rust_npu::hexagon::caps::by_arch(75).unwrap();
    let devices = [("HEX0", 0), ("HEX1", 1)].map(|(name, session)| {
        let options = Options { session, ..OPTIONS };
        HexDevice::start(name, &rpc, caps, options).unwrap()
    });
    let mut numbers = Numbers::new(45);
    let w = Weight::random(&mut numbers, KINDS[1], [64, 32, 1, 1]);
    let act = numbers.floats(64);
    let want = devices.each_ref().map(|device| {
        let buffer = buffer_with(device, &w, Place::Packed);
        mul_mat(device, &w, &buffer, &act, [64, 1, 1, 1]).unwrap()
    });
    assert_eq!(want[0], want[1]);
    let (finished, w, act) = (AtomicUsize::new(0), &w, &act[..]);
    std::thread::scope(|scope| {
        for (device, want) in devices.iter().zip(&want) {
            let finished = &finished;
            scope.spawn(move || {
                let buffer = buffer_with(device, w, Place::Packed);
                let mut turns = 0;
                // One thread keeps the device busy until both others have finished.
                while finished.load(Ordering::Relaxed) < 2 {
                    let have = mul_mat(device, w, &buffer, act, [64, 1, 1, 1]);
                    let is_right = have.as_ref().is_ok_and(|have| have == want);
                    turns += 1;
                    if turns == TURNS || !is_right {
                        finished.fetch_add(1, Ordering::Relaxed);
                    }
                    assert!(is_right, "turn {turns}: {have:?}");
                }
            });
        }
    });
}

#[test]
fn v73_without_ieee_floats_gets_the_library_in_qfloat() {
    for (arch, works) in [(73, true), (75, false)] {
        let mut sim = strict(arch);
        sim.ieee_float = false;
        let device = device_with(sim, OPTIONS);
        assert_eq!(device.is_ok(), works, "v{arch}: {:?}", device.err());
    }
    let device = device_with(strict(73), OPTIONS).unwrap();
    let rpc = device.npu().rpc();
    let opened = rpc.stand_in().unwrap().calls("remote_handle64_open");
    assert_eq!(opened, 1);
}

/// Multiplies some rows and compares.
fn check_products(device: &Arc<HexDevice>, what: &str) {
    let mut numbers = Numbers::new(7);
    for kind in KINDS {
        let w = Weight::random(&mut numbers, kind, [256, 70, 1, 1]);
        let buffer = buffer_with(device, &w, Place::Packed);
        for rows in [1, 3, 40] {
            let act = numbers.floats(256 * rows);
            let have = mul_mat(device, &w, &buffer, &act, [256, rows, 1, 1]).unwrap();
            let want = reference::mul_mat(&act, &w.values, 256);
            let error = reference::nmse(&have, &want);
            assert!(error <= 1e-4, "{what}: {rows} rows: {error:e}");
        }
    }
}

#[test]
fn a_matrix_unit_that_is_missing_or_wrong_is_left_alone() {
    for (arch, matrix, left) in [
        (68, MatrixUnit::Works, true),
        (68, MatrixUnit::Refused, false),
        (68, MatrixUnit::Wrong, false),
        (69, MatrixUnit::Works, true),
        (75, MatrixUnit::Refused, false),
    ] {
        let what = format!("{matrix:?} on V{arch}");
        let mut sim = strict(arch);
        sim.matrix = matrix;
        let device = device_with(sim, OPTIONS).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(device.npu().info().matrix, u32::from(left), "{what}");
        let is_told = device.description().contains("without a matrix unit");
        assert_eq!(is_told, !left, "{what}: {}", device.description());
        check_products(&device, &what);
    }
    // A later chip certainly has the unit. If the unit's results are wrong, other results cannot be
    // trusted either.
    let mut sim = strict(75);
    sim.matrix = MatrixUnit::Wrong;
    let error = device_with(sim, OPTIONS).unwrap_err();
    assert!(matches!(error, Error::SelfTest { .. }), "{error}");
}

#[test]
fn chips_with_little_vtcm_compute_or_say_what_they_need() {
    for kib in [1024, 2048, 4096] {
        for matrix in [MatrixUnit::Works, MatrixUnit::Refused] {
            let mut sim = strict(68);
            (sim.matrix, sim.vtcm_bytes) = (matrix, kib << 10);
            let what = format!("{kib} KiB, {matrix:?}");
            let device = device_with(sim, OPTIONS).unwrap_or_else(|e| panic!("{what}: {e}"));
            check_products(&device, &what);
        }
    }
    let mut sim = strict(68);
    sim.vtcm_bytes = 256 << 10;
    let text = device_with(sim, OPTIONS).unwrap_err().to_string();
    assert!(text.contains("KiB of VTCM are needed"), "{text}");
}
