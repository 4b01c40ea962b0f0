//! Proves that several processes can compute on one Rockchip NPU: devices with stand-ins that share
//! a node, which keep the rules that processes have.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use common::{F32_IN_BLOCKS, Numbers, Weight, device_with, mul_mat, packed};
use ggml_rust_npu::error::Error;
use ggml_rust_npu::rockchip::caps;
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim::{self, LiveObjects};

/// Rows and columns of activations.
const M: usize = 4;
const K: usize = 64;

/// A folder with a file in place of a node.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn options(folder: &tempfile::TempDir) -> sim::Options {
    let mut options = sim::Options::new(Soc::Rk3588);
    options.node = Some(folder.path().join("node"));
    options
}

/// A process that waits for `patience` at most.
fn process(options: sim::Options, patience: Duration) -> (Arc<RkDevice>, Arc<Rknn>) {
    let rknn = Rknn::simulate_with(options, patience).unwrap();
    let device = RkDevice::start(Arc::clone(&rknn), &caps::RK3588).unwrap();
    (Arc::new(device), rknn)
}

fn live(rknn: &Rknn) -> LiveObjects {
    rknn.stand_in().unwrap().live()
}

#[test]
fn two_processes_compute_at_once_what_each_computes_alone() {
    let folder = folder();
    let mut numbers = Numbers::new(51);
    let models: [Weight; 2] =
        [96, 160].map(|n| Weight::random(&mut numbers, F32_IN_BLOCKS, [K, n, 1, 1]));
    let act = numbers.floats(K * M);
    let (alone, _) = device_with(sim::Options::new(Soc::Rk3588), &caps::RK3588).unwrap();
    let want = models
        .each_ref()
        .map(|w| mul_mat(&alone, w, None, &act, [K, M, 1, 1]).unwrap());
    let together = Barrier::new(2);
    std::thread::scope(|scope| {
        for (w, want) in models.iter().zip(&want) {
            let (folder, act, together) = (&folder, &act, &together);
            scope.spawn(move || {
                let (device, rknn) = process(options(folder), Duration::from_secs(60));
                together.wait();
                for _ in 0..10 {
                    // Loads the model, computes and frees it, while the other one does the same.
                    let buffer = packed(&device, w, 0);
                    for _ in 0..5 {
                        let have =
                            mul_mat(&device, w, Some((&buffer, 0)), act, [K, M, 1, 1]).unwrap();
                        assert_eq!(&have, want);
                    }
                }
                device.npu().release_idle();
                assert_eq!(rknn.stand_in().unwrap().locked_up(), None);
                assert_eq!(
                    (live(&rknn), rknn.is_seated()),
                    (LiveObjects::default(), false)
                );
            });
        }
    });
}

/// Threads of one process also wait for each other's turns, so that two of them cannot keep another
/// process out.
#[test]
fn two_threads_of_a_process_leave_turns_to_another_process() {
    let folder = folder();
    let mut numbers = Numbers::new(52);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [K, 96, 1, 1]);
    let act = numbers.floats(K * M);
    let (device, _rknn) = process(options(&folder), Duration::from_secs(60));
    let buffer = packed(&device, &w, 0);
    let other = Rknn::simulate_with(options(&folder), Duration::from_secs(60)).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let computed = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    mul_mat(&device, &w, Some((&buffer, 0)), &act, [K, M, 1, 1]).unwrap();
                    computed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
        while computed.load(std::sync::atomic::Ordering::Relaxed) < 4 {
            std::thread::yield_now();
        }
        let got = (0..20).all(|_| other.turn().is_ok());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(got);
    });
}

