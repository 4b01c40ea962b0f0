//! Rockchip's own librknnrt 1.5.2 without an NPU, for `scripts/vendor_rknn.py`: an emulated kernel
//! driver and an emulated RK3588 below the unmodified library, and a bridge above it.
//!
//! ```text
//! the backend      the functions of librknnrt 2.3 (rknpu-ops/src/ffi)
//!    |             loaded from this library by GGML_RUST_NPU_RKNN_LIB
//! [bridge]         renames fields, adds the functions that 1.5.2 does not have
//!    |
//! librknnrt 1.5.2  the vendor's binary: checks shapes, cuts products into tasks, writes command streams
//!    |             open, mmap and ioctl come here, because this library is in LD_PRELOAD
//! [interpose]      the node /dev/dri/card0, or with RKNN_LOOP_KERNEL=rocket /dev/accel/accel0
//! [kernel]         memory objects (memfd), their 32-bit device addresses, submitted jobs
//!    |
//! [device]         executes the command streams; refuses a register that it does not know
//! ```
//!
//! The same driver and NPU are below `rknpu_ops::direct`, which needs no librknnrt: natively, in
//! the tests of `direct` here, and for whole programs with `RKNN_LOOP_STRICT` set. With
//! `RKNN_LOOP_KERNEL=rocket` the driver is Linux's.
//!
//! This folder has no code of the vendor. The device is written from public register descriptions.
//! If the library makes the same mistake as these, the tests cannot find it.

pub mod bridge;
mod device;
#[cfg(test)]
mod direct;
pub mod interpose;
mod kernel;
#[cfg(test)]
mod operands;
