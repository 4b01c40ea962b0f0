//! The C ABI of libcdsprpc, FastRPC's library on the host: structs, constants and the table of
//! functions.
//!
//! Types, numbers and signatures on which the vendor's library and its stand-in (`crate::sim`) must
//! agree. This module neither loads a library (the host crate does that) nor has behaviour.
//!
//! ```text
//! remote_session_control(DSPRPC_CONTROL_UNSIGNED_MODULE)   before the first handle of a session
//! remote_handle64_open(uri) -> handle                      loads our library into a process on the DSP
//! rpcmem_alloc, rpcmem_to_fd, fastrpc_mmap(…, FD_DELAYED)  memory that both sides see; the DSP maps it by descriptor
//! remote_handle64_invoke(handle, scalars, args)            blocks until the DSP returns
//! ```
//!
//! SOURCE: qualcomm/fastrpc (BSD), inc/remote.h, inc/rpcmem.h, inc/AEEStdErr.h,
//! src/fastrpc_apps_user.c as of 2026; sizes for LP64. Enumerations are plain integers, because the
//! library may know values that this file does not.

use std::ffi::{CStr, c_char, c_int};

pub mod code;
mod table;

pub use crate::rt::invoke::{RemoteArg, Scalars};
pub use code::describe;
pub use table::{Api, SYMBOLS};

/// Handle of an open module (`remote_handle64`).
pub type Handle = u64;

/// A compute DSP. Most chips have one; QCS9075 and SA8775P have two, and some boards and laptops
/// four.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// The first one.
    Cdsp,
    /// The second one.
    Cdsp1,
    /// The third one.
    Cdsp2,
    /// The fourth one.
    Cdsp3,
}

impl Domain {
    /// All domains.
    pub const ALL: [Self; 4] = [Self::Cdsp, Self::Cdsp1, Self::Cdsp2, Self::Cdsp3];

    /// Returns the number (`CDSP_DOMAIN_ID`, `CDSP1_DOMAIN_ID`).
    ///
    /// SOURCE: qualcomm/fastrpc inc/remote.h for the first two. Its public version has no number
    /// for the others; 18 and 19 are those by which a public backend for llama.cpp names CDSP2 and
    /// CDSP3. A library that does not know them uses the two lowest bits: Debian's libcdsprpc 1.0.8
    /// answers for 19 as for the first DSP.
    #[must_use]
    pub const fn id(self) -> c_int {
        match self {
            Self::Cdsp => 3,
            Self::Cdsp1 => 4,
            Self::Cdsp2 => 18,
            Self::Cdsp3 => 19,
        }
    }

    /// Returns the name (`CDSP_DOMAIN_NAME`, `CDSP1_DOMAIN_NAME`).
    ///
    /// SOURCE: for the last two Linux drivers/soc/qcom/socinfo.c, which names their firmware so.
    #[must_use]
    pub const fn name(self) -> &'static CStr {
        match self {
            Self::Cdsp => c"cdsp",
            Self::Cdsp1 => c"cdsp1",
            Self::Cdsp2 => c"cdsp2",
            Self::Cdsp3 => c"cdsp3",
        }
    }
}

/// The compute DSP that every chip has.
pub const CDSP_DOMAIN_ID: c_int = Domain::Cdsp.id();
/// Prefix that names the DSP in a module's URI; the name follows.
pub const DOMAIN_URI: &str = "&_dom=";
/// Prefix that names a session other than the default one in a module's URI; a decimal number
/// follows.
///
/// SOURCE: inc/fastrpc_internal.h (`FASTRPC_SESSION_URI`).
pub const SESSION_URI: &str = "&_session=";
/// Sessions of one domain and process, the default one (0) among them.
///
/// SOURCE: inc/fastrpc_common.h (`NUM_SESSIONS`); older libraries have 2 (inc/remote.h, comment of
/// `remote_rpc_reserve_new_session`).
pub const NUM_SESSIONS: u32 = 4;

/// Any memory that a DSP with an I/O memory management unit can reach (`RPCMEM_HEAP_ID_SYSTEM`).
pub const RPCMEM_HEAP_ID_SYSTEM: c_int = 25;
/// Cached memory (`RPCMEM_DEFAULT_FLAGS`, `RPCMEM_FLAG_CACHED`).
pub const RPCMEM_DEFAULT_FLAGS: u32 = 1;
/// Uncached memory (`RPCMEM_FLAG_UNCACHED`).
pub const RPCMEM_FLAG_UNCACHED: u32 = 0;
/// The library may map the memory into every session at once, and ignores failure
/// (`RPCMEM_TRY_MAP_STATIC`).
pub const RPCMEM_TRY_MAP_STATIC: u32 = 0x0400_0000;