#[test]
fn a_product_whose_turn_does_not_come_fails_alone() {
    let folder = folder();
    let mut numbers = Numbers::new(53);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [K, 96, 1, 1]);
    let act = numbers.floats(K * M);
    let (device, rknn) = process(options(&folder), Duration::from_millis(50));
    let buffer = packed(&device, &w, 0);
    let multiply = || mul_mat(&device, &w, Some((&buffer, 0)), &act, [K, M, 1, 1]);
    let want = multiply().unwrap();
    let other = Rknn::simulate(options(&folder)).unwrap();
    let turn = other.turn().unwrap();
    for _ in 0..2 {
        let error = multiply().unwrap_err();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        assert!(error.to_string().contains("node"), "{error}");
    }
    let error = RkBuffer::new(Arc::clone(&device), 4096).unwrap_err();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    assert!(!device.npu().is_lost());
    drop(turn);
    assert_eq!(multiply().unwrap(), want);
    assert_eq!(rknn.stand_in().unwrap().locked_up(), None);
}

/// Dropping memory cannot report an error, and does not wait for each of a hundred weights.
#[test]
fn memory_that_is_freed_while_another_process_has_the_turn_goes_with_the_next_turn() {
    let folder = folder();
    let patience = Duration::from_millis(300);
    let (device, rknn) = process(options(&folder), patience);
    device.npu().release_idle();
    assert_eq!(live(&rknn), LiveObjects::default());
    let w = Weight::random(&mut Numbers::new(54), F32_IN_BLOCKS, [K, 96, 1, 1]);
    let buffers = [0; 20].map(|_| packed(&device, &w, 0));
    let before = live(&rknn);
    let other = Rknn::simulate(options(&folder)).unwrap();
    let turn = other.turn().unwrap();
    let begun = std::time::Instant::now();
    drop(buffers);
    assert!(begun.elapsed() < 10 * patience, "{:?}", begun.elapsed());
    assert_eq!(live(&rknn), before);
    drop(turn);
    device.npu().release_idle();
    assert_eq!(
        (live(&rknn), rknn.is_seated()),
        (LiveObjects::default(), false)
    );
    assert_eq!(rknn.stand_in().unwrap().locked_up(), None);
}

/// Regression: a lack of memory caused by another process was mistaken for a kernel with one
/// address space, permanently.
#[test]
fn weights_that_do_not_fit_beside_those_of_another_process_fit_after_it() {
    const PART: usize = caps::DOMAIN_WEIGHT_BYTES;
    let folder = folder();
    let mut shared = options(&folder);
    shared.one_address_space = true;
    let patience = Duration::from_secs(60);
    let (one, _first) = process(shared.clone(), patience);
    let (other, rknn) = process(shared, patience);
    other.npu().release_idle();
    let (_, room) = other.address_space();
    let held = [0; 2].map(|_| RkBuffer::new(Arc::clone(&one), PART).unwrap());
    let error = RkBuffer::new(Arc::clone(&other), PART).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(other.address_space(), (room, room));
    assert_eq!(
        (live(&rknn), rknn.is_seated()),
        (LiveObjects::default(), false)
    );
    drop(held);
    let [_first, _second] = [0; 2].map(|_| RkBuffer::new(Arc::clone(&other), PART).unwrap());
    // Alone again, the process can tell that the kernel is such a one.
    one.npu().release_idle();
    RkBuffer::new(Arc::clone(&other), PART).unwrap_err();
    assert_eq!(other.address_space().1, 2 * caps::DOMAIN_WEIGHT_BYTES);
}

#[test]
fn a_process_that_has_nothing_open_has_no_seat() {
    let folder = folder();
    let (one, first) = process(options(&folder), Duration::from_secs(60));
    let (other, second) = process(options(&folder), Duration::from_secs(60));
    assert!(first.has_company() && second.has_company());
    other.npu().release_idle();
    assert!(!first.has_company() && !second.is_seated());
    let buffer = RkBuffer::new(Arc::clone(&other), 4096).unwrap();
    assert!(first.has_company() && second.has_company());
    drop(buffer);
    assert!(!first.has_company());
    assert!(Path::new(&folder.path().join("node")).exists());
    drop(one);
}
