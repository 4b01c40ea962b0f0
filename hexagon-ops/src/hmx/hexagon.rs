//! The matrix unit on the device: each operation is one packet, given by its words.
//!
//! LLVM does not know these instructions, so operands sit in fixed registers. A multiply is two
//! words of one packet, activation first (parse bits 01), weight last (parse bits 11); every other
//! operation is one word in one packet.

use core::arch::asm;

use super::{Fault, Form, MAX_DEEP, ScaleBlock};
use crate::layout::{F16_TILE_BYTES, Tile};

/// The second operand of a store, after its address: a tile's last byte on V68 and V69, as in their
/// programs.
///
/// SOURCE: "HMX feature validation on Snapdragon 888" for 2047, llama.cpp ggml-hexagon
/// htp/hmx-utils.h for 0.
const STORE_RANGE: usize = if cfg!(target_feature = "hvxv73") {
    0
} else {
    F16_TILE_BYTES - 1
};

/// Proof that a thread of the engine holds the matrix unit, or knowledge that there is none.
#[derive(Debug)]
pub struct Hmx(Form);

impl Hmx {
    /// Creates the proof without locking the unit.
    ///
    /// # Safety
    /// - Unless `form` is [`Form::Vectors`], each thread that calls a method holds the HMX lock and
    ///   the power vote for HMX at that time (a step's part for the unit stays on such a thread for
    ///   this reason).
    /// - No other `Hmx` exists meanwhile.
    /// - Tiles and scale blocks passed to its methods are in VTCM, mapped as one page.
    #[must_use]
    pub unsafe fn assume_held(form: Form) -> Self {
        Self(form)
    }

    /// Returns the form of the unit that computes the products. With [`Form::Vectors`], no method
    /// below may be called.
    #[must_use]
    pub fn form(&self) -> Form {
        self.0
    }

    /// Makes the vector units compute all products from now on.
    pub fn leave_alone(&mut self) {
        self.0 = Form::Vectors;
    }

    /// Sets both accumulators to zero: `mxclracc.hf`.
    pub fn clear(&mut self) {
        // SAFETY: the unit is held; the word has no operands.
        unsafe { asm!(".word 0xa6e0c013", options(nostack)) };
    }

    /// Sets the scale of the following stores: `bias = mxmem2(r0)`.
    pub fn load_scale(&mut self, block: &ScaleBlock) {
        // SAFETY: the unit is held; the block is aligned by its type and in VTCM by the
        // constructor's contract.
        unsafe {
            asm!(".word 0x9200c3fe", in("r0") core::ptr::from_ref(block), options(nostack, readonly))
        };
    }

    /// Multiplies up to 32 tiles:
    /// `{ activation.hf = mxmem(r0,r2):deep; weight.hf = mxmem(r1,r3) }`.
    ///
    /// - `act`: 32 rows, tiles of K one after the other
    /// - `weights`: as many tiles of one strip
    pub fn multiply(&mut self, act: &[Tile], weights: &[Tile]) {
        debug_assert!(act.len() == weights.len() && (1..=MAX_DEEP).contains(&act.len()));
        let last_byte = act.len() * F16_TILE_BYTES - 1;
        // SAFETY: the unit is held; both operands are `last_byte + 1` bytes of VTCM, aligned by
        // their type.
        unsafe {
            asm!(
                ".word 0x920042e2",
                ".word 0x9201e3ef",
                in("r0") act.as_ptr(),
                in("r1") weights.as_ptr(),
                in("r2") last_byte,
                in("r3") last_byte,
                options(nostack, readonly)
            );
        }
    }

    /// Stores the current accumulator and clears it; the other one becomes current:
    /// `mxmem(r0,r1):after.hf = acc`.
    pub fn store(&mut self, out: &mut Tile) {
        // SAFETY: the unit is held; the tile is aligned by its type and in VTCM by the
        // constructor's contract.
        unsafe {
            asm!(".word 0xa6e0e104", in("r0") core::ptr::from_mut(out), in("r1") STORE_RANGE, options(nostack))
        };
    }

    /// Returns `None`: the hardware reports no faults.
    pub fn take_fault(&mut self) -> Option<Fault> {
        None
    }
}
