//! Proves the DSP's command loop against a simulated host in plain memory: products of every type
//! and form against exact sums, operations on tensors against ggml's definitions in f64, every
//! wrong field refused with its own detail, random bytes survived, corrupt rings closed, and the
//! same bytes on any number of threads.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

mod access;
mod attention;
mod attention_refusal;
mod block;
mod coherence;
#[path = "../common/mod.rs"]
mod common;
mod convolution;
mod copy;
mod driver;
mod elementwise;
mod epilogue;
mod hyper;
mod kept;
mod list;
mod matmul;
mod outer;
mod part;
mod place;
mod planes;
mod pool;
mod random;
mod recurrence;
mod refusal;
mod resident;
mod resize;
mod ring;
mod rows;
mod scan;
mod score;
mod seed;
mod sizes;
mod solve;
mod tasks;
mod tensor;
mod tensor_refusal;
mod threads;
mod unpacked_matmul;
