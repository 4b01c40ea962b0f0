//! The DSP's data cache over memory that the host also accesses. The host's build has nothing to
//! do.
//!
//! Two user-level instructions act on an address: `dccleana` writes a dirty line to memory,
//! `dccleaninva` also drops it. A plain `dcinva` would suffice before reading, but it loses other
//! data of the line that the DSP wrote. Lines that only the host writes are never dirty, so
//! cleaning them costs nothing. `syncht` waits until the operations have reached memory.
//!
//! SOURCE: Hexagon V73 Programmer's Reference Manual, cache instructions (user level); llama.cpp
//! ggml-hexagon htp/hex-utils.h uses `dccleaninva` and `syncht` for the same purpose. Not run on a
//! device.

#[cfg(target_arch = "hexagon")]
core::arch::global_asm!(include_str!("cache.s"), options(raw));

#[cfg(target_arch = "hexagon")]
unsafe extern "C" {
    fn ggml_rust_npu_invalidate_lines(first: usize, count: usize);
    fn ggml_rust_npu_clean_lines(first: usize, count: usize);
}

/// Bytes from one operation to the next: a line of the second-level cache.
///
/// SOURCE: llama.cpp ggml-hexagon htp/hex-utils.h, `HEX_L2_LINE_SIZE` at ggml 0.26.0; QEMU hw/hexagon,
/// `l2line_size` of its configurations of V68 and later.
#[cfg(target_arch = "hexagon")]
const LINE: usize = 128;

/// Makes later reads of `bytes` bytes at `address` see what the host wrote before.
pub fn invalidate(address: *const u8, bytes: usize) {
    #[cfg(target_arch = "hexagon")]
    if let Some((first, count)) = lines(address, bytes) {
        // SAFETY: a cache operation changes no byte that a program can see; an unmapped address
        // would be a fault, and callers pass mapped ones.
        unsafe { ggml_rust_npu_invalidate_lines(first, count) };
        barrier();
    }
    let _ = (address, bytes);
}

/// Makes `bytes` bytes at `address` visible to the host.
pub fn clean(address: *const u8, bytes: usize) {
    #[cfg(target_arch = "hexagon")]
    if let Some((first, count)) = lines(address, bytes) {
        // SAFETY: as in `invalidate`.
        unsafe { ggml_rust_npu_clean_lines(first, count) };
        barrier();
    }
    let _ = (address, bytes);
}

/// Most lines that one instruction brings.
#[cfg(target_arch = "hexagon")]
const MOST_LINES: usize = 255;

/// Starts to bring up to 32 KiB of `bytes` bytes at `address` into the second-level cache, and returns at once: a hint,
/// which changes nothing that a program can see.
///
/// SOURCE: Hexagon V73 Programmer's Reference Manual, `l2fetch(Rs,Rt)`: bits 7:0 of Rt are the height, 15:8 the width in
/// bytes, 31:16 the stride; the XNNPACK library uses it in the same way (src/xnnpack/prefetch.h). Not run on a device.
#[inline(always)]
pub fn fetch(address: *const u8, bytes: usize) {
    #[cfg(target_arch = "hexagon")]
    {
        let lines = bytes.div_ceil(LINE).min(MOST_LINES);
        // SAFETY: a hint, which neither faults nor writes.
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

/// Starts to bring rows of `row_bytes` bytes at a distance of `stride_bytes` into the second-level cache, as [`fetch`] does.
/// Numbers of more than 16 bits are limited to the largest one.
///
/// SOURCE: Hexagon V73 Programmer's Reference Manual, `l2fetch(Rs,Rtt)`: bits 15:0 of Rtt are the height, 31:16 the width in
/// bytes, 47:32 the stride; llama.cpp ggml-hexagon htp/hex-utils.h, `hex_l2fetch`, uses it in the same way. Not run on a
/// device.
pub fn fetch_rows(address: *const u8, rows: usize, row_bytes: usize, stride_bytes: usize) {
    #[cfg(target_arch = "hexagon")]
    {
        let [rows, row_bytes, stride_bytes] =
            [rows, row_bytes, stride_bytes].map(|it| it.min(u16::MAX.into()) as u64);
        // SAFETY: a hint, which neither faults nor writes.
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
    // SAFETY: waits, and changes nothing.
    unsafe {
        core::arch::asm!("syncht", options(nostack));
    }
}

/// Returns the address of the first line that the bytes touch, and the number of lines; `None` if there are no bytes.
#[cfg(target_arch = "hexagon")]
fn lines(address: *const u8, bytes: usize) -> Option<(usize, usize)> {
    let first = address.addr() & !(LINE - 1);
    let last = address.addr().saturating_add(bytes.checked_sub(1)?) / LINE;
    Some((first, last - first / LINE + 1))
}
