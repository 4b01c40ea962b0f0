//! The Windows half. What only a device needs is not there.

pub mod files;
pub mod libraries;
pub mod locks;
pub mod memory;
pub mod node;
pub mod process;
pub mod threads;
