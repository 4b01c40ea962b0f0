//! Registers the backend with the ggml that is linked into this program.
//!
//! The functions of ggml are left to the linker, so only a program that has ggml can be linked with
//! this module. There is glue for each version of the backend API whose headers the build found;
//! the program's version is determined at run time.
#![expect(unsafe_code, reason = "ggml and the glue are C")]

use std::ffi::{CStr, c_char, c_void};

use crate::config::Config;
use crate::ggml_version::{Api, Fit, KNOWN, fit_of, newer_line, ours};

unsafe extern "C" {
    safe fn ggml_version() -> *const c_char;
    fn ggml_backend_register(entry: *mut c_void);
}

/// The program's ggml does not work with this backend; the text tells which one to install.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UnfitGgml(String);

/// The functions of the glue that was compiled for one version of ggml's backend API.
struct Glue {
    differs: unsafe extern "C" fn() -> *const c_char,
    prove_params: unsafe extern "C" fn(),
    entry: unsafe extern "C" fn() -> *mut c_void,
}

macro_rules! glue {
    ($differs:ident, $prove_params:ident, $entry:ident) => {{
        unsafe extern "C" {
            fn $differs() -> *const c_char;
            fn $prove_params();
            fn $entry() -> *mut c_void;
        }
        Some(Glue {
            differs: $differs,
            prove_params: $prove_params,
            entry: $entry,
        })
    }};
}

impl Glue {
    /// Returns the glue for a version of the API, if the build found its headers.
    fn of(api: Api) -> Option<Self> {
        match api {
            #[cfg(glue_api2)]
            Api::Two => glue!(
                glue_differs_api2,
                glue_prove_params_api2,
                ggml_backend_rust_npu_reg_api2
            ),
            #[cfg(glue_api3)]
            Api::Three => glue!(
                glue_differs_api3,
                glue_prove_params_api3,
                ggml_backend_rust_npu_reg_api3
            ),
            #[cfg(not(all(glue_api2, glue_api3)))]
            _ => None,
        }
    }
}

/// Registers the NPUs with the ggml of this program, before it loads its first model.
///
/// The program gets the devices `HEX0`, `RKNPU0` and so on in addition to its others. A machine
/// without an NPU gets none, which is not an error. Calling it again changes nothing.
///
/// The environment variables are those of every program, such as `GGML_RUST_NPU_SIM`.
///
/// # Errors
/// [`UnfitGgml`] if the version or the structs of the program's ggml are not those that the glue
/// was compiled for.
pub fn register() -> Result<(), UnfitGgml> {
    static DONE: std::sync::OnceLock<Result<(), UnfitGgml>> = std::sync::OnceLock::new();
    DONE.get_or_init(register_once).clone()
}

fn register_once() -> Result<(), UnfitGgml> {
    // SAFETY: a constant that ends in NUL.
    let version = unsafe { CStr::from_ptr(ggml_version()) }.to_string_lossy();
    let config = Config::from_env().map_err(|error| UnfitGgml(error.to_string()))?;
    let (api, is_newer) = match fit_of(&version, config.ggml).map_err(UnfitGgml)? {
        Fit::Known(api) => (api, false),
        Fit::Newer(api) => (api, true),
    };
    let glue = Glue::of(api).ok_or_else(|| {
        UnfitGgml(format!(
            "{} was built without the headers of ggml {version}: set GGML_INCLUDE to the sources of this program's \
             ggml, and build it again",
            ours()
        ))
    })?;
    // SAFETY: the program's ggml has a version whose structs and signatures these are.
    let name = unsafe { (glue.differs)() };
    if !name.is_null() {
        // SAFETY: a constant that ends in NUL.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        return Err(UnfitGgml(format!(
            "this program's ggml {version} has another {name} than {} knows; {KNOWN}",
            ours()
        )));
    }
    if is_newer {
        log::warn!("{}", newer_line(&version));
        // SAFETY: as above; the structs agree.
        unsafe { (glue.prove_params)() };
    }
    // SAFETY: as above; the structs agree.
    let entry = unsafe { (glue.entry)() };
    // SAFETY: the entry lives as long as the process.
    unsafe { ggml_backend_register(entry) };
    Ok(())
}
