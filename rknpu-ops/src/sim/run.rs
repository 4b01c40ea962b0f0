//! One run: from bound memory to byte slices.
#![expect(
    unsafe_code,
    reason = "bound memory is shared with the caller by the rules of the C API"
)]

use std::ffi::c_int;
use std::sync::Arc;

use super::compute::{self, Multiplication};
use super::profile::{Accepted, Dims};
use super::tensor_mem::{DeviceAllocation, DeviceSide, MemoryRange};
use super::{POISON, vendor_error};
use crate::ffi::code;

/// Source of an operand of a run.
#[derive(Clone, Debug)]
pub(super) enum Operand {
    /// The caller's memory, native.
    Bound(MemoryRange),
    /// A native copy of the caller's memory, made when it was bound.
    Copied(Arc<Vec<u8>>),
}

/// Operands and parameters of a run.
pub(super) struct RunRequest<'a> {
    pub(super) shape: Dims,
    pub(super) accepted: &'a Accepted,
    /// Scales of A, B and C.
    pub(super) scales: [f32; 3],
    pub(super) a: &'a Operand,
    pub(super) b: &'a Operand,
    pub(super) c: &'a MemoryRange,
    /// `true` if the result must be wrong.
    pub(super) spoilt: bool,
}

impl RunRequest<'_> {
    /// Reads A and B, writes C.
    ///
    /// # Safety
    /// - The caller does not use the bound memory during the call.
    /// - No two concurrent runs write the same C, or memory that another one reads.
    pub(super) unsafe fn execute(&self) -> Result<(), c_int> {
        let Dims { m, k, n } = self.shape;
        let layout = &self.accepted.layout;
        let [a_len, b_len, c_len] = [
            layout.a.bytes(m, k),
            layout.b.bytes(k, n),
            layout.c.bytes(m, n),
        ];
        let c_range = self.c.first(c_len).ok_or(code::PARAM_INVALID)?;
        for (operand, len) in [(self.a, a_len), (self.b, b_len)] {
            if let Operand::Bound(region) = operand
                && region.overlaps(len, self.c, c_len)
            {
                vendor_error!("rknn_matmul_run, C overlaps an input");
                return Err(code::PARAM_INVALID);
            }
        }
        // SAFETY: the caller does not use C during the call.
        let is_clean = unsafe { self.c.is_clean(c_len) };
        // SAFETY: the caller does not use C during the call.
        unsafe { self.c.make_stale(c_len) };
        let mut sides = Sides(Vec::with_capacity(3));
        for operand in [self.a, self.b] {
            if let Operand::Bound(region) = operand {
                sides.take(region);
            }
        }
        sides.take(self.c);
        // SAFETY: the caller does not write A during the call, and C does not overlap it.
        let a = unsafe { sides.read(self.a, a_len) }?;
        // SAFETY: the caller does not write B during the call, and C does not overlap it.
        let b = unsafe { sides.read(self.b, b_len) }?;
        // SAFETY: the caller does not use C during the call, and A and B do not overlap it.
        let c = unsafe { sides.of(self.c)?.write(c_range) };
        if self.accepted.zeros {
            c.fill(0);
            return Ok(());
        }
        let job = Multiplication {
            shape: self.shape,
            layout,
            a,
            b,
            native_c: self.accepted.native_ac,
            scales: self.scales,
        };
        compute::run(&job, c);
        if self.spoilt {
            // Moves every atom of 16 bytes to the next place, and clears the first.
            let atom = 16.min(c_len);
            c.copy_within(..c_len - atom, atom);
            c[..atom].fill(0);
        }
        if !is_clean {
            vendor_error!(
                "dirty lines of the CPU's cache are written back over {c_len} bytes of results"
            );
            c.fill(POISON);
        }
        Ok(())
    }
}

/// The device sides of a run's allocations, each locked only once: a second shared lock of the same
/// thread could wait for a writer that waits for the first.
struct Sides<'a>(Vec<(&'a Arc<DeviceAllocation>, DeviceSide<'a>)>);

impl<'a> Sides<'a> {
    fn take(&mut self, region: &'a MemoryRange) {
        if self.of(region).is_err() {
            self.0
                .push((&region.allocation, region.allocation.device()));
        }
    }

    fn of(&self, region: &MemoryRange) -> Result<&DeviceSide<'a>, c_int> {
        self.0
            .iter()
            .find(|(allocation, _)| Arc::ptr_eq(allocation, &region.allocation))
            .map(|(_, side)| side)
            .ok_or(code::FAIL)
    }

    /// Returns the first `len` bytes of an operand.
    ///
    /// # Safety
    /// - Nothing writes them while the slice lives.
    unsafe fn read<'s>(&'s self, operand: &'s Operand, len: usize) -> Result<&'s [u8], c_int> {
        match operand {
            Operand::Copied(bytes) => Ok(bytes),
            Operand::Bound(region) => {
                let range = region.first(len).ok_or(code::PARAM_INVALID)?;
                // SAFETY: guaranteed by the caller.
                Ok(unsafe { self.of(region)?.read(range) })
            }
        }
    }
}
