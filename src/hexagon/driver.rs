//! libcdsprpc: sessions with a DSP, shared memory and calls as Rust values. Every return code is
//! checked here, and nowhere else.
//!
//! Ownership: a [`Connection`], and all memory made for it, keep the library open. Memory that both
//! processors use is of two kinds: a [`RingMemory`] is words that both touch at any time,
//! atomically; a [`SharedMemory`] is bytes that the CPU touches only while it holds the
//! connection's one [`Quiet`], that is, while the DSP has nothing to do.
#![expect(unsafe_code, reason = "calls into the vendor's library")]

use std::ffi::{CString, c_int, c_void};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use hexagon_ops::ffi::Domain;
use hexagon_ops::ffi::{
    self, Api, ControlLatency, DspCapability, Handle, RemoteArg, ReserveNewSession, Scalars,
    ThreadParams, UnsignedModule, code,
};
use hexagon_ops::sim;
use hexagon_ops::wire::{self, Info, Power, Serve, Start};

pub use self::memory::{RingMemory, SharedMemory};
pub use self::place::{device_node, has_node_of, offer_own_folder};
use crate::driver::loader;
use crate::error::{Error, Result};

mod memory;
mod place;
pub mod ring;
mod traced;

/// Owner of the functions in the table.
#[derive(Debug)]
enum Provider {
    Library(
        #[expect(dead_code, reason = "held for its Drop: the functions live in it")]
        libloading::Library,
    ),
    StandIn(sim::Machine),
}

/// The library's functions, loaded or simulated.
#[derive(Debug)]
pub struct FastRpc {
    api: Api,
    provider: Provider,
    /// State of its allocator.
    heap: Mutex<memory::Heap>,
}

fn check(call: &'static str, code: c_int, what: impl FnOnce() -> String) -> Result<()> {
    if code == code::SUCCESS {
        return Ok(());
    }
    Err(Error::FastRpc {
        call,
        reason: ffi::describe(code).to_string(),
        what: what(),
    })
}

fn size<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}

impl FastRpc {
    /// Loads the vendor's library: `path`, or the first of its names that the system's loader
    /// finds.
    ///
    /// # Errors
    /// `Library` if it, or one of its functions, is not there.
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>> {
        match path {
            Some(path) => Self::load_first(&[path]),
            None => Self::load_first(place::LIBRARIES),
        }
    }

    /// Loads the first library of `names` that can be opened.
    fn load_first(names: &[impl AsRef<Path>]) -> Result<Arc<Self>> {
        let mut reasons = Vec::new();
        for name in names.iter().map(AsRef::as_ref) {
            match loader::open(name) {
                Ok(library) => return Self::from_library(library, name),
                Err(Error::Library { reason, .. }) => reasons.push(reason),
                Err(error) => return Err(error),
            }
        }
        Err(Error::Library {
            library: names
                .first()
                .map_or_else(PathBuf::new, |name| name.as_ref().into()),
            reason: reasons.join("; "),
        })
    }

    fn from_library(library: libloading::Library, name: &Path) -> Result<Arc<Self>> {
        // SAFETY: a symbol of libcdsprpc has the type that its name has in the vendor's headers
        // (SOURCE: `ffi`), and stays valid because `library` is stored together with the table.
        let api = unsafe { Api::from_symbols(|symbol| loader::address(&library, name, symbol)) }?;
        Ok(Arc::new(Self {
            api: traced::traced(api),
            provider: Provider::Library(library),
            heap: Mutex::default(),
        }))
    }

    /// Starts the built-in stand-in.
    ///
    /// # Errors
    /// `StandIn` if too many of them run in this process.
    pub fn simulate(options: sim::Options) -> Result<Arc<Self>> {
        let machine = sim::start(options).map_err(|error| Error::StandIn {
            library: "libcdsprpc",
            reason: error.to_string(),
        })?;
        Ok(Arc::new(Self {
            api: traced::traced(machine.api()),
            provider: Provider::StandIn(machine),
            heap: Mutex::default(),
        }))
    }

    /// Returns the stand-in, if this is one.
    #[must_use]
    pub fn stand_in(&self) -> Option<&sim::Machine> {
        match &self.provider {
            Provider::StandIn(machine) => Some(machine),
            Provider::Library(_) => None,
        }
    }

