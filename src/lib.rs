//! A ggml backend for the NPUs of Qualcomm (Hexagon) and Rockchip.
//!
//! ```text
//!   llama.cpp ── ggml ── ggml-glue/ (C) ── include/npu.h ── abi ── backend: Device, Buffer, Stream
//!                                                                     │
//!                        ┌────────────────────────────────────────────┴──┐
//!                    hexagon/                                        rockchip/
//!   stream     a graph becomes one list of commands           each node is computed as it comes
//!   plan       nodes to commands, and their cost              nodes to calls, and how they are cut up
//!   pack       ggml's rows into tiles                         ggml's rows into native layouts, quantized
//!   device     session, command ring, address space           quantizes activations, runs the cores
//!   driver     libcdsprpc or its stand-in                     librknnrt or its stand-in
//!                        │                                               │
//!                  hexagon-ops (DSP kernels)                       rknpu-ops (host kernels)
//! ```
//!
//! **Loading.** ggml allocates a [`backend::Buffer`] and writes each tensor once; the buffer packs
//! weights as they come. **Computing.** The glue passes a graph; [`abi`] checks it and makes
//! [`backend::Node`]s, and [`backend::Stream::submit`] computes them: `plan` makes commands,
//! `device` executes them.
//!
//! | module | holds |
//! |---|---|
//! | [`error`], [`tensor`], [`graph`] | the error type; types and shapes; operations as ggml hands them over |
//! | [`config`] | the environment variables, the settings file, the rules |
//! | [`host_memory`] | memory that ggml owns, as slices |
//! | [`beside`] | packed copies of weights in memory that programs write in place |
//! | [`files`], [`gguf`], [`packfile`], [`dequantize`], [`loss`] | model files, and weights packed before they are loaded |
//! | [`reference`](mod@reference) | the oracle that self-tests and tests compare with |
//! | [`driver`] | common code for both vendors' libraries: loading, tracing |
//! | [`timeline`] | a record of the devices' work over time, as a file for Perfetto |
//! | [`backend`] | the traits that the families implement; finds devices; packs offline |
//! | [`hexagon`], [`rockchip`] | the families, with the same file names; neither knows the other |
//! | [`abi`] | the functions of `npu.h`: check, catch panics, call `backend` |
//! | [`ggml_version`] | the versions of ggml that a program may have |
//! | `register` | with the feature of that name: registers the backend with the ggml of a Rust program |
//!
//! `tests/architecture.rs` holds the modules to this order. `ARCHITECTURE.md` follows a weight and
//! a token through them.

pub mod abi;
pub mod backend;
pub mod beside;
pub mod config;
pub mod dequantize;
pub mod driver;
pub mod error;
pub mod files;
pub mod ggml_version;
pub mod gguf;
pub mod graph;
pub mod hexagon;
pub mod host_memory;
pub mod loss;
pub mod packfile;
pub mod reference;
#[cfg(feature = "register")]
mod register;
pub mod rockchip;
pub mod tensor;
pub mod timeline;

#[cfg(feature = "register")]
pub use register::{UnfitGgml, register};
