//! Processes on the DSP and open handles: the order in which calls are allowed, and the modules,
//! calls and mappings of each.

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::dsp::{Closing, Dsp};
use super::rpcmem::{Allocation, is_whole_pages};
use super::{MachineState, MatrixUnit, Options, lock, vendor_error};
use crate::ffi::{
    DOMAIN_URI, Domain, FASTRPC_MAP_FD, FASTRPC_MAP_FD_DELAYED, Handle, NUM_SESSIONS, SESSION_URI,
    code,
};
use crate::hmx::{Form, Hmx};
use crate::layout::{F16_TILE_BYTES, Tile};
use crate::rt::invoke::Call;
use crate::serve::{self, Server, Units};
use crate::wire::{
    ERROR_CALL, ERROR_LATER, ERROR_STACK, ERROR_UNITS, METHOD_SERVE, METHOD_START,
    STACK_NEEDED_BYTES, STATE,
};

/// Factor of the session's number in an effective domain: domain + factor · session.
///
/// SOURCE: qualcomm/fastrpc inc/fastrpc_common.h (`NUM_DOMAINS`). A library that knows more DSPs
/// counts more.
const NUM_DOMAINS: c_int = 8;

/// Stack of a thread that serves calls, unless another size is requested.
///
/// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c (`DEFAULT_UTHREAD_STACK_SIZE`).
const DEFAULT_STACK_BYTES: c_int = 16 << 10;

/// Longest wait of a call for VTCM that another one has, as in the library for the DSP
/// (`skel/src/session.rs`).
const SERVE_PATIENCE: Duration = Duration::from_millis(100);
const START_PATIENCE: Duration = Duration::from_secs(10);

/// Memory that the host has announced to a process.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) allocation: Arc<Allocation>,
    pub(super) bytes: usize,
    /// Counted against the address space from the start (`FASTRPC_MAP_FD`).
    pub(super) pinned: bool,
    /// Number of times that the DSP has it mapped.
    pub(super) mapped: usize,
    /// The DSP has unmapped it since the last call ended.
    pub(super) was_unmapped: bool,
}

/// The part of a process that changes.
#[derive(Debug, Default)]
pub(super) struct Inside {
    unsigned: bool,
    reserved: bool,
    /// Requested bytes of stack.
    stack_bytes: Option<c_int>,
    pub(super) lost: bool,
    handles: usize,
    pub(super) announced: HashMap<c_int, Announced>,
    /// Numbers in the library's list of mappings whose mapping the system has dropped.
    listed: HashSet<c_int>,
    /// Bytes of the window that unmapped memory still occupies.
    late_bytes: u64,
    used_bytes: u64,
}

/// A process on the DSP.
#[derive(Debug, Default)]
pub(super) struct Process(Mutex<Inside>);

impl Process {
    pub(super) fn inside(&self) -> MutexGuard<'_, Inside> {
        lock(&self.0)
    }
}

/// An open handle: one command loop.
#[derive(Debug)]
struct Open {
    process: Arc<Process>,
    closing: Arc<Closing>,
    server: Mutex<Server<Dsp, Vec<Tile>, Box<serve::State>>>,
    /// Calls of METHOD_SERVE that will still find VTCM in use.
    vtcm_taken: AtomicU64,
}

/// The processes and handles of a machine.
#[derive(Debug)]
pub(super) struct Sessions {
    /// A process for each session of each compute DSP.
    dsps: Vec<(Domain, [Arc<Process>; NUM_SESSIONS as usize])>,
    handles: Mutex<HashMap<Handle, Arc<Open>>>,
    next: Mutex<Handle>,
}

impl Sessions {
    /// Returns closed sessions of the compute DSPs.
    pub(super) fn new(domains: &[Domain]) -> Self {
        let dsps = domains.iter().map(|domain| (*domain, Default::default()));
        Self {
            dsps: dsps.collect(),
            handles: Mutex::default(),
            next: Mutex::default(),
        }
    }

    /// Returns all processes.
    fn processes(&self) -> impl Iterator<Item = &Arc<Process>> {
        self.dsps.iter().flat_map(|(_, processes)| processes)
    }

    /// Returns the processes of the DSP that `is_meant` accepts.
    fn dsp(&self, is_meant: impl Fn(Domain) -> bool) -> Option<&[Arc<Process>]> {
        let found = self.dsps.iter().find(|(domain, _)| is_meant(*domain));
        found.map(|(_, processes)| &processes[..])
    }

