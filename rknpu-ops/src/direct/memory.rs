//! Memories of the C API, by the pointers that the caller has: allocations, and views of them.
#![expect(
    unsafe_code,
    reason = "memory belongs to the caller of the C API in turns"
)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use os::memory::Descriptor;
use sim_common::lock;

use super::driver::{Direction, Driver, Object, Purpose};
use crate::ffi::{MemSync, TensorMem, code, mem_flags};

/// A part of an object.
#[derive(Clone, Debug)]
pub(super) struct Region {
    object: Arc<Object>,
    range: Range<usize>,
}

impl Region {
    pub(super) fn len(&self) -> usize {
        self.range.len()
    }

    pub(super) fn object(&self) -> &Object {
        &self.object
    }

    /// Returns the device's address of the first byte.
    pub(super) fn address(&self) -> u32 {
        // PANIC: the address of an object's last byte fits into 32 bits (`Object::finish`).
        self.object.address() + u32::try_from(self.range.start).expect("a place inside")
    }

    /// Syncs the first `bytes`.
    pub(super) fn sync(&self, bytes: usize, direction: Direction) -> io::Result<()> {
        let start = self.range.start;
        self.object.sync(start..start + bytes, direction)
    }

    /// Returns the first `bytes`, as the CPU sees them.
    ///
    /// # Safety
    /// - Nothing writes them while the slice lives.
    ///
    /// # Panics
    /// If there are fewer.
    pub(super) unsafe fn read(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.len());
        let start = self.object.start().wrapping_add(self.range.start);
        // SAFETY: inside the mapping, which `self` keeps alive; the rest is guaranteed by the
        // caller.
        unsafe { std::slice::from_raw_parts(start, bytes) }
    }

    /// As [`Self::read`], to write.
    ///
    /// # Safety
    /// - Nothing else uses them while the slice lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is not this value's own, but the C API's"
    )]
    pub(super) unsafe fn write(&self, bytes: usize) -> &mut [u8] {
        assert!(bytes <= self.len());
        let start = self.object.start().wrapping_add(self.range.start);
        // SAFETY: as in `read`.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }
}

/// Returns a duplicate of a descriptor that the caller of the C API has.
///
/// # Errors
/// `InvalidInput` for a number that is none; the system's.
fn duplicate(descriptor: i32) -> io::Result<Descriptor> {
    if descriptor < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the C contract: the descriptor is open during the call.
    unsafe { Descriptor::duplicate(descriptor) }
}

/// Puts an object into a list, without those that are gone.
fn keep(buffers: &mut Vec<Weak<Object>>, object: Object) -> Arc<Object> {
    let object = Arc::new(object);
    buffers.retain(|other| other.strong_count() > 0);
    if object.buffer().is_some() {
        buffers.push(Arc::downgrade(&object));
    }
    object
}

/// All memories of a machine.
#[derive(Debug, Default)]
pub(super) struct Memories {
    regions: Mutex<BTreeMap<usize, Region>>,
    /// Objects that are dma-bufs. One that is imported again is found here, because the driver has
    /// one handle for it: closing it for one object would close it for others.
    buffers: Mutex<Vec<Weak<Object>>>,
}

impl Memories {
    /// Implements `rknn_create_mem`.
    pub(super) fn create(
        &self,
        driver: &Arc<dyn Driver>,
        bytes: u32,
    ) -> Result<*mut TensorMem, c_int> {
        // CAST: usize has at least 32 bits.
        let object = Arc::clone(driver)
            .create(bytes as usize, Purpose::Data)
            .map_err(|error| {
                log::warn!("the NPU's driver has no {bytes} bytes: {error}");
                code::MALLOC_FAIL
            })?;
        let memory = TensorMem {
            virt_addr: object.start().cast(),
            phys_addr: object.address().into(),
            fd: object.descriptor(),
            offset: 0,
            size: bytes,
            flags: mem_flags::ALLOC_INSIDE,
            priv_data: std::ptr::null_mut(),
        };
        let region = Region {
            object: keep(&mut lock(&self.buffers), object),
            range: 0..bytes as usize,
        };
        Ok(self.insert(memory, region))
    }

