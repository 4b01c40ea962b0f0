//! `librknpu_matmul.so`: the matmul functions of Rockchip's librknnrt under their names, over our
//! own command streams ([`rknpu_ops::direct`]), on the kernel driver `rknpu` or on Linux's
//! `rocket`.
//!
//! A program that multiplies by rknn_matmul_api.h runs with it in the place of librknnrt. What is
//! different is listed at [`rknpu_ops::direct`]. The functions of models (`rknn_init` and others)
//! are not there.
//!
//! There is one machine for the process, started by the first call. Errors and warnings go to
//! stderr.
#![expect(unsafe_code, reason = "exported symbols are an unsafe attribute")]

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use log::{LevelFilter, Log, Metadata, Record};
use rknpu_ops::direct::node::DeviceNode;
use rknpu_ops::direct::{self, Machine};
use rknpu_ops::ffi::{Api, MatmulCtx, QuantParams, code};

/// Writes each line to stderr.
struct Stderr;

impl Log for Stderr {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        eprintln!("rknpu_matmul: {}", record.args());
    }

    fn flush(&self) {}
}

/// Returns the process's machine, if the kernel has a driver for it.
fn machine() -> Option<Api> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    let machine = MACHINE.get_or_init(|| {
        // No other crate in this library sets one.
        if log::set_logger(&Stderr).is_ok() {
            log::set_max_level(LevelFilter::Warn);
        }
        let started = DeviceNode::find().and_then(|node| direct::start(Box::new(node)));
        started
            .inspect_err(|error| log::error!("cannot drive the NPU: {error}"))
            .ok()
    });
    machine.as_ref().map(Machine::api)
}

rknpu_ops::export_rknn!(machine);

/// `rknn_matmul_get_quant_params`: there are no scales.
///
/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rknn_matmul_get_quant_params(
    _: MatmulCtx,
    _: *mut QuantParams,
    _: *mut f32,
) -> c_int {
    code::PARAM_INVALID
}
