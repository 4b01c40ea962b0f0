//! The table of libcdsprpc's functions that the host code calls, filled by a loader or by the
//! stand-in.
#![expect(
    unsafe_code,
    reason = "a symbol's address becomes a typed function pointer here"
)]

use std::ffi::{c_char, c_int, c_void};

use super::{Handle, RemoteArg};

/// Declares [`Api`], [`SYMBOLS`] and [`Api::from_symbols`] from lists of `field = "symbol": type`.
macro_rules! api_table {
    (
        { $($(#[$doc:meta])* $field:ident = $symbol:literal: $ty:ty;)* }
        optional { $($(#[$odoc:meta])* $ofield:ident = $osymbol:literal: $oty:ty;)* }
    ) => {
        /// The functions of libcdsprpc that the host uses. Those that return an integer return a
        /// [`super::code`].
        #[derive(Clone, Copy, Debug)]
        pub struct Api {
            $($(#[$doc])* pub $field: $ty,)*
            $($(#[$odoc])* pub $ofield: Option<$oty>,)*
        }

        /// The vendor's names of the functions, in the order of the fields of [`Api`].
        pub const SYMBOLS: &[&str] = &[$($symbol,)* $($osymbol),*];

        impl Api {
            /// Fills the table by asking `lookup` for the address of each of [`SYMBOLS`].
            ///
            /// # Errors
            /// Whatever `lookup` returns for the first name it cannot find, if older libraries have
            /// that name too.
            ///
            /// # Safety
            /// - An address that `lookup` returns is not null and is that of the libcdsprpc
            ///   function of that name.
            /// - The functions stay callable for as long as the table or a copy of it is used.
            pub unsafe fn from_symbols<E>(
                mut lookup: impl FnMut(&'static str) -> Result<*const c_void, E>,
            ) -> Result<Self, E> {
                Ok(Self {
                    $($field: {
                        let address = lookup($symbol)?;
                        // SAFETY: the caller vouches that this is the function of that name, whose
                        // C prototype is the field's type.
                        unsafe { std::mem::transmute::<*const c_void, $ty>(address) }
                    },)*
                    $($ofield: match lookup($osymbol) {
                        // SAFETY: as above.
                        Ok(address) => Some(unsafe {
                            std::mem::transmute::<*const c_void, $oty>(address)
                        }),
                        Err(_) => None,
                    },)*
                })
            }
        }
    };
}

api_table! {
    {
        /// Allocates shared memory, less than 2 GiB of it: (heap, flags, bytes); null on failure.
        rpcmem_alloc = "rpcmem_alloc": unsafe extern "C" fn(c_int, u32, c_int) -> *mut c_void;
        /// Frees memory of `rpcmem_alloc`.
        rpcmem_free = "rpcmem_free": unsafe extern "C" fn(*mut c_void);
        /// Returns the file descriptor of such memory; -1 for other addresses.
        rpcmem_to_fd = "rpcmem_to_fd": unsafe extern "C" fn(*mut c_void) -> c_int;
        /// Loads a module into the process on the DSP, and starts that process if need be: (URI,
        /// out handle).
        remote_handle64_open = "remote_handle64_open":
            unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
        /// Calls a method and blocks until it returns: (handle, [`super::Scalars`], arguments).
        remote_handle64_invoke = "remote_handle64_invoke":
            unsafe extern "C" fn(Handle, u32, *mut RemoteArg) -> c_int;
        /// Unloads a module.
        remote_handle64_close = "remote_handle64_close": unsafe extern "C" fn(Handle) -> c_int;
        /// Request about a session: (request, struct, its bytes).
        remote_session_control = "remote_session_control":
            unsafe extern "C" fn(u32, *mut c_void, u32) -> c_int;
        /// Request about a DSP: (request, struct, its bytes).
        remote_handle_control = "remote_handle_control":
            unsafe extern "C" fn(u32, *mut c_void, u32) -> c_int;
        /// Request about a handle: (handle, request, struct, its bytes).
        remote_handle64_control = "remote_handle64_control":
            unsafe extern "C" fn(Handle, u32, *mut c_void, u32) -> c_int;
        /// Lets a session map memory: (effective domain, descriptor, address or null, offset,
        /// bytes, flags).
        fastrpc_mmap = "fastrpc_mmap":
            unsafe extern "C" fn(c_int, c_int, *mut c_void, c_int, usize, c_int) -> c_int;
        /// Takes that back: (effective domain, descriptor, address or null, bytes).
        fastrpc_munmap = "fastrpc_munmap":
            unsafe extern "C" fn(c_int, c_int, *mut c_void, usize) -> c_int;
    }
    optional {
        /// As `rpcmem_alloc`, without its limit; missing in older libraries.
        rpcmem_alloc2 = "rpcmem_alloc2": unsafe extern "C" fn(c_int, u32, usize) -> *mut c_void;
        /// Makes the allocator ready. The open library does so itself, and forgets its allocations
        /// when it is called again.
        ///
        /// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c (`fastrpc_init_once`),
        /// src/rpcmem_linux.c.
        rpcmem_init = "rpcmem_init": unsafe extern "C" fn();
    }
}