    /// Returns the number of domains that the library counts.
    fn num_domains(&self) -> c_int {
        let ids = self.dsps.iter().map(|(domain, _)| domain.id() + 1);
        ids.fold(NUM_DOMAINS, c_int::max)
    }

    /// Returns the process of an effective domain.
    fn process(&self, domain: c_int) -> Option<&Arc<Process>> {
        let num_domains = self.num_domains();
        let processes = self.dsp(|known| known.id() == domain % num_domains)?;
        processes.get(usize::try_from(domain / num_domains).ok()?)
    }

    /// Returns the open handles and announced mappings.
    pub(super) fn count(&self) -> (usize, usize) {
        let announced = |process: &Arc<Process>| process.inside().announced.len();
        (
            lock(&self.handles).len(),
            self.processes().map(announced).sum(),
        )
    }

    /// Implements `DSPRPC_CONTROL_UNSIGNED_MODULE`.
    ///
    /// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c (`set_unsigned_pd_attribute`): an open
    /// session keeps its kind.
    pub(super) fn allow_unsigned(&self, domain: c_int, enable: bool) -> Result<(), c_int> {
        let chosen: Vec<_> = if domain == -1 {
            self.processes().collect()
        } else {
            vec![self.process(domain).ok_or(code::EBADPARM)?]
        };
        for process in chosen {
            let mut inside = process.inside();
            if inside.handles > 0 && inside.unsigned != enable {
                vendor_error!("a session of the other kind is already open on domain {domain}");
                return Err(code::EALREADYLOADED);
            }
            inside.unsigned = enable;
        }
        Ok(())
    }

    /// Implements `FASTRPC_THREAD_PARAMS`.
    ///
    /// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c (`store_domain_thread_params`): 16 KiB to 8
    /// MiB.
    pub(super) fn set_stack(&self, domain: c_int, bytes: c_int) -> Result<(), c_int> {
        if bytes != -1 && !(DEFAULT_STACK_BYTES..=8 << 20).contains(&bytes) {
            return Err(code::EBADPARM);
        }
        let bytes = Some(bytes).filter(|bytes| *bytes != -1);
        if domain == -1 {
            for process in self.processes() {
                process.inside().stack_bytes = bytes;
            }
        } else {
            let process = self.process(domain).ok_or(code::EBADPARM)?;
            process.inside().stack_bytes = bytes;
        }
        Ok(())
    }

    /// Implements `FASTRPC_RESERVE_NEW_SESSION`; returns (effective domain, session).
    pub(super) fn reserve(&self, domain: Domain) -> Result<(u32, u32), c_int> {
        let processes = self.dsp(|known| known == domain).unwrap_or_default();
        for (session, process) in (0..NUM_SESSIONS).zip(processes).skip(1) {
            let mut inside = process.inside();
            if !inside.reserved {
                inside.reserved = true;
                let factor = self.num_domains().cast_unsigned();
                return Ok((domain.id().cast_unsigned() + factor * session, session));
            }
        }
        vendor_error!("all {NUM_SESSIONS} sessions are taken");
        Err(code::ENOSESSION)
    }

    /// Implements `remote_handle64_open`.
    pub(super) fn open(&self, state: &MachineState, uri: &str) -> Result<Handle, c_int> {
        let session = session_of(uri)?;
        let Some(processes) = self.dsp(|domain| is_in_uri(domain, uri)) else {
            vendor_error!("{uri}: this machine has no such compute DSP");
            return Err(code::EINVALIDDOMAIN);
        };
        let process = &processes[session];
        let mut inside = process.inside();
        if inside.lost {
            return Err(code::ECONNRESET);
        }
        let is_qfloat = check_module(state, uri, inside.unsigned)?;
        inside.handles += 1;
        drop(inside);
        let vtcm = vec![Tile::ZERO; state.options.vtcm_bytes / F16_TILE_BYTES];
        let closing = Arc::new(Closing::default());
        let platform = Dsp::new(state, process, &closing, is_qfloat);
        let units = Units {
            hmx: matrix_unit(&state.options, &vtcm),
            vtcm,
            threads: state.options.hvx_threads,
            arch: state.options.arch,
        };
        let open = Open {
            process: Arc::clone(process),
            closing,
            server: Mutex::new(Server::new(platform, units, Box::default())),
            vtcm_taken: AtomicU64::new(state.options.vtcm_taken),
        };
        let mut next = lock(&self.next);
        *next += 1;
        lock(&self.handles).insert(*next, Arc::new(open));
        Ok(*next)
    }

