//! `rknpu_ops::direct` over the emulated driver `rknpu` and NPU, in strict mode: self-test,
//! results, syncs, failures.
#![expect(unsafe_code, reason = "a descriptor comes as a plain number")]

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::rockchip::caps::{self, Precision};
use ggml_rust_npu::rockchip::device::RkNpu;
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::driver::lock::Nodes;
use ggml_rust_npu::rockchip::{RkDevice, selftest};
use memmap2::{MmapOptions, MmapRaw};
use os::memory::Descriptor;
use rknpu_ops::direct::node::{self, Link, Node};
use rknpu_ops::ffi::{Layout, MatmulType};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim;
use test_kit::Numbers;

use crate::kernel::{Argument, Kernel, Request};
use crate::operands::Operands;

mod dma_buf;
mod question;
mod rocket;

/// Numbers of functions, written independently of kernel/ioctl.rs.
const ACTION: u8 = 0x40;
const SUBMIT: u8 = 0x41;
const MEM_CREATE: u8 = 0x42;
const MEM_SYNC: u8 = 0x45;
const PRIME_HANDLE_TO_FD: u8 = 0x2d;

/// A change of the driver's behaviour.
#[derive(Clone, Copy, Debug)]
enum Change {
    Nothing,
    /// The sync with this number does nothing.
    NoSync(usize),
    /// Jobs fail with this errno.
    Jobs(i32),
    /// An ACTION answers so.
    Action(u32, u32),
    /// No object is exported as a dma-buf, and the system has a heap for them, or has none.
    NoExport {
        has_heap: bool,
    },
    /// All objects of address spaces other than the first have the same address, as if each were in
    /// a separate space.
    Spaces,
}

/// The emulated driver's node.
#[derive(Debug)]
struct Emulated {
    kernel: Arc<Kernel>,
    change: Change,
    calls: Arc<Calls>,
}

/// Calls so far.
#[derive(Debug, Default)]
struct Calls {
    /// Of the driver and of dma-bufs.
    syncs: AtomicUsize,
    /// Buffers of the system's heap.
    heap: AtomicUsize,
    actions: Mutex<Vec<u32>>,
}

impl Node for Emulated {
    fn kernel(&self) -> node::Kernel {
        node::Kernel::Rknpu
    }

    fn reopen(&self) -> io::Result<Box<dyn Node>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn ioctl_linked(&self, number: u32, _: &mut [u8], _: &[Link]) -> io::Result<()> {
        panic!("{number:#x} has no addresses")
    }