/// [`Api::fastrpc_mmap`]: mapped at once, tagged with its descriptor; the caller maintains the
/// caches (`FASTRPC_MAP_FD`).
pub const FASTRPC_MAP_FD: c_int = 2;
/// [`Api::fastrpc_mmap`]: mapped when the DSP calls `HAP_mmap` (`FASTRPC_MAP_FD_DELAYED`).
pub const FASTRPC_MAP_FD_DELAYED: c_int = 3;

/// [`Api::remote_session_control`]: [`ThreadParams`] (`FASTRPC_THREAD_PARAMS`).
pub const FASTRPC_THREAD_PARAMS: u32 = 1;
/// [`Api::remote_session_control`]: [`UnsignedModule`] (`DSPRPC_CONTROL_UNSIGNED_MODULE`).
pub const DSPRPC_CONTROL_UNSIGNED_MODULE: u32 = 2;
/// [`Api::remote_session_control`]: [`SessionClose`] (`FASTRPC_SESSION_CLOSE`).
pub const FASTRPC_SESSION_CLOSE: u32 = 7;
/// [`Api::remote_session_control`]: [`ReserveNewSession`] (`FASTRPC_RESERVE_NEW_SESSION`).
pub const FASTRPC_RESERVE_NEW_SESSION: u32 = 13;
/// [`Api::remote_session_control`]: [`GetUri`] (`FASTRPC_GET_URI`).
pub const FASTRPC_GET_URI: u32 = 15;

/// [`Api::remote_handle_control`], [`Api::remote_handle64_control`]: [`ControlLatency`]
/// (`DSPRPC_CONTROL_LATENCY`).
pub const DSPRPC_CONTROL_LATENCY: u32 = 1;
/// [`Api::remote_handle_control`]: [`DspCapability`] (`DSPRPC_GET_DSP_INFO`).
pub const DSPRPC_GET_DSP_INFO: u32 = 2;

/// [`ControlLatency::enable`]: the CPU stays out of deep sleep while calls are frequent
/// (`RPC_PM_QOS`).
pub const RPC_PM_QOS: u32 = 1;
/// [`ControlLatency::enable`]: the caller polls for the result for a while (`RPC_POLL_QOS`).
pub const RPC_POLL_QOS: u32 = 3;

/// Values of [`DspCapability::attribute_id`] (`remote_dsp_attributes`).
pub mod attribute {
    /// 1 if such a DSP exists.
    pub const DOMAIN_SUPPORT: u32 = 0;
    /// 1 if unsigned modules can run.
    pub const UNSIGNED_PD_SUPPORT: u32 = 1;
    /// Vector units of 64 bytes.
    pub const HVX_SUPPORT_64B: u32 = 2;
    /// Vector units of 128 bytes.
    pub const HVX_SUPPORT_128B: u32 = 3;
    /// Bytes of the largest page of VTCM.
    pub const VTCM_PAGE: u32 = 4;
    /// Pages of that size.
    pub const VTCM_COUNT: u32 = 5;
    /// Architecture; see [`super::arch_of`].
    pub const ARCH_VER: u32 = 6;
    /// Matrix unit, depth.
    pub const HMX_SUPPORT_DEPTH: u32 = 7;
    /// Matrix unit, spatial.
    pub const HMX_SUPPORT_SPATIAL: u32 = 8;
    /// Asynchronous calls.
    pub const ASYNC_FASTRPC_SUPPORT: u32 = 9;
    /// Notification of the remote process's end.
    pub const STATUS_NOTIFICATION_SUPPORT: u32 = 10;
}

/// Returns the architecture in an [`attribute::ARCH_VER`] word: 73 for 0x…73.
///
/// SOURCE: ggml-hexagon's use of the query: the low byte, read as hexadecimal digits, is the
/// version.
#[must_use]
pub const fn arch_of(version: u32) -> u32 {
    (version >> 4 & 15) * 10 + (version & 15)
}

/// One question about a DSP and its answer (`remote_dsp_capability`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DspCapability {
    /// The DSP, such as [`CDSP_DOMAIN_ID`].
    pub domain: u32,
    /// One of [`attribute`].
    pub attribute_id: u32,
    /// The answer.
    pub capability: u32,
}

