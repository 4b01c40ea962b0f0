//! The kernel's drivers as one: memory objects that CPU and NPU reach, and jobs.
#![expect(unsafe_code, reason = "mapped memory")]

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use memmap2::MmapRaw;
use os::memory::Descriptor;

use super::node::Kernel;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

/// Purpose of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Operands, results and streams.
    Data,
    /// Lists and results that the driver itself needs for the jobs of a core.
    Jobs,
}

/// Direction of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Makes the CPU's writes visible to the device.
    ToDevice,
    /// Makes the device's writes visible to the CPU.
    FromDevice,
}

/// The tasks of a run.
#[derive(Debug)]
pub struct Job<'a> {
    /// The core to use, if the driver lets callers choose.
    pub core: usize,
    /// The streams of the tasks, one after another.
    pub streams: &'a Object,
    /// The number of tasks.
    pub count: usize,
    /// Objects that the tasks read, in addition to the streams.
    pub inputs: [&'a Object; 2],
    /// The object that they write.
    pub result: &'a Object,
}

/// An open file of a kernel's driver, which has one address space of the device.
pub trait Driver: Debug + Send + Sync {
    /// Returns which driver it is.
    fn kernel(&self) -> Kernel;

    /// Returns in words whether the address spaces that it offers by number are separate.
    fn spaces(&self) -> String;

    /// Returns the driver's version, as users see it: such as `0.9.8`, or `rocket`.
    fn version_text(&self) -> String;

    /// Returns the maximum length of a chain of tasks, in which each stream names the next one; the
    /// last stream names none.
    fn chain(&self) -> usize;

    /// Opens the driver again, for another address space.
    ///
    /// # Errors
    /// `Unsupported` if all files have the same one.
    fn reopen(&self) -> io::Result<Arc<dyn Driver>>;

    /// Makes an object of zeros, which both sides see.
    ///
    /// # Errors
    /// An error of the driver, or `OutOfMemory` if the device cannot address it.
    fn create(self: Arc<Self>, bytes: usize, purpose: Purpose) -> io::Result<Object>;

    /// Imports a dma-buf of another driver's or program's.
    ///
    /// # Errors
    /// The driver's; `Unsupported` if it imports none.
    fn import(self: Arc<Self>, buffer: Descriptor) -> io::Result<Object>;

    /// Syncs a range of bytes of an object, or more of it.
    ///
    /// # Errors
    /// An error of the driver, such as `EINVAL` for a range that is not inside.
    fn sync(&self, object: &Object, range: Range<usize>, direction: Direction) -> io::Result<()>;

    /// Frees an object.
    ///
    /// # Errors
    /// An error of the driver.
    fn destroy(&self, object: &Object) -> io::Result<()>;

    /// Returns the bytes of the object that [`Self::run`] needs for this number of tasks.
    fn own_bytes(&self, tasks: usize) -> usize;

    /// Runs the tasks of a job one after another, and waits for their end.
    ///
    /// - `own`: an object for [`Purpose::Jobs`], of at least [`Self::own_bytes`], that no other run
    ///   uses
    ///
    /// # Errors
    /// The driver's error, or one that says that the tasks did not finish: `TimedOut` if they were
    /// too slow.
    fn run(&self, own: &mut Object, job: &Job) -> io::Result<()>;
}

/// Memory that CPU and device reach, each through its own cache. It is freed when it is dropped.
#[derive(Debug)]
pub struct Object {
    driver: Arc<dyn Driver>,
    /// The driver's number for the object.
    pub(super) handle: u32,
    /// The kernel's number for the object, if the driver asks for it.
    pub(super) identity: u64,
    address: u32,
    map: Option<MmapRaw>,
    descriptor: Option<Descriptor>,
    /// It is a dma-buf that the driver did not make.
    pub(super) is_imported: bool,
    bytes: usize,
}

/// Returns the bytes of the whole pages that an object of `bytes` has.
pub(super) fn page_bytes(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(PAGE_BYTES)
}

impl Object {
    /// Takes over an object that the driver has made. Dropping it frees it.
    pub(super) fn adopt(driver: Arc<dyn Driver>, handle: u32, identity: u64, bytes: usize) -> Self {
        Self {
            driver,
            handle,
            identity,
            address: 0,
            map: None,
            descriptor: None,
            is_imported: false,
            bytes,
        }
    }

    /// Gives an object its address and its mapping.
    ///
    /// # Errors
    /// `OutOfMemory` if its addresses have more than 32 bits.
    pub(super) fn place(
        mut self,
        address: u64,
        map: MmapRaw,
        descriptor: Option<Descriptor>,
    ) -> io::Result<Self> {
        // Command words have 32 bits for an address.
        self.address = u32::try_from(address)
            .ok()
            .filter(|_| address + self.bytes as u64 <= 1 << 32)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        self.map = Some(map);
        self.descriptor = descriptor;
        Ok(self)
    }

    /// Finishes a new object: fills it with zeros, which both sides see then.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn finish(mut self) -> io::Result<Self> {
        self.bytes_mut().fill(0);
        // A driver may map memory without writing back its lines in the CPU's caches, which the
        // kernel and this function wrote.
        self.sync(0..self.bytes, Direction::ToDevice)?;
        Ok(self)
    }

    /// Returns `true` if the object is in the address space of `driver`.
    #[must_use]
    pub fn is_of(&self, driver: &Arc<dyn Driver>) -> bool {
        Arc::ptr_eq(&self.driver, driver)
    }

    /// Returns the device's address of the first byte.
    #[must_use]
    pub fn address(&self) -> u32 {
        self.address
    }

    /// Returns the object's size in bytes, which are whole pages.
    #[must_use]
    pub fn size(&self) -> usize {
        self.bytes
    }

    /// Returns its dma-buf, if it is one.
    pub(super) fn buffer(&self) -> Option<&Descriptor> {
        self.descriptor.as_ref()
    }

    /// Returns the descriptor of its dma-buf; -1 if the driver has none.
    #[must_use]
    pub fn descriptor(&self) -> i32 {
        self.descriptor.as_ref().map_or(-1, Descriptor::number)
    }

    /// Returns the CPU's address of the first byte.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.map
            .as_ref()
            .map_or(std::ptr::null_mut(), MmapRaw::as_mut_ptr)
    }

    /// Returns the bytes, for the CPU alone.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this many bytes, which the kernel has initialized; `&mut self` is
        // exclusive, and jobs that write them borrow the object.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }

    /// Syncs at least this range of the object's bytes.
    ///
    /// # Errors
    /// An error of the driver, such as `EINVAL` for a range that is not inside.
    pub fn sync(&self, range: Range<usize>, direction: Direction) -> io::Result<()> {
        self.driver.sync(self, range, direction)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // Descriptor and mapping each keep the memory alive, so they are dropped before the handle.
        self.descriptor = None;
        self.map = None;
        if let Err(error) = self.driver.destroy(self) {
            log::warn!(
                "the NPU's driver does not free {} bytes: {error}",
                self.bytes
            );
        }
    }
}
