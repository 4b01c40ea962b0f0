//! Tests of the same device over Linux's driver `rocket`.

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ggml_rust_npu::backend::Device;
use ggml_rust_npu::rockchip::RkDevice;
use ggml_rust_npu::rockchip::caps;
use ggml_rust_npu::rockchip::driver::lock::Nodes;
use ggml_rust_npu::rockchip::driver::{Context, Memory, Rknn, RunOperands};
use memmap2::{MmapOptions, MmapRaw};
use rknpu_ops::direct::node::{Kernel, Link, Node};
use rknpu_ops::ffi::{MatmulInfo, MatmulType};
use test_kit::Numbers;

use super::{compare_with_stand_in, run_changing_shapes, self_test};
use crate::device::Computes;
use crate::kernel::{Argument, Mishap, Request, Rocket};
use crate::operands::Operands;

/// Numbers of functions, written independently of kernel/rocket.rs.
const PREP_BO: u8 = 0x42;
const FINI_BO: u8 = 0x43;

/// An open file of the emulated driver.
#[derive(Debug)]
struct Accel {
    rocket: Arc<Rocket>,
    file: u32,
    /// The number of the sync that does nothing.
    skipped: Option<usize>,
    syncs: Arc<AtomicUsize>,
}

impl Accel {
    fn open(rocket: &Arc<Rocket>, skipped: Option<usize>, syncs: &Arc<AtomicUsize>) -> Self {
        Self {
            rocket: Arc::clone(rocket),
            file: rocket.open(),
            skipped,
            syncs: Arc::clone(syncs),
        }
    }

    fn call(&self, number: u32, bytes: &mut [u8]) -> io::Result<()> {
        let request = Request::new(number.into());
        if [PREP_BO, FINI_BO].contains(&request.function) {
            let index = self.syncs.fetch_add(1, Ordering::Relaxed);
            if self.skipped == Some(index) {
                return Ok(());
            }
        }
        let mut argument = Argument([0; 128]);
        argument.0[..request.bytes].copy_from_slice(&bytes[..request.bytes]);
        // SAFETY: by the contract of `Node`, the structs have no addresses, or only addresses of
        // `bytes`.
        let reply = unsafe { self.rocket.ioctl(self.file, request, &mut argument) };
        reply.map_err(io::Error::from_raw_os_error)?;
        bytes[..request.bytes].copy_from_slice(&argument.0[..request.bytes]);
        Ok(())
    }
}

impl Drop for Accel {
    fn drop(&mut self) {
        self.rocket.close(self.file);
    }
}

impl Node for Accel {
    fn kernel(&self) -> Kernel {
        Kernel::Rocket
    }

    fn reopen(&self) -> io::Result<Box<dyn Node>> {
        let opened = Self::open(&self.rocket, self.skipped, &self.syncs);
        Ok(Box::new(opened))
    }

    fn ioctl(&self, number: u32, bytes: &mut [u8]) -> io::Result<()> {
        assert_eq!(
            Request::new(number.into()).bytes,
            bytes.len(),
            "{number:#x}"
        );
        self.call(number, bytes)
    }

    fn ioctl_linked(&self, number: u32, bytes: &mut [u8], links: &[Link]) -> io::Result<()> {
        links.iter().for_each(|link| link.write(bytes));
        self.call(number, bytes)
    }

    fn map(&self, offset: u64, bytes: usize) -> io::Result<MmapRaw> {
        let descriptor = self.rocket.map(self.file, offset);
        let descriptor = descriptor.map_err(io::Error::from_raw_os_error)?;
        // SAFETY: the emulated driver created this descriptor for the caller.
        let file = unsafe { File::from_raw_fd(descriptor) };
        MmapOptions::new().len(bytes).map_raw(&file)
    }
}

/// An NPU that only this process uses.
pub struct Board {
    pub rocket: Arc<Rocket>,
    syncs: Arc<AtomicUsize>,
    pub rknn: Arc<Rknn>,
}

pub fn board_of(rocket: Rocket, skipped: Option<usize>) -> Board {
    let (rocket, syncs) = (Arc::new(rocket), Arc::default());
    let node = Accel::open(&rocket, skipped, &syncs);
    let rknn = Rknn::direct(Box::new(node), Nodes::Private).unwrap();
    Board {
        rocket,
        syncs,
        rknn,
    }
}

/// Another open file of a driver.
pub fn node_of(rocket: &Arc<Rocket>) -> impl Node + use<> {
    Accel::open(rocket, None, &Arc::default())
}

pub fn board() -> Board {
    board_of(Rocket::new(Computes::Proven), None)
}

#[test]
fn the_self_test_passes_with_every_m_and_on_three_cores() {
    assert_eq!(self_test(&board().rknn), "rocket");
}

#[test]
fn results_are_those_of_the_stand_in() {
    compare_with_stand_in(&board().rknn);
}

#[test]
fn a_device_has_an_address_space_for_each_of_its_files() {
    let board = board();
    let device = RkDevice::untested(Arc::clone(&board.rknn), &caps::RK3588).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        device.description(),
        format!("Rockchip RK3588 NPU, streams-{version}, driver rocket")
    );
    let bytes = 8 * caps::DIRECT_WEIGHT_BYTES;
    assert_eq!(device.address_space(), (bytes, bytes));
    // A file is opened only when it is needed.
    assert_eq!(board.rocket.objects().1, 1);
}

