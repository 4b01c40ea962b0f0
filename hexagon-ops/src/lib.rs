//! Everything that runs on Hexagon NPUs: tile layouts, vector (HVX) and matrix (HMX) operations,
//! and the kernels made of them.
//!
//! One source is built twice: for the DSP (`no_std`, `core::arch::hexagon`) and for the host, where
//! the same kernels run over a portable 128-byte vector type. A unit test, Miri or a debugger on
//! the host therefore runs the code that ships.
//!
//! | module | holds | depends on |
//! |---|---|---|
//! | [`layout`] | where each weight, scale and activation byte is; packing of weights | the choice of vectors in `hvx` |
//! | [`hvx`] | the vector type and its operations: `hexagon.rs` on the DSP, `host.rs` elsewhere | `layout` (line type) |
//! | [`hmx`] | the matrix unit: tile multiply, accumulator, scale block, store | `layout` |
//! | [`rt`] | VTCM arena, worker threads, DMA, cache operations, shared memory, arguments of remote calls | `layout` |
//! | [`ops`] | kernels and their drivers | all of the above |
//! | [`wire`] | the interface between both processors: ring, commands, completions and the table of operations | — |
//! | [`serve`] | the DSP's command loop: reads the ring, checks commands, runs kernels | `wire`, `rt`, `ops` |
//! | `ffi` | libcdsprpc's C ABI, host only: structs, constants, codes, function table | `rt` (arguments) |
//! | `sim` | the stand-in for libcdsprpc, host only: same C ABI, same rules, computes on the CPU | `ffi`, `serve`, crate `sim-common` |
//!
//! Unsafe code is confined to `hvx/`, `hmx/`, `rt/`, `ffi/` and `sim/`; the first three offer only
//! safe functions to the others.

#![cfg_attr(target_arch = "hexagon", no_std)]
#![cfg_attr(
    target_arch = "hexagon",
    feature(stdarch_hexagon, asm_experimental_arch)
)]

pub mod error;
#[cfg(not(target_arch = "hexagon"))]
pub mod ffi;
pub mod hmx;
pub mod hvx;
pub mod layout;
pub mod ops;
pub mod rt;
pub mod serve;
#[cfg(not(target_arch = "hexagon"))]
pub mod sim;
pub mod wire;
