//! Reads numbers and strings one after another, and never past the end.

use super::{Error, Result, field};
use crate::files::quote;

/// A place in the file.
pub struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Returns a cursor at the first byte of a file.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the bytes read.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns the bytes of the whole file.
    pub fn file_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Reads some bytes; `what` names them if they are not there.
    pub fn take(&mut self, bytes: u64, what: impl Fn() -> String) -> Result<&'a [u8]> {
        let left = &self.bytes[self.at..];
        let taken = usize::try_from(bytes).ok().and_then(|n| left.get(..n));
        let taken = taken.ok_or_else(|| Error::Truncated {
            field: quote(&what()),
            offset: self.at,
            need: bytes,
            have: self.bytes.len(),
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    /// Reads a fixed number of bytes.
    pub fn array<const N: usize>(&mut self, what: impl Fn() -> String) -> Result<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        Ok(std::array::from_fn(|index| bytes[index]))
    }

    /// Reads a number.
    pub fn u32(&mut self, what: impl Fn() -> String) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// Reads a number.
    pub fn u64(&mut self, what: impl Fn() -> String) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads a string's bytes.
    pub fn text(&mut self, what: impl Fn() -> String) -> Result<&'a [u8]> {
        let len = self.u64(|| format!("length of {}", what()))?;
        self.take(len, what)
    }

    /// Reads a string that must be UTF-8.
    pub fn name(&mut self, what: impl Fn() -> String) -> Result<String> {
        let bytes = self.text(&what)?;
        let text = std::str::from_utf8(bytes);
        text.map(String::from).map_err(|error| {
            field(
                what(),
                String::from_utf8_lossy(bytes),
                format!("not UTF-8: {error}"),
            )
        })
    }

    /// Refuses a number of elements for which the rest of the file is too short.
    pub fn check_count(&self, what: &str, count: u64, smallest_bytes: u64) -> Result<()> {
        let left = (self.bytes.len() - self.at) as u64;
        if count > left / smallest_bytes {
            let reason = format!("the {left} bytes that are left cannot hold as many");
            return Err(field(what, count, reason));
        }
        Ok(())
    }
}
