//! The plugin: a library that unmodified programs with ggml load, named in `GGML_BACKEND_PATH`.
//!
//! ```text
//!   program ── libggml ── ggml_backend_init ── host: finds ggml's functions, by the address of the caller
//!                                         │── ggml_version: which backend API, or a line that refuses it
//!                                         │── ggml-glue/differs.c: are the structs and numbers the same?
//!                                         └── ggml-glue/, compiled for API 2 and for API 3
//! ```
//!
//! One file serves all programs. It needs no library of ggml's by name, because programs have ggml
//! under different names, or in themselves, and some hide it from libraries that they load. It
//! exports `ggml_backend_init` alone.
//!
//! Numbers of operations and layouts of structs have changed in ggml without a new version of the
//! API. So before any device is opened, the plugin checks that the program's ggml agrees with the
//! facts that the known versions share. With a newer version it also checks where operations keep
//! their parameters.
#![expect(
    unsafe_code,
    reason = "ggml calls it, and it calls the glue, which is C"
)]

use std::ffi::c_void;
use std::panic::catch_unwind;
use std::ptr::null_mut;
#[cfg(glue)]
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

#[cfg(glue)]
mod glue;
mod host;

use ggml_rust_npu::config::Config;
#[cfg(glue)]
use ggml_rust_npu::ggml_version::Fit;
use ggml_rust_npu::ggml_version::{self as version, NewerGgml};
use host::{Host, Level};

/// Returns ggml's registry entry of this backend, always the same; NULL after a log line if the
/// plugin does not know the program's ggml.
///
/// # Safety
/// Only ggml calls this function, and the functions of ggml that it uses have ggml's types.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ggml_backend_init() -> *mut c_void {
    // The return address shows which library called.
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!("mov rdi, [rsp]", "jmp {}", sym registry_entry);
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!("mov x0, x30", "b {}", sym registry_entry);
}

extern "C" fn registry_entry(caller: *const c_void) -> *mut c_void {
    catch_unwind(|| {
        let Some(host) = Host::of(caller) else {
            eprintln!(
                "ggml-rust-npu: cannot find ggml in the program that loads {}",
                version::ours()
            );
            return null_mut();
        };
        load(&host).unwrap_or_else(|line| {
            // A program that loads its backends a second time must get the same answer.
            static SAID: Mutex<String> = Mutex::new(String::new());
            let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
            if *said != line {
                host.log(Level::Error, &line);
                *said = line;
            }
            null_mut()
        })
    })
    .unwrap_or(null_mut())
}

/// Returns how the user wants to treat a ggml that is newer than the known versions.
///
/// # Errors
/// A line that names the first variable that is not understood.
fn newer() -> Result<NewerGgml, String> {
    let config = Config::from_env().map_err(|error| error.to_string())?;
    Ok(config.ggml)
}

#[cfg(glue)]
fn load(host: &Host) -> Result<*mut c_void, String> {
    static LOADED: AtomicBool = AtomicBool::new(false);
    let version = host.version().unwrap_or_default();
    let (api, is_newer) = match version::fit_of(&version, newer()?)? {
        Fit::Known(api) => (api, false),
        Fit::Newer(api) => (api, true),
    };
    // Both would open the same devices, so each NPU would be listed twice.
    if !LOADED.load(Ordering::Relaxed) && host.has_backend(c"RUST_NPU") {
        return Err(format!(
            "this program has the backend RUST_NPU already, built in or from another file: {} is left out",
            version::ours()
        ));
    }
    glue::bind(host, &version)?;
    if let Some(name) = glue::differs(api) {
        return Err(format!(
            "this program's ggml {version} has another {name} than {} knows: install a release of the \
             program, or a newer ggml-rust-npu; {}",
            version::ours(),
            version::KNOWN
        ));
    }
    if is_newer {
        host.log(Level::Warn, &version::newer_line(&version));
        glue::prove_params(api);
    }
    LOADED.store(true, Ordering::Relaxed);
    Ok(glue::registry_entry(api))
}

#[cfg(not(glue))]
fn load(host: &Host) -> Result<*mut c_void, String> {
    let version = host.version().unwrap_or_default();
    version::fit_of(&version, newer()?)?;
    Err(format!(
        "{} was built without ggml's headers and cannot serve ggml {version}: run make fetch and build it again",
        version::ours()
    ))
}
