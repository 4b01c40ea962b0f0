//! Functions of the C library that the vendor's library finds here first: those that access
//! `/dev/dri`.
//!
//! Each passes other files on by a plain system call. `open` and `ioctl` have variable arguments in
//! C; whole numbers among these are passed like named ones on aarch64 and x86-64 Linux.
#![expect(unsafe_code, reason = "stands in for functions of the C library")]

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::{LazyLock, PoisonError, RwLock};

use crate::kernel::{Argument, DMA_BUF_TYPE, DRM_TYPE, Kernel, Reply, Request, Text};

/// The folder of the nodes, and the driver's node in it.
const FOLDER: &[u8] = b"/dev/dri";
const NODE: &[u8] = b"/dev/dri/card0";

/// The major number of DRM nodes.
// SOURCE: Documentation/admin-guide/devices.txt of Linux, 226 char.
const DRM_MAJOR: u32 = 226;

/// librknnrt has its own ideas of what boards compute, and syncs as it likes: only programs that set `RKNN_LOOP_STRICT`
/// are held to the rules of [`Kernel::strict`].
static KERNEL: LazyLock<Kernel> = LazyLock::new(|| {
    if std::env::var_os("RKNN_LOOP_STRICT").is_some() {
        Kernel::strict()
    } else {
        Kernel::default()
    }
});

/// Descriptors of the node.
static OPEN: RwLock<Vec<c_int>> = RwLock::new(Vec::new());

fn is_ours(descriptor: c_int) -> bool {
    OPEN.read()
        .unwrap_or_else(PoisonError::into_inner)
        .contains(&descriptor)
}

fn fail(errno: i32) -> c_int {
    // SAFETY: the C library gives each thread an errno that stays where it is.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above; the place is aligned and this thread's own.
    unsafe { *place = errno };
    -1
}

/// Returns a path under [`FOLDER`], or the folder itself.
///
/// # Safety
/// `path` is a C string.
unsafe fn dri_path<'a>(path: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    path.starts_with(FOLDER).then_some(path)
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
    // SAFETY: the caller's promise.
    match unsafe { dri_path(path) } {
        None => {
            // SAFETY: the caller's arguments, as they came.
            let result = unsafe { libc::syscall(libc::SYS_openat, directory, path, flags, mode) };
            c_int::try_from(result).unwrap_or(-1)
        }
        Some(NODE) => {
            // SAFETY: the name ends with a zero.
            let descriptor =
                unsafe { libc::memfd_create(c"rknpu-node".as_ptr(), libc::MFD_CLOEXEC) };
            if descriptor >= 0 {
                OPEN.write()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(descriptor);
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
            // Not in the tests' own programs, whose files these would be.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> $result $body
        )*
    };
}

