//! What Rockchip NPUs understand, without knowing anything of ggml or of the host crate.
//!
//! | module | holds | depends on |
//! |---|---|---|
//! | [`ffi`] | librknnrt's matmul API: structs, constants, function table | - |
//! | [`layout`] | index formulas of the native A, B and C layouts, one table per chip | `ffi` (type names) |
//! | [`quant`] | scales, block Hadamard transform, calibration | - |
//! | [`pack`] | weights and activations into the native layouts | `layout`, `quant` |
//! | [`sim`] | the stand-in for librknnrt: same C ABI, same rules, computes on the CPU | `ffi`, `layout` |

pub mod ffi;
pub mod layout;
pub mod pack;
pub mod quant;
pub mod sim;
