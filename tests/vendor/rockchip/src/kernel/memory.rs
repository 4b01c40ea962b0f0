//! Memory objects, and the 32-bit address space in which the device sees them.
#![expect(
    unsafe_code,
    reason = "shared memory, and descriptors as plain numbers"
)]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Weak};

use memmap2::{MmapOptions, MmapRaw};

use super::Errno;
use crate::device::{Error, Memory};

const PAGE: u64 = 4096;

/// The lowest device address that is assigned: 0 stays free, so that a forgotten address is
/// noticed.
const FIRST_ADDRESS: u64 = 1 << 20;

/// End of the addresses that a command word can name.
const END_ADDRESS: u64 = 1 << 32;

/// The top bits of an object's identity, which is a kernel address on a board.
const IDENTITY: u64 = 0xffff_ff80 << 32;

/// Memory that the CPU maps and the device reads and writes.
#[derive(Debug)]
pub struct Object {
    file: File,
    inode: u64,
    map: MmapRaw,
    address: u64,
}

impl Object {
    fn new(bytes: u64, address: u64) -> Result<Self, Errno> {
        let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::ENOMEM);
        // SAFETY: the name ends with a zero.
        let descriptor = unsafe { libc::memfd_create(c"rknpu".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(errno(std::io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is new, and nothing else owns it.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(bytes).map_err(errno)?;
        let inode = file.metadata().map_err(errno)?.ino();
        let map = MmapOptions::new().map_raw(&file).map_err(errno)?;
        Ok(Self {
            file,
            inode,
            map,
            address,
        })
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

    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let start = self.at(offset, bytes.len())?;
        // SAFETY: the range is inside of the mapping (`at`), which `self` keeps, and apart from the
        // caller's own slice.
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
    pub fn create(&mut self, bytes: u64) -> Result<Arc<Object>, Errno> {
        self.0.retain(|_, object| object.strong_count() > 0);
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(PAGE)
            .ok_or(libc::ENOMEM)?;
        let mut address = FIRST_ADDRESS;
        for object in self.0.values().filter_map(Weak::upgrade) {
            if object.address - address >= bytes {
                break;
            }
            address = object.address + object.bytes();
        }
        if address
            .checked_add(bytes)
            .is_none_or(|end| end > END_ADDRESS)
        {
            return Err(libc::ENOMEM);
        }
        let object = Arc::new(Object::new(bytes, address)?);
        self.0.insert(address, Arc::downgrade(&object));
        Ok(object)
    }

    /// Returns the object that the driver calls `identity`.
    pub fn by_identity(&self, identity: u64) -> Option<Arc<Object>> {
        let address = identity.checked_sub(IDENTITY)?;
        self.0.get(&address).and_then(Weak::upgrade)
    }

    /// Returns the object behind a descriptor of its memory.
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
        object.read(offset, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let (object, offset) = self.find(address, bytes.len())?;
        object.write(offset, bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn freed_addresses_are_used_again() {
        let mut addresses = Addresses::default();
        let first = addresses.create(5000).unwrap();
        let second = addresses.create(1).unwrap();
        assert_eq!(second.address() - first.address(), 8192);
        let freed = first.address();
        drop(first);
        assert_eq!(addresses.create(8192).unwrap().address(), freed);
    }

    #[test]
    fn an_access_over_the_end_of_an_object_is_refused() {
        let mut addresses = Addresses::default();
        let object = addresses.create(4096).unwrap();
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
        assert_eq!(addresses.create(1 << 32).unwrap_err(), libc::ENOMEM);
    }

    #[test]
    fn a_descriptor_finds_its_object() {
        let mut addresses = Addresses::default();
        let objects = [addresses.create(1).unwrap(), addresses.create(1).unwrap()];
        for object in &objects {
            let descriptor = object.descriptor().unwrap();
            let found = addresses.by_descriptor(descriptor).unwrap();
            assert!(Arc::ptr_eq(&found, object));
            // SAFETY: the descriptor is this test's own.
            drop(unsafe { File::from_raw_fd(descriptor) });
        }
        assert!(addresses.by_descriptor(objects[0].file.as_raw_fd()).is_ok());
        assert_eq!(addresses.by_descriptor(1 << 20).unwrap_err(), libc::EBADF);
    }
}
