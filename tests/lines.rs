//! Proves that a fault of the system that only a user can mend is one line of the log, and that it
//! spoils nothing else.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::{F32_IN_BLOCKS, Numbers, Weight, device_with, mul_mat, packed};
use ggml_rust_npu::reference;
use ggml_rust_npu::rockchip::caps;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use rknpu_ops::sim;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        if record.target().starts_with("ggml_rust_npu") && record.level() <= log::Level::Warn {
            LINES.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// The log of a process is one, so one test at a time has it. It begins empty.
fn log() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // Fails for all tests but the first.
    _ = log::set_logger(&Lines);
    log::set_max_level(log::LevelFilter::Warn);
    LINES.lock().unwrap().clear();
    turn
}

/// The lines since the last look.
fn lines() -> Vec<String> {
    std::mem::take(&mut *LINES.lock().unwrap())
}

fn options(faults: &str) -> sim::Options {
    let mut options = sim::Options::new(caps::RK3588.soc);
    options.faults = sim::parse_faults(faults).unwrap();
    options
}

/// A weight, and a buffer that holds it alone.
fn weight(device: &Arc<RkDevice>) -> (Weight, RkBuffer) {
    let w = Weight::random(&mut Numbers::new(1), F32_IN_BLOCKS, [64, 96, 1, 1]);
    let buffer = packed(device, &w, 0);
    (w, buffer)
}

#[test]
fn a_kernel_whose_address_spaces_are_one_is_named_once() {
    let _log = log();
    let mut options = options("");
    options.one_address_space = true;
    let (device, _rknn) = device_with(options, &caps::RK3588).unwrap();
    let allocate = || RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES);
    let _held = [allocate().unwrap(), allocate().unwrap()];
    assert_eq!(lines(), [""; 0]);
    assert!(allocate().is_err() && allocate().is_err());
    let lines = lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    let begins =
        "RKNPU0: this kernel has one address space for the NPU, which its 2 in use share: ";
    assert!(lines[0].starts_with(begins), "{lines:?}");
}

/// Products in a row take no addresses, so such a driver computes for as long as any; loading
/// models again and again uses them up.
#[test]
fn a_driver_that_loses_addresses_is_used_up_by_loading_alone() {
    let _log = log();
    let mut options = options("");
    options.loses_addresses = true;
    let (device, rknn) = device_with(options, &caps::RK3588).unwrap();
    let (w, buffer) = weight(&device);
    let made = || {
        let functions = [
            "rknn_create_mem",
            "rknn_create_mem_from_fd",
            "rknn_matmul_create",
        ];
        functions.map(|function| rknn.stand_in().unwrap().calls(function))
    };
    let mut numbers = Numbers::new(2);
    let mut first = None;
    for _ in 0..5 {
        for m in 1..=40 {
            let act = numbers.floats(64 * m);
            let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, [64, m, 1, 1]).unwrap();
            let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, 64));
            assert!(error <= 1e-3, "M={m}: {error:.1e}");
        }
        assert_eq!(*first.get_or_insert_with(made), made());
    }
    drop(buffer);
    let load = || RkBuffer::new(Arc::clone(&device), caps::DOMAIN_WEIGHT_BYTES / 4).map(drop);
    assert_eq!((0..4).map(|_| load()).filter(Result::is_ok).count(), 4);
    assert_eq!(lines(), [""; 0]);
    assert!(load().is_err_and(|error| error.is_shortage()));
    assert!(load().is_err());
    let lines = lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].ends_with("the driver has lost them, and gives them back after a reboot"));
}

/// The kernel's driver resets the whole NPU then, and runs of other programs fail, too.
#[test]
fn a_run_that_meets_the_time_out_tells_what_happens_to_other_programs() {
    let _log = log();
    let (device, rknn) = device_with(options(""), &caps::RK3588).unwrap();
    let next = rknn.stand_in().unwrap().calls("rknn_matmul_run") + 1;
    drop((device, rknn));
    let faults = format!("rknn_matmul_run:{next}=-2");
    let (device, _rknn) = device_with(options(&faults), &caps::RK3588).unwrap();
    let (w, buffer) = weight(&device);
    let act = Numbers::new(3).floats(64);
    let error = mul_mat(&device, &w, Some((&buffer, 0)), &act, [64, 1, 1, 1]).unwrap_err();
    assert!(
        error.to_string().contains("rknn_matmul_run returned -2"),
        "{error}"
    );
    let lines = lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in [
        "the NPU did not finish M=",
        ": the kernel's driver resets all cores then, and what other programs run on them fails, too",
    ] {
        assert!(lines[0].contains(part), "{lines:?}");
    }
}
