//! Arguments of a remote call as FastRPC passes them: a word that counts them, and an array of
//! buffers.
//!
//! SOURCE: qualcomm/fastrpc inc/remote.h (`REMOTE_SCALARS_*`, `remote_arg`). Of the union
//! `remote_arg` only the buffer is used here; its other members are not larger.

use core::ffi::c_void;

/// The word that describes a call: its method, and the number of buffers in and out.
///
/// ```text
/// bit 31..29 attribute · 28..24 method · 23..16 buffers in · 15..8 buffers out · 7..4 handles in · 3..0 handles out
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scalars(pub u32);

impl Scalars {
    /// Returns the word for a call of `method` (below 32) without handles.
    #[must_use]
    pub const fn new(method: u32, inputs: u8, outputs: u8) -> Self {
        Self((method & 31) << 24 | (inputs as u32) << 16 | (outputs as u32) << 8)
    }

    /// Returns the number of the method.
    #[must_use]
    pub const fn method(self) -> u32 {
        self.0 >> 24 & 31
    }

    /// Returns the number of buffers that the callee reads: the first arguments.
    #[must_use]
    pub const fn inputs(self) -> usize {
        (self.0 >> 16 & 0xff) as usize
    }

    /// Returns the number of buffers that the callee writes: the arguments after those.
    #[must_use]
    pub const fn outputs(self) -> usize {
        (self.0 >> 8 & 0xff) as usize
    }

    /// Returns the number of handles, in and out.
    #[must_use]
    pub const fn handles(self) -> usize {
        ((self.0 >> 4 & 15) + (self.0 & 15)) as usize
    }
}

/// One argument (`remote_arg`, its member `buf`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RemoteArg {
    /// Address of the buffer.
    pub pv: *mut c_void,
    /// Size of the buffer in bytes (`nLen`).
    pub len: usize,
}

/// The arguments of a call with at most one buffer in and one out, as slices.
#[derive(Debug)]
pub struct Call<'a> {
    /// Number of the method.
    pub method: u32,
    /// The buffer that the callee reads; empty if there is none.
    pub input: &'a [u8],
    /// The buffer that the callee writes; empty if there is none.
    pub output: &'a mut [u8],
}

impl<'a> Call<'a> {
    /// Decodes `scalars` and `args`. Returns `None` if the call has handles, more buffers, or a
    /// null address.
    ///
    /// # Safety
    /// - `args` is null, or has as many arguments as `scalars` specifies.
    /// - Each argument's address is null or that of `len` initialized bytes, at most `isize::MAX`.
    ///   For `'a`, inputs do not change, and outputs are not used elsewhere.
    #[must_use]
    pub unsafe fn new(scalars: Scalars, args: *const RemoteArg) -> Option<Self> {
        let (inputs, outputs) = (scalars.inputs(), scalars.outputs());
        if scalars.handles() != 0 || inputs > 1 || outputs > 1 {
            return None;
        }
        let (mut input, mut output): (&[u8], &mut [u8]) = (&[], &mut []);
        if inputs + outputs > 0 && args.is_null() {
            return None;
        }
        if inputs == 1 {
            // SAFETY: the caller passed at least one argument.
            let arg = unsafe { args.read() };
            if arg.pv.is_null() {
                return None;
            }
            // SAFETY: not null, so the caller guarantees `len` bytes that do not change for `'a`.
            input = unsafe { core::slice::from_raw_parts(arg.pv.cast::<u8>(), arg.len) };
        }
        if outputs == 1 {
            // SAFETY: the caller passed inputs + outputs arguments.
            let last = unsafe { args.add(inputs) };
            // SAFETY: as above.
            let arg = unsafe { last.read() };
            if arg.pv.is_null() {
                return None;
            }
            // SAFETY: not null, so the caller guarantees `len` bytes that nothing else uses for
            // `'a`.
            output = unsafe { core::slice::from_raw_parts_mut(arg.pv.cast::<u8>(), arg.len) };
        }
        Some(Self {
            method: scalars.method(),
            input,
            output,
        })
    }
}
