//! Functions of the C library that programs find here first: those that access `/dev/dri`, or
//! `/dev/accel` where `RKNN_LOOP_KERNEL=rocket` is set.
//!
//! Each passes other files on by a plain system call. `open` and `ioctl` have variable arguments in
//! C; whole numbers among these are passed like named ones on aarch64 and x86-64 Linux.
#![expect(unsafe_code, reason = "stands in for functions of the C library")]

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::{LazyLock, PoisonError, RwLock};

use crate::device::Computes;
use crate::kernel::{
    Argument, DMA_BUF_TYPE, DRM_TYPE, Errno, Kernel, Reply, Request, Rocket, Text,
};

/// The folder of the drivers' nodes.
const DRI: &[u8] = b"/dev/dri";
const ACCEL: &[u8] = b"/dev/accel";

/// The major number of DRM nodes.
// SOURCE: Documentation/admin-guide/devices.txt of Linux, 226 char.
const DRM_MAJOR: u32 = 226;

/// The driver that programs see.
#[derive(Debug)]
enum Emulated {
    Rknpu(Kernel),
    Rocket(Rocket),
}

/// librknnrt uses other streams and syncs than the strict rules allow, so only programs that set
/// `RKNN_LOOP_STRICT` are held to the rules of [`Kernel::strict`].
static EMULATED: LazyLock<Emulated> = LazyLock::new(|| {
    let is_set = |name| std::env::var_os(name);
    if is_set("RKNN_LOOP_KERNEL").is_some_and(|name| name == "rocket") {
        Emulated::Rocket(Rocket::new(Computes::Proven))
    } else if is_set("RKNN_LOOP_STRICT").is_some() {
        Emulated::Rknpu(Kernel::strict())
    } else {
        Emulated::Rknpu(Kernel::default())
    }
});

impl Emulated {
    /// Returns the folder of its node, and the node.
    fn places(&self) -> [&'static [u8]; 2] {
        match self {
            Self::Rknpu(_) => [DRI, b"/dev/dri/card0"],
            Self::Rocket(_) => [ACCEL, b"/dev/accel/accel0"],
        }
    }

    /// Opens a file, and returns its number.
    fn open(&self) -> u32 {
        match self {
            Self::Rknpu(_) => 0,
            Self::Rocket(rocket) => rocket.open(),
        }
    }

    fn close(&self, file: u32) {
        match self {
            Self::Rknpu(_) => {}
            Self::Rocket(rocket) => rocket.close(file),
        }
    }

    fn map(&self, file: u32, offset: u64) -> Result<c_int, Errno> {
        match self {
            Self::Rknpu(kernel) => kernel.map(offset),
            Self::Rocket(rocket) => rocket.map(file, offset),
        }
    }

    /// Begins or ends an access of the CPU to a dma-buf.
    fn sync_buffer(&self, descriptor: c_int, flags: u64) -> Result<(), Errno> {
        match self {
            Self::Rknpu(kernel) => kernel.sync_buffer(descriptor, flags),
            Self::Rocket(_) => Ok(()),
        }
    }

    /// Answers one ioctl.
    ///
    /// # Safety
    /// - As [`Rocket::ioctl`].
    unsafe fn ioctl(
        &self,
        file: u32,
        request: Request,
        argument: &mut Argument,
    ) -> Result<Reply, Errno> {
        match self {
            Self::Rknpu(kernel) => kernel.ioctl(request, argument),
            // SAFETY: guaranteed by the caller.
            Self::Rocket(rocket) => unsafe { rocket.ioctl(file, request, argument) },
        }
    }
}

/// Descriptors of the node, each with its open file.
static OPEN: RwLock<Vec<(c_int, u32)>> = RwLock::new(Vec::new());

/// Returns the file of a descriptor of the node.
fn file_of(descriptor: c_int) -> Option<u32> {
    let open = OPEN.read().unwrap_or_else(PoisonError::into_inner);
    open.iter()
        .find_map(|(number, file)| (*number == descriptor).then_some(*file))
}

fn fail(errno: i32) -> c_int {
    // SAFETY: the C library gives each thread an errno whose address does not change.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above; the place is aligned and this thread's own.
    unsafe { *place = errno };
    -1
}