    /// Returns an attribute of a compute DSP; [`ffi::attribute`] has their numbers.
    ///
    /// # Errors
    /// `FastRpc`.
    pub fn attribute(&self, domain: Domain, attribute_id: u32) -> Result<u32> {
        let mut question = DspCapability {
            domain: domain.id().cast_unsigned(),
            attribute_id,
            capability: 0,
        };
        // SAFETY: this request takes this struct, and the size given is the struct's.
        let code = unsafe {
            (self.api.remote_handle_control)(
                ffi::DSPRPC_GET_DSP_INFO,
                (&raw mut question).cast(),
                size::<DspCapability>(),
            )
        };
        check("remote_handle_control", code, || {
            format!("attribute {attribute_id} of the DSP")
        })?;
        Ok(question.capability)
    }

    /// Adds to the error of a library that did not load that the firmware refuses libraries without
    /// a signature, if it does.
    fn with_firmware_s_no(&self, dsp: Domain, error: Error) -> Error {
        let refuses = self
            .attribute(dsp, ffi::attribute::UNSIGNED_PD_SUPPORT)
            .is_ok_and(|answer| answer == 0);
        match error {
            Error::FastRpc { call, reason, what } if refuses => Error::FastRpc {
                call,
                reason: format!("{reason}; its firmware says that it runs signed modules only"),
                what,
            },
            error => error,
        }
    }

    /// Reserves session `number` (from 1) in addition to the default one of a DSP. Returns its
    /// effective domain and its own number.
    fn reserve(&self, domain: Domain, number: u32) -> Result<(c_int, u32)> {
        // The number contains no NUL, so this cannot fail. The library ignores the length: it
        // copies up to the NUL, but at most one byte less than the length.
        let name = CString::new(format!("ggml-rust-npu-{number}")).unwrap_or_default();
        let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let mut request = ReserveNewSession {
            domain_name: domain.name().as_ptr(),
            domain_name_len: length(domain.name().count_bytes()),
            session_name: name.as_ptr(),
            session_name_len: length(name.count_bytes() + 1),
            effective_domain_id: 0,
            session_id: 0,
        };
        // SAFETY: this request takes this struct; the names live until after the call.
        let code = unsafe {
            (self.api.remote_session_control)(
                ffi::FASTRPC_RESERVE_NEW_SESSION,
                (&raw mut request).cast(),
                size::<ReserveNewSession>(),
            )
        };
        check("remote_session_control", code, || {
            format!("session {number}")
        })?;
        let domain = c_int::try_from(request.effective_domain_id).unwrap_or(c_int::MAX);
        Ok((domain, request.session_id))
    }

    /// Requests threads with enough stack for our library. Libraries that refuse the request may
    /// give enough by default: the DSP's library checks its stack, and refuses to start if it is
    /// too small.
    fn ask_for_stack(&self, domain: c_int) {
        let mut request = ThreadParams {
            domain,
            prio: -1,
            stack_size: wire::STACK_BYTES.cast_signed(),
        };
        // SAFETY: this request takes this struct, and the size given is the struct's.
        let code = unsafe {
            (self.api.remote_session_control)(
                ffi::FASTRPC_THREAD_PARAMS,
                (&raw mut request).cast(),
                size::<ThreadParams>(),
            )
        };
        let what = || format!("stacks of {} bytes", wire::STACK_BYTES);
        if let Err(error) = check("remote_session_control", code, what) {
            log::warn!("{error}; going on with the default");
        }
    }

    /// Makes the CPU's writes visible to the DSP (`clean`), or makes the CPU read bytes again that
    /// the DSP may have written. `ranges` are offsets from `base`.
    fn maintain(&self, base: *const u8, ranges: impl Iterator<Item = Range<usize>>, clean: bool) {
        let places = ranges.map(|range| (base.wrapping_add(range.start), range.len()));
        let Some(machine) = self.stand_in() else {
            return memory::maintain_cache(places, clean);
        };
        for (start, bytes) in places {
            if clean {
                machine.host_cache().clean(start, bytes);
            } else {
                machine.host_cache().invalidate(start, bytes);
            }
        }
    }
}

/// Instructions for floats that the DSP's library is built with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Floats {
    /// The instructions of the architecture's usual library.
    Usual,
    /// Qfloat on V73, whose usual library has IEEE instructions, which are optional there.
    Qfloat,
}

