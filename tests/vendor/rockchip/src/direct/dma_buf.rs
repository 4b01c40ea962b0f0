//! dma-bufs: memory of another driver is imported, that of the NPU is exported, each with syncs of
//! dma-bufs around the CPU's accesses; and the memory that a driver without exports uses instead.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::driver::lock::Nodes;
use rknpu_ops::direct::{self, Machine};
use rknpu_ops::ffi::{Api, IoAttr, MatmulCtx, MatmulInfo, MatmulType, MemSync, TensorMem, code};
use test_kit::Numbers;

use super::{Board, Calls, Change, board, board_of, node_of, rocket, self_test};
use crate::kernel::Kernel;
use crate::operands::Operands;

const READ: u64 = 1;
const WRITE: u64 = 2;
const END: u64 = 4;

/// Returns memory of another driver.
pub fn foreign(bytes: &[u8]) -> io::Result<OwnedFd> {
    // SAFETY: the name ends with a zero.
    let descriptor = unsafe { libc::memfd_create(c"foreign".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.write_all_at(bytes, 0)?;
    Ok(file.into())
}

/// A context of the C API, without the backend above it.
struct Raw {
    _machine: Machine,
    kernel: Arc<Kernel>,
    calls: Arc<Calls>,
    api: Api,
    context: MatmulCtx,
    attr: Box<IoAttr>,
}

const SHAPE: [usize; 3] = [8, 128, 64];

impl Raw {
    fn new(change: Change) -> Self {
        let (node, kernel, calls) = node_of(Kernel::strict(), change);
        let machine = direct::start(Box::new(node)).unwrap();
        let api = machine.api();
        let [m, k, n] = SHAPE.map(|size| i32::try_from(size).unwrap());
        let mut info = MatmulInfo::native(MatmulType::F16_F16_F32, m, k, n);
        let (mut context, mut attr) = (0, Box::new(IoAttr::ZERO));
        // SAFETY: three valid pointers.
        let code = unsafe { (api.matmul_create)(&raw mut context, &raw mut info, &raw mut *attr) };
        assert_eq!(code, code::SUCC);
        Self {
            _machine: machine,
            kernel,
            calls,
            api,
            context,
            attr,
        }
    }

    /// Imports a buffer, or finds the memory that has it.
    fn import(&self, buffer: BorrowedFd, bytes: usize) -> *mut TensorMem {
        let (start, bytes) = (std::ptr::null_mut(), u32::try_from(bytes).unwrap());
        // SAFETY: a live context, and an open descriptor.
        unsafe { (self.api.create_mem_from_fd)(self.context, buffer.as_raw_fd(), start, bytes, 0) }
    }

    /// Makes memory that has `bytes` for the device.
    fn create(&self, bytes: &[u8]) -> *mut TensorMem {
        let len = u32::try_from(bytes.len()).unwrap();
        // SAFETY: a live context.
        let memory = unsafe { (self.api.create_mem)(self.context, len) };
        // SAFETY: the library's own struct.
        let start = unsafe { (*memory).virt_addr };
        // SAFETY: the memory has this many bytes.
        unsafe { start.cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
        self.sync(memory, MemSync::TO_DEVICE);
        memory
    }

    fn sync(&self, memory: *mut TensorMem, mode: MemSync) {
        // SAFETY: a live context and the library's own struct.
        let code = unsafe { (self.api.mem_sync)(self.context, memory, mode) };
        assert_eq!(code, code::SUCC);
    }

    fn destroy(&self, memory: *mut TensorMem) {
        // SAFETY: as for `sync`.
        let code = unsafe { (self.api.destroy_mem)(self.context, memory) };
        assert_eq!(code, code::SUCC);
    }

    /// Binds the operands and runs.
    fn run(&mut self, memories: [*mut TensorMem; 3]) -> c_int {
        let attrs = [&mut self.attr.a, &mut self.attr.b, &mut self.attr.c];
        for (memory, attr) in memories.into_iter().zip(attrs) {
            // SAFETY: as for `sync`; the attribute is the context's.
            let code = unsafe { (self.api.matmul_set_io_mem)(self.context, memory, attr) };
            assert_eq!(code, code::SUCC);
        }
        // SAFETY: a live context, whose memory nothing else uses.
        unsafe { (self.api.matmul_run)(self.context) }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: a live context.
        let code = unsafe { (self.api.matmul_destroy)(self.context) };
        assert_eq!(code, code::SUCC);
    }
}

/// Returns the descriptor of a memory.
fn buffer_of<'a>(memory: *mut TensorMem) -> BorrowedFd<'a> {
    // SAFETY: the library's own struct.
    let descriptor = unsafe { (*memory).fd };
    // SAFETY: open for as long as the memory lives, which is longer than the tests use it.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

/// Another program's accesses to a dma-buf, with the syncs of dma-bufs around them.
struct Neighbour<'a> {
    kernel: &'a Kernel,
    file: File,
}

impl<'a> Neighbour<'a> {
    fn new(kernel: &'a Kernel, buffer: BorrowedFd) -> Self {
        let file = buffer.try_clone_to_owned().unwrap().into();
        Self { kernel, file }
    }

    fn sync(&self, flags: u64) {
        self.kernel
            .sync_buffer(self.file.as_raw_fd(), flags)
            .unwrap();
    }

    fn write(&self, bytes: &[u8], syncs: bool) {
        self.sync(WRITE);
        self.file.write_all_at(bytes, 0).unwrap();
        if syncs {
            self.sync(WRITE | END);
        }
    }

    fn read(&self, bytes: usize, syncs: bool) -> Vec<u8> {
        if syncs {
            self.sync(READ);
        }
        let mut out = vec![0; bytes];
        self.file.read_exact_at(&mut out, 0).unwrap();
        out
    }
}

/// The operands of two products with the same B, and the results.
fn products() -> [(Operands, Vec<u8>); 2] {
    let mut numbers = Numbers::new(59);
    let first = Operands::random(MatmulType::F16_F16_F32, SHAPE, &mut numbers);
    let mut second = Operands::random(MatmulType::F16_F16_F32, SHAPE, &mut numbers);
    second.b.clone_from(&first.b);
    let right = board(Change::Nothing);
    [first, second].map(|operands| {
        let want = operands.of_library(&right.rknn);
        (operands, want)
    })
}

#[test]
fn a_foreign_buffer_is_multiplied_from_and_one_is_exported() {
    let [(first, want_first), (second, want_second)] = products();
    assert!(want_first != want_second);
    let mut raw = Raw::new(Change::Nothing);
    let kernel = Arc::clone(&raw.kernel);
    let camera = foreign(&first.a).unwrap();
    let a = raw.import(camera.as_fd(), first.a.len());
    assert!(!a.is_null());
    let (b, c) = (raw.create(&first.b), raw.create(&vec![0; want_first.len()]));
    let (writer, reader) = (
        Neighbour::new(&kernel, camera.as_fd()),
        Neighbour::new(&kernel, buffer_of(c)),
    );
    assert_eq!(raw.run([a, b, c]), code::SUCC);
    assert!(reader.read(want_first.len(), true) == want_first);
    // Without the sync that ends the writing, the device still has the first one.
    writer.write(&second.a, false);
    assert_eq!(raw.run([a, b, c]), code::SUCC);
    assert!(reader.read(want_first.len(), true) == want_first);
    writer.write(&second.a, true);
    assert_eq!(raw.run([a, b, c]), code::SUCC);
    // Without the sync that begins the reading, the CPU still has the results before.
    assert!(reader.read(want_first.len(), false) == want_first);
    assert!(reader.read(want_first.len(), true) == want_second);
}

#[test]
fn each_sync_of_an_imported_buffer_is_needed() {
    let [(first, _), (second, want)] = products();
    // Both syncs of the library for A, whose end makes it visible, and for C, whose begin does.
    let product = |change: Change| {
        let mut raw = Raw::new(change);
        let imports = [first.a.clone(), vec![0; want.len()]].map(|bytes| foreign(&bytes).unwrap());
        let [a, c] = [0, 1].map(|i| raw.import(imports[i].as_fd(), [first.a.len(), want.len()][i]));
        let b = raw.create(&second.b);
        let before = raw.calls.syncs.load(Ordering::Relaxed);
        File::from(imports[0].try_clone().unwrap())
            .write_all_at(&second.a, 0)
            .unwrap();
        raw.sync(a, MemSync::TO_DEVICE);
        let has_run = raw.run([a, b, c]) == code::SUCC;
        raw.sync(c, MemSync::FROM_DEVICE);
        let mut have = vec![0; want.len()];
        File::from(imports[1].try_clone().unwrap())
            .read_exact_at(&mut have, 0)
            .unwrap();
        let syncs = before..raw.calls.syncs.load(Ordering::Relaxed);
        (has_run && have == want, syncs)
    };
    let (is_right, syncs) = product(Change::Nothing);
    assert!(is_right);
    let is_right = |skipped: &usize| product(Change::NoSync(*skipped)).0;
    // Needless are the begin for A and the end for C, and those of new streams and tasks.
    let needless: Vec<_> = syncs
        .clone()
        .filter(is_right)
        .map(|i| i - syncs.start)
        .collect();
    assert_eq!((syncs.len(), needless), (7, vec![0, 2, 3, 6]));
}

#[test]
fn a_buffer_that_is_imported_twice_is_one_object() {
    let [(first, want), _] = products();
    let mut raw = Raw::new(Change::Nothing);
    let before = raw.kernel.objects();
    let camera = foreign(&first.a).unwrap();
    let again = camera.try_clone().unwrap();
    let both = [camera, again].map(|it| raw.import(it.as_fd(), first.a.len()));
    assert_eq!(raw.kernel.objects(), before + 1);
    // The other one still is the driver's.
    raw.destroy(both[0]);
    let (b, c) = (raw.create(&first.b), raw.create(&vec![0; want.len()]));
    assert_eq!(raw.run([both[1], b, c]), code::SUCC);
    raw.sync(c, MemSync::FROM_DEVICE);
    assert!(Neighbour::new(&raw.kernel, buffer_of(c)).read(want.len(), false) == want);
    // The NPU's own memory is found by a copy of its descriptor, too.
    let own = buffer_of(c).try_clone_to_owned().unwrap();
    let objects = raw.kernel.objects();
    let view = raw.import(own.as_fd(), want.len());
    assert!(!view.is_null());
    assert_eq!(raw.kernel.objects(), objects);
    // Not more than it has.
    assert!(raw.import(own.as_fd(), 1 << 20).is_null());
}

#[test]
fn what_takes_the_place_of_exported_memory_computes_the_same() {
    for has_heap in [true, false] {
        let change = Change::NoExport { has_heap };
        let Board { rknn, calls, .. } = board_of(Kernel::strict(), change).unwrap();
        assert_eq!(self_test(&rknn), "0.9.8");
        let buffers = calls.heap.load(Ordering::Relaxed);
        assert_eq!(buffers > 10, has_heap, "{buffers}");
        let raw = Raw::new(change);
        let memory = raw.create(&[1; 64]);
        // SAFETY: the library's own struct.
        assert_eq!(unsafe { (*memory).fd } >= 0, has_heap);
    }
}

#[test]
fn rocket_imports_no_buffer_by_name() {
    let board = rocket::board();
    let node = rocket::node_of(&board.rocket);
    let machine = direct::start(Box::new(node)).unwrap();
    let api = machine.api();
    let mut info = MatmulInfo::native(MatmulType::F16_F16_F32, 8, 128, 64);
    let (mut context, mut attr) = (0, Box::new(IoAttr::ZERO));
    // SAFETY: three valid pointers.
    let code = unsafe { (api.matmul_create)(&raw mut context, &raw mut info, &raw mut *attr) };
    assert_eq!(code, code::SUCC);
    let buffer = foreign(&[0; 4096]).unwrap();
    let (descriptor, start) = (buffer.as_raw_fd(), std::ptr::null_mut());
    // SAFETY: a live context, and an open descriptor.
    let memory = unsafe { (api.create_mem_from_fd)(context, descriptor, start, 4096, 0) };
    assert!(memory.is_null());
    // SAFETY: a live context.
    assert_eq!(unsafe { (api.matmul_destroy)(context) }, code::SUCC);
    assert!(Rknn::direct(Box::new(rocket::node_of(&board.rocket)), Nodes::Private).is_ok());
}