#[test]
fn three_files_compute_at_once() {
    let board = board();
    let mut numbers = Numbers::new(57);
    let of = |_| Operands::random(MatmulType::I8_I8_I32, [9, 96, 64], &mut numbers);
    let operands = [0, 1, 2].map(of);
    let want = operands.each_ref().map(|it| it.of_library(&board.rknn));
    std::thread::scope(|scope| {
        for (space, (operands, want)) in (0..).zip(operands.iter().zip(&want)) {
            let rknn = &board.rknn;
            scope.spawn(move || {
                for _ in 0..50 {
                    let have = operands.try_in_space(rknn, space).unwrap();
                    assert!(have == *want, "address space {space}");
                }
            });
        }
    });
    assert_eq!(board.rocket.objects().1, 3);
    let error = operands[0].try_in_space(&board.rknn, 8).unwrap_err();
    assert!(error.to_string().contains("rknn_matmul_create"), "{error}");
}

#[test]
fn memory_of_another_address_space_is_not_bound() {
    let board = board();
    let context = |space| {
        let mut info = MatmulInfo::native(MatmulType::I8_I8_I32, 1, 32, 32);
        info.iommu_domain_id = space;
        Context::new(&board.rknn, info, None).unwrap()
    };
    let (here, there) = (Arc::new(context(0)), Arc::new(context(1)));
    let b = Memory::new(&here, 1024).unwrap();
    let (b, a) = (b.view(0, 1024).unwrap(), Memory::new(&there, 32).unwrap());
    let mut c = Memory::new(&here, 128).unwrap();
    let (a, b, c) = (&a, &b, &mut c);
    let error = context(0)
        .bind_and_run(RunOperands { a, b, c })
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("rknn_matmul_set_io_mem") && text.contains("operand A"),
        "{text}"
    );
}

#[test]
fn an_object_with_two_operands_is_named_once() {
    // The driver drops a job that names an object twice, without an error.
    let board = board();
    let operands = Operands::random(MatmulType::I8_I8_I32, [1, 64, 32], &mut Numbers::fixed(58));
    let want = operands.of_library(&board.rknn);
    let info = MatmulInfo::native(operands.matmul_type, 1, 64, 32);
    let anchor = Arc::new(Context::new(&board.rknn, info, None).unwrap());
    let mut both = Memory::new(&anchor, 4096).unwrap();
    both.bytes_mut()[..operands.a.len()].copy_from_slice(&operands.a);
    both.bytes_mut()[1024..][..operands.b.len()].copy_from_slice(&operands.b);
    both.sync_to_device().unwrap();
    let mut c = Memory::for_results(&anchor, want.len()).unwrap();
    let run = RunOperands {
        a: &both,
        b: &both.view(1024, operands.b.len()).unwrap(),
        c: &mut c,
    };
    let mut context = Context::new(&board.rknn, info, None).unwrap();
    context.bind_and_run(run).unwrap();
    c.sync_from_device().unwrap();
    assert_eq!(c.bytes(), want);
}

#[test]
fn a_sync_that_is_missing_gives_wrong_results_or_fails() {
    for (shape, needless) in [
        // Computed in place: six of twelve syncs may be missing. New objects are clean, which are
        // A, B, C, streams and the status; C is clean at its extra sync, too.
        ([8, 128, 64], 6),
        // With cubes the device does not use A directly, and C is right before the caller syncs it.
        // Ten of seventeen syncs may be missing: two of A, one of B, two of C at its creation and
        // its last one, and those of new streams, status and cubes.
        ([7, 128, 64], 10),
    ] {
        let operands = Operands::random(MatmulType::F16_F16_F32, shape, &mut Numbers::new(54));
        let right = board();
        let want = operands.of_library(&right.rknn);
        let syncs = right.syncs.load(Ordering::Relaxed);
        let harmless = (0..syncs).filter(|&index| {
            let board = board_of(Rocket::new(Computes::Proven), Some(index));
            operands
                .try_of_library(&board.rknn)
                .is_ok_and(|have| have == want)
        });
        assert_eq!(harmless.count(), needless, "{shape:?}, of {syncs}");
    }
}

#[test]
fn calls_of_changing_shapes_leave_nothing_behind() {
    let board = board();
    run_changing_shapes(&board.rknn, 200, || board.rocket.objects().0);
}

#[test]
fn a_job_that_did_not_run_is_named_within_two_seconds() {
    // 40 tasks of 256 columns need two jobs. The second has 8 of them, and the task for the status.
    let operands = Operands::random(
        MatmulType::F16_F16_F32,
        [4, 32, 40 * 256],
        &mut Numbers::fixed(56),
    );
    let want = operands.of_library(&board().rknn);
    for job in [0, 1] {
        for (mishap, code, recovers) in [
            (Mishap::NotAttached, "RKNN_ERR_FAIL", true),
            (Mishap::Hangs(0), "RKNN_ERR_TIMEOUT", true),
            (Mishap::Hangs(8), "RKNN_ERR_TIMEOUT", true),
            (Mishap::NeverEnds, "RKNN_ERR_TIMEOUT", false),
        ] {
            let board = board_of(Rocket::with_mishap(job, mishap), None);
            let begun = Instant::now();
            let error = operands.try_of_library(&board.rknn).unwrap_err();
            let (error, took) = (error.to_string(), begun.elapsed());
            let names = ["rknn_matmul_run", code, "M=4 K=32 N=10240"];
            assert!(names.iter().all(|name| error.contains(name)), "{error}");
            assert!(
                !error.contains('\n') && took < Duration::from_secs(2),
                "{took:?}"
            );
            match (operands.try_of_library(&board.rknn), recovers) {
                (Ok(have), true) => assert!(have == want, "{mishap:?}"),
                // The results of the lost job may arrive at any time.
                (Err(error), false) => assert!(error.to_string().contains(code), "{error}"),
                (next, _) => panic!("after {mishap:?}: {:?}", next.map(drop)),
            }
        }
    }
}
