//! A ggml backend for NPUs.
//!
//! ```text
//! llama.cpp ── ggml ── ggml-glue/ (C) ── include/npu.h ── abi.rs ── backend.rs ─┬─ plan.rs     what, and how cut up
//!                                                                             └─ device/     run it
//!                                                                                   └─ vendor/  librknnrt or stand-in
//! ```
//!
//! **Loading.** ggml allocates a buffer for packed weights and writes each tensor once: `backend::WeightBuffer` keeps
//! the bytes and has them packed by `repack`. **Computing.** The glue hands over a graph; `abi` checks it into
//! [`graph::Node`]s, `plan` decides how each is cut up, `device::rknpu` quantizes the activations, runs the cores and
//! writes the result.
//!
//! | module | holds | may use |
//! |---|---|---|
//! | [`error`], [`tensor`], [`caps`] | the error type; types and shapes; what each chip can do | `rknpu-ops`, `hexagon-ops` |
//! | [`rules`], [`config`] | which weight takes which arithmetic; the environment variables | the above |
//! | [`shm`] | memory that ggml owns, as slices | the above |
//! | [`files`], [`gguf`] | files mapped or written whole; model files, for the tool `ggml-npu` | [`tensor`] |
//! | [`packfile`], [`dequantize`] | weights packed before they are loaded; ggml's blocks to `f32`, for the tool | the above |
//! | [`graph`], [`repack`], [`mod@reference`] | what ggml handed over; weights into native layouts; the oracle | the above |
//! | [`ring`], [`plan`], [`vendor`] | the command ring; nodes to commands, pure; the vendors' functions behind safe calls | the above |
//! | [`device`] | executes commands | the above, but not `graph` or `plan` |
//! | [`selftest`], [`backend`] | joins the two | everything above |
//! | [`abi`] | the functions of `npu.h`: check, catch panics, call `backend` | everything above |

pub mod abi;
pub mod backend;
pub mod caps;
pub mod config;
pub mod dequantize;
pub mod device;
pub mod error;
pub mod files;
pub mod gguf;
pub mod graph;
pub mod packfile;
pub mod plan;
pub mod reference;
pub mod repack;
pub mod ring;
pub mod rules;
pub mod selftest;
pub mod shm;
pub mod tensor;
pub mod vendor;
