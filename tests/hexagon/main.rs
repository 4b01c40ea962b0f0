//! Proves that the Hexagon device computes the same as the reference, keeps every byte that is
//! written to its buffers, works within its address space, and survives a DSP that fails. All of it
//! on the stand-in.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![expect(
    clippy::cast_possible_truncation,
    reason = "random numbers are cut to size"
)]

mod alloc;
mod beside;
mod buffer;
mod common;
mod faults;
mod graph;
mod groups;
mod loader;
mod operands;
mod pack;
mod product;
mod recurrence;
mod requantized;
mod rows;
mod selftest;
mod space;
