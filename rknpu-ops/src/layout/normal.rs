//! B in the library's normal layouts, to the native one.

use super::{Elem, NativeB};

impl NativeB {
    /// Returns the bytes of a row-major B whose 4-bit elements take a byte each.
    #[must_use]
    pub fn normal_bytes(self, k: usize, n: usize) -> usize {
        k * n * self.elem.bytes(1)
    }

    /// Converts row-major B, `[K, N]` or transposed `[N, K]`, 4-bit elements a byte each, to this
    /// layout.
    ///
    /// - `normal`: [`Self::normal_bytes`] bytes
    #[must_use]
    pub fn from_normal(self, [k, n]: [usize; 2], normal: &[u8], is_transposed: bool) -> Vec<u8> {
        // The bytes of an element that stands alone.
        let size = self.elem.bytes(1);
        let mut out = vec![0; self.bytes(k, n)];
        for (i, element) in normal.chunks_exact(size).enumerate() {
            let (ki, ni) = if is_transposed {
                (i % k, i / k)
            } else {
                (i / n, i % n)
            };
            let index = self.index(ki, ni, k, n);
            if self.elem == Elem::I4 {
                out[index / 2] |= (element[0] & 0xf) << (index % 2 * 4);
            } else {
                out[index * size..][..size].copy_from_slice(element);
            }
        }
        out
    }
}
