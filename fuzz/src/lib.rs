//! Shared by the fuzz targets: decisions from bytes, and the C interface as C sees it.

pub mod border;

/// Longest message about a file, in bytes: a name and a value of 160 characters, and why it is
/// refused.
const MESSAGE_BYTES: usize = 2048;

/// Fails if a message about a file is not one short line.
///
/// # Panics
/// Then.
pub fn check_message(error: &dyn std::error::Error) {
    let text = error.to_string();
    assert!(text.len() <= MESSAGE_BYTES, "{} bytes", text.len());
    assert!(!text.contains(char::is_control), "{text:?}");
}

/// Bytes that determine the decisions of a run. After the last byte every decision is zero, so each
/// input ends.
#[derive(Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns `true` if no bytes are left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `N` bytes, zeros after the end.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let count = N.min(self.0.len());
        let (now, rest) = self.0.split_at(count);
        self.0 = rest;
        let mut bytes = [0; N];
        bytes[..count].copy_from_slice(now);
        bytes
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    /// The next four bytes as a number.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next eight bytes as a number.
    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `n`, from one byte.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    /// One of `all`.
    ///
    /// # Panics
    /// If `all` is empty.
    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// Returns the bytes up to the next `end`, which is consumed, or all bytes that are left.
    pub fn until(&mut self, end: u8) -> &'a [u8] {
        let all = self.0;
        let length = all.iter().position(|byte| *byte == end);
        let (now, rest) = all.split_at(length.unwrap_or(all.len()));
        self.0 = rest.get(1..).unwrap_or_default();
        now
    }

    /// All bytes that are left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}