    /// Returns `true` if a handle is open.
    pub(super) fn is_open(&self, handle: Handle) -> bool {
        lock(&self.handles).contains_key(&handle)
    }

    /// Implements `remote_handle64_invoke`.
    pub(super) fn invoke(
        &self,
        state: &MachineState,
        handle: Handle,
        call: Option<Call<'_>>,
    ) -> Result<(), c_int> {
        let found = lock(&self.handles).get(&handle).map(Arc::clone);
        let open = found.ok_or(code::EINVHANDLE)?;
        let stack_bytes = {
            let inside = open.process.inside();
            if inside.lost {
                return Err(code::ECONNRESET);
            }
            inside.stack_bytes.unwrap_or(DEFAULT_STACK_BYTES)
        };
        let call = call.ok_or(code::EBADPARM)?;
        // The real library makes the same check, because its stack would overflow later.
        if call.method == METHOD_START && stack_bytes.cast_unsigned() < STACK_NEEDED_BYTES {
            vendor_error!("the DSP's threads have {stack_bytes} bytes of stack");
            return Err(ERROR_STACK);
        }
        // FastRPC runs each calling thread's calls on a separate DSP thread, but a handle's command
        // loop serves one at a time.
        let Ok(mut server) = open.server.try_lock() else {
            // The host repeats a call that was interrupted on its side; the first one is still
            // reading the ring.
            let is_served = call.method == METHOD_SERVE;
            return is_served.then_some(()).ok_or(ERROR_CALL);
        };
        let one_less = |count: u64| count.checked_sub(1);
        let (now, relaxed) = (&open.vtcm_taken, Ordering::Relaxed);
        if call.method == METHOD_SERVE && now.fetch_update(relaxed, relaxed, one_less).is_ok() {
            return Err(ERROR_LATER);
        }
        let _held = if state.options.shared_vtcm {
            let (patience, refusal) = match call.method {
                METHOD_SERVE => (SERVE_PATIENCE, ERROR_LATER),
                _ => (START_PATIENCE, ERROR_UNITS),
            };
            Some(state.vtcm.acquire(patience).ok_or(refusal)?)
        } else {
            None
        };
        if call.method == METHOD_START && state.options.matrix == MatrixUnit::Refused {
            // The real library tries to lock the unit, and goes on without it if that fails.
            server.units().hmx.leave_alone();
        }
        let is_serving = call.method == METHOD_SERVE;
        let result = catch_unwind(AssertUnwindSafe(|| server.invoke(call))).unwrap_or_else(|_| {
            open.process.inside().lost = true;
            Err(code::dsp(code::ECPUEXCEPTION))
        });
        if is_serving {
            (open.process.inside()).end_call(state.options.vanishing_maps);
        }
        result
    }

    /// Implements `remote_handle64_close`, which ends a running call.
    pub(super) fn close(&self, handle: Handle) -> Result<(), c_int> {
        let found = lock(&self.handles).remove(&handle);
        let open = found.ok_or(code::EINVHANDLE)?;
        open.closing.set();
        let mut server = lock(&open.server);
        let ring = server.platform().unmapped_ring();
        let state = || ring.as_ref().map(|ring| ring.load(STATE));
        let before = state();
        server.close();
        let mut inside = open.process.inside();
        if state() != before {
            vendor_error!("the DSP wrote to a ring that the host has unmapped");
            inside.lost = true;
        }
        inside.handles -= 1;
        let lost = inside.lost;
        if inside.handles == 0 {
            // Closing the last module ends the DSP's process, and with it its mappings.
            inside.announced.clear();
            inside.listed.clear();
            inside.late_bytes = 0;
            inside.used_bytes = 0;
            inside.lost = false;
        }
        if lost { Err(code::ECONNRESET) } else { Ok(()) }
    }

    /// Implements `FASTRPC_SESSION_CLOSE`.
    pub(super) fn close_session(&self, domain: c_int) -> Result<(), c_int> {
        let process = match domain {
            -1 => None,
            _ => Some(self.process(domain).ok_or(code::EBADPARM)?),
        };
        let handles: Vec<Handle> = lock(&self.handles)
            .iter()
            .filter(|(_, open)| process.is_none_or(|process| Arc::ptr_eq(process, &open.process)))
            .map(|(handle, _)| *handle)
            .collect();
        for handle in handles {
            // Another thread may have closed the handle at the same time, which does no harm.
            let _ = self.close(handle);
        }
        Ok(())
    }

