//! The DSP's data caches, for memory that the host also accesses. In the host's build these
//! functions do nothing.
//!
//! Two user-level instructions act on an address: `dccleana` writes a dirty line to memory,
//! `dccleaninva` also drops it. A plain `dcinva` would suffice before reading, but it loses other
//! data of the line that the DSP wrote. Lines that only the host writes are never dirty, so
//! cleaning them costs nothing. `syncht` waits until the operations have reached memory.
//!
//! ```text
//! scalar loads and stores --> first-level cache, lines of 32 bytes, written back later
//! vector loads and stores -----------------> second-level cache, lines of 128 bytes --> memory
//! DMA engine -----------------------------------------------------------------------> memory
//! ```
//!
//! An operation acts on the line of 32 bytes that holds its address in the first-level cache, and
//! on that of 128 bytes in the second-level cache. Bytes that scalar instructions access therefore
//! need an operation for each 32 of them, and others one for each 128: [`Access`]. The processor
//! itself keeps both caches consistent for its own scalar and vector instructions.
//!
//! SOURCE: Hexagon V73 Programmer's Reference Manual, 5.10.3 to 5.10.5: `dccleana` and
//! `dccleaninva` look up the address in the data cache, and `dczeroa` allocates a line of 32 bytes
//! there; Linux arch/hexagon/mm/cache.c and LLVM compiler-rt lib/builtins/hexagon/memcpy.S have
//! lines of 32 bytes, too. Vector accesses bypass the first-level cache, according to reports of
//! Qualcomm's talk at Hot Chips 27 about the Hexagon 680; we found no manual that confirms it.
//! llama.cpp ggml-hexagon htp/hex-utils.h at ggml 0.26.0 uses `dccleaninva` and `syncht` in steps
//! of 128 bytes between the operations of a batch, and htp/main.c writes back and drops the whole
//! cache before and after one. Not run on a device.

#[cfg(target_arch = "hexagon")]
core::arch::global_asm!(include_str!("cache.s"), options(raw));

#[cfg(target_arch = "hexagon")]
unsafe extern "C" {
    fn ggml_rust_npu_invalidate_lines(first: usize, count: usize, step: usize);
    fn ggml_rust_npu_clean_lines(first: usize, count: usize, step: usize);
}

/// Bytes of a line of the second-level cache.
///
/// SOURCE: llama.cpp ggml-hexagon htp/hex-utils.h, `HEX_L2_LINE_SIZE` at ggml 0.26.0; QEMU
/// hw/hexagon, `l2line_size` of its configurations of V68 and later.
const LINE: usize = 128;

/// Bytes of a line of the first-level data cache. SOURCE: the module's documentation.
const SCALAR_LINE: usize = 32;

/// The instructions that access some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Vector instructions and the DMA engine only.
    Vector,
    /// Scalar instructions, and perhaps others.
    Scalar,
}

impl Access {
    /// Returns the bytes from one cache operation to the next.
    #[must_use]
    pub const fn step(self) -> usize {
        match self {
            Self::Vector => LINE,
            Self::Scalar => SCALAR_LINE,
        }
    }

    /// Returns the access of bytes that are accessed in both ways.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Vector, Self::Vector) => Self::Vector,
            _ => Self::Scalar,
        }
    }

    /// Returns `true` if cache operations for this access suffice for `other`.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        matches!((self, other), (Self::Scalar, _) | (_, Self::Vector))
    }
}

/// Makes sure that later reads of `bytes` bytes at `address` by `access` see the host's earlier
/// writes.
pub fn invalidate(address: *const u8, bytes: usize, access: Access) {
    #[cfg(target_arch = "hexagon")]
    if let Some((first, count)) = lines(address, bytes, access.step()) {
        // SAFETY: a cache operation changes no byte that a program can see. An unmapped address
        // would fault, but callers pass mapped ones.
        unsafe { ggml_rust_npu_invalidate_lines(first, count, access.step()) };
        barrier();
    }
    let _ = (address, bytes, access);
}

/// Makes `bytes` bytes at `address`, which `access` has written, visible to the host and to the DMA
/// engine.
pub fn clean(address: *const u8, bytes: usize, access: Access) {
    #[cfg(target_arch = "hexagon")]
    if let Some((first, count)) = lines(address, bytes, access.step()) {
        // SAFETY: as in `invalidate`.
        unsafe { ggml_rust_npu_clean_lines(first, count, access.step()) };
        barrier();
    }
    let _ = (address, bytes, access);
}

/// Most lines that one instruction fetches.
#[cfg(target_arch = "hexagon")]
const MOST_LINES: usize = 255;

