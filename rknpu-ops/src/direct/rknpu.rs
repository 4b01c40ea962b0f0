//! The kernel driver `rknpu`: memory objects that CPU and NPU reach, and jobs.
//!
//! SOURCE: numbers and structs, drivers/rknpu/include/rknpu_ioctl.h of Rockchip's kernel (driver 0.9.8), and
//! include/uapi/drm/drm.h of Linux; behaviour, rknpu_gem.c, rknpu_iommu.c and rknpu_job.c there.
#![expect(
    unsafe_code,
    reason = "mapped memory, and descriptors that the driver gives as numbers"
)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use memmap2::MmapRaw;

use super::node::Node;

/// Numbers of functions: direction, bytes of the struct, the letter of DRM, the function.
mod number {
    pub const ACTION: u32 = 0xc008_6440;
    pub const SUBMIT: u32 = 0xc068_6441;
    pub const MEM_CREATE: u32 = 0xc030_6442;
    pub const MEM_MAP: u32 = 0xc010_6443;
    pub const MEM_DESTROY: u32 = 0xc010_6444;
    pub const MEM_SYNC: u32 = 0xc020_6445;
    pub const PRIME_HANDLE_TO_FD: u32 = 0xc00c_642d;
}

/// Questions and orders of ACTION.
mod action {
    pub const GET_DRV_VERSION: u32 = 1;
    pub const ACT_RESET: u32 = 6;
    pub const GET_IOMMU_EN: u32 = 18;
}

/// Properties of a memory object.
mod flag {
    pub const NON_CONTIGUOUS: u32 = 1;
    pub const CACHEABLE: u32 = 1 << 1;
    /// SUBMIT reads tasks through this mapping: an object without it is a null pointer to the kernel.
    pub const KERNEL_MAPPING: u32 = 1 << 3;
    pub const IOMMU: u32 = 1 << 4;
    /// Device addresses are not rounded up to powers of two, ranges of which are never given back; caches are not cleaned.
    pub const LIMIT_IOVA_ALIGNMENT: u32 = 1 << 10;
}

/// The program counter reads streams from a list of tasks, with two sets of registers in turn.
const SUBMIT_FLAGS: u32 = 1 | 1 << 2;

/// The longest wait for a job, as librknnrt has it.
const TIMEOUT_MS: u32 = 6000;

/// Tasks of one job: more are split by the driver.
// SOURCE: max_submit_number of RK3588, rknpu_drv.c, is 2^12 - 1.
pub const TASKS_OF_A_JOB: usize = 4095;

/// Bytes of `rknpu_task`.
pub const TASK_BYTES: usize = 40;

/// Oldest driver whose MEM_CREATE has these fields.
const OLDEST: u32 = 906;
/// Oldest driver with LIMIT_IOVA_ALIGNMENT.
const LIMITS_ALIGNMENT: u32 = 907;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

/// The struct of a function, filled and read by offsets.
struct Argument<const BYTES: usize>([u8; BYTES]);

impl<const BYTES: usize> Argument<BYTES> {
    const ZERO: Self = Self([0; BYTES]);

    fn with<const N: usize>(mut self, offset: usize, value: [u8; N]) -> Self {
        self.0[offset..][..N].copy_from_slice(&value);
        self
    }

    fn u32(self, offset: usize, value: u32) -> Self {
        self.with(offset, value.to_ne_bytes())
    }

    fn u64(self, offset: usize, value: u64) -> Self {
        self.with(offset, value.to_ne_bytes())
    }

    fn call(mut self, node: &dyn Node, number: u32) -> io::Result<Self> {
        node.ioctl(number, &mut self.0)?;
        Ok(self)
    }

    fn read<const N: usize>(&self, offset: usize) -> [u8; N] {
        std::array::from_fn(|i| self.0[offset + i])
    }

    fn read_u32(&self, offset: usize) -> u32 {
        u32::from_ne_bytes(self.read(offset))
    }

