//! Return codes of this library, in FastRPC's numbering on the DSP.
//!
//! SOURCE: qualcomm/fastrpc inc/AEEStdErr.h: numbers, and `DSP_AEE_EOFFSET`, which the DSP adds to
//! them.

/// Adds the DSP's offset to a code.
const fn dsp(code: u32) -> i32 {
    (0x8000_0400 + code).cast_signed()
}

/// `AEE_EBADSTATE`: the session is being closed.
pub const BAD_STATE: i32 = dsp(0x0d);
/// `AEE_EBADPARM`: not the arguments of any method.
pub const BAD_PARAMETER: i32 = dsp(0x0e);
/// `AEE_EINVHANDLE`: nothing is open.
pub const INVALID_HANDLE: i32 = dsp(0x2c);
/// `AEE_EOUTOFHANDLES`: the session of this process is open.
pub const OUT_OF_HANDLES: i32 = dsp(0x2d);
