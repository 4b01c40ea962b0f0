//! `memcpy`, `memmove` and `memset` for the DSP, which the compiler calls to copy and fill values.
//!
//! The ones that Rust's `compiler_builtins` brings are weak symbols and go word by word. These copy
//! a vector of 128 bytes per packet wherever source and destination start, and read no line that
//! holds none of the source's bytes, so they never touch a page of which the caller gave no byte.
//! They are assembly because the compiler turns a loop that copies into a call of `memcpy`.

core::arch::global_asm!(include_str!("bytes.s"), options(raw));
