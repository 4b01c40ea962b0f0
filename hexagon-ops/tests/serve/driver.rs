//! The host's side of the ring, and the system around the command loop, over memory of this
//! process.
#![expect(unsafe_code, reason = "what is mapped is reached by address")]

use std::cell::{RefCell, RefMut};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use hexagon_ops::hmx::Hmx;
use hexagon_ops::layout::Tile;
use hexagon_ops::rt::cache::Access;
use hexagon_ops::rt::memory::Mapped;
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::serve::{MAP_REFUSED, Platform, Server, State, Units};
use hexagon_ops::wire::{
    COLLECTED, COMPLETED, Command, Completion, FENCE, Info, MAGIC, Map, PUBLISHED, RingHeader,
    RingLayout, Serve, Start, TAKEN, VERSION,
};

/// Descriptor of the ring.
pub const RING_FD: i32 = 1;
/// Microseconds after which the loop parks; the clock moves by one at each look and by 1000 at each
/// poll.
pub const IDLE_US: u32 = 3000;

/// HVX threads; one under Miri, which rejects the thread pool's own code.
const THREADS: usize = if cfg!(miri) { 1 } else { 2 };

/// Memory that is never freed, as long as whole tiles.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    base: *mut u8,
    pub bytes: usize,
}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        let tiles = vec![Tile::ZERO; bytes.div_ceil(size_of::<Tile>()).max(1)];
        let base = Box::leak(tiles.into_boxed_slice()).as_mut_ptr().cast();
        Self { base, bytes }
    }

    /// Returns the address of the first byte.
    pub fn address(self) -> usize {
        self.base.addr()
    }

    pub fn put<T: bytemuck::Pod>(self, offset: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: in bounds.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: in bounds; the loop does not run at the same time.
        unsafe { at.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub fn get<T: bytemuck::Pod>(self, offset: usize, count: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: in bounds.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: as above.
        unsafe { at.copy_to(bytes.as_mut_ptr(), bytes.len()) };
        values
    }

    pub fn shared(self) -> Shared {
        // SAFETY: the memory is never freed, and all code accesses it by words.
        unsafe { Shared::new(self.base, self.bytes) }.unwrap()
    }
}

/// A cache operation on a range of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOperation {
    /// Lines are cleaned, otherwise invalidated.
    pub is_clean: bool,
    /// Address of the buffer.
    pub base: usize,
    pub range: Range<usize>,
    pub access: Access,
}

/// Work of the host while the loop waits. It is called at each poll.
pub struct Meanwhile(Box<dyn FnMut()>);

impl Meanwhile {
    pub fn new(run: impl FnMut() + 'static) -> Self {
        Self(Box::new(run))
    }
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

/// The system around the loop.
#[derive(Debug, Default)]
pub struct Around {
    pub files: HashMap<i32, Memory>,
    /// Live mappings.
    pub mapped: usize,
    /// The clock, microseconds.
    pub now: u64,
    pub meanwhile: Option<Meanwhile>,
    /// Bytes that were invalidated, and bytes that were cleaned.
    pub cache_bytes: [usize; 2],
    /// The operations on them, in order.
    pub cache_operations: Vec<CacheOperation>,
    /// Code that `answer` must return once.
    pub answer: Option<i32>,
    /// `true` if another session or program wants VTCM.
    pub is_vtcm_wanted: bool,
}

impl Around {
    fn cache(&mut self, is_clean: bool, mapped: &Mapped, range: Range<usize>, access: Access) {
        assert!(range.start < range.end && range.end <= mapped.bytes());
        self.cache_bytes[usize::from(is_clean)] += range.len();
        self.cache_operations.push(CacheOperation {
            is_clean,
            base: mapped.start().addr(),
            range,
            access,
        });
    }
}

/// [`Around`], as the server has it.
#[derive(Debug)]
pub struct System(Rc<RefCell<Around>>);

impl Platform for System {
    fn map(&mut self, fd: i32, bytes: usize) -> Result<Mapped, u32> {
        let mut around = self.0.borrow_mut();
        let memory = *around.files.get(&fd).ok_or(MAP_REFUSED)?;
        if bytes > memory.bytes {
            return Err(MAP_REFUSED);
        }
        around.mapped += 1;
        // SAFETY: the memory is never freed, and not used while the loop runs.
        unsafe { Mapped::new(memory.base, memory.base, bytes) }.ok_or(MAP_REFUSED)
    }

    fn unmap(&mut self, _mapped: Mapped) {
        self.0.borrow_mut().mapped -= 1;
    }

    fn map_ring(&mut self, fd: i32, bytes: usize) -> Option<Shared> {
        let around = self.0.borrow();
        let memory = around.files.get(&fd)?;
        let part = Memory { bytes, ..*memory };
        (bytes <= memory.bytes).then(|| part.shared())
    }

    fn invalidate(&mut self, mapped: &Mapped, range: Range<usize>, access: Access) {
        self.0.borrow_mut().cache(false, mapped, range, access);
    }

    fn clean(&mut self, mapped: &Mapped, range: Range<usize>, access: Access) {
        self.0.borrow_mut().cache(true, mapped, range, access);
    }

    fn time_us(&mut self) -> u64 {
        let mut around = self.0.borrow_mut();
        around.now += 1;
        around.now
    }

    fn packets(&mut self) -> u64 {
        let mut around = self.0.borrow_mut();
        around.now += 1;
        around.now * 3
    }

    fn relax(&mut self, _polls: u32) -> Result<(), i32> {
        let mut around = self.0.borrow_mut();
        around.now += 997;
        if let Some(Meanwhile(run)) = &mut around.meanwhile {
            run();
        }
        Ok(())
    }

    fn is_vtcm_wanted(&self) -> bool {
        self.0.borrow().is_vtcm_wanted
    }