c_functions! {
    fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
        // SAFETY: passed on to the caller.
        unsafe { open_path(libc::AT_FDCWD, path, flags, mode) }
    }

    fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
        // SAFETY: passed on to the caller.
        unsafe { open_path(libc::AT_FDCWD, path, flags, mode) }
    }

    fn close(descriptor: c_int) -> c_int {
        OPEN.write().unwrap_or_else(PoisonError::into_inner).retain(|open| *open != descriptor);
        // SAFETY: the caller's argument, as it came.
        let result = unsafe { libc::syscall(libc::SYS_close, descriptor) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn access(path: *const c_char, mode: c_int) -> c_int {
        // SAFETY: passed on to the caller.
        match unsafe { dri_path(path) } {
            Some(FOLDER | NODE) => 0,
            Some(_) => fail(libc::ENOENT),
            None => {
                // SAFETY: the caller's arguments, as they came.
                let result = unsafe { libc::syscall(libc::SYS_faccessat, libc::AT_FDCWD, path, mode) };
                c_int::try_from(result).unwrap_or(-1)
            }
        }
    }

    // Old programs ask for a file's status by this name.
    fn __xstat(_version: c_int, path: *const c_char, status: *mut libc::stat) -> c_int {
        // SAFETY: passed on to the caller.
        let Some(path) = (unsafe { dri_path(path) }) else {
            // SAFETY: the caller's arguments, as they came.
            return unsafe { libc::stat(path, status) };
        };
        let kind = match path {
            FOLDER => libc::S_IFDIR | 0o755,
            NODE => libc::S_IFCHR | 0o660,
            _ => return fail(libc::ENOENT),
        };
        // SAFETY: a status is plain numbers, for which zero is a value.
        let mut filled: libc::stat = unsafe { std::mem::zeroed() };
        filled.st_mode = kind;
        filled.st_rdev = libc::makedev(DRM_MAJOR, 0);
        // SAFETY: the caller's place for a status.
        unsafe { status.write(filled) };
        0
    }

    // libdrm makes nodes that are missing, and changes their owner and mode.
    fn mkdir(path: *const c_char, mode: libc::mode_t) -> c_int {
        // SAFETY: passed on to the caller.
        if unsafe { dri_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller's arguments, as they came.
        let result = unsafe { libc::syscall(libc::SYS_mkdirat, libc::AT_FDCWD, path, mode) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn chown(path: *const c_char, owner: libc::uid_t, group: libc::gid_t) -> c_int {
        // SAFETY: passed on to the caller.
        if unsafe { dri_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller's arguments, as they came.
        let result = unsafe { libc::syscall(libc::SYS_fchownat, libc::AT_FDCWD, path, owner, group, 0) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn chmod(path: *const c_char, mode: libc::mode_t) -> c_int {
        // SAFETY: passed on to the caller.
        if unsafe { dri_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller's arguments, as they came.
        let result = unsafe { libc::syscall(libc::SYS_fchmodat, libc::AT_FDCWD, path, mode) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn __xmknod(_version: c_int, path: *const c_char, mode: libc::mode_t, device: *const libc::dev_t) -> c_int {
        // SAFETY: passed on to the caller.
        if unsafe { dri_path(path) }.is_some() {
            return 0;
        }
        // SAFETY: the caller's place of a device number.
        let device = unsafe { *device };
        // SAFETY: the caller's arguments, as they came.
        let result = unsafe { libc::syscall(libc::SYS_mknodat, libc::AT_FDCWD, path, mode, device) };
        c_int::try_from(result).unwrap_or(-1)
    }

    fn mmap(address: *mut c_void, bytes: usize, protection: c_int, flags: c_int, descriptor: c_int, offset: i64)
        -> *mut c_void
    {
        // SAFETY: passed on to the caller.
        unsafe { map(address, bytes, protection, flags, descriptor, offset) }
    }

    fn mmap64(address: *mut c_void, bytes: usize, protection: c_int, flags: c_int, descriptor: c_int, offset: i64)
        -> *mut c_void
    {
        // SAFETY: passed on to the caller.
        unsafe { map(address, bytes, protection, flags, descriptor, offset) }
    }

    fn ioctl(descriptor: c_int, number: c_long, argument: *mut c_void) -> c_int {
        let request = Request::new(number.cast_unsigned());
        if request.kind == DMA_BUF_TYPE {
            // The begin and end of an access by the CPU: memory is coherent here.
            return 0;
        }
        if request.kind != DRM_TYPE || !is_ours(descriptor) {
            // SAFETY: the caller's arguments, as they came.
            let result = unsafe { libc::syscall(libc::SYS_ioctl, descriptor, number, argument) };
            return c_int::try_from(result).unwrap_or(-1);
        }
        // SAFETY: the number contains the size of the caller's struct.
        unsafe { answer(request, argument.cast()) }
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
        // SAFETY: the caller's arguments, with the object's own descriptor for the node's.
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
    if !is_ours(descriptor) {
        return system(descriptor, offset);
    }
    match KERNEL.map(offset.cast_unsigned()) {
        Ok(object) => {
            let start = system(object, 0);
            // SAFETY: the descriptor was made for this call.
            unsafe { libc::close(object) };
            start
        }
        Err(errno) => {
            fail(errno);
            libc::MAP_FAILED
        }
    }
}

/// Copies a struct in, has the driver answer, and copies it out.
///
/// # Safety
/// `place` has `request.bytes` bytes.
unsafe fn answer(request: Request, place: *mut u8) -> c_int {
    let mut argument = Argument([0; 128]);
    let bytes = request.bytes.min(argument.0.len());
    // SAFETY: both have at least this many bytes.
    unsafe { place.copy_to_nonoverlapping(argument.0.as_mut_ptr(), bytes) };
    match KERNEL.ioctl(request, &mut argument) {
        Ok(reply) => {
            // SAFETY: both have at least this many bytes.
            unsafe { place.copy_from_nonoverlapping(argument.0.as_ptr(), bytes) };
            if let Reply::Texts(texts) = reply {
                // SAFETY: the caller gave the addresses, with the bytes that are there.
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
        // SAFETY: the caller's promise.
        unsafe { place.copy_from_nonoverlapping(text.as_ptr(), bytes) };
    }
}