/// Returns a path under [`DRI`] or [`ACCEL`], or one of these.
///
/// # Safety
/// `path` is a C string.
unsafe fn node_path<'a>(path: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: guaranteed by the caller.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let is_node = [DRI, ACCEL].iter().any(|folder| path.starts_with(folder));
    is_node.then_some(path)
}

/// Opens the node, or any other path.
///
/// # Safety
/// As the C function.
unsafe fn open_path(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    match unsafe { node_path(path) } {
        None => {
            // SAFETY: the caller's arguments, unchanged.
            let result = unsafe { libc::syscall(libc::SYS_openat, directory, path, flags, mode) };
            c_int::try_from(result).unwrap_or(-1)
        }
        Some(path) if path == EMULATED.places()[1] => {
            // SAFETY: the name ends in NUL.
            let descriptor =
                unsafe { libc::memfd_create(c"rknpu-node".as_ptr(), libc::MFD_CLOEXEC) };
            if descriptor >= 0 {
                OPEN.write()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((descriptor, EMULATED.open()));
            }
            descriptor
        }
        Some(_) => fail(libc::ENOENT),
    }
}

/// Declares C functions under their own names.
macro_rules! c_functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the C library.")]
            ///
            /// # Safety
            /// As the C function.
            // Not exported in unit tests, whose own files would be affected.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> $result $body
        )*
    };
}

