//! Kernels over the vector type, and the drivers that run them.

pub mod matmul;