    fn ioctl(&self, number: u32, bytes: &mut [u8]) -> io::Result<()> {
        let request = Request::new(number.into());
        assert_eq!(request.bytes, bytes.len(), "{number:#x}");
        let mut argument = Argument([0; 128]);
        argument.0[..bytes.len()].copy_from_slice(bytes);
        let action = u32::from_ne_bytes(argument.0[..4].try_into().unwrap());
        match (request.function, self.change) {
            (MEM_SYNC, change) => {
                let index = self.calls.syncs.fetch_add(1, Ordering::Relaxed);
                if matches!(change, Change::NoSync(skipped) if skipped == index) {
                    return Ok(());
                }
            }
            (PRIME_HANDLE_TO_FD, Change::NoExport { .. }) => {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            (SUBMIT, Change::Jobs(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            (ACTION, change) => {
                self.calls.actions.lock().unwrap().push(action);
                if let Change::Action(asked, answer) = change
                    && asked == action
                {
                    bytes[4..8].copy_from_slice(&answer.to_ne_bytes());
                    return Ok(());
                }
            }
            _ => {}
        }
        let reply = self.kernel.ioctl(request, &mut argument);
        reply.map_err(io::Error::from_raw_os_error)?;
        bytes.copy_from_slice(&argument.0[..bytes.len()]);
        let is_elsewhere = request.function == MEM_CREATE && bytes[40..44] != [0; 4];
        if matches!(self.change, Change::Spaces) && is_elsewhere {
            bytes[24..32].copy_from_slice(&4096u64.to_ne_bytes());
        }
        Ok(())
    }

    fn map(&self, offset: u64, bytes: usize) -> io::Result<MmapRaw> {
        let descriptor = self
            .kernel
            .map(offset)
            .map_err(io::Error::from_raw_os_error)?;
        // SAFETY: the emulated driver created this descriptor for the caller.
        let file = unsafe { File::from_raw_fd(descriptor) };
        MmapOptions::new().len(bytes).map_raw(&file)
    }

    fn heap(&self, bytes: usize) -> io::Result<Descriptor> {
        if matches!(self.change, Change::NoExport { has_heap: true }) {
            self.calls.heap.fetch_add(1, Ordering::Relaxed);
            let number = dma_buf::foreign(&vec![0; bytes])?.into_raw_fd();
            // SAFETY: the descriptor is new, and nothing else owns it.
            return Ok(unsafe { Descriptor::adopt(number) });
        }
        Err(io::ErrorKind::NotFound.into())
    }

    fn sync_buffer(&self, buffer: &Descriptor, flags: u64) -> io::Result<()> {
        let index = self.calls.syncs.fetch_add(1, Ordering::Relaxed);
        if matches!(self.change, Change::NoSync(skipped) if skipped == index) {
            return Ok(());
        }
        let synced = self.kernel.sync_buffer(buffer.number(), flags);
        synced.map_err(io::Error::from_raw_os_error)
    }
}

/// An NPU that only this process uses.
struct Board {
    kernel: Arc<Kernel>,
    calls: Arc<Calls>,
    rknn: Arc<Rknn>,
}

fn board(change: Change) -> Board {
    try_board(change).unwrap()
}

fn try_board(change: Change) -> Result<Board, ggml_rust_npu::error::Error> {
    board_of(Kernel::strict(), change)
}

/// An emulated driver's node, the driver, and the record of the node's calls.
fn node_of(kernel: Kernel, change: Change) -> (Emulated, Arc<Kernel>, Arc<Calls>) {
    let (kernel, calls) = (Arc::new(kernel), Arc::new(Calls::default()));
    let node = Emulated {
        kernel: Arc::clone(&kernel),
        change,
        calls: Arc::clone(&calls),
    };
    (node, kernel, calls)
}

fn board_of(kernel: Kernel, change: Change) -> Result<Board, ggml_rust_npu::error::Error> {
    let (node, kernel, calls) = node_of(kernel, change);
    let rknn = Rknn::direct(Box::new(node), Nodes::Private)?;
    Ok(Board {
        kernel,
        calls,
        rknn,
    })
}

/// Tests with every M and on three cores; returns the driver's version.
fn self_test(rknn: &Arc<Rknn>) -> String {
    let precisions = [Precision::Fp16, Precision::Int8, Precision::Int4];
    let npu = RkNpu::open(Arc::clone(rknn), &caps::RK3588, &precisions, &[]).unwrap();
    assert_eq!(selftest::cores(&npu).unwrap(), None);
    let rules = Rules::parse(".*=int4").unwrap();
    let passed = selftest::run(&npu, &rules).unwrap();
    for precision in precisions {
        for m in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] {
            assert!(passed.buckets(precision).contain(m), "{precision} M={m}");
        }
    }
    npu.versions().1.clone()
}

#[test]
fn the_self_test_passes_with_every_m_and_on_three_cores() {
    assert_eq!(self_test(&board(Change::Nothing).rknn), "0.9.8");
}

#[test]
fn a_device_describes_what_drives_it_and_has_one_address_space() {
    let device = RkDevice::untested(board(Change::Nothing).rknn, &caps::RK3588).unwrap();
    let text = ggml_rust_npu::backend::Device::description(&device);
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        text,
        format!("Rockchip RK3588 NPU, streams-{version}, driver 0.9.8")
    );
    let bytes = caps::DIRECT_WEIGHT_BYTES;
    assert_eq!(device.address_space(), (bytes, bytes));
}

/// Compares results of all arithmetics, in place and with cubes, with those of the stand-in.
fn compare_with_stand_in(rknn: &Arc<Rknn>) {
    let mut numbers = Numbers::new(53);
    let stand_in = Rknn::simulate(sim::Options::new(Soc::Rk3588)).unwrap();
    for (matmul_type, shape) in [
        (MatmulType::I8_I8_I32, [1, 64, 32]),
        (MatmulType::I8_I8_I32, [301, 576, 3200]),
        (MatmulType::F16_F16_F32, [1, 96, 32]),
        (MatmulType::F16_F16_F32, [8, 128, 320]),
        (MatmulType::F16_F16_F32, [301, 576, 96]),
        (MatmulType::F16_F16_F16, [5, 64, 64]),
        (MatmulType::I4_I4_I16, [6, 576, 128]),
        // 4097 tasks, which need two jobs.
        (MatmulType::F16_F16_F32, [1, 32, 4097 * 256]),
        // Several passes over K; that of INT8 is one of the two parts in which native B lies.
        (MatmulType::I8_I8_I32, [5, 8192 + 96, 64]),
        (MatmulType::I4_I4_I16, [3, 4096, 128]),
    ] {
        let mut operands = Operands::random(matmul_type, shape, &mut numbers);
        for ac_layout in [Layout::NATIVE, Layout::NORM] {
            operands.ac_layout = ac_layout;
            let (have, want) = (operands.of_library(rknn), operands.of_library(&stand_in));
            let name = format!(
                "matmul type {}, {shape:?}, layout {}",
                matmul_type.0, ac_layout.0
            );
            assert!(have == want, "{name}");
        }
    }
    // The sum of two passes is rounded once more.
    let operands = Operands::random(MatmulType::F16_F16_F32, [3, 4096 + 64, 64], &mut numbers);
    let floats = |rknn: &Arc<Rknn>| -> Vec<f32> {
        let bytes = operands.of_library(rknn);
        let values = bytes.as_chunks::<4>().0.iter();
        values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let (have, want) = (floats(rknn), floats(&stand_in));
    let want: Vec<f64> = want.into_iter().map(f64::from).collect();
    let error = ggml_rust_npu::reference::nmse(&have, &want);
    assert!(error < 1e-12 && have.len() == 3 * 64, "{error:e}");
}

#[test]
fn results_are_those_of_the_stand_in() {
    compare_with_stand_in(&board(Change::Nothing).rknn);
}

#[test]
fn a_sync_that_is_missing_gives_wrong_results() {
    for (shape, needless) in [
        // Computed in place: five of ten syncs may be missing. A, B and C are synced twice after
        // they are created, but the rest of C's page once. The device does not write streams and
        // tasks.
        ([8, 128, 64], 5),
        // With cubes the device uses neither A nor C directly, but the caller syncs C from it. Nine
        // of fifteen syncs may be missing: two of A, one of B, two of C at its creation and its
        // last one, and those of new streams, tasks and cubes of A.
        ([7, 128, 64], 9),
    ] {
        let operands = Operands::random(MatmulType::F16_F16_F32, shape, &mut Numbers::new(54));
        let right = board(Change::Nothing);
        let want = operands.of_library(&right.rknn);
        let syncs = right.calls.syncs.load(Ordering::Relaxed);
        let harmless = (0..syncs).filter(|&index| {
            operands
                .try_of_library(&board(Change::NoSync(index)).rknn)
                .is_ok_and(|have| have == want)
        });
        assert_eq!(harmless.count(), needless, "{shape:?}, of {syncs}");
    }
}

/// Runs products of changing M, and compares the objects that the driver has after the first four
/// and after the last.
fn run_changing_shapes(rknn: &Arc<Rknn>, calls: usize, objects: impl Fn() -> usize) {
    let mut numbers = Numbers::fixed(55);
    let operands = [512, 500, 9, 1]
        .map(|m| Operands::random(MatmulType::F16_F16_F32, [m, 64, 32], &mut numbers));
    let run = |calls: usize| {
        for call in 0..calls {
            operands[call % operands.len()].of_library(rknn);
        }
    };
    run(operands.len());
    let before = objects();
    run(calls);
    assert_eq!(objects(), before);
}

#[test]
fn calls_of_changing_shapes_leave_nothing_behind() {
    let board = board(Change::Nothing);
    run_changing_shapes(&board.rknn, 200, || board.kernel.objects());
}

#[test]
#[ignore = "takes a minute, and the process for itself: make direct"]
fn ten_thousand_calls_leave_nothing_behind() {
    // Counts descriptors of the whole process, so no other test runs at the same time.
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let (rknpu, rocket) = (board(Change::Nothing), rocket::board());
    run_changing_shapes(&rknpu.rknn, 10_000, || rknpu.kernel.objects());
    run_changing_shapes(&rocket.rknn, 10_000, || rocket.rocket.objects().0);
    drop((rknpu, rocket));
    assert_eq!(descriptors(), before);
}

#[test]
fn a_job_that_fails_is_named_and_the_cores_are_reset() {
    const ACT_RESET: u32 = 6;
    let operands = Operands::random(MatmulType::I8_I8_I32, [1, 64, 32], &mut Numbers::fixed(56));
    for (errno, text) in [
        (libc::ETIMEDOUT, "RKNN_ERR_TIMEOUT"),
        (libc::EINVAL, "RKNN_ERR_FAIL"),
    ] {
        let board = board(Change::Jobs(errno));
        let error = operands
            .try_of_library(&board.rknn)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("rknn_matmul_run") && error.contains(text),
            "{error}"
        );
        assert!(board.calls.actions.lock().unwrap().contains(&ACT_RESET));
    }
}

#[test]
fn drivers_that_cannot_be_used_are_refused_by_name() {
    for (action, answer, text) in [
        (1, 904, "driver 0.9.4, 0.9.6 or newer"),
        (18, 0, "no IOMMU"),
    ] {
        let error = try_board(Change::Action(action, answer))
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains(text) && error.contains("without librknnrt"),
            "{error}"
        );
    }
}
