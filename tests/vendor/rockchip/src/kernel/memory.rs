//! Memory objects, and the 32-bit address space in which the device sees them.
//!
//! With caches, the device has a copy of each cacheable object, which only syncs update: bytes that
//! were not synced are [`POISON`] or stale. Until the whole of a new object was synced to the
//! device, lines of its zeros are in the CPU's cache and are written back over the device's
//! results.
#![expect(
    unsafe_code,
    reason = "shared memory, and descriptors as plain numbers"
)]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use memmap2::{MmapOptions, MmapRaw};

use super::Errno;
use crate::device::{Error, Memory};

const PAGE: u64 = 4096;

/// The lowest device address that `rknpu` assigns: 0 stays free, so that a forgotten address is
/// noticed.
const FIRST_ADDRESS: u64 = 1 << 20;

/// End of the addresses that a command word can name.
const END_ADDRESS: u64 = 1 << 32;

/// The top bits of an object's identity, which is a kernel address on a board.
const IDENTITY: u64 = 0xffff_ff80 << 32;

/// Bytes that the device sees where nothing was synced.
const POISON: u8 = 0xa5;

/// Caches between CPU and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caches {
    #[default]
    Coherent,
    /// Cacheable objects are synced.
    Apart,
}

/// Properties of an object.
pub mod flag {
    pub const CACHEABLE: u32 = 1 << 1;
    /// The kernel reads it, too.
    pub const KERNEL_MAPPING: u32 = 1 << 3;
    /// Device addresses are not aligned to the object's size.
    pub const LIMIT_IOVA_ALIGNMENT: u32 = 1 << 10;
}

/// The device's copy of an object.
#[derive(Debug)]
struct Copied {
    bytes: Vec<u8>,
    /// The whole object was synced to the device.
    is_clean: bool,
}

/// Memory that the CPU maps and the device reads and writes.
#[derive(Debug)]
pub struct Object {
    file: File,
    inode: u64,
    map: MmapRaw,
    address: u64,
    flags: u32,
    copied: Option<RwLock<Copied>>,
}

impl Object {
    fn new(bytes: u64, address: u64, flags: u32, caches: Caches) -> Result<Self, Errno> {
        let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::ENOMEM);
        // SAFETY: the name ends in NUL.
        let descriptor = unsafe { libc::memfd_create(c"rknpu".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(errno(std::io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(bytes).map_err(errno)?;
        Self::of_file(file, address, flags, caches)
    }

    /// Makes an object of memory that a file has.
    fn of_file(file: File, address: u64, flags: u32, caches: Caches) -> Result<Self, Errno> {
        let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::ENOMEM);
        let inode = file.metadata().map_err(errno)?.ino();
        let map = MmapOptions::new().map_raw(&file).map_err(errno)?;
        let copied = (caches == Caches::Apart && flags & flag::CACHEABLE != 0).then(|| {
            RwLock::new(Copied {
                bytes: vec![POISON; map.len()],
                // Without the flag, mapping the object cleans the caches.
                // SOURCE: rknpu_iommu.c of Rockchip's kernel, driver 0.9.8.
                is_clean: flags & flag::LIMIT_IOVA_ALIGNMENT == 0,
            })
        });
        Ok(Self {
            file,
            inode,
            map,
            address,
            flags,
            copied,
        })
    }

    /// Makes an object of another driver's dma-buf. Mapping it for the device cleans its caches,
    /// and nothing of the driver's own syncs it.
    fn import(file: File, address: u64, caches: Caches) -> Result<Self, Errno> {
        let mut object = Self::of_file(file, address, 0, caches)?;
        if caches == Caches::Apart {
            let mut bytes = vec![0; object.map.len()];
            object.read(0, &mut bytes).map_err(|_| libc::EFAULT)?;
            let is_clean = true;
            object.copied = Some(RwLock::new(Copied { bytes, is_clean }));
        }
        Ok(object)
    }

    /// Returns the device's address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the driver's name for the object in other ioctls.
    pub fn identity(&self) -> u64 {
        IDENTITY | self.address
    }

    pub fn bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Returns the flags that it was created with.
    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Syncs a range to the device, from it, or both.
    pub fn sync(&self, offset: u64, bytes: u64, to: bool, from: bool) -> Result<(), Error> {
        let Some(copied) = &self.copied else {
            return Ok(());
        };
        let mut copied = copied.write().unwrap_or_else(PoisonError::into_inner);
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.at(offset, length)?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        if to {
            self.read(offset, &mut copied.bytes[start..start + length])?;
            copied.is_clean |= bytes == self.bytes();
        }
        if from {
            self.write(offset, &copied.bytes[start..start + length])?;
        }
        Ok(())
    }

    /// Reads as the device does.
    fn device_read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let Some(copied) = &self.copied else {
            return self.read(offset, bytes);
        };
        self.at(offset, bytes.len())?;
        let copied = copied.read().unwrap_or_else(PoisonError::into_inner);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        bytes.copy_from_slice(&copied.bytes[start..start + bytes.len()]);
        Ok(())
    }

    /// Writes as the device does.
    fn device_write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let Some(copied) = &self.copied else {
            return self.write(offset, bytes);
        };
        self.at(offset, bytes.len())?;
        let mut copied = copied.write().unwrap_or_else(PoisonError::into_inner);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let is_clean = copied.is_clean;
        let place = &mut copied.bytes[start..start + bytes.len()];
        if is_clean {
            place.copy_from_slice(bytes);
        } else {
            place.fill(POISON);
        }
        Ok(())
    }