/// Longest time in which a call should wake the CPU up, in microseconds.
///
/// SOURCE: the recommended value of qualcomm/fastrpc inc/remote.h, `remote_rpc_control_latency`.
const CALL_LATENCY_US: u32 = 100;

/// Identities of connections: never reused.
static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(1);

/// Our library in a process on the DSP.
#[derive(Debug)]
pub struct Connection {
    rpc: Arc<FastRpc>,
    handle: Handle,
    domain: c_int,
    identity: u64,
    /// `false` when the library on the DSP was closed, and the system has dropped its mappings.
    is_open: Arc<AtomicBool>,
}

/// The right to touch a connection's shared memory. There is one for each connection; a thread that
/// has work for the DSP holds it until the DSP is done.
#[derive(Debug)]
pub struct Quiet {
    identity: u64,
}

impl Connection {
    /// Loads our library for `arch` on the DSP.
    ///
    /// - `dsp`: the compute DSP
    /// - `session`: 0 for the process that all programs get; 1 and more for further ones with their
    ///   own address space
    /// - `floats`: the library to load, of V73's two
    ///
    /// # Errors
    /// `FastRpc`.
    pub fn open(
        rpc: &Arc<FastRpc>,
        arch: u32,
        dsp: Domain,
        session: u32,
        floats: Floats,
    ) -> Result<(Self, Quiet)> {
        let (domain, session) = match session {
            0 => (dsp.id(), 0),
            number => rpc.reserve(dsp, number)?,
        };
        rpc.ask_for_stack(domain);
        let mut request = UnsignedModule { domain, enable: 1 };
        // SAFETY: this request takes this struct, and the size given is the struct's.
        let code = unsafe {
            (rpc.api.remote_session_control)(
                ffi::DSPRPC_CONTROL_UNSIGNED_MODULE,
                (&raw mut request).cast(),
                size::<UnsignedModule>(),
            )
        };
        check("remote_session_control", code, || "unsigned modules".into())?;
        let uri = match floats {
            Floats::Usual => ffi::skel_uri(arch, dsp, session),
            Floats::Qfloat => ffi::qfloat_uri(dsp, session),
        };
        let c_uri = CString::new(uri.as_str()).unwrap_or_default();
        let mut handle: Handle = 0;
        // SAFETY: a string that ends in NUL, and a valid place for the handle.
        let code = unsafe { (rpc.api.remote_handle64_open)(c_uri.as_ptr(), &raw mut handle) };
        check("remote_handle64_open", code, || uri)
            .map_err(|error| rpc.with_firmware_s_no(dsp, error))?;
        let identity = NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed);
        let connection = Self {
            rpc: Arc::clone(rpc),
            handle,
            domain,
            identity,
            is_open: Arc::new(AtomicBool::new(true)),
        };
        Ok((connection, Quiet { identity }))
    }

    /// Returns the vendor's library.
    #[must_use]
    pub fn rpc(&self) -> &Arc<FastRpc> {
        &self.rpc
    }

    /// Hands over the ring.
    ///
    /// - `threads`: most threads that compute; 0 for one on each vector unit
    /// - `power`: the power that the DSP's library votes for
    /// - `matrix`: `false` to leave the matrix unit alone
    ///
    /// # Errors
    /// `FastRpc`.
    pub fn start(
        &self,
        ring: &RingMemory,
        threads: u32,
        power: Power,
        matrix: bool,
    ) -> Result<Info> {
        if power != Power::Saver {
            self.ask_for_short_calls();
        }
        let start = Start {
            version: wire::VERSION,
            fd: ring.fd(),
            bytes: u32::try_from(ring.mapped_bytes()).unwrap_or(u32::MAX),
            threads,
            power: power as u32,
            matrix: u32::from(matrix),
        };
        let mut info: Info = bytemuck::Zeroable::zeroed();
        self.invoke(
            wire::METHOD_START,
            bytemuck::bytes_of(&start),
            bytemuck::bytes_of_mut(&mut info),
            "the start of the DSP's library",
        )?;
        Ok(info)
    }

    /// Keeps the CPU that makes calls out of deep sleep while they are frequent. Android's library
    /// does so; qualcomm/fastrpc accepts the request and ignores it.
    fn ask_for_short_calls(&self) {
        let mut request = ControlLatency {
            enable: ffi::RPC_PM_QOS,
            latency: CALL_LATENCY_US,
        };
        // SAFETY: this request takes this struct, and the size given is the struct's.
        let code = unsafe {
            (self.rpc.api.remote_handle64_control)(
                self.handle,
                ffi::DSPRPC_CONTROL_LATENCY,
                (&raw mut request).cast(),
                size::<ControlLatency>(),
            )
        };
        if let Err(error) = check("remote_handle64_control", code, || "short calls".into()) {
            log::debug!("{error}; going on without");
        }
    }

    /// Lets the DSP read the ring until it has been empty for `idle`.
    ///
    /// # Errors
    /// `FastRpc` if the DSP is lost, or if the call was interrupted.
    pub fn serve(&self, idle: Duration) -> std::result::Result<Served, Interruption> {
        let serve = Serve {
            idle_us: u32::try_from(idle.as_micros()).unwrap_or(u32::MAX),
            reserved: 0,
        };
        let code = self.call(wire::METHOD_SERVE, bytemuck::bytes_of(&serve), &mut []);
        if code == code::SUCCESS {
            return Ok(Served::Parked);
        }
        if [code, code.wrapping_sub(code::dsp(0))].contains(&wire::ERROR_LATER) {
            return Ok(Served::Later);
        }
        Err(Interruption {
            error: described(code, "the serving call"),
            is_signal: [os::process::INTERRUPTED, code::EINTERRUPTED, code::ERPC].contains(&code),
        })
    }

    fn invoke(&self, method: u32, input: &[u8], output: &mut [u8], what: &str) -> Result<()> {
        match self.call(method, input, output) {
            code::SUCCESS => Ok(()),
            code => Err(described(code, what)),
        }
    }

    fn call(&self, method: u32, input: &[u8], output: &mut [u8]) -> c_int {
        let mut args = [
            RemoteArg {
                pv: input.as_ptr().cast_mut().cast::<c_void>(),
                len: input.len(),
            },
            RemoteArg {
                pv: output.as_mut_ptr().cast::<c_void>(),
                len: output.len(),
            },
        ];
        let scalars = Scalars::new(method, 1, u8::from(!output.is_empty()));
        // SAFETY: the handle is live. The array has the number of buffers in the scalars; the first
        // is only read, and all live during the call.
        unsafe { (self.rpc.api.remote_handle64_invoke)(self.handle, scalars.0, args.as_mut_ptr()) }
    }
}

