//! Proves that pack files are read as they were written, that every kind of malformed file is
//! refused with the name of the field, that damaged ones never cause a panic, and that damaged
//! payloads are never used.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod malformed;
mod payload;
mod raw;
