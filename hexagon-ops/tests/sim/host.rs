//! A host that knows FastRPC only through its C functions.
#![expect(unsafe_code, reason = "C functions are called here")]

use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hexagon_ops::ffi::{
    Api, CDSP_DOMAIN_ID, DSPRPC_CONTROL_UNSIGNED_MODULE, DSPRPC_GET_DSP_INFO, Domain,
    DspCapability, FASTRPC_MAP_FD_DELAYED, FASTRPC_THREAD_PARAMS, Handle, RPCMEM_DEFAULT_FLAGS,
    RPCMEM_HEAP_ID_SYSTEM, RemoteArg, Scalars, ThreadParams, UnsignedModule, skel_uri,
};
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::sim::{self, HostCache, Machine, Options};
use hexagon_ops::wire::{
    COLLECTED, COMPLETED, Command, Completion, FENCE, Info, MAGIC, METHOD_SERVE, METHOD_START, Map,
    PUBLISHED, RingHeader, RingLayout, STACK_BYTES, STATE, Serve, Start, TAKEN, VERSION, WISH,
};

pub const SLOTS: u32 = 16;
/// A time that is long enough for a debug build on a busy machine, and short enough for a test.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn start(options: Options) -> Machine {
    sim::start(options).unwrap()
}

pub fn session_control<T>(api: &Api, request: u32, data: &mut T) -> c_int {
    let bytes = u32::try_from(size_of::<T>()).unwrap();
    // SAFETY: the struct has the size that is passed.
    unsafe { (api.remote_session_control)(request, std::ptr::from_mut(data).cast(), bytes) }
}

pub fn allow_unsigned(api: &Api, domain: c_int) -> c_int {
    let mut ask = UnsignedModule { domain, enable: 1 };
    session_control(api, DSPRPC_CONTROL_UNSIGNED_MODULE, &mut ask)
}

pub fn ask_for_stack(api: &Api, domain: c_int, stack_size: c_int) -> c_int {
    let mut ask = ThreadParams {
        domain,
        prio: -1,
        stack_size,
    };
    session_control(api, FASTRPC_THREAD_PARAMS, &mut ask)
}

pub fn capability(api: &Api, attribute_id: u32) -> (c_int, u32) {
    let mut ask = DspCapability {
        domain: CDSP_DOMAIN_ID.cast_unsigned(),
        attribute_id,
        capability: 0,
    };
    let bytes = u32::try_from(size_of::<DspCapability>()).unwrap();
    let data = std::ptr::from_mut(&mut ask).cast();
    // SAFETY: the struct has the size that is passed.
    let code = unsafe { (api.remote_handle_control)(DSPRPC_GET_DSP_INFO, data, bytes) };
    (code, ask.capability)
}

pub fn open(api: &Api, uri: &str) -> Result<Handle, c_int> {
    let uri = CString::new(uri).unwrap();
    let mut handle = 0;
    // SAFETY: the URI is a C string, and the handle's address is valid.
    let code = unsafe { (api.remote_handle64_open)(uri.as_ptr(), &raw mut handle) };
    if code == 0 { Ok(handle) } else { Err(code) }
}

pub fn close(api: &Api, handle: Handle) -> c_int {
    // SAFETY: takes no address.
    unsafe { (api.remote_handle64_close)(handle) }
}

/// Calls a method with at most one buffer each way.
pub fn invoke(api: &Api, handle: Handle, method: u32, input: &[u8], output: &mut [u8]) -> c_int {
    let mut args = Vec::new();
    if !input.is_empty() {
        args.push(RemoteArg {
            pv: input.as_ptr().cast_mut().cast(),
            len: input.len(),
        });
    }
    if !output.is_empty() {
        args.push(RemoteArg {
            pv: output.as_mut_ptr().cast(),
            len: output.len(),
        });
    }
    let scalars = Scalars::new(
        method,
        u8::from(!input.is_empty()),
        u8::from(!output.is_empty()),
    );
    // SAFETY: the array has the number of arguments in the scalars, and each is a live buffer.
    unsafe { (api.remote_handle64_invoke)(handle, scalars.0, args.as_mut_ptr()) }
}

