//! Tables of vendor functions behind safe calls: filled by `dlopen` or by a stand-in, and the same from here on.

pub mod fastrpc;
mod loader;
pub mod lock;
pub mod process;
pub mod rknn;
pub(crate) mod signals;
pub mod trace;
