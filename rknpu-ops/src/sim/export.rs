//! The C functions under the vendor's names, for a stand-in that is loaded as `librknnrt.so`.
//!
//! There is one machine for the process, started by the first call that needs it: the first
//! Rockchip chip that `GGML_RUST_NPU_SIM` lists, with the options of [`Options::from_env`].
#![expect(unsafe_code, reason = "exported symbols are an unsafe attribute")]

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use super::{Machine, Options, start};
use crate::ffi::Api;
use crate::layout::Soc;

/// Returns the process's machine, if the environment requests one.
fn machine() -> Option<Api> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    let machine = MACHINE.get_or_init(|| {
        sim_common::from_env("librknnrt", "Rockchip", Soc::from_name, |soc| {
            Options::from_env(soc).and_then(start)
        })
    });
    machine.as_ref().map(Machine::api)
}

crate::export_rknn!(machine);