pub fn serve(api: &Api, handle: Handle, idle_us: u32) -> c_int {
    let serve = Serve {
        idle_us,
        reserved: 0,
    };
    invoke(
        api,
        handle,
        METHOD_SERVE,
        bytemuck::bytes_of(&serve),
        &mut [],
    )
}

/// Shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub base: *mut u8,
    pub bytes: usize,
    pub fd: c_int,
}

// SAFETY: the tests use it from one thread at a time.
unsafe impl Send for Memory {}

/// Allocates whole pages.
pub fn alloc(api: &Api, bytes: usize) -> Option<Memory> {
    let bytes = bytes.next_multiple_of(4096);
    let size = c_int::try_from(bytes).unwrap();
    // SAFETY: takes no address.
    let base = unsafe { (api.rpcmem_alloc)(RPCMEM_HEAP_ID_SYSTEM, RPCMEM_DEFAULT_FLAGS, size) };
    if base.is_null() {
        return None;
    }
    // SAFETY: the allocator returned this address.
    let fd = unsafe { (api.rpcmem_to_fd)(base) };
    Some(Memory {
        base: base.cast(),
        bytes,
        fd,
    })
}

pub fn alloc_exactly(api: &Api, bytes: usize) -> *mut c_void {
    // SAFETY: takes no address.
    unsafe { (api.rpcmem_alloc2.unwrap())(RPCMEM_HEAP_ID_SYSTEM, RPCMEM_DEFAULT_FLAGS, bytes) }
}

pub fn init_rpcmem(api: &Api) {
    // SAFETY: takes no address.
    unsafe { (api.rpcmem_init.unwrap())() };
}

pub fn free(api: &Api, address: *mut c_void) {
    // SAFETY: nothing uses the memory afterwards.
    unsafe { (api.rpcmem_free)(address) };
}

pub fn announce(api: &Api, domain: c_int, memory: Memory, flags: c_int) -> c_int {
    let Memory { fd, bytes, .. } = memory;
    // SAFETY: the address is not used.
    unsafe { (api.fastrpc_mmap)(domain, fd, null_mut(), 0, bytes, flags) }
}

pub fn retract(api: &Api, domain: c_int, memory: Memory) -> c_int {
    // SAFETY: the address is not used.
    unsafe { (api.fastrpc_munmap)(domain, memory.fd, null_mut(), memory.bytes) }
}

