//! Locks on bytes of an NPU's node, by which processes share the NPU. The stand-in locks a file in
//! place of its node.
//!
//! ```text
//! byte    0      1       2      3      4 ..
//!         turn   queue   seat   call   machines of the stand-in
//! ```
//!
//! A node has no such bytes: the kernel compares the numbers alone ([`os::locks`]).

pub use os::locks::{is_locked, lock, share, unlock};

/// Byte of the process that is inside the vendor's library.
pub const TURN: u16 = 0;
/// Byte of the process that is next.
pub const QUEUE: u16 = 1;
/// Byte that each process shares which has something of the NPU open.
pub const SEAT: u16 = 2;
/// Byte of the process that is in a function of the stand-in.
pub const CALL: u16 = 3;
/// First of the bytes of the stand-in's machines.
pub const MACHINES: u16 = 4;