    /// Ends all calls, because the machine is being dropped.
    pub(super) fn close_all(&self) {
        for open in lock(&self.handles).values() {
            open.closing.set();
        }
    }

    /// Implements `fastrpc_mmap`. It is an assumption that the session must be open: the library's
    /// behaviour before is not documented.
    pub(super) fn announce(
        &self,
        state: &MachineState,
        domain: c_int,
        fd: c_int,
        bytes: usize,
        flags: c_int,
    ) -> Result<(), c_int> {
        let process = self.process(domain).ok_or(code::EBADPARM)?;
        let pinned = match flags {
            FASTRPC_MAP_FD => true,
            FASTRPC_MAP_FD_DELAYED => false,
            _ => return Err(code::EBADPARM),
        };
        let allocation = state.memory.find(fd).ok_or(code::EBADFD)?;
        if !is_whole_pages(bytes) {
            vendor_error!("fastrpc_mmap: {bytes} bytes are not whole pages below 2 GiB");
            return Err(code::EBADPARM);
        }
        if bytes > allocation.bytes() {
            return Err(code::EBADSIZE);
        }
        let mut inside = process.inside();
        if inside.lost {
            return Err(code::ECONNRESET);
        }
        if inside.handles == 0 {
            return Err(code::EBADDOMAIN);
        }
        // SOURCE: qualcomm/fastrpc src/fastrpc_mem.c (`fastrpc_mmap_helper`): the library looks a
        // buffer up in its list by number.
        let is_same = |it: &Announced| Arc::ptr_eq(&it.allocation, &allocation);
        let known = inside.announced.get(&fd).map(is_same);
        if known == Some(true) || inside.listed.contains(&fd) {
            vendor_error!("fastrpc_mmap: fd {fd} is in the list of mappings");
            return Err(code::EALREADY);
        }
        if known == Some(false) {
            // SOURCE: Linux drivers/misc/fastrpc.c up to 5.18 (`fastrpc_map_find`): the kernel
            // compares only the number, so the DSP gets the memory that had this number before.
            // Libraries without a list do not notice.
            vendor_error!("fastrpc_mmap: fd {fd} is that of other memory, which stays mapped");
            return Ok(());
        }
        // SOURCE: qualcomm/fastrpc src/fastrpc_mem.c (`fastrpc_mmap_helper`): every error of the
        // kernel becomes AEE_EFAILED.
        let announced: u64 = inside.announced.values().map(|it| it.bytes as u64).sum();
        let announced = announced + inside.late_bytes;
        if announced + bytes as u64 > state.options.window_bytes {
            vendor_error!(
                "fastrpc_mmap: {bytes} bytes more than {announced} of {} do not fit",
                state.options.window_bytes
            );
            return Err(code::EFAILED);
        }
        if pinned && !inside.charge(bytes, state.options.address_bytes) {
            return Err(code::dsp(code::EMMAP));
        }
        inside.announced.insert(
            fd,
            Announced {
                allocation,
                bytes,
                pinned,
                mapped: 0,
                was_unmapped: false,
            },
        );
        Ok(())
    }

    /// Implements `fastrpc_munmap`. It is an assumption that it fails for memory that the DSP still
    /// uses.
    ///
    /// SOURCE: qualcomm/fastrpc src/fastrpc_mem.c: AEE_ENOSUCHMAP for memory that is not in the
    /// library's list; AEE_EUNSUPPORTED for memory that the kernel does not know, which stays in
    /// the list.
    pub(super) fn retract(
        &self,
        state: &MachineState,
        domain: c_int,
        fd: c_int,
        bytes: usize,
    ) -> Result<(), c_int> {
        let process = self.process(domain).ok_or(code::EBADPARM)?;
        let mut inside = process.inside();
        if inside.listed.contains(&fd) {
            return Err(code::EUNSUPPORTED);
        }
        let announced = inside.announced.get(&fd).ok_or(code::ENOSUCHMAP)?;
        if announced.bytes != bytes {
            vendor_error!("fastrpc_munmap: {bytes} bytes of {}", announced.bytes);
            return Err(code::EBADPARM);
        }
        if announced.mapped > 0 {
            vendor_error!("fastrpc_munmap: the DSP still has fd {fd} mapped");
            return Err(code::EBADPARM);
        }
        if announced.pinned {
            let bytes = announced.bytes;
            inside.discharge(bytes);
        }
        inside.announced.remove(&fd);
        if state.options.late_unmaps {
            inside.late_bytes += bytes as u64;
        }
        Ok(())
    }
}

