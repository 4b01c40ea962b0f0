//! The struct of a driver's function, filled and read by offsets.

use std::io;

use super::node::Node;

/// A struct of `BYTES` bytes. Bytes that are not written are 0.
pub struct Argument<const BYTES: usize>(pub [u8; BYTES]);

impl<const BYTES: usize> Argument<BYTES> {
    pub const ZERO: Self = Self([0; BYTES]);

    pub fn with<const N: usize>(mut self, offset: usize, value: [u8; N]) -> Self {
        self.0[offset..][..N].copy_from_slice(&value);
        self
    }

    pub fn u32(self, offset: usize, value: u32) -> Self {
        self.with(offset, value.to_ne_bytes())
    }

    pub fn u64(self, offset: usize, value: u64) -> Self {
        self.with(offset, value.to_ne_bytes())
    }

    pub fn call(mut self, node: &dyn Node, number: u32) -> io::Result<Self> {
        node.ioctl(number, &mut self.0)?;
        Ok(self)
    }

    pub fn read<const N: usize>(&self, offset: usize) -> [u8; N] {
        std::array::from_fn(|i| self.0[offset + i])
    }

    pub fn read_u32(&self, offset: usize) -> u32 {
        u32::from_ne_bytes(self.read(offset))
    }

    pub fn read_u64(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.read(offset))
    }
}