/// Asks for unsigned modules, before the session's first handle is opened
/// (`remote_rpc_control_unsigned_module`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsignedModule {
    /// Effective domain of the session, -1: all.
    pub domain: c_int,
    /// 1 or 0.
    pub enable: c_int,
}

/// Priority and stack of the thread that serves calls (`remote_rpc_thread_params`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadParams {
    /// Effective domain of the session, -1: all.
    pub domain: c_int,
    /// 1 (most urgent) to 255, -1: default.
    pub prio: c_int,
    /// Bytes, -1: default.
    pub stack_size: c_int,
}

/// Closes a session's handles (`remote_rpc_session_close`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionClose {
    /// Effective domain of the session, -1: all.
    pub domain: c_int,
}

/// Requested latency (`remote_rpc_control_latency`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlLatency {
    /// [`RPC_PM_QOS`], [`RPC_POLL_QOS`] or 0.
    pub enable: u32,
    /// Microseconds.
    pub latency: u32,
}

/// Asks for one more process on the DSP, with a separate address space
/// (`remote_rpc_reserve_new_session`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReserveNewSession {
    /// In: [`Domain::name`].
    pub domain_name: *const c_char,
    /// In: its bytes, without the terminator.
    pub domain_name_len: u32,
    /// In: any name.
    pub session_name: *const c_char,
    /// In: its bytes, without the terminator.
    pub session_name_len: u32,
    /// Out: the domain's number in later calls that concern the session.
    pub effective_domain_id: u32,
    /// Out: number of the session, from 1.
    pub session_id: u32,
}

/// Asks for the URI that opens a module in a session (`remote_rpc_get_uri`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GetUri {
    /// In: [`Domain::name`].
    pub domain_name: *const c_char,
    /// In: its bytes, without the terminator.
    pub domain_name_len: u32,
    /// In: number of the session.
    pub session_id: u32,
    /// In: URI without domain and session.
    pub module_uri: *const c_char,
    /// In: its bytes, without the terminator.
    pub module_uri_len: u32,
    /// Out: zero-terminated, at most `uri_len` bytes.
    pub uri: *mut c_char,
    /// In: bytes at `uri`.
    pub uri_len: u32,
}

/// Returns the URI of this project's DSP library for architecture `arch` in session `session` (0:
/// the default one) of a compute DSP.
#[must_use]
pub fn skel_uri(arch: u32, domain: Domain, session: u32) -> String {
    library_uri(&format!("v{arch}"), domain, session)
}

/// As [`skel_uri`], for V73's library whose floats are qfloat.
#[must_use]
pub fn qfloat_uri(domain: Domain, session: u32) -> String {
    library_uri("v73q", domain, session)
}

fn library_uri(library: &str, domain: Domain, session: u32) -> String {
    let domain = domain.name().to_string_lossy();
    let mut uri = format!(
        "file:///libggml_rust_npu_skel_{library}.so?ggml_rust_npu_skel_handle_invoke&_modver=1.0{DOMAIN_URI}{domain}"
    );
    if session > 0 {
        uri.push_str(SESSION_URI);
        uri.push_str(&session.to_string());
    }
    uri
}

#[cfg(target_pointer_width = "64")]
mod abi {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// Fails the build when the compiler lays a struct out differently from the vendor's C
    /// compiler.
    macro_rules! assert_abi {
        ($name:ident: $size:literal { $($field:ident @ $offset:literal),* $(,)? }) => {
            const _: () = assert!(size_of::<$name>() == $size);
            $(const _: () = assert!(offset_of!($name, $field) == $offset);)*
        };
    }

    assert_abi!(RemoteArg: 16 { pv @ 0, len @ 8 });
    assert_abi!(DspCapability: 12 { domain @ 0, attribute_id @ 4, capability @ 8 });
    assert_abi!(UnsignedModule: 8 { domain @ 0, enable @ 4 });
    assert_abi!(ThreadParams: 12 { domain @ 0, prio @ 4, stack_size @ 8 });
    assert_abi!(SessionClose: 4 { domain @ 0 });
    assert_abi!(ControlLatency: 8 { enable @ 0, latency @ 4 });
    assert_abi!(ReserveNewSession: 40 {
        domain_name @ 0, domain_name_len @ 8, session_name @ 16, session_name_len @ 24, effective_domain_id @ 28,
        session_id @ 32,
    });
    assert_abi!(GetUri: 48 {
        domain_name @ 0, domain_name_len @ 8, session_id @ 12, module_uri @ 16, module_uri_len @ 24, uri @ 32,
        uri_len @ 40,
    });
}
