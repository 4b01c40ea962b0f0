//! Rockchip's own kernel driver, `rknpu`.
//!
//! SOURCE: numbers and structs, drivers/rknpu/include/rknpu_ioctl.h of Rockchip's kernel (driver
//! 0.9.8), and include/uapi/drm/drm.h of Linux; behaviour, rknpu_gem.c, rknpu_iommu.c and
//! rknpu_job.c there.
#![expect(unsafe_code, reason = "descriptors that the driver gives as numbers")]

use std::io;
use std::ops::Range;
use std::sync::{Arc, Once};

use os::memory::Descriptor;

use super::argument::Argument;
use super::core::{BODY, stream_address};
use super::driver::{Direction, Driver, Job, Object, Purpose, page_bytes};
use super::node::{Kernel, Node, dma_buf};

/// Numbers of functions: direction, bytes of the struct, the letter of DRM, the function.
mod number {
    pub const ACTION: u32 = 0xc008_6440;
    pub const SUBMIT: u32 = 0xc068_6441;
    pub const MEM_CREATE: u32 = 0xc030_6442;
    pub const MEM_MAP: u32 = 0xc010_6443;
    pub const MEM_DESTROY: u32 = 0xc010_6444;
    pub const MEM_SYNC: u32 = 0xc020_6445;
    pub const GEM_CLOSE: u32 = 0x4008_6409;
    pub const PRIME_HANDLE_TO_FD: u32 = 0xc00c_642d;
    pub const PRIME_FD_TO_HANDLE: u32 = 0xc00c_642e;
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
    /// SUBMIT reads tasks through this mapping: an object without it is a null pointer to the
    /// kernel.
    pub const KERNEL_MAPPING: u32 = 1 << 3;
    pub const IOMMU: u32 = 1 << 4;
    /// Flag: device addresses are not rounded up to powers of two, which are never freed; caches
    /// are not cleaned.
    pub const LIMIT_IOVA_ALIGNMENT: u32 = 1 << 10;
}

/// The program counter reads streams from a list of tasks, with two sets of registers in turn.
const SUBMIT_FLAGS: u32 = 1 | 1 << 2;

/// The longest wait for a job, as librknnrt has it.
const TIMEOUT_MS: u32 = 6000;

/// Tasks of one job: more are split by the driver.
// SOURCE: rknpu_drv.c: max_submit_number of RK3588 is 2^12 - 1.
const TASKS_OF_A_JOB: usize = 4095;

/// Bytes of `rknpu_task`.
const TASK_BYTES: usize = 40;

/// Oldest driver whose MEM_CREATE has these fields.
const OLDEST: u32 = 906;
/// Oldest driver with LIMIT_IOVA_ALIGNMENT.
const LIMITS_ALIGNMENT: u32 = 907;

/// Returns the entry of a stream in a list of tasks.
fn task(address: u32) -> [u8; TASK_BYTES] {
    // SOURCE: happyme531's and gregordinary's notes: the units that are started, the interrupts
    // that are waited for and cleared.
    Argument::ZERO
        .u32(8, 0x1d)
        .u32(12, 0x300)
        .u32(16, 0x1_ffff)
        .u32(24, BODY)
        .u64(32, address.into())
        .0
}

/// The driver.
#[derive(Debug)]
pub struct Rknpu {
    node: Box<dyn Node>,
    version: u32,
    /// Logs once that the driver exports no dma-bufs, and whether those of the heap replace them.
    no_export: Once,
}

