//! Proves the stand-in for libcdsprpc through its C ABI: products end to end, each missing cache
//! operation caught, each fault, FastRPC's rules, several sessions.
#![expect(clippy::unwrap_used, reason = "a panic is a failure")]

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod coherence;
mod fault;
mod host;
mod product;
mod rules;
mod session;
mod speed;
