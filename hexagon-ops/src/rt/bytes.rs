//! `memcpy`, `memmove` and `memset` for the DSP, which the compiler calls to copy and fill values.
//!
//! Those of Rust's `compiler_builtins` are weak symbols and copy word by word. These copy a vector
//! of 128 bytes per packet wherever source and destination start, and read no line that holds none
//! of the source's bytes, so they never touch a page in which the caller gave no byte. They are
//! assembly because the compiler turns a loop that copies into a call of `memcpy`.

core::arch::global_asm!(include_str!("bytes.s"), options(raw));
