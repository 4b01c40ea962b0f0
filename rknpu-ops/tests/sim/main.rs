//! The stand-in for librknnrt, seen through its C functions: results, rules, memory, faults, speed.
#![expect(unsafe_code, reason = "the functions under test are C functions")]

mod common;
mod fault;
mod memory;
mod results;
mod rules;
mod speed;
