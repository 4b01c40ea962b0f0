use std::fs::File;
use std::io::ErrorKind;

use crate::locks::{is_locked, lock, share, unlock};
use crate::{NotHere, files, libraries, memory};

#[expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
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

#[test]
fn a_file_has_one_identity_under_all_of_its_names() {
    let own = std::env::current_exe().unwrap();
    let other = File::open(&own).unwrap().metadata().unwrap();
    let own = own.metadata().unwrap();
    assert!(files::identity(&own).is_some());
    assert_eq!(files::identity(&own), files::identity(&other));
    let folder = std::env::temp_dir().metadata().unwrap();
    assert_ne!(files::identity(&own), files::identity(&folder));
}

#[test]
fn bytes_are_read_to_the_end_of_a_file_and_not_past_it() {
    let (file, _) = memory::with_descriptor(c"bytes", 8).unwrap();
    files::write_all_at(&file, b"abc", 2).unwrap();
    let mut bytes = [1; 6];
    files::read_exact_at(&file, &mut bytes, 2).unwrap();
    assert_eq!(&bytes, b"abc\0\0\0");
    let error = files::read_exact_at(&file, &mut bytes, 3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn memory_is_known_by_its_descriptor_and_by_duplicates() {
    let [(a, map), (b, _)] = ["a", "b"].map(|_| memory::with_descriptor(c"memory", 4096).unwrap());
    assert_eq!(map.len(), 4096);
    #[expect(unsafe_code, reason = "the descriptor is open")]
    // SAFETY: the file is open.
    let copy = unsafe { memory::Descriptor::duplicate(memory::number(&a)) }.unwrap();
    assert_ne!(copy.number(), memory::number(&a));
    assert!(memory::is_behind(&a, copy.number()) && !memory::is_behind(&b, copy.number()));
}

#[test]
fn code_is_found_in_the_file_that_has_it() {
    let here = code_is_found_in_the_file_that_has_it as *const std::ffi::c_void;
    let file = libraries::file_of(here).unwrap().canonicalize().unwrap();
    assert_eq!(
        file,
        std::env::current_exe().unwrap().canonicalize().unwrap()
    );
    assert!(libraries::file_of(std::ptr::null()).is_none());
}

#[test]
fn what_is_missing_is_named() {
    let error = std::io::Error::from(NotHere("duplicates of descriptors"));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert_eq!(
        text,
        "duplicates of descriptors: not on this operating system"
    );
}
