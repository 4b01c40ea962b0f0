//! Proves the DSP's command loop against a host that is played over plain memory: products of every type and form against
//! exact sums, every wrong field refused by its own detail, random bytes survived, corrupt rings closed.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

#[path = "../common/mod.rs"]
mod common;
mod driver;
mod product;
mod random;
mod refusal;
mod ring;