    /// Returns a new descriptor of the memory, for the caller to close.
    pub fn descriptor(&self) -> Result<i32, Errno> {
        let file = self.file.try_clone();
        file.map(IntoRawFd::into_raw_fd)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))
    }

    /// Returns the address of `bytes` at `offset`.
    fn at(&self, offset: u64, bytes: usize) -> Result<*mut u8, Error> {
        let end = offset.checked_add(bytes as u64);
        if end.is_none_or(|end| end > self.bytes()) {
            return Err(Error::Address {
                address: self.address + offset,
                bytes,
            });
        }
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        Ok(self.map.as_mut_ptr().wrapping_add(offset))
    }

    /// Reads as the CPU does.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let start = self.at(offset, bytes.len())?;
        // SAFETY: the range is inside the mapping (`at`), which `self` keeps, and does not overlap
        // the caller's slice.
        unsafe { start.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let start = self.at(offset, bytes.len())?;
        // SAFETY: as in `read`.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Objects by their address.
#[derive(Clone, Debug, Default)]
pub struct Addresses(BTreeMap<u64, Weak<Object>>);

impl Addresses {
    /// Makes an object at the first free range.
    pub fn create(&mut self, bytes: u64, flags: u32, caches: Caches) -> Result<Arc<Object>, Errno> {
        self.create_from(FIRST_ADDRESS, bytes, flags, caches)
    }

    /// Makes an object at the first free range from an address on.
    pub fn create_from(
        &mut self,
        first: u64,
        bytes: u64,
        flags: u32,
        caches: Caches,
    ) -> Result<Arc<Object>, Errno> {
        let (address, bytes) = self.free(first, bytes)?;
        let object = Arc::new(Object::new(bytes, address, flags, caches)?);
        self.0.insert(address, Arc::downgrade(&object));
        Ok(object)
    }

    /// Makes an object of another driver's dma-buf, at the first free range.
    pub fn import(&mut self, descriptor: i32, caches: Caches) -> Result<Arc<Object>, Errno> {
        // SAFETY: only used to make another descriptor, and not closed (`into_raw_fd`).
        let file = unsafe { File::from_raw_fd(descriptor) };
        let another = file.try_clone();
        let _ = file.into_raw_fd();
        let file = another.map_err(|_| libc::EBADF)?;
        let bytes = file.metadata().map_err(|_| libc::EBADF)?.len();
        let (address, _) = self.free(FIRST_ADDRESS, bytes)?;
        let object = Arc::new(Object::import(file, address, caches)?);
        self.0.insert(address, Arc::downgrade(&object));
        Ok(object)
    }

    /// Returns the first free range from an address on, with its bytes in whole pages.
    fn free(&mut self, first: u64, bytes: u64) -> Result<(u64, u64), Errno> {
        self.0.retain(|_, object| object.strong_count() > 0);
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(PAGE)
            .ok_or(libc::ENOMEM)?;
        let mut address = first;
        for object in self.0.values().filter_map(Weak::upgrade) {
            if object.address - address >= bytes {
                break;
            }
            address = (object.address + object.bytes()).next_multiple_of(PAGE);
        }
        if address
            .checked_add(bytes)
            .is_none_or(|end| end > END_ADDRESS)
        {
            return Err(libc::ENOMEM);
        }
        Ok((address, bytes))
    }

    /// Returns the object that the driver calls `identity`.
    pub fn by_identity(&self, identity: u64) -> Option<Arc<Object>> {
        let address = identity.checked_sub(IDENTITY)?;
        self.0.get(&address).and_then(Weak::upgrade)
    }

    /// Returns the object whose memory has this descriptor.
    pub fn by_descriptor(&self, descriptor: i32) -> Result<Arc<Object>, Errno> {
        // SAFETY: only the descriptor's number is used, and `into_raw_fd` below keeps it open.
        let file = unsafe { File::from_raw_fd(descriptor) };
        let inode = file.metadata().map(|metadata| metadata.ino());
        let _ = file.into_raw_fd();
        let inode = inode.map_err(|_| libc::EBADF)?;
        let found = self
            .0
            .values()
            .filter_map(Weak::upgrade)
            .find(|object| object.inode == inode);
        found.ok_or(libc::EINVAL)
    }

    fn find(&self, address: u64, bytes: usize) -> Result<(Arc<Object>, u64), Error> {
        let object = self
            .0
            .range(..=address)
            .next_back()
            .and_then(|(_, object)| object.upgrade());
        let object = object.ok_or(Error::Address { address, bytes })?;
        let offset = address - object.address;
        Ok((object, offset))
    }
}

impl Memory for Addresses {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let (object, offset) = self.find(address, bytes.len())?;
        object.device_read(offset, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let (object, offset) = self.find(address, bytes.len())?;
        object.device_write(offset, bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn create(addresses: &mut Addresses, bytes: u64) -> Result<Arc<Object>, Errno> {
        addresses.create(bytes, 0, Caches::Coherent)
    }

    #[test]
    fn freed_addresses_are_used_again() {
        let mut addresses = Addresses::default();
        let first = create(&mut addresses, 5000).unwrap();
        let second = create(&mut addresses, 1).unwrap();
        assert_eq!(second.address() - first.address(), 8192);
        let freed = first.address();
        drop(first);
        assert_eq!(create(&mut addresses, 8192).unwrap().address(), freed);
    }

    #[test]
    fn an_access_over_the_end_of_an_object_is_refused() {
        let mut addresses = Addresses::default();
        let object = create(&mut addresses, 4096).unwrap();
        let last = object.address() + 4094;
        addresses.write(last, &[1, 2]).unwrap();
        let mut bytes = [0; 2];
        addresses.read(last, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2]);
        assert!(addresses.write(last, &[1, 2, 3]).is_err());
        drop(object);
        assert!(addresses.write(last, &[1, 2]).is_err());
    }

    #[test]
    fn more_than_four_gigabytes_are_refused() {
        let mut addresses = Addresses::default();
        assert_eq!(create(&mut addresses, 1 << 32).unwrap_err(), libc::ENOMEM);
    }

    #[test]
    fn caches_that_are_apart_need_syncs() {
        let mut addresses = Addresses::default();
        let flags = flag::CACHEABLE | flag::LIMIT_IOVA_ALIGNMENT;
        let object = addresses.create(4096, flags, Caches::Apart).unwrap();
        let read = || {
            let (mut cpu, mut device) = ([0], [0]);
            object.read(100, &mut cpu).unwrap();
            object.device_read(100, &mut device).unwrap();
            (cpu[0], device[0])
        };
        object.write(100, &[1]).unwrap();
        assert_eq!(read(), (1, POISON));
        // Syncing a part of a new object leaves its other lines in the CPU's cache.
        object.sync(0, 128, true, false).unwrap();
        object.device_write(100, &[2]).unwrap();
        assert_eq!(read(), (1, POISON));
        object.sync(0, 4096, true, false).unwrap();
        assert_eq!(read(), (1, 1));
        object.device_write(100, &[2]).unwrap();
        assert_eq!(read(), (1, 2));
        object.sync(100, 1, false, true).unwrap();
        assert_eq!(read(), (2, 2));
        // A range that goes beyond the object's end.
        assert!(object.sync(4096, 1, true, false).is_err());
    }

    #[test]
    fn a_descriptor_finds_its_object() {
        let mut addresses = Addresses::default();
        let objects = [
            create(&mut addresses, 1).unwrap(),
            create(&mut addresses, 1).unwrap(),
        ];
        for object in &objects {
            let descriptor = object.descriptor().unwrap();
            let found = addresses.by_descriptor(descriptor).unwrap();
            assert!(Arc::ptr_eq(&found, object));
            // SAFETY: the descriptor belongs to this test.
            drop(unsafe { File::from_raw_fd(descriptor) });
        }
        assert!(addresses.by_descriptor(objects[0].file.as_raw_fd()).is_ok());
        assert_eq!(addresses.by_descriptor(1 << 20).unwrap_err(), libc::EBADF);
    }
}