c_functions! {
    fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { open_path(libc::AT_FDCWD, path, flags, mode) }
    }

    fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { open_path(libc::AT_FDCWD, path, flags, mode) }
    }

    fn close(descriptor: c_int) -> c_int {
        if let Some(file) = file_of(descriptor) {
            OPEN.write().unwrap_or_else(PoisonError::into_inner).retain(|open| open.0 != descriptor);
            EMULATED.close(file);
        }
        // SAFETY: the caller's argument, unchanged.
        let result = unsafe { libc::syscall(libc::SYS_close, descriptor) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn access(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        match unsafe { node_path(path) } {
            Some(path) if EMULATED.places().contains(&path) => 0,
            Some(_) => fail(libc::ENOENT),
            None => {
                // SAFETY: the caller's arguments, unchanged.
                let result = unsafe { libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path, mode) };
                c_int::try_from(result).unwrap_or(-1)
            }
        }
    }

    // Programs that were linked with an old C library ask for a file's status by this name.
    fn __xstat(_version: c_int, path: *const c_char, status: *mut libc::stat) -> c_int {
        // SAFETY: guaranteed by the caller.
        let Some(path) = (unsafe { node_path(path) }) else {
            // SAFETY: the caller's arguments, unchanged.
            return unsafe { libc::stat(path, status) };
        };
        let [folder, node] = EMULATED.places();
        let kind = if path == folder {
            libc::S_IFDIR | 0o755
        } else if path == node {
            libc::S_IFCHR | 0o660
        } else {
            return fail(libc::ENOENT);
        };
        // SAFETY: a status consists of numbers, for which zero is a value.
        let mut filled: libc::stat = unsafe { std::mem::zeroed() };
        filled.st_mode = kind;
        filled.st_rdev = libc::makedev(DRM_MAJOR, 0);
        // SAFETY: the caller passes memory for a status.
        unsafe { status.write(filled) };
        0
    }

    // libdrm creates missing nodes, and changes their owner and mode.
    fn mkdir(path: *const c_char, mode: libc::mode_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        if unsafe { node_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller's arguments, unchanged.
        let result = unsafe { libc::syscall(libc::SYS_mkdirat, libc::AT_FDCWD, path, mode) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn chown(path: *const c_char, owner: libc::uid_t, group: libc::gid_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        if unsafe { node_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller's arguments, unchanged.
        let result = unsafe { libc::syscall(libc::SYS_fchownat, libc::AT_FDCWD, path, owner, group, 0) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn chmod(path: *const c_char, mode: libc::mode_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        if unsafe { node_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller's arguments, unchanged.
        let result = unsafe { libc::syscall(libc::SYS_fchmodat, libc::AT_FDCWD, path, mode) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn __xmknod(_version: c_int, path: *const c_char, mode: libc::mode_t, device: *const libc::dev_t) -> c_int {
        // SAFETY: guaranteed by the caller.
        if unsafe { node_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller passes memory that holds a device number.
        let device = unsafe { *device };
        // SAFETY: the caller's arguments, unchanged.
        let result = unsafe { libc::syscall(libc::SYS_mknodat, libc::AT_FDCWD, path, mode, device) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn mmap(address: *mut c_void, bytes: usize, protection: c_int, flags: c_int, descriptor: c_int, offset: i64)
        -> *mut c_void
    {
        // SAFETY: guaranteed by the caller.
        unsafe { map(address, bytes, protection, flags, descriptor, offset) }
    }

    fn mmap64(address: *mut c_void, bytes: usize, protection: c_int, flags: c_int, descriptor: c_int, offset: i64)
        -> *mut c_void
    {
        // SAFETY: guaranteed by the caller.
        unsafe { map(address, bytes, protection, flags, descriptor, offset) }
    }

    fn ioctl(descriptor: c_int, number: c_long, argument: *mut c_void) -> c_int {
        let request = Request::new(number.cast_unsigned());
        if request.kind == DMA_BUF_TYPE {
            // SAFETY: the struct of the only function is its flags.
            let flags = unsafe { argument.cast::<u64>().read_unaligned() };
            return EMULATED.sync_buffer(descriptor, flags).map_or_else(fail, |()| 0);
        }
        let file = file_of(descriptor).filter(|_| request.kind == DRM_TYPE);
        let Some(file) = file else {
            // SAFETY: the caller's arguments, unchanged.
            let result = unsafe { libc::syscall(libc::SYS_ioctl, descriptor, number, argument) };
            return c_int::try_from(result).unwrap_or(-1);
        };
        // SAFETY: the number contains the size of the caller's struct, which follows the driver's
        // interface.
        unsafe { answer(file, request, argument.cast()) }
    }
}

/// Maps an object if the descriptor is the node's, and any other file otherwise.
///
/// # Safety
/// As `mmap`.
unsafe fn map(
    address: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: i64,
) -> *mut c_void {
    let system = |descriptor: c_int, offset: i64| {
        // SAFETY: the caller's arguments, with the object's descriptor in place of the node's.
        let start = unsafe {
            libc::syscall(
                libc::SYS_mmap,
                address,
                bytes,
                protection,
                flags,
                descriptor,
                offset,
            )
        };
        // -1 is MAP_FAILED, which has all bits set.
        std::ptr::with_exposed_provenance_mut(
            usize::try_from(start.cast_unsigned()).unwrap_or(usize::MAX),
        )
    };
    let Some(file) = file_of(descriptor) else {
        return system(descriptor, offset);
    };
    match EMULATED.map(file, offset.cast_unsigned()) {
        Ok(object) => {
            let start = system(object, 0);
            // SAFETY: the descriptor was created for this call only.
            unsafe { libc::close(object) };
            start
        }
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// Copies a struct in, lets the driver answer, and copies the struct out.
///
/// # Safety
/// `place` has `request.bytes` bytes, and the addresses there are valid by the driver's interface.
unsafe fn answer(file: u32, request: Request, place: *mut u8) -> c_int {
    let mut argument = Argument([0; 128]);
    let bytes = request.bytes.min(argument.0.len());
    // SAFETY: both have at least this many bytes.
    unsafe { place.copy_to_nonoverlapping(argument.0.as_mut_ptr(), bytes) };
    // SAFETY: guaranteed by the caller.
    match unsafe { EMULATED.ioctl(file, request, &mut argument) } {
        Ok(reply) => {
            // SAFETY: both have at least this many bytes.
            unsafe { place.copy_from_nonoverlapping(argument.0.as_ptr(), bytes) };
            if let Reply::Texts(texts) = reply {
                // SAFETY: the caller passed these addresses, and the bytes at them.
                texts.into_iter().for_each(|text| unsafe { copy(text) });
            }
            0
        }
        Err(errno) => {
            eprintln!(
                "rknn-loop: ioctl {:#x} fails with errno {errno}",
                request.function
            );
            fail(errno)
        }
    }
}

/// Copies a text to its address, as far as there is room.
///
/// # Safety
/// The address has as many bytes as the text requires, or is null.
unsafe fn copy(Text(text, address, room): Text) {
    let bytes = text.len().min(usize::try_from(room).unwrap_or(0));
    let place = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(address).unwrap_or(0));
    if !place.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe { place.copy_from_nonoverlapping(text.as_ptr(), bytes) };
    }
}
