//! The arithmetic and the data formats of Rockchip NPUs, independent of ggml and of the host crate.
//!
//! | module | holds | depends on |
//! |---|---|---|
//! | [`ffi`] | librknnrt's matmul API: structs, constants, function table | - |
//! | [`layout`] | index formulas of the native A, B and C layouts, one table per chip | `ffi` (type names) |
//! | [`quant`] | scales, block Hadamard transform | - |
//! | [`pack`] | weights and activations into the native layouts | `layout`, `quant`, `rotation` |
//! | [`attention`] | softmax between the two products of attention, values into native B | `layout`, `pack` (views of rows) |
//! | [`calibrate`] | clips for INT4 weights: percentile, squared error, KL divergence | `pack` (views of rows) |
//! | [`feedback`] | weights rounded so that later ones compensate the errors of earlier ones | `calibrate`, `quant` |
//! | [`proof`] | sums of a run, compared with those of the CPU | `layout` |
//! | [`rotation`] | signs and Hadamard blocks along K, a function of K alone | `quant` |
//! | [`int4`] | INT4 operands: nibbles, results of K segments with separate scales | `calibrate`, `feedback`, `layout`, `pack`, `quant`, `rotation` |
//! | [`scalar`], `neon` | the loops of `quant`, `pack` and `int4`: portable ones, and the same bits on aarch64's vector unit | types of these three |
//! | [`stream`] | command streams for an RK3588: registers, tasks, the limits of tasks that run on boards | `ffi` (type names), `layout` |
//! | [`direct`] | Rockchip's kernel driver without librknnrt: the same C ABI over `stream` | `ffi`, `stream`, crate `sim-common` (slots) |
//! | [`node`] | locks on the NPU's node, by which processes share the NPU | - |
//! | [`sim`] | the stand-in for librknnrt: same C ABI, same rules, computes on the CPU | `ffi`, `layout`, `node`, crate `sim-common` |

pub mod attention;
pub mod calibrate;
pub mod direct;
pub mod feedback;
pub mod ffi;
pub mod int4;
pub mod layout;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod node;
pub mod pack;
pub mod proof;
pub mod quant;
pub mod rotation;
mod round;
pub mod scalar;
pub mod sim;
pub mod stream;

#[cfg(target_arch = "aarch64")]
use neon as kernel;
#[cfg(not(target_arch = "aarch64"))]
use scalar as kernel;
