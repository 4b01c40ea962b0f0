//! The stand-in for librknnrt, seen through its C functions: results, rules, memory, faults,
//! simultaneous calls, speed.
#![expect(unsafe_code, reason = "the functions under test are C functions")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "the reference narrows values that it made in range; a failed unwrap fails the test"
)]

mod common;
mod domain;
mod fault;
mod memory;
mod results;
mod rules;
mod shared;
mod speed;
mod traffic;