    /// Implements `rknn_create_mem_from_fd`, for descriptors and addresses of [`Self::create`], and
    /// for dma-bufs of others, which are imported. Memory of a driver without dma-bufs has the
    /// descriptor -1.
    ///
    /// - `start`: a mapping of the whole; null for the driver's own
    pub(super) fn view(
        &self,
        driver: &Arc<dyn Driver>,
        descriptor: i32,
        start: *mut c_void,
        bytes: u32,
        offset: i32,
    ) -> Result<*mut TensorMem, c_int> {
        let known = self.known(descriptor, start);
        let object = known.map_or_else(|| self.import(driver, descriptor), Ok);
        let object = object.map_err(|error| {
            log::error!(
                "rknn_create_mem_from_fd: {descriptor} at {start:p} is no memory of the NPU's driver, and is not imported: {error}"
            );
            code::PARAM_INVALID
        })?;
        let start = if start.is_null() {
            object.start().cast()
        } else {
            start
        };
        let place = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = place.checked_add(bytes as usize);
        let Some(end) = end.filter(|end| *end <= object.size()) else {
            log::error!("rknn_create_mem_from_fd: {bytes} bytes at {offset} are not inside");
            return Err(code::PARAM_INVALID);
        };
        let memory = TensorMem {
            virt_addr: start,
            phys_addr: u64::from(object.address()) + place as u64,
            fd: descriptor,
            offset,
            size: bytes,
            flags: mem_flags::FROM_FD,
            priv_data: std::ptr::null_mut(),
        };
        let region = Region {
            object,
            range: place..end,
        };
        Ok(self.insert(memory, region))
    }

    /// Returns the memory that the caller has at a descriptor and an address.
    fn known(&self, descriptor: i32, start: *mut c_void) -> Option<Arc<Object>> {
        let regions = lock(&self.regions);
        let mut objects = regions.values().map(|region| &region.object);
        let found = objects.find(|object| {
            (object.descriptor(), object.start()) == (descriptor, start.cast::<u8>())
        });
        found.map(Arc::clone)
    }

    /// Returns the object of a dma-buf, which is imported if it is not known.
    fn import(&self, driver: &Arc<dyn Driver>, descriptor: i32) -> io::Result<Arc<Object>> {
        let buffer = duplicate(descriptor)?;
        // Locked until it is in the list.
        let mut buffers = lock(&self.buffers);
        let known = buffers.iter().filter_map(Weak::upgrade).find(|object| {
            let own = object.buffer();
            object.is_of(driver) && own.is_some_and(|own| own.is_same(&buffer))
        });
        if let Some(object) = known {
            return Ok(object);
        }
        let object = Arc::clone(driver).import(buffer)?;
        Ok(keep(&mut buffers, object))
    }

    fn insert(&self, memory: TensorMem, region: Region) -> *mut TensorMem {
        let raw = Box::into_raw(Box::new(memory));
        lock(&self.regions).insert(raw.addr(), region);
        raw
    }

    /// Implements `rknn_destroy_mem`. The object lives on in views and in contexts that it is bound
    /// to.
    pub(super) fn destroy(&self, memory: *mut TensorMem) -> Result<(), c_int> {
        let removed = lock(&self.regions).remove(&memory.addr());
        // Not while the table is locked: the driver may take its time.
        let _region = removed.ok_or(code::PARAM_INVALID)?;
        // SAFETY: `insert` made it from a box, and it was in the table until now.
        drop(unsafe { Box::from_raw(memory) });
        Ok(())
    }

    /// Implements `rknn_mem_sync`.
    pub(super) fn sync(&self, memory: *mut TensorMem, mode: MemSync) -> Result<(), c_int> {
        let region = self.region(memory).ok_or(code::PARAM_INVALID)?;
        for (bit, direction) in [
            (MemSync::TO_DEVICE, Direction::ToDevice),
            (MemSync::FROM_DEVICE, Direction::FromDevice),
        ] {
            if mode.0 & bit.0 != 0 {
                region.sync(region.len(), direction).map_err(|error| {
                    log::error!("rknn_mem_sync: {error}");
                    code::FAIL
                })?;
            }
        }
        Ok(())
    }

    pub(super) fn region(&self, memory: *mut TensorMem) -> Option<Region> {
        lock(&self.regions).get(&memory.addr()).cloned()
    }
}