    fn read_u64(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.read(offset))
    }
}

/// Returns the entry of a stream in a list of tasks.
#[must_use]
pub fn task(address: u32, words: u32) -> [u8; TASK_BYTES] {
    // SOURCE: values of happyme531's and gregordinary's notes: units started, interrupts waited for and cleared.
    Argument::ZERO
        .u32(8, 0x1d)
        .u32(12, 0x300)
        .u32(16, 0x1_ffff)
        .u32(24, words)
        .u64(32, address.into())
        .0
}

/// For what an object is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Operands, results and streams.
    Data,
    /// A list of tasks.
    Tasks,
}

/// Direction of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Makes the CPU's writes visible to the device.
    ToDevice,
    /// Makes the device's writes visible to the CPU.
    FromDevice,
}

/// The driver.
#[derive(Debug)]
pub struct Rknpu {
    node: Box<dyn Node>,
    version: u32,
}

impl Rknpu {
    /// Asks the driver for its version.
    ///
    /// # Errors
    /// The driver's, or `Unsupported` with what it lacks.
    pub fn open(node: Box<dyn Node>) -> io::Result<Self> {
        let mut rknpu = Self { node, version: 0 };
        rknpu.version = rknpu.act(action::GET_DRV_VERSION)?;
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::Unsupported, text));
        if rknpu.version < OLDEST {
            return refuse(format!(
                "driver {}, 0.9.6 or newer is needed",
                rknpu.version_text()
            ));
        }
        if rknpu.act(action::GET_IOMMU_EN)? == 0 {
            return refuse("the NPU has no IOMMU in this kernel's device tree".into());
        }
        Ok(rknpu)
    }

    fn act(&self, what: u32) -> io::Result<u32> {
        let argument = Argument::<8>::ZERO.u32(0, what);
        Ok(argument.call(&*self.node, number::ACTION)?.read_u32(4))
    }

    /// Returns the driver's version, such as `0.9.8`.
    #[must_use]
    pub fn version_text(&self) -> String {
        let version = self.version;
        format!(
            "{}.{}.{}",
            version / 10000,
            version / 100 % 100,
            version % 100
        )
    }

    /// Makes an object of zeros, which both sides see.
    ///
    /// # Errors
    /// The driver's, or `OutOfMemory` if the device cannot address it.
    pub fn create(self: &Arc<Self>, bytes: usize, purpose: Purpose) -> io::Result<Object> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let mut flags = flag::NON_CONTIGUOUS | flag::CACHEABLE | flag::IOMMU;
        if self.version >= LIMITS_ALIGNMENT {
            flags |= flag::LIMIT_IOVA_ALIGNMENT;
        }
        if purpose == Purpose::Tasks {
            flags |= flag::KERNEL_MAPPING;
        }
        let created = Argument::<48>::ZERO
            .u32(4, flags)
            .u64(8, bytes as u64)
            .call(&*self.node, number::MEM_CREATE)?;
        let address = created.read_u64(24);
        // From here on dropping it destroys it.
        let mut object = Object {
            rknpu: Arc::clone(self),
            handle: created.read_u32(0),
            identity: created.read_u64(16),
            address: 0,
            map: None,
            descriptor: None,
            bytes,
        };
        // Command words have 32 bits for addresses.
        object.address = u32::try_from(address)
            .ok()
            .filter(|_| address + bytes as u64 <= 1 << 32)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let offset = Argument::<16>::ZERO
            .u32(0, object.handle)
            .call(&*self.node, number::MEM_MAP)?
            .read_u64(8);
        object.map = Some(self.node.map(offset, bytes)?);
        // SOURCE: O_CLOEXEC and O_RDWR are DRM_CLOEXEC and DRM_RDWR, drm.h.
        let exported = Argument::<12>::ZERO
            .u32(0, object.handle)
            .u32(4, (libc::O_CLOEXEC | libc::O_RDWR).cast_unsigned())
            .call(&*self.node, number::PRIME_HANDLE_TO_FD)?;
        let descriptor = i32::from_ne_bytes(exported.read(8));
        // SAFETY: the driver made this descriptor for the caller, who owns it alone.
        object.descriptor = Some(unsafe { OwnedFd::from_raw_fd(descriptor) });
        object.bytes_mut().fill(0);
        // With LIMIT_IOVA_ALIGNMENT nothing else cleans what the kernel and the CPU have written.
        object.sync(0..bytes, Direction::ToDevice)?;
        Ok(object)
    }

    /// Runs `count` tasks of a list, from `first`, on one core, and waits for their end.
    ///
    /// # Errors
    /// The driver's: `TimedOut` if the job did not end, after which all cores are reset.
    pub fn submit(
        &self,
        core: usize,
        tasks: &Object,
        first: usize,
        count: usize,
    ) -> io::Result<()> {
        let [first, count] = [first, count].map(|number| {
            u32::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
        });
        let (first, count) = (first?, count?);
        let mut argument = Argument::<104>::ZERO
            .u32(0, SUBMIT_FLAGS)
            .u32(4, TIMEOUT_MS)
            .u32(8, first)
            .u32(12, count)
            .u64(24, tasks.identity)
            .u32(56, 1 << core)
            .with(60, (-1i32).to_ne_bytes());
        // One core takes the entry of its own number.
        for entry in 0..3 {
            argument = argument
                .u32(64 + 8 * entry, first)
                .u32(68 + 8 * entry, count);
        }
        let ended = argument.call(&*self.node, number::SUBMIT).map(drop);
        if ended.is_err() {
            // What is wrong with the job is known; whether the reset works shows with the next one.
            let _ = self.act(action::ACT_RESET);
        }
        ended
    }
}