impl Memory {
    pub fn put<T: bytemuck::Pod>(self, offset: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: in bounds.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: in bounds; the DSP does not use it at the same time.
        unsafe { at.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub fn get<T: bytemuck::Pod>(self, offset: usize, count: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: in bounds.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: in bounds; the DSP does not write it at the same time.
        unsafe { at.copy_to(bytes.as_mut_ptr(), bytes.len()) };
        values
    }

    pub fn at(self, offset: usize) -> *const u8 {
        assert!(offset <= self.bytes);
        // SAFETY: in bounds.
        unsafe { self.base.add(offset) }
    }
}

/// A session: handle, ring, and buffers.
pub struct Session {
    pub api: Api,
    pub handle: Handle,
    pub domain: c_int,
    pub ring: Memory,
    pub shared: Arc<Shared>,
    pub layout: RingLayout,
    pub cache: HostCache,
    pub sequence: u64,
    buffers: u32,
}

impl Session {
    /// A session on the default process.
    pub fn new(machine: &Machine, arch: u32) -> Self {
        Self::open(machine, &skel_uri(arch, Domain::Cdsp, 0), CDSP_DOMAIN_ID)
    }

    pub fn open(machine: &Machine, uri: &str, domain: c_int) -> Self {
        let api = machine.api();
        assert_eq!(allow_unsigned(&api, domain), 0);
        assert_eq!(ask_for_stack(&api, domain, STACK_BYTES.cast_signed()), 0);
        let handle = open(&api, uri).unwrap();
        let layout = RingLayout::new(SLOTS).unwrap();
        let ring = alloc(&api, layout.bytes()).unwrap();
        assert_eq!(announce(&api, domain, ring, FASTRPC_MAP_FD_DELAYED), 0);
        // SAFETY: the memory outlives the session, and is used by words only.
        let shared = unsafe { Shared::new(ring.base, ring.bytes) }.unwrap();
        shared.write(
            0,
            &RingHeader {
                magic: MAGIC,
                version: VERSION,
                slots: SLOTS,
                reserved: 0,
            },
        );
        for word in [PUBLISHED, TAKEN, COMPLETED, COLLECTED, STATE, WISH] {
            shared.store(word, 0);
        }
        Self {
            api,
            handle,
            domain,
            ring,
            shared: Arc::new(shared),
            layout,
            cache: machine.host_cache(),
            sequence: 0,
            buffers: 0,
        }
    }

    pub fn start(&self) -> Result<Info, c_int> {
        let start = Start {
            version: VERSION,
            fd: self.ring.fd,
            bytes: u32::try_from(self.ring.bytes).unwrap(),
            threads: 2,
            power: 0,
            matrix: 1,
        };
        let mut output = [0; size_of::<Info>()];
        let code = invoke(
            &self.api,
            self.handle,
            METHOD_START,
            bytemuck::bytes_of(&start),
            &mut output,
        );
        if code == 0 {
            Ok(bytemuck::pod_read_unaligned(&output))
        } else {
            Err(code)
        }
    }

    pub fn submit(&mut self, commands: &[Command]) {
        self.sequence += 1;
        let mut published = self.shared.load(PUBLISHED);
        let last = commands.len() - 1;
        for (i, command) in commands.iter().enumerate() {
            let command = Command {
                sequence: self.sequence,
                flags: if i == last { FENCE } else { 0 },
                ..*command
            };
            self.shared.write(self.layout.command(published), &command);
            published = published.wrapping_add(1);
        }
        self.shared.store(PUBLISHED, published);
    }

    pub fn collect(&self) -> Option<Completion> {
        let collected = self.shared.load(COLLECTED);
        if self.shared.load(COMPLETED) == collected {
            return None;
        }
        let completion = self.shared.read(self.layout.completion(collected));
        self.shared.store(COLLECTED, collected.wrapping_add(1));
        Some(completion)
    }

    /// Submits commands, serves the ring on this thread, and collects the completion.
    pub fn run(&mut self, commands: &[Command]) -> Completion {
        self.submit(commands);
        assert_eq!(serve(&self.api, self.handle, 0), 0);
        let completion = self.collect().unwrap();
        assert_eq!(completion.sequence, self.sequence);
        completion
    }

    /// Announced memory and the command that maps it.
    pub fn memory(&mut self, bytes: usize) -> (Memory, u32, Command) {
        let memory = alloc(&self.api, bytes).unwrap();
        assert_eq!(
            announce(&self.api, self.domain, memory, FASTRPC_MAP_FD_DELAYED),
            0
        );
        let buffer = self.buffers;
        self.buffers += 1;
        let map = Map {
            buffer,
            fd: memory.fd,
            bytes: memory.bytes as u64,
        };
        (memory, buffer, Command::new(0, &map))
    }

    /// Mapped memory.
    pub fn buffer(&mut self, bytes: usize) -> (Memory, u32) {
        let (memory, buffer, map) = self.memory(bytes);
        let completion = self.run(&[map]);
        assert_eq!(completion.status, 0);
        (memory, buffer)
    }
}

/// Waits until `done` returns a value, and fails after a while.
pub fn wait_for<T>(mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "nothing happened");
        std::thread::sleep(Duration::from_micros(50));
    }
}