impl Rknpu {
    /// Asks the driver for its version.
    ///
    /// # Errors
    /// The driver's error, or `Unsupported` with the missing feature.
    pub fn open(node: Box<dyn Node>) -> io::Result<Self> {
        let mut rknpu = Self {
            node,
            version: 0,
            no_export: Once::new(),
        };
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

    /// Returns the properties of a new object.
    fn flags(&self, purpose: Purpose) -> u32 {
        let mut flags = flag::NON_CONTIGUOUS | flag::CACHEABLE | flag::IOMMU;
        if self.version >= LIMITS_ALIGNMENT {
            flags |= flag::LIMIT_IOVA_ALIGNMENT;
        }
        if purpose == Purpose::Jobs {
            flags |= flag::KERNEL_MAPPING;
        }
        flags
    }

    /// Runs `count` tasks of a list, from `first`, on one core, and waits for their end.
    fn submit(&self, core: usize, list: &Object, first: usize, count: usize) -> io::Result<()> {
        let [first, count] = [first, count].map(|number| {
            u32::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
        });
        let (first, count) = (first?, count?);
        let mut argument = Argument::<104>::ZERO
            .u32(0, SUBMIT_FLAGS)
            .u32(4, TIMEOUT_MS)
            .u32(8, first)
            .u32(12, count)
            .u64(24, list.identity)
            .u32(56, 1 << core)
            .with(60, (-1i32).to_ne_bytes());
        // A single core uses the entry with its number, so all three entries are filled.
        for entry in 0..3 {
            argument = argument
                .u32(64 + 8 * entry, first)
                .u32(68 + 8 * entry, count);
        }
        let ended = argument.call(&*self.node, number::SUBMIT).map(drop);
        if ended.is_err() {
            // The job's error is returned. If the reset fails too, the next job shows it.
            let _ = self.act(action::ACT_RESET);
        }
        ended
    }
}

impl Rknpu {
    /// Makes an object without a mapping in an address space; returns its handle, identity and
    /// address.
    fn object_in(&self, space: u32) -> io::Result<(u32, u64, u64)> {
        let created = Argument::<48>::ZERO
            .u32(4, self.flags(Purpose::Data))
            .u64(8, page_bytes(1) as u64)
            .u32(40, space)
            .call(&*self.node, number::MEM_CREATE)?;
        let (handle, identity) = (created.read_u32(0), created.read_u64(16));
        Ok((handle, identity, created.read_u64(24)))
    }

    /// Returns the dma-buf of an object.
    fn export(&self, handle: u32) -> io::Result<Descriptor> {
        // SOURCE: O_CLOEXEC and O_RDWR are DRM_CLOEXEC and DRM_RDWR, drm.h.
        let exported = Argument::<12>::ZERO
            .u32(0, handle)
            .u32(4, os::node::READ_WRITE)
            .call(&*self.node, number::PRIME_HANDLE_TO_FD)?;
        let descriptor = i32::from_ne_bytes(exported.read(8));
        // SAFETY: the driver made this descriptor for the caller, who owns it alone.
        Ok(unsafe { Descriptor::adopt(descriptor) })
    }

    fn free(&self, handle: u32, identity: u64) -> io::Result<()> {
        Argument::<16>::ZERO
            .u32(0, handle)
            .u64(8, identity)
            .call(&*self.node, number::MEM_DESTROY)
            .map(drop)
    }

    /// Returns `true` if two objects that live in two address spaces have one address.
    fn has_separate_spaces(&self) -> io::Result<bool> {
        let first = self.object_in(1)?;
        let second = self.object_in(2);
        self.free(first.0, first.1)?;
        let second = second?;
        self.free(second.0, second.1)?;
        Ok(first.2 == second.2)
    }
}

impl Driver for Rknpu {
    fn kernel(&self) -> Kernel {
        Kernel::Rknpu
    }

    fn spaces(&self) -> String {
        match self.has_separate_spaces() {
            Ok(true) => "separate: two objects have one address".into(),
            Ok(false) => "not shown to be separate: two objects have two addresses".into(),
            Err(error) => format!("none ({error})"),
        }
    }

    fn version_text(&self) -> String {
        let version = self.version;
        format!(
            "{}.{}.{}",
            version / 10000,
            version / 100 % 100,
            version % 100
        )
    }

    fn chain(&self) -> usize {
        TASKS_OF_A_JOB
    }

