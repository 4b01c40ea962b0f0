//! Proves that scaling and rotations change the weights of a model and not its results, for each
//! architecture: a small model is written, transformed by `ggml-npu quantize` without quantization,
//! and both are computed in `f64`. Also that quantization with statistics comes nearer to the
//! model, that low-power blocks are on their grid, and that unsupported models are refused by name.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::Path;

use self::common::run;

#[path = "../common/mod.rs"]
mod common;
mod decoder;
mod experts;
mod lpbq;
mod recipe;
mod refused;
mod rotate;
mod scale;
mod super_block;
mod tile;

/// Runs `ggml-npu quantize`, which must fail with an exit code and a message with all of `words`.
fn fails(from: &Path, to: &Path, args: &[&str], code: i32, words: &[&str]) {
    let output = run(from, to, args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
    for word in words {
        assert!(errors.contains(word), "{word:?} is not in {errors:?}");
    }
}