/// Starts to fetch up to 32 KiB of the `bytes` bytes at `address` into the second-level cache, and
/// returns at once. It changes nothing that a program can see, and ends an earlier fetch of the
/// same thread that still runs. `address` must be mapped, because the instruction raises the
/// exceptions of a load for it.
///
/// SOURCE: Hexagon V73 Programmer's Reference Manual, 5.10.6.3 and `l2fetch(Rs,Rt)`: bits 7:0 of Rt
/// are the height, 15:8 the width in bytes, 31:16 the stride; the XNNPACK library uses it in the
/// same way (src/xnnpack/prefetch.h). Not run on a device.
#[inline(always)]
pub fn fetch(address: *const u8, bytes: usize) {
    #[cfg(target_arch = "hexagon")]
    {
        let lines = bytes.div_ceil(LINE).min(MOST_LINES);
        // SAFETY: the prefetch writes nothing, and callers pass the address of a row, which is
        // mapped.
        unsafe {
            core::arch::asm!(
                "l2fetch({0},{1})",
                in(reg) address,
                in(reg) LINE << 16 | LINE << 8 | lines,
                options(nomem, nostack)
            );
        }
    }
    let _ = (address, bytes);
}

/// Starts to fetch rows of `row_bytes` bytes at a distance of `stride_bytes` into the second-level
/// cache, as [`fetch`] does. Numbers of more than 16 bits are limited to the largest one.
///
/// SOURCE: Hexagon V73 Programmer's Reference Manual, `l2fetch(Rs,Rtt)`: bits 15:0 of Rtt are the
/// height, 31:16 the width in bytes, 47:32 the stride; llama.cpp ggml-hexagon htp/hex-utils.h,
/// `hex_l2fetch`, uses it in the same way. Not run on a device.
pub fn fetch_rows(address: *const u8, rows: usize, row_bytes: usize, stride_bytes: usize) {
    #[cfg(target_arch = "hexagon")]
    {
        let [rows, row_bytes, stride_bytes] =
            [rows, row_bytes, stride_bytes].map(|it| it.min(u16::MAX.into()) as u64);
        // SAFETY: the prefetch writes nothing, and callers pass the address of a row, which is
        // mapped.
        unsafe {
            core::arch::asm!(
                "l2fetch({0},{1})",
                in(reg) address,
                in(reg_pair) stride_bytes << 32 | row_bytes << 16 | rows,
                options(nomem, nostack)
            );
        }
    }
    let _ = (address, rows, row_bytes, stride_bytes);
}

/// Waits until all earlier memory and cache operations of this thread are done.
pub fn barrier() {
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    #[cfg(target_arch = "hexagon")]
    // SAFETY: the instruction waits, and changes nothing.
    unsafe {
        core::arch::asm!("syncht", options(nostack));
    }
}

/// Returns the address of the first cache line (of `line` bytes) that the bytes touch, and the
/// number of lines; `None` for 0 bytes.
#[cfg(any(target_arch = "hexagon", test))]
#[inline(always)]
fn lines(address: *const u8, bytes: usize, line: usize) -> Option<(usize, usize)> {
    // Line sizes are powers of two, so a shift replaces a division, which is a function call on the
    // DSP.
    let shift = line.trailing_zeros();
    let first = address.addr() >> shift;
    let last = address.addr().saturating_add(bytes.checked_sub(1)?) >> shift;
    Some((first << shift, last - first + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_scalar_instructions_take_an_operation_for_each_32() {
        let lines = |at, bytes, access: Access| {
            lines(core::ptr::without_provenance(at), bytes, access.step())
        };
        for (at, bytes, vector, scalar) in [
            (0x1000, 4, (0x1000, 1), (0x1000, 1)),
            (0x1060, 4, (0x1000, 1), (0x1060, 1)),
            (0x1000, 128, (0x1000, 1), (0x1000, 4)),
            (0x1000, 512, (0x1000, 4), (0x1000, 16)),
            (0x107f, 2, (0x1000, 2), (0x1060, 2)),
        ] {
            assert_eq!(
                lines(at, bytes, Access::Vector),
                Some(vector),
                "{at:#x}, {bytes}"
            );
            assert_eq!(
                lines(at, bytes, Access::Scalar),
                Some(scalar),
                "{at:#x}, {bytes}"
            );
        }
        assert_eq!(lines(0x1000, 0, Access::Scalar), None);
    }

    #[test]
    fn operations_for_scalar_instructions_suffice_for_vectors_but_not_the_reverse() {
        use Access::{Scalar, Vector};
        assert!(Scalar.covers(Vector) && Scalar.covers(Scalar) && Vector.covers(Vector));
        assert!(!Vector.covers(Scalar));
        assert_eq!(
            [Vector.or(Vector), Vector.or(Scalar), Scalar.or(Vector)],
            [Vector, Scalar, Scalar]
        );
    }
}