    fn reopen(&self) -> io::Result<Arc<dyn Driver>> {
        let text = "files of rknpu have one address space";
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    /// Makes a dma-buf for data: by the driver, or else from the system's heap, or else plain
    /// memory of the driver's.
    fn create(self: Arc<Self>, bytes: usize, purpose: Purpose) -> io::Result<Object> {
        let bytes = page_bytes(bytes);
        let created = Argument::<48>::ZERO
            .u32(4, self.flags(purpose))
            .u64(8, bytes as u64)
            .call(&*self.node, number::MEM_CREATE)?;
        let (handle, identity) = (created.read_u32(0), created.read_u64(16));
        let driver = Arc::clone(&self);
        let object = Object::adopt(driver, handle, identity, bytes);
        let exported = (purpose == Purpose::Data)
            .then(|| self.export(handle))
            .transpose();
        let descriptor = match exported {
            Ok(descriptor) => descriptor,
            Err(error) => {
                let heap = self.node.heap(bytes);
                let imported = heap.and_then(|buffer| Arc::clone(&self).import(buffer));
                let instead = match &imported {
                    Ok(_) => "dma-bufs of the system's heap take their place".into(),
                    Err(heap) => format!("nor is there another dma-buf ({heap})"),
                };
                (self.no_export)
                    .call_once(|| log::info!("rknpu exports no memory ({error}); {instead}"));
                if let Ok(imported) = imported {
                    return imported.finish();
                }
                None
            }
        };
        let offset = Argument::<16>::ZERO
            .u32(0, handle)
            .call(&*self.node, number::MEM_MAP)?
            .read_u64(8);
        let map = self.node.map(offset, bytes)?;
        object
            .place(created.read_u64(24), map, descriptor)?
            .finish()
    }

    fn import(self: Arc<Self>, buffer: Descriptor) -> io::Result<Object> {
        let bytes = buffer.bytes()?;
        let imported = Argument::<12>::ZERO
            .with(8, buffer.number().to_ne_bytes())
            .call(&*self.node, number::PRIME_FD_TO_HANDLE)?;
        let handle = imported.read_u32(0);
        let driver = Arc::clone(&self);
        let mut object = Object::adopt(driver, handle, 0, bytes);
        object.is_imported = true;
        // With a handle the driver describes the object.
        let described = Argument::<48>::ZERO
            .u32(0, handle)
            .call(&*self.node, number::MEM_CREATE)?;
        object.identity = described.read_u64(16);
        let map = buffer.map(bytes)?;
        object.place(described.read_u64(24), map, Some(buffer))
    }

    fn sync(&self, object: &Object, range: Range<usize>, direction: Direction) -> io::Result<()> {
        if let (true, Some(buffer)) = (object.is_imported, object.buffer()) {
            // The driver refuses it: it knows nothing of that memory's caches.
            let access = match direction {
                Direction::ToDevice => dma_buf::WRITE,
                Direction::FromDevice => dma_buf::READ,
            };
            self.node.sync_buffer(buffer, access)?;
            return self.node.sync_buffer(buffer, access | dma_buf::END);
        }
        let flags = match direction {
            Direction::ToDevice => 1,
            Direction::FromDevice => 2,
        };
        Argument::<32>::ZERO
            .u32(0, flags)
            .u64(8, object.identity)
            .u64(16, range.start as u64)
            .u64(24, range.len() as u64)
            .call(&*self.node, number::MEM_SYNC)
            .map(drop)
    }

    fn destroy(&self, object: &Object) -> io::Result<()> {
        if object.is_imported {
            return Argument::<8>::ZERO
                .u32(0, object.handle)
                .call(&*self.node, number::GEM_CLOSE)
                .map(drop);
        }
        self.free(object.handle, object.identity)
    }

    fn own_bytes(&self, tasks: usize) -> usize {
        tasks * TASK_BYTES
    }

    /// Lists the tasks in `own`, which the kernel reads itself: it is not synced.
    fn run(&self, own: &mut Object, job: &Job) -> io::Result<()> {
        let entries = own.bytes_mut().chunks_exact_mut(TASK_BYTES);
        for (index, entry) in entries.take(job.count).enumerate() {
            entry.copy_from_slice(&task(stream_address(job.streams, index)));
        }
        (0..job.count)
            .step_by(TASKS_OF_A_JOB)
            .try_for_each(|first| {
                let count = TASKS_OF_A_JOB.min(job.count - first);
                self.submit(job.core, own, first, count)
            })
    }
}
