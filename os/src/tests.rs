//! Tests of both halves.
#![cfg_attr(test, expect(clippy::unwrap_used, reason = "a panic is a failure"))]

use std::fs::File;

use crate::locks::{is_locked, lock, share, unlock};

fn opened_twice() -> [File; 2] {
    let path = std::env::temp_dir().join(format!("npu-node-{}", std::process::id()));
    let open = || {
        let mut options = File::options();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
    };
    let files = [open().unwrap(), open().unwrap()];
    std::fs::remove_file(path).unwrap();
    files
}

#[test]
fn a_byte_is_locked_by_one_open_file_or_shared_by_all() {
    let [a, b] = opened_twice();
    assert!(lock(&a, 0).unwrap() && lock(&a, 0).unwrap());
    assert!(!lock(&b, 0).unwrap() && !share(&b, 0).unwrap());
    assert!(is_locked(&b, 0).unwrap() && !is_locked(&a, 0).unwrap());
    // The other bytes are free.
    assert!(lock(&b, 1).unwrap() && share(&a, 2).unwrap() && share(&b, 2).unwrap());
    assert!(is_locked(&a, 2).unwrap() && !lock(&a, 2).unwrap());
    unlock(&a, 0).unwrap();
    assert!(lock(&b, 0).unwrap());
    drop(b);
    assert!(lock(&a, 0).unwrap() && lock(&a, 1).unwrap() && !is_locked(&a, 2).unwrap());
}
