//! Functions of the DSP's operating system, with plain arguments only.
//!
//! SOURCE: names as imported by Qualcomm's prebuilt libraries in qualcomm/fastrpc test/v75;
//! prototypes as in public code that calls them: tinygrad (MIT) `HAP_mmap`, `HAP_munmap`,
//! `HAP_perf_get_time_us`, `HAP_power_set`; ggml-hexagon and others, `compute_resource_*`. The
//! attributes of a compute resource are filled by functions only; they are 64 bytes in one public
//! header, and have room for four times that here. Not run on a device.

use core::ffi::{c_char, c_int, c_long, c_uint, c_void};

/// Reading and writing, for [`HAP_mmap`].
pub const PROT_READ_WRITE: c_int = 3;

/// Attributes of a compute resource, opaque.
#[repr(C, align(8))]
pub struct Attributes(pub [u8; 256]);

/// `HAP_debug_v2`: level, file, line, format and its arguments.
pub type Debug = unsafe extern "C" fn(c_int, *const c_char, c_int, *const c_char, ...);
/// `HAP_mem_available_stack`: bytes.
pub type AvailableStack = unsafe extern "C" fn() -> u64;

/// `sysmon_set_dcvs_v3_protected_bus_corners`: a request of `HAP_power_set`, and 1.
///
/// SOURCE: the weak declaration in Qualcomm's `HAP_dcvs.h`, which has public copies; llama.cpp
/// ggml-hexagon htp/main.c calls it for v79 and later.
pub type ProtectedCorners = unsafe extern "C" fn(*mut c_void, u8) -> c_int;

/// The function that the resource manager calls when a client of higher priority waits for a
/// resource: its number, and the last argument of [`SetReleaseCallback`]. It must not block.
///
/// SOURCE: public copies of Qualcomm's `HAP_compute_res.h`, as for the two below.
pub type ReleaseCallback = unsafe extern "C" fn(c_uint, *mut c_void) -> c_int;

/// `compute_resource_attr_set_release_callback`.
pub type SetReleaseCallback =
    unsafe extern "C" fn(*mut Attributes, ReleaseCallback, *mut c_void) -> c_int;

/// `compute_resource_update_priority`: a resource, and the priority of a QuRT thread.
pub type UpdatePriority = unsafe extern "C" fn(c_uint, u16) -> c_int;

// Optional functions: the loader leaves these null if the system does not have them.
//
// SOURCE: the names are exported by unsigned FastRPC shells for V73 to V81. Public code that calls
// them declares all of them weak; nothing else is weak here (tests/imports.txt).
unsafe extern "C" {
    /// Writes a line to the DSP's log.
    #[linkage = "extern_weak"]
    pub static HAP_debug_v2: Option<Debug>;
    /// Tells how much stack the calling thread has left.
    #[linkage = "extern_weak"]
    pub static HAP_mem_available_stack: Option<AvailableStack>;
    /// Sets the function that is called when another program waits for the resource.
    #[linkage = "extern_weak"]
    pub static compute_resource_attr_set_release_callback: Option<SetReleaseCallback>;
    /// Sets the priority with which the resource is held.
    #[linkage = "extern_weak"]
    pub static compute_resource_update_priority: Option<UpdatePriority>;
    /// Allows the highest clocks of the bus. Only libraries for V79 and later import it: the shells
    /// of older chips do not export it, and some loaders refuse a weak symbol that is missing.
    #[linkage = "extern_weak"]
    pub static sysmon_set_dcvs_v3_protected_bus_corners: Option<ProtectedCorners>;
}

unsafe extern "C" {
    /// Tells how many vector contexts there are: bits 15 to 8 count those of 128 bytes.
    ///
    /// SOURCE: public code that uses it, apache/tvm src/runtime/hexagon/hexagon_thread_manager.cc.
    pub safe fn qurt_hvx_get_units() -> c_int;
    /// Maps shared memory: (0, bytes, protection, flags, descriptor, 0); null or -1 on failure.
    pub fn HAP_mmap(
        address: *mut c_void,
        bytes: c_int,
        protection: c_int,
        flags: c_int,
        fd: c_int,
        offset: c_long,
    ) -> *mut c_void;
    /// Takes it back.
    pub fn HAP_munmap(address: *mut c_void, bytes: c_int) -> c_int;
    /// A clock, microseconds.
    pub safe fn HAP_perf_get_time_us() -> u64;
    /// Asks for power; see [`crate::power`].
    pub fn HAP_power_set(context: *mut c_void, request: *mut c_void) -> c_int;

    /// Returns the size of VTCM: (0, out bytes, null, null, null); 0 on success.
    pub fn compute_resource_query_VTCM(
        application: c_uint,
        total_bytes: *mut c_uint,
        total_layout: *mut c_void,
        free_bytes: *mut c_uint,
        free_layout: *mut c_void,
    ) -> c_int;
    /// Initializes attributes.
    pub fn compute_resource_attr_init(attributes: *mut Attributes) -> c_int;
    /// Sets that several holders use the resource one after another, if `enable` is 1.
    pub fn compute_resource_attr_set_serialize(attributes: *mut Attributes, enable: u8) -> c_int;
    /// Asks for the matrix unit.
    pub fn compute_resource_attr_set_hmx_param(attributes: *mut Attributes, enable: u8) -> c_int;
    /// Asks for VTCM: bytes, in one page or not.
    pub fn compute_resource_attr_set_vtcm_param(
        attributes: *mut Attributes,
        bytes: c_uint,
        single_page: u8,
    ) -> c_int;
    /// Waits for the resource; its number, 0 on failure.
    pub fn compute_resource_acquire(attributes: *mut Attributes, timeout_us: c_uint) -> c_uint;
    /// Returns the address of VTCM.
    pub fn compute_resource_attr_get_vtcm_ptr(attributes: *mut Attributes) -> *mut c_void;
    /// Gives a resource back.
    pub safe fn compute_resource_release(resource: c_uint) -> c_int;
    /// Gives the matrix unit of a resource to the calling thread.
    pub safe fn compute_resource_hmx_lock(resource: c_uint) -> c_int;
    /// Takes it back.
    pub safe fn compute_resource_hmx_unlock(resource: c_uint) -> c_int;
}