/// Memory that CPU and device reach, each through its own cache. It is freed when it is dropped.
#[derive(Debug)]
pub struct Object {
    rknpu: Arc<Rknpu>,
    handle: u32,
    /// The kernel's own name for it.
    identity: u64,
    address: u32,
    map: Option<MmapRaw>,
    descriptor: Option<OwnedFd>,
    bytes: usize,
}

impl Object {
    /// Returns the device's address of the first byte.
    #[must_use]
    pub fn address(&self) -> u32 {
        self.address
    }

    /// Returns its bytes: whole pages.
    #[must_use]
    pub fn size(&self) -> usize {
        self.bytes
    }

    /// Returns the descriptor of its dma-buf.
    #[must_use]
    pub fn descriptor(&self) -> i32 {
        self.descriptor.as_ref().map_or(-1, AsRawFd::as_raw_fd)
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
        // SAFETY: the mapping has this many bytes, which the kernel has initialized; `&mut self` is exclusive, and jobs
        // that write them borrow the object.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }

    /// Syncs a range of bytes.
    ///
    /// # Errors
    /// The driver's, such as `EINVAL` for a range that is not inside.
    pub fn sync(&self, range: Range<usize>, direction: Direction) -> io::Result<()> {
        let flags = match direction {
            Direction::ToDevice => 1,
            Direction::FromDevice => 2,
        };
        Argument::<32>::ZERO
            .u32(0, flags)
            .u64(8, self.identity)
            .u64(16, range.start as u64)
            .u64(24, range.len() as u64)
            .call(&*self.rknpu.node, number::MEM_SYNC)
            .map(drop)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // Descriptor and mapping each keep the memory: they go first.
        self.descriptor = None;
        self.map = None;
        let argument = Argument::<16>::ZERO
            .u32(0, self.handle)
            .u64(8, self.identity);
        if let Err(error) = argument.call(&*self.rknpu.node, number::MEM_DESTROY) {
            log::warn!(
                "the NPU's driver does not free {} bytes: {error}",
                self.bytes
            );
        }
    }
}