/// The end of a serving call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The ring was empty for a while, or another call reads it.
    Parked,
    /// Another program holds VTCM: the call is to be made again.
    Later,
}

/// Why a serving call failed.
#[derive(Debug)]
pub struct Interruption {
    /// The call's error.
    pub error: Error,
    /// The end of the call may be due to a signal, after which the DSP is still reading the ring.
    pub is_signal: bool,
}

/// Returns the error of a call of our library; its own codes come with or without the DSP's offset.
fn described(code: c_int, what: &str) -> Error {
    let ours = [code, code.wrapping_sub(code::dsp(0))];
    let ours = ours.into_iter().find_map(wire::describe_error);
    Error::FastRpc {
        call: "remote_handle64_invoke",
        reason: ours.map_or_else(
            || ffi::describe(code).to_string(),
            |reason| format!("{reason} ({code:#x})"),
        ),
        what: what.into(),
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: a live handle, which nothing uses after this.
        let code = unsafe { (self.rpc.api.remote_handle64_close)(self.handle) };
        if let Err(error) = check("remote_handle64_close", code, || "the DSP's library".into()) {
            log::warn!("{error}");
        }
        self.is_open.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_also_found_by_its_versioned_name() {
        assert_eq!(place::LIBRARIES[..2], ["libcdsprpc.so", "libcdsprpc.so.1"]);
        // The first library does not exist; the second one does, but lacks the functions.
        let error = FastRpc::load_first(&["libcdsprpc-none.so", "libc.so.6"]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("rpcmem_alloc") && text.contains("libc.so.6"),
            "{text}"
        );
        let error = FastRpc::load_first(&["libcdsprpc-none.so", "libcdsprpc-none.so.1"]);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("none.so.1"), "{text}");
    }
}