impl Inside {
    /// Updates mappings as the system does after a call of METHOD_SERVE.
    ///
    /// SOURCE: Linux drivers/misc/fastrpc.c (`fastrpc_put_args`): mappings whose numbers the DSP
    /// lists are removed; qualcomm/fastrpc issue 137: the room of unmapped memory is free only
    /// later.
    fn end_call(&mut self, vanishing: bool) {
        self.late_bytes = 0;
        for (fd, announced) in &mut self.announced {
            let vanishes = std::mem::take(&mut announced.was_unmapped) && announced.mapped == 0;
            if vanishing && vanishes {
                self.listed.insert(*fd);
            }
        }
        self.announced.retain(|fd, _| !self.listed.contains(fd));
    }

    /// Reserves room in the address space. Returns `false` if there is not enough.
    pub(super) fn charge(&mut self, bytes: usize, most: u64) -> bool {
        let used = self.used_bytes.saturating_add(bytes as u64);
        let fits = used <= most;
        if fits {
            self.used_bytes = used;
        } else {
            vendor_error!(
                "{bytes} bytes more than {} of {most} do not fit",
                self.used_bytes
            );
        }
        fits
    }

    pub(super) fn discharge(&mut self, bytes: usize) {
        self.used_bytes = self.used_bytes.saturating_sub(bytes as u64);
    }
}

/// Returns the text after `key` in a URI, up to the next key.
fn part<'a>(uri: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = uri.split_once(key)?;
    rest.split('&').next()
}

/// Returns `true` if a URI names a DSP.
fn is_in_uri(domain: Domain, uri: &str) -> bool {
    let name = part(uri, DOMAIN_URI);
    name.is_some_and(|name| name.as_bytes() == domain.name().to_bytes())
}

/// Returns the session that a URI names.
fn session_of(uri: &str) -> Result<usize, c_int> {
    let Some(digits) = part(uri, SESSION_URI) else {
        return Ok(0);
    };
    let session: u32 = digits.parse().map_err(|_| code::EBADPARM)?;
    let known = usize::try_from(session).ok();
    known
        .filter(|_| session < NUM_SESSIONS)
        .ok_or(code::EBADPARM)
}

/// Returns the chip's matrix unit.
fn matrix_unit(options: &Options, vtcm: &[Tile]) -> Hmx {
    let unit = Hmx::of_form(Form::of_arch(options.arch), vtcm);
    match options.matrix {
        MatrixUnit::Works | MatrixUnit::Refused => unit,
        MatrixUnit::Wrong => unit.clipping(),
    }
}

/// Checks a module as the DSP's loader does. Returns `true` if it is the library in qfloat.
///
/// SOURCE: 0x80000406 for this kind of library in a signed process, chraac/llama.cpp issue 41;
/// 0x80000414 where firmware refuses unsigned processes, llama.cpp issues 18932 and 22352;
/// 0x80000442 for a missing symbol, qualcomm/fastrpc issue 379.
fn check_module(state: &MachineState, uri: &str, unsigned: bool) -> Result<bool, c_int> {
    let unloadable = code::dsp(code::EUNABLETOLOAD);
    if unsigned && !state.options.unsigned_modules {
        vendor_error!("{uri}: unsigned processes are not supported");
        return Err(code::dsp(code::EUNSUPPORTED));
    }
    if !unsigned {
        vendor_error!("{uri}: not signed, and the process is a signed one");
        return Err(unloadable);
    }
    let file = uri.strip_prefix("file:///").unwrap_or_default();
    let (library, rest) = file.split_once('?').unwrap_or_default();
    let arch = state.options.arch;
    let is_second = arch == 73 && library == "libggml_rust_npu_skel_v73q.so";
    if !is_second && library != format!("libggml_rust_npu_skel_v{arch}.so") {
        vendor_error!("{uri}: cannot be loaded on v{}", state.options.arch);
        return Err(unloadable);
    }
    if rest.split('&').next() != Some("ggml_rust_npu_skel_handle_invoke") {
        vendor_error!("{uri}: no such symbol in {library}");
        return Err(code::dsp(code::ENOSUCHSYMBOL));
    }
    Ok(is_second || arch < 73)
}
