//! Return codes of FastRPC (`AEE_*`), and their meaning for a user of this project.
//!
//! Codes from the DSP have [`DSP_OFFSET`] added, codes from the host do not. Four codes never have
//! it.
//!
//! SOURCE: names and numbers, qualcomm/fastrpc inc/AEEStdErr.h. Hints: where the library's source
//! returns them, and users' reports, named with each.

use std::ffi::c_int;
use std::fmt;

/// Offset of the DSP's codes (`DSP_AEE_EOFFSET`).
pub const DSP_OFFSET: u32 = 0x8000_0400;

/// Declares the codes and the table that [`describe`] looks them up in.
macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $c_name:literal, $hint:literal;)*) => {
        $($(#[$doc])* pub const $name: c_int = $value;)*
        const CODES: &[(c_int, &str, &str)] = &[$(($value, $c_name, $hint)),*];
    };
}

codes! {
    /// No error.
    SUCCESS = 0, "AEE_SUCCESS", "no error";
    /// Unknown error; the library also returns it for a failed system call.
    EUNKNOWN = -1, "AEE_EUNKNOWN", "no FastRPC device, or no permission to open it (/dev/fastrpc-cdsp, /dev/adsprpc-smd)";
    /// General failure.
    EFAILED = 0x1, "AEE_EFAILED", "general failure";
    /// Out of memory.
    ENOMEMORY = 0x2, "AEE_ENOMEMORY", "out of memory";
    /// Object already loaded.
    EALREADYLOADED = 0x5, "AEE_EALREADYLOADED", "the library is already loaded";
    /// The library cannot be loaded.
    EUNABLETOLOAD = 0x6, "AEE_EUNABLETOLOAD",
        "the DSP cannot load the library: it is not on DSP_LIBRARY_PATH or ADSP_LIBRARY_PATH, it is for another architecture, or unsigned modules were not allowed";
    /// Wrong state.
    EBADSTATE = 0xd, "AEE_EBADSTATE", "the process on the DSP has ended: it crashed or was killed";
    /// Invalid parameter.
    EBADPARM = 0xe, "AEE_EBADPARM", "invalid parameter";
    /// Value out of range.
    EBADITEM = 0x10, "AEE_EBADITEM", "value out of range";
    /// Not implemented.
    EUNSUPPORTED = 0x14, "AEE_EUNSUPPORTED",
        "not supported by this firmware: often unsigned modules are not allowed on this device";
    /// Insufficient privileges.
    EPRIVLEVEL = 0x15, "AEE_EPRIVLEVEL", "insufficient privileges";
    /// Not found.
    ERESOURCENOTFOUND = 0x16, "AEE_ERESOURCENOTFOUND", "resource not found";
    /// Already in progress, or there already.
    EALREADY = 0x1a, "AEE_EALREADY", "the library has a mapping of this file descriptor already";
    /// Bad memory pointer.
    EMEMPTR = 0x1d, "AEE_EMEMPTR", "bad memory pointer";
    /// Invalid handle.
    EINVHANDLE = 0x2c, "AEE_EINVHANDLE", "the handle is not open";
    /// Too many handles.
    EOUTOFHANDLES = 0x2d, "AEE_EOUTOFHANDLES", "too many open handles";
    /// No such name.
    ENOSUCH = 39, "AEE_ENOSUCH", "the process on the DSP has ended";
    /// A wait was interrupted; reported by users when the process on the DSP dies under load.
    EINTERRUPTED = 46, "AEE_EINTERRUPTED", "interrupted: the process on the DSP was stopped";
    /// Exception on the DSP.
    ECPUEXCEPTION = 0x30, "AEE_ECPUEXCEPTION", "the code on the DSP crashed";
    /// Invalid domain.
    EINVALIDDOMAIN = 0x39, "AEE_EINVALIDDOMAIN", "this chip has no such DSP";
    /// Invalid descriptor.
    EINVALIDFD = 0x3a, "AEE_EINVALIDFD", "the file descriptor is not of shared memory";
    /// The device node cannot be opened.
    EINVALIDDEVICE = 0x3b, "AEE_EINVALIDDEVICE", "the FastRPC device cannot be opened: missing, or no permission";
    /// No such module.
    ENOSUCHMOD = 0x3e, "AEE_ENOSUCHMOD", "no such module on the DSP";
    /// A symbol is missing.
    ENOSUCHSYMBOL = 0x42, "AEE_ENOSUCHSYMBOL",
        "the library on the DSP lacks a symbol: it is of another version, or for another firmware";
    /// No such device.
    ENOSUCHDEVICE = 0x43, "AEE_ENOSUCHDEVICE", "no such device";
    /// No such file.
    ENOSUCHFILE = 0x45, "AEE_ENOSUCHFILE", "file not found";
    /// No such handle.
    ENOSUCHHANDLE = 0x46, "AEE_ENOSUCHHANDLE", "no such handle";
    /// No such mapping.
    ENOSUCHMAP = 0x48, "AEE_ENOSUCHMAP", "the memory is not mapped on the DSP";
    /// Domain not initialized.
    EBADDOMAIN = 0x4b, "AEE_EBADDOMAIN", "the DSP is not initialized";
    /// Bad size.
    EBADSIZE = 0x4d, "AEE_EBADSIZE", "bad size";
    /// Bad descriptor.
    EBADFD = 0x4f, "AEE_EBADFD", "bad file descriptor";
    /// Bad ELF file.
    EBADELF = 0x52, "AEE_EBADELF", "the DSP's loader refuses the library's ELF file";
    /// System call failed.
    EIOCTL = 0x56, "AEE_EIOCTL", "a system call of the FastRPC driver failed";
    /// Opening failed.
    EFOPEN = 0x57, "AEE_EFOPEN", "a file or the FastRPC device cannot be opened";
    /// Mapping failed.
    EMMAP = 0x65, "AEE_EMMAP", "memory cannot be mapped on the DSP: its address space may be full";
    /// The process on the DSP is gone. The same number is also `AEE_ENORPCMEMORY`.
    ECONNRESET = 104, "AEE_ECONNRESET", "the DSP restarted, or the process on it was ended";
    /// Not initialized.
    ENOTINITIALIZED = 0x6b, "AEE_ENOTINITIALIZED", "not initialized";
    /// Unsupported request.
    EUNSUPPORTEDAPI = 0x6c, "AEE_EUNSUPPORTEDAPI", "the library or firmware is too old for this request";
    /// Invalid arguments.
    EINVARGS = 0x71, "AEE_EINVARGS", "invalid arguments";
    /// No connection.
    ECONNREFUSED = 0x72, "AEE_ECONNREFUSED",
        "no connection to the DSP: its driver is missing or stopped, or (Windows) the library is not signed";
    /// Unsigned module.
    EUNSIGNEDMOD = 0x81, "AEE_EUNSIGNEDMOD", "the library is not signed, and unsigned modules were not allowed";
    /// Invalid hash.
    EINVALIDHASH = 0x82, "AEE_EINVALIDHASH", "the library's signature does not fit";
    /// Bad address.
    EBADVA = 0x83, "AEE_EBADVA", "bad address on the DSP";
    /// Already mapped.
    EMAPALREADYPRESENT = 0x87, "AEE_EMAPALREADYPRESENT", "the memory is already mapped";
    /// No session left.
    ENOSESSION = 0x8a, "AEE_ENOSESSION", "no session left on the DSP";
    /// Would block.
    EWOULDBLOCK = 516, "AEE_EWOULDBLOCK", "would block";
    /// FastRPC itself failed.
    ERPC = 0x200, "AEE_ERPC", "FastRPC failed: the DSP's daemon (cdsprpcd) or its libraries may be missing";
    /// File handling failed.
    EFILE = 0x201, "AEE_EFILE", "FastRPC cannot read a file";
}

/// The DSP's form of a code: `dsp(EUNABLETOLOAD)` is 0x80000406.
#[must_use]
pub const fn dsp(code: c_int) -> c_int {
    // CAST: the same 32 bits as a signed number.
    DSP_OFFSET.wrapping_add(code.cast_unsigned()).cast_signed()
}

/// A return code as a user can read it: name, number, where to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribedCode(c_int);

/// `code` for log lines.
#[must_use]
pub const fn describe(code: c_int) -> DescribedCode {
    DescribedCode(code)
}

impl DescribedCode {
    /// Name and hint; `None` for an unknown code.
    fn find(self) -> Option<(&'static str, &'static str)> {
        let of = |code: c_int| CODES.iter().find(|entry| entry.0 == code);
        let bare = self.0.wrapping_sub(dsp(0));
        let entry = of(self.0).or_else(|| of(bare).filter(|_| bare > 0));
        entry.map(|(_, name, hint)| (*name, *hint))
    }
}

impl fmt::Display for DescribedCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.find() {
            Some((name, hint)) => write!(f, "{name} ({:#x}): {hint}", self.0),
            None => write!(f, "unknown FastRPC code {:#x}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_the_dsp_and_of_the_host_have_the_same_names() {
        assert_eq!(dsp(EUNABLETOLOAD).cast_unsigned(), 0x8000_0406);
        let text = describe(dsp(EUNABLETOLOAD)).to_string();
        assert!(
            text.starts_with("AEE_EUNABLETOLOAD (0x80000406): "),
            "{text}"
        );
        assert!(
            describe(EUNABLETOLOAD)
                .to_string()
                .starts_with("AEE_EUNABLETOLOAD (0x6): ")
        );
        assert_eq!(
            describe(0x1234_5678).to_string(),
            "unknown FastRPC code 0x12345678"
        );
        assert!(
            describe(-1)
                .to_string()
                .starts_with("AEE_EUNKNOWN (0xffffffff)")
        );
    }

    #[test]
    fn no_number_is_listed_twice() {
        for (i, entry) in CODES.iter().enumerate() {
            assert!(
                CODES[..i].iter().all(|other| other.0 != entry.0),
                "{entry:?}"
            );
        }
    }

    #[test]
    #[ignore = "needs FASTRPC_BINDINGS, made of FastRPC's headers: make test fetches them"]
    fn codes_are_those_of_fastrpcs_headers() {
        let mut header = test_kit::Header::of("FASTRPC_BINDINGS");
        header.expect("DSP_AEE_EOFFSET", DSP_OFFSET.cast_signed());
        for (code, name, _) in CODES {
            header.expect(name, *code);
        }
        header.check();
    }
}
