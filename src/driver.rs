//! The common parts of both vendors' libraries: opening one, and tracing its calls.

pub(crate) mod loader;
pub mod trace;
