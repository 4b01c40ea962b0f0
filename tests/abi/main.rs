//! Proves the C interface: calls the functions of `include/npu.h` as `ggml-glue/` does, on the
//! stand-in for a Hexagon NPU under strict coherence, and on that for a Rockchip NPU.
#![expect(unsafe_code, reason = "calls what C calls")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;
mod compute;
mod refusal;
mod rockchip;