    fn answer(&mut self, _completion: &mut Completion) -> Result<(), i32> {
        self.0.borrow_mut().answer.take().map_or(Ok(()), Err)
    }
}

/// A host with a session.
pub struct Host {
    pub server: Server<System, Vec<Tile>, Box<State>>,
    pub layout: RingLayout,
    pub shared: Shared,
    pub memory: Memory,
    pub sequence: u64,
    next_fd: i32,
    next_buffer: u32,
    around: Rc<RefCell<Around>>,
}

impl Host {
    /// A session that has been started; its counters start at `first`.
    pub fn starting_at(slots: u32, first: u32) -> Self {
        Self::fresh(slots).started(first, THREADS)
    }

    /// A session that has been started, and computes on some threads.
    pub fn of_threads(threads: usize) -> Self {
        Self::with_threads(16, threads).started(0, threads)
    }

    /// Starts the session.
    fn started(self, first: u32, threads: usize) -> Self {
        let mut host = self;
        for counter in [PUBLISHED, TAKEN, COMPLETED, COLLECTED] {
            host.shared.store(counter, first);
        }
        let info = host.start().unwrap();
        assert_eq!((info.version, info.arch), (VERSION, 75));
        assert_eq!(usize::try_from(info.threads).unwrap(), threads);
        assert_eq!(info.vtcm_bytes, (1 << 20) - (64 << 10));
        host
    }

    pub fn new() -> Self {
        Self::starting_at(16, 0)
    }

    /// A session on other numbers of threads and tiles of VTCM.
    pub fn with_units(threads: usize, vtcm_tiles: usize) -> Self {
        let mut host = Self::fresh(16);
        let units = host.server.units();
        units.vtcm = vec![Tile::ZERO; vtcm_tiles];
        units.hmx = Hmx::new(&units.vtcm);
        units.threads = threads;
        let info = host.start().unwrap();
        assert_eq!(usize::try_from(info.threads).unwrap(), threads);
        host
    }

    /// A session that has not been started; its ring is in order.
    pub fn fresh(slots: u32) -> Self {
        Self::with_threads(slots, THREADS)
    }

    /// The same, for a session on some threads.
    fn with_threads(slots: u32, threads: usize) -> Self {
        let layout = RingLayout::new(slots).unwrap();
        let memory = Memory::new(layout.bytes());
        memory.put(
            0,
            &[RingHeader {
                magic: MAGIC,
                version: VERSION,
                slots,
                reserved: 0,
            }],
        );
        let around = Rc::new(RefCell::new(Around::default()));
        around.borrow_mut().files.insert(RING_FD, memory);
        let vtcm = vec![Tile::ZERO; 512];
        let units = Units {
            hmx: Hmx::new(&vtcm),
            vtcm,
            threads,
            arch: 75,
        };
        let platform = System(Rc::clone(&around));
        Self {
            server: Server::new(platform, units, Box::default()),
            layout,
            shared: memory.shared(),
            memory,
            sequence: 0,
            next_fd: RING_FD + 1,
            next_buffer: 0,
            around,
        }
    }

    pub fn around(&self) -> RefMut<'_, Around> {
        self.around.borrow_mut()
    }

    pub fn start(&mut self) -> Result<Info, i32> {
        self.server.start(&Start {
            version: VERSION,
            fd: RING_FD,
            bytes: u32::try_from(self.layout.bytes()).unwrap(),
            threads: 0,
            power: 0,
            matrix: 1,
        })
    }

    pub fn serve(&mut self) -> Result<(), i32> {
        self.server.serve(&Serve {
            idle_us: IDLE_US,
            reserved: 0,
        })
    }

    /// Writes commands unchanged.
    pub fn publish(&mut self, commands: &[Command]) {
        let mut published = self.shared.load(PUBLISHED);
        for command in commands {
            self.shared.write(self.layout.command(published), command);
            published = published.wrapping_add(1);
        }
        self.shared.store(PUBLISHED, published);
    }

    /// Writes commands as one submission.
    pub fn submit(&mut self, commands: &[Command]) {
        self.sequence += 1;
        let mut commands = commands.to_vec();
        for command in &mut commands {
            command.sequence = self.sequence;
        }
        commands.last_mut().unwrap().flags |= FENCE;
        self.publish(&commands);
    }

    /// Takes the next completion.
    pub fn collect(&mut self) -> Option<Completion> {
        let collected = self.shared.load(COLLECTED);
        if self.shared.load(COMPLETED) == collected {
            return None;
        }
        let completion = self.shared.read(self.layout.completion(collected));
        self.shared.store(COLLECTED, collected.wrapping_add(1));
        Some(completion)
    }

    /// Submits, serves, and returns the answer.
    pub fn run(&mut self, commands: &[Command]) -> Completion {
        self.submit(commands);
        self.serve().unwrap();
        let completion = self.collect().unwrap();
        assert_eq!(completion.sequence, self.sequence);
        assert_eq!(self.collect(), None);
        completion
    }

    /// Memory with a descriptor, not mapped.
    pub fn file(&mut self, bytes: usize) -> (i32, Memory) {
        let memory = Memory::new(bytes);
        let fd = self.next_fd;
        self.next_fd += 1;
        self.around().files.insert(fd, memory);
        (fd, memory)
    }

    /// Mapped memory and its number.
    pub fn buffer(&mut self, bytes: usize) -> (u32, Memory) {
        let (fd, memory) = self.file(bytes);
        let buffer = self.next_buffer;
        self.next_buffer += 1;
        let map = Map {
            buffer,
            fd,
            bytes: bytes as u64,
        };
        let completion = self.run(&[Command::new(0, &map)]);
        assert_eq!((completion.status, completion.done), (0, 1));
        (buffer, memory)
    }
}
